"""Triton kernels of the batch path between two passes over the inputs: products of small matrices.

Each kernel also does the work before and after its product, because another launch would cost more. A row is
one output j of one sample b.
"""

import triton
import triton.language as tl

from vecroute.ops.backends.fused.functions import top_below
from vecroute.ops.paths.batch.tiles import multiply


@triton.jit
def block_of(n_rows, n_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the rows and columns of a program, and which of them exist."""
    o_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    return o_m, o_n, o_m < n_rows, o_n < n_columns


@triton.jit
def product_kernel(
    a, b, out,  # [m, k], [k, n], [m, n]
    n_rows, n_columns, n_inner, a_m, a_k, b_k, b_n,  # m, n, k, and strides
    ADD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Compute out = a b, or out += a b if ADD."""
    o_m, o_n, m_m, m_n = block_of(n_rows, n_columns, BLOCK_M, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], T)
    for k in range(0, n_inner, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K).to(tl.int64)
        m_k = o_k < n_inner
        b_a = tl.load(
            a + o_m[:, None] * a_m + o_k[None, :] * a_k, mask=m_m[:, None] & m_k[None, :], other=0.0
        )
        b_b = tl.load(
            b + o_k[:, None] * b_k + o_n[None, :] * b_n, mask=m_k[:, None] & m_n[None, :], other=0.0
        )
        total = multiply(b_a.to(T), b_b.to(T), total, PRECISION)
    p_out, m = out + o_m[:, None] * n_columns + o_n[None, :], m_m[:, None] & m_n[None, :]
    if ADD:
        total += tl.load(p_out, mask=m, other=0.0)
    tl.store(p_out, total, mask=m)


@triton.jit(do_not_specialize=["n_rows"])
def outputs_kernel(
    y, s, sqrt_n_inp, W_F1, W_F2, B_F2, x_out,  # [b, j, d], [b, j], [b], [j, d], [d, h], [j, h], [b, j, h]
    n_rows, n_out, d_inp, d_out,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Compute x_out = (y W_F1 / sqrt(n_inp)) W_F2 + s B_F2."""
    row, o_h, m_row, m_h = block_of(n_rows, d_out, BLOCK_M, BLOCK_N)
    j = row % n_out
    scale = 1.0 / tl.load(sqrt_n_inp + row // n_out, mask=m_row, other=1.0)
    total = tl.zeros([BLOCK_M, BLOCK_N], T)
    for k in range(0, d_inp, BLOCK_K):
        o_d = k + tl.arange(0, BLOCK_K)
        m = m_row[:, None] & (o_d < d_inp)[None, :]
        u = tl.load(y + row[:, None] * d_inp + o_d[None, :], mask=m, other=0.0) * scale[:, None]
        u *= tl.load(W_F1 + j[:, None] * d_inp + o_d[None, :], mask=m, other=0.0).to(T)
        m = (o_d < d_inp)[:, None] & m_h[None, :]
        total = multiply(
            u, tl.load(W_F2 + o_d[:, None] * d_out + o_h[None, :], mask=m, other=0.0).to(T), total, PRECISION
        )
    m = m_row[:, None] & m_h[None, :]
    b_s = tl.load(s + row, mask=m_row, other=0.0)
    total += b_s[:, None] * tl.load(B_F2 + j[:, None] * d_out + o_h[None, :], mask=m, other=0.0).to(T)
    tl.store(x_out + row[:, None] * d_out + o_h[None, :], total, mask=m)


@triton.jit
def row_statistics(
    x, row, m_row, n, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, NORMALIZE: tl.constexpr, T: tl.constexpr
):
    """Return mean and 1 / standard deviation of rows of n numbers; 0 and 1 if rows are not normalised."""
    mean = tl.zeros([BLOCK_M], T)
    rstd = mean + 1.0
    if NORMALIZE:
        total = tl.zeros([BLOCK_M, BLOCK_K], T)
        for k in range(0, n, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)
            total += tl.load(
                x + row[:, None] * n + o_k[None, :], mask=m_row[:, None] & (o_k < n)[None, :], other=0.0
            )
        mean = tl.sum(total, 1) / n
        total = tl.zeros([BLOCK_M, BLOCK_K], T)
        for k in range(0, n, BLOCK_K):
            o_k = k + tl.arange(0, BLOCK_K)
            m = m_row[:, None] & (o_k < n)[None, :]
            away = tl.where(
                m, tl.load(x + row[:, None] * n + o_k[None, :], mask=m, other=0.0) - mean[:, None], 0.0
            )
            total += away * away
        rstd = 1.0 / tl.sqrt(tl.sum(total, 1) / n + 1e-5)
    return mean, rstd


@triton.jit(do_not_specialize=["n_rows"])
def predictions_kernel(
    x_out, W_G1, W_G2, B_G2, W_S, g, x_hat,  # [b, j, h], [h, d], [j, d] twice, [j], [b, j, d] twice
    n_rows, n_out, d_inp, d_out, x_hat_b, x_hat_0,  # the stride of samples in x_hat, and where it begins
    FIXED: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute g = N(x_out) W_G1 and x_hat = W_G2 g + B_G2, times W_S if W_S has no i."""
    row, o_d, m_row, m_d = block_of(n_rows, d_inp, BLOCK_M, BLOCK_N)
    mean, rstd = row_statistics(x_out, row, m_row, d_out, BLOCK_M, BLOCK_K, NORMALIZE, T)
    total = tl.zeros([BLOCK_M, BLOCK_N], T)
    for k in range(0, d_out, BLOCK_K):
        o_h = k + tl.arange(0, BLOCK_K)
        m = m_row[:, None] & (o_h < d_out)[None, :]
        v = tl.load(x_out + row[:, None] * d_out + o_h[None, :], mask=m, other=0.0)
        v = tl.where(m, (v - mean[:, None]) * rstd[:, None], 0.0)
        m = (o_h < d_out)[:, None] & m_d[None, :]
        total = multiply(
            v, tl.load(W_G1 + o_h[:, None] * d_inp + o_d[None, :], mask=m, other=0.0).to(T), total, PRECISION
        )
    m, j = m_row[:, None] & m_d[None, :], row % n_out
    o = j[:, None] * d_inp + o_d[None, :]
    tl.store(g + row[:, None] * d_inp + o_d[None, :], total, mask=m)
    total = total * tl.load(W_G2 + o, mask=m, other=0.0).to(T) + tl.load(B_G2 + o, mask=m, other=0.0).to(T)
    if not FIXED:
        total *= tl.load(W_S + j, mask=m_row, other=0.0).to(T)[:, None]
    tl.store(x_hat + (row // n_out * x_hat_b)[:, None] + x_hat_0 + o, total, mask=m)


@triton.jit(do_not_specialize=["n_inp"])
def shared_rows_kernel(
    W_use, W_ign, B_use, B_ign,  # [d, j] twice, [j] twice
    input_mask, sqrt_n_inp,  # [b, i] where COUNTED, [b]
    M, M_tops, bias,  # [2 j, M_i], [2 j] where HALF, [2 j]
    n_out, d_inp, M_i, n_inp,
    LENGTHS: tl.constexpr, COUNTED: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write the rows of M for c_sum and c_ign, one per program. If LENGTHS, others write sqrt(n_inp)."""
    q = tl.program_id(0)
    if q >= 2 * n_out:
        if LENGTHS:
            count_inputs(input_mask, sqrt_n_inp, (q - 2 * n_out).to(tl.int64), n_inp, COUNTED, T)
        return
    j = q % n_out
    b_use = tl.load(B_use + j).to(T)
    b_ign = tl.load(B_ign + j).to(T)
    tl.store(bias + q, tl.where(q < n_out, b_use + b_ign, b_ign))
    for start in range(0, d_inp, BLOCK_D):  # one step if HALF
        o_d = start + tl.arange(0, BLOCK_D)
        m = o_d < d_inp
        row = tl.load(W_ign + o_d * n_out + j, mask=m, other=0.0).to(T)
        if q < n_out:
            row += tl.load(W_use + o_d * n_out + j, mask=m, other=0.0).to(T)
        if HALF:
            top = top_below(tl.max(tl.abs(row), 0))
            tl.store(M_tops + q, top)
            tl.store(M + q * M_i + o_d, (row * (16384.0 / top)).to(tl.float16), mask=o_d < M_i)
        else:
            tl.store(M + q * M_i + o_d, row, mask=m)


@triton.jit
def count_inputs(input_mask, sqrt_n_inp, b, n_inp, COUNTED: tl.constexpr, T: tl.constexpr):
    """Return sqrt(n_inp) of a sample, where n_inp counts its used inputs, at least 1."""
    total = n_inp
    if COUNTED:
        n = tl.zeros([1024], tl.int32)
        for start in range(0, n_inp, 1024):
            o_i = start + tl.arange(0, 1024)
            n += (tl.load(input_mask + b * n_inp + o_i, mask=o_i < n_inp, other=0) != 0).to(tl.int32)
        total = tl.sum(n, 0)
    tl.store(sqrt_n_inp + b, tl.sqrt(tl.maximum(total, 1).to(T)))


@triton.jit(do_not_specialize=["n_inp"])
def lengths_kernel(input_mask, sqrt_n_inp, n_inp, COUNTED: tl.constexpr, T: tl.constexpr):  # as above
    """Compute sqrt(n_inp) of each sample."""
    count_inputs(input_mask, sqrt_n_inp, tl.program_id(0).to(tl.int64), n_inp, COUNTED, T)
