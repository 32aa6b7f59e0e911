"""Lay out small matrices for the tensor cores of Hopper GPUs, which read them from shared memory.

A row has 64 numbers, in groups of eight. The place of a group depends on the row, so that the groups of 8
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
    """Copy M to out, 64 features at a time. Zeros fill every n_out rows up to ``padded`` rows."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = q // n_out * padded
    row = o // 64 % rows
    feature = o // (64 * rows) * 64 + (o // 8 % 8 ^ row % 8) * 8 + o % 8
    j = row % padded
    b_M = tl.load(M + (row // padded * n_out + j) * d + feature, mask=(o < n) & (j < n_out), other=0.0)
    tl.store(out + o, b_M.to(out.dtype.element_ty), mask=o < n)


@triton.jit
def columns_kernel(M, scales, out, k, d):  # [k, d], [k], [d / 64, tiles, 64, 8, 8]
    """Store 2^14 M / scales in out, 64 columns d at a time, in the order in which threads multiply.

    A thread holds 8 of 32 rows k and multiplies 4 of them at a time, two in each half of 16. It holds 4
    neighbouring columns of 16.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, 64)
    row, column = tile * 64 + o[:, None], part * 64 + o[None, :]
    b_M = tl.load(M + row * d + column, mask=row < k, other=0.0)
    b_M = b_M / tl.load(scales + row, mask=row < k, other=1.0) * 16384.0
    # Split rows into 2 x 4 x 4 x 2 and columns into 4 x 4 x 2 x 2, and permute these axes.
    b_M = b_M.to(tl.float16).reshape(2, 4, 4, 2, 4, 4, 2, 2).permute(4, 6, 5, 7, 0, 2, 1, 3).reshape(64, 64)
    place, step = o[:, None], o[None, :]
    out += (part * tl.num_programs(0) + tile) * 4096
    tl.store(out + place * 64 + (step // 8 ^ place % 8) * 8 + step % 8, b_M)


def by_features(M: Tensor, n_out: int) -> Tensor:
    """Return M [q, d] in bfloat16, [d / 64, rows, 8, 8]. Zeros fill every n_out rows to a multiple of 8."""
    (q, d), padded, M = M.shape, multiple_of_8(n_out), M.contiguous()
    out = M.new_empty(d // 64, q // n_out * padded, 8, 8, dtype=torch.bfloat16)
    features_kernel[cdiv(out.numel(), BLOCK),](M, out, out.numel(), q, d, n_out, padded, BLOCK=BLOCK)
    return out


def by_columns(M: Tensor, scales: Tensor) -> Tensor:
    """Return 2^14 M / scales in float16, [d / 64, k / 64, 64, 8, 8], from M [k, d] and scales [k, 1].

    Zeros fill k up to a multiple of 64.
    """
    (k, d), tiles = M.shape, cdiv(len(M), 64)
    out = M.new_empty(d // 64, tiles, 64, 8, 8, dtype=torch.float16)
    columns_kernel[tiles, d // 64](M, scales, out, k, d)
    return out
