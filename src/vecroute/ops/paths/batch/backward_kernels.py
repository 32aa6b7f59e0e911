"""Triton kernels of backward passes over pairs: a product with x_inp, and the gradients of its pairs.

``tiles.py`` explains tiles, halves and names.
"""

import triton
import triton.language as tl

from vecroute.ops.backends.fused.functions import scores_backward, top_below
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


@triton.jit
def add_to(pointer, value, m, FRESH: tl.constexpr):
    """Add a value to memory, or store it if FRESH."""
    if not FRESH:
        value += tl.load(pointer, mask=m, other=0.0)
    tl.store(pointer, value, mask=m)


@triton.jit
def times_top(value, tops, o_j, m_j, HALF: tl.constexpr):
    """Multiply pairs [i, j] by the tops of the rows of M that they are multiplied with next."""
    return value * tl.load(tops + o_j, mask=m_j, other=0.0)[None, :] if HALF else value


@triton.jit
def rising_top(greatest, before, o_r, m_i, FRESH: tl.constexpr):
    """Return the tops of rows, given their greatest elements. A top is never smaller than the one before.

    ``before`` holds the tops of the next iteration, because a backward pass runs iterations in reverse order.
    If FRESH, this is the last iteration, and there are none.
    """
    top = top_below(greatest)
    return top if FRESH else tl.maximum(top, tl.load(before + o_r, mask=m_i, other=0.0))


@triton.jit
def halves_of_rows(value, top):
    """Convert rows [i, j] to halves with the tops [i]."""
    return (value * (16384.0 / top)[:, None]).to(tl.float16)


@triton.jit
def of_used(grad_phi, grad_s, b, o_j, m_j, m_used, n_out):
    """Add the gradient of s to grad_phi, since s = sum_i phi_ij. The result is 0 at unused pairs."""
    grad_phi += tl.load(grad_s + b * n_out + o_j, mask=m_j, other=0.0)[None, :]
    return tl.where(m_used, grad_phi, 0.0)


@triton.jit
def betas_backward(grad_c, first, grad_phi, R, o_r, o_j, m_r, m_j, n_rows, n_out, FRESH: tl.constexpr):
    """Add the gradients of beta_use and beta_ign, where FIXED, to the parts [4, r, j] of their samples.

    Unused inputs are included, because their zeros are summed too. Return the place of the third part, the
    distance between parts, and the mask.
    """
    p_part, step = grad_c + first * n_out + o_r[:, None] * n_out + o_j[None, :], n_rows * n_out
    m = m_r[:, None] & m_j[None, :]
    add_to(p_part, R * grad_phi, m, FRESH)
    add_to(p_part + step, (R - 1.0) * grad_phi, m, FRESH)
    return p_part + 2 * step, step, m


@triton.jit(do_not_specialize=[*LENGTHS, "n_rows"])
def next_backward_kernel(
    x, M, x_tops, M_tops,  # as above; M from row M_0 on: grad_y, then x_hat
    c_sum, c_ign, W_S, B_S, f, grad_s, use, tiles,  # as above; [b, j]
    results,  # [r, q] from column M_0 on: phi and the gradient of dot, times the tops of M
    before, tops,  # [r] tops of the next iteration, not read if FRESH; [r] new tops, at least as great
    grad_c,  # [r, 2 j] of c_sum and c_ign; where FIXED [4, r, j] of beta_use, beta_ign, W_S and B_S
    grad_f,  # [r]
    to_sum, sum_tops, sums,  # [r, j] the gradient of dot, [n], [n, j]
    n_inp, per_sample, n_out, d_inp, n_M, M_0, use_b, use_i, use_j, results_i, n_rows,  # n_rows: r
    FRESH: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    UNUSED: tl.constexpr, HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``next_kernel``: phi again, and the gradients of all quantities of a pair."""
    T: tl.constexpr = f.dtype.element_ty
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    first_i = first - b * n_inp
    x, x_tops, use = x + first * d_inp, x_tops + first, use + (b * use_b + first_i * use_i)
    o_r, o_j, m_r, m_i, m_j, b_f = rows_of(f + first, end - first, n_out, UNUSED, BLOCK_I, BLOCK_J)
    M_row = b * n_M + M_0
    grad_phi, dot = times_M(x, M, x_tops, M_tops, M_row, o_r, o_j, m_i, m_j, n_out, d_inp, 2, BLOCK_K, HALF,
                            OPERAND, PRECISION, T)  # fmt: skip
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, o_r, o_j, use_i, use_j, m, MASKED)
    o_S = first_i * (n_out if FIXED else 0)
    R, rest = responsibilities(dot, W_S + o_S, B_S + o_S, o_r, o_j, m, m_used, n_out, FIXED, T)
    b_sum, b_ign = load_betas(c_sum, c_ign, first, first_i, o_r, o_j, m, n_out, FIXED, T)
    grad_phi = of_used(grad_phi, grad_s, b, o_j, m_j, m_used, n_out)
    u = tl.where(m_used, b_sum * R - b_ign, 0.0)
    add_to(grad_f + first + o_r, tl.sum(u * grad_phi, 1), m_i, FRESH)
    grad_phi *= b_f[:, None]
    of_R = R * (b_sum * grad_phi)
    grad_z = tl.where(m_used, scores_backward(R, of_R, tl.sum(of_R, 1)[:, None], rest), 0.0)
    if FIXED:
        p_part, step, m_part = betas_backward(grad_c, first, grad_phi, R, o_r, o_j, m_r, m_j, n_rows, n_out,
                                              FRESH)  # fmt: skip
        add_to(p_part, grad_z * dot, m_part, FRESH)
        add_to(p_part + step, grad_z, m_part, FRESH)
        grad_z *= tl.load(W_S + o_S + o_r[:, None] * n_out + o_j[None, :], mask=m, other=0.0).to(T)
    else:
        p_c = grad_c + first * (2 * n_out) + o_r[:, None] * (2 * n_out) + o_j[None, :]
        add_to(p_c, R * grad_phi, m, FRESH)
        add_to(p_c + n_out, -grad_phi, m, FRESH)
    M_tops += M_row
    b_phi = times_top(u * b_f[:, None], M_tops, o_j, m_j, HALF)
    of_dot = times_top(grad_z, M_tops + n_out, o_j, m_j, HALF)
    if HALF:
        greatest = tl.max(tl.maximum(tl.abs(b_phi), tl.abs(of_dot)), 1)
        top = rising_top(greatest, before + first, o_r, m_i, FRESH)
        tl.store(tops + first + o_r, top, mask=m_i)
        b_phi, of_dot = halves_of_rows(b_phi, top), halves_of_rows(of_dot, top)
    p_results = results + first * results_i + M_0 + o_r[:, None] * results_i + o_j[None, :]
    tl.store(p_results, b_phi, mask=m)
    tl.store(p_results + n_out, of_dot, mask=m)
    store_to_sum(grad_z, to_sum + first * n_out, sum_tops, sums, x_tops, o_r, o_j, m_i, m_j, m, n_out, HALF)


@triton.jit
def change_tops(
    results, tops, top, o_r, o_j, m_i, m, n_out, results_i, n_rows, N_ITERS: tl.constexpr
):  # fmt: skip
    """Store the tops of the first iteration, and rescale the results of later iterations to them."""
    tl.store(tops + tl.cast(N_ITERS - 1, tl.int64) * n_rows + o_r, top, mask=m_i)
    for t in tl.static_range(N_ITERS - 1):
        ratio = tl.load(tops + tl.cast(t, tl.int64) * n_rows + o_r, mask=m_i, other=0.0) / top
        p_results = results + o_r[:, None] * results_i + (N_ITERS - 2 - t) * 2 * n_out + o_j[None, :]
        for _ in tl.static_range(2):
            value = tl.load(p_results, mask=m, other=0.0) * ratio[:, None].to(tl.float16)
            tl.store(p_results, value, mask=m)
            p_results += n_out


@triton.jit
def store_c_to_sum(of_sum, of_ign, grad_a, to_sum, sum_tops, sums, x_tops, o_r, o_j, m_i, m_j, m, n_out,
                   HALF: tl.constexpr):  # fmt: skip
    """Do the same as ``store_to_sum`` for the gradients of c_sum, c_ign and a_inp. The first two share a top.

    Only the sum of grad_a over rows is stored.
    """
    tile = tl.program_id(0).to(tl.int64)
    p_sums = sums + tile * (2 * n_out + 1)
    tl.store(p_sums + 2 * n_out, tl.sum(grad_a, 0))
    tl.store(p_sums + o_j, tl.sum(of_sum, 0), mask=m_j)
    tl.store(p_sums + n_out + o_j, tl.sum(of_ign, 0), mask=m_j)
    if HALF:
        x_top = tl.load(x_tops + o_r, mask=m_i, other=0.0)[:, None]
        top = top_below(tl.max(tl.max(tl.maximum(tl.abs(of_sum), tl.abs(of_ign)) * x_top, 1), 0))
        tl.store(sum_tops + tile, top)
        unit = x_top * (16384.0 / top)
        of_sum, of_ign = (of_sum * unit).to(tl.float16), (of_ign * unit).to(tl.float16)
    p_sum = to_sum + o_r[:, None] * (2 * n_out) + o_j[None, :]
    tl.store(p_sum, of_sum, mask=m)
    tl.store(p_sum + n_out, of_ign, mask=m)


@triton.jit(do_not_specialize=[*LENGTHS, "n_rows"])
def first_backward_kernel(
    x, M, x_tops, M_tops,  # as above; M from row M_0 on: grad_y
    shared_tops,  # [2 j] tops of the rows for c_sum and c_ign
    c_sum, c_ign, f, sqrt_n_inp, grad_s, use, tiles,  # as above
    results,  # [r, q] from column M_0 on: phi, and where not FIXED the gradients of c_sum and c_ign
    tops,  # [t, r] tops of all iterations, the last comes first; at the end the first's hold for all results
    grad_c, grad_f,  # as above; grad_f turns into the gradient of W_A x_inp
    to_sum, sum_tops, sums,  # unless FIXED: [r, 2 j] gradients; [n]; [n, 2 j + 1] sums, the last of a_inp
    n_inp, per_sample, n_out, d_inp, n_M, M_0, use_b, use_i, use_j, results_i, n_rows,
    PRIOR: tl.constexpr, N_ITERS: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, UNUSED: tl.constexpr, HALF: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``first_kernel``, after the gradients of all later iterations.

    Each row of results has a top for every iteration, and tops rise from the last iteration to the first. At
    the end, this kernel rescales the results of all iterations to the tops of the first iteration.
    """
    T: tl.constexpr = f.dtype.element_ty
    FRESH: tl.constexpr = N_ITERS == 1  # whether there are no gradients of later iterations
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    first_i = first - b * n_inp
    x, x_tops, use = x + first * d_inp, x_tops + first, use + (b * use_b + first_i * use_i)
    o_r, o_j, m_r, m_i, m_j, b_f = rows_of(f + first, end - first, n_out, UNUSED, BLOCK_I, BLOCK_J)
    M_row = b * n_M + M_0
    grad_phi, _ = times_M(x, M, x_tops, M_tops, M_row, o_r, o_j, m_i, m_j, n_out, d_inp, 1, BLOCK_K, HALF,
                          OPERAND, PRECISION, T)  # fmt: skip
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, o_r, o_j, use_i, use_j, m, MASKED)
    R = flat_prior(m_used, PRIOR, MASKED, T)
    b_sum, b_ign = load_betas(c_sum, c_ign, first, first_i, o_r, o_j, m, n_out, FIXED, T)
    grad_phi = of_used(grad_phi, grad_s, b, o_j, m_j, m_used, n_out)
    u = tl.where(m_used, b_sum * R - b_ign, 0.0)
    grad_a = tl.sum(u * grad_phi, 1)
    if not FRESH:
        grad_a += tl.load(grad_f + first + o_r, mask=m_i, other=0.0)
    grad_a = tl.where(m_i, grad_a * b_f * (1.0 - b_f), 0.0)
    tl.store(grad_f + first + o_r, grad_a / tl.load(sqrt_n_inp + b), mask=m_r)
    b_phi = times_top(u * b_f[:, None], M_tops + M_row, o_j, m_j, HALF)
    greatest = tl.abs(b_phi)
    grad_phi *= b_f[:, None]
    of_sum, of_ign = R * grad_phi, -grad_phi
    if FIXED:
        betas_backward(grad_c, first, grad_phi, R, o_r, o_j, m_r, m_j, n_rows, n_out, FRESH)
    else:
        if not FRESH:
            p_c = grad_c + first * (2 * n_out) + o_r[:, None] * (2 * n_out) + o_j[None, :]
            of_sum += tl.load(p_c, mask=m, other=0.0)
            of_ign += tl.load(p_c + n_out, mask=m, other=0.0)
        to_sum += first * (2 * n_out)
        store_c_to_sum(of_sum, of_ign, grad_a, to_sum, sum_tops, sums, x_tops, o_r, o_j, m_i, m_j, m, n_out,
                       HALF)  # fmt: skip
        of_sum = times_top(of_sum, shared_tops, o_j, m_j, HALF)
        of_ign = times_top(of_ign, shared_tops + n_out, o_j, m_j, HALF)
        greatest = tl.maximum(greatest, tl.maximum(tl.abs(of_sum), tl.abs(of_ign)))
    results += first * results_i
    if HALF:
        tops += first
        top = rising_top(tl.max(greatest, 1), tops + (N_ITERS - 2) * n_rows, o_r, m_i, FRESH)
        change_tops(results, tops, top, o_r, o_j, m_i, m, n_out, results_i, n_rows, N_ITERS)
        b_phi = halves_of_rows(b_phi, top)
        if not FIXED:
            of_sum, of_ign = halves_of_rows(of_sum, top), halves_of_rows(of_ign, top)
    p_results = results + M_0 + o_r[:, None] * results_i + o_j[None, :]
    tl.store(p_results, b_phi, mask=m)
    if not FIXED:
        tl.store(p_results + n_out, of_sum, mask=m)
        tl.store(p_results + 2 * n_out, of_ign, mask=m)
