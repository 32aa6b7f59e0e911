"""Sums over the ranks of a process group; each rank holds some of the inputs.

A group is given by its name, "" for none, so that operators can take it as an argument.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vecroute.ops.common import Weights

# Parameters that every rank applies to its own inputs, so that their gradients are sums over the ranks.
MEET_INPUTS = ("W_A", "B_A", "W_S", "B_S", "W_use", "B_use", "W_ign", "B_ign")


def has_ranks() -> bool:
    """Return whether there are process groups. If not, no inputs are sharded."""
    return dist.is_available() and dist.is_initialized()


def resolve(group: str) -> dist.ProcessGroup:
    """Return the process group with this name."""
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]


def all_reduce(group: str, message: Tensor, op: Any = None) -> Tensor:
    """Combine a message over the ranks, by default as a sum, in place.

    Raises:
        RuntimeError: another rank has ended, or did not answer within the time-out of the group.
    """
    try:
        dist.all_reduce(message, op or dist.ReduceOp.SUM, group=resolve(group))
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} could not add up with the others: a rank ended, or did not answer "
            f"within the time-out of the group; start again from the last checkpoint ({error})"
        ) from error
    return message


def add_up(group: str, *sums: Tensor) -> None:
    """Sum each tensor over the ranks, in place, with one message for all."""
    message = all_reduce(group, torch.cat([t.reshape(-1) for t in sums]))
    for t, total in zip(sums, message.split([t.numel() for t in sums]), strict=True):
        t.copy_(total.view(t.shape))


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *shared):
        ctx.group = group
        return tuple(t.view_as(t) for t in shared)

    @staticmethod
    def backward(ctx, *grads):
        wanted = [
            g.clone() if need else None for g, need in zip(grads, ctx.needs_input_grad[1:], strict=True)
        ]
        add_up(ctx.group, *(g for g in wanted if g is not None))
        return None, *wanted


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *sums):
        totals = [t.clone() for t in sums]
        add_up(group, *totals)
        return tuple(totals)

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


def sum_gradients(group: str, *shared: Tensor) -> tuple[Tensor, ...]:
    """Return shared tensors that each rank uses on its own inputs. Gradients are summed over the ranks."""
    needed = any(t.requires_grad for t in shared) and torch.is_grad_enabled()
    return _SumGradients.apply(group, *shared) if group and needed else shared


def total(group: str, *sums: Tensor) -> tuple[Tensor, ...]:
    """Return sums over the inputs of all ranks, from each rank's own sums. All ranks get the same result."""
    return _Total.apply(group, *sums) if group else sums


def local_rows(parameter: Tensor) -> Tensor:
    """Return the rows of a parameter that are on this rank: all of them, unless it is sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def local_weights(group: str, w: Weights) -> Weights:
    """Return the parameters for the inputs of this rank: only its own rows of parameters with an i."""
    if w.W_use is None:
        return Weights._make(None if t is None else local_rows(t) for t in w)
    shared = sum_gradients(group, *(getattr(w, name) for name in MEET_INPUTS))
    return w._replace(**dict(zip(MEET_INPUTS, shared, strict=True)))


@contextmanager
def together(group: str, check: bool = True) -> Iterator[dict[str, Any]]:
    """If one rank raises inside, all ranks raise. They also raise if their entries in the dict differ.

    Otherwise the other ranks would wait for a rank that has failed. The exchange is one message of 24 bytes.
    """
    alike: dict[str, Any] = {}
    failure: Exception | None = None
    if not group or not check or torch.compiler.is_compiling():
        yield alike
        return
    try:
        yield alike
    except Exception as error:
        failure = error
    _exchange(group, alike, failure)


@contextmanager
def announced(group: str) -> Iterator[None]:
    """If one rank raises inside, the others raise in the next ``together`` that they reach."""
    try:
        yield
    except Exception as error:
        if group and not getattr(error, "is_told", False):
            _exchange(group, {}, error)
        raise


def _exchange(group: str, alike: dict[str, Any], failure: Exception | None) -> None:
    """Raise on every rank if one of them failed, or if their entries differ."""
    process_group, digest = resolve(group), zlib.crc32(repr(alike).encode())
    # Send the message from the CPU if the group can, so that no GPU has to wait.
    device = "cpu" if "cpu:" in dist.get_backend_config(process_group) else "cuda"
    message = torch.tensor([failure is not None, digest, -digest], device=device)  # [3]
    failed, most, least = all_reduce(group, message, dist.ReduceOp.MAX).tolist()
    if not failed and most == -least:
        return
    told: list[Any] = [None] * process_group.size()
    own = f"{type(failure).__name__}: {failure}" if failure else ""
    dist.all_gather_object(told, (own, {name: str(value) for name, value in alike.items()}), process_group)
    error = failure or ValueError(_difference(told))
    error.is_told = True  # type: ignore[attr-defined]
    raise error


def _difference(told: list[tuple[str, dict[str, str]]]) -> str:
    """Return the errors of the ranks that failed, else the first entry that differs."""
    errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(told) if error]
    if errors:
        return f"another rank failed: {'; '.join(errors)}"
    for name in told[0][1]:
        values = [alike.get(name) for _, alike in told]
        if len(set(values)) > 1:
            each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            return f"{name} must be the same on every rank, got {each}"
    return "the ranks are not at the same place"
