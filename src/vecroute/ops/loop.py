"""The routing loop: all iterations, with a backward pass that recomputes instead of storing.

The heavy work of an iteration is one *pass* over the inputs. It returns only

    y_jd = sum_i phi_ij x_id,   s_j = sum_i phi_ij.

Everything between two passes is small.
"""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops import passes
from vecroute.ops.columns import block_of, new_matrix
from vecroute.ops.gradient import InputGradient, new_grad_x
from vecroute.ops.problem import Grads, Problem


def forward(p: Problem, phi: Tensor | None = None, outputs=None) -> tuple[Tensor, Tensor]:
    """Run the loop.

    Args:
        phi: [b, i, j] memory that the last iteration fills, or None.
        outputs: the columns of phi to compute, None for all.

    Returns:
        x_out [b, j, h], and the memory that the backward pass needs.
    """
    n_iters, memory = p.plan.case.n_iters, p.plan.saved
    saved = memory.new(p.x_inp)
    kept_in_memory = {name: memory.tensor(saved, name) for name in memory.arrays}
    y, s, before, g, f_a_inp, kept, x_hat, sqrt_n_inp, *_ = kept_in_memory.values()
    sqrt_n_inp.copy_(p.sqrt_n_inp)
    if p.width > p.n_out and len(x_hat):
        x_hat[..., p.n_out :, :] = 0  # rows without an output
    for name in p.plan.kept_copies:
        p.copies[name] = kept_in_memory[f"copy of {name}"].copy_(p.original(name))
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
    return x_out, saved


def backward(p: Problem, grad_x_out: Tensor, saved: Tensor, need_grad_x: bool):
    """Return the gradients of x_inp (None if not needed) and of the parameters, from grad_x_out [b, j, h]."""
    memory = p.plan.saved
    kept_in_memory = {name: memory.tensor(saved, name) for name in memory.arrays}
    y, s, before, g, f_a_inp, kept, x_hat, p.sqrt_n_inp, *_ = kept_in_memory.values()
    p.copies.update({name: kept_in_memory[f"copy of {name}"] for name in p.plan.kept_copies})
    grads = passes.new_grads(p, p.plan.case.n_iters)
    grad_x = new_grad_x(p, need_grad_x)  # [b, i, d]
    for part in p.plan.parts():
        steps = [t[:, part] for t in (y, s, before, g, x_hat)]  # [t or less, b, ...]
        inputs = [t if t is None else t[part] for t in (f_a_inp, kept, grad_x)]  # [b, i, ...]
        backward_of_part(p.of_samples(part), grad_x_out[part], steps, inputs, grads)
    return grad_x, grads


def backward_of_part(p: Problem, grad_x_out: Tensor, steps, inputs, grads: Grads) -> None:
    """Do ``backward`` for some samples: fill grad_x [b, i, d] and add to grads.

    Args:
        steps: y, s, before, g and x_hat of all iterations, [t or less, b, ...] each.
        inputs: f_a_inp [b, i], kept [b, i, k] and grad_x [b, i, d] or None.
    """
    (y, s, before, g, x_hat), (f_a_inp, kept, grad_x) = steps, inputs
    n_iters = y.shape[0]
    into = InputGradient(p, grad_x, None if p.variable else grads["W_A"])
    grad_f = torch.zeros_like(f_a_inp)  # [b, i]
    for t in reversed(range(n_iters)):
        M = into.new_matrix(p, first=t == 0)  # [b, j or 2 j, d]
        grad_s = p.steps.outputs_backward(p, grad_x_out, y[t], s[t], grads, block_of(p, M, 0))  # [b, j]
        g_t: Any = g[t - 1] if t > 0 else None  # [b, j, d]
        kept_t = passes.kept_in(p, kept, t)  # [b, i, k]
        if len(x_hat) and t > 0:
            M[:, p.width :] = x_hat[t - 1]  # [b, j, d]
        elif t > 0:
            p.steps.scores_matrix(p, g_t, block_of(p, M, 1))
        fresh = t == n_iters - 1
        grad_x_hat = passes.backward_pass(
            p, g_t, f_a_inp, kept_t, M, grad_s, into, grad_f, grads, fresh
        )  # [b, j, d]
        del M  # with many small samples, tensors [b, j, d] take more memory than all others
        if t > 0:
            p.total(grad_x_hat)
            grad_x_out = p.steps.predictions_backward(
                p, grad_x_hat, before[t - 1], g[t - 1], grads
            )  # [b, j, h]
        del grad_x_hat
