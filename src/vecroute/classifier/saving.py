"""Save a classifier to a folder and load it: config.json, model.safetensors, a model card, never pickle."""

import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vecroute.classifier.card import model_card
from vecroute.classifier.estimate import Estimate
from vecroute.classifier.parts import as_python, encoder_for, new_head, ready
from vecroute.encoders.finding import BUILT_IN, first_line
from vecroute.encoders.identity import Identity, difference
from vecroute.encoders.loading import pick_device
from vecroute.storage import put_folder, remove_abandoned, temporary_place, write_file

FORMAT = "vecroute.RoutingClassifier"
VERSION = 1  # version of the format; folders of another version are refused
FILES = {"config.json", "model.safetensors", "README.md"}
CONFIG_BYTES = 64 * 1024**2  # a longer config.json is refused
MAX_ITERS = 1000  # without this limit, a forged config.json could make a prediction take years
INSIDE = "./"  # prefix in config.json of an encoder inside the classifier's folder
ENCODER_OPTIONS = ("depths", "max_length", "stride", "special_tokens")
# Parameters that belong to a machine or a run, not to the classifier, or that are saved with the encoder.
NOT_SAVED = {"cache", "cache_bytes", "checkpoint", "device", "verbose", "class_weight"}
NOT_SAVED |= {"encoder", "revision", *ENCODER_OPTIONS}
# The entries of a configuration and their types. Predictions depend on all of these parameters.
ENTRIES: dict[str, Any] = {"classes": list, "params": dict, "encoder": dict, "samples": str, "vecroute": str}
ENTRIES |= {"n_texts": dict, "validation_accuracy": float | None, "history": list, "about": dict}
ENTRIES |= {"temperature": float, "estimate": dict | None}
ENCODER_ENTRIES: dict[str, Any] = {"name": str, "revision": str | None, "depths": list, "stride": int}
ENCODER_ENTRIES |= {"max_length": int | None, "special_tokens": bool, "depth": int, "d_emb": int}
ENCODER_ENTRIES |= {"weights": str, "preparation": str, "configuration": dict, "files": dict}
PARAMS: dict[str, Any] = {"head": str, "head_options": dict | None, "multi_label": bool, "random_state": int}


def save_classifier(
    classifier: Any, folder: Path, overwrite: bool, about: dict, *, elsewhere: bool = False
) -> None:
    """Write the classifier to a temporary folder beside the target, then rename it.

    Args:
        classifier, folder, overwrite, about: see ``RoutingClassifier.save_pretrained``.
        elsewhere: True if the folder goes to another machine. The path of the encoder is then left as given.
    """
    encoder, _ = ready(classifier)
    folder = Path(os.path.abspath(folder))
    inside = place_inside(encoder.name, folder)
    check_place(folder, overwrite, inside)
    config = describe(classifier, about)
    if inside is not None:
        config["encoder"]["name"] = INSIDE + inside.as_posix()
    elif not elsewhere:
        config["encoder"]["name"] = from_anywhere(encoder.name)
    weights = {name: p.detach().cpu().contiguous() for name, p in classifier.head_.state_dict().items()}
    # Each file holds a checksum of the other, so that a change to one of them is noticed.
    data = save(weights, {"config_sha256": config_sha256(config)})
    config["model_sha256"] = hashlib.sha256(data).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder)
    temporary = temporary_place(folder)
    try:
        temporary.mkdir()
        write_file(temporary / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        write_file(temporary / "model.safetensors", data)
        write_file(temporary / "README.md", model_card(config).encode())
        if inside is not None:
            shutil.copytree(folder / inside, temporary / inside, copy_function=link)
        put_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_place(folder: Path, overwrite: bool, inside: Path | None = None) -> None:
    """Check that a classifier may be written to a folder.

    Args:
        folder: a folder that does not exist yet. With overwrite=True it may be the folder of a classifier.
        overwrite: True to replace that classifier.
        inside: the place of the encoder inside the folder. The encoder stays there.

    Raises:
        ValueError: the folder exists, or it is a file, a link, or a folder that holds other files.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is a {'link' if folder.is_symlink() else 'file'}: choose another folder")
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} - ({inside.parts[0]} if inside is not None else set())
    if not overwrite and (names or inside is None):
        raise ValueError(f"{folder} exists: choose another folder, or remove it first (or overwrite=True)")
    others = sorted(name for name in names if name not in FILES or not (folder / name).is_file())
    if others := [*others, *beside(folder, inside)]:
        raise ValueError(f"{folder} is not replaced: it has {others[0]!r}, not a file of a classifier")
    if not names:
        return
    try:
        read_config(folder)
    except ValueError as error:
        raise ValueError(
            f"{folder} is not replaced: it is not the folder of a classifier: {error}"
        ) from error


def beside(folder: Path, inside: Path | None) -> list[str]:
    """Name the files beside the encoder in the folders on the way to it. Only the encoder would be kept."""
    way = [] if inside is None else [inside, *inside.parents][:-2]  # without the first folder and "."
    found = (path for place in way for path in (folder / place.parent).iterdir() if path.name != place.name)
    return sorted(str(path.relative_to(folder)) for path in found)


def place_inside(encoder: str, folder: Path) -> Path | None:
    """Return the place of the encoder relative to the folder, None if it is elsewhere."""
    place, folder = Path(encoder).expanduser().resolve(), folder.resolve()
    found = place.is_dir() and place != folder and place.is_relative_to(folder)
    return place.relative_to(folder) if found else None


def from_anywhere(encoder: str) -> str:
    """Return the name of an encoder. A folder becomes an absolute path, valid in any working directory."""
    place = Path(encoder).expanduser()
    return os.path.abspath(place) if encoder not in BUILT_IN and place.is_dir() else encoder


def link(source: str, target: str) -> None:
    """Make a hard link to a file, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def describe(classifier: Any, about: dict) -> dict[str, Any]:
    """Return everything needed to build the classifier again, and its origin."""
    encoder, params = classifier.encoder_, classifier.get_params(deep=False)
    # Save the options that None stood for, because a later version may replace None by others.
    params["head_options"] = getattr(classifier.head_, "options", params["head_options"])
    return {
        "format": FORMAT,
        "format_version": VERSION,
        "vecroute": version("vecroute"),
        "classes": classifier.classes_.tolist(),
        "params": {name: as_python(value) for name, value in params.items() if name not in NOT_SAVED},
        "samples": "images" if hasattr(encoder, "grid") else "texts",
        "encoder": {
            "name": encoder.name,
            "revision": encoder.revision,
            **encoder.identity._asdict(),
            **{name: getattr(encoder, name) for name in ENCODER_OPTIONS},
            "depth": encoder.depth,
            "d_emb": encoder.d_emb,
        },
        "n_texts": classifier.n_texts_,
        "validation_accuracy": classifier.validation_accuracy_,
        "temperature": classifier.temperature_,
        "estimate": None if classifier.estimate_ is None else asdict(classifier.estimate_),
        "history": classifier.history_,
        "examples": getattr(classifier, "examples_", []),
        "about": about,
    }


def load_classifier(cls: type, folder: Path, encoder: Any, device: str | None, verbose: bool | None) -> Any:
    """Read and check a folder, and build the classifier; see ``RoutingClassifier.from_pretrained``."""
    config = read_config(folder)
    check_version(folder, config)
    weights = read_weights(folder, config)
    check_config(cls, folder, config)
    origin, target = config["encoder"], pick_device(device)
    classifier = cls(
        encoder_place(folder, origin["name"]) if encoder is None else encoder,
        revision=origin["revision"],
        **{name: origin[name] for name in ENCODER_OPTIONS},
        **config["params"],
        device=device,
        verbose=verbose,
    )
    try:
        classifier.encoder_ = encoder_for(classifier, target)
    except ValueError as error:
        hint = f"; the classifier in {folder} needs it: say where it is with --encoder or encoder=..."
        raise ValueError(f"{error}{hint if encoder is None else ''}") from error
    classifier.identity_ = Identity(**{name: origin[name] for name in Identity._fields})
    if differs := difference(classifier.identity_, classifier.encoder_.identity):
        raise ValueError(
            f"encoder {classifier.encoder_.name!r} is not the one that {folder} was fitted with: {differs}"
        )
    classifier.classes_ = np.asarray(config["classes"])
    classifier.n_texts_, classifier.history_ = config["n_texts"], config["history"]
    classifier.validation_accuracy_, classifier.about_ = config["validation_accuracy"], config["about"]
    classifier.temperature_, classifier.estimate_ = config["temperature"], read_estimate(config)
    classifier.examples_ = config.get("examples", [])
    classifier.head_ = load_head(classifier, folder, config, weights).to(target).eval()
    return classifier


def load_head(classifier: Any, folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """Build the head with its weights. Their shapes are checked before memory is allocated."""
    try:
        if (n_iters := (classifier.head_options or {}).get("n_iters", 1)) > MAX_ITERS:
            raise ValueError(f"n_iters must be at most {MAX_ITERS}, is {n_iters}")
        for name in ("n_members", "n_routings"):  # each needs weights of its own
            if (classifier.head_options or {}).get(name, 1) > len(weights):
                raise ValueError(f"{name} is more than the number of weights")
        with torch.device("meta"):
            head = new_head(classifier, classifier.encoder_, len(classifier.classes_))
        head.load_state_dict(weights, assign=True)
        head = new_head(classifier, classifier.encoder_, len(classifier.classes_))
        head.load_state_dict(weights)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"the head in {folder}, saved by vecroute {config['vecroute']}, is not the one that "
            f"{version('vecroute')} makes with its options ({str(error).splitlines()[-1].strip()})"
        ) from error
    return head


def encoder_place(folder: Path, name: str) -> str:
    """Return the name of the encoder, or its place if it is inside the classifier's folder."""
    if not name.startswith(INSIDE):
        return name
    place = Path(name.removeprefix(INSIDE))
    if place.is_absolute() or ".." in place.parts:
        raise ValueError(f"config.json in {folder} is damaged: the encoder {name!r} is not inside the folder")
    return str(folder / place)


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with a classifier")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no classifier: config.json is missing")
    try:
        if path.stat().st_size > CONFIG_BYTES:
            raise ValueError(f"it has more than {CONFIG_BYTES:,} bytes")
        config = json.loads(path.read_bytes())
        if "format" not in config:
            raise ValueError("it has no entry 'format', so vecroute did not write it")
        if config["format"] != FORMAT:
            raise ValueError(f"its format is {config['format']}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = first_line(error)
        raise ValueError(f"config.json in {folder} is damaged or not from vecroute: {message}") from error
    return config


def check_version(folder: Path, config: dict[str, Any]) -> None:
    """Raise for a folder that another version of the format wrote."""
    if (found := config.get("format_version")) != VERSION:
        raise ValueError(
            f"the classifier in {folder} has format version {found}, and vecroute {version('vecroute')} "
            f"reads {VERSION}: fit it again"
        )


def check_config(cls: Any, folder: Path, config: dict[str, Any]) -> None:
    """Raise an error for missing or wrong keys, even if the checksum is right."""
    mistake = f"config.json in {folder} is not the configuration of a classifier: "
    check_entries(config, ENTRIES, mistake)
    check_entries(config["encoder"], ENCODER_ENTRIES, f"{mistake}encoder: ")
    check_entries(config["params"], PARAMS, f"{mistake}params: ")
    if unknown := sorted(set(config["params"]) - (set(cls._get_param_names()) - NOT_SAVED)):
        raise ValueError(f"{mistake}params: {unknown[0]!r} is unknown to vecroute {version('vecroute')}")
    classes = config["classes"]
    if not classes or not all(isinstance(name, str | int | float) for name in classes):
        raise ValueError(f"{mistake}classes must be names or numbers, at least one")
    if len(set(map(str, classes))) < len(classes):
        again = next(name for k, name in enumerate(classes) if str(name) in map(str, classes[:k]))
        raise ValueError(f"{mistake}the class {again!r} is listed twice")
    if not 0 < config["temperature"] < math.inf:
        raise ValueError(f"{mistake}temperature must be a positive number, is {config['temperature']}")
    try:
        read_estimate(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{mistake}estimate: {first_line(error)}") from error


def read_estimate(config: dict[str, Any]) -> Estimate | None:
    """Return the estimate in a configuration, None if there is none."""
    return None if config["estimate"] is None else Estimate(**config["estimate"])


def check_entries(found: dict[str, Any], expected: dict[str, Any], mistake: str) -> None:
    for name, kind in expected.items():
        if name not in found:
            raise ValueError(f"{mistake}{name!r} is missing")
        if not isinstance(found[name], kind):
            wanted, came = getattr(kind, "__name__", kind), type(found[name]).__name__
            raise ValueError(f"{mistake}{name!r} must be {wanted}, is {came}")


def read_weights(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Read the weights of the head, and check that neither file has changed since it was written."""
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{folder} has no classifier: model.safetensors is missing")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
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
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"model.safetensors in {folder} has weights that are NaN or infinite: {name}")
    return weights


def config_sha256(config: dict[str, Any]) -> str:
    rest = {name: value for name, value in config.items() if name != "model_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
