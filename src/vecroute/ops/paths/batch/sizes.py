"""Sizes and memory of the batch path. Compilers trace this file with lengths that they do not know."""

import torch

from vecroute.ops.common import cdiv, compute_dtype
from vecroute.ops.launch import Memory
from vecroute.ops.plan import Plan, limits
from vecroute.ops.plan.limits import PACKED_TILES, TILE


def aligned(n: int, to: int) -> int:
    return cdiv(n, to) * to


class Sizes:
    """Sizes that the launches of a plan share, and the arrays ``saved`` until the backward pass."""

    def __init__(self, plan: Plan):
        case = self.case = plan.case
        self.batch, self.n_inp, self.n_rows = plan.batch, plan.n_inp, plan.n_rows
        self.dtype, self.packed, self.half = compute_dtype(case.dtype), case.packed is not None, plan.half
        self.n_out, self.d, self.h, self.last = case.n_out, case.shape[-1], case.d_out, case.n_iters - 1
        self.normalized = case.normalized and self.h > 1
        self.x_i = aligned(self.d, 64) if self.half else self.d
        self.n_M = self.n_out * (2 * case.n_iters - 1)  # rows of M that differ between samples
        self.n_shared = (
            2 * self.n_out if case.variable else 0
        )  # rows of M that all samples share, for c_sum and c_ign
        self.results_i = aligned(self.n_M + self.n_shared, 16)  # so that kernels load 16 bytes at once
        # Whether cuBLAS multiplies between two passes. It is faster for large products, but adds launches.
        n_products = self.batch * self.n_out * self.d * self.h
        self.large = case.w_dtype == self.dtype and n_products >= limits.LARGE_PRODUCT
        self.unused = case.input_mask or case.use_strides is not None
        self.use = case.use_strides or (0, 0, 0)
        self.per_sample = 1 if self.packed else cdiv(self.n_inp, TILE)
        self.n_tiles = cdiv(self.n_rows, TILE) + self.batch if self.packed else self.batch * self.per_sample
        # For each iteration, the block of M that holds grad_y.
        self.blocks_of = [2 * k - 2 if k else 2 * self.last for k in range(case.n_iters)]
        self.M_dtype = torch.float16 if self.half else self.dtype
        self.saved = self.make_saved()

    def packed_parts(self) -> int:
        """Return an upper bound for the number of parts of all sums over the inputs of packed samples."""
        return cdiv(self.n_rows, PACKED_TILES * TILE) + self.batch

    def make_saved(self) -> Memory:
        case, b, r, j, d, h = self.case, self.batch, self.n_rows, self.n_out, self.d, self.h
        q, f, M = self.n_shared, self.dtype, self.M_dtype
        arrays: dict[str, tuple] = {
            "f": ((r,), f), "sqrt_n_inp": ((b,), f), "M": ((b, self.n_M, self.x_i), M),
        }  # fmt: skip
        if self.half:
            arrays |= {"x": ((r, self.x_i), M), "x_tops": ((r,), f), "M_tops": ((b, self.n_M), f)}
        if case.variable:
            arrays |= {
                "c": ((r, 2 * j), f), "shared": ((q, self.x_i), M), "bias": ((q,), f),
                "shared_tops": ((q,), f),
            }  # fmt: skip
        for k in range(case.n_iters):
            arrays |= {f"y{k}": ((b, j, d), f), f"s{k}": ((b, j), f)}
            if k < self.last or self.normalized:
                arrays |= {f"before{k}": ((b, j, h), f)}
            if k < self.last:
                arrays |= {f"g{k}": ((b, j, d), f)}
        if self.packed:
            arrays |= {
                "tiles": ((self.n_tiles, 3), torch.int32),
                "parts": ((self.packed_parts(), 4), torch.int32),
            }
        return Memory(arrays)
