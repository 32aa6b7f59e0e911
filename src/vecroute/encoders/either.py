"""The encoder of a classifier, of texts or of images, however it was given."""

import functools
from pathlib import Path
from typing import Any

import torch

from vecroute.encoders.loading import takes_images
from vecroute.encoders.text import TextEncoder
from vecroute.encoders.vision import VisionEncoder


def is_of_images(encoder: Any, revision: str | None) -> bool:
    """Whether what was given for an encoder, a name, a folder, a model or an encoder, takes images."""
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
    """The encoder; one by name or folder is shared by all who ask for it with the same options.

    Raises:
        ValueError: max_length or stride for an encoder of images.
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
    """One encoder for all who want the same, as long as its files stay the same."""
    return kind(name, device=device, **options)


def folder_stamp(name: str | Path) -> tuple:
    """Changes with the files of a local folder; empty for a name."""
    files = sorted(Path(name).glob("*")) if Path(name).is_dir() else []
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
