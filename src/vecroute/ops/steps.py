"""The routing loop one iteration at a time, for callers that decide after each one whether to continue.

``step(None)`` is the first iteration, under the flat prior; ``step(x_out)`` starts from x_out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vecroute.ops import passes
from vecroute.ops.autograd import operator_arguments, plan_of, problem, tf32_under_autocast
from vecroute.ops.columns import block_of, new_matrix
from vecroute.ops.common import Weights
from vecroute.ops.gradient import InputGradient, new_grad_x


class StreamedSteps:
    """Iterations of a streamed implementation, which share activations and kept arrays.

    Args:
        x_inp, weights, args, cu_seqlens, options: the arguments of ``route_streamed``.
    """

    def __init__(self, x_inp: Tensor, weights: Weights, *args, cu_seqlens: Tensor | None, **options):
        # x [b, i, d] and the parameters carry their graph here, but not in the problem.
        self.x, self.weights, *rest = operator_arguments(
            x_inp, weights, *args, cu_seqlens=cu_seqlens, **options
        )
        call: Any = self.x.detach(), [w.detach() for w in self.weights], *rest
        self.p = problem(plan_of(*call, 2, one_by_one=True), *call)
        self.f_a_inp = self.x.new_empty(self.p.x_inp.shape[:2], dtype=self.p.dtype)  # [b, i]
        self.kept = passes.new_kept(self.p)
        self.lead = x_inp.shape[:-1]  # the shape of phi, without j
        with torch.no_grad():
            first = self.forward(None)[0]  # [b, j, h]
        batch = x_inp.shape[:-2] if cu_seqlens is None else first.shape[:1]
        self.first = first.reshape(*batch, *first.shape[1:])  # [..., j, h]

    def __call__(self, x_out: Tensor | None, need_phi: bool = False, outputs=None, phi_out=None):
        """Return x_out [..., j, h] after the iteration, and its phi [..., i, j] (None unless need_phi)."""
        if x_out is None:
            return self.first, None
        phi = None
        if need_phi:
            columns = self.p.n_out if outputs is None else len(outputs)
            phi = (
                self.x.new_empty(*self.lead, columns, dtype=self.p.dtype) if phi_out is None else phi_out
            )  # [..., i, j]
        fill = (
            None if phi is None else phi.view(*self.p.x_inp.shape[:2], phi.shape[-1]),
            outputs,
        )  # [b, i, j]
        x_new = _Step.apply(self, fill, self._flat(x_out), self.x, *self.weights)  # [b, j, h]
        return (x_new if phi_out is None else x_new.detach()).reshape(x_out.shape), phi

    def pull(self, x_out: Tensor, grad: Tensor) -> Tensor:
        """Return J^T grad, [..., j, h], with J the Jacobian of the iteration at x_out."""
        y = self.p.x_inp.new_zeros(*self._flat(x_out).shape[:2], self.p.x_inp.shape[-1], dtype=self.p.dtype)
        grad_x_out, _, _ = self.backward(self._flat(x_out), self._flat(grad), y, y[..., 0], False, False)
        return grad_x_out.reshape(x_out.shape)  # [..., j, h]

    def _flat(self, x_out: Tensor) -> Tensor:
        return x_out.reshape(-1, *x_out.shape[-2:])  # [b, j, h]

    def forward(self, x_out: Tensor | None, phi: Tensor | None = None, outputs=None):
        """Return x_out [b, j, h] after the iteration, and y [b, j, d] and s [b, j] for its backward pass."""
        p = self.p
        with tf32_under_autocast(p):
            M = None
            if x_out is not None:
                M = new_matrix(p, 1)  # [b, j, d]
                p.steps.scores_matrix(p, p.steps.predicted(p, x_out), block_of(p, M, 0))
            y = p.x_inp.new_empty(len(p.sqrt_n_inp), *p.w.W_F1.shape, dtype=p.dtype)  # [b, j, d]
            s = p.x_inp.new_empty(*y.shape[:2], dtype=p.dtype)  # [b, j]
            passes.forward_pass(p, M, self.f_a_inp, self.kept, y, s, phi, outputs)
            p.total(y, s)
            return p.steps.outputs(p, y, s), y, s

    def backward(self, x_out, grad, y, s, need_weights: bool, need_grad_x: bool):
        """Return the gradients of x_out [b, j, h], of x_inp (None if not needed) and of the parameters.

        Args:
            need_weights: True if gradients of the parameters are needed too.
        """
        p = self.p
        grads = passes.new_grads(p, 2)
        grad_f = torch.zeros_like(self.f_a_inp)  # [b, i]
        shared = self.f_a_inp, self.kept
        with tf32_under_autocast(p):
            into = InputGradient(p, new_grad_x(p, need_grad_x), None if p.variable else grads["W_A"])
            g = p.steps.predicted(p, x_out)  # [b, j, d]
            M = into.new_matrix(p, first=False)  # [b, 2 j, d]
            grad_s = p.steps.outputs_backward(p, grad, y, s, grads, block_of(p, M, 0))  # [b, j]
            p.steps.scores_matrix(p, g, block_of(p, M, 1))
            grad_x_hat = passes.backward_pass(
                p, g, *shared, M, grad_s, into, grad_f, grads, fresh=True
            )  # [b, j, d]
            p.total(grad_x_hat)
            grad_x_out = p.steps.predictions_backward(p, grad_x_hat, x_out, g, grads)  # [b, j, h]
            if need_weights or need_grad_x:
                # The pass of the first iteration turns grad_f into gradients. Its own outputs have none here.
                M, zero_s = into.new_matrix(p, first=True).zero_(), torch.zeros_like(grad_s)  # and [b, j]
                passes.backward_pass(p, None, *shared, M, zero_s, into, grad_f, grads, fresh=False)
        return grad_x_out, into.grad_x, grads


class _Step(torch.autograd.Function):
    """One iteration: (steps, where to write phi, x_out, x_inp, parameters) -> x_out."""

    @staticmethod
    def forward(
        ctx: Any, steps: StreamedSteps, fill: tuple, x_out: Tensor, x: Tensor, *weights: Tensor
    ) -> Tensor:
        x_new, y, s = steps.forward(x_out, *fill)
        ctx.steps = steps
        # x_inp and the parameters are in steps too. They are saved so that autograd notices if they change.
        ctx.save_for_backward(x_out, y, s, x, *weights)
        return x_new  # [b, j, h]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x_out, y, s, *_ = ctx.saved_tensors
        _, _, _, need_grad_x, *need_weights = ctx.needs_input_grad
        grad_x_out, grad_x, grads = ctx.steps.backward(x_out, grad, y, s, any(need_weights), need_grad_x)
        if not any(need_weights):
            return None, None, grad_x_out, grad_x, *(None for _ in need_weights)
        names = [name for name, w in ctx.steps.p.w._asdict().items() if w is not None]
        grads_w = (grads[name].to(w.dtype) for name, w in zip(names, ctx.steps.weights, strict=True))
        return None, None, grad_x_out, grad_x, *grads_w
