"""Products of many rows with a small matrix in IEEE float32, on the tensor cores.

cuBLAS does not use tensor cores for IEEE float32. Here each operand is split into two tf32 numbers; three
products of these give the digits of float32 in two thirds of the time. The kernel can also compute the
gradients of the activations, so that everything as large as x_inp is read and written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.plan.blocks import IEEE_PRODUCT


@triton.jit
def rows_kernel(
    a,  # [b, i, k]
    b,  # [b, n, k]
    out,  # [b, i, n]
    x, W_A, scaled, grad_W_A,  # [i, n], [i, n], [i], [i, n]; not read unless ACTIVATIONS
    n_rows, n_columns, n_inner, a_s, a_i, b_s, b_n, out_s, out_i,  # in units of VEC, except n_rows and *_s
    x_i, W_i, grad_W_i,
    ADD: tl.constexpr,
    ACTIVATIONS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute out_in = sum_k a_ik b_nk, or add it to out if ADD.

    With ACTIVATIONS, also add scaled_i W_A_in to out_in, and store grad_W_A_in = scaled_i x_in.
    """
    n_columns, n_inner = n_columns * VEC, n_inner * VEC  # so that the compiler knows what divides them
    n_blocks = tl.cdiv(n_columns, BLOCK_N)  # neighbours share rows of a, which then come from the cache
    o_i = (tl.program_id(0) // n_blocks).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    o_n = (tl.program_id(0) % n_blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    sample = tl.program_id(1).to(tl.int64)
    m_i, m_n = o_i < n_rows, o_n < n_columns
    p_a = a + sample * a_s + o_i * (a_i * VEC) + o_k[None, :]
    p_b = b + sample * b_s + o_n[None, :] * (b_n * VEC) + o_k[:, None]
    total = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)
    for k in range(0, n_inner, BLOCK_K):
        m_k = o_k < n_inner - k
        b_a = tl.load(p_a + k, mask=m_i & m_k[None, :], other=0.0)
        b_b = tl.load(p_b + k, mask=m_n[None, :] & m_k[:, None], other=0.0)
        total = tl.dot(b_a, b_b, total, input_precision="tf32x3")
    m = m_i & m_n[None, :]
    p_out = out + sample * out_s + o_i * (out_i * VEC) + o_n[None, :]
    if ACTIVATIONS:
        b_scaled = tl.load(scaled + o_i, mask=m_i, other=0.0)
        total += b_scaled * tl.load(W_A + o_i * W_i + o_n[None, :], mask=m, other=0.0)
        b_x = tl.load(x + o_i * x_i + o_n[None, :], mask=m, other=0.0)
        tl.store(grad_W_A + o_i * grad_W_i + o_n[None, :], b_scaled * b_x, mask=m)
    if ADD:
        total += tl.load(p_out, mask=m, other=0.0)
    tl.store(p_out, total, mask=m)


def rows_times(a: Tensor, b: Tensor, out: Tensor, fresh: bool = True, activations=None) -> Tensor:
    """Compute out = a b^T if fresh, else out += a b^T, in float32.

    Args:
        a: [b, i, k], b: [b, n, k], out: [b, i, n], each contiguous in its last dimension.
        activations: x, W_A, grad_W_A [i, n] and scaled [i] of one sample, or None. If given, also add
            scaled W_A to out, and store scaled x in grad_W_A.
    """
    x, W_A, grad_W_A, scaled = activations or (a, a, a, a)
    sizes = [out.shape[2], a.shape[2], a.stride(1), b.stride(1), out.stride(1)]
    vec = 1 if any(size % 4 for size in sizes) else 4
    columns, inner, a_i, b_n, out_i = (size // vec for size in sizes)
    block_i, block_n = IEEE_PRODUCT["BLOCK_I"], IEEE_PRODUCT["BLOCK_N"]
    grid = cdiv(out.shape[1], block_i) * cdiv(out.shape[2], block_n), len(a)
    rows_kernel[grid](
        a, b, out, x, W_A, scaled, grad_W_A, out.shape[1], columns, inner, a.stride(0), a_i, b.stride(0), b_n,
        out.stride(0), out_i, x.stride(-2), W_A.stride(-2), grad_W_A.stride(-2), ADD=not fresh,
        ACTIVATIONS=activations is not None, VEC=vec, **IEEE_PRODUCT,
    )  # fmt: skip
    return out
