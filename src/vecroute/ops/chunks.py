"""Chunks of the inputs: how rows are grouped, their x_inp and masks, and the memory that they share."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.problem import Problem


class Chunk(NamedTuple):
    """Some rows of some samples: ``samples`` indexes tensors [b, ...], ``batch`` and ``rows`` index x_inp.

    ``batch`` differs from ``samples`` only for packed samples, where x_inp is [1, total, d].
    """

    samples: slice
    batch: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        """The number of samples, and of rows per sample."""
        return self.samples.stop - self.samples.start, self.rows.stop - self.rows.start


def chunks(p: Problem, row: int, share: int) -> Iterator[Chunk]:
    """Cut the inputs into chunks: whole samples, several at a time if they are short, or parts of one.

    Args:
        row, share: see ``Plan.chunk_rows``.
    """
    size = p.plan.chunk_rows(row, share)
    n_samples, n_rows = p.sqrt_n_inp.shape[0], p.x_inp.shape[1]
    if p.offsets is not None:
        for b in range(n_samples):
            for rows in parts(p.offsets[b], p.offsets[b + 1], size):
                yield Chunk(slice(b, b + 1), slice(0, 1), rows)
        return
    together = p.plan.chunk_samples(size, n_rows)
    for b in range(0, n_samples, together):
        samples = slice(b, min(b + together, n_samples))
        for rows in parts(0, n_rows, size):
            yield Chunk(samples, samples, rows)


def alike(all_chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Group consecutive chunks that have the same samples and the same number of rows.

    Host work that depends only on the shape is done once per group, because it takes as long as the GPU takes
    for a chunk.
    """
    for _, same in groupby(all_chunks, lambda chunk: (chunk.samples, chunk.shape)):
        yield list(same)


def of_chunk(t: Tensor, chunk: Chunk) -> Tensor:
    """Return the rows of a chunk from a tensor [b, i, ...], which may hold all rows or only these."""
    return t[:, chunk.rows] if has_all_rows(t, chunk) else t


def has_all_rows(t: Tensor, chunk: Chunk) -> bool:
    """Return whether a tensor [b, i, ...] of the samples of a chunk has more rows than the chunk."""
    return t.shape[1] != chunk.shape[1]


def parts(start: int, end: int, size: int) -> Iterator[slice]:
    """Cut rows into the fewest parts of at most ``size`` rows, of about equal size."""
    n = cdiv(end - start, size)
    step = min(size, cdiv(end - start, max(1, 16 * n)) * 16)  # a multiple of 16
    for first in range(start, end, step or 1):
        yield slice(first, min(first + step, end))


class Room(dict[str, Tensor]):
    """Buffers by name. Each chunk reuses the buffers of the chunk before."""

    def take(self, name: str, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return an uninitialised tensor with the device of ``like``, and its dtype unless dtype is given."""
        size = math.prod(shape)
        if name not in self or self[name].numel() < size:
            self.pop(name, None)
            self[name] = like.new_empty(size, dtype=dtype)
        return self[name][:size].view(shape)


def inputs(p: Problem, chunk: Chunk) -> Tensor:
    """Return x_inp of a chunk, with zeros in place of unused inputs, so that even NaN there has no effect."""
    x = p.x_inp[chunk.batch, chunk.rows]  # [b, i, d]
    if p.use is not None:
        x = x.where(use_of(p, chunk).any(-1, keepdim=True), 0)  # [b, i, d]
    return x if p.plan.rounds_late else x.to(p.plan.operand_dtype)  # [b, i, d]


def as_operand(p: Problem, x: Tensor, chunk: Chunk) -> Tensor:
    """Return x [b, i, d] of ``inputs`` in the dtype of operands, from a kept copy if there is one."""
    if "x_inp" in p.plan.kept_copies:
        return p.in_dtype("x_inp", p.x_inp, p.plan.operand_dtype)[chunk.batch, chunk.rows]  # [b, i, d]
    return x.to(p.plan.operand_dtype)  # [b, i, d]


def use_of(p: Problem, chunk: Chunk) -> Tensor:
    """Return the used pairs of a chunk, [b or 1, i, j or 1]."""
    return use_of_samples(p, chunk)[:, chunk.rows]


def use_of_samples(p: Problem, chunk: Chunk) -> Tensor:
    """Return the used pairs of all rows of the samples of a chunk, [b or 1, i, j or 1]."""
    assert p.use is not None
    return p.use[chunk.batch] if len(p.use) > 1 else p.use
