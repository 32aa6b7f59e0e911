"""Triton kernels of forward passes: a product with x_inp, and all work on its pairs, in one kernel.

``tiles.py`` explains tiles, halves and names.
"""

import triton
import triton.language as tl

from vecroute.ops.backends.fused.functions import top_below
from vecroute.ops.paths.batch.tiles import (
    LENGTHS,
    flat_prior,
    load_betas,
    responsibilities,
    rows_of,
    store_to_sum,
    tile_of,
    times_M,
    used_pairs,
)


@triton.jit(do_not_specialize=LENGTHS)
def inputs_kernel(
    x, W_A, B_A, sqrt_n_inp,  # [r, d], [1 or i, d], [1 or i], [b]
    input_mask, use, tiles,  # [r], [b, i, j], [n, 3]
    f, x_half, x_tops,  # [r]; where HALF [r, half_i] and [r]
    n_inp, per_sample, n_out, d_inp, use_b, use_i, use_j, half_i,
    FIXED: tl.constexpr, INPUTS: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, HALF: tl.constexpr,
    TILE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute f(a_inp), 0 at unused inputs, and x_inp as halves. A program handles some rows of a tile."""
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(1), TILE, PACKED)
    o_r = first + tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    m_all = o_r < end
    m_i, o_i = m_all, o_r - b * n_inp
    if INPUTS:
        m_i = m_i & (tl.load(input_mask + o_r, mask=m_i, other=0) != 0)
    if MASKED:
        o_j = tl.arange(0, BLOCK_J)[None, :]
        m_pairs = m_i[:, None] & (o_j < n_out)
        any_used = tl.load(use + b * use_b + o_i[:, None] * use_i + o_j * use_j, mask=m_pairs, other=0)
        m_i = m_i & (tl.max(any_used.to(tl.int32), 1) != 0)
    o_A = o_i if FIXED else o_i * 0
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    for start in range(0, d_inp, BLOCK_D):  # one step if HALF
        o_d = start + tl.arange(0, BLOCK_D)[None, :]
        m = m_i[:, None] & (o_d < d_inp)
        b_x = tl.load(x + o_r[:, None] * d_inp + o_d, mask=m, other=0.0).to(T)
        total += b_x * tl.load(W_A + o_A[:, None] * d_inp + o_d, mask=m, other=0.0).to(T)
        if HALF:
            top = top_below(tl.max(tl.abs(b_x), 1))
            tl.store(x_tops + o_r, top, mask=m_all)
            b_half = (b_x * (16384.0 / top)[:, None]).to(tl.float16)
            tl.store(x_half + o_r[:, None] * half_i + o_d, b_half, mask=m_all[:, None] & (o_d < half_i))
    a_inp = tl.sum(total, 1) / tl.load(sqrt_n_inp + b) + tl.load(B_A + o_A, mask=m_i, other=0.0).to(T)
    small = tl.exp(-tl.abs(a_inp))
    b_f = tl.where(a_inp > 0.0, 1.0, small) / (1.0 + small)  # the logistic function, without overflow
    tl.store(f + o_r, tl.where(m_i, b_f, 0.0), mask=m_all)


@triton.jit
def halves_kernel(
    values, out, tops,  # [b, n, d]; from row n_0 on: [b, q, half_i] float16, [b, q]
    n_0, d_inp, values_b, out_b, tops_b, half_i, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Convert rows of M to halves. A program handles one row."""
    row, b = tl.program_id(0) + n_0, tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    b_M = tl.load(values + b * values_b + tl.program_id(0) * d_inp + o_d, mask=o_d < d_inp, other=0.0)
    top = top_below(tl.max(tl.abs(b_M), 0))
    tl.store(tops + b * tops_b + row, top)
    tl.store(out + b * out_b + row * half_i + o_d, (b_M * (16384.0 / top)).to(tl.float16), mask=o_d < half_i)


@triton.jit
def store_phi(b_phi, phi, phi_tops, phi_sums, phi_out, x_tops, o_r, o_j, m_r, m_i, m_j, n_out,
              SHOWN: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Store phi of a tile for ``sums_kernel``, and if SHOWN for the caller. It is 0 at unused pairs."""
    m = m_r[:, None] & m_j[None, :]
    if SHOWN:
        tl.store(phi_out + o_r[:, None] * n_out + o_j[None, :], b_phi, mask=m)
    store_to_sum(b_phi, phi, phi_tops, phi_sums, x_tops, o_r, o_j, m_i, m_j, m, n_out, HALF)


@triton.jit(do_not_specialize=LENGTHS)
def first_kernel(
    x, M, bias, x_tops, M_tops,  # [r, d]; where not FIXED [q, d] rows for c_sum and c_ign, and [q]; [r], [q]
    beta_use, beta_ign,  # [i, j] each, where FIXED
    f, use, tiles,  # [r], [b, i, j] where MASKED, [n, 3] where PACKED
    c, phi, phi_tops, phi_sums, phi_out,  # [r, 2 j] where not FIXED, [r, j], [n], [n, j], [r, j] where SHOWN
    n_inp, per_sample, n_out, d_inp, use_b, use_i, use_j,  # sizes, where d_inp is padded if HALF, and strides
    PRIOR: tl.constexpr, SHOWN: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    UNUSED: tl.constexpr, HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Run the first iteration: the betas, and phi under the flat prior."""
    T: tl.constexpr = f.dtype.element_ty
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    first_i = first - b * n_inp
    x, x_tops, use = x + first * d_inp, x_tops + first, use + (b * use_b + first_i * use_i)
    o_r, o_j, m_r, m_i, m_j, b_f = rows_of(f + first, end - first, n_out, UNUSED, BLOCK_I, BLOCK_J)
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, o_r, o_j, use_i, use_j, m, MASKED)
    if FIXED:
        c_sum, c_ign = load_betas(beta_use, beta_ign, first, first_i, o_r, o_j, m, n_out, True, T)
    else:
        c_sum, c_ign = times_M(x, M, x_tops, M_tops, 0, o_r, o_j, m_i, m_j, n_out, d_inp, 2, BLOCK_K, HALF,
                               OPERAND, PRECISION, T)  # fmt: skip
        c_sum += tl.load(bias + o_j, mask=m_j, other=0.0)[None, :]
        c_ign += tl.load(bias + n_out + o_j, mask=m_j, other=0.0)[None, :]
        p_c = c + first * (2 * n_out) + o_r[:, None] * (2 * n_out) + o_j[None, :]
        tl.store(p_c, c_sum, mask=m)
        tl.store(p_c + n_out, c_ign, mask=m)
    R = flat_prior(m_used, PRIOR, MASKED, T)
    b_phi = tl.where(m_used, (c_sum * R - c_ign) * b_f[:, None], 0.0)
    phi, phi_out = phi + first * n_out, phi_out + first * n_out
    store_phi(b_phi, phi, phi_tops, phi_sums, phi_out, x_tops, o_r, o_j, m_r, m_i, m_j, n_out, SHOWN, HALF)


@triton.jit(do_not_specialize=LENGTHS)
def next_kernel(
    x, M, x_tops, M_tops,  # [r, d], [b, q, d] with x_hat from row M_0 on, [r], [b, q]
    c_sum, c_ign, W_S, B_S, f, use, tiles,  # [r, 2 j] or [i, j], [1 or i, j] twice, [r], as above
    phi, phi_tops, phi_sums, phi_out,  # as above
    n_inp, per_sample, n_out, d_inp, n_M, M_0, use_b, use_i, use_j,  # as above; n_M: q
    SHOWN: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    UNUSED: tl.constexpr, HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Run a later iteration: phi = f (c_sum R - c_ign), with R from the scores of x_hat."""
    T: tl.constexpr = f.dtype.element_ty
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    first_i = first - b * n_inp
    x, x_tops, use = x + first * d_inp, x_tops + first, use + (b * use_b + first_i * use_i)
    o_r, o_j, m_r, m_i, m_j, b_f = rows_of(f + first, end - first, n_out, UNUSED, BLOCK_I, BLOCK_J)
    dot, _ = times_M(x, M, x_tops, M_tops, b * n_M + M_0, o_r, o_j, m_i, m_j, n_out, d_inp, 1, BLOCK_K, HALF,
                     OPERAND, PRECISION, T)  # fmt: skip
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, o_r, o_j, use_i, use_j, m, MASKED)
    o_S = first_i * (n_out if FIXED else 0)
    R, _ = responsibilities(dot, W_S + o_S, B_S + o_S, o_r, o_j, m, m_used, n_out, FIXED, T)
    b_sum, b_ign = load_betas(c_sum, c_ign, first, first_i, o_r, o_j, m, n_out, FIXED, T)
    b_phi = tl.where(m_used, (b_sum * R - b_ign) * b_f[:, None], 0.0)
    phi, phi_out = phi + first * n_out, phi_out + first * n_out
    store_phi(b_phi, phi, phi_tops, phi_sums, phi_out, x_tops, o_r, o_j, m_r, m_i, m_j, n_out, SHOWN, HALF)
