"""Identify an encoder by its weights, its configuration, and its tokenizer or image processor."""

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

# Entries that do not change the hidden states of a frozen encoder: names, training, output, stored precision.
IRRELEVANT = {
    *("name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "gradient_checkpointing"),
    *("initializer_range", "initializer_factor", "attn_implementation", "experts_implementation"),
}
# Packages whose upgrade may change hidden states in the last bits.
PACKAGES = ("torch", "transformers", "tokenizers", "pillow", "numpy")


PARTS = {"configuration": "settings", "weights": "weights", "preparation": "tokens or pixels"}
# Files of tokenizers and image processors, in addition to tokenizer* and *.model.
PREPARING = {
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
}
PREPARING |= {"vocab.txt", "vocab.json", "merges.txt"}


class Identity(NamedTuple):
    """The identity of an encoder, in JSON types."""

    weights: str  # sha256 of the weights as they were loaded
    preparation: str  # sha256 of the state of the tokenizer or the image processor
    configuration: dict[str, Any]  # the entries of config.json that may change hidden states
    files: dict[str, str]  # sha256 of each file; empty if the encoder was given as objects


def identify(model: nn.Module, config: Any, folder: Path | None, preparation: str) -> Identity:
    """Compute the identity of an encoder.

    Args:
        model: the model before any change of its precision.
        config: the configuration of the whole model. Only a part of the model may be in use.
        folder: the folder of the encoder. None if the model, tokenizer or processor was given as an object.
        preparation: sha256 of the state of the tokenizer or the image processor.
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
    """Name the file in which two encoders differ, or return None if they are the same.

    Files with the same bytes are the same. Different bytes may still mean the same to the installed version
    of transformers, for example if another version saved the encoder again. Those count as the same too.
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
    """Return the part of an encoder that a file belongs to."""
    if file == "config.json":
        return "configuration"
    if ".safetensors" in file:
        return "weights"
    if file.startswith("tokenizer") or file.endswith(".model") or file in PREPARING:
        return "preparation"
    return None


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file in an encoder's folder that may change hidden states."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and part_of(file.name)]
    return {file.name: file_sha256(file) for file in files}


def relevant(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that may change hidden states."""
    kept = {key: value for key, value in configuration.items() if is_relevant(key)}
    return {key: relevant(value) if isinstance(value, dict) else value for key, value in kept.items()}


def is_relevant(key: str) -> bool:
    return key not in IRRELEVANT and "dropout" not in key and not key.startswith("_")


def resolved(configuration: dict[str, Any]) -> dict[str, Any]:
    """Complete a configuration with the defaults of the installed version of transformers."""
    try:
        kind = transformers.CONFIG_MAPPING[configuration["model_type"]]
        full = json.loads(kind.from_dict(dict(configuration)).to_json_string(use_diff=False))
    except Exception:  # transformers does not know the class, or refuses a value
        return relevant(configuration)
    return relevant(full)


def states_key(identity: Identity, *options: Any) -> str:
    """Return a key that changes whenever hidden states may change, even in the last bit."""
    versions = {name: installed(name) for name in PACKAGES}
    about = [identity.weights, identity.preparation, resolved(identity.configuration)]
    return sha256_json([*about, versions, [str(option) for option in options]])


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def weights_sha256(model: nn.Module) -> str:
    """Return one checksum of all weights that produce hidden states, before any change of precision."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith("pooler."):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """Return one checksum of a tokenizer, without its last settings for truncation and padding."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return sha256_json({key: value for key, value in state.items() if key not in ("truncation", "padding")})


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
