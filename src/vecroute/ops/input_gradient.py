"""The gradients of x_inp and of W_A of one long sample, in one CUDA kernel (Hopper).

As the kernel of ``fused_halves``, but a block has whole rows: pairs come from memory once, and M from the
cache once for all of them.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vecroute.ops import hopper
from vecroute.ops.common import cdiv
from vecroute.ops.problem import Problem

GROUPS, ROWS, COLUMNS = 2, 64, 64  # a block has so many groups of 128 threads, each with so many rows
STAGES = 3  # of M


@cache
def has_kernel(waiting: int, n_out: int, device: torch.device) -> bool:
    """Whether the kernel can be compiled for a device, for pairs of so many iterations that wait."""
    if n_out % 4 or not hopper.has_shared_bytes(shared_bytes(waiting, n_out), device):
        return False
    try:
        return bool(kernel(waiting, n_out, device))
    except hopper.CANNOT_COMPILE:
        return False


def can_multiply(p: Problem, n_waiting: int) -> bool:
    """Whether ``input_gradient`` can be called where ``fused_halves`` can, with pairs [i, n_waiting]."""
    whole = p.x_inp.shape[-1] % COLUMNS == 0
    return whole and has_kernel(n_waiting // (2 * p.n_out), p.n_out, p.x_inp.device)


def input_gradient(waiting: Tensor, phi, M, top, x, W_A, grad_x, grad_W_A, grad_a: Tensor) -> None:
    """As ``fused_halves.input_gradient``, with M from ``arranged``."""
    (n, d), n_out = x.shape, phi.shape[1]
    launch = kernel(len(top) - 1, n_out, x.device)
    tensors = waiting, phi, M, top, x, W_A, grad_a, grad_x, grad_W_A
    strides = [t.stride(0) for t in (waiting, phi, top, x, W_A, grad_x, grad_W_A)]
    with torch.cuda.device(x.device):
        launch(
            grid=(cdiv(n, GROUPS * ROWS), 1, 1),
            block=(128 * GROUPS, 1, 1),
            args=[*tensors, n, d, *strides],
            shared_mem=shared_bytes(len(top) - 1, n_out),
        )


def arranged(M: Tensor, weights: Tensor) -> Tensor:
    """M [k, d] over weights [k, 1], one for each row, as the kernel reads it."""
    from vecroute.ops.arrange import by_columns  # Triton, which this file else does without

    return by_columns(M, weights)


@cache
def kernel(waiting: int, n_out: int, device: torch.device) -> Any:
    """The compiled kernel."""
    text, shared = source(waiting, n_out), shared_bytes(waiting, n_out)
    return hopper.compiled(text, "input_gradient", shared, device)


def source(waiting: int, n_out: int) -> str:
    """The kernel for sizes that it has as constants."""
    constants = f"constexpr int WAITING = {waiting}, N_OUT = {n_out};\n"
    return hopper.source(
        "input_gradient.cu", constants, hopper.multiplication("gradient_mma", COLUMNS // 8, in_registers=True)
    )


def shared_bytes(waiting: int, n_out: int) -> int:
    """The size of shared memory, as ``input_gradient.cu`` divides it."""
    return STAGES * stage_bytes(waiting, n_out) + GROUPS * ROWS * COLUMNS * 4 + 2 * STAGES * 8


def stage_bytes(waiting: int, n_out: int) -> int:
    """What ``COLUMNS`` columns of M have."""
    return cdiv((2 * waiting + 1) * n_out, 64) * COLUMNS * 128
