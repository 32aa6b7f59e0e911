"""A file of hidden states, a segment: it names their encoder, the texts, and a checksum."""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

STORED = {torch.float16: "F16", torch.bfloat16: "BF16"}  # dtypes, and their names in safetensors files
READ_BYTES = 16 * 1024**2  # of a segment, read at a time


def text_key(text: Any) -> str:
    """Return the key of a text, or of an image (a ``Picture``, which has its own key)."""
    if not isinstance(text, str):
        return text.key
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Entry(NamedTuple):
    """What a segment says about the hidden states of a text."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]  # n_pos, depth, d_emb

    @classmethod
    def of(cls, hidden: Tensor) -> "Entry":
        return entry(STORED.get(hidden.dtype, ""), *hidden.shape)


@lru_cache(4096)
def entry(dtype: str, *shape: int) -> Entry:
    """Return an entry. Texts of the same length share it, so the garbage collector has less to look at."""
    return Entry(dtype, shape)


class Contents(NamedTuple):
    """What the header of a segment says about it."""

    entries: dict[str, Entry]  # by key of a text
    checksum: int  # of the hidden states of all texts together


class Packed(NamedTuple):
    """The hidden states of several texts, one text after the other, without padding."""

    names: Sequence[Any]  # the keys of the texts in the cache, or their indices
    counts: Sequence[int]  # number of positions of each text
    hidden: Tensor  # [sum of counts, depth, d_emb]

    def one(self, name: Any) -> Tensor:
        """Return the hidden states [n_pos, depth, d_emb] of a text."""
        row = self.names.index(name)
        start = sum(self.counts[:row])
        return self.hidden[start : start + self.counts[row]]  # [n_pos, depth, d_emb]


def data_of(hidden: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return hidden.reshape(-1).view(torch.uint8).numpy().data


def write_segment(path: Path, segment: Sequence[Packed], key: str) -> Contents:
    """Write a safetensors file of hidden states of two bytes per number, with a tensor for each text.

    ``save_file`` of safetensors writes the same. But it examines every tensor in Python code, so that threads
    which write files would keep the thread that computes hidden states waiting. For the same reason there is
    one checksum for all texts, and the header is written as text: many small objects would wake the garbage
    collector, for which all threads wait.

    Args:
        path: the file.
        segment: hidden states on the CPU.
        key: the key of the encoder.
    """
    listed: list[str] = []
    entries: dict[str, Entry] = {}
    end = checksum = 0
    for packed in segment:
        dtype, (depth, d) = STORED[packed.hidden.dtype], packed.hidden.shape[1:]
        for text, n in zip(packed.names, packed.counts, strict=True):
            start, end = end, end + 2 * n * depth * d
            listed.append(
                f'{json.dumps(text)}: {{"dtype": "{dtype}", "shape": [{n}, {depth}, {d}], '
                f'"data_offsets": [{start}, {end}]}}'
            )
            entries[text] = entry(dtype, n, depth, d)
        checksum = zlib.crc32(data_of(packed.hidden), checksum)
    described = f"{{{', '.join(listed)}}}"
    metadata = {"encoder": key, "crc32": str(checksum), "sha256": digest(key, checksum, described)}
    header = ", ".join((f'{{"__metadata__": {json.dumps(metadata)}', *listed)).encode() + b"}"
    header += b" " * (-len(header) % 8)  # the data starts at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.writelines(data_of(packed.hidden) for packed in segment)
    return Contents(entries, checksum)


def read_contents(path: Path, key: str) -> Contents:
    """Read the header of a segment that safetensors could open.

    Raises:
        ValueError: the segment belongs to another encoder or an earlier version, or is damaged.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        listed = file.read(header_size(file))
    try:
        described = json.loads(listed)
        metadata = described.pop("__metadata__", {})
        if metadata.get("encoder") != key:
            raise ValueError("it belongs to another encoder")
        checksum = int(metadata.get("crc32", "0"))
        if metadata.get("sha256") != digest(key, checksum, json.dumps(described)):
            raise ValueError("its header is damaged")
        entries = {text: entry(each["dtype"], *each["shape"]) for text, each in described.items()}
        return Contents(entries, checksum)
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("its header has other entries than a cache writes") from error


def checksum_of(path: Path) -> int:
    """Return the checksum of the hidden states in a segment."""
    found = 0
    with open(path, "rb") as file:
        file.seek(header_size(file), os.SEEK_CUR)
        while part := file.read(READ_BYTES):
            found = zlib.crc32(part, found)
    return found


def checksum_of_open(file: Any, texts: Iterable[str]) -> int:
    """Return the same of an open segment, which may have been deleted, given its texts in their order."""
    found = 0
    for text in texts:
        found = zlib.crc32(data_of(file.get_tensor(text)), found)
    return found


def header_size(file: BinaryIO) -> int:
    """Read the size of the header that follows, at most the size of the file."""
    return min(int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size)


def digest(key: str, checksum: int, described: str) -> str:
    """Return a checksum of a header, given the part of it that describes the texts, as JSON."""
    return hashlib.sha256(f"{key} {checksum} {described}".encode()).hexdigest()


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
