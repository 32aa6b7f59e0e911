"""Products of the rows of one long sample with few others, in bfloat16, in one CUDA kernel (Hopper).

Under autocast, x_inp is float32, and a product in bfloat16 would need a rounded copy. Here the kernel rounds
rows while it loads them. The results are bfloat16 too, because they are read only once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.paths.long import hopper
from vecroute.ops.paths.long.arrange import by_features
from vecroute.ops.plan.hopper import rounded_bytes

GROUPS, ROWS, FEATURES, STAGES = 2, 64, 64, 3


def multiplier(M: Tensor, n_out: int, out: Tensor) -> Callable[[Tensor], object]:
    """Return a function of x [1, i, d] that fills out [1, i, q], bfloat16, with x M^T.

    Args:
        M: [1, q, d], with one or two rows for each output.
    """
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
                shared_mem=rounded_bytes(n_out, q // n_out),
            )

    return multiply


@cache
def kernel(n_out: int, parts: int, device: torch.device) -> Any:
    """Return the compiled kernel."""
    return hopper.compiled(source(n_out, parts), "rounded_product", rounded_bytes(n_out, parts), device)


def source(n_out: int, parts: int) -> str:
    """Return the kernel with its sizes as constants."""
    constants = f"constexpr int N_OUT = {n_out}, PARTS = {parts};\n"
    multiply = hopper.multiplication("product_mma", cdiv(n_out, 8) * parts, dtype="bf16")
    return hopper.source("rounded.cu", constants, multiply)
