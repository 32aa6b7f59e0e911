"""The description in a file of hidden states: their encoder, and the expected content for each text."""

import hashlib
import json
import zlib
from typing import Any, NamedTuple

import torch
from torch import Tensor


def text_key(text: Any) -> str:
    """Return the key of a text, or of an image (a ``Picture``, which has its own key)."""
    if not isinstance(text, str):
        return text.key
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Entry(NamedTuple):
    """The entry of a text in the header of a segment, which describes its hidden states."""

    dtype: str
    shape: tuple[int, ...]  # n_pos, depth, d_emb
    checksum: int

    @classmethod
    def of(cls, hidden: Tensor) -> "Entry":
        data = hidden.reshape(-1).view(torch.uint8).numpy().data
        return cls(str(hidden.dtype), tuple(hidden.shape), zlib.crc32(data))


def header(key: str, entries: dict[str, Entry]) -> dict[str, str]:
    """Make the metadata of a segment, with a checksum of the metadata itself."""
    listed = json.dumps(entries)
    return {"encoder": key, "entries": listed, "sha256": hashlib.sha256((key + listed).encode()).hexdigest()}


def read_entries(metadata: dict[str, str], key: str) -> dict[str, Entry]:
    """Read the entries that ``header`` wrote.

    Raises:
        ValueError: the segment belongs to another encoder or an earlier version, or is damaged.
    """
    listed = metadata.get("entries", "")
    if metadata.get("encoder") != key:
        raise ValueError("it belongs to another encoder")
    if metadata.get("sha256") != hashlib.sha256((key + listed).encode()).hexdigest():
        raise ValueError("its header is damaged")
    try:
        found = json.loads(listed).items()
        return {text: Entry(dtype, tuple(shape), crc) for text, (dtype, shape, crc) in found}
    except (AttributeError, TypeError, RecursionError) as error:
        raise ValueError("its header has other entries than a cache writes") from error


def halved(hidden: Tensor) -> Tensor:
    """Convert to two bytes per number: float16, or bfloat16 if a number is too large for float16."""
    if hidden.element_size() == 2:
        return hidden
    half = hidden.half()
    return half if half.isfinite().all() else hidden.bfloat16()
