"""Triton kernels over float16 with units, in the words of ``fused_pairs``.

A *top* is a power of two: what is float16 is 2^14 times numbers over it, so that those 2^-28 of the greatest
still have all digits. Rows of x_inp and of M have one each, pairs one for each tile of rows. All outputs are
one block.
"""

import triton
import triton.language as tl

from vecroute.ops.fused_pairs import f_of, softmax


@triton.jit
def top_of(values):
    """The power of two below the greatest of a block; not so small that a GPU could not divide by it."""
    bits = tl.max(tl.abs(values)).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits, 32 << 23).to(tl.float32, bitcast=True)  # at least 2^-95


@triton.jit
def halves_kernel(
    values,  # [b, n, d]
    out,  # [b, n, d] float16
    tops,  # [b, n]
    n_free,  # rows whose tops are as small as can be; the others have at least 2^-10
    d_inp, values_b, values_i, out_b, tops_b,  # rows of out follow each other
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = 2^14 values / tops; a program has a row."""
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o = tl.arange(0, BLOCK)
    b_values = tl.load(values + b * values_b + row * values_i + o, mask=o < d_inp, other=0.0)
    top = tl.maximum(top_of(b_values), tl.where(row < n_free, 0.0, 1.0 / 2**10))
    tl.store(tops + b * tops_b + row, top)
    tl.store(out + b * out_b + row * d_inp + o, (b_values * (16384.0 / top)).to(tl.float16), mask=o < d_inp)


@triton.jit
def product_of(pairs, tops, unit, o_j, m):
    """A block of products of float16 as they are without units: those of columns, and one of the rows."""
    return tl.load(pairs + o_j, mask=m, other=0.0) * (tl.load(tops + o_j, mask=m, other=0.0) * unit)


@triton.jit
def betas_of(c, tops, bias, unit, n_out, o_j, m):
    """c_sum and c_ign of a block."""
    c_sum = product_of(c, tops, unit, o_j, m) + tl.load(bias + o_j, mask=m, other=0.0)
    c_ign = product_of(c + n_out, tops + n_out, unit, o_j, m) + tl.load(bias + n_out + o_j, mask=m, other=0.0)
    return c_sum, c_ign


@triton.jit
def competition(z, m_j):
    """R of a block that has all outputs, and 1 - f(z)."""
    low, q, rest = f_of(z)
    low = tl.where(m_j, low, -float("inf"))
    top = tl.max(low, 1)[:, None]
    total = tl.sum(tl.exp(low - top) * q, 1)[:, None]
    return softmax(low, q, top, total), rest


@triton.jit
def store_to_sum(values, out, top, m):
    """A block, 0 outside, in float16, and its top."""
    b_top = top_of(values)
    tl.store(top, b_top)
    tl.store(out, (values * (16384.0 / b_top)).to(tl.float16), mask=m)


@triton.jit
def half_coefficients_kernel(
    dot,  # [b, i, j] x_inp times x_hat; where FIRST not read
    c,  # [b, i, q] x_inp times the rows that all samples share: c_sum and c_ign, then a_inp
    x_tops, M_tops, c_tops,  # [b, i], [b, j], [q]
    bias, B_S, B_A,  # [q], [j], [1]
    sqrt_n_inp,  # [b]
    f,  # [b, i], filled where FIRST
    phi,  # [b, i, j] float16, times the tops of x_inp
    phi_tops,  # [b, n]
    sums,  # [b, n, j] of phi over the rows of a tile
    phi_out,  # [b, i, j] phi itself, where SHOWN
    n_inp,  # rows of a sample
    n_out, n_c,  # j and q, in units of 8: then 16 bytes are loaded at once
    PRIOR: tl.constexpr,  # an argument would be rounded
    FIRST: tl.constexpr,
    SHOWN: tl.constexpr,
    BLOCK_I: tl.constexpr,  # the rows of a tile
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """phi = f (c_sum R - c_ign)."""
    n_out, n_c = n_out * 8, n_c * 8
    b, tile = tl.program_id(1).to(tl.int64), tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    o_i, o_j = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    row, m_i = b * n_inp + o_i, o_i < n_inp
    m = m_i & (o_j < n_out)
    x_top = tl.load(x_tops + row, mask=m_i, other=0.0)
    unit = x_top * (1.0 / 2**28)
    p_c = c + row * n_c
    if FIRST:
        b_a = tl.load(p_c + 2 * n_out, mask=m_i, other=0.0) * (tl.load(c_tops + 2 * n_out) * unit)
        b_a = b_a / tl.load(sqrt_n_inp + b) + tl.load(B_A).to(tl.float32)
        b_f = 1.0 / (1.0 + tl.exp(-b_a))
        tl.store(f + row, b_f, mask=m_i)
        R = PRIOR
    else:
        b_f = tl.load(f + row, mask=m_i, other=0.0)
        z = product_of(dot + row * n_out, M_tops + b * n_out, unit, o_j, m)
        R, _ = competition(z + tl.load(B_S + o_j, mask=o_j < n_out, other=0.0).to(tl.float32), o_j < n_out)
    c_sum, c_ign = betas_of(p_c, c_tops, bias, unit, n_out, o_j, m)
    b_phi = tl.where(m, b_f * (c_sum * R - c_ign), 0.0)
    if SHOWN:
        tl.store(phi_out + row * n_out + o_j, b_phi, mask=m)
    store_to_sum(b_phi * x_top, phi + row * n_out + o_j, phi_tops + tile, m)
    tl.store(sums + tile * n_out + o_j, tl.sum(b_phi, 0)[None, :], mask=o_j < n_out)


@triton.jit
def half_coefficients_backward_kernel(
    pairs,  # [b, i, 2 j] x_inp times grad_y and x_hat; where FIRST [b, i, j]
    c,  # [b, i, q], as above
    x_tops, M_tops, c_tops, bias, B_S, sqrt_n_inp, f,  # as above, but M_tops of grad_y and x_hat
    grad_s,  # [b, j]
    grad_f,  # [b, i], added to; where FIRST turned into the gradient of W_A x_inp
    results,  # [b, i, k] float16, times tops of M: phi and the gradient of dot; where FIRST phi alone
    grad_c,  # [b, i, k] the same of c, added to; where FIRST also of a_inp, and zeros
    before, tops,  # [b, n] of these in the iteration after this one, and in this: not less
    to_sum,  # [b, i, j] float16, times the tops of x_inp: the gradient of dot; where FIRST [b, i, 2 j] of c
    sum_tops,  # [b, n] of these
    sums,  # [b, n, j] of the gradient of dot over the rows of a tile; where FIRST [b, n, q] of those of c and a_inp
    n_inp, n_out, n_c, n_results,  # as above, the last three in units of 8: j, q, k
    n_sums,  # columns of sums
    M_tops_b,
    PRIOR: tl.constexpr,
    FIRST: tl.constexpr,
    FRESH: tl.constexpr,  # whether grad_c is stored instead of added to, and there is nothing before
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The gradient of ``half_coefficients_kernel``."""
    n_out, n_c, n_results = n_out * 8, n_c * 8, n_results * 8
    b, tile = tl.program_id(1).to(tl.int64), tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    o_i, o_j = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    row, m_i, m_j = b * n_inp + o_i, o_i < n_inp, o_j < n_out
    m = m_i & m_j
    x_top = tl.load(x_tops + row, mask=m_i, other=0.0)
    unit = x_top * (1.0 / 2**28)
    pairs += row * (n_out if FIRST else 2 * n_out)
    results += row * n_results
    grad_c += row * n_results
    M_tops += b * M_tops_b
    b_f = tl.load(f + row, mask=m_i, other=0.0)
    grad_phi = product_of(pairs, M_tops, unit, o_j, m)
    grad_phi += tl.load(grad_s + b * n_out + o_j, mask=m_j, other=0.0)
    c_sum, c_ign = betas_of(c + row * n_c, c_tops, bias, unit, n_out, o_j, m)
    if FIRST:
        R = PRIOR
    else:
        z = product_of(pairs + n_out, M_tops + n_out, unit, o_j, m)
        R, rest = competition(z + tl.load(B_S + o_j, mask=m_j, other=0.0).to(tl.float32), m_j)
    u = tl.where(m, c_sum * R - c_ign, 0.0)
    b_grad_f = tl.load(grad_f + row, mask=m_i, other=0.0) + tl.sum(u * grad_phi, 1)[:, None]
    g = tl.where(m, grad_phi * b_f, 0.0)
    grad_sum, grad_ign = R * g, -g
    top_sum = tl.load(c_tops + o_j, mask=m_j, other=1.0)
    top_ign = tl.load(c_tops + n_out + o_j, mask=m_j, other=1.0)
    old = 0.0
    if not FRESH:
        old = tl.load(before + tile)
        grad_sum += tl.load(grad_c + o_j, mask=m, other=0.0).to(tl.float32) * (old * (1.0 / 2**14)) / top_sum
        grad_ign += tl.load(grad_c + n_out + o_j, mask=m, other=0.0).to(tl.float32) * (old * (1.0 / 2**14)) / top_ign
    b_phi = u * b_f * tl.load(M_tops + o_j, mask=m_j, other=0.0)
    greatest = tl.maximum(tl.abs(b_phi), tl.maximum(tl.abs(grad_sum * top_sum), tl.abs(grad_ign * top_ign)))
    if FIRST:
        b_grad_f = tl.where(m_i, b_grad_f * b_f * (1.0 - b_f) / tl.load(sqrt_n_inp + b), 0.0)
        b_a = b_grad_f * tl.load(c_tops + 2 * n_out)
        greatest = tl.maximum(greatest, tl.abs(b_a))
    else:
        # The products as in the sum, so that nothing is left where one output has all of R.
        grad_z = tl.where(m, (R * (c_sum * g) - R * tl.sum(R * (c_sum * g), 1)[:, None]) * rest, 0.0)
        M_top = tl.load(M_tops + n_out + o_j, mask=m_j, other=0.0)
        greatest = tl.maximum(greatest, tl.abs(grad_z * M_top))
    tl.store(grad_f + row, b_grad_f, mask=m_i)
    top = tl.maximum(top_of(greatest), old)
    tl.store(tops + tile, top)
    by = 16384.0 / top
    tl.store(results + o_j, (b_phi * by).to(tl.float16), mask=m)
    tl.store(grad_c + o_j, (grad_sum * top_sum * by).to(tl.float16), mask=m)
    tl.store(grad_c + n_out + o_j, (grad_ign * top_ign * by).to(tl.float16), mask=m)
    if FIRST:
        o_a = tl.arange(0, 8)[None, :]
        tl.store(grad_c + 2 * n_out + o_a, (tl.where(o_a == 0, b_a, 0.0) * by).to(tl.float16), mask=m_i)
        sums += tile * n_sums
        tl.store(sums + o_j, tl.sum(grad_sum, 0)[None, :], mask=m_j)
        tl.store(sums + n_out + o_j, tl.sum(grad_ign, 0)[None, :], mask=m_j)
        tl.store(sums + 2 * n_out, tl.sum(b_grad_f))
        sum_top = top_of(tl.maximum(tl.abs(grad_sum), tl.abs(grad_ign)) * x_top)
        by, to_sum = x_top * (16384.0 / sum_top), to_sum + row * 2 * n_out
        tl.store(sum_tops + tile, sum_top)
        tl.store(to_sum + o_j, (grad_sum * by).to(tl.float16), mask=m)
        tl.store(to_sum + n_out + o_j, (grad_ign * by).to(tl.float16), mask=m)
    else:
        tl.store(results + n_out + o_j, (grad_z * M_top * by).to(tl.float16), mask=m)
        tl.store(sums + tile * n_out + o_j, tl.sum(grad_z, 0)[None, :], mask=m_j)
        store_to_sum(grad_z * x_top, to_sum + row * n_out + o_j, sum_tops + tile, m)


@triton.jit
def half_sums_kernel(
    pairs, x,  # [b, i, k], [b, i, d] float16
    tops,  # [b, n] of pairs
    parts,  # [b, n, q] sums over the rows of tiles
    a, x_tops,  # [b, i] one more column, q, and those of x_inp, where OF_A
    out, sums,  # [b, q, d], [b, q]
    n_inp, n_columns, n_sums, d_inp,  # n_columns, k, and d_inp in units of 8 too
    OF_A: tl.constexpr,
    BLOCK_I: tl.constexpr,  # the rows of a tile
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out = pairs^T x_inp, and the sums of pairs; a program has some features of a sample."""
    b, n_tiles = tl.program_id(1).to(tl.int64), tl.cdiv(n_inp, BLOCK_I)
    n_columns, d_inp = n_columns * 8, d_inp * 8
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    o_i, o_j = tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    o_q = tl.arange(0, 2 * BLOCK_J if OF_A else BLOCK_J)[None, :]
    total = tl.zeros([BLOCK_D, BLOCK_J], tl.float32)
    total_a = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    b_sum = tl.zeros([1, 2 * BLOCK_J if OF_A else BLOCK_J], tl.float32)
    m_q = (o_q < n_sums) & (tl.program_id(0) + o_q * 0 == 0)  # once for all features
    for k in tl.range(0, n_tiles, num_stages=STAGES):
        o_row, tile = k * BLOCK_I + o_i, b * n_tiles + k
        row, m_i = b * n_inp + o_row, o_row < n_inp
        b_pairs = tl.load(pairs + row * n_columns + o_j, mask=m_i & (o_j < n_columns), other=0.0)
        b_x = tl.load(x + row * d_inp + o_d, mask=m_i & (o_d < d_inp), other=0.0)
        total += tl.dot(tl.trans(b_x), b_pairs) * tl.load(tops + tile)
        b_sum += tl.load(parts + tile * n_sums + o_q, mask=m_q, other=0.0)
        if OF_A:
            b_a = tl.load(a + row, mask=m_i, other=0.0) * tl.load(x_tops + row, mask=m_i, other=0.0)
            total_a += b_x.to(tl.float32) * b_a
    out += b * n_sums * d_inp
    m = tl.trans(o_j < n_columns) & (o_d < d_inp)
    tl.store(out + tl.trans(o_j) * d_inp + o_d, tl.trans(total) * (1.0 / 2**28), mask=m)
    if OF_A:
        b_a = tl.sum(total_a, 0)[None, :] * (1.0 / 2**14)
        tl.store(out + n_columns * d_inp + o_d, b_a, mask=o_d < d_inp)
    tl.store(sums + b * n_sums + o_q, b_sum, mask=m_q)
