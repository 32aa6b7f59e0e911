"""The passes streamed over chunks of inputs, in plain PyTorch, for any device.

With c_sum = beta_use + beta_ign and c_ign = beta_ign, the coefficients of an iteration are

    phi_ij = f(a_inp_i) (c_sum_ij R_ij - c_ign_ij).

Nothing of size i x j outlives its chunk but c_sum and c_ign, where they fit the budget.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.ops.common import log_f, masked_softmax
from vecroute.ops.loop import Problem


class Chunk(NamedTuple):
    """Some rows of some samples: ``samples`` indexes what is per sample, ``batch`` and ``rows`` x_inp."""

    samples: slice
    batch: slice
    rows: slice


def chunks(p: Problem) -> Iterator[Chunk]:
    """Cut the inputs into chunks: whole samples, several at a time if they are short, or parts of one."""
    size = p.tuning.rows or rows_of_a_chunk(p)
    n_samples, n_rows = p.sqrt_n_inp.shape[0], p.x_inp.shape[1]
    if p.offsets is not None:
        for b in range(n_samples):
            for start in range(p.offsets[b], p.offsets[b + 1], size):
                yield Chunk(slice(b, b + 1), slice(0, 1), slice(start, min(start + size, p.offsets[b + 1])))
        return
    together = max(1, size // n_rows)
    for b in range(0, n_samples, together):
        samples = slice(b, min(b + together, n_samples))
        for start in range(0, n_rows, size):
            yield Chunk(samples, samples, slice(start, min(start + size, n_rows)))


def rows_of_a_chunk(p: Problem) -> int:
    """Rows whose i x j quantities fit the cache of a CPU, or fill a GPU within the budget."""
    if p.x_inp.device.type == "cpu":
        return max(64, min(2048, 2**18 // p.n_out))
    return max(1024, p.tuning.keep_bytes // (16 * p.n_out * p.dtype.itemsize))


def new_kept(p: Problem, n_iters: int) -> Tensor:
    """Room for c_sum and c_ign of every pair, [b, i, 2 j]; empty where they cost no product or no room."""
    b, i = p.x_inp.shape[:2]
    size = 2 * b * i * p.n_out * p.dtype.itemsize
    keep = p.variable and n_iters > 1 and size <= p.tuning.keep_bytes
    return p.x_inp.new_empty(b if keep else 0, i, 2 * p.n_out, dtype=p.dtype)  # [b, i, 2 j]


def forward_pass(p: Problem, x_hat, f_a_inp, kept, y, s, phi_out, outputs) -> None:
    """One iteration: fill y [b, j, d] and s [b, j] (and f_a_inp in the first).

    Args:
        x_hat: [b, j, d] predicted inputs, or None in the first iteration.
        f_a_inp: [b, i] activations of the inputs.
        kept: from ``new_kept``.
        phi_out: [b, i, j] to fill with phi, or None.
        outputs: the columns of phi to write, None for all.
    """
    y.zero_()
    s.zero_()
    betas = Betas(p, x_hat, kept, filling=True)
    x_hat_S = scores_matrix(p, x_hat)  # [b, j, d]
    for chunk in chunks(p):
        x = inputs(p, chunk)  # [b, i, d]
        if x_hat is None:
            f_a_inp[chunk.batch, chunk.rows] = activations(p, x, chunk)  # [b, i]
        dot = None if x_hat_S is None else product(p, x, x_hat_S[chunk.samples].mT)  # [b, i, j]
        phi, *_ = coefficients(p, betas(x, chunk), dot, chunk)  # [b, i, j]
        phi *= f_a_inp[chunk.batch, chunk.rows, None]  # [b, i, j]
        accumulate(p, y[chunk.samples], phi.mT, x)  # [b, j, d]
        s[chunk.samples] += phi.sum(1)  # [b, j]
        if phi_out is not None:
            phi_out[chunk.batch, chunk.rows] = phi if outputs is None else phi[..., outputs]  # [b, i, j]


def backward_pass(p: Problem, x_hat, f_a_inp, kept, grad_y, grad_s, grad_x, grad_f, grads) -> Tensor:
    """Gradient of one iteration: adds to grad_x, grad_f and grads, and returns grad_x_hat [b, j, d]."""
    betas = Betas(p, x_hat, kept, filling=False)
    x_hat_S = scores_matrix(p, x_hat)  # [b, j, d]
    # One product with x gives the scores and grad_phi, one with the same matrix their part of grad_x.
    both = grad_y if x_hat_S is None else torch.cat((x_hat_S, grad_y), dim=-2)  # [b, 2 j, d]
    grad_x_hat_S = torch.zeros_like(grad_y)  # [b, j, d]
    n_out = p.n_out
    for chunk in chunks(p):
        at = chunk.batch, chunk.rows
        x = inputs(p, chunk)  # [b, i, d]
        f = f_a_inp[at][..., None]  # [b, i, 1]
        pairs = product(p, x, both[chunk.samples].mT)  # [b, i, 2 j], the scores and grad_phi
        dot, grad_phi = (None if x_hat_S is None else pairs[..., :n_out]), pairs[..., -n_out:]  # [b, i, j]
        c = betas(x, chunk)  # [b, i, 2 j]
        u, R, S = coefficients(p, c, dot, chunk)  # [b, i, j], u = phi / f
        grad_phi = grad_phi + grad_s[chunk.samples, None]  # [b, i, j]
        if p.use is not None:
            grad_phi *= use_of(p, chunk)  # [b, i, j]
        grad_f[at] += (u * grad_phi).sum(-1)  # [b, i]
        grad_phi *= f  # [b, i, j]
        pairs[..., -n_out:] = u * f  # [b, i, j], phi
        grad_c = grad_phi if R is None else torch.cat((R * grad_phi, -grad_phi), -1)  # [b, i, j or 2 j]
        if dot is not None:
            grad_z = grad_scores(grad_c[..., :n_out] * c[..., :n_out], R, S)  # [b, i, j]
            pairs[..., :n_out] = scores_backward(p, grad_z, dot, chunk, grads)  # [b, i, j]
            accumulate(p, grad_x_hat_S[chunk.samples], pairs[..., :n_out].mT, x)  # [b, j, d]
        if grad_x is not None:
            accumulate(p, grad_x[at], pairs, both[chunk.samples])  # [b, i, d]
        betas.backward(x, grad_c, chunk, None if grad_x is None else grad_x[at], grads)
        if x_hat is None:
            activations_backward(p, x, grad_f[at] * f[..., 0] * (1 - f[..., 0]), chunk, grad_x, grads)
    betas.finish(grads)
    if x_hat is None or not p.variable:
        return grad_x_hat_S
    grads["W_S"] += (grad_x_hat_S * x_hat).sum((0, 2))[None]  # [1, j]
    return grad_x_hat_S * p.w.W_S.mT  # [b, j, d]


def product(p: Problem, a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b in p.dtype, its operands rounded where that is faster; b may be shared, [d, j]."""
    rounded = operand_dtype(p)
    a, b = a.to(rounded), b.to(rounded)
    if b.dim() == 2:
        return product(p, a.reshape(1, -1, a.shape[-1]), b[None]).view(*a.shape[:-1], b.shape[-1])
    if rounded != p.dtype and a.is_cuda:
        return torch.bmm(a, b, out_dtype=p.dtype)
    return torch.bmm(a, b).to(p.dtype)


def accumulate(p: Problem, out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, in place."""
    if operand_dtype(p) != p.dtype or out.dtype != p.dtype:
        out += product(p, a, b)
    else:
        out.baddbmm_(a.to(p.dtype), b.to(p.dtype))


def operand_dtype(p: Problem) -> torch.dtype:
    """The dtype of the operands of large products: on a CPU float16 is neither fast nor wide enough."""
    if p.rounded == torch.float16 and p.x_inp.device.type == "cpu":
        return p.dtype
    return p.rounded


def inputs(p: Problem, chunk: Chunk) -> Tensor:
    """x_inp of a chunk, with zeros in place of unused inputs, so that not even NaN in them counts."""
    x = p.x_inp[chunk.batch, chunk.rows]  # [b, i, d]
    return x if p.use is None else x.where(use_of(p, chunk).any(-1, keepdim=True), 0)  # [b, i, d]


def use_of(p: Problem, chunk: Chunk):
    """The used pairs of a chunk, [b or 1, i, j or 1]."""
    assert p.use is not None
    return p.use[chunk.batch if len(p.use) > 1 else slice(None), chunk.rows]


def activations(p: Problem, x: Tensor, chunk: Chunk) -> Tensor:
    """f(a_inp), [b, i]."""
    if p.variable:
        a_inp = product(p, x, p.w.W_A.mT)[..., 0]  # [b, i]
        B_A = p.w.B_A
    else:
        a_inp = (x.to(p.dtype) * p.w.W_A[chunk.rows]).sum(-1)  # [b, i]
        B_A = p.w.B_A[chunk.rows]
    return torch.sigmoid(a_inp / p.sqrt_n_inp[chunk.samples] + B_A)  # [b, i]


def activations_backward(p: Problem, x: Tensor, grad_a: Tensor, chunk: Chunk, grad_x, grads) -> None:
    """Add what grad_a [b, i] brings to the gradients of x_inp, W_A and B_A."""
    scaled = (grad_a / p.sqrt_n_inp[chunk.samples])[..., None]  # [b, i, 1]
    W_A = p.w.W_A if p.variable else p.w.W_A[chunk.rows]  # [1 or i, d]
    if grad_x is not None:
        grad_x[chunk.batch, chunk.rows].addcmul_(scaled.to(grad_x.dtype), W_A.to(grad_x.dtype))  # [b, i, d]
    if p.variable:
        grads["W_A"] += product(p, scaled.view(1, 1, -1), x.reshape(1, -1, x.shape[-1]))[0]  # [1, d]
        grads["B_A"] += grad_a.sum()  # [1]
    else:
        grads["W_A"][chunk.rows] += (scaled * x).sum(0)  # [i, d]
        grads["B_A"][chunk.rows] += grad_a.sum(0)  # [i]


def scores_matrix(p: Problem, x_hat):
    """What x_inp is multiplied with for z: x_hat, with W_S already in it if that has no i; [b, j, d]."""
    if x_hat is None or not p.variable:
        return x_hat
    return x_hat * p.w.W_S.mT  # [b, j, d]


def scores_backward(p: Problem, grad_z: Tensor, dot: Tensor, chunk: Chunk, grads) -> Tensor:
    """Gradient of x_inp x_hat from that of z, [b, i, j]; adds to those of W_S and B_S."""
    if p.variable:
        grads["B_S"] += grad_z.sum((0, 1))[None]  # [1, j]
        return grad_z
    grads["B_S"][chunk.rows] += grad_z.sum(0)  # [i, j]
    grads["W_S"][chunk.rows] += (grad_z * dot).sum(0)  # [i, j]
    return grad_z * p.w.W_S[chunk.rows]  # [b, i, j]


def coefficients(p: Problem, c: Tensor, dot: Tensor | None, chunk: Chunk):
    """phi / f(a_inp), R and S, each [b, i, j]; the first iteration has no S, and no R if that is flat.

    Args:
        c: [b, i, 2 j] c_sum and c_ign, or [b, i, j] their combination under the flat prior.
        dot: [b, i, j] x_inp times ``scores_matrix``, or None in the first iteration.
    """
    n_out = p.n_out
    use: Any = None if p.use is None else use_of(p, chunk).expand(*c.shape[:2], n_out)  # [b, i, j]
    S = None
    if dot is not None:
        B_S = p.w.B_S if p.variable else p.w.B_S[chunk.rows]  # [1 or i, j]
        S = log_f((dot if p.variable else dot * p.w.W_S[chunk.rows]) + B_S)  # [b, i, j]
        R = masked_softmax(S, use, -1)  # [b, i, j]
    elif c.shape[-1] == n_out:
        return (c if use is None else c * use), None, None
    else:
        R = use / use.sum(-1, keepdim=True).clamp(min=1).to(p.dtype)  # [b, i, j]
    u = c[..., :n_out] * R - c[..., n_out:]  # [b, i, j]
    return (u if use is None else u * use), R, S


def grad_scores(R_grad_R: Tensor, R: Tensor, S: Tensor) -> Tensor:
    """grad_z from R grad_R, through the softmax and the log-logistic, [b, i, j]."""
    grad_S = R_grad_R - R * R_grad_R.sum(-1, keepdim=True)  # [b, i, j]
    return grad_S * -torch.expm1(S)  # [b, i, j]


class Betas:
    """c_sum and c_ign side by side, [b, i, 2 j], for the chunks of one pass, and their gradients.

    In the first iteration all outputs have the same R (unless pairs are masked), so that the one combination
    prior c_sum - c_ign [b, i, j] does.
    """

    def __init__(self, p: Problem, x_hat: Tensor | None, kept: Tensor, filling: bool):
        self.p = p
        self.flat = x_hat is None and (p.use is None or p.use.shape[-1] == 1)
        self.kept: Any = kept if len(kept) else None
        self.filling = filling and x_hat is None and self.kept is not None
        if not p.variable:
            return
        w, dtype = p.w, p.dtype
        W_sum, W_ign, B_sum, B_ign = w.W_use + w.W_ign, w.W_ign, w.B_use + w.B_ign, w.B_ign
        self.W = torch.cat((W_sum, W_ign), 1).to(dtype)  # [d, 2 j]
        self.B = torch.cat((B_sum, B_ign)).to(dtype)  # [2 j]
        if self.flat:
            self.W_flat, self.B_flat = self._flatten(self.W), self._flatten(self.B)  # [d, j], [j]
        W = self.W_flat if self.flat else self.W
        self.grad_W = torch.zeros_like(W)  # [d, 2 j or j]
        self.grad_B = torch.zeros_like(W[0])  # [2 j or j]

    def _flatten(self, c: Tensor) -> Tensor:
        c_sum, c_ign = c.chunk(2, -1)  # [..., j], [..., j]
        return self.p.prior * c_sum - c_ign  # [..., j]

    def __call__(self, x: Tensor, chunk: Chunk) -> Tensor:
        p, at = self.p, (chunk.batch, chunk.rows)
        if not p.variable:
            use, ign = p.w.beta_use[chunk.rows].to(p.dtype), p.w.beta_ign[chunk.rows].to(p.dtype)  # [i, j]
            c = torch.cat((use + ign, ign), -1).expand(len(x), -1, -1)  # [b, i, 2 j]
        elif self.kept is None and self.flat:
            return product(p, x, self.W_flat) + self.B_flat  # [b, i, j]
        elif self.kept is None or self.filling:
            c = product(p, x, self.W) + self.B  # [b, i, 2 j]
            if self.filling:
                self.kept[at] = c
        else:
            c = self.kept[at]  # [b, i, 2 j]
        return self._flatten(c) if self.flat else c

    def backward(self, x: Tensor, grad_c: Tensor, chunk: Chunk, grad_x: Tensor | None, grads) -> None:
        """Add what grad_c brings to the gradients of x_inp and of the betas."""
        p = self.p
        if p.variable:
            if grad_x is not None:
                grad_x += product(p, grad_c, (self.W_flat if self.flat else self.W).mT)  # [b, i, d]
            rows = x.reshape(1, -1, x.shape[-1]), grad_c.reshape(1, -1, grad_c.shape[-1])
            accumulate(p, self.grad_W[None], rows[0].mT, rows[1])  # [d, 2 j or j]
            self.grad_B += grad_c.sum((0, 1))  # [2 j or j]
        else:
            grad_use, grad_ign = self._split(grad_c.sum(0))  # [i, j], [i, j]
            grads["beta_use"][chunk.rows] += grad_use
            grads["beta_ign"][chunk.rows] += grad_ign

    def _split(self, grad_c: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients with respect to what belongs to use and to ignore."""
        if self.flat:
            return grad_c * self.p.prior, grad_c * (self.p.prior - 1)
        grad_sum, grad_ign = grad_c.chunk(2, -1)
        return grad_sum, grad_sum + grad_ign

    def finish(self, grads) -> None:
        """Hand over the gradients that were summed over the chunks."""
        if self.p.variable:
            for name, grad in (("W", self.grad_W), ("B", self.grad_B)):
                grad_use, grad_ign = self._split(grad)
                grads[f"{name}_use"] += grad_use
                grads[f"{name}_ign"] += grad_ign
