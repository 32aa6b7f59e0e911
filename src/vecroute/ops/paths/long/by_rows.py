"""The gradients of x_inp and of W_A in one CUDA kernel (Hopper), as in ``halves``.

Here a block handles whole rows. It reads pairs from memory once, and M from the cache once for all its rows.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.paths.long import hopper
from vecroute.ops.paths.long.halves import row_tops
from vecroute.ops.plan import limits
from vecroute.ops.plan.hopper import by_rows_bytes

GROUPS, ROWS = 2, 64  # groups of 128 threads in a block, and rows per group


@triton.jit
def columns_kernel(M, tops, out, k, d):  # [k, d], [k], [d / 64, tiles, 64, 8, 8]
    """Store 2^14 M / tops in out, 64 columns d at a time, in the order in which threads multiply.

    Tensor cores read it from shared memory. A row there has 64 numbers, in groups of eight. The place of a
    group depends on the row, so that the groups of 8 rows are in different banks.

    A thread holds 8 of 32 rows k and multiplies 4 of them at a time, two in each half of 16. It holds 4
    neighbouring columns of 16.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, 64)
    row, column = tile * 64 + o[:, None], part * 64 + o[None, :]
    b_M = tl.load(M + row * d + column, mask=row < k, other=0.0)
    b_M = b_M / tl.load(tops + row, mask=row < k, other=1.0) * 16384.0
    # Split rows into 2 x 4 x 4 x 2 and columns into 4 x 4 x 2 x 2, and permute these axes.
    b_M = b_M.to(tl.float16).reshape(2, 4, 4, 2, 4, 4, 2, 2).permute(4, 6, 5, 7, 0, 2, 1, 3).reshape(64, 64)
    place, step = o[:, None], o[None, :]
    out += (part * tl.num_programs(0) + tile) * 4096
    tl.store(out + place * 64 + (step // 8 ^ place % 8) * 8 + step % 8, b_M)


def by_columns(M: Tensor, tops: Tensor) -> Tensor:
    """Return 2^14 M / tops in float16, [d / 64, k / 64, 64, 8, 8], from M [k, d] and tops [k, 1].

    Zeros fill k up to a multiple of 64.
    """
    (k, d), tiles = M.shape, cdiv(len(M), 64)
    out = M.new_empty(d // 64, tiles, 64, 8, 8, dtype=torch.float16)
    columns_kernel[tiles, d // 64](M, tops, out, k, d)
    return out


def scaled_matrix(matrices: list[Tensor], n_out: int) -> tuple[Tensor, Tensor]:
    """Do the same as ``long.scaled_matrix`` in the first iteration."""
    M = torch.cat([M[0] for M in matrices])  # [w + j, d]
    tops = row_tops(M)  # [w + j, 1]
    return by_columns(M, tops), tops[-n_out:].flatten()


def input_gradient(waiting: Tensor, phi, M, top, x, W_A, grad_x, grad_W_A, grad_a: Tensor) -> None:
    """Do the same as ``long.input_gradient``."""
    n_waiting, n_out, (i, d) = len(top) - 1, phi.shape[1], x.shape
    strides = [t.stride(0) for t in (waiting, phi, top, x, W_A, grad_x, grad_W_A)]
    with torch.cuda.device(x.device):
        kernel(n_waiting, n_out, x.device)(
            grid=(cdiv(i, GROUPS * ROWS), 1, 1),
            block=(128 * GROUPS, 1, 1),
            args=[waiting, phi, M, top, x, W_A, grad_a, grad_x, grad_W_A, i, d, *strides],
            shared_mem=by_rows_bytes(n_pairs(n_waiting, n_out)),
        )


def n_pairs(n_waiting: int, n_out: int) -> int:
    """Return the number of pairs per input: two per output for each waiting iteration, one for the first."""
    return (2 * n_waiting + 1) * n_out


@cache
def kernel(n_waiting: int, n_out: int, device: torch.device) -> Any:
    """Return the compiled kernel."""
    n_bytes = by_rows_bytes(n_pairs(n_waiting, n_out))
    return hopper.compiled(source(n_waiting, n_out), "input_gradient", n_bytes, device)


def source(n_waiting: int, n_out: int) -> str:
    """Return the kernel with its sizes as constants."""
    columns, stages = limits.BY_ROWS_COLUMNS, limits.BY_ROWS_STAGES
    constants = f"constexpr int WAITING = {n_waiting}, N_OUT = {n_out};\n"
    constants += f"constexpr int COLUMNS = {columns}, STAGES = {stages};\n"
    multiply = hopper.multiplication("gradient_mma", columns // 8, in_registers=True)
    return hopper.source("by_rows.cu", constants, multiply)
