"""The gradients of x_inp and of W_A in one CUDA kernel (Hopper), as in ``halves``.

Here a block handles whole rows. It reads pairs from memory once, and M from the cache once for all its rows.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.paths.long import hopper
from vecroute.ops.paths.long.arrange import by_columns
from vecroute.ops.paths.long.halves import row_scales
from vecroute.ops.plan import limits
from vecroute.ops.plan.hopper import by_rows_bytes

GROUPS, ROWS = 2, 64  # groups of 128 threads in a block, and rows per group


def scaled_matrix(matrices: list[Tensor], n_out: int) -> tuple[Tensor, Tensor]:
    """Do the same as ``long.scaled_matrix`` in the first iteration."""
    M = torch.cat([M[0] for M in matrices])  # [w + j, d]
    scales = row_scales(M)  # [w + j, 1]
    return by_columns(M, scales), scales[-n_out:].flatten()


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
