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
