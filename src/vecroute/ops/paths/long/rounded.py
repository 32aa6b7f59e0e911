"""Products of the rows of one long sample with few others, in bfloat16, in one CUDA kernel (Hopper).

Under autocast x_inp is float32: a product in bfloat16 would need a copy of it. Here rows are rounded on their
way to the tensor cores, and the results, which are to be read once, are bfloat16 too.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vecroute.ops.common import cdiv, multiple_of_8
from vecroute.ops.paths.long import hopper
from vecroute.ops.problem import Problem

GROUPS, ROWS, FEATURES, STAGES = 2, 64, 64, 3
MOST_OUTPUTS = 128  # of two parts 256 columns, as many as the tensor cores take at once


def can_multiply(p: Problem) -> bool:
    """Whether ``multiplier`` can be called: under autocast to bfloat16, for one sample."""
    bfloat16 = p.rounded == torch.bfloat16 and p.x_inp.dtype == torch.float32 and p.use is None
    return bfloat16 and p.x_inp.shape[2] % (2 * FEATURES) == 0 and has_kernels(p.n_out, p.x_inp.device)


@cache
def has_kernels(n_out: int, device: torch.device) -> bool:
    """Whether both kernels, for one and for two parts, can be compiled for a device."""
    if n_out % 4 or n_out > MOST_OUTPUTS or not hopper.has_shared_bytes(shared_bytes(n_out, 2), device):
        return False
    try:
        return all(kernel(n_out, parts, device) for parts in (1, 2))
    except hopper.CANNOT_COMPILE:
        return False


def multiplier(M: Tensor, n_out: int, out: Tensor) -> Callable[[Tensor], object]:
    """What fills out [1, i, q], bfloat16, with x M^T, a function of x [1, i, d].

    Args: M [1, q, d], with one or two rows for each output.
    """
    from vecroute.ops.paths.long.arrange import by_features  # Triton, which this file else does without

    _, n, q = out.shape
    launch, arranged = kernel(n_out, q // n_out, out.device), by_features(M[0], n_out)
    properties: Any = torch.cuda.get_device_properties(out.device)
    blocks = min(properties.multi_processor_count, cdiv(n, GROUPS * ROWS))

    def multiply(x: Tensor) -> None:
        with torch.cuda.device(x.device):
            launch(
                grid=(blocks, 1, 1),
                block=(128 * GROUPS, 1, 1),
                args=[x, arranged, out, n, x.shape[2], x.stride(1)],
                shared_mem=shared_bytes(n_out, q // n_out),
            )

    return multiply


@cache
def kernel(n_out: int, parts: int, device: torch.device) -> Any:
    """The compiled kernel."""
    return hopper.compiled(source(n_out, parts), "rounded_product", shared_bytes(n_out, parts), device)


def source(n_out: int, parts: int) -> str:
    """The kernel for sizes that it has as constants."""
    constants = f"constexpr int N_OUT = {n_out}, PARTS = {parts};\n"
    multiply = hopper.multiplication("product_mma", cdiv(n_out, 8) * parts, dtype="bf16")
    return hopper.source("rounded.cu", constants, multiply)


def shared_bytes(n_out: int, parts: int) -> int:
    """The size of shared memory, as ``rounded_product.cu`` divides it."""
    stage = parts * multiple_of_8(n_out) * 128
    products = cdiv(ROWS * parts * n_out * 2, 1024) * 1024
    return STAGES * stage + GROUPS * max(2 * ROWS * 128, products) + 2 * STAGES * 8
