"""A file of hidden states: it names their encoder, and the expected content for each text."""

import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

STORED = {torch.float16: "F16", torch.bfloat16: "BF16"}  # dtypes, and their names in safetensors files


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
        return cls(str(hidden.dtype), tuple(hidden.shape), zlib.crc32(data_of(hidden)))


class Packed(NamedTuple):
    """The hidden states of several texts, one text after the other, without padding."""

    names: Sequence[Any]  # the keys of the texts in the cache, or their indices
    counts: Sequence[int]  # number of positions of each text
    hidden: Tensor  # [sum of counts, depth, d_emb]

    def one(self, row: int) -> Tensor:
        """Return the hidden states [n_pos, depth, d_emb] of a text."""
        start = sum(self.counts[:row])
        return self.hidden[start : start + self.counts[row]]  # [n_pos, depth, d_emb]

    def entries(self) -> dict[str, Entry]:
        """Return the entry of each text. Slices of bytes take far less time than slices of tensors."""
        data, (depth, d_emb) = data_of(self.hidden), self.hidden.shape[1:]
        dtype, size = str(self.hidden.dtype), self.hidden.element_size() * depth * d_emb
        found, end = {}, 0
        for key, n in zip(self.names, self.counts, strict=True):
            start, end = end, end + n * size
            found[key] = Entry(dtype, (n, depth, d_emb), zlib.crc32(data[start:end]))
        return found


def data_of(hidden: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return hidden.reshape(-1).view(torch.uint8).numpy().data


def write_segment(path: Path, segment: Sequence[Packed], metadata: dict[str, str]) -> None:
    """Write a safetensors file of hidden states of two bytes per number, with a tensor for each text.

    ``save_file`` of safetensors writes the same. But it examines every tensor in Python code, so that threads
    which write files would keep the thread that computes hidden states waiting.
    """
    described: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for packed in segment:
        dtype, shape = STORED[packed.hidden.dtype], packed.hidden.shape[1:]
        for key, n in zip(packed.names, packed.counts, strict=True):
            start, end = end, end + 2 * n * shape.numel()
            described[key] = {"dtype": dtype, "shape": [n, *shape], "data_offsets": [start, end]}
    listed = json.dumps(described).encode()
    listed += b" " * (-len(listed) % 8)  # the data starts at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(listed).to_bytes(8, "little") + listed)
        file.writelines(data_of(packed.hidden) for packed in segment)


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


def rounded(packed: Packed) -> Iterator[Packed]:
    """Yield hidden states in two bytes per number. Each text is rounded as if it were alone."""
    half = halved(packed.hidden)  # [sum of counts, depth, d_emb]
    if half.dtype == torch.float16 or half is packed.hidden:
        yield packed._replace(hidden=half)
        return
    for name, n, hidden in zip(*packed[:2], packed.hidden.split(packed.counts), strict=True):
        yield Packed([name], [n], halved(hidden))
