"""Blocks and grids of the Triton kernels, from sizes. "H200" means that trials on one H200 found a number."""

from typing import Any

from vecroute.ops.common import cdiv, next_power_of_2
from vecroute.ops.plan import limits

# Gradients of x_inp on the long path, for 1,000,000 rows (H200).
HALVES = {"BLOCK_I": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
# Products of many float32 rows with a small matrix, for 1,000,000 rows (H200).
IEEE_PRODUCT = {"BLOCK_I": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 2}
MATRIX = {"BLOCK_Q": 32, "BLOCK_D": 32}  # kernels that transpose small matrices: 4 KB of float32
SAMPLES = {"BLOCK_B": 32, "BLOCK_N": 32}  # sums over samples

# The batch path (H200): registers of a thread and stages of the pipeline, forward (True) and backward.
REGISTERS = {True: 128, False: 128}
STAGES = {True: 3, False: 4}
SUM_STAGES = 4  # at most; see ``sum_stages``
# The gradient of x_inp: rows, features, warps, columns multiplied at a time, stages; with and without halves.
INPUT_GRADIENT = {True: (64, 64, 4, 64, 3), False: (limits.TILE, 128, 4, 32, 3)}


def of_pairs(n_out: int, size: int = 1024, num_warps: int = 4) -> dict[str, int]:
    """Return rows and outputs of a block of ``size`` pairs: all outputs at once if there are not many.

    More than 512 outputs go in two blocks or more: a single one was up to ten times slower (H200).
    """
    block_j = next_power_of_2(n_out)
    block_j = block_j if block_j <= 512 else min(block_j // 2, 2048)
    return {
        "BLOCK_I": max(1, size // block_j), "BLOCK_J": block_j, "TILES": cdiv(n_out, block_j),
        "num_warps": max(num_warps, min(8, block_j // 128)),
    }  # fmt: skip


def of_whole_rows(n_out: int, *, first: bool, backward: bool) -> dict[str, int]:
    """Return the options of the wide path's kernels, and the programs per multiprocessor.

    Each thread handles about eight outputs. Its registers leave room for those programs.
    """
    block_j = next_power_of_2(n_out)
    num_warps = max(4, min(16, block_j // 256))
    maxnreg = 128 if backward and not first else 64
    return {
        "BLOCK_J": block_j, "STAGES": 2, "num_warps": num_warps, "maxnreg": maxnreg,
        "programs": 65536 // (maxnreg * 32 * num_warps),
    }  # fmt: skip


def of_rows(n: int) -> dict[str, int]:
    """Return rows, and features of a row of n, for 1024 numbers per program."""
    block = min(next_power_of_2(n), 1024)
    return {"BLOCK_R": 1024 // block, "BLOCK_D": block}


def of_vectors(n: int) -> dict[str, int]:
    """Return the number of whole vectors of n features, for about 2048 numbers per program."""
    block = next_power_of_2(n)
    return {"BLOCK_R": max(1, 2048 // block), "BLOCK_D": block}


def of_samples(b: int, most: int = 8) -> dict[str, int]:
    """Return the samples that a program sums over at a time, and the numbers of each."""
    block = min(next_power_of_2(max(1, b)), most)
    return {"BLOCK_B": block, "BLOCK_N": 1024 // block}


def of_inputs(n_inp: int, d_inp: int) -> dict[str, int]:
    """Return rows and features of a block for sums over samples of [i, d] numbers (H200)."""
    rows, columns = (1, 256) if n_inp * d_inp <= 2**17 else (4, 512)
    return {"BLOCK_I": rows, "BLOCK_D": columns}


def parts_of_samples(b: int, n: int) -> tuple[int, int]:
    """Return the number of parts for a sum of n numbers over b samples, and the samples per part.

    There is one part, unless most of a GPU would be idle because samples are many and numbers few.
    """
    parts = max(1, min(b // 64, 2**17 // n, 2**10))
    return parts, cdiv(b, parts)


def of_sums(columns: int) -> tuple[int, int]:
    """Return columns of pairs and features of x_inp for a program of the batch path that sums over inputs."""
    return max(16, min(128, next_power_of_2(columns))), 128


def sum_stages(columns: int, itemsizes: tuple[int, int], shared_bytes: int) -> int:
    """Return the stages of the pipeline of a sum over inputs: as many as fit shared memory.

    Args:
        itemsizes: bytes per number of pairs and of x_inp.
        shared_bytes: shared memory of the device; 0 for the interpreter, which has no such limit.
    """
    block_q, block_d = of_sums(columns)
    stage = limits.TILE * (block_q * itemsizes[0] + block_d * itemsizes[1])
    left = shared_bytes - 24 * 1024  # for everything but the pipeline
    return max(1, min(SUM_STAGES, left // stage)) if shared_bytes else SUM_STAGES


def of_product(m: int, n: int) -> dict[str, Any]:
    """Return grid and blocks of a product [m, n] of small matrices, with enough programs to fill a GPU."""
    rows = 128 if cdiv(m, 128) * cdiv(n, 128) >= limits.LEAST_PROGRAMS // 2 else 64
    columns = max(16, min(rows, next_power_of_2(n)))
    return {
        "grid": (cdiv(m, rows), cdiv(n, columns), 1), "BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": 32,
        "num_warps": 8 if rows == columns == 128 else 4, "num_stages": 3,
    }  # fmt: skip


def of_tiles(n_out: int, *, half: bool, forward: bool) -> dict[str, int]:
    """Return the options of kernels over tiles of the batch path.

    With fewer registers per thread, a multiprocessor runs more programs at once (H200).
    """
    block_j = max(16, next_power_of_2(n_out))
    few = block_j <= (64 if forward else 16)
    limited = half and block_j >= 64 and (forward or block_j == 64)
    return {
        "BLOCK_I": limits.TILE, "BLOCK_J": block_j, "BLOCK_K": 64 if half else 32,
        "num_stages": STAGES[forward], "num_warps": 4 if few else 8,
        **({"maxnreg": REGISTERS[forward]} if limited else {}),
    }  # fmt: skip
