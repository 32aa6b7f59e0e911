"""The parts that Triton kernels of the batch path share: tiles, products with halves, and pairs.

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

from vecroute.ops.backends.fused.functions import f_of, share, top_below

# Sizes that change from call to call. Triton must not compile a kernel again for each of their divisors.
LENGTHS = ["n_inp", "per_sample"]


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
def rows_used(b_f, m_i, UNUSED: tl.constexpr):
    """Return which rows of a tile are used. Unused rows have f = 0. Without masks, every row is used."""
    return m_i & (b_f != 0.0) if UNUSED else m_i


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b. PRECISION says how to round float32 operands: tf32, tf32x3 (almost not), ieee."""
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def rows_of(f, n_rows, n_out, UNUSED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """Return the rows and outputs of a tile; which rows exist, which are used, which outputs exist; and f.

    Rows are counted from the first row of the tile, and pointers point there, because int64 offsets from the
    first row of a tensor need more registers.
    """
    o_r, o_j = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    m_r = o_r < n_rows.to(tl.int32)
    b_f = tl.load(f + o_r, mask=m_r, other=0.0)
    return o_r, o_j, m_r, rows_used(b_f, m_r, UNUSED), o_j < n_out, b_f


@triton.jit
def times_M(x, M, x_tops, M_tops, M_row, o_r, o_j, m_i, m_j, n_out, d_inp, BLOCKS: tl.constexpr,
            BLOCK_K: tl.constexpr, HALF: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
            T: tl.constexpr):  # fmt: skip
    """Return x M^T of a tile, [i, j], for a block of n_out rows of M from M_row on, and for the next block.

    If BLOCKS is 1, the second result means nothing. The columns of two blocks alternate, so that ``tl.split``
    separates them without moving numbers.
    """
    BLOCK_I: tl.constexpr = o_r.shape[0]
    BLOCK_J: tl.constexpr = o_j.shape[0]
    o_q = tl.arange(0, BLOCKS * BLOCK_J)
    m_q = o_q // BLOCKS < n_out
    p_M = M + M_row * d_inp + ((o_q % BLOCKS) * n_out + o_q // BLOCKS)[None, :] * d_inp
    p_x = x + o_r[:, None] * d_inp
    total = tl.zeros([BLOCK_I, BLOCKS * BLOCK_J], T)
    for k in range(0, d_inp, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < d_inp
        b_x = tl.load(p_x + o_k[None, :], mask=m_i[:, None] & m_k[None, :], other=0.0).to(OPERAND)
        b_M = tl.load(p_M + o_k[:, None], mask=m_q[None, :] & m_k[:, None], other=0.0).to(OPERAND)
        total = multiply(b_x, b_M, total, PRECISION)
    M_tops += M_row
    one, other = total, total
    if BLOCKS == 2:
        one, other = tl.split(tl.reshape(total, [BLOCK_I, BLOCK_J, 2]))
    one = without_units(one, x_tops, M_tops, o_r, o_j, m_i, m_j, HALF)
    if BLOCKS == 2:
        other = without_units(other, x_tops, M_tops + n_out, o_r, o_j, m_i, m_j, HALF)
    return one, other


@triton.jit
def without_units(product, x_tops, M_tops, o_r, o_j, m_i, m_j, HALF: tl.constexpr):
    """Remove the scales of halves from a block of products [i, j]."""
    if HALF:
        x_top = tl.load(x_tops + o_r, mask=m_i, other=0.0)
        product *= x_top[:, None] * (tl.load(M_tops + o_j, mask=m_j, other=0.0) * (1.0 / 2**28))[None, :]
    return product


@triton.jit
def store_to_sum(value, pairs, tops, sums, x_tops, o_r, o_j, m_i, m_j, m, n_out, HALF: tl.constexpr):
    """Store pairs of a tile and their sums over rows for ``sums_kernel``. If HALF, store halves and a top."""
    tile = tl.program_id(0).to(tl.int64)
    value = tl.where(m, value, 0.0)
    tl.store(sums + tile * n_out + o_j, tl.sum(value, 0), mask=m_j)
    if HALF:
        value *= tl.load(x_tops + o_r, mask=m_i, other=0.0)[:, None]
        top = top_below(tl.max(tl.max(tl.abs(value), 1), 0))
        tl.store(tops + tile, top)
        value = (value * (16384.0 / top)).to(tl.float16)
    tl.store(pairs + o_r[:, None] * n_out + o_j[None, :], value, mask=m)


@triton.jit
def used_pairs(use, o_r, o_j, use_i, use_j, m, MASKED: tl.constexpr):
    """Load which pairs of a tile are used."""
    p_use = use + o_r[:, None] * use_i + o_j[None, :] * use_j
    return m & (tl.load(p_use, mask=m, other=0) != 0) if MASKED else m


@triton.jit
def flat_prior(m_used, PRIOR: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr):
    """Return R of the first iteration: equal for all used outputs of an input, 0 for the others."""
    if MASKED:
        n = tl.sum(m_used.to(T), 1)[:, None]
        return tl.where(m_used, 1.0 / tl.maximum(n, 1.0), 0.0)
    return tl.where(m_used, tl.full(m_used.shape, PRIOR, T), 0.0)


@triton.jit
def competition(z, m_used):
    """Return R = f(z) / sum_j f(z) over the used outputs of each input, and 1 - f(z)."""
    low, q, rest = f_of(z)
    low = tl.where(m_used, low, -float("inf"))
    top = tl.max(low, 1)[:, None]
    value = tl.where(m_used, tl.exp(low - tl.where(top == -float("inf"), 0.0, top)) * q, 0.0)
    total = tl.sum(value, 1)[:, None]
    return tl.where(m_used, share(value, tl.where(total == 0.0, 1.0, total)), 0.0), rest


@triton.jit
def responsibilities(z, W_S, B_S, o_r, o_j, m, m_used, n_out, FIXED: tl.constexpr, T: tl.constexpr):
    """Return R of a tile and 1 - f, given its dot products with x_hat. W_S is in x_hat unless FIXED."""
    o_S = o_r[:, None] * (n_out if FIXED else 0) + o_j[None, :]
    if FIXED:
        z = z * tl.load(W_S + o_S, mask=m, other=0.0).to(T)
    return competition(z + tl.load(B_S + o_S, mask=m, other=0.0).to(T), m_used)


@triton.jit
def load_betas(c_sum, c_ign, first, first_i, o_r, o_j, m, n_out, FIXED: tl.constexpr, T: tl.constexpr):
    """Load beta_use + beta_ign, and beta_ign, of a tile.

    If FIXED, the pointers point to beta_use and beta_ign [i, j], else both point to c_sum and c_ign [r, 2 j].
    """
    if FIXED:
        o_c = first_i * n_out
        stride = n_out
    else:
        o_c = first * (2 * n_out)
        c_ign += n_out
        stride = 2 * n_out
    o = o_r[:, None] * stride + o_j[None, :]
    b_sum = tl.load(c_sum + o_c + o, mask=m, other=0.0).to(T)
    b_ign = tl.load(c_ign + o_c + o, mask=m, other=0.0).to(T)
    if FIXED:
        b_sum += b_ign
    return b_sum, b_ign
