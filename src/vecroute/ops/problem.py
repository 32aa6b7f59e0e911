"""One call of the loop over chunks: its tensors, and its plan."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vecroute.ops.backends import Pairs, Steps, backend_of
from vecroute.ops.common import Weights
from vecroute.ops.group import add_up
from vecroute.ops.paths import module_of
from vecroute.ops.plan import Plan


@dataclass
class Problem:
    """One call of the loop, with its batch dimensions flattened to one, ``b``.

    A packed call has x_inp [1, total, d], and cu_seqlens holds the offsets of its samples.
    """

    x_inp: Tensor  # [b, i, d]
    w: Weights
    use: Tensor | None  # [b or 1, i, j or 1]
    sqrt_n_inp: Tensor  # [b, 1]
    cu_seqlens: Tensor | None  # [b + 1]
    plan: Plan
    group: str = ""  # name of the group of ranks that share the inputs
    # Scales of the rows of x_inp [i] and of sums over them []. With clusters, the first iteration sets them.
    units: tuple[Tensor, Tensor] | None = None
    copies: dict[str, Tensor] = field(default_factory=dict)  # from ``in_dtype``

    @cached_property
    def pairs(self) -> Pairs:
        """The work on each pair i, j."""
        return backend_of(self.plan).pairs

    @cached_property
    def steps(self) -> Steps:
        """The small steps between two passes."""
        return backend_of(self.plan).steps

    @cached_property
    def path(self) -> Any:
        """The module of the plan's path, if it has one."""
        return module_of(self.plan.path)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of everything except operands of products."""
        return self.plan.dtype

    @cached_property
    def prior(self) -> float:
        return self.plan.case.prior

    @cached_property
    def n_out(self) -> int:
        return self.plan.case.n_out

    @cached_property
    def width(self) -> int:
        return self.plan.width

    @cached_property
    def variable(self) -> bool:
        return self.plan.case.variable

    @cached_property
    def offsets(self) -> list[int] | None:
        """cu_seqlens on the host."""
        return None if self.cu_seqlens is None else self.cu_seqlens.tolist()

    @cached_property
    def W_c(self) -> Tensor:
        """The weights [2 j, d] that give c_sum and c_ign as W_c x_inp + B_c, if n_inp is None."""
        W_use, W_ign = self.w.W_use.to(self.dtype).mT, self.w.W_ign.to(self.dtype).mT  # [j, d] each
        return torch.cat((W_use + W_ign, W_ign))  # [2 j, d]

    @cached_property
    def B_c(self) -> Tensor:
        """The biases [2 j] of c_sum and c_ign."""
        B_use, B_ign = self.w.B_use.to(self.dtype), self.w.B_ign.to(self.dtype)  # [j] each
        return torch.cat((B_use + B_ign, B_ign))  # [2 j]

    def original(self, name: str) -> Tensor:
        """Return the tensor from which a copy of ``plan.kept_copies`` is made."""
        return self.x_inp if name == "x_inp" else getattr(self.w, name)

    def in_dtype(self, name: str, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Return t in a dtype. A converted copy is made once per call and stored under the name."""
        if t.dtype == dtype:
            return t
        if name not in self.copies:
            self.copies[name] = t.to(dtype)
        return self.copies[name]

    def of_samples(self, samples: slice) -> "Problem":
        """Return the problem of some samples alone."""
        if samples == slice(None):
            return self
        use = self.use if self.use is None or len(self.use) == 1 else self.use[samples]  # [b or 1, i, j or 1]
        x_inp, sqrt_n_inp = self.x_inp[samples], self.sqrt_n_inp[samples]  # [b, i, d], [b, 1]
        # Drop the copies, which hold all samples.
        return replace(self, x_inp=x_inp, use=use, sqrt_n_inp=sqrt_n_inp, copies={})

    def total(self, *sums: Tensor) -> None:
        """Turn sums over the inputs of this rank into sums over the inputs of all ranks, in place."""
        if self.group:
            add_up(self.group, *sums)


def over_samples(values: Tensor) -> Tensor:
    """Return the sum over b of values [b, ...]; the only sample itself if there is one."""
    return values[0] if len(values) == 1 else values.sum(0)


class Grads(dict[str, Tensor]):
    """Gradients by the names of the parameters."""

    def add(self, name: str, value: Tensor) -> None:
        """Add to a gradient, or store it if there is none yet."""
        self[name] = self[name].add_(value) if name in self else value
