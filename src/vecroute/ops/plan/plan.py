"""The plan of a call: everything that follows from its case and its path, computed when it is first used."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vecroute.ops.common import cdiv, compute_dtype, multiple_of_8
from vecroute.ops.launch import Memory
from vecroute.ops.plan import limits
from vecroute.ops.plan.case import Case

Array = tuple[tuple[int, ...], torch.dtype]  # a shape and a dtype


@dataclass(frozen=True)
class Plan:
    """How a call is routed. ``print(plan)`` shows its path, the reason, chunks, memory and kernels.

    A plan holds no tensors, so threads and streams may share one.
    """

    case: Case
    path: str  # "chunked", "fused", "batch", "long" or "wide"
    why: str

    # Sizes in the paper's letters, over all samples

    @cached_property
    def batch(self) -> int:
        """Number of samples."""
        if self.case.packed:
            return self.case.packed[0]
        n = 1
        for size in self.case.shape[:-2]:
            n *= size
        return n

    @cached_property
    def n_inp(self) -> int:
        return self.case.shape[-2]

    @cached_property
    def d_inp(self) -> int:
        return self.case.shape[-1]

    @cached_property
    def n_rows(self) -> int:
        """Number of inputs of all samples together."""
        return self.n_inp if self.case.packed else self.batch * self.n_inp

    @cached_property
    def rows(self) -> tuple[int, int]:
        """The first two sizes of x_inp, all batch dimensions in one. Packed samples count as one."""
        return (1, self.n_inp) if self.case.packed else (self.batch, self.n_inp)

    @cached_property
    def masked(self) -> bool:
        return self.case.input_mask or self.case.use_strides is not None

    @cached_property
    def fused(self) -> bool:
        """Whether Triton kernels do the work, not plain PyTorch."""
        return self.path != "chunked"

    @cached_property
    def on_cpu(self) -> bool:
        return self.case.device.kind == "cpu"

    @cached_property
    def normalizes(self) -> bool:
        """Whether x_out of the call is normalised. The other paths leave that to the layer."""
        return self.path == "batch" and self.case.normalized

    def is_flat(self, first: bool) -> bool:
        """Return whether all used pairs of an iteration have the same R, the prior."""
        return first and self.case.use_strides is None

    # Dtypes

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of everything except operands of products."""
        return compute_dtype(self.case.dtype)

    @cached_property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of the operands of large products.

        On a CPU, float16 is slow and its range too small. On a GPU, a float32 x_inp is not rounded to a copy:
        tf32 products read x_inp itself, and round less than autocast would. With many outputs, arithmetic
        limits the speed, so that bfloat16 is worth the copy.
        """
        case = self.case
        if self.path == "batch":
            # Triton's interpreter truncates to bfloat16 instead of rounding.
            rounds = case.dtype == torch.bfloat16 and case.device.kind == "cuda"
            return torch.bfloat16 if rounds else self.dtype
        if self.on_cpu:
            return self.dtype if case.rounded == torch.float16 else case.rounded
        if case.dtype == self.dtype:
            many = case.rounded == torch.bfloat16 and case.n_out >= limits.WIDE_OUTPUTS[0]
            return case.rounded if many else self.dtype
        return case.rounded

    @cached_property
    def pair_dtype(self) -> torch.dtype:
        """The dtype of pairs: dot products, phi and their gradients, but not parameters."""
        return self.operand_dtype if self.path == "wide" else self.dtype

    @cached_property
    def step_dtype(self) -> torch.dtype:
        """The dtype of operands of F and G, and of g; not float16, since sums over inputs may overflow it."""
        rounds = self.fused and self.case.device.kind == "cuda" and self.case.rounded == torch.bfloat16
        return self.operand_dtype if rounds else self.dtype

    @cached_property
    def width(self) -> int:
        """Number of columns for all outputs. The last ones are zeros if n_out is not a multiple of 8.

        Products of bfloat16 are up to four times as fast with rows of whole 16 bytes. If the width is more
        than n_out, j in the shapes of M, x_hat, pairs and kept arrays means the width.
        """
        return self.case.n_out if self.pair_dtype == self.dtype else multiple_of_8(self.case.n_out)

    @cached_property
    def ieee_kernel(self) -> bool:
        """Whether our kernel multiplies float32 rows: cuBLAS uses no tensor cores for IEEE float32."""
        exact = self.operand_dtype == self.dtype == torch.float32
        return self.fused and exact and not self.case.tf32

    @cached_property
    def half(self) -> bool:
        """Whether operands of the batch path are float16 with a scale per row, as precise as tf32."""
        case = self.case
        fits = self.d_inp <= limits.HALF_D_INP and self.n_rows * self.d_inp * 2 <= limits.HALF_BYTES
        return fits and (case.tf32 or case.dtype == torch.float16)

    @cached_property
    def precision(self) -> str:
        """How Triton multiplies float32 operands on the batch path. Every float16 number is a tf32 number."""
        if self.operand_dtype != torch.float32:
            return "ieee"
        return "tf32x3" if self.case.dtype == torch.float32 and not self.case.tf32 else "tf32"

    # Memory that lives until the backward pass of the loop over chunks

    @cached_property
    def in_cache(self) -> bool:
        """Whether small tensors fit the caches of a CPU, so that it is best to use them at once."""
        return self.on_cpu and not self.fused

    @cached_property
    def rounds_late(self) -> bool:
        """Whether x_inp is rounded only for products, because activations need the exact x_inp."""
        return self.case.dtype == self.dtype != self.operand_dtype and not self.in_cache

    @cached_property
    def kept_copies(self) -> dict[str, Array]:
        """Operands of several products, rounded once for a call and its backward pass."""
        (b, i), d, h = self.rows, self.d_inp, self.case.d_out
        copies: dict[str, tuple[torch.dtype, Array]] = {}  # the dtype of the original, and the copy
        if self.rounds_late and not self.masked:
            copies["x_inp"] = self.case.dtype, ((b, i, d), self.operand_dtype)
        if self.fused:
            copies["W_F2"] = self.case.w_dtype, ((d, h), self.step_dtype)
            copies["W_G1"] = self.case.w_dtype, ((h, d), self.step_dtype)
        return {
            name: array
            for name, (dtype, array) in copies.items()
            if dtype != array[1] and n_bytes(array) <= limits.SMALL_COPY
        }

    @cached_property
    def kept(self) -> Array:
        """The values stored for every pair, [b, i, k]. b is 0 if nothing is stored.

        Values are stored if that saves time and they fit the budget. If n_inp is None, they are c_sum and
        c_ign. ``fused`` stores them in the order of the product, before a_inp. If n_inp is given, on a CPU or
        on the wide path, they are the dot products of every iteration but the first. In other cases, a GPU
        computes dot products as fast as it would read them.
        """
        case, (b, i) = self.case, self.rows
        if case.variable:
            k = multiple_of_8(2 * case.n_out + 1) if self.fused else 2 * case.n_out
            worth = True
        else:
            k = (case.n_iters - 1) * self.width
            worth = not case.one_by_one and (self.on_cpu or self.path == "wide")
        fits = b * i * k * self.pair_dtype.itemsize <= case.tuning.keep_bytes
        return (b if case.n_iters > 1 and worth and fits else 0, i, k), self.pair_dtype

    @cached_property
    def kept_x_hat(self) -> Array:
        """Rounded matrices of the scores that are kept, [t - 1, b, j, d]; t - 1 is 0 unless they are small.

        The rounded copy is faster to read than the original.
        """
        n, array = self.case.n_iters - 1, (self.batch, self.width, self.d_inp)
        budget = min(limits.SMALL_COPY, self.case.tuning.keep_bytes)
        keep = self.path == "wide" and n_bytes(((n, *array), self.operand_dtype)) <= budget
        return (n if keep else 0, *array), self.operand_dtype

    @cached_property
    def saved(self) -> Memory:
        """The arrays that a forward pass saves for the backward pass, in one allocation."""
        if self.path == "batch":
            from vecroute.ops.paths import module_of

            return module_of("batch").saved(self)
        case, b, d = self.case, self.batch, self.d_inp
        t, j, h = case.n_iters, case.n_out, case.d_out
        arrays = {
            "y": ((t, b, j, d), self.dtype),
            "s": ((t, b, j), self.dtype),
            "before": ((t - 1, b, j, h), self.dtype),  # x_out before every iteration but the first
            "g": ((t - 1, b, j, d), self.step_dtype),
            "f_a_inp": (self.rows, self.dtype),
            "kept": self.kept,
            "x_hat": self.kept_x_hat,
            "sqrt_n_inp": ((b, 1), self.dtype),
        }
        return Memory(arrays | {f"copy of {name}": array for name, array in self.kept_copies.items()})

    # The gradient of x_inp, written once: where the pairs of later iterations wait for the first one

    @cached_property
    def n_waiting(self) -> int:
        """How many numbers wait per input: phi and the gradient of dot of every iteration but the first."""
        return (self.case.n_iters - 1) * 2 * self.case.n_out

    @cached_property
    def n_kept(self) -> int:
        """``n_waiting``, plus the gradient of c, which all iterations share, plus phi of the first."""
        return self.n_waiting + (3 if self.case.variable else 1) * self.case.n_out

    @cached_property
    def n_all(self) -> int:
        """``n_kept``, plus a_inp."""
        j = self.case.n_out
        return self.n_waiting + (multiple_of_8(3 * j + 1) if self.case.variable else j)

    @cached_property
    def waits_in(self) -> str:
        """Where pairs wait: unwritten rows of "grad_W_A" or "grad_x", memory "apart", or "" (nowhere)."""
        case, aside = self.case, not self.case.variable and self.batch == 1
        if case.n_iters < 2 or self.n_kept > self.d_inp or self.width != case.n_out:
            return ""
        if aside:
            return "grad_W_A" if case.w_dtype == self.dtype else ""
        rows = self.n_rows + self.batch * self.d_inp  # rows of pairs, and of M of every sample
        size = multiple_of_8(self.n_all) * rows * self.dtype.itemsize
        if self.fused and size <= min(limits.APART_BYTES, 2 * case.tuning.keep_bytes):
            return "apart"
        return "grad_x" if case.dtype == self.dtype else ""

    # The long path

    @cached_property
    def clusters(self) -> bool:
        """Whether iterations read x_inp once, in clusters of multiprocessors."""
        from vecroute.ops.plan.paths import has_clusters

        return self.path == "long" and has_clusters(self.case)

    @cached_property
    def halves(self) -> bool:
        """Whether the gradient of x_inp comes from pairs in float16."""
        from vecroute.ops.plan.paths import has_halves

        return self.path == "long" and has_halves(self.case)

    # Chunks

    def chunk_rows(self, row: int, share: int) -> int:
        """Return the rows of a chunk. On a CPU its pairs fit the cache; on a GPU tall products matter more.

        Args:
            row: numbers that one row takes in the buffers of a pass on a GPU.
            share: buffers may take the size of x_inp divided by share, or more if that gives few rows.
        """
        case = self.case
        if case.tuning.rows:
            return case.tuning.rows
        if self.on_cpu:
            least, most = limits.CPU_ROWS
            return max(least, min(most, limits.CPU_PAIRS // case.n_out))
        size, twice = row * self.dtype.itemsize, 2 if case.n_out >= limits.MANY_OUTPUTS else 1
        per_row = (limits.CHUNK_BYTES, size) if case.variable else (limits.CHUNK_PAIRS, case.n_out)
        least = twice * per_row[0] // per_row[1]
        x_bytes = self.n_rows * self.d_inp * case.dtype.itemsize
        return max(limits.GPU_ROWS, least, x_bytes // (share * size))

    def chunk_samples(self, rows: int, n_rows: int) -> int:
        """Return the number of samples of n_rows inputs that form a chunk of about ``rows`` rows."""
        together = rows // max(1, n_rows)
        n_threads = torch.get_num_threads()
        if self.on_cpu and together > n_threads:
            together -= together % n_threads  # the same number for each thread
        return max(1, min(together, limits.GRID))

    @cached_property
    def forward_share(self) -> int:
        return limits.SHARE_FORWARD["variable" if self.case.variable else "fixed"]

    def backward_share(self, waits: bool) -> int:
        """Return the share of a backward pass, by whether its pairs wait."""
        if not waits:
            return limits.SHARE_BACKWARD["variable" if self.case.variable else "fixed"]
        return limits.SHARE_HALVES if self.halves else limits.SHARE_WAITING

    def parts(self) -> Iterator[slice]:
        """Yield the samples that go through a backward pass together: all of them, with one exception.

        On a CPU with n_inp=None, tensors [b, j, d] of many small samples take more memory than the rest and
        do not fit the caches, so only some samples go together. If n_inp is given, the first pass writes
        gradients that all samples share, so all samples go together.
        """
        case = self.case
        if not self.in_cache or not case.variable or case.packed or case.group:
            yield slice(None)
            return
        of_all = self.batch * case.n_out * max(self.d_inp, case.d_out) * self.dtype.itemsize
        size = cdiv(self.batch, max(1, cdiv(of_all, limits.PART_BYTES)))
        for start in range(0, self.batch, max(1, size)):
            yield slice(start, start + size)

    @cached_property
    def steps(self) -> Any:
        """The prepared launches of the batch path."""
        from vecroute.ops.paths import module_of

        return module_of("batch").prepare(self)

    def __str__(self) -> str:
        from vecroute.ops.plan.text import told

        return told(self)


def n_bytes(array: Array) -> int:
    """Return the size of an array."""
    n = array[1].itemsize
    for size in array[0]:
        n *= size
    return n
