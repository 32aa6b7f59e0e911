"""The routing loop: all iterations, with a backward that recomputes instead of storing.

The heavy work of an iteration is one *pass* over the inputs, which gives only

    y_jd = sum_i phi_ij x_id,   s_j = sum_i phi_ij.

Everything between two passes is small.
"""

import torch
from torch import Tensor

from vecroute.ops import passes
from vecroute.ops.problem import Problem


def forward(p: Problem, n_iters: int, phi: Tensor | None = None, outputs=None):
    """Run the loop; phi [b, i, j], where given, is filled in the last iteration, for some outputs or for all.

    Returns:
        x_out [b, j, h]; y [t, b, j, d] and s [t, b, j] of every iteration; f(a_inp) [b, i]; and what is kept
        for the backward pass.
    """
    b, j, d = p.sqrt_n_inp.shape[0], p.n_out, p.x_inp.shape[-1]
    y = p.x_inp.new_empty(n_iters, b, j, d, dtype=p.dtype)  # [t, b, j, d]
    s = p.x_inp.new_empty(n_iters, b, j, dtype=p.dtype)  # [t, b, j]
    f_a_inp = p.x_inp.new_empty(p.x_inp.shape[:2], dtype=p.dtype)  # [b, i]
    kept = passes.new_kept(p, n_iters)
    x_out = None
    for t in range(n_iters):
        x_hat = None if x_out is None else p.predictions(x_out)  # [b, j, d]
        last = t == n_iters - 1
        passes.forward_pass(p, x_hat, f_a_inp, kept, y[t], s[t], phi if last else None, outputs)
        x_out = p.outputs(y[t], s[t])  # [b, j, h]
    return x_out, y, s, f_a_inp, kept


def backward(p: Problem, grad_x_out, y, s, f_a_inp, kept, need_grad_x: bool):
    """Gradients of x_inp ([0] if not needed) and, by name, of every parameter, from grad_x_out [b, j, h]."""
    # Gradients with an i live once, and are written before they are added to.
    n_iters = y.shape[0]
    with_i = (
        () if p.variable else ("W_A", "B_A", "beta_use", "beta_ign", *(("W_S", "B_S") if n_iters > 1 else ()))
    )
    grads = {
        name: (torch.empty_like if name in with_i else torch.zeros_like)(w, dtype=p.dtype)
        for name, w in p.w._asdict().items()
        if w is not None
    }
    grad_x = torch.empty_like(p.x_inp) if need_grad_x else None  # [b, i, d]
    grad_f = torch.zeros_like(f_a_inp)  # [b, i]
    for t in reversed(range(n_iters)):
        x_before = p.outputs(y[t - 1], s[t - 1]) if t > 0 else None  # [b, j, h]
        x_hat = None if x_before is None else p.predictions(x_before)  # [b, j, d]
        grad_y, grad_s = p.outputs_backward(grad_x_out, y[t], s[t], grads)  # [b, j, d], [b, j]
        fresh = t == n_iters - 1
        grad_x_hat = passes.backward_pass(
            p, x_hat, f_a_inp, kept, grad_y, grad_s, grad_x, grad_f, grads, fresh
        )  # [b, j, d]
        if x_before is not None:
            grad_x_out = p.predictions_backward(grad_x_hat, x_before, grads)  # [b, j, h]
    return grad_x, grads
