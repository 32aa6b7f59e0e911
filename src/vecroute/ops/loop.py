"""The routing loop: all iterations, with a backward that recomputes instead of storing.

The heavy work of an iteration is one *pass* over the inputs, which gives only

    y_jd = sum_i phi_ij x_id,   s_j = sum_i phi_ij.

Everything between two passes is small.
"""

import torch
from torch import Tensor

from vecroute.ops import passes
from vecroute.ops.columns import block_of, new_matrix
from vecroute.ops.half_inputs import new_half_inputs
from vecroute.ops.problem import Grads, Problem
from vecroute.ops.waiting import InputGradient, new_grad_x


def forward(p: Problem, n_iters: int, phi: Tensor | None = None, outputs=None):
    """Run the loop; phi [b, i, j], where given, is filled in the last iteration, for some outputs or for all.

    Returns:
        x_out [b, j, h], and what the backward pass needs: y [t, b, j, d] and s [t, b, j] of every iteration,
        x_out [t - 1, b, j, h] and g [t - 1, b, j, d] before every iteration but the first, f(a_inp) [b, i],
        what ``passes`` keep, x_hat too, and copies of ``p.kept_copies``; after them those of ``p.half``.
    """
    b, (j, h), d = p.sqrt_n_inp.shape[0], p.w.B_F2.shape, p.x_inp.shape[-1]

    def empty(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return p.x_inp.new_empty(*shape, dtype=dtype)

    y, s = empty(n_iters, b, j, d), empty(n_iters, b, j)  # [t, b, j, d], [t, b, j]
    before = empty(n_iters - 1, b, j, h)  # [t - 1, b, j, h]
    g = empty(n_iters - 1, b, j, d, dtype=p.step_dtype)  # [t - 1, b, j, d]
    f_a_inp = empty(*p.x_inp.shape[:2])  # [b, i]
    kept, x_hat = passes.new_kept(p, n_iters), passes.new_x_hat(p, n_iters)  # and [t - 1 or 0, b, j, d]
    halves = new_half_inputs(p, n_iters)
    p.half = p.half_passes.HalfInputs(*halves).fill(p) if halves else None
    M = None
    for t in range(n_iters):
        last = t == n_iters - 1
        kept_t = passes.kept_in(p, kept, t)  # [b, i, k]
        passes.forward_pass(p, M, f_a_inp, kept_t, y[t], s[t], phi if last else None, outputs)
        p.total(y[t], s[t])
        x_out = p.steps.outputs(p, y[t], s[t], None if last else before[t])  # [b, j, h]
        if not last:
            if len(x_hat):
                M = x_hat[t]  # [b, j, d]
            elif M is None:
                M = new_matrix(p, 1)  # [b, j, d]
            p.steps.scores_matrix(p, p.steps.predicted(p, x_out, g[t]), block_of(p, M, 0))
    copies = [*(p.in_dtype(name, *of) for name, of in p.kept_copies.items()), *halves]
    return x_out, y, s, before, g, f_a_inp, kept, x_hat, copies


def backward(p: Problem, grad_x_out, y, s, before, g, f_a_inp, kept, x_hat, copies, need_grad_x: bool):
    """Gradients of x_inp (None if not needed) and of the parameters, from grad_x_out [b, j, h]."""
    n_iters = y.shape[0]
    n_kept = len(p.kept_copies)
    p.copies.update(zip(p.kept_copies, copies[:n_kept], strict=True))
    p.half = p.half_passes.HalfInputs(*copies[n_kept:]) if copies[n_kept:] else None
    grads = passes.new_grads(p, n_iters)
    grad_x = new_grad_x(p, need_grad_x)  # [b, i, d]
    for part in p.parts():
        steps = [t[:, part] for t in (y, s, before, g, x_hat)]  # [t or less, b, ...]
        inputs = [t if t is None else t[part] for t in (f_a_inp, kept, grad_x)]  # [b, i, ...]
        backward_of_part(p.of_samples(part), grad_x_out[part], steps, inputs, grads)
    return grad_x, grads


def backward_of_part(p: Problem, grad_x_out: Tensor, steps, inputs, grads: Grads) -> None:
    """The same of some samples: fill grad_x [b, i, d] and add to grads."""
    (y, s, before, g, x_hat), (f_a_inp, kept, grad_x) = steps, inputs
    n_iters = y.shape[0]
    if p.half is not None:
        into, grad_f = p.half_passes.HalfGradient(p, grad_x), torch.empty_like(f_a_inp)  # and [b, i]
    else:
        into = InputGradient(p, n_iters, grad_x, None if p.variable else grads["W_A"])
        grad_f = torch.zeros_like(f_a_inp)  # [b, i]
    for t in reversed(range(n_iters)):
        M = into.new_matrix(p, first=t == 0)  # [b, j or 2 j, d]
        grad_s = p.steps.outputs_backward(p, grad_x_out, y[t], s[t], grads, block_of(p, M, 0))  # [b, j]
        g_t, kept_t = g[t - 1] if t > 0 else None, passes.kept_in(p, kept, t)  # [b, j, d], [b, i, k]
        if len(x_hat) and t > 0:
            M[:, p.width :] = x_hat[t - 1]  # [b, j, d]
        elif t > 0:
            p.steps.scores_matrix(p, g_t, block_of(p, M, 1))
        fresh = t == n_iters - 1
        grad_x_hat = passes.backward_pass(
            p, g_t, f_a_inp, kept_t, M, grad_s, into, grad_f, grads, fresh
        )  # [b, j, d]
        del M  # of many small samples, what is [b, j, d] takes more memory than the rest
        if t > 0:
            p.total(grad_x_hat)
            grad_x_out = p.steps.predictions_backward(
                p, grad_x_hat, before[t - 1], g[t - 1], grads
            )  # [b, j, h]
        del grad_x_hat
