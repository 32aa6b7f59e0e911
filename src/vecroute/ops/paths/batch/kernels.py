"""Triton kernels of the batch path: a product with x_inp, and all work on its pairs, in one kernel.

A program handles a tile: up to BLOCK_I rows of one sample, and all outputs of each row. The rows of all
samples follow each other in memory, so padded and packed calls differ only in how a program finds its tile.
An unused input has f = 0, and kernels load nothing of its row.

*Halves.* If HALF, operands of products are float16 with a scale. A *top* is the power of two below the
greatest absolute value, and a half is 2^14 times a number divided by its top. Numbers down to 2^-28 of the
top keep all digits. float16 has the digits of tf32, and with a scale it has enough range, at half the bytes
and twice the rate. Each row of x_inp and of M has its own top. Pairs that are summed over inputs have one top
per tile, because a scale must be constant along the summed dimension. Before that, each row of pairs is
multiplied by the top of its row of x_inp.

Names in kernels: ``o_`` offsets, ``m_`` masks of valid elements, ``b_`` blocks of values.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(tiles, n_inp, per_sample, pid, BLOCK_I: tl.constexpr, PACKED: tl.constexpr):
    """Return the sample of a tile, its first row, and the row after its last, counted over all samples."""
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
def top_below(greatest):
    """Return the power of two below a non-negative number; at least 2^-95, by which a GPU can divide."""
    bits = greatest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits, 32 << 23).to(tl.float32, bitcast=True)


@triton.jit
def rows_used(b_f, m_i, UNUSED: tl.constexpr):
    """Return which rows of a tile are used. Unused rows have f = 0. Without masks, every row is used."""
    return m_i & (b_f != 0.0) if UNUSED else m_i


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b. PRECISION says how to round float32 operands: tf32, tf32x3 (almost not), ieee."""
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def times_M(x, M, o_r, m_i, n_out, d_inp, x_i, M_i, BLOCKS: tl.constexpr, BLOCK_I: tl.constexpr,
            BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
            T: tl.constexpr):  # fmt: skip
    """Return x M^T of a tile, [i, BLOCKS j], for BLOCKS = 1 or 2 blocks of n_out rows of M.

    The columns of two blocks alternate, so that ``tl.split`` separates them without moving numbers.
    """
    o_q = tl.arange(0, BLOCKS * BLOCK_J)
    m_q = o_q // BLOCKS < n_out
    p_M = M + ((o_q % BLOCKS) * n_out + o_q // BLOCKS)[None, :] * M_i
    p_x = x + o_r[:, None] * x_i
    total = tl.zeros([BLOCK_I, BLOCKS * BLOCK_J], T)
    for k in range(0, d_inp, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < d_inp
        b_x = tl.load(p_x + o_k[None, :], mask=m_i[:, None] & m_k[None, :], other=0.0).to(OPERAND)
        b_M = tl.load(p_M + o_k[:, None], mask=m_q[None, :] & m_k[:, None], other=0.0).to(OPERAND)
        total = multiply(b_x, b_M, total, PRECISION)
    return total


@triton.jit
def without_units(product, x_tops, M_tops, o_r, o_j, m_i, m_j, HALF: tl.constexpr):
    """Remove the scales of halves from a block of products [i, j]."""
    if HALF:
        x_top = tl.load(x_tops + o_r, mask=m_i, other=0.0)
        product *= x_top[:, None] * (tl.load(M_tops + o_j, mask=m_j, other=0.0) * (1.0 / 2**28))[None, :]
    return product


@triton.jit
def store_to_sum(value, pairs, tops, sums, x_tops, tile, o_r, o_j, m_i, m_j, m, n_out, HALF: tl.constexpr):
    """Store pairs of a tile and their sums over rows for ``sums_kernel``. If HALF, store halves and a top."""
    value = tl.where(m, value, 0.0)
    tl.store(sums + tile * n_out + o_j, tl.sum(value, 0), mask=m_j)
    if HALF:
        value *= tl.load(x_tops + o_r, mask=m_i, other=0.0)[:, None]
        top = top_below(tl.max(tl.max(tl.abs(value), 1), 0))
        tl.store(tops + tile, top)
        value = (value * (16384.0 / top)).to(tl.float16)
    tl.store(pairs + o_r[:, None] * n_out + o_j[None, :], value, mask=m)


@triton.jit
def used_pairs(use, o_use, o_j, use_j, m, MASKED: tl.constexpr):
    """Load which pairs of a tile are used."""
    return m & (tl.load(use + o_use + o_j * use_j, mask=m, other=0) != 0) if MASKED else m


@triton.jit
def flat_prior(m_used, PRIOR: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr):
    """Return R of the first iteration: equal for all used outputs of an input, 0 for the others."""
    if MASKED:
        n = tl.sum(m_used.to(T), 1)[:, None]
        return tl.where(m_used, 1.0 / tl.maximum(n, 1.0), 0.0)
    return tl.where(m_used, tl.full(m_used.shape, PRIOR, T), 0.0)


@triton.jit
def competition(z, m_used):
    """Return R = f(z) / sum_j f(z) over the used outputs of each input, and 1 - f(z).

    f(z) is computed as exp(low) q with low = min(z, 0). So rows of very negative z keep their digits, and so
    does 1 - f(z) if f(z) is almost 1.
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
    """Load beta_use + beta_ign, and beta_ign, of a tile. If FIXED, c_sum points to beta_use."""
    b_sum = tl.load(c_sum + o_c, mask=m, other=0.0).to(T)
    b_ign = tl.load(c_ign + o_c, mask=m, other=0.0).to(T)
    if FIXED:
        b_sum += b_ign
    return b_sum, b_ign


@triton.jit
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
def first_kernel(
    x, M, bias, x_tops, M_tops,  # [r, d]; where not FIXED [q, d] rows for c_sum and c_ign, and [q]; [r], [q]
    beta_use, beta_ign,  # [i, j] each, where FIXED
    f, use, tiles,  # [r], [b, i, j] where MASKED, [n, 3] where PACKED
    c, phi, phi_tops, phi_sums, phi_out,  # [r, 2 j] where not FIXED, [r, j], [n], [n, j], [r, j] where SHOWN
    n_inp, per_sample, n_out, d_inp, x_i, M_i, use_b, use_i, use_j,  # and strides
    PRIOR: tl.constexpr, SHOWN: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    UNUSED: tl.constexpr, HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Run the first iteration: the betas, and phi under the flat prior."""
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_j, o_i = o_j < n_out, o_r - b * n_inp
    b_f = tl.load(f + o_r, mask=o_r < end, other=0.0)
    m_i = rows_used(b_f, o_r < end, UNUSED)
    m = m_i[:, None] & m_j[None, :]
    m_used = used_pairs(use, b * use_b + o_i[:, None] * use_i, o_j[None, :], use_j, m, MASKED)
    if FIXED:
        c_sum, c_ign = load_betas(beta_use, beta_ign, o_i[:, None] * n_out + o_j[None, :], m, True, T)
    else:
        both = times_M(
            x, M, o_r, m_i, n_out, d_inp, x_i, M_i, 2, BLOCK_I, BLOCK_J, BLOCK_K, OPERAND, PRECISION, T
        )
        c_sum, c_ign = tl.split(tl.reshape(both, [BLOCK_I, BLOCK_J, 2]))
        c_sum = without_units(c_sum, x_tops, M_tops, o_r, o_j, m_i, m_j, HALF)
        c_ign = without_units(c_ign, x_tops, M_tops + n_out, o_r, o_j, m_i, m_j, HALF)
        c_sum += tl.load(bias + o_j, mask=m_j, other=0.0)[None, :]
        c_ign += tl.load(bias + n_out + o_j, mask=m_j, other=0.0)[None, :]
        p_c = c + o_r[:, None] * (2 * n_out) + o_j[None, :]
        tl.store(p_c, c_sum, mask=m)
        tl.store(p_c + n_out, c_ign, mask=m)
    R = flat_prior(m_used, PRIOR, MASKED, T)
    b_phi = tl.where(m_used, (c_sum * R - c_ign) * b_f[:, None], 0.0)
    m_all = (o_r < end)[:, None] & m_j[None, :]
    if SHOWN:
        tl.store(phi_out + o_r[:, None] * n_out + o_j[None, :], b_phi, mask=m_all)
    store_to_sum(b_phi, phi, phi_tops, phi_sums, x_tops, tl.program_id(0).to(tl.int64), o_r, o_j, m_i, m_j,
                 m_all,
                 n_out, HALF)  # fmt: skip


@triton.jit
def next_kernel(
    x, M, x_tops, M_tops,  # [r, d], [b, q, d] with x_hat from row M_0 on, [r], [b, q]
    c_sum, c_ign, W_S, B_S, f, use, tiles,  # [r, 2 j] or [i, j], [1 or i, j] twice, [r], as above
    phi, phi_tops, phi_sums, phi_out,  # as above
    n_inp, per_sample, n_out, d_inp, x_i, M_i, n_M, M_0, c_i, c_0, use_b, use_i, use_j,  # n_M: q
    SHOWN: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
    UNUSED: tl.constexpr,
    HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Run a later iteration: phi = f (c_sum R - c_ign), with R from the scores of x_hat."""
    b, first, end = tile_of(tiles, n_inp, per_sample, tl.program_id(0), BLOCK_I, PACKED)
    if first >= end:
        return
    o_r, o_j = first + tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_j, o_i = o_j < n_out, o_r - b * n_inp
    b_f = tl.load(f + o_r, mask=o_r < end, other=0.0)
    m_i = rows_used(b_f, o_r < end, UNUSED)
    M_row = b * n_M + M_0
    z = times_M(
        x,
        M + M_row * M_i,
        o_r,
        m_i,
        n_out,
        d_inp,
        x_i,
        M_i,
        1,
        BLOCK_I,
        BLOCK_J,
        BLOCK_K,
        OPERAND,
        PRECISION,
        T,
    )
    z = without_units(z, x_tops, M_tops + M_row, o_r, o_j, m_i, m_j, HALF)
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
    m_all = (o_r < end)[:, None] & m_j[None, :]
    if SHOWN:
        tl.store(phi_out + o_r[:, None] * n_out + o_j[None, :], b_phi, mask=m_all)
    store_to_sum(b_phi, phi, phi_tops, phi_sums, x_tops, tl.program_id(0).to(tl.int64), o_r, o_j, m_i, m_j,
                 m_all,
                 n_out, HALF)  # fmt: skip


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


@triton.jit
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


@triton.jit
def input_gradient_kernel(
    results, tops, M, f, grad_a, W_A, tiles,  # [r, q], [r] where HALF, [b, n_M, d], [r], [r], [1 or i, d]
    grad_x,  # [r, d]
    n_inp, per_sample, n_columns, n_M, d_inp, results_i, M_i, shared, n_blocks,
    FIXED: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr, HALF: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute grad_x = results M + grad_a W_A; 0 at unused inputs.

    After the n_M rows of M of a sample come the rows that all samples share, which begin at M + shared.
    """
    # Neighbouring programs use the same rows of results, so that these come from the cache.
    pid = tl.program_id(0)
    b, first, end = tile_of(tiles, n_inp, per_sample, pid // n_blocks, BLOCK_I, PACKED)
    if first >= end:
        return
    o_r = first + tl.arange(0, BLOCK_I)
    o_d = pid % n_blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < d_inp
    m_i = rows_used(tl.load(f + o_r, mask=o_r < end, other=0.0), o_r < end, UNUSED)
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    for k in range(0, n_columns, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < n_columns
        m_pairs, m_M = m_i[:, None] & m_k[None, :], m_k[:, None] & m_d[None, :]
        b_pairs = tl.load(results + o_r[:, None] * results_i + o_k[None, :], mask=m_pairs, other=0.0).to(
            OPERAND
        )
        o_M = tl.where(o_k < n_M, (b * n_M + o_k) * M_i, shared + (o_k - n_M) * M_i)
        b_M = tl.load(M + o_M[:, None] + o_d[None, :], mask=m_M, other=0.0).to(OPERAND)
        total = multiply(b_pairs, b_M, total, PRECISION)
    if HALF:
        total *= (tl.load(tops + o_r, mask=m_i, other=0.0) * (1.0 / 2**28))[:, None]
    m = m_i[:, None] & m_d[None, :]
    o_W = ((o_r - b * n_inp) if FIXED else o_r * 0)[:, None] * d_inp + o_d[None, :]
    b_a = tl.load(grad_a + o_r, mask=m_i, other=0.0)
    total += b_a[:, None] * tl.load(W_A + o_W, mask=m, other=0.0).to(T)
    total = tl.where(m_i[:, None], total, 0.0)
    p_x = grad_x + o_r[:, None] * d_inp + o_d[None, :]
    tl.store(p_x, total.to(grad_x.dtype.element_ty), mask=(o_r < end)[:, None] & m_d[None, :])


@triton.jit
def sum_activations(x, x_tops, grad_a, sums, tiles, p_out, p_total, tile, last, o_d, m_d, n_inp, per_sample,
                    n_sums, x_i,
                    PACKED: tl.constexpr, UNUSED: tl.constexpr, HALF: tl.constexpr, BLOCK_I: tl.constexpr,
                    BLOCK_D: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Sum grad_a^T x over some tiles, for some features, and sum the gradient of a_inp over these tiles."""
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    b_sum = tl.zeros([1], T)
    for t in tl.range(tile, last, num_stages=3):
        _, first, end = tile_of(tiles, n_inp, per_sample, t, BLOCK_I, PACKED)
        o_r = first + tl.arange(0, BLOCK_I)
        b_a = tl.load(grad_a + o_r, mask=o_r < end, other=0.0)
        if HALF:
            b_a *= tl.load(x_tops + o_r, mask=o_r < end, other=0.0) * (1.0 / 2**14)
        m_i = rows_used(b_a, o_r < end, UNUSED)
        b_x = tl.load(x + o_r[:, None] * x_i + o_d[None, :], mask=m_i[:, None] & m_d[None, :], other=0.0)
        total += b_a[:, None] * b_x.to(T)
        b_sum += tl.where(first < end, tl.load(sums + t * n_sums + tl.arange(0, 1)), 0.0)
    tl.store(p_out, tl.sum(total, 0), mask=m_d)
    if tl.program_id(0) == 0:
        tl.store(p_total + tl.arange(0, 1), b_sum)


@triton.jit
def sums_kernel(
    pairs, x, f, tops, sums, tiles, parts,  # [r, q], [r, d], [r], [n], [n, n_sums], tables where PACKED
    grad_a, x_tops,  # [r] each, if WHOLE
    out, totals,  # [p, q or q + 1, d], [p, n_sums]: for each part of a sample, or of all rows
    n_inp, per_sample, n_columns, d_inp, x_i, n_tiles, n_parts,  # how many tiles and parts a sample has
    WHOLE: tl.constexpr, EXTRA: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr, HALF: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, PART: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sum pairs^T x, and pairs, over inputs. A part is up to PART tiles of one sample, or of all if WHOLE.

    If WHOLE, there are EXTRA more rows, with programs of their own. Their sums are the gradients of W_A
    (grad_a^T x) and of B_A. BLOCK_I is the number of rows of a tile, as in the kernels that stored the pairs.
    """
    part = tl.program_id(1).to(tl.int64)
    first, end = part * 0, part * 0
    if WHOLE:
        tile = part * PART
        last = tl.minimum(tile + PART, n_tiles)
    elif PACKED:
        first, end = tl.load(parts + 4 * part + 1).to(tl.int64), tl.load(parts + 4 * part + 2).to(tl.int64)
        tile = tl.load(parts + 4 * part + 3).to(tl.int64)
        last = tile + tl.cdiv(end - first, BLOCK_I)
        if first >= end:
            return
    else:
        b, k = part // n_parts, part % n_parts * PART
        tile = b * n_tiles + k
        last = tl.minimum(tile + PART, (b + 1) * n_tiles)
        first, end = b * n_inp + k * BLOCK_I, (b + 1) * n_inp
    o_q = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_q, m_d = o_q < n_columns, o_d < d_inp
    n_sums = n_columns + EXTRA  # EXTRA sums for a_inp
    extra = tl.program_id(2) - (tl.num_programs(2) - EXTRA)
    if WHOLE and extra >= 0:
        row = part * n_sums + n_columns + extra
        step: tl.constexpr = (PART + EXTRA - 1) // EXTRA
        tile += extra * step
        last = tl.minimum(last, tile + step)
        sum_activations(x, x_tops, grad_a, sums + n_columns, tiles, out + row * d_inp + o_d, totals + row,
                        tile, last, o_d, m_d,
                        n_inp, per_sample, n_columns + 1, x_i, PACKED, UNUSED, HALF, BLOCK_I, BLOCK_D,
                        T)  # fmt: skip
        return
    total = tl.zeros([BLOCK_Q, BLOCK_D], T)
    b_sum = tl.zeros([BLOCK_Q], T)
    for t in tl.range(tile, last, num_stages=STAGES):
        if WHOLE:
            _, first, end = tile_of(tiles, n_inp, per_sample, t, BLOCK_I, PACKED)
            o_r = first + tl.arange(0, BLOCK_I)
        else:
            o_r = first + (t - tile) * BLOCK_I + tl.arange(0, BLOCK_I)
        m_i = o_r < end
        if UNUSED:
            m_i = rows_used(tl.load(f + o_r, mask=m_i, other=0.0), m_i, UNUSED)
        m = m_i[:, None] & m_q[None, :]
        b_pairs = tl.load(pairs + o_r[:, None] * n_columns + o_q[None, :], mask=m, other=0.0)
        b_x = tl.load(x + o_r[:, None] * x_i + o_d[None, :], mask=m_i[:, None] & m_d[None, :], other=0.0)
        m_tile = first < end  # with packed samples, some tiles have no rows
        b_sums = tl.load(sums + t * (n_columns + 1 if WHOLE else n_columns) + o_q, mask=m_q, other=0.0)
        b_sum += tl.where(m_tile, b_sums, 0.0) if WHOLE else b_sums
        if HALF:
            top = tl.load(tops + t)
            top = tl.where(m_tile, top, 0.0) if WHOLE else top
            # Remove the scales at once, because scaled sums could overflow float32.
            total += tl.dot(tl.trans(b_pairs), b_x) * (top * (1.0 / 2**28))
        else:
            total = multiply(tl.trans(b_pairs.to(OPERAND)), b_x.to(OPERAND), total, PRECISION)
    p_out = out + part * n_sums * d_inp + o_d[None, :]
    tl.store(p_out + o_q[:, None] * d_inp, total, mask=m_q[:, None] & m_d[None, :])
    if tl.program_id(0) == 0:
        tl.store(totals + part * n_sums + o_q, b_sum, mask=m_q)


@triton.jit
def reduce_kernel(
    parts, part_totals, cu_seqlens,  # [n, q d], [n, q], [b + 1] where PACKED
    out, totals,  # [b, q d], [b, q]
    per_sample, n, n_columns, n_rows,  # parts of a sample, q d, q, and the rows of all samples
    PACKED: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add up the parts of each sample, PARTS at a time."""
    b = tl.program_id(1).to(tl.int64)
    first, last = b * per_sample, (b + 1) * per_sample
    if PACKED:
        start = start_of(cu_seqlens, b, n_rows)
        first = start // PART + b  # where ``segments_kernel`` places the parts
        last = first + tl.cdiv(tl.maximum(start_of(cu_seqlens, b + 1, n_rows) - start, 0), PART)
    o = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([PARTS, BLOCK_N], T)
    total_q = tl.zeros([PARTS, BLOCK_N], T)
    for start in range(first, last, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        m = part < last
        total += tl.load(parts + part * n + o, mask=m & (o < n), other=0.0)
        total_q += tl.load(part_totals + part * n_columns + o, mask=m & (o < n_columns), other=0.0)
    tl.store(out + b * n + o, tl.sum(total, 0)[None, :], mask=o < n)
    tl.store(totals + b * n_columns + o, tl.sum(total_q, 0)[None, :], mask=o < n_columns)


@triton.jit
def shared_backward_kernel(
    grad, sums,  # [q, d], [q]
    grad_W_use, grad_W_ign, grad_B_use, grad_B_ign, grad_W_A, grad_B_A,  # [d, j], [d, j], [j], [j], [d], [1]
    n_out, d_inp, EXTRA: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the parameters in the shared rows of M: for c_sum, c_ign and a_inp."""
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
        total = tl.zeros([BLOCK_D], T)
        for k in tl.static_range(EXTRA):
            total += tl.load(grad + (2 * n_out + k) * d_inp + d, mask=m_d, other=0.0)
        tl.store(grad_W_A + d, total, mask=m_d)
    if tl.program_id(1) == 0:
        b_sum = tl.load(sums + j, mask=m_j, other=0.0)
        tl.store(grad_B_use + j, b_sum, mask=m_j)
        tl.store(grad_B_ign + j, b_sum + tl.load(sums + n_out + j, mask=m_j, other=0.0), mask=m_j)
        if tl.program_id(0) == 0:
            total_B = tl.zeros([1], T)
            for k in tl.static_range(EXTRA):
                total_B += tl.load(sums + 2 * n_out + k + tl.arange(0, 1))
            tl.store(grad_B_A + tl.arange(0, 1), total_B)


@triton.jit
def activations_backward_kernel(
    x, f, grad_a, sqrt_n_inp, grad_W_A, grad_B_A,  # [b, i, d], [b, i] twice, [b], [i, d], [i]
    n_batch, n_inp, d_inp, x_i,
    UNUSED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of W_A and B_A over samples, for a fixed n_inp. grad_a is the gradient of W_A x."""
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
    """Return the first row of a sample. Wrong offsets are clamped, so that no kernel leaves its tensors."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + b), 0), n_rows).to(tl.int64)


@triton.jit
def fill_table(table, n_slots, cu_seqlens, o, n_rows, n_batch, steps, half, BLOCK: tl.constexpr,
               TILE: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Write some slots of a table of tiles or parts: the sample, the first row, the row after the last.

    The fourth column of parts is the slot of their first tile.

    Tile k of sample b has the slot ``start // BLOCK + b + k``. No two tiles share a slot, because a sample of
    n rows crosses at least cdiv(n, BLOCK) - 1 multiples of BLOCK. A binary search finds the sample of a slot.
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
    table += COLUMNS * o
    tl.store(table, b, mask=m)
    tl.store(table + 1, tl.where(used, first, 0), mask=m)
    tl.store(table + 2, tl.where(used, tl.minimum(first + BLOCK, end), 0), mask=m)
    if COLUMNS == 4:
        tl.store(table + 3, start // TILE + b + k * (BLOCK // TILE), mask=m)


@triton.jit(debug=True)
def segments_kernel(
    cu_seqlens, sqrt_n_inp, tiles, parts,  # [b + 1], [b], [t, 3], [p, 4]
    n_rows, n_batch, n_tiles, n_parts,
    steps, half,  # of a binary search: 2 half is the least power of two that is not less than n_batch
    TILE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write sqrt(n_inp) and the tables of tiles and parts for packed samples."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fill_table(tiles, n_tiles, cu_seqlens, o, n_rows, n_batch, steps, half, TILE, TILE, 3)
    fill_table(parts, n_parts, cu_seqlens, o, n_rows, n_batch, steps, half, PART, TILE, 4)
    m = o < n_batch
    start, end = tl.load(cu_seqlens + o, mask=m, other=0), tl.load(cu_seqlens + o + 1, mask=m, other=0)
    right = (start <= end) & ((o > 0) | (start == 0)) & ((o < n_batch - 1) | (end == n_rows))
    tl.device_assert(right, "cu_seqlens must rise from 0 to the number of rows of x_inp", mask=m)
    tl.store(sqrt_n_inp + o, tl.sqrt(tl.maximum(end - start, 1).to(T)), mask=m)
