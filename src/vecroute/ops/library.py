"""The streamed loop as PyTorch operators, so that autograd and torch.compile know it."""

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from vecroute.ops import loop
from vecroute.ops.common import Weights, compute_dtype, product_dtype, used_pairs, without_autocast
from vecroute.ops.group import all_reduce
from vecroute.ops.half_inputs import new_half_inputs
from vecroute.ops.passes import new_kept, new_x_hat
from vecroute.ops.problem import Problem, Tuning


def problem(
    x_inp, weights, use, sqrt_n_inp, cu_seqlens, prior, rounded, tuning, implementation, group
) -> Problem:
    """Gather the flat arguments of the operators."""
    betas = weights[10:]  # two parameters, or four from which they are computed
    w = Weights(*weights[:10], *(betas if len(betas) == 2 else (None, None, *betas)))
    options = prior, rounded, Tuning(*tuning), implementation, group
    return Problem(x_inp, w, use, sqrt_n_inp, cu_seqlens, *options)


def run_loop(
    x_inp: Tensor,
    weights: Sequence[Tensor],
    use: Tensor | None,
    sqrt_n_inp: Tensor,
    cu_seqlens: Tensor | None,
    prior: float,
    rounded: torch.dtype,
    tuning: Sequence[int],
    implementation: str,
    group: str,
    n_iters: int,
    need_phi: bool,
    outputs: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """x_out [b, j, h], phi [b, i, j] of the given outputs (None for all), what the backward pass needs."""
    p = problem(x_inp, weights, use, sqrt_n_inp, cu_seqlens, prior, rounded, tuning, implementation, group)
    phi = x_inp.new_empty(*x_inp.shape[:2], n_columns(p, need_phi, outputs), dtype=p.dtype)  # [b, i, j]
    with tf32_under_autocast(p):
        x_out, *saved = loop.forward(p, n_iters, phi if need_phi else None, outputs)
    return x_out, phi, *saved


loop_op = torch.library.custom_op("vecroute::loop", run_loop, mutates_args=())


@contextmanager
def tf32_under_autocast(p: Problem):
    """Where autocast asks for products in half precision of a float32 x_inp on a GPU, let them be tf32.

    Autocast itself is off: what is rounded is for the loop to say. So are sums in float16, whose range they
    leave. Kernels are launched on the device of x_inp, whichever is current.
    """
    device = torch.cuda.device(p.x_inp.device) if p.x_inp.is_cuda else nullcontext()
    tf32 = p.x_inp.is_cuda and p.x_inp.dtype == torch.float32 != p.rounded
    matmul = torch.backends.cuda.matmul
    precision, sums = matmul.fp32_precision, matmul.allow_fp16_accumulation
    with without_autocast(p.x_inp), device:
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


def n_columns(p: Problem, need_phi: bool, outputs: Sequence[int] | None) -> int:
    """How many columns of phi are asked for."""
    return (p.n_out if outputs is None else len(outputs)) if need_phi else 0


@loop_op.register_fake
def _(x_inp, weights, use, sqrt_n_inp, cu_seqlens, prior, rounded, tuning, implementation, group, *rest):
    n_iters, need_phi, outputs = rest
    p = problem(x_inp, weights, use, sqrt_n_inp, cu_seqlens, prior, rounded, tuning, implementation, group)
    b, (j, h), d = sqrt_n_inp.shape[0], p.w.B_F2.shape, x_inp.shape[-1]

    def empty(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return x_inp.new_empty(*shape, dtype=dtype)

    saved = (empty(n_iters, b, j, d), empty(n_iters, b, j), empty(n_iters - 1, b, j, h),
             empty(n_iters - 1, b, j, d, dtype=p.step_dtype), empty(*x_inp.shape[:2]))  # fmt: skip
    kept, phi = new_kept(p, n_iters), empty(*x_inp.shape[:2], n_columns(p, need_phi, outputs))
    copies = [t.new_empty(t.shape, dtype=dtype) for t, dtype in p.kept_copies.values()]
    return empty(b, j, h), phi, *saved, kept, new_x_hat(p, n_iters), copies + new_half_inputs(p, n_iters)


def run_loop_backward(
    grad_x_out: Tensor,
    x_inp: Tensor,
    weights: Sequence[Tensor],
    use: Tensor | None,
    sqrt_n_inp: Tensor,
    cu_seqlens: Tensor | None,
    prior: float,
    rounded: torch.dtype,
    tuning: Sequence[int],
    implementation: str,
    group: str,
    y: Tensor,
    s: Tensor,
    before: Tensor,
    g: Tensor,
    f_a_inp: Tensor,
    kept: Tensor,
    x_hat: Tensor,
    copies: Sequence[Tensor],
    need_grad_x: bool,
) -> list[Tensor]:
    """Gradients of x_inp (empty if not needed) and of the weights."""
    p = problem(x_inp, weights, use, sqrt_n_inp, cu_seqlens, prior, rounded, tuning, implementation, group)
    with tf32_under_autocast(p):
        saved = y, s, before, g, f_a_inp, kept, x_hat, copies
        grad_x, grads = loop.backward(p, grad_x_out, *saved, need_grad_x)
    parameters = {name: w for name, w in p.w._asdict().items() if w is not None}
    # Contiguous, as the fake below promises to compilers.
    grads_w = [
        grads[name].to(w.dtype).contiguous() if name in grads else w.new_zeros(w.shape)
        for name, w in parameters.items()
    ]
    return [x_inp.new_empty(0) if grad_x is None else grad_x, *grads_w]


loop_backward_op = torch.library.custom_op("vecroute::loop_backward", run_loop_backward, mutates_args=())


@loop_backward_op.register_fake
def _(grad_x_out, x_inp, weights, *args):
    need_grad_x = args[-1]
    grad_x = torch.empty_like(x_inp) if need_grad_x else x_inp.new_empty(0)
    return [grad_x, *(w.new_empty(w.shape) for w in weights)]


def _setup_context(ctx, inputs, output) -> None:
    x_inp, weights, use, sqrt_n_inp, cu_seqlens, *ctx.options, _, _, _ = inputs
    _, _, *saved, copies = output
    ctx.set_materialize_grads(False)
    ctx.n_weights, ctx.n_copies = len(weights), len(copies)
    ctx.save_for_backward(*copies, x_inp, *weights, use, sqrt_n_inp, cu_seqlens, *saved)


def _backward(ctx, grad_x_out, *_):
    tensors = ctx.saved_tensors
    copies, (x_inp, *rest) = tensors[: ctx.n_copies], tensors[ctx.n_copies :]
    weights, (use, sqrt_n_inp, cu_seqlens, *saved) = rest[: ctx.n_weights], rest[ctx.n_weights :]
    if grad_x_out is None:
        return (None, [None] * ctx.n_weights, *[None] * 11)
    need_grad_x = ctx.needs_input_grad[0]
    # With a graph the operator, which refuses to be differentiated.
    plain = is_plain(grad_x_out) and not torch.is_grad_enabled()
    run: Callable = run_loop_backward if plain else loop_backward_op
    grad_x, *grads = run(
        grad_x_out,
        x_inp,
        weights,
        use,
        sqrt_n_inp,
        cu_seqlens,
        *ctx.options,
        *saved,
        copies,
        need_grad_x,
    )
    return (grad_x if need_grad_x else None, grads, *[None] * 11)


loop_op.register_autograd(_backward, setup_context=_setup_context)


def _refuse(ctx, *_):
    raise RuntimeError("second derivatives need VectorRouting(implementation='reference')")


loop_backward_op.register_autograd(_refuse)


class Loop(torch.autograd.Function):
    """``loop_op`` for a plain call: (x_inp, number of weights, weights, other arguments) -> (x_out, phi)."""

    @staticmethod
    def forward(ctx, x_inp: Tensor, n_weights: int, *arguments):
        inputs = x_inp, arguments[:n_weights], *arguments[n_weights:]
        x_out, phi, *saved = run_loop(*inputs)  # [b, j, h], [b, i, j]
        _setup_context(ctx, inputs, (x_out, phi, *saved))
        ctx.mark_non_differentiable(phi)
        return x_out, phi

    @staticmethod
    def backward(ctx, grad_x_out: Tensor | None, _):
        grad_x, grads_w, *others = _backward(ctx, grad_x_out)
        return grad_x, None, *grads_w, *others


def is_plain(x: Tensor) -> bool:
    """Whether autograd alone follows a call: then it goes past the dispatcher, as slow as a small loop."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._get_tracing_state() is not None:  # of torch.jit
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
) -> tuple:
    """The arguments of ``problem``: batch dimensions as one, b, and the weights that there are as a list."""
    batch = x_inp.shape[:-2]
    rounded = product_dtype(x_inp)
    use = used_pairs(input_mask, pair_mask)  # [..., i, j or 1]
    if use is not None:
        use = use.expand(*batch, *use.shape[-2:]).reshape(math.prod(batch), *use.shape[-2:])  # [b, i, j or 1]
    sqrt_n_inp = sqrt_lengths(x_inp, input_mask, cu_seqlens, group)  # [b, 1]
    x = x_inp.reshape(1 if cu_seqlens is not None else math.prod(batch), *x_inp.shape[-2:])  # [b, i, d]
    tensors = [w.contiguous() for w in weights if w is not None]  # kernels count on it
    return x, tensors, use, sqrt_n_inp, cu_seqlens, prior, rounded, list(tuning), implementation, group


def sqrt_lengths(x_inp: Tensor, input_mask: Tensor | None, cu_seqlens: Tensor | None, group: str) -> Tensor:
    """sqrt(n_inp) of each sample, over all ranks, [b, 1]; 1 where there are no inputs."""
    batch, dtype = x_inp.shape[:-2], compute_dtype(x_inp.dtype)
    if cu_seqlens is not None:
        n_inp = cu_seqlens.diff()[:, None]  # [b, 1]
    elif input_mask is not None:
        n_inp = input_mask.sum(-1, keepdim=True).expand(*batch, 1).reshape(-1, 1)  # [b, 1]
    elif not group and is_plain(x_inp):
        sqrt = math.sqrt(max(1, x_inp.shape[-2]))  # by the host, which spares a GPU two kernels
        return x_inp.new_full((math.prod(batch), 1), sqrt, dtype=dtype)  # [b, 1]
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
) -> tuple[Tensor, Tensor | None]:
    """Route with a streamed implementation.

    Args:
        cu_seqlens: [b + 1] offsets of the samples in a packed x_inp [total, d].
        group: name of the group of ranks that hold the other inputs, each some of them; "" for none.
        need_phi, outputs: whether to give phi, and of which outputs (None for all).
        phi_out: [..., i, j] where to write them instead of a new tensor; x_out then has no graph.

    Returns:
        x_out [..., j, h] and phi [..., i, j] (None if not asked for), which has no graph.
    """
    batch = x_inp.shape[:-2]
    if weights.W_use is None and (phi_out is not None or not torch.is_grad_enabled()):
        tuning = tuning._replace(keep_bytes=0)  # dot products are kept for a backward alone
    arguments = operator_arguments(
        x_inp,
        weights,
        input_mask,
        pair_mask,
        prior,
        implementation=implementation,
        tuning=tuning,
        cu_seqlens=cu_seqlens,
        group=group,
    )
    x = arguments[0]  # [b, i, d]
    if phi_out is None:
        _, tensors, *rest = arguments
        if is_plain(x):
            x_out, phi = Loop.apply(x, len(tensors), *tensors, *rest, n_iters, need_phi, outputs)
        else:
            x_out, phi, *_ = loop_op(*arguments, n_iters, need_phi, outputs)
        phi = phi.detach().view(*x_inp.shape[:-1], phi.shape[-1])  # [..., i, j]
    else:
        phi = phi_out
        p = problem(*arguments)
        with torch.no_grad(), tf32_under_autocast(p):
            view = phi_out.view(*x.shape[:2], phi_out.shape[-1])  # [b, i, j]
            x_out, *_ = loop.forward(p, n_iters, view, outputs)
    if cu_seqlens is None:
        x_out = x_out.reshape(*batch, *x_out.shape[1:])  # [..., j, h]
    return x_out, phi if need_phi else None
