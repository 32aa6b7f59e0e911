"""A classifier as a folder: config.json, model.safetensors and a model card, never pickle."""

import hashlib
import json
import shutil
import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vecroute.encoders.loading import pick_device
from vecroute.storage import write_file

FORMAT = "vecroute.RoutingClassifier"
ENCODER_OPTIONS = ("depths", "max_length", "stride", "special_tokens")
# What belongs to a place or a run, not to the classifier; and what is saved with the encoder.
NOT_SAVED = {"cache", "cache_bytes", "checkpoint", "device", "verbose", "class_weight"}
NOT_SAVED |= {"encoder", "revision", *ENCODER_OPTIONS}


def save_classifier(classifier: Any, folder: Path, overwrite: bool, about: dict) -> None:
    """Write to a temporary folder beside, then rename it."""
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} exists: choose another folder, or remove it first")
    config = describe(classifier, about)
    weights = {name: p.detach().cpu().contiguous() for name, p in classifier.head_.state_dict().items()}
    # Each file knows the other, so that a change to one of them shows.
    data = save(weights, {"config_sha256": config_sha256(config)})
    config["model_sha256"] = hashlib.sha256(data).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    old = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.old")
    try:
        temporary.mkdir()
        write_file(temporary / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        write_file(temporary / "model.safetensors", data)
        write_file(temporary / "README.md", model_card(config).encode())
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def describe(classifier: Any, about: dict) -> dict[str, Any]:
    """All that is needed to build the classifier again, and where it comes from."""
    encoder, params = classifier.encoder_, classifier.get_params(deep=False)
    return {
        "format": FORMAT,
        "vecroute": version("vecroute"),
        "classes": classifier.classes_.tolist(),
        "params": {name: value for name, value in params.items() if name not in NOT_SAVED},
        "samples": "images" if hasattr(encoder, "grid") else "texts",
        "encoder": {
            "name": encoder.name,
            "revision": encoder.revision,
            "weights_sha256": encoder.weights_sha256,
            "tokenizer_sha256": encoder.tokenizer_sha256,
            **{name: getattr(encoder, name) for name in ENCODER_OPTIONS},
            "depth": encoder.depth,
            "d_emb": encoder.d_emb,
        },
        "n_texts": classifier.n_texts_,
        "validation_accuracy": classifier.validation_accuracy_,
        "history": classifier.history_,
        "examples": getattr(classifier, "examples_", []),
        "about": about,
    }


def load_classifier(cls: type, folder: Path, encoder: Any, device: str | None, verbose: bool | None) -> Any:
    """Read, check and build; see ``RoutingClassifier.from_pretrained``."""
    config = read_config(folder)
    weights = read_weights(folder, config)
    origin = config["encoder"]
    classifier = cls(
        origin["name"] if encoder is None else encoder,
        revision=origin["revision"],
        **{name: origin[name] for name in ENCODER_OPTIONS},
        **config["params"],
        device=device,
        verbose=verbose,
    )
    target = pick_device(device)
    classifier.encoder_ = classifier._load_encoder(target)
    classifier.classes_ = np.asarray(config["classes"])
    classifier.weights_sha256_ = origin["weights_sha256"]
    classifier.n_texts_, classifier.history_ = config["n_texts"], config["history"]
    classifier.validation_accuracy_, classifier.about_ = config["validation_accuracy"], config["about"]
    classifier.examples_ = config.get("examples", [])
    for name in ("weights_sha256", "tokenizer_sha256"):
        found = getattr(classifier.encoder_, name)
        if found != origin[name]:
            raise ValueError(
                f"encoder {classifier.encoder_.name!r} is not the one that {folder} was fitted with: its "
                f"{name} is {found}, expected {origin[name]}"
            )
    classifier.head_ = classifier._new_head(classifier.encoder_, len(classifier.classes_))
    try:
        classifier.head_.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"the head in {folder}, saved by vecroute {config['vecroute']}, is not the one that "
            f"{version('vecroute')} makes with its options ({str(error).splitlines()[-1].strip()})"
        ) from error
    classifier.head_.to(target).eval()
    return classifier


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder with a classifier")
    try:
        config = json.loads((folder / "config.json").read_bytes())
        if config["format"] != FORMAT:
            raise ValueError(f"its format is {config['format']}")
    except FileNotFoundError:
        raise ValueError(f"{folder} has no classifier: config.json is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"config.json in {folder} is damaged or of something else: {error}") from error
    return config


def read_weights(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of the head, after checking that both files are as they were written."""
    path = folder / "model.safetensors"
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ValueError(f"{folder} has no classifier: model.safetensors is missing") from None
    if found != config.get("model_sha256"):
        raise ValueError(f"model.safetensors in {folder} is damaged or was changed: its sha256 is {found}")
    try:
        with safe_open(path, "pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get("config_sha256")
    except SafetensorError as error:
        raise ValueError(f"model.safetensors in {folder} is damaged: {error}") from error
    if config_sha256(config) != expected:
        raise ValueError(f"config.json in {folder} was changed since it was saved")
    return weights


def config_sha256(config: dict[str, Any]) -> str:
    rest = {name: value for name, value in config.items() if name != "model_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def model_card(config: dict[str, Any]) -> str:
    """README.md, as the Hugging Face hub shows it."""
    encoder, n, classes = config["encoder"], config["n_texts"], config["classes"]
    accuracy = config["validation_accuracy"]
    samples = config["samples"]
    task, example = ("image", "some.jpg") if samples == "images" else ("text", "some text")
    position = "patch" if samples == "images" else "token"
    validated = "not validated" if accuracy is None else f"{accuracy:.3f} on {n['validation']} {samples}"
    results = "".join(f"| {name} | {value} |\n" for name, value in config["about"].items())
    named = ", ".join(f"`{label}`" for label in classes[:50]) + (", ..." if len(classes) > 50 else "")
    revision = f", revision `{encoder['revision']}`" if encoder["revision"] else ""
    return f"""---
library_name: vecroute
pipeline_tag: {task}-classification
tags: [{task}-classification, vecroute, explainability]
---

# {task.capitalize()} classifier

It routes the hidden states of every {position} at every depth of a frozen Transformer to class scores, and
says what each of them added.

| | |
|---|---|
| classes | {named} |
| {samples} learned from | {n["train"]} |
| validation accuracy | {validated} |
| encoder | `{encoder["name"]}`{revision} |
| sha256 of the encoder's weights | `{encoder["weights_sha256"]}` |
| head | `{config["params"]["head"]}` |
| vecroute | {config["vecroute"]} |
{results}
The encoder is not part of this folder: it is loaded by its name, and checked.

```python
import vecroute as vr

classifier = vr.RoutingClassifier.from_pretrained("path/to/this/folder")
classifier.predict(["{example}"])
classifier.explain("{example}").to_html("why.html")
```
"""
