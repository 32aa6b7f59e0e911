"""Triton kernels of backward passes over pairs: a product with x_inp, and the gradients of its pairs.

``tiles.py`` explains tiles, halves and names.
"""

import triton
import triton.language as tl

from vecroute.ops.paths.batch.tiles import (
    LENGTHS,
    competition,
    flat_prior,
    load_betas,
    rows_used,
    store_to_sum,
    tile_of,
    times_M,
    top_below,
    used_pairs,
    without_units,
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


@triton.jit(do_not_specialize=LENGTHS)
def next_backward_kernel(
    x, M, x_tops, M_tops,  # as above; M from row M_0 on: grad_y, then x_hat
    c_sum, c_ign, W_S, B_S, f, grad_s, use, tiles,  # as above; [b, j]
    results,  # [r, q] from column M_0 on: phi and the gradient of dot, times the tops of M
    before, tops,  # [r] tops of the next iteration, not read if FRESH; [r] new tops, at least as great
    grad_c, grad_f, parts,  # [r, 2 j] of c_sum and c_ign where not FIXED; [r]; [4, b, i, j] where FIXED
    to_sum, sum_tops, sums,  # [r, j] the gradient of dot, [n], [n, j]
    n_inp, per_sample, n_out, d_inp, x_i, M_i, n_M, M_0, c_i, c_0, use_b, use_i, use_j, results_i, part_b,
    FRESH: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    UNUSED: tl.constexpr,
    HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``next_kernel``: phi again, and the gradients of all quantities of a pair.

    The parts are gradients of beta_use, beta_ign, W_S and B_S, which are summed over samples later.
    """
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_j, o_i = o_j < n_out, o_r - b * n_inp
    b_f = tl.load(f + o_r, mask=o_r < end, other=0.0)
    m_i = rows_used(b_f, o_r < end, UNUSED)
    M_row = b * n_M + M_0
    both = times_M(x, M + M_row * M_i, o_r, m_i, n_out, d_inp, x_i, M_i, 2, BLOCK_I, BLOCK_J, BLOCK_K,
                   OPERAND, PRECISION,
                   T)  # fmt: skip
    M_tops += M_row
    grad_phi, dot = tl.split(tl.reshape(both, [BLOCK_I, BLOCK_J, 2]))
    grad_phi = without_units(grad_phi, x_tops, M_tops, o_r, o_j, m_i, m_j, HALF)
    dot = without_units(dot, x_tops, M_tops + n_out, o_r, o_j, m_i, m_j, HALF)
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, b * use_b + o_i[:, None] * use_i, o_j[None, :], use_j, m, MASKED)
    o_S = (o_i * (n_out if FIXED else 0))[:, None] + o_j[None, :]
    z = dot
    if FIXED:
        z = z * tl.load(W_S + o_S, mask=m, other=0.0).to(T)
    z += tl.load(B_S + o_S, mask=m, other=0.0).to(T)
    R, rest = competition(z, m_used)
    o_c = (o_i if FIXED else o_r)[:, None] * c_i + o_j[None, :]
    b_sum, b_ign = load_betas(c_sum, c_ign + c_0, o_c, m, FIXED, T)
    grad_phi += tl.load(grad_s + b * n_out + o_j, mask=m_j, other=0.0)[None, :]
    grad_phi = tl.where(m_used, grad_phi, 0.0)
    u = tl.where(m_used, b_sum * R - b_ign, 0.0)
    add_to(grad_f + o_r, tl.sum(u * grad_phi, 1), m_i, FRESH)
    grad_phi *= b_f[:, None]
    of_R = R * (b_sum * grad_phi)
    # These products are the same as in the sum, so that they cancel exactly if one output has all of R.
    grad_z = tl.where(m_used, (of_R - R * tl.sum(of_R, 1)[:, None]) * rest, 0.0)
    if FIXED:
        p_parts = parts + b * part_b + o_i[:, None] * n_out + o_j[None, :]
        step = tl.num_programs(0) // per_sample * part_b  # from one parameter to the next
        m_all = (o_r < end)[:, None] & m_j[None, :]  # includes unused inputs, whose zeros are summed too
        add_to(p_parts, R * grad_phi, m_all, FRESH)
        add_to(p_parts + step, (R - 1.0) * grad_phi, m_all, FRESH)
        add_to(p_parts + 2 * step, grad_z * dot, m_all, FRESH)
        add_to(p_parts + 3 * step, grad_z, m_all, FRESH)
        grad_z *= tl.load(W_S + o_S, mask=m, other=0.0).to(T)
    else:
        p_c = grad_c + o_r[:, None] * (2 * n_out) + o_j[None, :]
        add_to(p_c, R * grad_phi, m, FRESH)
        add_to(p_c + n_out, -grad_phi, m, FRESH)
    b_phi = times_top(u * b_f[:, None], M_tops, o_j, m_j, HALF)
    of_dot = times_top(grad_z, M_tops + n_out, o_j, m_j, HALF)
    if HALF:
        top = rising_top(tl.max(tl.maximum(tl.abs(b_phi), tl.abs(of_dot)), 1), before, o_r, m_i, FRESH)
        tl.store(tops + o_r, top, mask=m_i)
        unit = (16384.0 / top)[:, None]
        b_phi, of_dot = (b_phi * unit).to(tl.float16), (of_dot * unit).to(tl.float16)
    p_results = results + o_r[:, None] * results_i + M_0 + o_j[None, :]
    tl.store(p_results, b_phi, mask=m)
    tl.store(p_results + n_out, of_dot, mask=m)
    store_to_sum(grad_z, to_sum, sum_tops, sums, x_tops, tl.program_id(0).to(tl.int64), o_r, o_j, m_i, m_j,
                 m, n_out,
                 HALF)  # fmt: skip


@triton.jit
def change_units(
    results, before, tops, top, o_r, o_j, m_i, m, n_out, results_i, n_rows, N_ITERS: tl.constexpr
):
    """Store the tops, and rescale the results of later iterations to them."""
    tl.store(tops + o_r, top, mask=m_i)
    for t in tl.static_range(N_ITERS - 1):
        ratio = tl.load(before + tl.cast(t, tl.int64) * n_rows + o_r, mask=m_i, other=0.0) / top
        p_results = results + o_r[:, None] * results_i + (N_ITERS - 2 - t) * 2 * n_out + o_j[None, :]
        for _ in tl.static_range(2):
            value = tl.load(p_results, mask=m, other=0.0) * ratio[:, None].to(tl.float16)
            tl.store(p_results, value, mask=m)
            p_results += n_out


@triton.jit(do_not_specialize=[*LENGTHS, "n_rows"])
def first_backward_kernel(
    x, M, x_tops, M_tops,  # as above; M from row M_0 on: grad_y
    shared_tops,  # [2 j] tops of the rows for c_sum and c_ign
    c_sum, c_ign, f, sqrt_n_inp, grad_s, use, tiles,  # as above
    results,  # [r, q] from column M_0 on: phi, and where not FIXED the gradients of c_sum and c_ign
    before, tops,  # [t - 1, r] tops of later iterations, from the last to the second; [r] tops of all results
    grad_c, grad_f, parts,  # as above; grad_f turns into the gradient of W_A x_inp
    to_sum, sum_tops, sums,  # unless FIXED: [r, 2 j] gradients; [n]; [n, 2 j + 1] sums, the last of a_inp
    n_inp, per_sample, n_out, d_inp, x_i, M_i, n_M, M_0, c_i, c_0, use_b, use_i, use_j, results_i, part_b,
    n_rows,
    PRIOR: tl.constexpr, N_ITERS: tl.constexpr, FRESH: tl.constexpr, FIXED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr, UNUSED: tl.constexpr, HALF: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``first_kernel``, after the gradients of all later iterations.

    Each row of results has a top for every iteration, and tops rise from the last iteration to the first. At
    the end, this kernel rescales the results of all iterations to the tops of the first iteration.
    """
    tile = tl.program_id(0).to(tl.int64)
    b, first, end = tile_of(tiles, n_inp, per_sample, tile, BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_j, o_i = o_j < n_out, o_r - b * n_inp
    b_f = tl.load(f + o_r, mask=o_r < end, other=0.0)
    m_i = rows_used(b_f, o_r < end, UNUSED)
    M_row = b * n_M + M_0
    grad_phi = times_M(x, M + M_row * M_i, o_r, m_i, n_out, d_inp, x_i, M_i, 1, BLOCK_I, BLOCK_J, BLOCK_K,
                       OPERAND,
                       PRECISION, T)  # fmt: skip
    grad_phi = without_units(grad_phi, x_tops, M_tops + M_row, o_r, o_j, m_i, m_j, HALF)
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, b * use_b + o_i[:, None] * use_i, o_j[None, :], use_j, m, MASKED)
    R = flat_prior(m_used, PRIOR, MASKED, T)
    o_c = (o_i if FIXED else o_r)[:, None] * c_i + o_j[None, :]
    b_sum, b_ign = load_betas(c_sum, c_ign + c_0, o_c, m, FIXED, T)
    grad_phi += tl.load(grad_s + b * n_out + o_j, mask=m_j, other=0.0)[None, :]
    grad_phi = tl.where(m_used, grad_phi, 0.0)
    u = tl.where(m_used, b_sum * R - b_ign, 0.0)
    grad_a = tl.sum(u * grad_phi, 1)
    if not FRESH:
        grad_a += tl.load(grad_f + o_r, mask=m_i, other=0.0)
    grad_a = tl.where(m_i, grad_a * b_f * (1.0 - b_f), 0.0)
    tl.store(grad_f + o_r, grad_a / tl.load(sqrt_n_inp + b), mask=o_r < end)
    b_phi = times_top(u * b_f[:, None], M_tops + M_row, o_j, m_j, HALF)
    grad_phi *= b_f[:, None]
    of_sum, of_ign = R * grad_phi, -grad_phi
    p_results = results + o_r[:, None] * results_i + M_0 + o_j[None, :]
    if FIXED:
        p_parts = parts + b * part_b + o_i[:, None] * n_out + o_j[None, :]
        step = tl.num_programs(0) // per_sample * part_b
        m_all = (o_r < end)[:, None] & m_j[None, :]
        add_to(p_parts, of_sum, m_all, FRESH)
        add_to(p_parts + step, (R - 1.0) * grad_phi, m_all, FRESH)
        if HALF:
            top = rising_top(tl.max(tl.abs(b_phi), 1), before + (N_ITERS - 2) * n_rows, o_r, m_i, FRESH)
            change_units(results, before, tops, top, o_r, o_j, m_i, m, n_out, results_i, n_rows, N_ITERS)
            b_phi = (b_phi * (16384.0 / top)[:, None]).to(tl.float16)
        tl.store(p_results, b_phi, mask=m)
        return
    if not FRESH:
        p_c = grad_c + o_r[:, None] * (2 * n_out) + o_j[None, :]
        of_sum += tl.load(p_c, mask=m, other=0.0)
        of_ign += tl.load(p_c + n_out, mask=m, other=0.0)
    p_sum = to_sum + o_r[:, None] * (2 * n_out) + o_j[None, :]
    p_sums = sums + tile * (2 * n_out + 1)
    tl.store(p_sums + 2 * n_out, tl.sum(grad_a, 0))
    tl.store(p_sums + o_j, tl.sum(of_sum, 0), mask=m_j)
    tl.store(p_sums + n_out + o_j, tl.sum(of_ign, 0), mask=m_j)
    if HALF:
        x_top = tl.load(x_tops + o_r, mask=m_i, other=0.0)[:, None]
        top = top_below(tl.max(tl.max(tl.maximum(tl.abs(of_sum), tl.abs(of_ign)) * x_top, 1), 0))
        tl.store(sum_tops + tile, top)
        unit = x_top * (16384.0 / top)
        tl.store(p_sum, (of_sum * unit).to(tl.float16), mask=m)
        tl.store(p_sum + n_out, (of_ign * unit).to(tl.float16), mask=m)
        of_sum = times_top(of_sum, shared_tops, o_j, m_j, HALF)
        of_ign = times_top(of_ign, shared_tops + n_out, o_j, m_j, HALF)
        greatest = tl.maximum(tl.abs(b_phi), tl.maximum(tl.abs(of_sum), tl.abs(of_ign)))
        row_top = rising_top(tl.max(greatest, 1), before + (N_ITERS - 2) * n_rows, o_r, m_i, FRESH)
        change_units(results, before, tops, row_top, o_r, o_j, m_i, m, n_out, results_i, n_rows, N_ITERS)
        unit = (16384.0 / row_top)[:, None]
        b_phi = (b_phi * unit).to(tl.float16)
        of_sum, of_ign = (of_sum * unit).to(tl.float16), (of_ign * unit).to(tl.float16)
    else:
        tl.store(p_sum, of_sum, mask=m)
        tl.store(p_sum + n_out, of_ign, mask=m)
    tl.store(p_results, b_phi, mask=m)
    tl.store(p_results + n_out, of_sum, mask=m)
    tl.store(p_results + 2 * n_out, of_ign, mask=m)
