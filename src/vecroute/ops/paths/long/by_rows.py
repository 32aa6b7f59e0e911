"""The gradients of x_inp and of W_A of one long sample, in one CUDA kernel (Hopper).

As the kernel of ``fused_halves``, but a block has whole rows: pairs come from memory once, and M from the
cache once for all of them.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.paths.long import hopper
from vecroute.ops.problem import Problem

GROUPS, ROWS = 2, 64  # a block has so many groups of 128 threads, each with so many rows


class Sizes(NamedTuple):
    """What the kernel has as constants."""

    waiting: int  # iterations that wait
    n_out: int
    n_last: int  # pairs of the last iteration
    columns: int  # of a part of M
    stages: int  # parts that are there at a time

    @property
    def n_pairs(self) -> int:
        """All pairs of a row."""
        return 2 * self.waiting * self.n_out + self.n_last


def of_one(waiting: int, n_out: int) -> Sizes:
    """Of one sample of a fixed length."""
    return Sizes(waiting, n_out, n_out, columns=64, stages=3)


@cache
def has_kernel(sizes: Sizes, device: torch.device) -> bool:
    """Whether the kernel can be compiled for a device."""
    if sizes.n_out % 4 or not hopper.has_shared_bytes(shared_bytes(sizes), device):
        return False
    try:
        return bool(kernel(sizes, device))
    except hopper.CANNOT_COMPILE:
        return False


def can_multiply(p: Problem, n_waiting: int) -> bool:
    """Whether ``input_gradient`` can be called where ``fused_halves`` can, with pairs [i, n_waiting]."""
    whole = p.x_inp.shape[-1] % 64 == 0
    return whole and has_kernel(of_one(n_waiting // (2 * p.n_out), p.n_out), p.x_inp.device)


def input_gradient(waiting: Tensor, phi, M, top, x, W_A, grad_x, grad_W_A, grad_a: Tensor) -> None:
    """As ``fused_halves.input_gradient``, with M from ``arranged``."""
    sizes, (i, d) = of_one(len(top) - 1, phi.shape[1]), x.shape
    tensors = waiting, phi, M, top, x, W_A, grad_a, grad_x, grad_W_A
    launch(sizes, i, d, tensors, [t.stride(0) for t in (waiting, phi, top, x, W_A, grad_x, grad_W_A)])


def launch(sizes: Sizes, i: int, d: int, tensors: tuple, strides: list[int]) -> None:
    """Launch the kernel for [i, d] numbers."""
    with torch.cuda.device(tensors[0].device):
        kernel(sizes, tensors[0].device)(
            grid=(cdiv(i, GROUPS * ROWS), 1, 1),
            block=(128 * GROUPS, 1, 1),
            args=[*tensors, i, d, *strides],
            shared_mem=shared_bytes(sizes),
        )


def arranged(M: Tensor, weights: Tensor) -> Tensor:
    """M [k, d] over weights [k, 1], one for each row, as the kernel reads it."""
    from vecroute.ops.paths.long.arrange import by_columns

    return by_columns(M, weights)


@cache
def kernel(sizes: Sizes, device: torch.device) -> Any:
    """The compiled kernel."""
    return hopper.compiled(source(sizes), "input_gradient", shared_bytes(sizes), device)


def source(sizes: Sizes) -> str:
    """The kernel for sizes that it has as constants."""
    constants = f"constexpr int WAITING = {sizes.waiting}, N_OUT = {sizes.n_out}, N_LAST = {sizes.n_last};\n"
    constants += f"constexpr int BATCH = 0, COLUMNS = {sizes.columns}, STAGES = {sizes.stages};\n"
    multiply = hopper.multiplication("gradient_mma", sizes.columns // 8, in_registers=True)
    return hopper.source("by_rows.cu", constants, multiply)


def shared_bytes(sizes: Sizes) -> int:
    """The size of shared memory, as ``input_gradient.cu`` divides it."""
    products = GROUPS * ROWS * sizes.columns * 4
    return sizes.stages * (stage_bytes(sizes) + 2 * 8) + products


def stage_bytes(sizes: Sizes) -> int:
    """What a part of M has."""
    return cdiv(sizes.n_pairs, 64) * sizes.columns * 128
