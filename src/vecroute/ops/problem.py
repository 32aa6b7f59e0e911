"""One call of the routing loop: its tensors and options."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from vecroute.ops.common import Weights, cdiv, compute_dtype, multiple_of_8
from vecroute.ops.group import add_up
from vecroute.ops.plan import Tuning

# From how many outputs on bfloat16 pays for rounding float32 operands, found by trial on one H200; and up to
# how many ``fused_rows`` has a whole row in registers.
MANY_OUTPUTS, MOST_OUTPUTS = 1024, 4096
PART_BYTES = 2**21  # about so many has [b, j, d] of the samples that go through a backward on a CPU
SMALL_COPY = 2**26  # up to so many bytes what is rounded is kept for all passes of a call and of its backward


@dataclass
class Problem:
    """One call of the loop, its batch dimensions flattened to one, ``b``.

    A packed call has x_inp [1, total, d] and in cu_seqlens the offsets of its samples.
    """

    x_inp: Tensor  # [b, i, d]
    w: Weights
    use: Tensor | None  # [b or 1, i, j or 1]
    sqrt_n_inp: Tensor  # [b, 1]
    cu_seqlens: Tensor | None  # [b + 1]
    prior: float
    rounded: torch.dtype  # of the operands of products
    tuning: Tuning
    implementation: str
    group: str = ""  # of the ranks that hold the other inputs
    # Units of rows of x_inp [i] and of sums over them [], from the first iteration in ``clusters``.
    units: tuple[Tensor, Tensor] | None = None
    copies: dict[str, Tensor] = field(default_factory=dict)  # from ``in_dtype``

    @cached_property
    def pairs(self) -> ModuleType:
        """What is done to each pair i, j, as ``passes`` takes it: ``chunked`` or ``fused``."""
        return import_module(f"vecroute.ops.backends.{self.implementation}.pairs")

    @cached_property
    def steps(self) -> ModuleType:
        """The small steps between two passes: ``chunked_steps`` or ``fused_steps``."""
        return import_module(f"vecroute.ops.backends.{self.implementation}.steps")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of everything but the operands of products."""
        return compute_dtype(self.x_inp.dtype)

    @cached_property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of the operands of large products.

        On a CPU float16 is neither fast nor wide enough. On a GPU a float32 x_inp is not copied to be
        rounded: tf32 products take it as it is, and round less than autocast would. With many outputs they
        are bound by arithmetic, so that bfloat16 pays for the copy.
        """
        if self.x_inp.device.type == "cpu":
            return self.dtype if self.rounded == torch.float16 else self.rounded
        if self.x_inp.dtype == self.dtype:
            many = self.rounded == torch.bfloat16 and self.n_out >= MANY_OUTPUTS
            return self.rounded if many else self.dtype
        return self.rounded

    @cached_property
    def pair_dtype(self) -> torch.dtype:
        """The dtype of pairs: of dot products, phi and their gradients, but not of parameters.

        With many outputs of a fixed length they are most of what is read and written. Autocast rounds too.
        """
        many = not self.variable and self.use is None and MANY_OUTPUTS <= self.n_out <= MOST_OUTPUTS
        many &= self.n_out % 4 == 0  # rows that are not aligned would be loaded number by number
        rounds = many and self.implementation == "fused" and self.operand_dtype == torch.bfloat16
        return self.operand_dtype if rounds else self.dtype

    @cached_property
    def width(self) -> int:
        """Columns that outputs take side by side, the last of them zeros where n_out is not aligned.

        Products of bfloat16 are up to four times as fast with rows of whole 16 bytes. Where it is more than
        n_out, it is what j means in the shapes of M, x_hat, pairs and what is kept of them.
        """
        return self.n_out if self.pair_dtype == self.dtype else multiple_of_8(self.n_out)

    @cached_property
    def step_dtype(self) -> torch.dtype:
        """The dtype of operands of F and G, and of g; not float16, whose range sums over inputs may leave.

        On a CPU kernels are interpreted, which cuts digits off instead of rounding to bfloat16.
        """
        rounds = self.implementation == "fused" and self.x_inp.is_cuda and self.rounded == torch.bfloat16
        return self.operand_dtype if rounds else self.dtype

    @cached_property
    def offsets(self) -> list[int] | None:
        """cu_seqlens on the host."""
        return None if self.cu_seqlens is None else self.cu_seqlens.tolist()

    @cached_property
    def variable(self) -> bool:
        return self.w.W_use is not None

    @cached_property
    def W_c(self) -> Tensor:
        """Of a variable length, [2 j, d]: c_sum and c_ign are W_c x_inp + B_c."""
        W_use, W_ign = self.w.W_use.to(self.dtype).mT, self.w.W_ign.to(self.dtype).mT  # [j, d] each
        return torch.cat((W_use + W_ign, W_ign))  # [2 j, d]

    @cached_property
    def B_c(self) -> Tensor:
        """[2 j]"""
        B_use, B_ign = self.w.B_use.to(self.dtype), self.w.B_ign.to(self.dtype)  # [j] each
        return torch.cat((B_use + B_ign, B_ign))  # [2 j]

    @cached_property
    def n_out(self) -> int:
        return self.w.W_F1.shape[0]

    def is_flat(self, first: bool) -> bool:
        """Whether all pairs of an iteration that are used have the same R, the prior."""
        return first and (self.use is None or self.use.shape[-1] == 1)

    @cached_property
    def in_cache(self) -> bool:
        """Whether what is small stays in the caches of a CPU, and is best used at once."""
        return self.x_inp.device.type == "cpu" and self.implementation == "chunked"

    @cached_property
    def rounds_late(self) -> bool:
        """Whether x_inp is rounded for products alone: activations want it as it is."""
        return self.x_inp.dtype == self.dtype != self.operand_dtype and not self.in_cache

    @cached_property
    def kept_copies(self) -> dict[str, tuple[Tensor, torch.dtype]]:
        """What is rounded once for a call and its backward, and to what: operands of several products."""
        x_inp = {"x_inp": (self.x_inp, self.operand_dtype)} if self.rounds_late and self.use is None else {}
        weights = {name: (getattr(self.w, name), self.step_dtype) for name in ("W_F2", "W_G1")}
        all_copies = x_inp | (weights if self.implementation == "fused" else {})
        return {
            name: (t, dtype)
            for name, (t, dtype) in all_copies.items()
            if t.dtype != dtype and t.numel() * dtype.itemsize <= SMALL_COPY
        }

    def in_dtype(self, name: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        """t in a dtype; where that is another, the copy of that name, made once in a call."""
        if t.dtype == dtype:
            return t
        if name not in self.copies:
            self.copies[name] = t.to(dtype)
        return self.copies[name]

    def parts(self) -> Iterator[slice]:
        """Samples that go through a backward together: all, but on a CPU of a variable length some.

        Of many small samples, what is [b, j, d] takes more memory than the rest, and leaves the caches. Of a
        fixed length the first pass writes gradients that all samples share, so that they must go together.
        """
        if not self.in_cache or not self.variable or self.cu_seqlens is not None or self.group:
            yield slice(None)
            return
        (b, _, d), (j, h) = self.x_inp.shape, self.w.B_F2.shape
        n_parts = cdiv(b * j * max(d, h) * self.dtype.itemsize, PART_BYTES)
        size = cdiv(b, max(1, n_parts))
        for start in range(0, b, max(1, size)):
            yield slice(start, start + size)

    def of_samples(self, samples: slice) -> "Problem":
        """The same of some samples."""
        if samples == slice(None):
            return self
        use = self.use if self.use is None or len(self.use) == 1 else self.use[samples]  # [b or 1, i, j or 1]
        x_inp, sqrt_n_inp = self.x_inp[samples], self.sqrt_n_inp[samples]  # [b, i, d], [b, 1]
        return replace(
            self, x_inp=x_inp, use=use, sqrt_n_inp=sqrt_n_inp, copies={}
        )  # copies have all samples

    def total(self, *sums: Tensor) -> None:
        """Make sums over the inputs here sums over those of every rank, in place."""
        if self.group:
            add_up(self.group, *sums)


def over_samples(values: Tensor) -> Tensor:
    """The sum over b of values [b, ...]; of one sample its own."""
    return values[0] if len(values) == 1 else values.sum(0)


class Grads(dict[str, Tensor]):
    """Gradients by the names of the parameters."""

    def add(self, name: str, value: Tensor) -> None:
        """Add to a gradient, which is 0 so far if it is not there."""
        self[name] = self[name].add_(value) if name in self else value
