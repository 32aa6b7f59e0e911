"""Optional packages, and files of tensors with a description: safetensors whose header carries JSON."""

import importlib
import json
import os
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.split(".")[0]
        raise ImportError(f"this needs {top}: pip install 'vecroute[{extra}]'") from error


def save_tensors(path: str | os.PathLike, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors and a JSON description to one file, whole or not at all.

    Args:
        path: the file; what was there is replaced.
        tensors: named tensors.
        about: the description, of JSON types; ``about["kind"]`` says what the file holds.
    """
    safetensors = require("safetensors.torch", "data")
    # Tensors may be views of one another, which the format does not allow.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_file(path, safetensors.save(whole, {"vecroute": json.dumps(about)}))


def write_file(path: str | os.PathLike, data: bytes) -> None:
    """Write a file, whole or not at all; what was there is replaced."""
    temporary = Path(path).with_name(f".{Path(path).name}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save_tensors`` wrote.

    Raises:
        ValueError: the file holds something else than ``kind``.
    """
    safetensors = require("safetensors", "data")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("vecroute", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"path must be a file of {kind}, {path} is no safetensors file: {error}") from error
    if about.get("kind") != kind:
        raise ValueError(f"path must be a file of {kind}, {path} holds {about.get('kind', 'something else')}")
    return tensors, about
