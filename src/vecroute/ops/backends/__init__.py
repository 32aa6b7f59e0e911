"""The protocols that an implementation of the loop over chunks follows, and the two implementations.

``chunked`` is plain PyTorch, for any device. ``fused`` launches Triton kernels. Both are modules that follow
the protocols below. The docstrings in ``chunked`` describe each function.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vecroute.ops.plan import Plan

if TYPE_CHECKING:
    from vecroute.ops.chunks import Chunk, Room
    from vecroute.ops.columns import Columns
    from vecroute.ops.problem import Grads, Problem


class Pairs(Protocol):
    """The work on each pair i, j of a chunk, and on each input."""

    def coefficients(
        self, p: "Problem", like: "Chunk", c: Any, dot: Any, a: Any, f: Tensor, dtype: torch.dtype,
        room: "Room",
    ) -> tuple[Tensor, Tensor, Callable[["Chunk"], object]]: ...  # fmt: skip

    def coefficients_backward(
        self, p: "Problem", like: "Chunk", c: Any, pairs: Tensor, results: Tensor, grad_c: Any,
        columns: "Columns", f: Tensor, grad_s: Tensor, grad_f: Tensor, grads: "Grads", fresh: bool, into: Any,
        room: "Room",
    ) -> tuple[Tensor, Callable[["Chunk"], object]]: ...  # fmt: skip

    def summer(self, out: Tensor, values: Tensor) -> Callable[[Tensor, bool], object]: ...

    def shared_rows(self, p: "Problem", flat: bool, n: int) -> tuple[Tensor, Tensor]: ...

    def shared_rows_backward(
        self, p: "Problem", grad: Tensor, sums: Tensor, flat: bool, first: bool, grads: "Grads"
    ) -> None: ...

    def stacked(self, own: Any, shared: Any) -> Any: ...

    def activations(self, p: "Problem", chunk: "Chunk", x: Tensor, f: Tensor) -> None: ...

    def inputs_backward(
        self, p: "Problem", chunk: "Chunk", x: Tensor, pairs: Tensor, M: Tensor, grad_a: Tensor, into: Any,
        grads: "Grads",
    ) -> None: ...  # fmt: skip


class Steps(Protocol):
    """The small steps between two passes: F and G of the paper, and their gradients."""

    def outputs(self, p: "Problem", y: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor: ...

    def predicted(self, p: "Problem", x_out: Tensor, out: Tensor | None = None) -> Tensor: ...

    def scores_matrix(self, p: "Problem", g: Tensor, out: Tensor) -> Tensor: ...

    def scores_matrix_backward(
        self, p: "Problem", grad: Tensor, sums: Tensor, g: Tensor, grads: "Grads"
    ) -> Tensor: ...

    def outputs_backward(
        self, p: "Problem", grad_x_out: Tensor, y: Tensor, s: Tensor, grads: "Grads", out: Tensor
    ) -> Tensor: ...

    def predictions_backward(
        self, p: "Problem", grad_x_hat: Tensor, x_out: Tensor, g: Tensor, grads: "Grads"
    ) -> Tensor: ...


class Backend(NamedTuple):
    pairs: Pairs
    steps: Steps


def backend_of(plan: Plan) -> Backend:
    """Return the implementation of the loop over chunks. Triton is imported only if it is used."""
    if plan.fused:
        from vecroute.ops.backends.fused import pairs, steps

        return Backend(pairs, steps)
    from vecroute.ops.backends.chunked import pairs as chunked_pairs
    from vecroute.ops.backends.chunked import steps as chunked_steps

    return Backend(chunked_pairs, chunked_steps)
