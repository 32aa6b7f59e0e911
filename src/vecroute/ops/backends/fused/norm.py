"""The paper's N with its result rounded for a product, and the gradient of N, one Triton kernel each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.common import cdiv, normalize
from vecroute.ops.plan import blocks, limits


@triton.jit
def normalize_rows(x, row, o_h, m, d_out):
    """Return v = (x - mean) rstd of some rows, and rstd."""
    b_x = tl.load(x + row * d_out + o_h, mask=m, other=0.0)
    b_x = tl.where(m, b_x - tl.sum(b_x, 1)[:, None] / d_out, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 1)[:, None] / d_out + 1e-5)
    return b_x * rstd, rstd


@triton.jit
def normalize_kernel(x, v, n_rows, d_out, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):  # [r, h] each
    """Compute v = N(x)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    o_h = tl.arange(0, BLOCK_D)[None, :]
    m = (row < n_rows) & (o_h < d_out)
    b_v, _ = normalize_rows(x, row, o_h, m, d_out)
    tl.store(v + row * d_out + o_h, b_v.to(v.dtype.element_ty), mask=m)


@triton.jit
def normalize_backward_kernel(
    grad_v, x, v, grad_x,  # [r, h] each
    n_rows, d_out, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute v = N(x) again, and grad_x = rstd (grad_v - mean(grad_v) - v mean(v grad_v)) of each row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    o_h = tl.arange(0, BLOCK_D)[None, :]
    m = (row < n_rows) & (o_h < d_out)
    b_grad = tl.load(grad_v + row * d_out + o_h, mask=m, other=0.0).to(x.dtype.element_ty)
    b_v, rstd = normalize_rows(x, row, o_h, m, d_out)
    along = tl.sum(b_v * b_grad, 1)[:, None] / d_out
    b_grad -= tl.sum(b_grad, 1)[:, None] / d_out + b_v * along
    tl.store(v + row * d_out + o_h, b_v.to(v.dtype.element_ty), mask=m)
    tl.store(grad_x + row * d_out + o_h, b_grad * rstd, mask=m)


def normalized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return N(x) of x [b, j, h] in a dtype."""
    if not has_kernel(x, dtype):
        return normalize(x).to(dtype)  # [b, j, h]
    x = x.contiguous()
    v = torch.empty_like(x, dtype=dtype)  # [b, j, h]
    launch(normalize_kernel, x, v)
    return v


def normalized_backward(grad_v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return N(x) of x [b, j, h] in the dtype of grad_v, and the gradient of x in the dtype of x."""
    dtype, size = grad_v.dtype, x.shape[-1:]
    if size[0] == 1:
        return x.to(dtype), grad_v.to(x.dtype)  # [b, j, h] each
    if x.dtype != torch.float32 or size[0] > limits.NORM_D_OUT:
        v, mean, rstd = torch.native_layer_norm(x, size, None, None, 1e-5)  # [b, j, h], [b, j, 1] twice
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_v.to(x.dtype), x, size, mean, rstd, None, None, [True, False, False]
        )  # [b, j, h]
        return v.to(dtype), grad_x
    x = x.contiguous()
    v, grad_x = torch.empty_like(grad_v), torch.empty_like(x)  # [b, j, h] each
    launch(normalize_backward_kernel, grad_v, x, v, grad_x)
    return v, grad_x


def has_kernel(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether our kernel normalises x and rounds it to dtype. If nothing is rounded, PyTorch does."""
    return dtype != x.dtype and 1 < x.shape[-1] <= limits.NORM_D_OUT


def launch(kernel, *tensors: Tensor) -> None:
    """Launch a kernel in which each program handles some vectors of the tensors, [b, j, h] each."""
    b, j, h = tensors[0].shape
    block = blocks.of_vectors(h)
    kernel[cdiv(b * j, block["BLOCK_R"]),](*tensors, b * j, h, **block)
