"""The routing loop as one operator: all iterations, with a backward that recomputes instead of storing.

The heavy work of an iteration is one *pass* over the inputs, which gives only

    y_jd = sum_i phi_ij x_id,   s_j = sum_i phi_ij.

Everything between two passes is small and done here. An implementation gives the two kinds of pass
(`forward_pass`, `backward_pass`); docs/math.md derives both.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from vecroute.ops.common import Weights, compute_dtype, normalize


class Tuning(NamedTuple):
    """How a call is cut up: rows of a chunk (0: chosen from the shapes), bytes of i x j quantities kept."""

    rows: int = 0
    keep_bytes: int = 64 * 2**20


@dataclass
class Problem:
    """One call of the loop, its batch dimensions flattened to one, ``b``.

    A packed call has x_inp [1, total, d] and in cu_seqlens the offsets of its samples.
    """

    x_inp: Tensor  # [b, i, d]
    w: Weights
    use: Tensor | None  # [b or 1, i, j or 1]
    sqrt_n_inp: Tensor  # [b, 1]
    cu_seqlens: Tensor | None  # [b + 1]
    prior: float
    rounded: torch.dtype  # of the operands of products
    tuning: Tuning

    @property
    def dtype(self) -> torch.dtype:
        """Of everything but the operands of products."""
        return compute_dtype(self.x_inp.dtype)

    @cached_property
    def offsets(self) -> list[int] | None:
        """cu_seqlens on the host."""
        return None if self.cu_seqlens is None else self.cu_seqlens.tolist()

    @property
    def variable(self) -> bool:
        return self.w.W_use is not None

    @property
    def n_out(self) -> int:
        return self.w.W_F1.shape[0]

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Product of small matrices; not rounded to float16, whose range sums over many inputs may leave."""
        if self.rounded == torch.bfloat16 and a.is_cuda:
            return (a.to(self.rounded) @ b.to(self.rounded)).to(self.dtype)
        return a @ b

    def outputs(self, y: Tensor, s: Tensor) -> Tensor:
        """x_out = (y W_F1) W_F2 / sqrt(n_inp) + s B_F2, [b, j, h]."""
        u = y * self.w.W_F1 / self.sqrt_n_inp[..., None]  # [b, j, d]
        return self.matmul(u, self.w.W_F2.to(self.dtype)) + s[..., None] * self.w.B_F2  # [b, j, h]

    def predictions(self, x_out: Tensor) -> Tensor:
        """x_hat = W_G2 (N(x_out) W_G1) + B_G2, [b, j, d]."""
        g = self.matmul(normalize(x_out), self.w.W_G1.to(self.dtype))  # [b, j, d]
        return g * self.w.W_G2 + self.w.B_G2  # [b, j, d]

    def outputs_backward(
        self, grad_x_out: Tensor, y: Tensor, s: Tensor, grads: dict
    ) -> tuple[Tensor, Tensor]:
        """grad_y [b, j, d] and grad_s [b, j] from grad_x_out [b, j, h]; adds to the gradients of F."""
        u = y * self.w.W_F1 / self.sqrt_n_inp[..., None]  # [b, j, d]
        grad_u = (
            self.matmul(grad_x_out, self.w.W_F2.mT.to(self.dtype)) / self.sqrt_n_inp[..., None]
        )  # [b, j, d]
        grads["W_F1"] += (grad_u * y).sum(0)  # [j, d]
        grads["W_F2"] += self.matmul(u.flatten(0, 1).mT, grad_x_out.flatten(0, 1))  # [d, h]
        grads["B_F2"] += (s[..., None] * grad_x_out).sum(0)  # [j, h]
        return grad_u * self.w.W_F1, (grad_x_out * self.w.B_F2).sum(-1)  # [b, j, d], [b, j]

    def predictions_backward(self, grad_x_hat: Tensor, x_out: Tensor, grads: dict) -> Tensor:
        """grad_x_out [b, j, h] from grad_x_hat [b, j, d]; adds to the gradients of G."""
        v = normalize(x_out)  # [b, j, h]
        grad_g = grad_x_hat * self.w.W_G2  # [b, j, d]
        grads["W_G2"] += (grad_x_hat * self.matmul(v, self.w.W_G1.to(self.dtype))).sum(0)  # [j, d]
        grads["B_G2"] += grad_x_hat.sum(0)  # [j, d]
        grads["W_G1"] += self.matmul(v.flatten(0, 1).mT, grad_g.flatten(0, 1))  # [h, d]
        return normalize_backward(self.matmul(grad_g, self.w.W_G1.mT.to(self.dtype)), x_out)  # [b, j, h]


def normalize_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient through ``normalize`` at x."""
    if x.shape[-1] == 1:
        return grad
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = (variance + 1e-5).rsqrt()  # [..., 1]
    v = (x - mean) * scale
    grad = grad - grad.mean(-1, keepdim=True) - v * (grad * v).mean(-1, keepdim=True)
    return grad * scale


def passes(implementation: str):
    """The module that has the two passes of the named implementation."""
    from vecroute.ops import chunked

    return chunked


def forward(p: Problem, n_iters: int, implementation: str, phi: Tensor | None = None, outputs=None):
    """Run the loop; phi [b, i, j], where given, is filled in the last iteration, for some outputs or for all.

    Returns:
        x_out [b, j, h]; y [t, b, j, d] and s [t, b, j] of every iteration; f(a_inp) [b, i]; and what the
        implementation keeps for the backward pass.
    """
    b, j, d = p.sqrt_n_inp.shape[0], p.n_out, p.x_inp.shape[-1]
    y = p.x_inp.new_empty(n_iters, b, j, d, dtype=p.dtype)  # [t, b, j, d]
    s = p.x_inp.new_empty(n_iters, b, j, dtype=p.dtype)  # [t, b, j]
    f_a_inp = p.x_inp.new_empty(p.x_inp.shape[:2], dtype=p.dtype)  # [b, i]
    step = passes(implementation)
    kept = step.new_kept(p, n_iters)
    x_out = None
    for t in range(n_iters):
        x_hat = None if x_out is None else p.predictions(x_out)  # [b, j, d]
        last = t == n_iters - 1
        step.forward_pass(p, x_hat, f_a_inp, kept, y[t], s[t], phi if last else None, outputs)
        x_out = p.outputs(y[t], s[t])  # [b, j, h]
    return x_out, y, s, f_a_inp, kept


def backward(p: Problem, grad_x_out, y, s, f_a_inp, kept, need_grad_x: bool, implementation: str):
    """Gradients of x_inp ([0] if not needed) and, by name, of every parameter, from grad_x_out [b, j, h]."""
    step = passes(implementation)
    # Gradients as large as the inputs live once, in their own dtype; the small ones are summed in p.dtype.
    large = () if p.variable else ("W_A", "B_A", "W_S", "B_S", "beta_use", "beta_ign")
    grads = {
        name: torch.zeros_like(w, dtype=w.dtype if name in large else p.dtype)
        for name, w in p.w._asdict().items()
        if w is not None
    }
    grad_x = torch.zeros_like(p.x_inp) if need_grad_x else None  # [b, i, d]
    grad_f = torch.zeros_like(f_a_inp)  # [b, i]
    for t in reversed(range(y.shape[0])):
        x_before = p.outputs(y[t - 1], s[t - 1]) if t > 0 else None  # [b, j, h]
        x_hat = None if x_before is None else p.predictions(x_before)  # [b, j, d]
        grad_y, grad_s = p.outputs_backward(grad_x_out, y[t], s[t], grads)  # [b, j, d], [b, j]
        grad_x_hat = step.backward_pass(p, x_hat, f_a_inp, kept, grad_y, grad_s, grad_x, grad_f, grads)
        if x_before is not None:
            grad_x_out = p.predictions_backward(grad_x_hat, x_before, grads)  # [b, j, h]
    return grad_x, grads
