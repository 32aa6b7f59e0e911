"""Triton kernels over the pairs i, j of a chunk.

Names in kernels: ``o_`` offsets (int64), ``m_`` masks of valid elements, ``b_`` blocks of values, ``T`` the
dtype of the computation. A program handles some rows i of a sample. It goes over all outputs j in blocks: once
for the normaliser of R, and once for the result. The second time, the blocks come from the cache.
"""

import torch
import triton
import triton.language as tl

from vecroute.ops.problem import Problem


def triton_dtype(p: Problem) -> tl.dtype:
    """Return the dtype in which kernels compute."""
    return tl.float64 if p.dtype == torch.float64 else tl.float32


def in_units(strides: dict[str, int], n_out: int) -> dict[str, int]:
    """Return n_out and row strides in units of 4 elements if possible, so that kernels load 16 bytes at once."""
    sizes = {"n_out": n_out, **strides}
    vec = 1 if any(size % 4 for size in sizes.values()) else 4
    return {"VEC": vec, **{name: size // vec for name, size in sizes.items()}}


@triton.jit
def used(use, o_use, j_use, o_j, m):
    """Load which pairs of a block are used. The stride j_use is large if the mask is contiguous in i."""
    return m & (tl.load(use + o_use + o_j.to(tl.int64) * j_use, mask=m, other=0) != 0)


@triton.jit
def f_of(z):
    """Return f(z) as exp(low) q, with low = min(z, 0), and 1 - f(z), which is exact even if f(z) is almost 1."""
    small = tl.exp(-tl.abs(z))
    q = 1.0 / (1.0 + small)
    return tl.minimum(z, 0.0), q, q * tl.where(z > 0.0, small, 1.0)


@triton.jit
def scores(dot, W_S, B_S, use, o_dot, o_S, o_use, j_use, o_j, m, FIRST: tl.constexpr, FIXED: tl.constexpr,
           MASKED: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Return low and q of f(z) = exp(low) q, 1 - f(z), the dot products, and which pairs of a block are used.

    At unused pairs, and outside of the tensors, f is 0 and low is -inf. Under the flat prior, f is 1 at used
    pairs.
    """
    b_dot = tl.zeros(m.shape, T)
    low = tl.zeros(m.shape, T)
    q = tl.full(m.shape, 1.0, T)
    rest = q
    if not FIRST:
        b_dot = tl.load(dot + o_dot + o_j, mask=m, other=0.0).to(T)
        z = b_dot
        if FIXED:
            z = z * tl.load(W_S + o_S + o_j, mask=m, other=0.0).to(T)
        z += tl.load(B_S + o_S + o_j, mask=m, other=0.0).to(T)
        low, q, rest = f_of(z)
    if MASKED:
        m = used(use, o_use, j_use, o_j, m)
        q = tl.where(m, q, 0.0)  # even if the scores of unused pairs are NaN
    return tl.where(m, low, -float("inf")), q, rest, b_dot, m


@triton.jit
def normaliser(dot, W_S, B_S, use, o_dot, o_S, o_use, j_use, m_i, n_out, TILES: tl.constexpr, FIRST: tl.constexpr,
               FIXED: tl.constexpr, MASKED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Return top, the greatest low of each row, and sum_j f exp(-top); 0 and 1 for a row without used pairs."""
    top = tl.full([BLOCK_I, 1], -float("inf"), T)
    total = tl.zeros([BLOCK_I, 1], T)
    if FIRST and not MASKED:
        top, total = tl.zeros([BLOCK_I, 1], T), total + n_out
    else:
        for tile in range(TILES):
            o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
            m = m_i & (o_j < n_out)
            low, q, _, _, _ = scores(
                dot, W_S, B_S, use, o_dot, o_S, o_use, j_use, o_j, m, FIRST, FIXED, MASKED, T
            )
            new = tl.maximum(top, tl.max(low, 1)[:, None])
            safe = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(low - safe) * q, 1)[:, None]
            top = new
    empty = total == 0.0
    return tl.where(empty, 0.0, top), tl.where(empty, 1.0, total)


@triton.jit
def softmax(low, q, top, total):
    """Compute R of a block. R is exactly 1 if all other outputs underflow to 0."""
    value = tl.exp(low - top) * q
    return tl.where(value == total, 1.0, value / total)


@triton.jit
def betas(c_sum, c_ign, o_c, o_j, m, FIXED: tl.constexpr, T: tl.constexpr):
    """Return c_sum and c_ign of a block. If FIXED, the pointers point to beta_use and beta_ign."""
    b_sum = tl.load(c_sum + o_c + o_j, mask=m, other=0.0).to(T)
    b_ign = tl.load(c_ign + o_c + o_j, mask=m, other=0.0).to(T)
    if FIXED:
        b_sum += b_ign
    return b_sum, b_ign


@triton.jit
def flat_c(c_sum, c_ign, o_c, o_j, m, PRIOR: tl.constexpr, BOTH: tl.constexpr, T: tl.constexpr):
    """Return c of a block under the flat prior, if n_inp is None."""
    u = tl.load(c_sum + o_c + o_j, mask=m, other=0.0).to(T)
    if BOTH:
        u = PRIOR * u - tl.load(c_ign + o_c + o_j, mask=m, other=0.0).to(T)
    return u


@triton.jit
def from_row(start, n_out, c_sum, c_ign, W_S, B_S):
    """Move pointers to parameters [i, j] to a row. Offsets from there need fewer registers than int64 offsets."""
    offset = start.to(tl.int64) * n_out
    return c_sum + offset, c_ign + offset, W_S + offset, B_S + offset


@triton.jit
def to_be_summed(b, o_i, o_j, n_inp, n_out, TRANSPOSED: tl.constexpr):
    """Return the offsets of a block of [b, i, j] numbers, or [b, j, i] if TRANSPOSED."""
    if TRANSPOSED:
        return (b * n_out + o_j) * n_inp + o_i
    return (b * n_inp + o_i) * n_out + o_j


@triton.jit(do_not_specialize=["start"])
def coefficients_kernel(
    dot,  # [b, i, j] x_inp times x_hat; if ACTIVATE [b, i, ...], its first column x_inp times W_A; else if FIRST not read
    c_sum,  # [b, i, j], or beta_use [i, j] if FIXED; the flat c if FLAT and not BOTH
    c_ign,  # [b, i, j], or beta_ign [i, j] if FIXED; not read if FLAT and not BOTH
    W_S,  # [i, j] where FIXED, else not read
    B_S,  # [i, j], or [1, j] with row stride 0
    use,  # [b, i, j] where MASKED
    f,  # [b, i], filled where ACTIVATE
    B_A,  # [1]
    sqrt_n_inp,  # [b]
    phi,  # [b, i, j] the result
    start,  # the first row of the chunk in tensors with all rows: f, use, if FIXED W_S and B_S, if C_OF_ALL c
    n_inp,  # rows of the chunk
    n_out,
    dot_i, c_b, c_i, use_b, use_i, use_j, f_b,  # strides; samples of dot follow each other
    PRIOR: tl.constexpr,  # an argument would be rounded to float32
    ACTIVATE: tl.constexpr,
    FIRST: tl.constexpr,
    FIXED: tl.constexpr,
    FLAT: tl.constexpr,  # whether R is the prior
    BOTH: tl.constexpr,  # whether c_sum and c_ign are given although FLAT
    MASKED: tl.constexpr,
    C_OF_ALL: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # whether numbers to be summed over i are [b, j, i]
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILES: tl.constexpr,  # blocks of outputs; if there is one, everything stays in registers
    VEC: tl.constexpr,  # a divisor of n_out and all row strides, which are given in units of it
    T: tl.constexpr,  # dtype of all arithmetic
):  # fmt: skip
    """Compute phi = f (c_sum R - c_ign)."""
    n_out = n_out * VEC
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    b = tl.program_id(1).to(tl.int64)
    m_i = o_i < n_inp
    o_row = start + o_i
    o_S, o_use = o_i * (n_out if FIXED else 0), b * use_b + o_row * use_i
    if FIXED:
        c_sum, c_ign, W_S, B_S = from_row(start, n_out, c_sum, c_ign, W_S, B_S)
    o_dot = (b * n_inp + o_i) * dot_i * VEC
    o_c = o_S if FIXED else (b * c_b + (o_row if C_OF_ALL else o_i) * c_i) * VEC
    p_f = f + b * f_b + o_row
    if ACTIVATE:
        b_a = tl.load(dot + o_dot, mask=m_i, other=0.0).to(T) / tl.load(sqrt_n_inp + b)
        b_f = 1.0 / (1.0 + tl.exp(-(b_a + tl.load(B_A).to(T))))
        tl.store(p_f, b_f, mask=m_i)
    else:
        b_f = tl.load(p_f, mask=m_i, other=0.0).to(T)
    if not FLAT:
        top, total = normaliser(dot, W_S, B_S, use, o_dot, o_S, o_use, use_j, m_i, n_out, TILES, FIRST, FIXED, MASKED,
                                BLOCK_I, BLOCK_J, T)  # fmt: skip
    for tile in range(TILES):
        o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
        m = m_i & (o_j < n_out)
        if FLAT:
            u = flat_c(c_sum, c_ign, o_c, o_j, m, PRIOR, BOTH, T)
            if MASKED:
                u = tl.where(used(use, o_use, use_j, o_j, m), u, 0.0)
        else:
            low, q, _, _, m_used = scores(
                dot, W_S, B_S, use, o_dot, o_S, o_use, use_j, o_j, m, FIRST, FIXED, MASKED, T
            )
            b_sum, b_ign = betas(c_sum, c_ign, o_c, o_j, m, FIXED, T)
            u = tl.where(m_used, b_sum * softmax(low, q, top, total) - b_ign, 0.0)
        tl.store(phi + to_be_summed(b, o_i, o_j, n_inp, n_out, TRANSPOSED), u * b_f, mask=m)


@triton.jit
def add_to(pointer, value, mask, fresh, T: tl.constexpr):
    """Add a value to memory, or store it if fresh."""
    stale = tl.full(mask.shape, 0, tl.int32) + fresh == 0
    before = tl.load(pointer, mask=mask & stale, other=0.0).to(T)
    tl.store(pointer, (before + value).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def sum_samples_kernel(
    parts,  # [k, b, n], k <= 4
    sum_0, sum_1, sum_2, sum_3,  # [n] each, added to
    n_batch, n,
    fresh,  # whether sums are stored instead of added
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add the sum of parts[k] over b to sum k, for each k."""
    k = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_B, BLOCK_N], T)
    for start in range(0, n_batch, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)[:, None]
        total += tl.load(parts + (k * n_batch + b) * n + o, mask=(b < n_batch) & (o < n), other=0.0)
    out = sum_0
    if k == 1:
        out = sum_1
    if k == 2:
        out = sum_2
    if k == 3:
        out = sum_3
    add_to(out + o, tl.sum(total, 0)[None, :], o < n, fresh, T)


@triton.jit(do_not_specialize=["start"])
def coefficients_backward_kernel(
    pairs,  # [b, i, 2 j] grad_phi and dot; where FIRST [b, i, j]
    results,  # [b, i, 2 j] phi and the gradient of dot; if FIRST [b, i, j] phi; may be pairs itself
    c_sum, c_ign, W_S, B_S, use, f,  # as above
    sqrt_n_inp,  # [b]
    grad_s,  # [b, j]
    grad_f,  # [b, i], added to; if FIRST turned into the gradient of W_A x_inp
    grad_a,  # [b, i, n_a] if FIRST and not FIXED: the gradient of W_A x_inp, then zeros
    grad_sum,  # [b, i, j] gradient of c_sum; if FIXED of beta_use; if FLAT of the flat c
    grad_ign,  # [b, i, j] gradient of c_ign; if FIXED of beta_ign
    grad_W_S,  # [b, i, j] if FIXED
    grad_B_S,  # [b, i, j] if FIXED
    grad_dot,  # [b, i, j] if FIXED: a copy of the gradient of dot, to be summed over i
    weights,  # [2 j or j] factors of HALVED results
    tops,  # [2, i] scales of the rows of HALVED results: from the pass before, and new ones, at least as large
    fresh,  # whether gradients are stored instead of added to
    start, n_inp, n_out,  # as above; grad_f and tops have all rows too
    pairs_i, results_b, results_i, c_b, c_i, use_b, use_i, use_j, f_b, grad_s_b, grad_c_b,
    grad_c_i, n_a, tops_t,
    ADDS_UP: tl.constexpr,  # whether to add to the gradients of c_sum and c_ign, even if c is flat
    PRIOR: tl.constexpr,  # as above
    FIRST: tl.constexpr,
    FIXED: tl.constexpr,
    FLAT: tl.constexpr,
    BOTH: tl.constexpr,
    MASKED: tl.constexpr,
    C_OF_ALL: tl.constexpr,
    RESULTS_OF_ALL: tl.constexpr,
    GRADS_OF_ALL: tl.constexpr,  # grad_sum, grad_ign, grad_W_S and grad_B_S
    HALVED: tl.constexpr,  # whether results are float16; then FIXED, and all outputs are one tile
    TRANSPOSED: tl.constexpr,  # whether grad_dot is [b, j, i]
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILES: tl.constexpr,  # as above
    VEC: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``coefficients_kernel``."""
    n_out = n_out * VEC
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    b = tl.program_id(1).to(tl.int64)
    m_i = o_i < n_inp
    o_row = start + o_i
    o_S, o_use = o_i * (n_out if FIXED else 0), b * use_b + o_row * use_i
    if FIXED:
        c_sum, c_ign, W_S, B_S = from_row(start, n_out, c_sum, c_ign, W_S, B_S)
    o_pairs = (b * n_inp + o_i) * pairs_i * VEC
    o_c = o_S if FIXED else (b * c_b + (o_row if C_OF_ALL else o_i) * c_i) * VEC
    o_grad_c = (b * grad_c_b + (o_row if GRADS_OF_ALL else o_i) * grad_c_i) * VEC
    o_dot, o_results = o_pairs + n_out, (b * results_b + (o_row if RESULTS_OF_ALL else o_i) * results_i) * VEC
    b_f = tl.load(f + b * f_b + o_row, mask=m_i, other=0.0).to(T)
    if not FLAT:
        top, total = normaliser(pairs, W_S, B_S, use, o_dot, o_S, o_use, use_j, m_i, n_out, TILES, FIRST, FIXED,
                                MASKED, BLOCK_I, BLOCK_J, T)  # fmt: skip
    # The first loop over j computes two sums over j: one for grad_f, and sum_j R grad_R for the softmax.
    sum_f = tl.zeros([BLOCK_I, 1], T)
    sum_R = tl.zeros([BLOCK_I, 1], T)
    for tile in range(TILES):
        o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
        m = m_i & (o_j < n_out)
        grad_phi = tl.load(pairs + o_pairs + o_j, mask=m, other=0.0).to(T)
        grad_phi += tl.load(grad_s + b * grad_s_b + o_j, mask=o_j < n_out, other=0.0).to(T)
        if FLAT:
            u = flat_c(c_sum, c_ign, o_c, o_j, m, PRIOR, BOTH, T)
            if MASKED:
                m_used = used(use, o_use, use_j, o_j, m)
                u, grad_phi = tl.where(m_used, u, 0.0), tl.where(m_used, grad_phi, 0.0)
            tl.store(results + o_results + o_j, u * b_f, mask=m)
            if ADDS_UP:
                add_to(grad_sum + o_grad_c + o_j, PRIOR * grad_phi * b_f, m, fresh, T)
                add_to(grad_ign + o_grad_c + o_j, -grad_phi * b_f, m, fresh, T)
            else:
                tl.store(grad_sum + o_grad_c + o_j, grad_phi * b_f, mask=m)
        else:
            low, q, _, _, m_used = scores(
                pairs, W_S, B_S, use, o_dot, o_S, o_use, use_j, o_j, m, FIRST, FIXED, MASKED, T
            )
            b_sum, b_ign = betas(c_sum, c_ign, o_c, o_j, m, FIXED, T)
            R = softmax(low, q, top, total)
            grad_phi = tl.where(m_used, grad_phi, 0.0)
            u = tl.where(m_used, b_sum * R - b_ign, 0.0)
            if not FIRST:
                sum_R += tl.sum(R * (b_sum * (grad_phi * b_f)), 1)[:, None]
        sum_f += tl.sum(tl.where(m, u * grad_phi, 0.0), 1)[:, None]
    if not FLAT:
        for tile in range(TILES):
            o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
            m = m_i & (o_j < n_out)
            low, q, rest, b_dot, m_used = scores(
                pairs, W_S, B_S, use, o_dot, o_S, o_use, use_j, o_j, m, FIRST, FIXED, MASKED, T
            )
            b_sum, b_ign = betas(c_sum, c_ign, o_c, o_j, m, FIXED, T)
            R = softmax(low, q, top, total)
            grad_phi = tl.load(pairs + o_pairs + o_j, mask=m, other=0.0).to(T)
            grad_phi += tl.load(grad_s + b * grad_s_b + o_j, mask=o_j < n_out, other=0.0).to(T)
            grad_phi = tl.where(m_used, grad_phi * b_f, 0.0)
            add_to(grad_sum + o_grad_c + o_j, R * grad_phi, m, fresh, T)
            add_to(grad_ign + o_grad_c + o_j, ((R - 1.0) if FIXED else -1.0) * grad_phi, m, fresh, T)
            if not FIRST:
                # These products are the same as above, so that they cancel exactly if one output has all of R.
                grad_z = (R * (b_sum * grad_phi) - R * sum_R) * rest
                if FIXED:
                    add_to(grad_W_S + o_grad_c + o_j, grad_z * b_dot, m, fresh, T)
                    add_to(grad_B_S + o_grad_c + o_j, grad_z, m, fresh, T)
                    grad_z *= tl.load(W_S + o_S + o_j, mask=m, other=0.0).to(T)
                    p_dot = grad_dot + to_be_summed(b, o_i, o_j, n_inp, n_out, TRANSPOSED)
                    tl.store(p_dot, grad_z, mask=m)
            b_phi = tl.where(m_used, b_sum * R - b_ign, 0.0) * b_f
            if HALVED:
                b_phi *= tl.load(weights + o_j, mask=o_j < n_out, other=0.0)
                b_top = tl.maximum(
                    tl.load(tops + start + o_i, mask=m_i, other=0.0), tl.max(tl.abs(b_phi), 1)[:, None]
                )
                if not FIRST:
                    grad_z *= tl.load(weights + n_out + o_j, mask=o_j < n_out, other=0.0)
                    b_top = tl.maximum(b_top, tl.max(tl.abs(grad_z), 1)[:, None])
                # Keep only the exponent, which gives a power of two. A GPU cannot divide by subnormal numbers.
                b_top = (b_top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
                b_top = tl.where(b_top < 1e-37, 0.0, b_top)
                tl.store(tops + tops_t + start + o_i, b_top, mask=m_i)
                # The factor 2^14 is the one in ``halves_of``.
                by = 1.0 / tl.where(b_top == 0.0, 1.0, b_top)
                b_phi = (b_phi * by * 16384.0).to(tl.float16)
                if not FIRST:
                    grad_z = (grad_z * by * 16384.0).to(tl.float16)
            tl.store(results + o_results + o_j, b_phi, mask=m)
            if not FIRST:
                tl.store(results + o_results + n_out + o_j, grad_z, mask=m)
    # This comes last, so that with one tile nothing has to be loaded twice.
    p_f = grad_f + b * f_b + start + o_i
    b_grad = tl.load(p_f, mask=m_i, other=0.0) + sum_f
    if FIRST:
        b_grad *= b_f * (1.0 - b_f) / tl.load(sqrt_n_inp + b)
        if not FIXED:
            o_a = tl.arange(0, 8)[None, :]
            b_a = tl.where(o_a == 0, b_grad, 0.0)
            tl.store(grad_a + o_results + o_a, b_a, mask=m_i & (o_a < n_a))
    tl.store(p_f, b_grad, mask=m_i)
