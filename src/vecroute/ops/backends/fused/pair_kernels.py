"""Triton kernels over the pairs i, j of a chunk.

Names in kernels: ``o_`` offsets (int64), ``m_`` masks of valid elements, ``b_`` blocks
of values, ``T`` the dtype of the computation. A program handles some rows i of a sample. It goes over all
outputs j in blocks: once for the normaliser of R, and once for the result. The second time, the blocks come
from the cache.
"""

import torch
import triton
import triton.language as tl

from vecroute.ops.backends.fused.functions import f_of, scores_backward, share, top_below
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
def used(use, o_use, use_j, o_j, m):
    """Load which pairs of a block are used. The stride use_j is large if the mask is contiguous in i."""
    return m & (tl.load(use + o_use + o_j.to(tl.int64) * use_j, mask=m, other=0) != 0)


@triton.jit
def rows_of_program(start, n_inp, BLOCK_I: tl.constexpr):
    """Return the sample of a program, its rows in the chunk, which of them exist, and its rows in all rows."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    b = tl.program_id(1).to(tl.int64)
    return b, o_i, o_i < n_inp, start + o_i


@triton.jit
def outputs_of(tile, m_i, n_out, BLOCK_J: tl.constexpr):
    """Return the outputs of a block, and which of its pairs exist."""
    o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
    return o_j, m_i & (o_j < n_out)


@triton.jit
def from_row(start, n_out, c_sum, c_ign, W_S, B_S, FIXED: tl.constexpr):
    """Move pointers to parameters [i, j] to a row. Offsets from there need fewer registers than int64 offsets."""
    if FIXED:
        offset = start.to(tl.int64) * n_out
        c_sum, c_ign, W_S, B_S = c_sum + offset, c_ign + offset, W_S + offset, B_S + offset
    return c_sum, c_ign, W_S, B_S


@triton.jit
def scores(rows, o_j, m, FIRST: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr):
    """Return low and q of f(z) = exp(low) q, 1 - f(z), the dot products, and which pairs of a block are used.

    At unused pairs, and outside of the tensors, f is 0 and low is -inf. Under the flat prior, f is 1 at used
    pairs. ``rows`` has dot, W_S, B_S and use, the offsets of their rows, and the stride of use over j.
    """
    dot, W_S, B_S, use, o_dot, o_S, o_use, use_j = rows
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
        m = used(use, o_use, use_j, o_j, m)
        q = tl.where(m, q, 0.0)  # even if the scores of unused pairs are NaN
    return tl.where(m, low, -float("inf")), q, rest, b_dot, m


@triton.jit
def normaliser(rows, m_i, n_out, FIRST: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr,
               BLOCK_J: tl.constexpr, TILES: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Return top, the greatest low of each row, and sum_j f exp(-top); 0 and 1 for a row without used pairs."""
    top = tl.full(m_i.shape, -float("inf"), T)
    total = tl.zeros(m_i.shape, T)
    if FIRST and not MASKED:
        top, total = tl.zeros(m_i.shape, T), total + n_out
    else:
        for tile in range(TILES):
            o_j, m = outputs_of(tile, m_i, n_out, BLOCK_J)
            low, q, _, _, _ = scores(rows, o_j, m, FIRST, FIXED, MASKED, T)
            new = tl.maximum(top, tl.max(low, 1)[:, None])
            safe = tl.where(new == -float("inf"), 0.0, new)
            total = total * tl.exp(top - safe) + tl.sum(tl.exp(low - safe) * q, 1)[:, None]
            top = new
    empty = total == 0.0
    return tl.where(empty, 0.0, top), tl.where(empty, 1.0, total)


@triton.jit
def coefficients(rows, c, norm, o_j, m, FIRST: tl.constexpr, FIXED: tl.constexpr, MASKED: tl.constexpr,
                 T: tl.constexpr):  # fmt: skip
    """Return R, c_sum and c_ign of a block, and the last three results of ``scores``.

    ``c`` has pointers to c_sum and c_ign, if FIXED to beta_use and beta_ign, and the offsets of their rows.
    """
    c_sum, c_ign, o_c = c
    top, total = norm
    low, q, rest, b_dot, m_used = scores(rows, o_j, m, FIRST, FIXED, MASKED, T)
    b_sum = tl.load(c_sum + o_c + o_j, mask=m, other=0.0).to(T)
    b_ign = tl.load(c_ign + o_c + o_j, mask=m, other=0.0).to(T)
    if FIXED:
        b_sum += b_ign
    return share(tl.exp(low - top) * q, total), b_sum, b_ign, rest, b_dot, m_used


@triton.jit
def flat_c(rows, c, o_j, m, PRIOR: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr,
           T: tl.constexpr):  # fmt: skip
    """Return c of a block under the flat prior, if n_inp is None, and which pairs are used."""
    c_sum, c_ign, o_c = c
    u = tl.load(c_sum + o_c + o_j, mask=m, other=0.0).to(T)
    if BOTH:
        u = PRIOR * u - tl.load(c_ign + o_c + o_j, mask=m, other=0.0).to(T)
    if MASKED:
        _, _, _, use, _, _, o_use, use_j = rows
        m = used(use, o_use, use_j, o_j, m)
        u = tl.where(m, u, 0.0)
    return u, m


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
    PRIOR: tl.constexpr,  # R if it is the prior (FLAT), else 0; an argument would be rounded to float32
    ACTIVATE: tl.constexpr,
    FIRST: tl.constexpr,
    FIXED: tl.constexpr,
    BOTH: tl.constexpr,  # whether c_sum and c_ign are given although FLAT
    MASKED: tl.constexpr,
    C_OF_ALL: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # whether numbers to be summed over i are [b, j, i]
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILES: tl.constexpr,  # blocks of outputs; if there is one, everything stays in registers
    VEC: tl.constexpr,  # a divisor of n_out and all row strides, which are given in units of it
):  # fmt: skip
    """Compute phi = f (c_sum R - c_ign)."""
    T: tl.constexpr = f.dtype.element_ty
    FLAT: tl.constexpr = PRIOR > 0
    n_out = n_out * VEC
    b, o_i, m_i, o_row = rows_of_program(start, n_inp, BLOCK_I)
    o_S, o_use = o_i * (n_out if FIXED else 0), b * use_b + o_row * use_i
    c_sum, c_ign, W_S, B_S = from_row(start, n_out, c_sum, c_ign, W_S, B_S, FIXED)
    o_dot = (b * n_inp + o_i) * dot_i * VEC
    o_c = o_S if FIXED else (b * c_b + (o_row if C_OF_ALL else o_i) * c_i) * VEC
    rows, c, p_f = (dot, W_S, B_S, use, o_dot, o_S, o_use, use_j), (c_sum, c_ign, o_c), f + b * f_b + o_row
    if ACTIVATE:
        b_a = tl.load(dot + o_dot, mask=m_i, other=0.0).to(T) / tl.load(sqrt_n_inp + b)
        b_f = 1.0 / (1.0 + tl.exp(-(b_a + tl.load(B_A).to(T))))
        tl.store(p_f, b_f, mask=m_i)
    else:
        b_f = tl.load(p_f, mask=m_i, other=0.0).to(T)
    if not FLAT:
        norm = normaliser(rows, m_i, n_out, FIRST, FIXED, MASKED, BLOCK_J, TILES, T)
    for tile in range(TILES):
        o_j, m = outputs_of(tile, m_i, n_out, BLOCK_J)
        if FLAT:
            u, _ = flat_c(rows, c, o_j, m, PRIOR, BOTH, MASKED, T)
        else:
            R, b_sum, b_ign, _, _, m_used = coefficients(rows, c, norm, o_j, m, FIRST, FIXED, MASKED, T)
            u = tl.where(m_used, b_sum * R - b_ign, 0.0)
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


@triton.jit
def load_grad_phi(of_phi, o_j, m, n_out, T: tl.constexpr):
    """Return the gradient of phi, to which the gradient of s = sum_i phi_ij adds."""
    p_pairs, p_s = of_phi
    grad_phi = tl.load(p_pairs + o_j, mask=m, other=0.0).to(T)
    return grad_phi + tl.load(p_s + o_j, mask=o_j < n_out, other=0.0).to(T)


@triton.jit
def flat_c_backward(grad_phi, b_f, p_sum, p_ign, m, fresh, PRIOR: tl.constexpr, ADDS_UP: tl.constexpr,
                    T: tl.constexpr):  # fmt: skip
    """Store the gradient of the flat c, or add to the gradients of c_sum and c_ign if ADDS_UP."""
    if ADDS_UP:
        add_to(p_sum, PRIOR * grad_phi * b_f, m, fresh, T)
        add_to(p_ign, -grad_phi * b_f, m, fresh, T)
    else:
        tl.store(p_sum, grad_phi * b_f, mask=m)


@triton.jit
def dot_backward(grad_z, b_dot, p_W, p_grad_W, p_grad_B, m, fresh, T: tl.constexpr):
    """Return the gradient of dot, given z = W_S dot + B_S, and add to the gradients of W_S and B_S."""
    add_to(p_grad_W, grad_z * b_dot, m, fresh, T)
    add_to(p_grad_B, grad_z, m, fresh, T)
    return grad_z * tl.load(p_W, mask=m, other=0.0).to(T)


@triton.jit
def as_halves(b_phi, grad_dot, M_tops, p_top, tops_t, o_j, m_i, n_out, FIRST: tl.constexpr):
    """Return phi and the gradient of dot as halves, times the tops of the rows of M that they belong to.

    Both have one top, which may only rise from one pass to the next. If FIRST, there is no gradient of dot.
    """
    b_phi *= tl.load(M_tops + o_j, mask=o_j < n_out, other=0.0)
    greatest = tl.maximum(tl.load(p_top, mask=m_i, other=0.0), tl.max(tl.abs(b_phi), 1)[:, None])
    if FIRST:
        grad_dot = b_phi
    else:
        grad_dot *= tl.load(M_tops + n_out + o_j, mask=o_j < n_out, other=0.0)
        greatest = tl.maximum(greatest, tl.max(tl.abs(grad_dot), 1)[:, None])
    top = top_below(greatest)
    tl.store(p_top + tops_t, top, mask=m_i)
    return (b_phi * (16384.0 / top)).to(tl.float16), (grad_dot * (16384.0 / top)).to(tl.float16)


@triton.jit
def store_grad_f(p_f, sum_f, b_f, p_sqrt_n_inp, p_a, n_a, m_i, FIRST: tl.constexpr, FIXED: tl.constexpr):
    """Add to the gradient of f. If FIRST, turn it into the gradient of W_A x_inp.

    Unless FIXED, also store this in a row of results, followed by zeros: n_a columns in all.
    """
    b_grad = tl.load(p_f, mask=m_i, other=0.0) + sum_f
    if FIRST:
        b_grad *= b_f * (1.0 - b_f) / tl.load(p_sqrt_n_inp)
        if not FIXED:
            o_a = tl.arange(0, 8)[None, :]
            tl.store(p_a + o_a, tl.where(o_a == 0, b_grad, 0.0), mask=m_i & (o_a < n_a))
    tl.store(p_f, b_grad, mask=m_i)


@triton.jit(do_not_specialize=["start"])
def coefficients_backward_kernel(
    pairs,  # [b, i, 2 j] grad_phi and dot; where FIRST [b, i, j]
    results,  # [b, i, 2 j] phi and the gradient of dot; if FIRST [b, i, j] phi; may be pairs itself
    c_sum, c_ign, W_S, B_S, use, f, sqrt_n_inp, grad_s,  # as above; grad_s [b, j]
    grad_f,  # [b, i], added to; if FIRST turned into the gradient of W_A x_inp
    grad_sum, grad_ign,  # [b, i, j] gradients of c_sum and c_ign; if FIXED of the betas; if FLAT of the flat c
    grad_W_S, grad_B_S, grad_dot,  # [b, i, j] if FIXED; grad_dot is a copy that is summed over i
    M_tops,  # [2 j or j] tops of the rows of M, where HALVED
    tops,  # [2, i] tops of the rows of HALVED results: from the pass before, and new ones, at least as large
    fresh,  # whether gradients are stored instead of added to
    start, n_inp, n_out,  # as above; grad_f and tops have all rows too
    pairs_i, results_b, results_i, c_b, c_i, use_b, use_i, use_j, f_b, grad_c_b, grad_c_i,
    a_0,  # if FIRST and not FIXED, the column of results for the gradient of W_A x_inp; zeros follow it
    ADDS_UP: tl.constexpr,  # whether to add to the gradients of c_sum and c_ign, even if c is flat
    PRIOR: tl.constexpr, FIRST: tl.constexpr, FIXED: tl.constexpr, BOTH: tl.constexpr,  # as above
    MASKED: tl.constexpr, C_OF_ALL: tl.constexpr, RESULTS_OF_ALL: tl.constexpr,
    GRADS_OF_ALL: tl.constexpr,  # grad_sum, grad_ign, grad_W_S and grad_B_S
    HALVED: tl.constexpr,  # whether results are halves; then FIXED, one sample, and all outputs are one tile
    TRANSPOSED: tl.constexpr,  # whether grad_dot is [b, j, i]
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, TILES: tl.constexpr, VEC: tl.constexpr,  # as above
):  # fmt: skip
    """Compute the gradient of ``coefficients_kernel``."""
    T: tl.constexpr = f.dtype.element_ty
    FLAT: tl.constexpr = PRIOR > 0
    n_out = n_out * VEC
    b, o_i, m_i, o_row = rows_of_program(start, n_inp, BLOCK_I)
    o_S, o_use = o_i * (n_out if FIXED else 0), b * use_b + o_row * use_i
    c_sum, c_ign, W_S, B_S = from_row(start, n_out, c_sum, c_ign, W_S, B_S, FIXED)
    o_pairs = (b * n_inp + o_i) * pairs_i * VEC
    o_c = o_S if FIXED else (b * c_b + (o_row if C_OF_ALL else o_i) * c_i) * VEC
    o_grad = (b * grad_c_b + (o_row if GRADS_OF_ALL else o_i) * grad_c_i) * VEC
    rows, c = (pairs, W_S, B_S, use, o_pairs + n_out, o_S, o_use, use_j), (c_sum, c_ign, o_c)
    of_phi = pairs + o_pairs, grad_s + b * n_out
    o_results = (b * results_b + (o_row if RESULTS_OF_ALL else o_i) * results_i) * VEC
    b_f = tl.load(f + b * f_b + o_row, mask=m_i, other=0.0).to(T)
    if not FLAT:
        norm = normaliser(rows, m_i, n_out, FIRST, FIXED, MASKED, BLOCK_J, TILES, T)
    # The first loop over j computes two sums over j: one for grad_f, and sum_j R grad_R for the softmax.
    sum_f = tl.zeros([BLOCK_I, 1], T)
    sum_R = tl.zeros([BLOCK_I, 1], T)
    for tile in range(TILES):
        o_j, m = outputs_of(tile, m_i, n_out, BLOCK_J)
        grad_phi = load_grad_phi(of_phi, o_j, m, n_out, T)
        if FLAT:
            u, m_used = flat_c(rows, c, o_j, m, PRIOR, BOTH, MASKED, T)
            grad_phi = tl.where(m_used, grad_phi, 0.0) if MASKED else grad_phi
            tl.store(results + o_results + o_j, u * b_f, mask=m)
            p_sum, p_ign = grad_sum + o_grad + o_j, grad_ign + o_grad + o_j
            flat_c_backward(grad_phi, b_f, p_sum, p_ign, m, fresh, PRIOR, ADDS_UP, T)
        else:
            R, b_sum, b_ign, _, _, m_used = coefficients(rows, c, norm, o_j, m, FIRST, FIXED, MASKED, T)
            grad_phi = tl.where(m_used, grad_phi, 0.0)
            u = tl.where(m_used, b_sum * R - b_ign, 0.0)
            if not FIRST:
                sum_R += tl.sum(R * (b_sum * (grad_phi * b_f)), 1)[:, None]
        sum_f += tl.sum(tl.where(m, u * grad_phi, 0.0), 1)[:, None]
    if not FLAT:
        for tile in range(TILES):
            o_j, m = outputs_of(tile, m_i, n_out, BLOCK_J)
            R, b_sum, b_ign, rest, dot, m_used = coefficients(rows, c, norm, o_j, m, FIRST, FIXED, MASKED, T)
            b_phi = tl.where(m_used, b_sum * R - b_ign, 0.0) * b_f
            grad_phi = tl.where(m_used, load_grad_phi(of_phi, o_j, m, n_out, T) * b_f, 0.0)
            add_to(grad_sum + o_grad + o_j, R * grad_phi, m, fresh, T)
            add_to(grad_ign + o_grad + o_j, ((R - 1.0) if FIXED else -1.0) * grad_phi, m, fresh, T)
            grad_z = grad_phi  # not read if FIRST
            if not FIRST:
                grad_z = scores_backward(R, R * (b_sum * grad_phi), sum_R, rest)
                if FIXED:
                    p_W, p_B = grad_W_S + o_grad + o_j, grad_B_S + o_grad + o_j
                    grad_z = dot_backward(grad_z, dot, W_S + o_S + o_j, p_W, p_B, m, fresh, T)
                    tl.store(grad_dot + to_be_summed(b, o_i, o_j, n_inp, n_out, TRANSPOSED), grad_z, mask=m)
            if HALVED:
                p_top = tops + start + o_i
                b_phi, grad_z = as_halves(b_phi, grad_z, M_tops, p_top, f_b, o_j, m_i, n_out, FIRST)
            tl.store(results + o_results + o_j, b_phi, mask=m)
            if not FIRST:
                tl.store(results + o_results + n_out + o_j, grad_z, mask=m)
    # This comes last, so that with one tile nothing has to be loaded twice.
    p_f, p_a = grad_f + b * f_b + start + o_i, results + o_results + a_0
    store_grad_f(p_f, sum_f, b_f, sqrt_n_inp + b, p_a, 8 - a_0 % 8, m_i, FIRST, FIXED)
