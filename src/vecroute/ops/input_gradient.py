"""The gradients of x_inp and of W_A of one long sample, or of x_inp of a batch, in one CUDA kernel (Hopper).

As the kernel of ``fused_halves``, but a block has whole rows: pairs come from memory once, and M from the
cache once for all of them.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.ops import hopper
from vecroute.ops.common import multiple_of_8, cdiv
from vecroute.ops.problem import Problem

GROUPS, ROWS = 2, 64  # a block has so many groups of 128 threads, each with so many rows


class Sizes(NamedTuple):
    """What the kernel has as constants."""

    waiting: int  # iterations that wait
    n_out: int
    n_last: int  # pairs of the last iteration
    batch: bool
    columns: int  # of a part of M
    stages: int  # parts that are there at a time

    @property
    def n_pairs(self) -> int:
        """All pairs of a row."""
        return 2 * self.waiting * self.n_out + self.n_last


def of_one(waiting: int, n_out: int) -> Sizes:
    """Of one sample of a fixed length."""
    return Sizes(waiting, n_out, n_out, batch=False, columns=64, stages=3)


def of_many(n_out: int) -> Sizes:
    """Of a batch of a variable length, with the pairs of ``half_passes.HalfGradient``."""
    return Sizes(1, n_out, n_out + multiple_of_8(2 * n_out + 1), batch=True, columns=128, stages=2)


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
    launch(sizes, 1, i, d, tensors, [t.stride(0) for t in (waiting, phi, top, x, W_A, grad_x, grad_W_A)])


def input_gradient_of_batch(pairs: Tensor, M: Tensor, shared: Tensor, tops: Tensor, grad_x: Tensor) -> None:
    """Fill grad_x [b, i, d] with tops 2^-28 pairs M, of a variable length.

    Args:
        pairs: [b, i, k] of ``half_passes.HalfGradient``, in float16.
        M, shared: [b, 3 j, d] and [k - 3 j, d] their matrix, in float16.
        tops: [2, b, i] powers of two, ascending, the first iteration last.
    """
    (b, i, d), j = grad_x.shape, M.shape[1] // 3
    sizes = of_many(j)
    if not pairs.is_cuda:
        return _without_kernel(sizes, pairs, M, shared, tops, grad_x)
    from vecroute.ops.arrange import by_columns_of_batch  # Triton, which this file else does without

    last = pairs[..., 2 * j :]  # [b, i, n_last]
    none = grad_x  # not read
    tensors = pairs, last, by_columns_of_batch(M, shared, sizes.columns), tops, none, none, none, grad_x, none
    row = pairs.stride(1)
    launch(sizes, b, i, d, tensors, [row, row, tops.stride(0), d, d, d, d])


def _without_kernel(sizes: Sizes, pairs, M, shared, tops, grad_x) -> None:
    """The same by PyTorch, where kernels are interpreted: in float16 all of a row in the unit of the last."""
    j, (b, _, k) = sizes.n_out, pairs.shape
    of_second = torch.arange(k) // j  # which blocks of outputs are of the second iteration
    of_second = (of_second < 2) | (of_second == 3)  # [k]
    before = (tops[0] / tops[1]).half()[..., None]  # [b, i, 1]
    pairs = torch.where(of_second, pairs * before, pairs).float() * (tops[1, ..., None] / 2**28)  # [b, i, k]
    torch.bmm(pairs, torch.cat((M, shared.expand(b, -1, -1)), 1).float(), out=grad_x)


def launch(sizes: Sizes, b: int, i: int, d: int, tensors: tuple, strides: list[int]) -> None:
    """Of b samples that follow each other, [i, d] each."""
    with torch.cuda.device(tensors[0].device):
        kernel(sizes, tensors[0].device)(
            grid=(cdiv(i, GROUPS * ROWS), b, 1),
            block=(128 * GROUPS, 1, 1),
            args=[*tensors, i, d, *strides],
            shared_mem=shared_bytes(sizes),
        )


def arranged(M: Tensor, weights: Tensor) -> Tensor:
    """M [k, d] over weights [k, 1], one for each row, as the kernel reads it."""
    from vecroute.ops.arrange import by_columns

    return by_columns(M, weights)


@cache
def kernel(sizes: Sizes, device: torch.device) -> Any:
    """The compiled kernel."""
    return hopper.compiled(source(sizes), "input_gradient", shared_bytes(sizes), device)


def source(sizes: Sizes) -> str:
    """The kernel for sizes that it has as constants."""
    constants = f"constexpr int WAITING = {sizes.waiting}, N_OUT = {sizes.n_out}, N_LAST = {sizes.n_last};\n"
    constants += (
        f"constexpr int BATCH = {int(sizes.batch)}, COLUMNS = {sizes.columns}, STAGES = {sizes.stages};\n"
    )
    multiply = hopper.multiplication("gradient_mma", sizes.columns // 8, in_registers=True)
    return hopper.source("input_gradient.cu", constants, multiply)


def shared_bytes(sizes: Sizes) -> int:
    """The size of shared memory, as ``input_gradient.cu`` divides it."""
    products = 0 if sizes.batch else GROUPS * ROWS * sizes.columns * 4
    return sizes.stages * (stage_bytes(sizes) + 2 * 8) + products


def stage_bytes(sizes: Sizes) -> int:
    """What a part of M has."""
    return cdiv(sizes.n_pairs, 64) * sizes.columns * 128
