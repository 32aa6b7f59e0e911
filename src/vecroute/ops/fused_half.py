"""Triton kernels over float16 with units, in the words of ``fused_pairs``.

A *top* is a power of two: what is float16 is 2^14 times numbers over it, so that those 2^-28 of the greatest
still have all digits. Rows of x_inp, of M and of pairs have one each; pairs that are summed over inputs have
one for each tile of rows. All outputs are one block.
"""

import triton
import triton.language as tl

from vecroute.ops.fused_pairs import f_of


@triton.jit
def below(greatest):
    """The power of two below a number; not so small that a GPU could not divide by it."""
    bits = greatest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits, 32 << 23).to(tl.float32, bitcast=True)  # at least 2^-95


@triton.jit
def top_of_rows(values):
    """Of a block of numbers that are not negative, [i, j], those of its rows, [i, 1]."""
    return below(tl.max(values, 1)[:, None])


@triton.jit
def top_of(values):
    """The one of the same; by its rows, since otherwise all of it would change places."""
    return below(tl.max(tl.max(values, 1), 0))


@triton.jit
def halves_kernel(
    values,  # [b, n, d]
    out,  # [b, n, d] float16
    tops,  # [b, n]
    least,  # of tops
    d_inp, values_b, values_i, out_b, tops_b,  # rows of out follow each other
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = 2^14 values / tops; a program has a row."""
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o = tl.arange(0, BLOCK)
    b_values = tl.load(values + b * values_b + row * values_i + o, mask=o < d_inp, other=0.0)
    top = tl.maximum(below(tl.max(tl.abs(b_values), 0)), least)
    tl.store(tops + b * tops_b + row, top)
    tl.store(out + b * out_b + row * d_inp + o, (b_values * (16384.0 / top)).to(tl.float16), mask=o < d_inp)


@triton.jit
def block_of_tile(x_tops, n_inp, n_out, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr):
    """Of a program for a tile of a sample: which tile and sample; its rows and outputs; which rows, outputs
    and pairs there are; and the tops of these rows of x_inp."""
    b, o_j = tl.program_id(1), tl.arange(0, BLOCK_J)[None, :]
    o_i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    row, m_i, m_j = b * n_inp + o_i, o_i < n_inp, o_j < n_out
    x_top = tl.load(x_tops + row, mask=m_i, other=0.0)
    return b * tl.num_programs(0) + tl.program_id(0), b, row, o_j, m_i, m_j, m_i & m_j, x_top


@triton.jit
def product_of(pairs, tops, x_top, o_j, m_i, m_j):
    """A block of products of float16, without their units: the tops of rows of M and of x_inp."""
    unit = tl.load(tops + o_j, mask=m_j, other=0.0) * (x_top * (1.0 / 2**28))
    return tl.load(pairs + o_j, mask=m_i & m_j, other=0.0) * unit


@triton.jit
def beta_of(c, tops, bias, x_top, o_j, m_i, m_j):
    """A block of c_sum or of the flat c."""
    return product_of(c, tops, x_top, o_j, m_i, m_j) + tl.load(bias + o_j, mask=m_j, other=0.0)


@triton.jit
def competition(z, m_j):
    """R of a block that has all outputs, and 1 - f(z)."""
    low, q, rest = f_of(z)
    low = tl.where(m_j, low, -float("inf"))
    value = tl.exp(low - tl.max(low, 1)[:, None]) * q
    total = tl.sum(value, 1)[:, None]
    return tl.where(value == total, 1.0, value * (1.0 / total)), rest


@triton.jit
def store_halves(values, out, top, m):
    """A block, 0 outside, over its top, in float16."""
    tl.store(out, (values * (16384.0 / top)).to(tl.float16), mask=m)


@triton.jit
def store_tile(values, out, tops, m):
    """The same with the top of all of it, which is stored too."""
    top = top_of(tl.abs(values))
    tl.store(tops, top)
    store_halves(values, out, top, m)


@triton.jit
def first_phi_kernel(
    c, x_tops, c_tops, bias,  # [b, i, q] x_inp times the rows that all samples share, [b, i], [q], [q]
    B_A, sqrt_n_inp,  # [1], [b]
    f,  # [b, i], filled
    phi, phi_tops,  # [b, i, j] float16, times the tops of x_inp, and [b, n]
    sums,  # [b, n, j] of phi over the rows of a tile
    n_inp,
    n_out, n_c, phi_i,  # j, q, and the stride of rows of phi, in units of 8: then 16 bytes are loaded at once
    BLOCK_I: tl.constexpr,  # the rows of a tile
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """f(a_inp), and phi = f c of the first iteration, with the flat c."""
    n_out, n_c, phi_i = n_out * 8, n_c * 8, phi_i * 8
    tile, b, row, o_j, m_i, m_j, m, x_top = block_of_tile(x_tops, n_inp, n_out, BLOCK_I, BLOCK_J)
    c += row * n_c
    a = tl.load(c + 2 * n_out, mask=m_i, other=0.0) * (x_top * tl.load(c_tops + 2 * n_out) * (1.0 / 2**28))
    b_f = 1.0 / (1.0 + tl.exp(-(a / tl.load(sqrt_n_inp + b) + tl.load(B_A).to(tl.float32))))
    tl.store(f + row, b_f, mask=m_i)
    b_phi = tl.where(m, b_f * beta_of(c + n_out, c_tops + n_out, bias + n_out, x_top, o_j, m_i, m_j), 0.0)
    tl.store(sums + tile * n_out + o_j, tl.sum(b_phi, 0)[None, :], mask=m_j)
    store_tile(b_phi * x_top, phi + row * phi_i + o_j, phi_tops + tile, m)


@triton.jit
def last_phi_kernel(
    dot, M_tops,  # [b, i, j] x_inp times x_hat, [b, j]
    c, x_tops, c_tops, bias, B_S, f,  # as above, and [j]
    phi, phi_tops, sums,  # as above
    phi_out,  # [b, i, j] phi itself, where SHOWN
    n_inp, n_out, n_c, phi_i,  # as above
    PRIOR: tl.constexpr,  # an argument would be rounded
    SHOWN: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """phi = f (c_sum (R - prior) + c) of the second iteration."""
    n_out, n_c, phi_i = n_out * 8, n_c * 8, phi_i * 8
    tile, b, row, o_j, m_i, m_j, m, x_top = block_of_tile(x_tops, n_inp, n_out, BLOCK_I, BLOCK_J)
    c += row * n_c
    z = product_of(dot + row * n_out, M_tops + b * n_out, x_top, o_j, m_i, m_j)
    R, _ = competition(z + tl.load(B_S + o_j, mask=m_j, other=0.0).to(tl.float32), m_j)
    u = beta_of(c, c_tops, bias, x_top, o_j, m_i, m_j) * (R - PRIOR)
    u += beta_of(c + n_out, c_tops + n_out, bias + n_out, x_top, o_j, m_i, m_j)
    b_phi = tl.where(m, tl.load(f + row, mask=m_i, other=0.0) * u, 0.0)
    if SHOWN:
        tl.store(phi_out + row * n_out + o_j, b_phi, mask=m)
    tl.store(sums + tile * n_out + o_j, tl.sum(b_phi, 0)[None, :], mask=m_j)
    store_tile(b_phi * x_top, phi + row * phi_i + o_j, phi_tops + tile, m)


@triton.jit
def last_phi_backward_kernel(
    pairs, M_tops,  # [b, i, 2 j] x_inp times grad_y and x_hat, [b, 2 j]
    c, x_tops, c_tops, bias, B_S, f,  # as above
    grad_s,  # [b, j]
    grad_f,  # [b, i], filled
    results, tops,  # [b, i, k] float16, times the tops of M, and [b, i]
    to_sum, sum_tops,  # [b, i, 2 j] float16, times the tops of x_inp, and [b, n]: of dot and of c_sum
    sums,  # [b, n, 2 j] of these over the rows of a tile
    n_inp, n_out, n_c, results_i, to_sum_i, M_tops_b,  # as above, strides of rows in units of 8 too
    PRIOR: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The gradient of ``last_phi_kernel``; results: phi, of dot, nothing yet, of c_sum, of the flat c."""
    n_out, n_c, results_i, to_sum_i = n_out * 8, n_c * 8, results_i * 8, to_sum_i * 8
    tile, b, row, o_j, m_i, m_j, m, x_top = block_of_tile(x_tops, n_inp, n_out, BLOCK_I, BLOCK_J)
    pairs += row * 2 * n_out
    c += row * n_c
    M_tops += b * M_tops_b
    z = product_of(pairs + n_out, M_tops + n_out, x_top, o_j, m_i, m_j)
    R, rest = competition(z + tl.load(B_S + o_j, mask=m_j, other=0.0).to(tl.float32), m_j)
    c_sum = beta_of(c, c_tops, bias, x_top, o_j, m_i, m_j)
    flat = beta_of(c + n_out, c_tops + n_out, bias + n_out, x_top, o_j, m_i, m_j)
    u = tl.where(m, c_sum * (R - PRIOR) + flat, 0.0)
    grad_phi = product_of(pairs, M_tops, x_top, o_j, m_i, m_j)
    grad_phi += tl.load(grad_s + b * n_out + o_j, mask=m_j, other=0.0)
    tl.store(grad_f + row, tl.sum(u * grad_phi, 1)[:, None], mask=m_i)
    b_f = tl.load(f + row, mask=m_i, other=0.0)
    g = tl.where(m, grad_phi * b_f, 0.0)  # of the flat c
    # The products as in the sum, so that nothing is left where one output has all of R.
    of_R = R * (c_sum * g)
    grad_dot = (of_R - R * tl.sum(of_R, 1)[:, None]) * rest
    grad_sum = g * (R - PRIOR)
    sums += tile * 2 * n_out
    tl.store(sums + o_j, tl.sum(grad_dot, 0)[None, :], mask=m_j)
    tl.store(sums + n_out + o_j, tl.sum(grad_sum, 0)[None, :], mask=m_j)
    top = top_of(tl.maximum(tl.abs(grad_dot), tl.abs(grad_sum)) * x_top)
    tl.store(sum_tops + tile, top)
    to_sum += row * to_sum_i
    store_halves(grad_dot * x_top, to_sum + o_j, top, m)
    store_halves(grad_sum * x_top, to_sum + n_out + o_j, top, m)
    b_phi = u * b_f * tl.load(M_tops + o_j, mask=m_j, other=0.0)
    grad_dot *= tl.load(M_tops + n_out + o_j, mask=m_j, other=0.0)
    grad_sum *= tl.load(c_tops + o_j, mask=m_j, other=0.0)
    g *= tl.load(c_tops + n_out + o_j, mask=m_j, other=0.0)
    greatest = tl.maximum(tl.maximum(tl.abs(b_phi), tl.abs(grad_dot)), tl.abs(grad_sum))
    top = top_of_rows(tl.maximum(greatest, tl.abs(g)))
    tl.store(tops + row, top, mask=m_i)
    results += row * results_i
    store_halves(b_phi, results + o_j, top, m)
    store_halves(grad_dot, results + n_out + o_j, top, m)
    store_halves(grad_sum, results + 3 * n_out + o_j, top, m)
    store_halves(g, results + 4 * n_out + o_j, top, m)


@triton.jit
def first_phi_backward_kernel(
    pairs, M_tops,  # [b, i, j] x_inp times grad_y, [b, j]
    c, x_tops, c_tops, bias, sqrt_n_inp, f,  # as above
    grad_s,  # [b, j]
    grad_f,  # [b, i], of the second iteration
    results,  # [b, i, k], as above; filled up with phi, the gradient of the flat c, that of a_inp, and zeros
    before, tops,  # [b, i] of results so far, and of these: not less
    to_sum, sum_tops,  # [b, i, j + 8] float16, times the tops of x_inp, and [b, n]: of these, and zeros
    sums,  # [b, n, j + 1] of this and of that of a_inp over the rows of a tile
    n_inp, n_out, n_c, results_i, to_sum_i, M_tops_b,  # as above
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The gradient of ``first_phi_kernel``, after that of ``last_phi_kernel``."""
    n_out, n_c, results_i, to_sum_i = n_out * 8, n_c * 8, results_i * 8, to_sum_i * 8
    tile, b, row, o_j, m_i, m_j, m, x_top = block_of_tile(x_tops, n_inp, n_out, BLOCK_I, BLOCK_J)
    o_a = tl.arange(0, 8)[None, :]
    results += row * results_i
    M_tops += b * M_tops_b
    b_f = tl.load(f + row, mask=m_i, other=0.0)
    u = tl.where(m, beta_of(c + row * n_c + n_out, c_tops + n_out, bias + n_out, x_top, o_j, m_i, m_j), 0.0)
    grad_phi = product_of(pairs + row * n_out, M_tops, x_top, o_j, m_i, m_j)
    grad_phi += tl.load(grad_s + b * n_out + o_j, mask=m_j, other=0.0)
    a = tl.load(grad_f + row, mask=m_i, other=0.0) + tl.sum(u * grad_phi, 1)[:, None]
    a *= b_f * (1.0 - b_f) / tl.load(sqrt_n_inp + b)
    old = tl.load(before + row, mask=m_i, other=0.0)
    c_top = tl.load(c_tops + n_out + o_j, mask=m_j, other=1.0)
    g = tl.load(results + 4 * n_out + o_j, mask=m, other=0.0).to(tl.float32) * (old * (1.0 / 2**14) / c_top)
    g += tl.where(m, grad_phi * b_f, 0.0)
    sums += tile * (n_out + 1)
    tl.store(sums + o_j, tl.sum(g, 0)[None, :], mask=m_j)
    tl.store(sums + n_out, tl.sum(a))
    top = top_of(tl.maximum(tl.abs(g), tl.abs(a)) * x_top)
    tl.store(sum_tops + tile, top)
    to_sum += row * to_sum_i
    store_halves(g * x_top, to_sum + o_j, top, m)
    store_halves(tl.where(o_a == 0, a * x_top, 0.0), to_sum + n_out + o_a, top, m_i)
    b_phi = u * b_f * tl.load(M_tops + o_j, mask=m_j, other=0.0)
    g *= c_top
    a *= tl.load(c_tops + 2 * n_out)
    top = tl.maximum(top_of_rows(tl.maximum(tl.maximum(tl.abs(b_phi), tl.abs(g)), tl.abs(a))), old)
    tl.store(tops + row, top, mask=m_i)
    store_halves(b_phi, results + 2 * n_out + o_j, top, m)
    store_halves(g, results + 4 * n_out + o_j, top, m)
    store_halves(tl.where(o_a == 0, a, 0.0), results + 5 * n_out + o_a, top, m_i)


@triton.jit
def half_sums_kernel(
    pairs, x,  # [b, i, k], [b, i, d] float16
    tops,  # [b, n] of pairs
    parts,  # [b, n, q] sums of pairs over the rows of tiles, q <= k
    out, sums,  # [b, q, d], [b, q]
    pairs_i, out_b, sums_b,
    n_inp, n_columns, n_sums, d_inp,  # i, k, q, d; k, d and pairs_i in units of 8
    BLOCK_I: tl.constexpr,  # the rows of a tile
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out = pairs^T x_inp, and the sums of pairs; a program has some features of a sample."""
    b, n_tiles = tl.program_id(1).to(tl.int64), tl.cdiv(n_inp, BLOCK_I)
    n_columns, d_inp, pairs_i = n_columns * 8, d_inp * 8, pairs_i * 8
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    o_i, o_j = tl.arange(0, BLOCK_I)[:, None], tl.arange(0, BLOCK_J)[None, :]
    total = tl.zeros([BLOCK_D, BLOCK_J], tl.float32)
    b_sum = tl.zeros([1, BLOCK_J], tl.float32)
    m_sum = (o_j < n_sums) & (tl.program_id(0) + o_j * 0 == 0)  # once for all features
    for k in tl.range(0, n_tiles, num_stages=STAGES):
        o_row, tile = k * BLOCK_I + o_i, b * n_tiles + k
        row, m_i = b * n_inp + o_row, o_row < n_inp
        b_pairs = tl.load(pairs + row * pairs_i + o_j, mask=m_i & (o_j < n_columns), other=0.0)
        b_x = tl.load(x + row * d_inp + o_d, mask=m_i & (o_d < d_inp), other=0.0)
        # Without the units at once: in them sums could leave the range of float32.
        total += tl.dot(tl.trans(b_x), b_pairs) * (tl.load(tops + tile) * (1.0 / 2**28))
        b_sum += tl.load(parts + tile * n_sums + o_j, mask=m_sum, other=0.0)
    m = tl.trans(o_j < n_sums) & (o_d < d_inp)
    tl.store(out + b * out_b + tl.trans(o_j) * d_inp + o_d, tl.trans(total), mask=m)
    tl.store(sums + b * sums_b + o_j, b_sum, mask=m_sum)
