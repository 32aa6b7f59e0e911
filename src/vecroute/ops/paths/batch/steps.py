"""The launches of the batch path, prepared for one plan: every size, stride, block and grid is bound here."""

from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl

from vecroute.ops.common import cdiv, compute_dtype, next_power_of_2
from vecroute.ops.fused_matrix import scores_matrix_backward_kernel, shared_rows_kernel, stacked_kernel
from vecroute.ops.fused_norm import normalize_backward_kernel, normalize_kernel
from vecroute.ops.fused_pairs import sum_samples_kernel
from vecroute.ops.fused_steps import (
    outputs_backward_kernel,
    outputs_kernel,
    predictions_backward_kernel,
    scores_matrix_kernel,
)
from vecroute.ops.launch import Launch, Memory, Product
from vecroute.ops.paths.batch import kernels
from vecroute.ops.plan import Plan

TILE = 64  # rows of a tile, of one sample
MULTIPROCESSORS = 132  # of an H200; a sum over inputs is cut into parts until about as many programs work


def aligned(n: int, to: int = 4) -> int:
    return cdiv(n, to) * to


def sizes_of(plan: Plan) -> SimpleNamespace:
    """The sizes, dtypes and precision of a plan, as the kernels take them."""
    case, cuda = plan.case, plan.case.device.type == "cuda"
    dtype = compute_dtype(case.dtype)
    # On a CPU kernels are interpreted, which cuts digits off instead of rounding to bfloat16.
    operand = torch.bfloat16 if case.dtype == torch.bfloat16 and cuda else dtype
    # float16 numbers are tf32 numbers too, so tf32 rounds no input.
    tf32 = case.tf32 or case.dtype in (torch.float16, torch.bfloat16)
    return SimpleNamespace(
        batch=plan.batch, n_inp=plan.n_inp, n_rows=plan.n_rows, n_out=case.n_out, d_inp=case.shape[-1],
        d_out=case.d_out, n_iters=case.n_iters, variable=case.variable, input_mask=case.input_mask,
        pair_mask=case.use_strides is not None, use_strides=case.use_strides or (0, 0, 0),
        packed=case.packed is not None, cu_dtype=case.packed[1] if case.packed else torch.int32, prior=case.prior,
        dtype=dtype, x_dtype=case.dtype, w_dtype=case.w_dtype, x_i=case.shape[-1], tf32=tf32,
        operand={torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}[operand],
        precision="ieee" if operand != torch.float32 else "tf32" if tf32 else "tf32x3",
    )  # fmt: skip


class Steps:
    """Prepared launches and memory of a plan."""

    def __init__(self, plan: Plan):
        self.s = s = sizes_of(plan)
        self.T = tl.float64 if s.dtype == torch.float64 else tl.float32
        self.n_own = s.n_out * (2 * s.n_iters - 1)  # rows of M that each sample has for itself
        self.n_shared = aligned(2 * s.n_out + 2) if s.variable else 0  # c_sum, c_ign, two of a_inp, zeros
        self.n_pairs = self.n_own + self.n_shared
        self.pairs_i = aligned(self.n_pairs, 16)  # so that kernels load 16 bytes at once
        self.whole = {  # what every kernel over tiles takes
            "PACKED": s.packed, "OPERAND": s.operand, "PRECISION": s.precision, "T": self.T,
        }  # fmt: skip
        self.unused = s.input_mask or s.pair_mask
        self.memory()
        self.forward()
        self.backward()

    def memory(self) -> None:
        s, dtype = self.s, self.s.dtype
        b, r, j, d, h = s.batch, s.n_rows, s.n_out, s.d_inp, s.d_out
        saved = {"f": (r,), "M": (b, self.n_own, d), "sqrt_n_inp": (b,)}
        if s.variable:
            saved |= {"c": (r, 2 * j), "shared": (self.n_shared, d), "bias": (self.n_shared,)}
        for t in range(s.n_iters):
            saved |= {f"y{t}": (b, j, d), f"s{t}": (b, j)}
            if t < s.n_iters - 1:
                saved |= {f"before{t}": (b, j, h), f"g{t}": (b, j, d)}
        n_parts, q = self.sum_phi_parts()[1], j
        temporary = {"phi": (r, j), "u": (b, j, d), "v": (b, j, h)}
        if n_parts > b or s.packed:
            temporary |= {"parts": (n_parts, q, d), "part_totals": (n_parts, q)}
        back = {
            "results": (r, self.pairs_i), "grad_f": (r,), "grad_u": (b, j, d), "u": (b, j, d), "v": (b, j, h),
            "grad_v": (b, j, h), "grad_g": (b, j, d), "grad_s": (b, j), "grad_x_hat": (b, j, d),
            "sums": (b, j), "grad_x_out": (b, j, h), "parts_S": (2, b, j), "M_T": (b, d, self.pairs_i),
        }  # fmt: skip
        if n_parts > b or s.packed:
            back |= {"parts": (n_parts, q, d), "part_totals": (n_parts, q)}
        if s.variable:
            n = self.parts(r, 1, self.n_shared)[1]
            back |= {"grad_shared": (self.n_shared, d), "shared_sums": (self.n_shared,)}
            back |= {"shared_parts": (n, self.n_shared, d), "shared_totals": (n, self.n_shared)}
        else:
            back |= {"pair_parts": (4, b, s.n_inp, j)}
        of_floats = [{name: (shape, dtype) for name, shape in arrays.items()} for arrays in (saved, temporary, back)]
        if s.packed:
            tables = {"tiles": cdiv(r, TILE) + b, "part_table": n_parts}
            of_floats[0] |= {name: ((n, 3), torch.int32) for name, n in tables.items()}
        self.saved, self.temporary, self.back = map(Memory, of_floats)

    def sum_phi_parts(self) -> tuple[int, int]:
        """Rows of a part of a sum over the inputs of each sample, and how many parts all samples have."""
        s = self.s
        if s.packed:
            rows = min(max(256, next_power_of_2(max(1, s.n_rows // 32))), 2048)
            return rows, cdiv(s.n_rows, rows) + s.batch
        rows, n = self.parts(s.n_inp, s.batch, s.n_out)
        return rows, n * s.batch

    def parts(self, n_inp: int, batch: int, columns: int) -> tuple[int, int]:
        """Rows of a part of a sum over inputs, a multiple of 64, and how many parts a sample has."""
        block_q, block_d = self.sum_blocks(columns)
        programs = batch * cdiv(self.s.d_inp, block_d) * cdiv(columns, block_q)
        n = max(1, min(cdiv(n_inp, 256), cdiv(2 * MULTIPROCESSORS, programs)))
        rows = aligned(cdiv(n_inp, n), 64)
        return rows, cdiv(n_inp, rows)

    def sum_blocks(self, columns: int) -> tuple[int, int]:
        """Columns of pairs and features of x_inp that a program of a sum has."""
        return max(16, min(64, next_power_of_2(columns))), 128

    def tiles(self, kernel: Any, n_pointers: str, sizes: tuple, blocks: dict, **constants: Any) -> Launch:
        """A kernel over tiles; n_pointers has a letter for the dtype of each pointer."""
        s = self.s
        n, per_sample = self.n_tiles()
        whole = {k: v for k, v in (self.whole | constants | blocks).items()}
        return Launch(kernel, (n, 1, 1), self.dtypes(n_pointers), (s.n_inp, per_sample, *sizes), **whole)

    def n_tiles(self) -> tuple[int, int]:
        """How many tiles there are, and how many a sample has; of packed samples an upper bound, and 1."""
        s = self.s
        if s.packed:
            return cdiv(s.n_rows, TILE) + s.batch, 1
        per_sample = cdiv(s.n_inp, TILE)
        return s.batch * per_sample, per_sample

    def dtypes(self, letters: str) -> list[torch.dtype]:
        """x: of x_inp, w: of the parameters, f: of everything in between, m: masks, i: tables, o: cu_seqlens."""
        s = self.s
        by = {"o": s.cu_dtype, "x": s.x_dtype, "w": s.w_dtype, "f": s.dtype, "m": torch.uint8, "i": torch.int32}
        return [by[letter] for letter in letters]

    def forward(self) -> None:
        s = self.s
        b, j, d, h, dtype = s.batch, s.n_out, s.d_inp, s.d_out, s.dtype
        block_j = max(16, next_power_of_2(j))
        kept = {"FIXED": not s.variable, "MASKED": s.pair_mask}
        use = s.use_strides
        blocks = {"BLOCK_I": TILE, "BLOCK_J": block_j, "BLOCK_K": 32, "num_warps": 4 if block_j <= 64 else 8, "num_stages": 3}
        if s.packed:
            rows, n_parts = self.sum_phi_parts()
            n_tiles, steps = self.n_tiles()[0], (b - 1).bit_length()
            n = cdiv(max(b, n_tiles, n_parts), 256)
            self.segments = Launch(
                kernels.segments_kernel, (n, 1, 1), self.dtypes("ofii"), (s.n_rows, b, n_tiles, n_parts, steps, 2**steps // 2),
                TILE=TILE, PART=rows, BLOCK=256, T=self.T,
            )  # fmt: skip
        else:
            self.lengths = Launch(
                kernels.lengths_kernel, (b, 1, 1), self.dtypes("mf"), (s.n_inp,), COUNTED=s.input_mask, BLOCK_I=1024,
                T=self.T,
            )  # fmt: skip
        if s.variable:
            grid = cdiv(self.n_shared, 32), cdiv(d, 32), 1
            self.shared_rows = Launch(
                shared_rows_kernel, grid, self.dtypes("wwwwwff"), (j, self.n_shared, d), PRIOR=0.0, FLAT=False,
                WITH_SUM=True, BLOCK_Q=32, BLOCK_D=32, T=self.T,
            )  # fmt: skip
        self.first = self.tiles(
            kernels.first_kernel, "xffwwwwfmmifff", (j, d, s.x_i, *use), blocks, PRIOR=s.prior, INPUTS=s.input_mask, **kept
        )
        c_i, c_0, c = (2 * j, j, "ff") if s.variable else (j, 0, "ww")
        self.next = [
            self.tiles(
                kernels.next_kernel, f"xf{c}wwfmif", (j, d, s.x_i, self.n_own * d, (2 * k - 1) * j * d, c_i, c_0, *use),
                blocks, UNUSED=self.unused, **kept,
            )
            for k in range(s.n_iters)
        ]  # fmt: skip
        self.sum_phi = self.sum(j, j, 0)
        by_row = row_blocks(max(d, h))
        n = cdiv(b * j, by_row["BLOCK_R"])
        self.outputs = Launch(
            outputs_kernel, (n, 1, 1), self.dtypes("fffwwff"), (b * j, j, d, h), T=self.T, **by_row
        )
        self.out_product = Product((b * j, h, d), dtype, dtype, tf32=s.tf32)
        self.normalize = self.rows_of_outputs(normalize_kernel, "ff", h)
        self.predict = Product((b * j, d, h), dtype, dtype, tf32=s.tf32)
        by_row = row_blocks(d)
        n = cdiv(b * j, by_row["BLOCK_R"])
        self.scores_matrix = [
            Launch(
                scores_matrix_kernel, (n, 1, 1), self.dtypes("fwwwf"),
                (b * j, j, d, self.n_own * d, (2 * k + 1) * j * d), FIXED=not s.variable, T=self.T, **by_row,
            )
            for k in range(s.n_iters - 1)
        ]  # fmt: skip

    def rows_of_outputs(self, kernel: Any, letters: str, h: int) -> Launch:
        """A kernel whose programs have whole vectors of outputs."""
        n, block = self.s.batch * self.s.n_out, next_power_of_2(h)
        rows = max(1, 2048 // block)
        return Launch(kernel, (cdiv(n, rows), 1, 1), self.dtypes(letters), (n, h), BLOCK_R=rows, BLOCK_D=block)

    def sum(self, columns: int, pairs_i: int, pairs_0: int, whole: bool = False) -> Any:
        """Sums over inputs, of each sample or of all (``whole``): of parts, and what adds up several parts.

        Args:
            columns, pairs_i, pairs_0: how many columns of pairs, the stride of their rows, the first column.
        """
        s, packed = self.s, self.s.packed and not whole
        n_inp, batch = (s.n_rows, 1) if whole else (s.n_inp, s.batch)
        rows, n = self.parts(n_inp, batch, columns)
        n_parts = n * batch
        if packed:
            rows, n_parts = self.sum_phi_parts()
        block_q, block_d = self.sum_blocks(columns)
        parts = Launch(
            kernels.sums_kernel, (cdiv(s.d_inp, block_d), n_parts, cdiv(columns, block_q)), self.dtypes("fxfiff"),
            (n_inp, n, columns, s.d_inp, pairs_i, pairs_0, s.x_i), UNUSED=self.unused, PART=rows, BLOCK_I=32,
            BLOCK_Q=block_q, BLOCK_D=block_d, num_warps=4, num_stages=3, **(self.whole | {"PACKED": packed}),
        )  # fmt: skip
        add = Launch(
            kernels.reduce_kernel, (cdiv(columns * s.d_inp, 1024), batch, 1), self.dtypes("ffoff"),
            (n, columns * s.d_inp, columns, s.n_rows), PACKED=packed, PART=rows, BLOCK_N=1024, T=self.T,
        )  # fmt: skip
        return SimpleNamespace(parts=parts, add=add if packed or n > 1 else None)

    def backward(self) -> None:
        s = self.s
        b, j, d, h, dtype = s.batch, s.n_out, s.d_inp, s.d_out, s.dtype
        block_j = max(16, next_power_of_2(j))
        use = s.use_strides
        kept = {"FIXED": not s.variable, "MASKED": s.pair_mask, "UNUSED": self.unused}
        blocks = {"BLOCK_I": TILE, "BLOCK_J": block_j, "BLOCK_K": 32, "num_warps": 4 if block_j <= 32 else 8, "num_stages": 3}
        self.grad_u = Product((b * j, d, h), dtype, dtype, transposed=(False, True), tf32=s.tf32)
        sums, by_row = sum_blocks(b), row_blocks(h)
        n_W, n_B, n_s = cdiv(j * d, sums["BLOCK_N"]), cdiv(j * h, sums["BLOCK_N"]), cdiv(b * j, by_row["BLOCK_R"])
        blocks_of = [2 * k - 2 if k else 2 * s.n_iters - 2 for k in range(s.n_iters)]  # of grad_y in M
        fresh = [int(k == s.n_iters - 1) for k in range(s.n_iters)]
        self.outputs_backward = [
            Launch(
                outputs_backward_kernel, (n_W + n_B + n_s, 1, 1), self.dtypes("fffffwwffffff"),
                (n_W, n_B, b, b * j, j, h, j * d, j * h, self.n_own * d, blocks_of[k] * j * d, b, fresh[k], fresh[k]),
                ONE=False, ROUNDS=False, T=self.T, **sums, **by_row,
            )
            for k in range(s.n_iters)
        ]  # fmt: skip
        self.grad_W_F2 = Product((d, h, b * j), dtype, dtype, transposed=(True, False), tf32=s.tf32)
        c_i, c_0, c = (2 * j, j, "ff") if s.variable else (j, 0, "ww")

        def sizes(k: int, *others: int) -> tuple[int, ...]:
            of_M = self.n_own * d, blocks_of[k] * j * d
            return (
                j, d, s.x_i, *of_M, c_i, c_0, *use, self.pairs_i, blocks_of[k] * j, self.n_own, s.n_inp * j, *others,
            )  # fmt: skip

        self.next_backward = [
            self.tiles(kernels.next_backward_kernel, f"xf{c}wwffmifff", sizes(k), blocks, FRESH=bool(fresh[k]), **kept)
            for k in range(s.n_iters)
        ]
        self.first_backward = self.tiles(
            kernels.first_backward_kernel, f"xf{c}fffmifff", sizes(0, self.n_shared - 2 * j), blocks, PRIOR=s.prior,
            FRESH=bool(fresh[0]), **kept
        )
        self.sum_dot = [self.sum(j, self.pairs_i, (2 * k - 1) * j) for k in range(s.n_iters)]
        by_row = row_blocks(d)
        self.scores_matrix_backward = Launch(
            scores_matrix_backward_kernel, (cdiv(b * j, by_row["BLOCK_R"]), 1, 1), self.dtypes("ffwwwff"),
            (b * j, j, d, j * d, j), T=self.T, **by_row,
        )  # fmt: skip
        self.sum_S = [self.sum_samples(2, j, fresh[k]) for k in range(s.n_iters)]
        self.predictions_backward = [
            Launch(
                predictions_backward_kernel, (n_W, 1, 1), self.dtypes("ffwfff"), (b, j * d, j * d, b, fresh[k]), OF_B=True,
                T=self.T, **sums,
            )
            for k in range(s.n_iters)
        ]  # fmt: skip
        self.grad_v = Product((b * j, h, d), dtype, dtype, transposed=(False, True), tf32=s.tf32)
        self.normalize_backward = self.rows_of_outputs(normalize_backward_kernel, "ffff", h)
        self.grad_W_G1 = Product((h, d, b * j), dtype, dtype, transposed=(True, False), tf32=s.tf32)
        grid = cdiv(self.n_pairs, 32), cdiv(d, 32), b
        stacked = (self.n_own, self.n_pairs, d, self.n_own * d, d * self.pairs_i, self.pairs_i)
        self.stack = Launch(stacked_kernel, grid, self.dtypes("fff"), stacked, BLOCK_Q=32, BLOCK_D=32)
        if s.variable:
            self.sum_shared = self.sum(self.n_shared, self.pairs_i, self.n_own, whole=True)
            grid = cdiv(j, 32), cdiv(d, 32), 1
            self.shared_backward = Launch(
                kernels.shared_backward_kernel, grid, self.dtypes("ffffffff"), (j, d), BLOCK_Q=32, BLOCK_D=32
            )
        else:
            self.sum_pairs = self.sum_samples(4 if s.n_iters > 1 else 2, s.n_inp * j, 1)
            few = s.n_inp * d <= 2**17
            rows, block_d = (1, 256) if few else (4, 512)
            self.activations_backward = Launch(
                kernels.activations_backward_kernel, (cdiv(s.n_inp, rows), cdiv(d, block_d), 1), self.dtypes("xfffff"),
                (b, s.n_inp, d, s.x_i), UNUSED=self.unused, BLOCK_I=rows, BLOCK_D=block_d, T=self.T,
            )  # fmt: skip
        block_d = 128
        n_blocks = cdiv(d, block_d)
        whole = {k: v for k, v in self.whole.items()}
        n_tiles, per_sample = self.n_tiles()
        self.input_gradient = Launch(
            kernels.input_gradient_kernel, (n_tiles * n_blocks, 1, 1), self.dtypes("ffffwix"),
            (s.n_inp, per_sample, self.n_pairs, d, self.pairs_i, self.pairs_i, n_blocks), FIXED=not s.variable,
            UNUSED=self.unused, BLOCK_I=TILE, BLOCK_D=block_d, BLOCK_K=32, num_warps=4, num_stages=3, **whole,
        )  # fmt: skip

    def sum_samples(self, k: int, n: int, fresh: int) -> Launch:
        """The sum over samples of k arrays [b, n]."""
        return Launch(
            sum_samples_kernel, (cdiv(n, 32), k, 1), self.dtypes("fffff"), (self.s.batch, n, fresh), BLOCK_B=32,
            BLOCK_N=32, T=self.T,
        )  # fmt: skip


def row_blocks(n: int) -> dict[str, int]:
    """Rows, and features of a row of n."""
    block = min(next_power_of_2(n), 1024)
    return {"BLOCK_R": 1024 // block, "BLOCK_D": block}


def sum_blocks(b: int) -> dict[str, int]:
    """Samples to sum over, and numbers of each."""
    block = min(next_power_of_2(b), 32)
    return {"BLOCK_B": block, "BLOCK_N": 1024 // block}
