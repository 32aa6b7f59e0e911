"""Chunks of the inputs: which rows go together, their x_inp and masks, and memory for what they need."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.problem import Problem

MOST_SAMPLES = 2**16 - 1  # CUDA has no more blocks in any dimension of a grid but the first


class Chunk(NamedTuple):
    """Some rows of some samples: ``samples`` indexes what is per sample, ``batch`` and ``rows`` x_inp."""

    samples: slice
    batch: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        """How many samples, and rows of each."""
        return self.samples.stop - self.samples.start, self.rows.stop - self.rows.start


def chunks(p: Problem, row: int, share: int) -> Iterator[Chunk]:
    """Cut the inputs into chunks: whole samples, several at a time if they are short, or parts of one.

    Args: as ``rows_of_a_chunk`` has them.
    """
    size = p.tuning.rows or rows_of_a_chunk(p, row, share)
    n_samples, n_rows = p.sqrt_n_inp.shape[0], p.x_inp.shape[1]
    if p.offsets is not None:
        for b in range(n_samples):
            for rows in parts(p.offsets[b], p.offsets[b + 1], size):
                yield Chunk(slice(b, b + 1), slice(0, 1), rows)
        return
    together = size // max(1, n_rows)
    if p.x_inp.device.type == "cpu" and together > torch.get_num_threads():
        together -= together % torch.get_num_threads()  # each thread multiplies as many as the others
    together = max(1, min(together, MOST_SAMPLES))
    for b in range(0, n_samples, together):
        samples = slice(b, min(b + together, n_samples))
        for rows in parts(0, n_rows, size):
            yield Chunk(samples, samples, rows)


def alike(all_chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks that follow each other and have the same samples and as many rows.

    What does not depend on which rows is made once for all of them: on a GPU it takes the host as long as the
    work itself.
    """
    for _, same in groupby(all_chunks, lambda chunk: (chunk.samples, chunk.shape)):
        yield list(same)


def of_chunk(t: Tensor, chunk: Chunk) -> Tensor:
    """The rows of a chunk in a tensor of its samples, [b, i, ...], which may have no others."""
    return t[:, chunk.rows] if has_all_rows(t, chunk) else t


def has_all_rows(t: Tensor, chunk: Chunk) -> bool:
    """Whether a tensor of the samples of a chunk, [b, i, ...], has more rows than those of the chunk."""
    return t.shape[1] != chunk.shape[1]


def parts(start: int, end: int, size: int) -> Iterator[slice]:
    """As few parts of at most so many rows as there can be, about as large as each other."""
    n = cdiv(end - start, size)
    step = min(size, cdiv(end - start, max(1, 16 * n)) * 16)  # aligned
    for first in range(start, end, step or 1):
        yield slice(first, min(first + step, end))


def rows_of_a_chunk(p: Problem, row: int, share: int) -> int:
    """Rows whose i x j quantities fit the cache of a CPU; a GPU wants tall products more than cache hits.

    Args:
        row: how many numbers a row has in the buffers of a pass on a GPU.
        share: one part in so many of the size of x_inp may go there, or more where that is few rows.
    """
    if p.x_inp.device.type == "cpu":
        return max(64, min(2048, 2**18 // p.n_out))
    size, many = row * p.dtype.itemsize, p.n_out >= 512
    # 64 MB or twice that; of a fixed length as many pairs, whatever a row has of each.
    least = (2**27 if many else 2**26) // size if p.variable else (2**25 if many else 2**24) // p.n_out
    return max(1024, least, p.x_inp.numel() * p.x_inp.element_size() // (share * size))


class Room(dict[str, Tensor]):
    """Memory for what lives in one chunk, by name, used again by the next."""

    def take(self, name: str, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor, of the dtype of another if none is given."""
        size = math.prod(shape)
        if name not in self or self[name].numel() < size:
            self.pop(name, None)
            self[name] = like.new_empty(size, dtype=dtype)
        return self[name][:size].view(shape)


def inputs(p: Problem, chunk: Chunk) -> Tensor:
    """x_inp of a chunk, with zeros in place of unused inputs, so that not even NaN in them counts."""
    x = p.x_inp[chunk.batch, chunk.rows]  # [b, i, d]
    if p.use is not None:
        x = x.where(use_of(p, chunk).any(-1, keepdim=True), 0)  # [b, i, d]
    return x if p.rounds_late else x.to(p.operand_dtype)  # [b, i, d]


def as_operand(p: Problem, x: Tensor, chunk: Chunk) -> Tensor:
    """x [b, i, d] from ``inputs`` in the dtype of operands; of a copy of all of x_inp, if that is small."""
    if "x_inp" in p.kept_copies:
        return p.in_dtype("x_inp", p.x_inp, p.operand_dtype)[chunk.batch, chunk.rows]  # [b, i, d]
    return x.to(p.operand_dtype)  # [b, i, d]


def use_of(p: Problem, chunk: Chunk) -> Tensor:
    """The used pairs of a chunk, [b or 1, i, j or 1]."""
    return use_of_samples(p, chunk)[:, chunk.rows]


def use_of_samples(p: Problem, chunk: Chunk) -> Tensor:
    """The same of all rows of its samples."""
    assert p.use is not None
    return p.use[chunk.batch] if len(p.use) > 1 else p.use
