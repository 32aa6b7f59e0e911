"""The paper's N where a product follows that rounds: normalised and rounded by one Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_FEATURES = 8192  # of a vector that a program has in registers


@triton.jit
def normalize_kernel(
    x, v, mean, rstd,  # [r, h] twice, [r] twice
    n_rows, d_out, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """v = (x - mean) rstd of each row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    o_h, m_row = tl.arange(0, BLOCK_D)[None, :], row < n_rows
    m = m_row & (o_h < d_out)
    b_x = tl.load(x + row * d_out + o_h, mask=m, other=0.0)
    b_mean = tl.sum(b_x, 1)[:, None] / d_out
    b_x = tl.where(m, b_x - b_mean, 0.0)
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 1)[:, None] / d_out + 1e-5)
    tl.store(v + row * d_out + o_h, (b_x * b_rstd).to(v.dtype.element_ty), mask=m)
    tl.store(mean + row, b_mean, mask=m_row)
    tl.store(rstd + row, b_rstd, mask=m_row)


@triton.jit
def normalize_backward_kernel(
    grad_v, x, mean, rstd, grad_x,  # [r, h] twice, [r] twice, [r, h]
    n_rows, d_out, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """grad_x = rstd (grad_v - mean(grad_v) - v mean(v grad_v)) of each row, with v as above."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    o_h, m_row = tl.arange(0, BLOCK_D)[None, :], row < n_rows
    m = m_row & (o_h < d_out)
    b_rstd = tl.load(rstd + row, mask=m_row, other=0.0)
    b_x = tl.load(x + row * d_out + o_h, mask=m, other=0.0)
    b_v = tl.where(m, (b_x - tl.load(mean + row, mask=m_row, other=0.0)) * b_rstd, 0.0)
    b_grad = tl.load(grad_v + row * d_out + o_h, mask=m, other=0.0).to(tl.float32)
    along = tl.sum(b_v * b_grad, 1)[:, None] / d_out
    b_grad -= tl.sum(b_grad, 1)[:, None] / d_out + b_v * along
    tl.store(grad_x + row * d_out + o_h, b_grad * b_rstd, mask=m)


def normalized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """N(x) of x [b, j, h] in a dtype, and of each vector the mean and 1 / the deviation, [b, j, 1] each."""
    b, j, h = x.shape
    if dtype == x.dtype or h > MOST_FEATURES:
        v, mean, rstd = torch.native_layer_norm(x, (h,), None, None, 1e-5)
        return v.to(dtype), mean, rstd
    x = x.contiguous()
    v, (mean, rstd) = torch.empty_like(x, dtype=dtype), x.new_empty(2, b, j, 1)  # [b, j, h], [b, j, 1] twice
    blocks = blocks_of_vectors(h)
    normalize_kernel[triton.cdiv(b * j, blocks["BLOCK_R"]),](x, v, mean, rstd, b * j, h, **blocks)
    return v, mean, rstd


def normalized_backward(grad_v: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of x [b, j, h] from that of N(x), which may have another dtype."""
    b, j, h = x.shape
    if grad_v.dtype == x.dtype or h > MOST_FEATURES:
        grad_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_v.to(x.dtype), x, (h,), mean, rstd, None, None, [True, False, False]
        )  # [b, j, h]
        return grad_x
    x, blocks = x.contiguous(), blocks_of_vectors(h)  # [b, j, h]
    grad_x = torch.empty_like(x)  # [b, j, h]
    normalize_backward_kernel[triton.cdiv(b * j, blocks["BLOCK_R"]),](
        grad_v, x, mean, rstd, grad_x, b * j, h, **blocks
    )
    return grad_x


def blocks_of_vectors(h: int) -> dict[str, int]:
    """How many vectors of h features a program has."""
    block = triton.next_power_of_2(h)
    return {"BLOCK_R": max(1, 2048 // block), "BLOCK_D": block}
