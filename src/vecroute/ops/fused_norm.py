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


def normalized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """N(x) of x [b, j, h] in a dtype, and of each vector the mean and 1 / the deviation, [b, j, 1] each."""
    b, j, h = x.shape
    if dtype == x.dtype or h > MOST_FEATURES:
        v, mean, rstd = torch.native_layer_norm(x, (h,), None, None, 1e-5)
        return v.to(dtype), mean, rstd
    x = x.contiguous()
    v, (mean, rstd) = torch.empty_like(x, dtype=dtype), x.new_empty(2, b, j, 1)  # [b, j, h], [b, j, 1] twice
    block = triton.next_power_of_2(h)
    rows = max(1, 2048 // block)
    normalize_kernel[triton.cdiv(b * j, rows),](x, v, mean, rstd, b * j, h, BLOCK_R=rows, BLOCK_D=block)
    return v, mean, rstd
