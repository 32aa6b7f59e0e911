"""Special paths. The protocol of a path has the functions that the engine calls; see ``ops/README.md``.

``batch`` replaces the loop over chunks. ``long`` and ``wide`` replace parts of it. Only ``module_of`` imports
them, since they need Triton.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch
from torch import Tensor

from vecroute.ops.launch import Memory
from vecroute.ops.plan import Plan

if TYPE_CHECKING:
    from vecroute.ops.chunks import Chunk, Room
    from vecroute.ops.columns import Columns
    from vecroute.ops.problem import Problem


class Batch(Protocol):
    """Many samples of a moderate size: a whole call in few prepared launches."""

    def saved(self, plan: Plan) -> Memory: ...

    def prepare(self, plan: Plan) -> Any: ...

    def forward(
        self, plan: Plan, x_inp: Tensor, weights: Sequence[Tensor], input_mask: Tensor | None,
        pair_mask: Tensor | None, cu_seqlens: Tensor | None, phi: Tensor | None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def backward(
        self, plan: Plan, grad_x_out: Tensor, x_inp: Tensor, weights: Sequence[Tensor],
        pair_mask: Tensor | None, cu_seqlens: Tensor | None, saved: Tensor, need_grad_x: bool,
    ) -> tuple[Tensor | None, list[Tensor]]: ...  # fmt: skip


class Long(Protocol):
    """One long sample of a fixed length in tf32."""

    def iterate(self, p: "Problem", x_hat: Any, f_a_inp: Tensor, y: Tensor, s: Tensor) -> None: ...

    def scaled_matrix(self, matrices: list[Tensor], first: bool) -> tuple[Tensor, Tensor]: ...

    def input_gradient(
        self, waiting: Tensor, phi: Tensor, M: Tensor, top: Tensor, x: Tensor, W_A: Tensor, grad_x: Tensor,
        grad_W_A: Tensor, grad_a: Tensor,
    ) -> None: ...  # fmt: skip


class Wide(Protocol):
    """Many outputs of a fixed length in bfloat16."""

    def coefficients(
        self, p: "Problem", like: "Chunk", dot: Any, f: Tensor, dtype: torch.dtype, room: "Room"
    ) -> tuple[Tensor, Tensor, Callable[["Chunk"], object]]: ...

    def backward(
        self, p: "Problem", like: "Chunk", pairs: Tensor, columns: "Columns", f: Tensor, grad_s: Tensor,
        grad_f: Tensor, grads: list[Tensor], stored: bool,
    ) -> Callable[["Chunk"], object]: ...  # fmt: skip


@overload
def module_of(path: Literal["batch"]) -> Batch: ...
@overload
def module_of(path: Literal["long"]) -> Long: ...
@overload
def module_of(path: Literal["wide"]) -> Wide: ...
@overload
def module_of(path: str) -> Batch | Long | Wide | None: ...
def module_of(path: str) -> Batch | Long | Wide | None:
    """Return the module of a path; None for "chunked" and "fused", which are the loop over chunks itself."""
    if path == "batch":
        from vecroute.ops.paths import batch

        return batch
    if path == "long":
        from vecroute.ops.paths import long

        return long
    if path == "wide":
        from vecroute.ops.paths import wide

        return wide
    return None
