"""The launches of the batch path, prepared for one plan: every size, stride, block and grid is bound here."""

from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl

from vecroute.ops.backends.fused.matrix import scores_matrix_backward_kernel
from vecroute.ops.backends.fused.norm import normalize_backward_kernel, normalize_kernel
from vecroute.ops.backends.fused.pair_kernels import sum_samples_kernel
from vecroute.ops.backends.fused.steps import (
    outputs_backward_kernel,
    outputs_kernel,
    predictions_backward_kernel,
    scores_matrix_kernel,
)
from vecroute.ops.common import Weights, cdiv, next_power_of_2
from vecroute.ops.launch import Launch, Memory, Product
from vecroute.ops.paths.batch import backward_kernels, forward_kernels, products, segments, sum_kernels
from vecroute.ops.paths.batch.sizes import Sizes
from vecroute.ops.plan import Plan, blocks
from vecroute.ops.plan.limits import LEAST_PROGRAMS, PACKED_TILES, TILE, WORKSPACE
from vecroute.ops.plan.limits import W_A_PROGRAMS as EXTRA
from vecroute.ops.recording import Pass

TL = {
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
    torch.float64: tl.float64,
}  # fmt: skip


class Sum(NamedTuple):
    """The launches of a sum over inputs: one for the parts, one that adds them (None for one part)."""

    parts: Launch
    add: Launch | None


class Steps(Sizes):
    """Prepared launches of a plan, memory of each pass, and both passes.

    ``weights`` and ``grads`` are the names of the parameters and of their gradients, in the order of a call.
    """

    forward: Pass
    backward: Pass

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.weights = Weights.names(plan.case.variable)
        self.grads = [f"grad_{name}" for name in self.weights]
        self.T = TL[self.dtype]
        operand = torch.float16 if self.half else plan.operand_dtype
        # The rounding of products of small matrices.
        small = "ieee" if self.dtype == torch.float64 else "tf32" if self.case.tf32 else "tf32x3"
        self.small = {"PRECISION": small, "T": self.T}
        self.precision = {"HALF": self.half, "OPERAND": TL[operand], "PRECISION": plan.precision}
        self.make_memory()
        self.make_forward()
        self.make_backward()

    def kernels(self) -> list[str]:
        """Return the launches, each once, with their grids."""
        found: dict[str, None] = {}
        for value in vars(self).values():
            for each in value if isinstance(value, list | Sum) else (value,):
                if isinstance(each, Launch | Product):
                    found[str(each)] = None
        return list(found)

    # Sizes

    def parts(self, columns: int, whole: bool = False) -> tuple[int, int, int]:
        """Return tiles per part of a sum over inputs, parts per sample, and parts in all."""
        if self.packed and not whole:
            return PACKED_TILES, 1, self.packed_parts()
        n_tiles, batch = (self.n_tiles, 1) if whole else (self.per_sample, self.batch)
        block_q, block_d = blocks.of_sums(columns)
        programs = batch * cdiv(self.d, block_d) * cdiv(columns, block_q)
        tiles = cdiv(n_tiles, max(1, min(cdiv(n_tiles, 4), cdiv(LEAST_PROGRAMS, programs))))
        n = cdiv(n_tiles, tiles)
        return tiles, n, n * batch

    def dtypes(self, letters: str) -> list[torch.dtype]:
        """Return the dtypes for letters, see ``by_letter``."""
        return [self.by_letter[letter] for letter in letters]

    @cached_property
    def by_letter(self) -> dict[str, torch.dtype]:
        """Dtypes. x: x_inp in products, X: x_inp, M: M in products, w: parameters, p: pairs to be summed,
        f: other floating-point numbers, m: masks, i: tables, o: cu_seqlens."""
        case, half = self.case, torch.float16
        by = {"X": case.dtype, "x": half if self.half else case.dtype, "M": half if self.half else self.dtype}
        by |= {"w": case.w_dtype, "f": self.dtype, "p": half if self.half else self.dtype, "m": torch.uint8}
        by |= {"i": torch.int32, "o": case.packed[1] if case.packed else torch.int32}
        return by

    def make_memory(self) -> None:
        case, b, r, j, d, h = self.case, self.batch, self.n_rows, self.n_out, self.d, self.h
        n_tiles, q, f = self.n_tiles, self.n_shared, self.dtype
        _, _, n_parts = self.parts(j)
        workspace = {"workspace": ((WORKSPACE,), torch.uint8)} if self.large else {}
        pairs = self.dtypes("p")[0]
        temporary: dict[str, tuple] = {"phi": ((r, j), pairs)}
        if self.large:
            temporary |= {"u": ((b, j, d), f), "v": ((b, j, h), f)}
        temporary |= {"tops": ((n_tiles,), f), "tile_sums": ((n_tiles, j), f)}
        back: dict[str, tuple] = {
            "results": ((r, self.results_i), pairs), "row_tops": ((case.n_iters, r), f), "grad_f": ((r,),
                f), "grad_u": ((b, j, d), f), "u": ((b, j, d), f),
            "v": ((b, j, h), f), "grad_v": ((b, j, h), f), "grad_g": ((b, j, d), f), "grad_s": ((b, j), f),
            "grad_x_hat": ((b, j, d), f), "sums": ((b, j), f), "grad_x_out": ((b, j, h), f),
            "parts_S": ((2, b, j), f), "to_sum": ((r, max(j, q)), pairs), "tops": ((n_tiles,), f),
            "tile_sums": ((n_tiles, max(j, q + 1)), f),
        }  # fmt: skip
        rows: dict[str, tuple] = (
            {"rows": ((b * j, d), f)} if self.half else {}
        )  # rows of M before they become halves
        sums: dict[str, tuple] = {"sum_parts": ((n_parts, j, d), f), "sum_totals": ((n_parts, j), f)}
        if case.variable:
            _, _, n = self.parts(q, whole=True)
            back |= {
                "grad_c": ((r, 2 * j), f),
                "grad_shared": ((q + EXTRA, d), f),
                "shared_sums": ((q + EXTRA,), f),
            }
            back |= {"whole_parts": ((n, q + EXTRA, d), f), "whole_totals": ((n, q + EXTRA), f)}
        else:
            back |= {"grad_c": ((4, b, self.n_inp, j), f)}
        self.temporary, self.back = (Memory(arrays | rows | sums | workspace) for arrays in (temporary, back))

    # Launches

    def tiles(self, kernel: Any, letters: str, sizes: tuple, block: dict, **constants: Any) -> Launch:
        """Prepare a kernel over tiles, with one letter for the dtype of each pointer."""
        constants = {**constants, "PACKED": self.packed, **self.precision, **block}
        sizes = self.n_inp, self.per_sample, *sizes
        return Launch(kernel, (self.n_tiles, 1, 1), self.dtypes(letters), sizes, **constants)

    def make_forward(self) -> None:
        case, b, j, d = self.case, self.batch, self.n_out, self.d
        kinds = {"FIXED": not case.variable, "MASKED": case.use_strides is not None}
        self.make_lengths()
        block_d = next_power_of_2(self.x_i) if self.half else min(1024, next_power_of_2(d))
        rows = max(1, min(TILE, 4096 // block_d))
        self.inputs = Launch(
            forward_kernels.inputs_kernel, (TILE // rows, self.n_tiles, 1), self.dtypes("Xwwfmmifxf"),
            (self.n_inp, self.per_sample, j, d, *self.use, self.x_i), INPUTS=case.input_mask,
            PACKED=self.packed,
            HALF=self.half, TILE=TILE, BLOCK_I=rows, BLOCK_J=next_power_of_2(j), BLOCK_D=block_d, T=self.T,
            **kinds,
        )  # fmt: skip
        kinds |= {"UNUSED": self.unused}
        block = blocks.of_tiles(j, half=self.half, forward=True)
        shown = [case.need_phi and k == self.last for k in range(case.n_iters)]
        self.first = self.tiles(
            forward_kernels.first_kernel, "xMfffwwfmifpfff", (j, self.x_i, *self.use), block,
            PRIOR=case.prior, SHOWN=shown[0], **kinds,
        )  # fmt: skip
        c = "ff" if case.variable else "ww"
        self.next = [
            self.tiles(
                forward_kernels.next_kernel, f"xMff{c}wwfmipfff",
                (j, self.x_i, self.n_M, (2 * k - 1) * j, *self.use), block, SHOWN=shown[k], **kinds,
            )
            for k in range(case.n_iters)
        ]  # fmt: skip
        self.sum_pairs_j = self.sum(j)
        self.make_small_forward()
        self.x_hat_halves = [
            self.halves(j, b, self.n_M, (2 * k + 1) * j) for k in range(self.last) if self.half
        ]

    def make_small_forward(self) -> None:
        """Prepare F and G: large products by cuBLAS, others by kernels that also do the work around them."""
        case, b, j, d, h = self.case, self.batch, self.n_out, self.d, self.h
        self.normalize = self.by_vectors(normalize_kernel, "ff")
        if not self.large:
            block = blocks.of_product(b * j, h)
            self.outputs = Launch(
                products.outputs_kernel, block.pop("grid"), self.dtypes("fffwwwf"), (b * j, j, d, h),
                **self.small, **block,
            )  # fmt: skip
            block = blocks.of_product(b * j, d)
            grid = block.pop("grid")
            # x_hat goes to M, or to rows of its own if M holds halves.
            self.predictions = [
                Launch(
                    products.predictions_kernel, grid, self.dtypes("fwwwwff"), (b * j, j, d, h,
                        *self.own_rows((2 * k + 1) * j)),
                    FIXED=not case.variable, NORMALIZE=h > 1, **self.small, **block,
                )
                for k in range(self.last)
            ]  # fmt: skip
            return
        by_row = blocks.of_rows(max(d, h))
        n = cdiv(b * j, by_row["BLOCK_R"])
        self.outputs = Launch(
            outputs_kernel, (n, 1, 1), self.dtypes("fffwwff"), (b * j, j, d, h), T=self.T, **by_row
        )
        self.out_product = Product((b * j, h, d), self.dtype, workspace=WORKSPACE, add=True, tf32=case.tf32)
        self.predict = Product((b * j, d, h), self.dtype, workspace=WORKSPACE, tf32=case.tf32)
        by_row = blocks.of_rows(d)
        n = cdiv(b * j, by_row["BLOCK_R"])
        self.scores_matrix = [
            Launch(
                scores_matrix_kernel, (n, 1, 1), self.dtypes("fwwwf"), (b * j, j, d,
                                                                        *self.own_rows((2 * k + 1) * j)),
                FIXED=not case.variable, T=self.T, **by_row,
            )
            for k in range(self.last)
        ]  # fmt: skip

    def by_vectors(self, kernel: Any, letters: str) -> Launch:
        """Prepare a kernel whose programs handle whole output vectors."""
        n, block = self.batch * self.n_out, blocks.of_vectors(self.h)
        grid = cdiv(n, block["BLOCK_R"]), 1, 1
        return Launch(kernel, grid, self.dtypes(letters), (n, self.h), **block)

    def own_rows(self, first: int) -> tuple[int, int]:
        """Return stride of samples and offset of the float32 rows of M, from row ``first`` on."""
        return (self.n_out * self.d, 0) if self.half else (self.n_M * self.d, first * self.d)

    def product(
        self, sizes: tuple[int, int, int], *, transposed: tuple[bool, bool], add: bool = False
    ) -> Any:
        """Prepare a product of contiguous matrices. ``transposed`` says which operands are transposed."""
        if self.large:
            return Product(
                sizes, self.dtype, workspace=WORKSPACE, transposed=transposed, add=add, tf32=self.case.tf32
            )
        m, n, k = sizes
        a = (1, m) if transposed[0] else (k, 1)
        b = (1, k) if transposed[1] else (n, 1)
        block = blocks.of_product(m, n)
        letters = "fwf" if transposed[1] else "fff"  # W_F2 and W_G1 are parameters
        return Launch(
            products.product_kernel, block.pop("grid"), self.dtypes(letters), (*sizes, *a, *b), ADD=add,
            **self.small, **block,
        )  # fmt: skip

    def make_lengths(self) -> None:
        """Prepare the lengths of samples, and the rows of M that all samples share."""
        case, b, counts = self.case, self.batch, {"COUNTED": self.case.input_mask, "T": self.T}
        if case.variable:
            n = 2 * self.n_out + (0 if self.packed else b)
            block_d = next_power_of_2(self.x_i) if self.half else min(1024, next_power_of_2(self.d))
            self.shared_rows = Launch(
                products.shared_rows_kernel, (n, 1, 1), self.dtypes("wwwwmfMff"), (self.n_out, self.d,
                                                                                    self.x_i, self.n_inp),
                LENGTHS=not self.packed, HALF=self.half, BLOCK_D=block_d, **counts,
            )  # fmt: skip
        else:
            self.lengths = Launch(
                products.lengths_kernel, (b, 1, 1), self.dtypes("mf"), (self.n_inp,), **counts
            )
        if not self.packed:
            return
        tiles, _, n_parts = self.parts(self.n_out)
        steps = (b - 1).bit_length()
        self.segments = Launch(
            segments.segments_kernel, (cdiv(max(b, self.n_tiles, n_parts), 256), 1, 1), self.dtypes("ofii"),
            (self.n_rows, b, self.n_tiles, n_parts, steps, 2**steps // 2), TILE=TILE, PART=tiles * TILE,
            BLOCK=256,
            T=self.T,
        )  # fmt: skip

    def halves(self, n: int, batch: int, of: int, first: int) -> Launch:
        """Prepare the conversion of rows [batch, n, d] to halves in M [batch, of, x_i], from ``first`` on."""
        sizes = first, self.d, n * self.d, of * self.x_i, of, self.x_i
        block = {"BLOCK_D": next_power_of_2(self.x_i)}
        return Launch(forward_kernels.halves_kernel, (n, batch, 1), self.dtypes("fMf"), sizes, **block)

    def sum(self, columns: int, whole: bool = False) -> Sum:
        """Prepare sums of pairs [.., columns] over the inputs of each sample, or of all samples if whole."""
        packed = self.packed and not whole
        tiles, n, n_parts = self.parts(columns, whole)
        block_q, block_d = blocks.of_sums(columns)
        extra = EXTRA if whole else 0
        sizes = self.dtypes("p")[0].itemsize, self.dtypes("x")[0].itemsize
        stages = blocks.sum_stages(columns, sizes, self.case.device.shared_bytes)
        n_tiles, batch = (self.n_tiles, 1) if whole else (self.per_sample, self.batch)
        parts = Launch(
            sum_kernels.sums_kernel, (cdiv(self.d, block_d), n_parts, cdiv(columns, block_q) + extra),
            self.dtypes("pxfffiiffff"),
            (self.n_inp, self.per_sample, columns, self.d, self.x_i, n_tiles, n, tiles), WHOLE=whole,
            EXTRA=extra, PACKED=self.packed, UNUSED=self.unused, BLOCK_I=TILE, BLOCK_Q=block_q,
            BLOCK_D=block_d, STAGES=stages,
            num_warps=8 if block_q > 64 or whole else 4, **self.precision,
        )  # fmt: skip
        n_sums = columns + extra
        at_once = 4 if packed else min(8, next_power_of_2(n))
        block = 1024 // at_once
        add = Launch(
            sum_kernels.reduce_kernel, (cdiv(n_sums * self.d, block), batch, 1), self.dtypes("ffoff"),
            (n, n_sums * self.d, n_sums, self.n_rows), PACKED=packed, PART=PACKED_TILES * TILE, PARTS=at_once,
            BLOCK_N=block, T=self.T,
        )  # fmt: skip
        return Sum(parts, add if packed or n > 1 else None)

    def make_backward(self) -> None:
        case, b, j, d, h = self.case, self.batch, self.n_out, self.d, self.h
        iterations = range(case.n_iters)
        fresh = [int(k == self.last) for k in iterations]
        self.grad_u = self.product((b * j, d, h), transposed=(False, True))
        sums, by_row = blocks.of_samples(b, 8 if b <= 64 else 32), blocks.of_rows(h)
        n_W, n_B, n_s = (
            cdiv(j * d, sums["BLOCK_N"]), cdiv(j * h, sums["BLOCK_N"]), cdiv(b * j, by_row["BLOCK_R"]),
        )  # fmt: skip
        self.outputs_backward = [
            Launch(
                outputs_backward_kernel, (n_W + n_B + n_s, 1, 1), self.dtypes("fffffwwffffff"),
                (n_W, n_B, b, b * j, j, h, j * d, j * h, *self.own_rows(self.blocks_of[k] * j), b, fresh[k],
                 fresh[k]), ONE=False, ROUNDS=False, T=self.T, **sums, **by_row,
            )
            for k in iterations
        ]  # fmt: skip
        self.grad_y_halves = [
            self.halves(j, b, self.n_M, self.blocks_of[k] * j) for k in iterations if self.half
        ]
        self.grad_W_F2 = [
            self.product((d, h, b * j), transposed=(True, False), add=not fresh[k]) for k in iterations
        ]
        self.make_pairs_backward(fresh)
        by_row = blocks.of_rows(d)
        self.scores_matrix_backward = Launch(
            scores_matrix_backward_kernel, (cdiv(b * j, by_row["BLOCK_R"]), 1, 1), self.dtypes("ffwwwff"),
            (b * j, j, d, j * d, j), T=self.T, **by_row,
        )  # fmt: skip
        self.sum_S = [self.sum_samples(2, j, fresh[k]) for k in iterations]
        self.predictions_backward = [
            Launch(
                predictions_backward_kernel, (n_W, 1, 1), self.dtypes("ffwfff"), (b, j * d, j * d, b,
                                                                                  fresh[k]), OF_B=True,
                T=self.T, **sums,
            )
            for k in iterations
        ]  # fmt: skip
        self.grad_v = self.product((b * j, h, d), transposed=(False, True))
        self.normalize_backward = self.by_vectors(normalize_backward_kernel, "ffff")
        self.grad_W_G1 = [
            self.product((h, d, b * j), transposed=(True, False), add=not fresh[k]) for k in iterations
        ]

    def make_pairs_backward(self, fresh: list[int]) -> None:
        case, b, j, d = self.case, self.batch, self.n_out, self.d
        kinds = {"FIXED": not case.variable, "MASKED": case.use_strides is not None, "UNUSED": self.unused}
        c = "ff" if case.variable else "ww"
        block = blocks.of_tiles(j, half=self.half, forward=False)

        def sizes(k: int) -> tuple[int, ...]:
            return j, self.x_i, self.n_M, self.blocks_of[k] * j, *self.use, self.results_i, self.n_rows

        self.next_backward = [
            self.tiles(
                backward_kernels.next_backward_kernel, f"xMff{c}wwffmipffffpff", sizes(k), block,
                FRESH=bool(fresh[k]), **kinds,
            )
            for k in range(case.n_iters)
        ]  # fmt: skip
        self.first_backward = self.tiles(
            backward_kernels.first_backward_kernel, f"xMfff{c}fffmipfffpff", sizes(0), block,
            PRIOR=case.prior, N_ITERS=case.n_iters, **kinds,
        )  # fmt: skip
        if case.variable:
            self.sum_shared = self.sum(self.n_shared, whole=True)
            self.shared_backward = Launch(
                sum_kernels.shared_backward_kernel, (cdiv(j, 32), cdiv(d, 32), 1), self.dtypes("ffffffff"),
                (j, d), EXTRA=EXTRA, T=self.T, **blocks.MATRIX,
            )  # fmt: skip
        else:
            self.sum_pairs = self.sum_samples(4 if case.n_iters > 1 else 2, self.n_inp * j, 1)
            rows, block_d = blocks.of_inputs(self.n_inp, d).values()
            self.activations_backward = Launch(
                sum_kernels.activations_backward_kernel, (cdiv(self.n_inp, rows), cdiv(d, block_d), 1),
                self.dtypes("Xfffff"),
                (b, self.n_inp, d, d), UNUSED=self.unused, BLOCK_I=rows, BLOCK_D=block_d, T=self.T,
            )  # fmt: skip
        rows, block_d, warps, block_k, stages = blocks.INPUT_GRADIENT[self.half]
        n_blocks = cdiv(d, block_d)
        per_sample = cdiv(self.n_inp, rows)
        shared = self.saved.distance("M", "shared") if case.variable else 0
        n_tiles = self.n_tiles if self.packed else b * per_sample
        self.input_gradient = Launch(
            sum_kernels.input_gradient_kernel, (n_tiles * n_blocks, 1, 1), self.dtypes("pfMffwiX"),
            (self.n_inp, per_sample, self.n_M + self.n_shared, self.n_M, d, self.results_i, self.x_i,
             shared, n_blocks),
            FIXED=not case.variable, PACKED=self.packed, UNUSED=self.unused, BLOCK_I=rows,
            BLOCK_D=block_d, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **self.precision,
        )  # fmt: skip

    def sum_samples(self, k: int, n: int, fresh: int) -> Launch:
        """Prepare the sum over samples of k arrays [b, n]."""
        return Launch(
            sum_samples_kernel, (cdiv(n, blocks.SAMPLES["BLOCK_N"]), k, 1), self.dtypes("fffff"),
            (self.batch, n, fresh), T=self.T, **blocks.SAMPLES,
        )  # fmt: skip
