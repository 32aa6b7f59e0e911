"""The routing loop of Algorithm 2, in several implementations that must agree.

``reference`` is Algorithm 2 line by line, the truth. ``chunked`` streams over chunks of inputs on any device
and recomputes in its backward pass. ``fused`` does the same with Triton kernels, for CUDA. ``auto`` chooses.
``README.md`` in this folder follows a call from here to its last kernel.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

from vecroute.ops.autograd import operator_arguments, plan_of, route_streamed
from vecroute.ops.common import Weights, compute_dtype, is_exporting, normalize
from vecroute.ops.plan import Plan, Tuning
from vecroute.ops.reference import route_reference
from vecroute.ops.steps import StreamedSteps

__all__ = ["IMPLEMENTATIONS", "Plan", "Tuning", "Weights", "plan_route", "route", "steps"]

IMPLEMENTATIONS = ("auto", "reference", "chunked", "fused")
HAS_TRITON = find_spec("triton") is not None  # looked up here, since compilers trace calls


def route(
    x_inp: Tensor,
    weights: Weights,
    n_iters: int,
    input_mask: Tensor | None,
    pair_mask: Tensor | None,
    prior: float,
    *,
    implementation: str,
    tuning: Tuning,
    cu_seqlens: Tensor | None = None,
    group: str = "",
    need_phi: bool = False,
    outputs: Sequence[int] | None = None,
    phi_out: Tensor | None = None,
    x_init: Tensor | None = None,
    normalized: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the loop with the named implementation on arguments already checked.

    Args:
        group: name of the group of ranks that hold the other inputs; "" for none.
        need_phi, outputs, phi_out: whether to return phi, for which outputs, and where to write it (see
            ``route_streamed``).
        x_init: [..., j, h] outputs to start from instead of the flat prior; only the reference takes them.
        normalized: whether to normalise x_out at the end.

    Returns:
        x_out [..., j, h], and phi [..., i, j] (None unless need_phi), at least float32.
    """
    implementation = pick(implementation, x_inp, cu_seqlens)
    if implementation == "reference":
        if group:
            raise ValueError("inputs sharded over ranks cannot be routed by implementation='reference'")
        if cu_seqlens is None:
            last = route_reference(x_inp, weights, n_iters, input_mask, pair_mask, prior, x_init=x_init)
            x_out, phi = last.x_out, last.phi  # [..., j, h], [..., i, j]
        else:
            x_out, phi = reference_of_packed(x_inp, weights, n_iters, prior, cu_seqlens, x_init)
        x_out = normalize(x_out) if normalized else x_out
        if not need_phi:
            return x_out, None
        phi = phi if outputs is None else phi[..., list(outputs)]  # [..., i, j]
        if phi_out is None:
            return x_out, phi
        return x_out.detach(), phi_out.copy_(phi.detach())
    return route_streamed(
        x_inp, weights, n_iters, input_mask, pair_mask, prior, implementation=implementation, tuning=tuning,
        cu_seqlens=cu_seqlens, group=group, need_phi=need_phi, outputs=outputs, phi_out=phi_out,
        normalized=normalized,
    )  # fmt: skip


def plan_route(
    x_inp: Tensor, weights: Weights, n_iters: int, *args, implementation: str, normalized: bool = False,
    **options,
) -> Plan:  # fmt: skip
    """Return the plan of ``route`` with the same arguments."""
    picked = pick(implementation, x_inp, options["cu_seqlens"])
    if picked == "reference":
        raise ValueError("implementation='reference' has no plan: it is Algorithm 2 line by line")
    arguments = operator_arguments(x_inp, weights, *args, implementation=picked, **options)
    plan = plan_of(*arguments, n_iters, normalized=normalized)
    if implementation == "auto" and picked == "chunked":
        problem = why_not_fused(x_inp) if x_inp.is_cuda else None
        why = f"fused {problem}" if problem else f"x_inp is on {x_inp.device}, not on a CUDA device"
        return replace(plan, why=f"implementation='auto', and {why}")
    return plan


def steps(x_inp: Tensor, weights: Weights, *args, implementation: str, **options):
    """Return functions that run single iterations. The arguments are the same as in ``route``.

    Returns:
        step: (x_out or None, need_phi, outputs, phi_out) -> (x_out, phi). It runs one iteration from x_out
            [..., j, h], or for None the first iteration, under the flat prior.
        pull: (x_out, grad) -> J^T grad, where J is the Jacobian of an iteration at x_out. None if autograd
            can compute it.
    """
    implementation = pick(implementation, x_inp, options["cu_seqlens"])
    if implementation != "reference":
        streamed = StreamedSteps(x_inp, weights, *args, implementation=implementation, **options)
        return streamed, streamed.pull

    def step(x_out: Tensor | None, need_phi: bool = False, outputs=None, phi_out=None):
        return route(
            x_inp, weights, 1, *args, implementation="reference", **options, need_phi=need_phi,
            outputs=outputs, phi_out=phi_out, x_init=x_out,
        )  # fmt: skip

    return step, None


def reference_of_packed(
    x_inp: Tensor, weights: Weights, n_iters: int, prior: float, cu_seqlens: Tensor, x_init=None
):
    """Route packed samples one after the other: x_out [b, j, h] and phi [total, j]."""
    x_out, phi = [], []
    for b, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if start == end:
            x_out.append(x_inp.new_zeros(weights.B_F2.shape, dtype=compute_dtype(x_inp.dtype)))  # [j, h]
        else:
            init = None if x_init is None else x_init[b]  # [j, h]
            last = route_reference(x_inp[start:end], weights, n_iters, prior=prior, x_init=init)
            x_out.append(last.x_out)  # [j, h]
            phi.append(last.phi)  # [i, j]
    empty = x_inp.new_zeros(0, weights.W_F1.shape[0], dtype=compute_dtype(x_inp.dtype))  # [0, j]
    return torch.stack(x_out), torch.cat([empty, *phi])  # [b, j, h], [total, j]


def pick(implementation: str, x_inp: Tensor, cu_seqlens: Tensor | None) -> str:
    """Return the implementation for a name, which may be "auto". Raise if it cannot route x_inp."""
    if implementation == "auto":
        return choose(x_inp, cu_seqlens)
    if implementation != "reference" and has_forward_mode():
        raise RuntimeError(
            f"implementation={implementation!r} has no forward-mode derivatives (torch.func.jvp, jacfwd, "
            "torch.autograd.forward_ad): use implementation='auto' or 'reference'"
        )
    if implementation == "fused" and (problem := why_not_fused(x_inp)):
        raise ValueError(f"implementation='fused' {problem}")
    return implementation


def checks_offsets(implementation: str, x_inp: Tensor) -> bool:
    """Return whether a kernel checks the offsets of packed samples with an assertion on the device."""
    return pick(implementation, x_inp, x_inp) == "fused"


def has_forward_mode() -> bool:
    """Return whether the call runs inside forward-mode differentiation: torch.func.jvp or a dual level."""
    if torch.compiler.is_compiling():
        return False
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or []
    return any(interpreter.key() == functorch.TransformType.Jvp for interpreter in stack)


def choose(x_inp: Tensor, cu_seqlens: Tensor | None) -> str:
    """Return the implementation that ``auto`` stands for."""
    if cu_seqlens is None and is_exporting():
        return "reference"  # plain operators, which every runtime has
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "reference"  # torch.func cannot transform operators with a custom backward
    if has_forward_mode():
        return "reference"
    return "fused" if x_inp.is_cuda and why_not_fused(x_inp) is None else "chunked"


def why_not_fused(x_inp: Tensor) -> str | None:
    """Return the reason why ``fused`` cannot route x_inp, None if it can."""
    if not HAS_TRITON:
        return "needs the package triton, which is not installed"
    if not x_inp.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs x_inp on a CUDA device (or TRITON_INTERPRET=1), got {x_inp.device}"
    return None
