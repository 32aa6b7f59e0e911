"""Import optional packages, and write files and folders completely or not at all."""

import ctypes
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def require(package: str, extra: str) -> ModuleType:
    """Import an optional package, or name the extra that installs it.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        top = package.split(".")[0]
        raise ImportError(f"this needs {top}: pip install 'vecroute[{extra}]'") from error


ABANDONED_AFTER = 3600  # seconds; an older temporary file belongs to a dead process
RENAME_EXCHANGE, AT_FDCWD = 2, -100  # constants of Linux


def save_tensors(path: str | os.PathLike, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors and a JSON description to one file, completely or not at all.

    Args:
        path: the file. An existing file is replaced.
        tensors: named tensors.
        about: the description, of JSON types; ``about["kind"]`` says what the file holds.
    """
    safetensors = require("safetensors.torch", "data")
    # The format allows no tensors that share memory, and some of these may be views of others.
    whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    described = json.dumps(about)
    seal = {"vecroute": described, "sha256": seal_of(whole, described)}
    write_file(path, safetensors.save(whole, seal))


def seal_of(tensors: dict[str, Tensor], described: str) -> str:
    """Return one checksum of the tensors, their names and their description."""
    digest = hashlib.sha256(described.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_file(path: str | os.PathLike, data: bytes) -> None:
    """Write a file completely or not at all. An existing file is replaced."""
    temporary = temporary_place(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_place(path: str | os.PathLike) -> Path:
    """Return the temporary name under which a file or folder is written before it is renamed."""
    return Path(path).with_name(f".{Path(path).name}.{uuid.uuid4().hex}")


def remove_abandoned(path: Path) -> None:
    """Remove temporary files that killed processes left beside this file or folder."""
    pattern = re.compile(re.escape(f".{path.name}.") + "[0-9a-f]{32}(.old)?")
    for left in path.parent.glob(".*") if path.parent.is_dir() else ():
        try:
            if pattern.fullmatch(left.name) and time.time() - left.lstat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        except OSError:  # another process removed it, or it belongs to another user
            continue


def put_folder(new: Path, folder: Path) -> None:
    """Rename a new folder to its final name, and remove the old folder of that name afterwards.

    On Linux the names are swapped in one step, so at any moment the name belongs to one complete folder.
    """
    if not folder.exists():
        new.rename(folder)
        return
    if not exchanged(new, folder):  # not on Linux, or the file system cannot
        old = new.with_name(f"{new.name}.old")
        folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            old.rename(folder)
            raise
        new = old
    shutil.rmtree(new, ignore_errors=True)


def exchanged(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step, and return whether this was possible."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def load_tensors(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file that ``save_tensors`` wrote.

    Raises:
        ValueError: the file is damaged or does not hold ``kind``.
    """
    safetensors = require("safetensors", "data")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            seal = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"path must be a file of {kind}, {path} is no safetensors file: {error}") from error
    try:
        described = seal.pop("vecroute", "{}")
        about = json.loads(described)
        found = about.get("kind", "something else")
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"path must be a file of {kind}, the description in {path} is damaged") from None
    if found != kind:
        raise ValueError(f"path must be a file of {kind}, {path} holds {found}")
    # Files of earlier versions have no checksum.
    if seal and seal != {"sha256": seal_of(tensors, described)}:
        raise ValueError(f"path must be a file of {kind}, {path} is damaged: its sha256 differs")
    return tensors, about
