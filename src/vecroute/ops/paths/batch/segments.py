"""The Triton kernel that finds the tiles of packed sequences from cu_seqlens."""

import triton
import triton.language as tl


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


@triton.jit(debug=True, do_not_specialize=["n_rows", "n_batch", "n_tiles", "n_parts", "steps", "half"])
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
