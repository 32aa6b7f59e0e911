"""Triton kernels that sum pairs over inputs, and gradients of x_inp and of parameters.

``tiles.py`` explains tiles, halves and names.
"""

import triton
import triton.language as tl

from vecroute.ops.paths.batch.segments import start_of
from vecroute.ops.paths.batch.tiles import LENGTHS, multiply, rows_used, tile_of


@triton.jit(do_not_specialize=LENGTHS)
def input_gradient_kernel(
    results, tops, M, f, grad_a, W_A, tiles,  # [r, q], [r] where HALF, [b, n_M, d], [r], [r], [1 or i, d]
    grad_x,  # [r, d]
    n_inp, per_sample, n_columns, n_M, d_inp, results_i, M_i, shared, n_blocks,
    FIXED: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr, HALF: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute grad_x = results M + grad_a W_A; 0 at unused inputs.

    After the n_M rows of M of a sample come the rows that all samples share, which begin at M + shared.
    """
    T: tl.constexpr = f.dtype.element_ty
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


@triton.jit(do_not_specialize=[*LENGTHS, "n_tiles", "n_parts", "n_part"])
def sums_kernel(
    pairs, x, f, tops, sums, tiles, parts,  # [r, q], [r, d], [r], [n], [n, n_sums], tables where PACKED
    grad_a, x_tops,  # [r] each, if WHOLE
    out, totals,  # [p, q or q + 1, d], [p, n_sums]: for each part of a sample, or of all rows
    n_inp, per_sample, n_columns, d_inp, x_i, n_tiles, n_parts,  # how many tiles and parts a sample has
    n_part,  # tiles of a part
    WHOLE: tl.constexpr, EXTRA: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr, HALF: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum pairs^T x, and pairs, over inputs. A part is n_part tiles of one sample, or of all if WHOLE.

    If WHOLE, there are EXTRA more rows, with programs of their own. Their sums are the gradients of W_A
    (grad_a^T x) and of B_A. BLOCK_I is the number of rows of a tile, as in the kernels that stored the pairs.
    """
    T: tl.constexpr = f.dtype.element_ty
    part = tl.program_id(1).to(tl.int64)
    first, end = part * 0, part * 0
    if WHOLE:
        tile = part * n_part
        last = tl.minimum(tile + n_part, n_tiles)
    elif PACKED:
        first, end = tl.load(parts + 4 * part + 1).to(tl.int64), tl.load(parts + 4 * part + 2).to(tl.int64)
        tile = tl.load(parts + 4 * part + 3).to(tl.int64)
        last = tile + tl.cdiv(end - first, BLOCK_I)
        if first >= end:
            return
    else:
        b, k = part // n_parts, part % n_parts * n_part
        tile = b * n_tiles + k
        last = tl.minimum(tile + n_part, (b + 1) * n_tiles)
        first, end = b * n_inp + k * BLOCK_I, (b + 1) * n_inp
    o_q = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    o_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_q, m_d = o_q < n_columns, o_d < d_inp
    n_sums = n_columns + EXTRA  # EXTRA sums for a_inp
    extra = tl.program_id(2) - (tl.num_programs(2) - EXTRA)
    if WHOLE and extra >= 0:
        row = part * n_sums + n_columns + extra
        step = tl.cdiv(n_part, EXTRA)
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


@triton.jit(do_not_specialize=["per_sample", "n_rows"])
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


@triton.jit(do_not_specialize=["n_batch"])
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
