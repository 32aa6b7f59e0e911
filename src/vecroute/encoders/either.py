"""Load the encoder of a classifier, for texts or images, from a name, a folder, a model or an encoder."""

import functools
from pathlib import Path
from typing import Any

import torch

from vecroute.encoders.loading import takes_images
from vecroute.encoders.text import TextEncoder
from vecroute.encoders.vision import VisionEncoder


def is_of_images(encoder: Any, revision: str | None) -> bool:
    """Return whether an encoder takes images. It may be given as a name, a folder, a model or an encoder."""
    if isinstance(encoder, TextEncoder | VisionEncoder):
        return isinstance(encoder, VisionEncoder)
    return takes_images(str(encoder) if isinstance(encoder, str | Path) else encoder, revision)


def load_encoder(
    encoder: Any,
    device: torch.device,
    *,
    revision: str | None,
    max_length: int | None,
    stride: int,
    **options: Any,
) -> TextEncoder | VisionEncoder:
    """Load the encoder. Calls with the same name or folder and the same options share one encoder.

    Raises:
        ValueError: max_length or stride is given for an encoder of images.
    """
    if isinstance(encoder, TextEncoder | VisionEncoder):
        return encoder
    kind: Any = VisionEncoder if is_of_images(encoder, revision) else TextEncoder
    options["revision"] = revision
    if kind is TextEncoder:
        options |= {"max_length": max_length, "stride": stride}
    elif max_length or stride:
        raise ValueError(f"max_length and stride are for texts, encoder {encoder} takes images")
    if isinstance(encoder, str | Path):
        return shared(kind, str(encoder), folder_stamp(encoder), str(device), **options)
    return kind(encoder, **options)


@functools.lru_cache(maxsize=2)
def shared(kind: Any, name: str, stamp: tuple, device: str, **options: Any) -> Any:
    """Return one shared encoder for equal arguments. The stamp makes changed files load again."""
    return kind(name, device=device, **options)


def folder_stamp(name: str | Path) -> tuple:
    """Return a stamp that changes with the files of a local folder; empty for a name."""
    files = sorted(Path(name).glob("*")) if Path(name).is_dir() else []
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
