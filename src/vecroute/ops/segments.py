"""Triton kernels for products over packed sequences, in the words of ``fused_pairs``.

A packed sequence x [n, d] holds the vectors of b samples one after another. Sample s has the rows from
cu_seqlens[s] to cu_seqlens[s + 1], perhaps none. The host never reads these offsets, and the number of
launches does not depend on b.

A *tile* is a run of at most ``block`` rows of one sample; a *part* is a run of at most ``part`` rows. Tile k
of sample s has the slot ``start // block + s + k`` of a table with cdiv(n, block) + b slots. The slots of a
sample end before those of the next one begin: start // block + cdiv(length, block) <= end // block + 1. So
each slot finds its sample by a binary search, without a prefix sum.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.common import aligned, cdiv, next_power_of_2

# Chosen for an H200 by the compiler's report, not by trial: wgmma, and in tf32 and bf16 at most 128 registers
# a thread, so that two programs of 8 warps share a multiprocessor.
FEW_ROWS = 16384  # below, tiles of 128 rows would leave some of the 132 multiprocessors without work
PART_ROWS = 256, 2048  # the fewest and the most rows of a part: about 32 parts for a single sample
REDUCED = {"PARTS": 8, "BLOCK": 512, "num_warps": 4}  # for sum_parts_kernel
BLOCKS = {  # by precision: BLOCK_K, columns at most, stages of the pipeline, registers of 8 warps at most
    "tf32": (32, 128, 3, 128),
    "tf32x3": (32, 128, 3, None),
    "bf16": (32, 128, 4, 128),
    "ieee": (16, 64, 2, None),
}
# The interpreter multiplies the bits of bfloat16 numbers as if they were integers, so it gets float32.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Segments(NamedTuple):
    """The samples of a packed sequence, and how kernels cut its rows."""

    cu_seqlens: Tensor  # [b + 1] int32 or int64
    sample: Tensor  # [n] int32, the sample of each row
    sqrt_n_inp: Tensor  # [b] square roots of the lengths, 1 for an empty sample
    tiles: Tensor  # [t, 3] int32: sample, first row, end; unused slots have first = end = 0
    parts: Tensor  # [p, 3] the same for parts
    block: int  # the most rows of a tile
    part: int  # the most rows of a part


@triton.jit
def start_of(cu_seqlens, s, m, n):
    """The first row of a sample. Wrong offsets are clamped, so that no kernel leaves its tensors."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + s, mask=m, other=0), 0), n).to(tl.int32)


@triton.jit
def sample_at(cu_seqlens, o, m, n, n_batch, steps, half, BLOCK: tl.constexpr, SPACED: tl.constexpr):
    """The last sample s with start // BLOCK <= o or, where SPACED, with start // BLOCK + s <= o."""
    s = tl.zeros(o.shape, tl.int32)
    for _ in range(steps):
        middle = s + half
        inside = m & (middle < n_batch)
        key = start_of(cu_seqlens, middle, inside, n) // BLOCK
        if SPACED:
            key += middle
        s = tl.where(inside & (key <= o), middle, s)
        half = half // 2
    return s


@triton.jit
def fill_table(table, n_slots, cu_seqlens, o, n, n_batch, steps, half, BLOCK: tl.constexpr):
    """Write some slots of a table of tiles or parts."""
    m = o < n_slots
    s = sample_at(cu_seqlens, o, m, n, n_batch, steps, half, BLOCK, True)
    start, end = start_of(cu_seqlens, s, m, n), start_of(cu_seqlens, s + 1, m, n)
    k = o - start // BLOCK - s
    first = start + k * BLOCK
    used = (k >= 0) & (first < end)
    tl.store(table + 3 * o, s, mask=m)
    tl.store(table + 3 * o + 1, tl.where(used, first, 0), mask=m)
    tl.store(table + 3 * o + 2, tl.where(used, tl.minimum(first + BLOCK, end), 0), mask=m)


@triton.jit(debug=True, do_not_specialize=["n", "n_batch", "n_tiles", "n_parts", "steps", "half"])
def segment_kernel(
    cu_seqlens, sample, sqrt_n_inp, tiles, parts,  # as in Segments; all but cu_seqlens are filled
    n, n_batch, n_tiles, n_parts,
    steps, half,  # of the binary search: 2 half is the least power of two that is not less than n_batch
    TILE: tl.constexpr, PART: tl.constexpr,  # rows
    BLOCK: tl.constexpr,  # entries of each table that a program fills
):  # fmt: skip
    """Fill all tables of ``Segments``."""
    first = tl.program_id(0) * BLOCK
    o = first + tl.arange(0, BLOCK)
    if first < n:
        m = o < n
        tl.store(sample + o, sample_at(cu_seqlens, o, m, n, n_batch, steps, half, 1, False), mask=m)
    if first < n_tiles:
        fill_table(tiles, n_tiles, cu_seqlens, o, n, n_batch, steps, half, TILE)
    if first < n_parts:
        fill_table(parts, n_parts, cu_seqlens, o, n, n_batch, steps, half, PART)
    if first < n_batch:
        m = o < n_batch
        start = tl.load(cu_seqlens + o, mask=m, other=0)
        end = tl.load(cu_seqlens + o + 1, mask=m, other=0)
        right = (start <= end) & ((o > 0) | (start == 0)) & ((o < n_batch - 1) | (end == n))
        tl.device_assert(right, "cu_seqlens must rise from 0 to the number of rows", mask=m)
        root = tl.sqrt(tl.maximum(end - start, 1).to(tl.float64))
        tl.store(sqrt_n_inp + o, root.to(sqrt_n_inp.dtype.element_ty), mask=m)


def segments(
    cu_seqlens: Tensor, n: int, dtype=torch.float32, block: int | None = None, part: int | None = None
) -> Segments:
    """The tables that every product over a packed sequence needs, in one launch.

    On a GPU, offsets that do not rise from 0 to n end in an asynchronous device assert.

    Args:
        cu_seqlens: [b + 1] int32 or int64 offsets, with b >= 1.
        n: the number of rows, below 2^31.
        dtype: of ``sqrt_n_inp``.
        block: the most rows of a tile, a power of two from 16; chosen by n if None.
        part: the most rows of a part, a power of two; chosen by n if None.
    """
    b = len(cu_seqlens) - 1
    block = block or (64 if n < FEW_ROWS else 128)
    part = part or min(max(PART_ROWS[0], next_power_of_2(max(1, n // 32))), PART_ROWS[1])
    n_tiles, n_parts = cdiv(n, block) + b, cdiv(n, part) + b
    steps = (b - 1).bit_length()
    empty = cu_seqlens.new_empty
    sample, sqrt_n_inp = empty(n, dtype=torch.int32), empty(b, dtype=dtype)
    tiles, parts = empty(n_tiles, 3, dtype=torch.int32), empty(n_parts, 3, dtype=torch.int32)
    segment_kernel[(cdiv(max(n, n_tiles, n_parts), 256),)](
        cu_seqlens, sample, sqrt_n_inp, tiles, parts, n, b, n_tiles, n_parts, steps, 2**steps // 2,
        TILE=block, PART=part, BLOCK=256, num_warps=4, sanitize_overflow=False,
    )  # fmt: skip
    return Segments(cu_seqlens, sample, sqrt_n_inp, tiles, parts, block, part)


@triton.jit
def tile_at(table, slot):
    """Sample, first row and end of a tile or part."""
    table += 3 * slot
    return tl.load(table).to(tl.int64), tl.load(table + 1), tl.load(table + 2)


@triton.jit
def add_product(total, b_a, b_b, PRECISION: tl.constexpr):
    """total + a b, with operands rounded as PRECISION says."""
    if PRECISION == "bf16":
        b_a, b_b = b_a.to(tl.bfloat16), b_b.to(tl.bfloat16)
        if INTERPRETED:
            b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
        total = tl.dot(b_a, b_b, total)
    else:
        b_a, b_b = b_a.to(total.dtype), b_b.to(total.dtype)
        total = tl.dot(b_a, b_b, total, input_precision=PRECISION, out_dtype=total.dtype)
    return total


@triton.jit
def rows_times_kernel(
    x, M, out, tiles,  # [n, d], [b, q, d], [n, q], [t, 3]
    d, x_i, M_b, M_q,  # sizes and strides in units of VEC, so that the compiler knows what divides them
    q, out_i,  # in units of OUT_VEC
    VEC: tl.constexpr, OUT_VEC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,  # rows of a tile, of q, of d
):  # fmt: skip
    """out_iq = sum_d x_id M_sqd, with the sample s of row i. A program has some columns of a tile."""
    q, d = q * OUT_VEC, d * VEC
    n_blocks = tl.cdiv(q, BLOCK_N)  # neighbours share rows of x, which then come from the cache
    sample, first, end = tile_at(tiles, tl.program_id(0) // n_blocks)
    if first == end:
        return
    o_i = first + tl.arange(0, BLOCK_I)[:, None]
    o_q = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    o_k = tl.arange(0, BLOCK_K)
    m_i, m_q = o_i < end, o_q < q
    p_x = x + o_i.to(tl.int64) * (x_i * VEC) + o_k[None, :]
    p_M = M + sample * M_b * VEC + o_q.to(tl.int64) * (M_q * VEC) + o_k[:, None]
    total = tl.zeros([BLOCK_I, BLOCK_N], out.dtype.element_ty)
    for k in range(0, d, BLOCK_K):
        m_k = o_k < d - k
        b_x = tl.load(p_x + k, mask=m_i & m_k[None, :], other=0.0)
        b_M = tl.load(p_M + k, mask=m_q & m_k[:, None], other=0.0)
        total = add_product(total, b_x, b_M, PRECISION)
    tl.store(out + o_i.to(tl.int64) * (out_i * OUT_VEC) + o_q, total, mask=m_i & m_q)


@triton.jit(do_not_specialize=["M_b", "M_q"])
def times_rows_kernel(
    pairs, M, out, tiles,  # [n, q], [b, q, d], [n, d], [t, 3]
    q, pairs_i,  # sizes and strides in units of VEC
    d, out_i,  # in units of OUT_VEC
    M_b, M_q,  # in units of M_VEC
    VEC: tl.constexpr, OUT_VEC: tl.constexpr, M_VEC: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,  # rows of a tile, of d, of q
):  # fmt: skip
    """out_id = sum_q pairs_iq M_sqd, added to what is there if ADD. A program has some columns of a tile."""
    q, d, M_q = q * VEC, d * OUT_VEC, M_q * M_VEC
    n_blocks = tl.cdiv(d, BLOCK_N)
    sample, first, end = tile_at(tiles, tl.program_id(0) // n_blocks)
    if first == end:
        return
    o_i = first + tl.arange(0, BLOCK_I)[:, None]
    o_d = (tl.program_id(0) % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    o_k = tl.arange(0, BLOCK_K)
    m_i, m_d = o_i < end, o_d < d
    p_pairs = pairs + o_i.to(tl.int64) * (pairs_i * VEC) + o_k[None, :]
    p_M = M + sample * M_b * M_VEC + o_k[:, None].to(tl.int64) * M_q + o_d
    total = tl.zeros([BLOCK_I, BLOCK_N], out.dtype.element_ty)
    for k in range(0, q, BLOCK_K):
        m_k = o_k < q - k
        b_pairs = tl.load(p_pairs + k, mask=m_i & m_k[None, :], other=0.0)
        b_M = tl.load(p_M + k * M_q, mask=m_k[:, None] & m_d, other=0.0)
        total = add_product(total, b_pairs, b_M, PRECISION)
    p_out = out + o_i.to(tl.int64) * (out_i * OUT_VEC) + o_d
    if ADD:
        total += tl.load(p_out, mask=m_i & m_d, other=0.0)
    tl.store(p_out, total, mask=m_i & m_d)


@triton.jit
def sum_of_rows(p_pairs, pairs_i, n_rows, o_q, m_q, BLOCK_I: tl.constexpr, T: tl.constexpr):
    """The sums of some columns of pairs over its first rows, [1, q]."""
    o_i = tl.arange(0, BLOCK_I)[:, None]
    total = tl.zeros([BLOCK_I, o_q.shape[1]], T)
    for i in range(0, n_rows, BLOCK_I):
        p_row = p_pairs + (i + o_i).to(tl.int64) * pairs_i
        total += tl.load(p_row + o_q, mask=(o_i < n_rows - i) & m_q, other=0.0).to(T)
    return tl.sum(total, 0)[None, :]


@triton.jit(do_not_specialize=["n", "pairs_i", "x_i"])
def sums_kernel(
    pairs, x, out, totals,  # [n, q], [n, d], [b, q, d], [b, q]
    workspace,  # [2 cdiv(n, PART), >= q d + q]: the same for the parts of a sample that has several
    parts, cu_seqlens,
    n, q, totals_b,
    d, out_b, workspace_i,  # sizes and strides in units of VEC
    pairs_i, x_i,  # in units of PAIRS_VEC and X_VEC
    VEC: tl.constexpr, PAIRS_VEC: tl.constexpr, X_VEC: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,  # of q, of d, rows
):  # fmt: skip
    """out_sqd = sum_i pairs_iq x_id and totals_sq = sum_i pairs_iq over the rows i of sample s.

    A program has a block of out for a part, or the totals of some columns.
    """
    d, pairs_i, x_i = d * VEC, pairs_i * PAIRS_VEC, x_i * X_VEC
    n_q, n_d = tl.cdiv(q, BLOCK_I), tl.cdiv(d, BLOCK_N) + 1  # the last is for totals
    block = tl.program_id(0) % (n_q * n_d)
    sample, first, end = tile_at(parts, tl.program_id(0) // (n_q * n_d))
    if first == end:
        return
    start = start_of(cu_seqlens, sample, True, n)
    p_out, p_totals = out + sample * out_b * VEC, totals + sample * totals_b
    if (first > start) | (end < start_of(cu_seqlens, sample + 1, True, n)):
        # Two slots for each PART rows of x: one for a sample's first part that begins there, one for another.
        slot = 2 * (first // PART) + (first > start).to(tl.int32)
        p_out = workspace + slot.to(tl.int64) * workspace_i * VEC
        p_totals = p_out + q * d
    o_q = (block // n_d) * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    o_d = (block % n_d) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m_q, m_d, n_rows = o_q < q, o_d < d, end - first
    p_pairs, p_x = pairs + first.to(tl.int64) * pairs_i, x + first.to(tl.int64) * x_i
    if block % n_d == n_d - 1:
        b_totals = sum_of_rows(p_pairs, pairs_i, n_rows, o_q, m_q, 2 * BLOCK_K, out.dtype.element_ty)
        tl.store(p_totals + o_q, b_totals, mask=m_q)
        return
    total = tl.zeros([BLOCK_I, BLOCK_N], out.dtype.element_ty)
    for k in range(0, n_rows, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)[:, None]
        m_k = o_k < n_rows
        b_pairs = tl.load(p_pairs + o_k.to(tl.int64) * pairs_i + o_q, mask=m_k & m_q, other=0.0)
        b_x = tl.load(p_x + o_k.to(tl.int64) * x_i + o_d, mask=m_k & m_d, other=0.0)
        total = add_product(total, tl.trans(b_pairs), b_x, PRECISION)
    tl.store(p_out + tl.trans(o_q) * d + o_d, total, mask=tl.trans(m_q) & m_d)


@triton.jit(do_not_specialize=["n"])
def sum_parts_kernel(
    workspace, out, totals, cu_seqlens,  # as above
    n, q, totals_b, d, out_b, workspace_i,
    VEC: tl.constexpr, PART: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,  # parts loaded at once, and elements of each
):  # fmt: skip
    """Add the parts of each sample that has several, in their order; an empty sample gets zeros."""
    size = q * d * VEC
    n_blocks = tl.cdiv(size + q, BLOCK)
    sample = (tl.program_id(0) // n_blocks).to(tl.int64)
    start = start_of(cu_seqlens, sample, True, n)
    length = start_of(cu_seqlens, sample + 1, True, n) - start
    if (length > 0) & (length <= PART):
        return
    n_parts = tl.cdiv(tl.maximum(length, 0), PART)
    o = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([PARTS, BLOCK], out.dtype.element_ty)
    for k in range(0, n_parts, PARTS):
        o_k = k + tl.arange(0, PARTS)[:, None]
        slot = (2 * (start // PART + o_k) + (o_k > 0).to(tl.int32)).to(tl.int64)
        # A row of the workspace may have more elements, but none beyond its end is stored.
        m = (o_k < n_parts) & (o < workspace_i * VEC)
        total += tl.load(workspace + slot * workspace_i * VEC + o, mask=m, other=0.0)
    b_sum = tl.sum(total, 0)[None, :]
    tl.store(out + sample * out_b * VEC + o, b_sum, mask=o < size)
    tl.store(totals + sample * totals_b + o - size, b_sum, mask=(o >= size) & (o < size + q))


def in_units(name: str, hidden: bool = False, **sizes: int) -> dict[str, int]:
    """Sizes and strides in units of the greatest divisor of all of them and 8, or of 1 if hidden."""
    vec = 1 if hidden else math.gcd(8, *sizes.values())
    return {name: vec, **{size: value // vec for size, value in sizes.items()}}


def hides(precision: str, rows: int, a: Tensor) -> bool:
    """Whether to hide from the compiler that the rows of an operand, which a product sums, are aligned.

    For float32, wgmma needs neighbours in the summed dimension, so the copy to shared memory transposes a
    tile, 4 bytes at a time. With 16 aligned bytes to a thread, 16 threads would write to the same bank.
    """
    return precision.startswith("tf32") and rows >= 64 and a.dtype == torch.float32


def columns(n: int, precision: str) -> int:
    """The columns of a block: as few as n needs, and half the most where that wastes less."""
    most = BLOCKS[precision][1]
    if n <= most:
        return max(16, next_power_of_2(n))
    return most // 2 if cdiv(n, most // 2) % 2 else most


def blocks_of(rows: int, n: int, inner: int, precision: str) -> dict[str, Any]:
    """How to launch a product with tiles of so many rows, n columns and sums over ``inner`` elements."""
    block_k, _, stages, registers = BLOCKS[precision]
    block_k, block_n = min(block_k, max(16, next_power_of_2(inner))), columns(n, precision)
    blocks = {"BLOCK_I": rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_stages": stages}
    if rows * block_n < 8192 and precision != "ieee":
        return blocks | {"num_warps": 4}
    return blocks | {"num_warps": 8, "maxnreg": registers}


def rows_times(x: Tensor, M: Tensor, out: Tensor, of: Segments, precision: str) -> Tensor:
    """Each row of x times the matrix of its sample: out_iq = sum_d x_id M_sqd.

    Args:
        x: [n, d], M: [b, q, d], out: [n, q], each with unit stride in its last dimension.
        precision: "tf32", "tf32x3" (like IEEE float32), "bf16" (operands rounded) or "ieee" (for float64).
    """
    q, d = M.shape[1:]
    units = in_units("VEC", d=d, x_i=x.stride(0), M_b=M.stride(0), M_q=M.stride(1))
    units |= in_units("OUT_VEC", q=q, out_i=out.stride(0))
    blocks = blocks_of(of.block, q, d, precision)
    grid = (len(of.tiles) * cdiv(q, blocks["BLOCK_N"]),)
    rows_times_kernel[grid](x, M, out, of.tiles, PRECISION=precision, **units, **blocks)
    return out


def times_rows(pairs: Tensor, M: Tensor, out: Tensor, of: Segments, precision: str, fresh=True) -> Tensor:
    """Each row of pairs times the matrix of its sample: out_id = sum_q pairs_iq M_sqd, or added unless fresh.

    Args:
        pairs: [n, q], M: [b, q, d], out: [n, d], each with unit stride in its last dimension.
        precision: as for ``rows_times``.
    """
    q, d = M.shape[1:]
    units = in_units("VEC", q=q, pairs_i=pairs.stride(0)) | in_units("OUT_VEC", d=d, out_i=out.stride(0))
    blocks = blocks_of(of.block, d, q, precision)
    units |= in_units("M_VEC", hides(precision, of.block, M), M_b=M.stride(0), M_q=M.stride(1))
    grid = (len(of.tiles) * cdiv(d, blocks["BLOCK_N"]),)
    times_rows_kernel[grid](pairs, M, out, of.tiles, ADD=not fresh, PRECISION=precision, **units, **blocks)
    return out


def sums(pairs: Tensor, x: Tensor, out: Tensor, totals: Tensor, of: Segments, precision: str) -> Tensor:
    """Sums over the rows of each sample: out_sqd = sum_i pairs_iq x_id and totals_sq = sum_i pairs_iq.

    Args:
        pairs: [n, q], x: [n, d], totals: [b, q], each with unit stride in its last dimension.
        out: [b, q, d], contiguous but for the stride of b.
        precision: as for ``rows_times``; pairs are not rounded for totals.
    """
    (b, q, d), n = out.shape, len(x)
    workspace = out.new_empty(2 * cdiv(n, of.part), aligned(q * d + q))
    units = in_units("VEC", d=d, out_b=out.stride(0), workspace_i=workspace.shape[1])
    units |= {"n": n, "q": q, "totals_b": totals.stride(0), "PART": of.part}
    blocks = blocks_of(columns(q, precision), d, of.part, precision)
    rows = in_units("PAIRS_VEC", hides(precision, blocks["BLOCK_I"], pairs), pairs_i=pairs.stride(0))
    rows |= in_units("X_VEC", hides(precision, blocks["BLOCK_I"], x), x_i=x.stride(0))
    grid = (len(of.parts) * cdiv(q, blocks["BLOCK_I"]) * (cdiv(d, blocks["BLOCK_N"]) + 1),)
    sums_kernel[grid](
        pairs, x, out, totals, workspace, of.parts, of.cu_seqlens, PRECISION=precision,
        **units, **rows, **blocks,
    )  # fmt: skip
    grid = (b * cdiv(q * d + q, REDUCED["BLOCK"]),)
    sum_parts_kernel[grid](workspace, out, totals, of.cu_seqlens, **units, **REDUCED)
    return out
