"""Know an encoder again: by its weights, its configuration and what it does to a text or an image first."""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from vecroute.encoders.finding import file_sha256, read_json

# These do not change the hidden states of a frozen encoder: names, training, output, precision of storage.
IRRELEVANT = {
    *("name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "gradient_checkpointing"),
    *("initializer_range", "initializer_factor", "attn_implementation", "experts_implementation"),
}
# Packages whose upgrade may change hidden states in the last bits.
PACKAGES = ("torch", "transformers", "tokenizers", "pillow", "numpy")


PARTS = {"configuration": "settings", "weights": "weights", "preparation": "tokens or pixels"}
# Files of tokenizers and image processors, beside tokenizer* and *.model.
PREPARING = {
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
}
PREPARING |= {"vocab.txt", "vocab.json", "merges.txt"}


class Identity(NamedTuple):
    """What makes an encoder the one it is, of JSON types."""

    weights: str  # sha256 of the weights as they were loaded
    preparation: str  # sha256 of what the tokenizer or the image processor does
    configuration: dict[str, Any]  # what config.json states, as far as it changes hidden states
    files: dict[str, str]  # sha256 of each file; empty where the encoder came as objects


def identify(model: nn.Module, config: Any, folder: Path | None, preparation: str) -> Identity:
    """The identity of an encoder.

    Args:
        model: before any change of its precision.
        config: of the model as it was given or loaded, which may be more than the part that is used.
        folder: where it was loaded from, None if it, or what prepares its inputs, came as an object.
        preparation: sha256 of what the tokenizer or the image processor does.
    """
    if folder is None:
        stated = {**config.to_diff_dict(), "model_type": config.model_type}
    else:
        stated = read_json(folder / "config.json")
    files = {} if folder is None else file_hashes(folder)
    return Identity(weights_sha256(model), preparation, relevant(json_types(stated)), files)


def json_types(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def difference(expected: Identity, found: Identity) -> str | None:
    """Say in which file an encoder differs from another, None where they are the same.

    Files of the same bytes are the same. Other files are, too, where they mean the same to the transformers
    that is installed: an encoder may have been saved again, by another version of it.
    """
    before, now = resolved(expected.configuration), resolved(found.configuration)
    same = {
        "configuration": before == now,
        "weights": expected.weights == found.weights,
        "preparation": expected.preparation == found.preparation,
    }
    for part, name in PARTS.items():
        old, new = (files_of(part, identity) for identity in (expected, found))
        if same[part] or (old and old == new):
            continue
        changed = sorted(file for file in {*old, *new} if old.get(file) != new.get(file))
        told = f"its {name} differ" + (f" ({', '.join(changed)})" if changed else "")
        if part != "configuration":
            return told
        keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
        return f"{told}: {keys[0]} is {now.get(keys[0])!r}, expected {before.get(keys[0])!r}"
    return None


def files_of(part: str, identity: Identity) -> dict[str, str]:
    return {file: sha256 for file, sha256 in identity.files.items() if part_of(file) == part}


def part_of(file: str) -> str | None:
    """Which part of an encoder a file belongs to."""
    if file == "config.json":
        return "configuration"
    if ".safetensors" in file:
        return "weights"
    if file.startswith("tokenizer") or file.endswith(".model") or file in PREPARING:
        return "preparation"
    return None


def file_hashes(folder: Path) -> dict[str, str]:
    """The sha256 of each file in the folder of an encoder that may change hidden states."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and part_of(file.name)]
    return {file.name: file_sha256(file) for file in files}


def relevant(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Those entries of a configuration that may change hidden states."""
    kept = {key: value for key, value in configuration.items() if is_relevant(key)}
    return {key: relevant(value) if isinstance(value, dict) else value for key, value in kept.items()}


def is_relevant(key: str) -> bool:
    return key not in IRRELEVANT and "dropout" not in key and not key.startswith("_")


def resolved(configuration: dict[str, Any]) -> dict[str, Any]:
    """A configuration with what the installed transformers takes for everything that it does not state."""
    try:
        kind = transformers.CONFIG_MAPPING[configuration["model_type"]]
        full = json.loads(kind.from_dict(dict(configuration)).to_json_string(use_diff=False))
    except Exception:  # a class that transformers does not know, or values that it does not take
        return relevant(configuration)
    return relevant(full)


def states_key(identity: Identity, *options: Any) -> str:
    """Changes with anything that changes hidden states, the last bits included."""
    versions = {name: installed(name) for name in PACKAGES}
    about = [identity.weights, identity.preparation, resolved(identity.configuration)]
    return sha256_json([*about, versions, [str(option) for option in options]])


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def weights_sha256(model: nn.Module) -> str:
    """One number for all weights that make hidden states, as loaded, before any change of precision."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith("pooler."):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """One number for what the tokenizer does, whatever length it was last asked to cut to."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return sha256_json({key: value for key, value in state.items() if key not in ("truncation", "padding")})


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
