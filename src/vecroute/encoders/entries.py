"""The description in a file of hidden states: their encoder, and the expected content for each text."""

import hashlib
import json
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor


def text_key(text: Any) -> str:
    """What a text is known by; an image, a ``Picture``, brings a key of its own."""
    if not isinstance(text, str):
        return text.key
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Entry(NamedTuple):
    """What the header of a segment says of the hidden states of a text."""

    dtype: str
    shape: tuple[int, ...]  # n_pos, depth, d_emb
    checksum: int

    @classmethod
    def of(cls, hidden: Tensor) -> "Entry":
        data = hidden.reshape(-1).view(torch.uint8).numpy().data
        return cls(str(hidden.dtype), tuple(hidden.shape), zlib.crc32(data))


def header(key: str, entries: dict[str, Entry]) -> dict[str, str]:
    """The metadata of a segment, with a checksum of its own."""
    listed = json.dumps(entries)
    return {"encoder": key, "entries": listed, "sha256": hashlib.sha256((key + listed).encode()).hexdigest()}


def read_entries(metadata: dict[str, str], key: str) -> dict[str, Entry]:
    """What ``header`` wrote.

    Raises:
        ValueError: the segment is of another encoder, of an earlier version, or damaged.
    """
    listed = metadata.get("entries", "")
    if metadata.get("encoder") != key:
        raise ValueError("it is of another encoder")
    if metadata.get("sha256") != hashlib.sha256((key + listed).encode()).hexdigest():
        raise ValueError("its header is damaged")
    return {text: Entry(dtype, tuple(shape), crc) for text, (dtype, shape, crc) in json.loads(listed).items()}


def halved(hidden: Tensor) -> Tensor:
    """In two bytes per number: float16, bfloat16 where the numbers are too great for it."""
    if hidden.element_size() == 2:
        return hidden
    half = hidden.half()
    return half if half.isfinite().all() else hidden.bfloat16()
