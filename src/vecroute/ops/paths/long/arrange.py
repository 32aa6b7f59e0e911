"""Small matrices as the tensor cores of Hopper GPUs read them from shared memory, in one Triton kernel each.

A row there has 64 numbers, in eights: each eight is at a place that depends on the row, so that those of 8
rows are in different banks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.common import cdiv, multiple_of_8

BLOCK = 1024


@triton.jit
def features_kernel(M, out, n, q, d, n_out, padded, BLOCK: tl.constexpr):  # [q, d], [d / 64, rows, 8, 8]
    """out = M, 64 features at a time; of every n_out rows as many as ``padded``, with zeros."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = q // n_out * padded
    row = o // 64 % rows
    feature = o // (64 * rows) * 64 + (o // 8 % 8 ^ row % 8) * 8 + o % 8
    j = row % padded
    b_M = tl.load(M + (row // padded * n_out + j) * d + feature, mask=(o < n) & (j < n_out), other=0.0)
    tl.store(out + o, b_M.to(out.dtype.element_ty), mask=o < n)


@triton.jit
def columns_kernel(
    M, shared, weights,  # [b, n, d], [k - n, d], [k]
    out,  # [b, d / columns, tiles, columns, 8, 8]
    n, k, d,
    WIDE: tl.constexpr,  # how many times 64 the columns are
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out = M of a sample and after it the rows that all share, in the order in which threads multiply.

    Some columns d go at a time. Of 32 rows k a thread has 8, of which it multiplies 4 at a time, two in
    each half of 16. Of 16 columns it has 4 next to each other. Where WEIGHTED, rows are times 2^14 and over
    their weights.
    """
    tile, part, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o = tl.arange(0, 64)
    row, column = tile * 64 + o[:, None], part * 64 + o[None, :]
    b_M = tl.load(M + (b * n + row) * d + column, mask=row < n, other=0.0)
    b_M += tl.load(shared + (row - n) * d + column, mask=(row >= n) & (row < k), other=0.0)
    if WEIGHTED:
        b_M = b_M / tl.load(weights + row, mask=row < k, other=1.0) * 16384.0
    # Rows as 2 x 4 x 4 x 2 and columns as 4 x 4 x 2 x 2 change places among themselves, and with each other.
    b_M = b_M.to(tl.float16).reshape(2, 4, 4, 2, 4, 4, 2, 2).permute(4, 6, 5, 7, 0, 2, 1, 3).reshape(64, 64)
    place, step = o[:, None], o[None, :]
    wide = (b * tl.num_programs(1) + part) // WIDE * tl.num_programs(0) + tile
    out += (wide * WIDE + part % WIDE) * 4096
    tl.store(out + place * 64 + (step // 8 ^ place % 8) * 8 + step % 8, b_M)


def by_features(M: Tensor, n_out: int) -> Tensor:
    """M [q, d] in bfloat16, [d / 64, rows, 8, 8]; each n_out of q are filled up to whole eights."""
    (q, d), padded, M = M.shape, multiple_of_8(n_out), M.contiguous()
    out = M.new_empty(d // 64, q // n_out * padded, 8, 8, dtype=torch.bfloat16)
    features_kernel[cdiv(out.numel(), BLOCK),](M, out, out.numel(), q, d, n_out, padded, BLOCK=BLOCK)
    return out


def by_columns(M: Tensor, weights: Tensor) -> Tensor:
    """2^14 M / weights, from [k, d] and [k, 1], in float16, [d / 64, k / 64, 64, 8, 8]; k is filled up."""
    return arranged_columns(M[None], M, weights, len(M), 64)[0]


def arranged_columns(M: Tensor, shared: Tensor, weights: Tensor | None, k: int, columns: int) -> Tensor:
    """Both of the above; weights [k, 1] or None."""
    (b, n, d), tiles = M.shape, cdiv(k, 64)
    out = M.new_empty(b, d // columns, tiles, columns, 8, 8, dtype=torch.float16)  # as above
    weighted = weights is not None
    columns_kernel[tiles, d // 64, b](
        M, shared, weights if weighted else M, out, n, k, d, WIDE=columns // 64, WEIGHTED=weighted
    )
    return out
