"""The streamed loop as PyTorch operators, so that autograd and torch.compile support it."""

import math
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.ops import loop
from vecroute.ops.common import (
    Weights,
    aligned,
    compute_dtype,
    from_16,
    normalize,
    product_dtype,
    used_pairs,
    without_autocast,
)
from vecroute.ops.group import all_reduce
from vecroute.ops.paths import module_of
from vecroute.ops.plan import Case, Plan, Tuning, choose_path, make_plan
from vecroute.ops.plan.case import device_of, has_aligned_rows, is_tf32, mask_strides
from vecroute.ops.problem import Problem


def named(weights: Sequence[Tensor]) -> Weights:
    """Return the parameters by name. The list has no None, and ends with two betas or with their W and B."""
    betas = weights[10:]
    return Weights(*weights[:10], *(betas if len(betas) == 2 else (None, None, *betas)))


def problem(
    plan: Plan, x_inp, weights, input_mask, pair_mask, cu_seqlens, prior, rounded, tuning, implementation,
    group, *, again=False,
) -> Problem:  # fmt: skip
    """Turn the arguments of the operators into a problem for the loop over chunks, with one batch dimension.

    Args:
        plan: the plan of the call, which also holds prior, rounded, tuning and implementation.
        again: True to leave sqrt_n_inp empty, because ``loop.backward`` already has it. Then ranks need not
            count inputs again.
    """
    batch = x_inp.shape[:-2]
    use = used_pairs(input_mask, pair_mask)  # [..., i, j or 1]
    if use is not None:
        use = use.expand(*batch, *use.shape[-2:]).reshape(math.prod(batch), *use.shape[-2:])  # [b, i, j or 1]
    if again:
        sqrt_n_inp = x_inp.new_empty(plan.batch, 1, dtype=plan.dtype)  # [b, 1]
    else:
        sqrt_n_inp = sqrt_lengths(x_inp, input_mask, cu_seqlens, group)  # [b, 1]
    x = x_inp.reshape(*plan.rows, x_inp.shape[-1])  # [b, i, d]
    return Problem(x, named(weights), use, sqrt_n_inp, cu_seqlens, plan, group)


def case_of(
    x_inp, weights, input_mask, pair_mask, cu_seqlens, prior, rounded, tuning, implementation, group, n_iters,
    need_phi=False, aligned=True, one_by_one=False, normalized=False,
) -> Case:  # fmt: skip
    """Return the case of a call. The caller passes ``aligned``, since fake tensors have no address."""
    n_out, d_out = weights[4].shape  # B_F2
    return Case(
        tuple(x_inp.shape), x_inp.dtype, rounded, weights[0].dtype, n_out, d_out, n_iters, len(weights) > 12,
        input_mask is not None, None if pair_mask is None else mask_strides(pair_mask, x_inp),
        None if cu_seqlens is None else (len(cu_seqlens) - 1, cu_seqlens.dtype), prior, implementation,
        Tuning(*tuning), bool(group), is_tf32(x_inp, rounded), need_phi, device_of(x_inp.device), aligned,
        one_by_one, normalized,
    )  # fmt: skip


def plan_of(x_inp: Tensor, *call: Any, **options: Any) -> Plan:
    """Return the plan of a call of the operators with real tensors."""
    options["aligned"] = has_aligned_rows(x_inp)
    return make_plan(case_of(x_inp, *call, **options))


def run_loop(
    x_inp: Tensor, weights: Sequence[Tensor], input_mask: Tensor | None, pair_mask: Tensor | None,
    cu_seqlens: Tensor | None, prior: float, rounded: torch.dtype, tuning: Sequence[int], implementation: str,
    group: str, n_iters: int, need_phi: bool, outputs: Sequence[int] | None, plan: Plan | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Return x_out [..., j, h], phi [..., i, j] for ``outputs`` (or None), memory of the backward pass."""
    call: Any = (
        x_inp, weights, input_mask, pair_mask, cu_seqlens, prior, rounded, tuning, implementation, group
    )  # fmt: skip
    plan = plan or plan_of(*call, n_iters, need_phi)
    phi = None
    if need_phi:  # the batch path computes all columns
        columns = plan.case.n_out if outputs is None or plan.path == "batch" else len(outputs)
        phi = x_inp.new_empty(*x_inp.shape[:-1], columns, dtype=plan.dtype)  # [..., i, j]
    if plan.path == "batch":
        with on_device(x_inp):
            x_out, saved = module_of("batch").forward(
                plan, x_inp, weights, input_mask, pair_mask, cu_seqlens, phi
            )
        return x_out, phi if phi is None or outputs is None else phi[..., list(outputs)].contiguous(), saved
    p = problem(plan, *call)
    x_out, saved = run_chunks(p, phi, outputs)
    batch = x_out.shape[:1] if cu_seqlens is not None else x_inp.shape[:-2]
    return x_out.view(*batch, *x_out.shape[1:]), phi, saved


def run_chunks(p: Problem, phi: Tensor | None, outputs: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Run ``loop.forward`` with the caller's precision settings, and fill phi [..., i, j] if it is given."""
    with tf32_under_autocast(p):
        flat = None if phi is None else phi.view(*p.x_inp.shape[:2], phi.shape[-1])  # [b, i, j]
        return loop.forward(p, flat, outputs)


def on_device(x: Tensor):
    """Make the device of x current, so that kernels are launched there."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


@torch.library.custom_op("vecroute::loop", mutates_args=())
def loop_op(
    x_inp: Tensor, weights: Sequence[Tensor], input_mask: Tensor | None, pair_mask: Tensor | None,
    cu_seqlens: Tensor | None, prior: float, rounded: torch.dtype, tuning: Sequence[int], implementation: str,
    group: str, n_iters: int, need_phi: bool, outputs: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run ``run_loop`` for compilers, which may pass tensors that are not aligned. phi is never None here."""
    x_out, phi, saved = run_loop(
        x_inp, [aligned(w) for w in weights], input_mask, from_16(pair_mask), from_16(cu_seqlens), prior,
        rounded, tuning, implementation, group, n_iters, need_phi, outputs,
    )  # fmt: skip
    return x_out, x_out.new_empty(*x_inp.shape[:-1], 0) if phi is None else phi, saved


@contextmanager
def tf32_under_autocast(p: Problem):
    """Use tf32 products if autocast asks for half precision of a float32 x_inp on a GPU.

    Autocast itself is off inside, because the plan decides what is rounded. Sums in float16 are off too,
    because they overflow. The device of x_inp is current.
    """
    tf32 = p.x_inp.is_cuda and p.x_inp.dtype == torch.float32 != p.plan.case.rounded
    matmul = torch.backends.cuda.matmul
    precision, sums = matmul.fp32_precision, matmul.allow_fp16_accumulation
    with without_autocast(p.x_inp), on_device(p.x_inp):
        try:
            if tf32:
                matmul.fp32_precision = "tf32"
            if sums:
                matmul.allow_fp16_accumulation = False
            yield
        finally:
            if tf32:
                matmul.fp32_precision = precision
            if sums:
                matmul.allow_fp16_accumulation = True


@loop_op.register_fake
def _(x_inp, weights, input_mask, pair_mask, cu_seqlens, *rest):
    *options, n_iters, need_phi, outputs = rest
    call: Any = x_inp, weights, input_mask, pair_mask, cu_seqlens, *options
    (j, h), dtype = weights[4].shape, compute_dtype(x_inp.dtype)
    batch = x_inp.shape[:-2] if cu_seqlens is None else [cu_seqlens.shape[0] - 1]
    k = (j if outputs is None else len(outputs)) if need_phi else 0
    memory = choose_path(case_of(*(*call, n_iters, need_phi))).saved
    saved = x_inp.new_empty(memory.n_bytes, dtype=torch.uint8)
    phi = x_inp.new_empty(*x_inp.shape[:-1], k, dtype=dtype)  # [..., i, j]
    return x_inp.new_empty(*batch, j, h, dtype=dtype), phi, saved


def run_loop_backward(
    grad_x_out: Tensor, x_inp: Tensor, weights: Sequence[Tensor], input_mask: Tensor | None,
    pair_mask: Tensor | None, cu_seqlens: Tensor | None, prior: float, rounded: torch.dtype,
    tuning: Sequence[int], implementation: str, group: str, n_iters: int, saved: Tensor, need_grad_x: bool,
    normalized: bool, plan: Plan | None = None,
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """Return the gradients of x_inp (None if not needed) and of the weights.

    Args:
        normalized: whether x_out of the call is normalised.
        plan: the plan of the forward pass, if it is known.
    """
    call: Any = (
        x_inp, weights, input_mask, pair_mask, cu_seqlens, prior, rounded, tuning, implementation, group
    )  # fmt: skip
    plan = plan or plan_of(*call, n_iters, normalized=normalized)
    if plan.path == "batch":
        with on_device(x_inp):
            grad_x, grads_w = module_of("batch").backward(
                plan, grad_x_out, x_inp, weights, pair_mask, cu_seqlens, saved, need_grad_x
            )
        if plan.case.w_dtype == plan.dtype:
            return grad_x, grads_w  # already as promised
        return grad_x, [as_promised(grad, w) for grad, w in zip(grads_w, weights, strict=True)]
    p = problem(plan, *call, again=True)
    with tf32_under_autocast(p):
        flat = grad_x_out.reshape(plan.batch, *grad_x_out.shape[-2:])  # [b, j, h]
        grad_x, grads = loop.backward(p, flat, saved, need_grad_x)
        grad_x = None if grad_x is None else grad_x.reshape(x_inp.shape)  # [..., i, d]
    names = Weights.names(plan.case.variable)
    return grad_x, [as_promised(grads.get(name), w) for name, w in zip(names, weights, strict=True)]


def as_promised(grad: Tensor | None, w: Tensor) -> Tensor:
    """Return the gradient of a parameter as the fake operator promises it: contiguous, in its dtype."""
    if grad is None:
        return w.new_zeros(w.shape)
    return grad if grad.dtype == w.dtype and grad.is_contiguous() else grad.to(w.dtype).contiguous()


@torch.library.custom_op("vecroute::loop_backward", mutates_args=())
def loop_backward_op(
    grad_x_out: Tensor, x_inp: Tensor, weights: Sequence[Tensor], input_mask: Tensor | None,
    pair_mask: Tensor | None,
    cu_seqlens: Tensor | None, prior: float, rounded: torch.dtype, tuning: Sequence[int], implementation: str,
    group: str, n_iters: int, saved: Tensor, need_grad_x: bool, normalized: bool,
) -> list[Tensor]:  # fmt: skip
    """Run ``run_loop_backward`` for compilers. The gradient of x_inp comes first, empty if not needed."""
    grad_x, grads = run_loop_backward(
        grad_x_out, x_inp, [aligned(w) for w in weights], input_mask, from_16(pair_mask), from_16(cu_seqlens),
        prior, rounded, tuning, implementation, group, n_iters, saved, need_grad_x, normalized,
    )  # fmt: skip
    return [x_inp.new_empty(0) if grad_x is None else grad_x, *grads]


@loop_backward_op.register_fake
def _(grad_x_out, x_inp, weights, *args):
    need_grad_x = args[-2]
    grad_x = (
        torch.empty_like(x_inp, memory_format=torch.contiguous_format) if need_grad_x else x_inp.new_empty(0)
    )
    return [grad_x, *(w.new_empty(w.shape) for w in weights)]


def _setup_context(ctx, inputs, output) -> None:
    x_inp, weights, input_mask, pair_mask, cu_seqlens, *ctx.options, _, _ = inputs
    _, _, saved = output
    ctx.set_materialize_grads(False)
    ctx.n_weights, ctx.plan = len(weights), None
    ctx.save_for_backward(saved, x_inp, *weights, input_mask, pair_mask, cu_seqlens)


def _backward(ctx, grad_x_out, *_):
    grad_x, grads = _gradients(ctx, grad_x_out, ctx.needs_input_grad[0])
    return (grad_x, grads, *[None] * 11)


def _gradients(ctx, grad_x_out: Tensor | None, need_grad_x: bool):
    """Return the gradient of x_inp (None if not needed) and those of the weights."""
    if grad_x_out is None:
        return None, [None] * ctx.n_weights
    saved, x_inp, *rest = ctx.saved_tensors
    weights, masks = rest[: ctx.n_weights], rest[ctx.n_weights :]
    # If the caller wants a graph of the backward pass, call the operator, which refuses second derivatives.
    plain = is_plain(grad_x_out) and not torch.is_grad_enabled()
    normalized = ctx.plan is not None and ctx.plan.normalizes
    call: Any = grad_x_out, x_inp, weights, *masks, *ctx.options, saved, need_grad_x, normalized
    if plain:
        return run_loop_backward(*(*call, ctx.plan))
    grad_x, *grads = loop_backward_op(*call)
    return grad_x if need_grad_x else None, grads


loop_op.register_autograd(_backward, setup_context=_setup_context)


def _refuse(ctx, *_):
    raise RuntimeError("second derivatives need VectorRouting(implementation='reference')")


loop_backward_op.register_autograd(_refuse)


class Loop(torch.autograd.Function):
    """``loop_op`` as an autograd function: plan, its other arguments, x_inp and the weights -> x_out, phi.

    PyTorch looks at each argument of a function on its own, so all that have no gradient are one argument.
    """

    @staticmethod
    def forward(ctx, plan: Plan, others: tuple, x_inp: Tensor, *weights: Tensor):
        inputs: Any = x_inp, weights, *others
        x_out, phi, saved = run_loop(*(*inputs, plan))  # [..., j, h], [..., i, j]
        _setup_context(ctx, inputs, (x_out, phi, saved))
        ctx.plan = plan
        if phi is not None:
            ctx.mark_non_differentiable(phi)
        return x_out, phi

    @staticmethod
    def backward(ctx, grad_x_out: Tensor | None, _):
        grad_x, grads = _gradients(ctx, grad_x_out, ctx.needs_input_grad[2])
        return None, None, grad_x, *grads


def is_plain(x: Tensor) -> bool:
    """Return whether only autograd traces a call. Such a call bypasses the dispatcher to save host time."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_tracing_state() is not None:  # torch.jit traces the call
        return False
    return type(x) in (Tensor, nn.Parameter) and not x.is_meta and not torch._C._len_torch_dispatch_stack()


def operator_arguments(
    x_inp: Tensor,
    weights: Weights,
    input_mask: Tensor | None,
    pair_mask: Tensor | None,
    prior: float,
    *,
    implementation: str,
    tuning: Tuning,
    cu_seqlens: Tensor | None = None,
    group: str = "",
) -> Any:
    """Return the arguments of the operators, with the weights that are not None as a list."""
    rounded = product_dtype(x_inp)
    tensors = [w for w in weights if w is not None]
    if is_plain(x_inp):
        tensors = [aligned(w) for w in tensors]
        pair_mask, cu_seqlens = from_16(pair_mask), from_16(cu_seqlens)
    return (
        x_inp, tensors, input_mask, pair_mask, cu_seqlens, prior, rounded, list(tuning), implementation, group
    )  # fmt: skip


def sqrt_lengths(x_inp: Tensor, input_mask: Tensor | None, cu_seqlens: Tensor | None, group: str) -> Tensor:
    """Return sqrt(n_inp) of each sample, over all ranks, [b, 1]; 1 for a sample without inputs."""
    batch, dtype = x_inp.shape[:-2], compute_dtype(x_inp.dtype)
    if cu_seqlens is not None:
        n_inp = cu_seqlens.diff()[:, None]  # [b, 1]
    elif input_mask is not None:
        n_inp = input_mask.sum(-1, keepdim=True).expand(*batch, 1).reshape(-1, 1)  # [b, 1]
    else:
        n_inp = x_inp.new_full((math.prod(batch), 1), x_inp.shape[-2], dtype=dtype)  # [b, 1]
    if group:
        n_inp = all_reduce(group, n_inp.long().clone())  # [b, 1]
    return n_inp.clamp(min=1).to(dtype).sqrt()  # [b, 1]


def route_streamed(
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
    normalized: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Route with a streamed implementation.

    Args:
        cu_seqlens: [b + 1] offsets of the samples in a packed x_inp [total, d].
        group: name of the group of ranks that share the inputs; "" for none.
        need_phi, outputs: whether to return phi, and for which outputs (None for all).
        phi_out: [..., i, j] tensor to write phi to, instead of a new one. Then x_out has no graph.
        normalized: whether to normalise x_out.

    Returns:
        x_out [..., j, h], and phi [..., i, j] (None unless need_phi), which has no graph.
    """
    arguments = operator_arguments(
        x_inp, weights, input_mask, pair_mask, prior, implementation=implementation, tuning=tuning,
        cu_seqlens=cu_seqlens, group=group,
    )  # fmt: skip
    plain = is_plain(x_inp)
    if weights.W_use is None and (phi_out is not None or not torch.is_grad_enabled()):
        # Without a backward pass, the plan keeps no dot products.
        chunked = implementation == "chunked" or (plain and plan_of(*arguments, n_iters).path != "batch")
        if chunked:
            arguments = (*arguments[:7], list(tuning._replace(keep_bytes=0)), *arguments[8:])
    if phi_out is not None:
        x_out = write_phi(arguments, n_iters, outputs, phi_out)
        return normalize(x_out) if normalized else x_out, phi_out
    if plain:
        plan = plan_of(*arguments, n_iters, need_phi, normalized=normalized)
        _, tensors, *others = arguments
        x_out, phi = Loop.apply(plan, (*others, n_iters, need_phi, outputs), x_inp, *tensors)
        normalized = normalized and not plan.normalizes
    else:
        x_out, phi, _ = loop_op(*arguments, n_iters, need_phi, outputs)
    return normalize(x_out) if normalized else x_out, phi.detach() if need_phi else None


@torch.no_grad()
def write_phi(arguments, n_iters: int, outputs: Sequence[int] | None, phi_out: Tensor) -> Tensor:
    """Run the loop, write phi to phi_out and return x_out [..., j, h]."""
    plan = plan_of(*arguments, n_iters, need_phi=True)
    if plan.path == "batch":
        x_out, phi, _ = run_loop(*(*arguments, n_iters, True, outputs, plan))
        assert phi is not None
        phi_out.copy_(phi)
        return x_out
    x_out, _ = run_chunks(problem(plan, *arguments), phi_out, outputs)
    batch = x_out.shape[:1] if plan.case.packed else plan.case.shape[:-2]
    return x_out.view(*batch, *x_out.shape[1:])
