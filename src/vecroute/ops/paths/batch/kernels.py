"""Triton kernels of the batch path: a product with x_inp and everything that is done to its pairs, in one.

A program has a tile: up to BLOCK_I rows of one sample, and all outputs of each. Rows of all samples follow
each other in memory, so padded and packed calls differ only in how a program finds its tile. An input that is
not used has f = 0: kernels neither load its vector nor anything else of its row.

Kernel vocabulary: ``o_`` offsets, ``m_`` masks of what is inside, ``b_`` blocks of values.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(tiles, n_inp, per_sample, pid, BLOCK_I: tl.constexpr, PACKED: tl.constexpr):
    """The sample of a tile, its first row and the row after its last, counted over all samples."""
    if PACKED:
        b = tl.load(tiles + 3 * pid)
        first = tl.load(tiles + 3 * pid + 1)
        end = tl.load(tiles + 3 * pid + 2)
    else:
        b = pid // per_sample
        first = b * n_inp + pid % per_sample * BLOCK_I
        end = tl.minimum(first + BLOCK_I, (b + 1) * n_inp)
    return b.to(tl.int64), first.to(tl.int64), end.to(tl.int64)


@triton.jit
def rows_used(b_f, m_i, UNUSED: tl.constexpr):
    """Which rows of a tile are used, from f; without masks all of them are."""
    return m_i & (b_f != 0.0) if UNUSED else m_i


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """total + a b; PRECISION says how float32 operands are rounded: tf32, tf32x3 (almost not) or ieee."""
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def rows_of_M(M, o_q, o_k, n_rows, d_inp, OPERAND: tl.constexpr):
    """A block of rows of M, transposed: [k, q]."""
    m = (o_q < n_rows)[None, :] & (o_k < d_inp)[:, None]
    return tl.load(M + o_q[None, :] * d_inp + o_k[:, None], mask=m, other=0.0).to(OPERAND)


@triton.jit
def used_pairs(use, o_use, o_j, use_j, m, MASKED: tl.constexpr):
    """Which pairs of a tile are used."""
    return m & (tl.load(use + o_use + o_j * use_j, mask=m, other=0) != 0) if MASKED else m


@triton.jit
def flat_prior(m_used, PRIOR: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr):
    """R of the first iteration: the same for all used outputs of an input, 0 for the others."""
    if MASKED:
        n = tl.sum(m_used.to(T), 1)[:, None]
        return tl.where(m_used, 1.0 / tl.maximum(n, 1.0), 0.0)
    return tl.where(m_used, tl.full(m_used.shape, PRIOR, T), 0.0)


@triton.jit
def competition(z, m_used):
    """R = f(z) / sum_j f(z) over the used outputs of each input, and 1 - f(z).

    f(z) is exp(low) q with low = min(z, 0), so that rows of very negative z keep their digits, and so does
    1 - f(z) where f(z) is almost 1.
    """
    small = tl.exp(-tl.abs(z))
    q = 1.0 / (1.0 + small)
    low = tl.where(m_used, tl.minimum(z, 0.0), -float("inf"))
    top = tl.max(low, 1)[:, None]
    value = tl.where(m_used, tl.exp(low - tl.where(top == -float("inf"), 0.0, top)) * q, 0.0)
    total = tl.sum(value, 1)[:, None]
    R = tl.where(value == total, 1.0, value / tl.where(total == 0.0, 1.0, total))
    return tl.where(m_used, R, 0.0), q * tl.where(z > 0.0, small, 1.0)


@triton.jit
def load_betas(c_sum, c_ign, o_c, m, FIXED: tl.constexpr, T: tl.constexpr):
    """beta_use + beta_ign and beta_ign of a tile; where FIXED the pointers are to beta_use and beta_ign."""
    b_sum = tl.load(c_sum + o_c, mask=m, other=0.0).to(T)
    b_ign = tl.load(c_ign + o_c, mask=m, other=0.0).to(T)
    if FIXED:
        b_sum += b_ign
    return b_sum, b_ign


@triton.jit
def first_kernel(
    x, M, bias,  # [r, d]; where not FIXED [q, d] rows for c_sum, c_ign and a_inp, and [q]
    W_A, B_A,  # [1 or i, d], [1 or i]
    beta_use, beta_ign,  # [i, j] each, where FIXED
    sqrt_n_inp, input_mask, use, tiles,  # [b], [r] where INPUTS, [b, i, j] where MASKED, [n, 3] where PACKED
    c, f, phi,  # [r, 2 j] where not FIXED, [r], [r, j]: the results
    n_inp, per_sample, n_out, d_inp, x_i, use_b, use_i, use_j,  # and strides
    PRIOR: tl.constexpr, FIXED: tl.constexpr, INPUTS: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The first iteration: the betas, f(a_inp), and phi under the flat prior."""
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_i, m_j = o_r < end, o_j < n_out
    o_i = o_r - b * n_inp  # the input, where n_inp is fixed
    m_used = m_i[:, None] & m_j[None, :]
    if INPUTS:
        m_i = m_i & (tl.load(input_mask + o_r, mask=m_i, other=0) != 0)
        m_used = m_used & m_i[:, None]
    m_used = used_pairs(use, b * use_b + o_i[:, None] * use_i, o_j[None, :], use_j, m_used, MASKED)
    if MASKED:
        m_i = m_i & (tl.max(m_used.to(tl.int32), 1) != 0)
    total_sum = tl.zeros([BLOCK_I, BLOCK_J], T)
    total_ign = tl.zeros([BLOCK_I, BLOCK_J], T)
    total_a = tl.zeros([BLOCK_I, BLOCK_K], T)
    for k in range(0, d_inp, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < d_inp
        m_x = m_i[:, None] & m_k[None, :]
        b_x = tl.load(x + o_r[:, None] * x_i + o_k[None, :], mask=m_x, other=0.0).to(OPERAND)
        if FIXED:
            b_A = tl.load(W_A + o_i[:, None] * d_inp + o_k[None, :], mask=m_x, other=0.0)
            total_a += b_x.to(T) * b_A.to(T)
        else:
            total_a += b_x.to(T) * tl.load(W_A + o_k, mask=m_k, other=0.0).to(T)[None, :]
            total_sum = multiply(b_x, rows_of_M(M, o_j, o_k, n_out, d_inp, OPERAND), total_sum, PRECISION)
            M_ign = M + n_out * d_inp
            total_ign = multiply(b_x, rows_of_M(M_ign, o_j, o_k, n_out, d_inp, OPERAND), total_ign, PRECISION)
    o_A = o_i if FIXED else o_i * 0
    a_inp = tl.sum(total_a, 1) / tl.load(sqrt_n_inp + b) + tl.load(B_A + o_A, mask=m_i, other=0.0).to(T)
    b_f = tl.where(m_i, 1.0 / (1.0 + tl.exp(-a_inp)), 0.0)
    tl.store(f + o_r, b_f, mask=o_r < end)
    m = m_i[:, None] & m_j[None, :]
    if FIXED:
        c_sum, c_ign = load_betas(beta_use, beta_ign, o_i[:, None] * n_out + o_j[None, :], m, True, T)
    else:
        c_sum = total_sum + tl.load(bias + o_j, mask=m_j, other=0.0)[None, :]
        c_ign = total_ign + tl.load(bias + n_out + o_j, mask=m_j, other=0.0)[None, :]
        p_c = c + o_r[:, None] * (2 * n_out) + o_j[None, :]
        tl.store(p_c, c_sum, mask=m)
        tl.store(p_c + n_out, c_ign, mask=m)
    R = flat_prior(m_used, PRIOR, MASKED, T)
    b_phi = tl.where(m_used, (c_sum * R - c_ign) * b_f[:, None], 0.0)
    tl.store(phi + o_r[:, None] * n_out + o_j[None, :], b_phi, mask=(o_r < end)[:, None] & m_j[None, :])


@triton.jit
def next_kernel(
    x, M, c_sum, c_ign, W_S, B_S, f, use, tiles,  # [r, d], [b, q, d], [r, 2 j] or [i, j], [1 or i, j], [r]
    phi,  # [r, j] the result
    n_inp, per_sample, n_out, d_inp, x_i, M_b, M_0, c_i, c_0, use_b, use_i, use_j,  # x_hat begins at M_0
    FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A later iteration: phi = f (c_sum R - c_ign), with the R of scores against x_hat."""
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_j = o_j < n_out
    o_i = o_r - b * n_inp
    b_f = tl.load(f + o_r, mask=o_r < end, other=0.0)
    m_i = rows_used(b_f, o_r < end, UNUSED)
    z = tl.zeros([BLOCK_I, BLOCK_J], T)
    for k in range(0, d_inp, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_x = m_i[:, None] & (o_k < d_inp)[None, :]
        b_x = tl.load(x + o_r[:, None] * x_i + o_k[None, :], mask=m_x, other=0.0).to(OPERAND)
        z = multiply(b_x, rows_of_M(M + b * M_b + M_0, o_j, o_k, n_out, d_inp, OPERAND), z, PRECISION)
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, b * use_b + o_i[:, None] * use_i, o_j[None, :], use_j, m, MASKED)
    o_S = (o_i * (n_out if FIXED else 0))[:, None] + o_j[None, :]
    if FIXED:
        z *= tl.load(W_S + o_S, mask=m, other=0.0).to(T)
    z += tl.load(B_S + o_S, mask=m, other=0.0).to(T)
    R, _ = competition(z, m_used)
    o_c = (o_i if FIXED else o_r)[:, None] * c_i + o_j[None, :]
    b_sum, b_ign = load_betas(c_sum, c_ign + c_0, o_c, m, FIXED, T)
    b_phi = tl.where(m_used, (b_sum * R - b_ign) * b_f[:, None], 0.0)
    tl.store(phi + o_r[:, None] * n_out + o_j[None, :], b_phi, mask=(o_r < end)[:, None] & m_j[None, :])


@triton.jit
def add_to(pointer, value, m, FRESH: tl.constexpr):
    """Add to what is stored, or store if FRESH."""
    if not FRESH:
        value += tl.load(pointer, mask=m, other=0.0)
    tl.store(pointer, value, mask=m)


@triton.jit
def next_backward_kernel(
    x, M, c_sum, c_ign, W_S, B_S, f, grad_s, use, tiles,  # as above; M from M_0 on: grad_y, then x_hat
    results,  # [r, q] from column results_0 on: phi and the gradient of dot; from grad_c_0 on: c_sum and c_ign
    grad_f, parts,  # [r], [4, b, i, j] where FIXED
    n_inp, per_sample, n_out, d_inp, x_i, M_b, M_0, c_i, c_0, use_b, use_i, use_j,
    results_i, results_0, grad_c_0, part_b,
    FRESH: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradient of ``next_kernel``: phi once more, and the gradients of everything of a pair.

    The parts are gradients of beta_use, beta_ign, W_S and B_S, to be summed over samples.
    """
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_j = o_j < n_out
    o_i = o_r - b * n_inp
    b_f = tl.load(f + o_r, mask=o_r < end, other=0.0)
    m_i = rows_used(b_f, o_r < end, UNUSED)
    grad_phi = tl.zeros([BLOCK_I, BLOCK_J], T)
    dot = tl.zeros([BLOCK_I, BLOCK_J], T)
    M += b * M_b + M_0
    for k in range(0, d_inp, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_x = m_i[:, None] & (o_k < d_inp)[None, :]
        b_x = tl.load(x + o_r[:, None] * x_i + o_k[None, :], mask=m_x, other=0.0).to(OPERAND)
        grad_phi = multiply(b_x, rows_of_M(M, o_j, o_k, n_out, d_inp, OPERAND), grad_phi, PRECISION)
        x_hat = M + n_out * d_inp
        dot = multiply(b_x, rows_of_M(x_hat, o_j, o_k, n_out, d_inp, OPERAND), dot, PRECISION)
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
    p_results = results + o_r[:, None] * results_i + results_0 + o_j[None, :]
    tl.store(p_results, u * b_f[:, None], mask=m)
    grad_phi *= b_f[:, None]
    of_R = R * (b_sum * grad_phi)
    # The same products as in the sum, so that nothing is left where one output has all of R.
    grad_z = (of_R - R * tl.sum(of_R, 1)[:, None]) * rest
    grad_z = tl.where(m_used, grad_z, 0.0)
    if FIXED:
        p_parts = parts + b * part_b + o_i[:, None] * n_out + o_j[None, :]
        step = tl.num_programs(0) // per_sample * part_b  # from one parameter to the next
        m_all = (o_r < end)[:, None] & m_j[None, :]  # zeros of unused inputs are summed too
        add_to(p_parts, R * grad_phi, m_all, FRESH)
        add_to(p_parts + step, (R - 1.0) * grad_phi, m_all, FRESH)
        add_to(p_parts + 2 * step, grad_z * dot, m_all, FRESH)
        add_to(p_parts + 3 * step, grad_z, m_all, FRESH)
        grad_z *= tl.load(W_S + o_S, mask=m, other=0.0).to(T)
    else:
        p_c = results + o_r[:, None] * results_i + grad_c_0 + o_j[None, :]
        add_to(p_c, R * grad_phi, m, FRESH)
        add_to(p_c + n_out, -grad_phi, m, FRESH)
    tl.store(p_results + n_out, grad_z, mask=m)


@triton.jit
def first_backward_kernel(
    x, M, c_sum, c_ign, f, sqrt_n_inp, grad_s, use, tiles,  # as above; M from M_0 on: grad_y
    results,  # [r, q] as above; where not FIXED n_a columns follow: two of a_inp, then zeros
    grad_f, parts,  # as above; grad_f turns into the gradient of W_A x_inp
    n_inp, per_sample, n_out, d_inp, x_i, M_b, M_0, c_i, c_0, use_b, use_i, use_j,
    results_i, results_0, grad_c_0, part_b, n_a,
    PRIOR: tl.constexpr, FRESH: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr,
    PACKED: tl.constexpr, UNUSED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """The gradient of ``first_kernel``, after that of every later iteration.

    The columns of a_inp have its gradient over sqrt(n_inp), which belongs to W_A x_inp, and as it is.
    """
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_j = o_j < n_out
    o_i = o_r - b * n_inp
    b_f = tl.load(f + o_r, mask=o_r < end, other=0.0)
    m_i = rows_used(b_f, o_r < end, UNUSED)
    grad_phi = tl.zeros([BLOCK_I, BLOCK_J], T)
    M += b * M_b + M_0
    for k in range(0, d_inp, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_x = m_i[:, None] & (o_k < d_inp)[None, :]
        b_x = tl.load(x + o_r[:, None] * x_i + o_k[None, :], mask=m_x, other=0.0).to(OPERAND)
        grad_phi = multiply(b_x, rows_of_M(M, o_j, o_k, n_out, d_inp, OPERAND), grad_phi, PRECISION)
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, b * use_b + o_i[:, None] * use_i, o_j[None, :], use_j, m, MASKED)
    R = flat_prior(m_used, PRIOR, MASKED, T)
    o_c = (o_i if FIXED else o_r)[:, None] * c_i + o_j[None, :]
    b_sum, b_ign = load_betas(c_sum, c_ign + c_0, o_c, m, FIXED, T)
    grad_phi += tl.load(grad_s + b * n_out + o_j, mask=m_j, other=0.0)[None, :]
    grad_phi = tl.where(m_used, grad_phi, 0.0)
    u = tl.where(m_used, b_sum * R - b_ign, 0.0)
    tl.store(results + o_r[:, None] * results_i + results_0 + o_j[None, :], u * b_f[:, None], mask=m)
    grad_a = tl.sum(u * grad_phi, 1)
    if not FRESH:
        grad_a += tl.load(grad_f + o_r, mask=m_i, other=0.0)
    grad_a *= b_f * (1.0 - b_f)
    scaled = grad_a / tl.load(sqrt_n_inp + b)
    tl.store(grad_f + o_r, tl.where(m_i, scaled, 0.0), mask=o_r < end)
    grad_phi *= b_f[:, None]
    if FIXED:
        p_parts = parts + b * part_b + o_i[:, None] * n_out + o_j[None, :]
        step = tl.num_programs(0) // per_sample * part_b
        m_all = (o_r < end)[:, None] & m_j[None, :]
        add_to(p_parts, R * grad_phi, m_all, FRESH)
        add_to(p_parts + step, (R - 1.0) * grad_phi, m_all, FRESH)
    else:
        p_c = results + o_r[:, None] * results_i + grad_c_0 + o_j[None, :]
        add_to(p_c, R * grad_phi, m, FRESH)
        add_to(p_c + n_out, -grad_phi, m, FRESH)
        o_a = tl.arange(0, 4)[None, :]
        b_a = tl.where(o_a == 0, scaled[:, None], tl.where(o_a == 1, grad_a[:, None], 0.0))
        p_a = results + o_r[:, None] * results_i + grad_c_0 + 2 * n_out + o_a
        tl.store(p_a, b_a, mask=m_i[:, None] & (o_a < n_a))


@triton.jit
def input_gradient_kernel(
    results, M_T, f, grad_a, W_A, tiles,  # [r, q], [b, d, q], [r], [r] and [i, d] where FIXED
    grad_x,  # [r, d]
    n_inp, per_sample, n_columns, d_inp, results_i, M_q, n_blocks,  # M_q: from one feature of M_T to the next
    FIXED: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """grad_x = results M, plus grad_a W_A where FIXED; 0 at inputs that are not used."""
    # Neighbouring programs share rows of results, which then come from the cache.
    pid = tl.program_id(0)
    b, first, end = tile_of(tiles, n_inp, per_sample, pid // n_blocks, BLOCK_I, PACKED)
    if first >= end:
        return
    o_r = first + tl.arange(0, BLOCK_I)
    o_d = pid % n_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < d_inp
    m_i = rows_used(tl.load(f + o_r, mask=o_r < end, other=0.0), o_r < end, UNUSED)
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    M_T += b * d_inp * M_q
    for k in range(0, n_columns, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < n_columns
        b_pairs = tl.load(results + o_r[:, None] * results_i + o_k[None, :], mask=m_i[:, None] & m_k[None, :], other=0.0)
        b_M = tl.load(M_T + o_d[None, :] * M_q + o_k[:, None], mask=m_d[None, :] & m_k[:, None], other=0.0)
        total = multiply(b_pairs.to(OPERAND), b_M.to(OPERAND), total, PRECISION)
    m = m_i[:, None] & m_d[None, :]
    if FIXED:
        o_W = (o_r - b * n_inp)[:, None] * d_inp + o_d[None, :]
        b_a = tl.load(grad_a + o_r, mask=m_i, other=0.0)
        total += b_a[:, None] * tl.load(W_A + o_W, mask=m, other=0.0).to(T)
    total = tl.where(m_i[:, None], total, 0.0)
    p_x = grad_x + o_r[:, None] * d_inp + o_d[None, :]
    tl.store(p_x, total.to(grad_x.dtype.element_ty), mask=(o_r < end)[:, None] & m_d[None, :])


# The strides are not specialised. In tf32 the copy to shared memory transposes tiles, 4 bytes at a time; if the
# compiler knew that rows are aligned to 16 bytes, 16 threads would write to the same bank.
@triton.jit(do_not_specialize=["pairs_i", "pairs_0", "x_i"])
def sums_kernel(
    pairs, x, f, tiles,  # [r, q], [r, d], [r], [n, 3] where PACKED
    out, totals,  # [n, q, d], [n, q]: for each part of a sample
    n_inp, per_sample, n_columns, d_inp, pairs_i, pairs_0, x_i,  # pairs from column pairs_0 on
    PACKED: tl.constexpr, UNUSED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    PART: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sums over the rows of a part: pairs^T x, and pairs; a part has up to PART rows of one sample."""
    part = tl.program_id(1).to(tl.int64)
    b, first, end = tile_of(tiles, n_inp, per_sample, part, PART, PACKED)
    if PACKED and first >= end:
        return
    o_q = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_q, m_d = o_q < n_columns, o_d < d_inp
    total = tl.zeros([BLOCK_Q, BLOCK_D], T)
    b_sum = tl.zeros([BLOCK_I, BLOCK_Q], T)
    for start in range(first, end, BLOCK_I):
        o_r = start + tl.arange(0, BLOCK_I)
        m_i = o_r < end
        if UNUSED:
            m_i = rows_used(tl.load(f + o_r, mask=m_i, other=0.0), m_i, UNUSED)
        m = m_i[:, None] & m_q[None, :]
        b_pairs = tl.load(pairs + o_r[:, None] * pairs_i + pairs_0 + o_q[None, :], mask=m, other=0.0)
        b_x = tl.load(x + o_r[:, None] * x_i + o_d[None, :], mask=m_i[:, None] & m_d[None, :], other=0.0)
        total = multiply(tl.trans(b_pairs.to(OPERAND)), b_x.to(OPERAND), total, PRECISION)
        b_sum += b_pairs
    p_out = out + (part * n_columns + o_q[:, None]) * d_inp + o_d[None, :]
    tl.store(p_out, total, mask=m_q[:, None] & m_d[None, :])
    if tl.program_id(0) == 0:
        tl.store(totals + part * n_columns + o_q, tl.sum(b_sum, 0), mask=m_q)


@triton.jit
def reduce_kernel(
    parts, part_totals, cu_seqlens,  # [n, q d], [n, q], [b + 1] where PACKED
    out, totals,  # [b, q d], [b, q]
    per_sample, n, n_columns, n_rows,  # parts of a sample, q d, q, and the rows of all samples
    PACKED: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add up the parts of each sample, one after the other."""
    b = tl.program_id(1).to(tl.int64)
    first, last = b * per_sample, (b + 1) * per_sample
    if PACKED:
        start = start_of(cu_seqlens, b, n_rows)
        first = start // PART + b  # as ``segments_kernel`` places them
        last = first + tl.cdiv(tl.maximum(start_of(cu_seqlens, b + 1, n_rows) - start, 0), PART)
    o = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], T)
    total_q = tl.zeros([BLOCK_N], T)
    for part in range(first, last):
        total += tl.load(parts + part * n + o, mask=o < n, other=0.0)
        total_q += tl.load(part_totals + part * n_columns + o, mask=o < n_columns, other=0.0)
    tl.store(out + b * n + o, total, mask=o < n)
    tl.store(totals + b * n_columns + o, total_q, mask=o < n_columns)


@triton.jit
def shared_backward_kernel(
    grad, sums,  # [q, d], [q]
    grad_W_use, grad_W_ign, grad_B_use, grad_B_ign, grad_W_A, grad_B_A,  # [d, j], [d, j], [j], [j], [d], [1]
    n_out, d_inp, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of the parameters in the rows of M that all samples share: c_sum, c_ign, and two of a_inp."""
    j = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_j, m_d = j < n_out, d < d_inp
    p_grad, m = grad + j[:, None] * d_inp + d[None, :], m_j[:, None] & m_d[None, :]
    of_sum = tl.load(p_grad, mask=m, other=0.0)
    of_ign = tl.load(p_grad + n_out * d_inp, mask=m, other=0.0)
    o, m = d[:, None] * n_out + j[None, :], m_d[:, None] & m_j[None, :]
    tl.store(grad_W_use + o, tl.trans(of_sum), mask=m)
    tl.store(grad_W_ign + o, tl.trans(of_sum + of_ign), mask=m)
    if tl.program_id(0) == 0:
        tl.store(grad_W_A + d, tl.load(grad + 2 * n_out * d_inp + d, mask=m_d, other=0.0), mask=m_d)
    if tl.program_id(1) == 0:
        b_sum = tl.load(sums + j, mask=m_j, other=0.0)
        tl.store(grad_B_use + j, b_sum, mask=m_j)
        tl.store(grad_B_ign + j, b_sum + tl.load(sums + n_out + j, mask=m_j, other=0.0), mask=m_j)
        if tl.program_id(0) == 0:
            tl.store(grad_B_A, tl.load(sums + 2 * n_out + 1))


@triton.jit
def activations_backward_kernel(
    x, f, grad_a, sqrt_n_inp, grad_W_A, grad_B_A,  # [b, i, d], [b, i] twice, [b], [i, d], [i]
    n_batch, n_inp, d_inp, x_i,
    UNUSED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Gradients of W_A and B_A of a fixed length, from grad_a, that of W_A x_inp; sums over samples."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_i, m_d = o_i < n_inp, o_d < d_inp
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    total_a = tl.zeros([BLOCK_I], T)
    for b in range(0, n_batch):
        o_r = b * n_inp + o_i
        b_a = tl.load(grad_a + o_r, mask=m_i, other=0.0)
        m_r = m_i
        if UNUSED:
            m_r = rows_used(tl.load(f + o_r, mask=m_i, other=0.0), m_i, UNUSED)
        b_x = tl.load(x + o_r[:, None] * x_i + o_d[None, :], mask=m_r[:, None] & m_d[None, :], other=0.0)
        total += b_a[:, None] * b_x.to(T)
        total_a += b_a * tl.load(sqrt_n_inp + b)
    tl.store(grad_W_A + o_i[:, None] * d_inp + o_d[None, :], total, mask=m_i[:, None] & m_d[None, :])
    if tl.program_id(1) == 0:
        tl.store(grad_B_A + o_i, total_a, mask=m_i)


@triton.jit
def start_of(cu_seqlens, b, n_rows):
    """The first row of a sample; wrong offsets are clamped, so that no kernel leaves its tensors."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + b), 0), n_rows).to(tl.int64)


@triton.jit
def lengths_kernel(
    mask, sqrt_n_inp,  # [b, i] where COUNTED, [b]
    n_inp, COUNTED: tl.constexpr, BLOCK_I: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """sqrt(n_inp) of each sample: of its used inputs, at least 1."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.zeros([BLOCK_I], tl.int32)
    if COUNTED:
        for start in range(0, n_inp, BLOCK_I):
            o_i = start + tl.arange(0, BLOCK_I)
            n += (tl.load(mask + b * n_inp + o_i, mask=o_i < n_inp, other=0) != 0).to(tl.int32)
        total = tl.sum(n, 0)
    else:
        total = n_inp
    tl.store(sqrt_n_inp + b, tl.sqrt(tl.maximum(total, 1).to(T)))


@triton.jit
def fill_table(table, n_slots, cu_seqlens, o, n_rows, n_batch, steps, half, BLOCK: tl.constexpr):
    """Write some slots of a table of tiles or parts: the sample, the first row, the row after the last.

    Tile k of sample b has the slot ``start // BLOCK + b + k``. No two share one, since a sample of n rows
    crosses at least cdiv(n, BLOCK) - 1 multiples of BLOCK. A binary search finds the sample of a slot.
    """
    b = tl.zeros(o.shape, tl.int32)
    for _ in range(steps):
        middle = b + half
        inside = (o < n_slots) & (middle < n_batch)
        start = tl.load(cu_seqlens + middle, mask=inside, other=0)
        start = tl.minimum(tl.maximum(start, 0), n_rows).to(tl.int32)
        b = tl.where(inside & (start // BLOCK + middle <= o), middle, b)
        half = half // 2
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + b), 0), n_rows).to(tl.int32)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + b + 1), 0), n_rows).to(tl.int32)
    k = o - start // BLOCK - b
    first = start + k * BLOCK
    used = (k >= 0) & (first < end)
    m = o < n_slots
    tl.store(table + 3 * o, b, mask=m)
    tl.store(table + 3 * o + 1, tl.where(used, first, 0), mask=m)
    tl.store(table + 3 * o + 2, tl.where(used, tl.minimum(first + BLOCK, end), 0), mask=m)


@triton.jit(debug=True)
def segments_kernel(
    cu_seqlens, sqrt_n_inp, tiles, parts,  # [b + 1], [b], [t, 3], [p, 3]
    n_rows, n_batch, n_tiles, n_parts,
    steps, half,  # of a binary search: 2 half is the least power of two that is not less than n_batch
    TILE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Of packed samples: sqrt(n_inp), and the tables of tiles and of parts."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fill_table(tiles, n_tiles, cu_seqlens, o, n_rows, n_batch, steps, half, TILE)
    fill_table(parts, n_parts, cu_seqlens, o, n_rows, n_batch, steps, half, PART)
    m = o < n_batch
    start, end = tl.load(cu_seqlens + o, mask=m, other=0), tl.load(cu_seqlens + o + 1, mask=m, other=0)
    right = (start <= end) & ((o > 0) | (start == 0)) & ((o < n_batch - 1) | (end == n_rows))
    tl.device_assert(right, "cu_seqlens must rise from 0 to the number of rows of x_inp", mask=m)
    tl.store(sqrt_n_inp + o, tl.sqrt(tl.maximum(end - start, 1).to(T)), mask=m)
