"""What is done to each pair i, j of a chunk, in plain PyTorch, for any device."""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops.common import log_f, masked_softmax
from vecroute.ops.passes import Chunk, split_betas, use_of
from vecroute.ops.problem import Problem
from vecroute.ops.products import accumulate, add


def coefficients(p: Problem, chunk: Chunk, c, dot, f: Tensor) -> Tensor:
    """phi of a chunk, [b, i, j].

    Args:
        c: [b, i, 2 j] c_sum and c_ign, or [b, i, j] their combination under the flat prior; None if fixed.
        dot: [b, i, j] x_inp times ``scores_matrix``, or None in the first iteration.
        f: [b, i] activations.
    """
    u, _, _ = unscaled(p, chunk, betas(p, chunk, f) if c is None else c, dot)  # [b, i, j]
    return u * f[..., None]  # [b, i, j]


def coefficients_backward(
    p: Problem, chunk: Chunk, c, pairs, grad_c, f, grad_s, grad_f, grads, fresh
) -> None:
    """Turn pairs [b, i, 2 j], grad_phi and the scores, into phi and the gradient of the scores, in place.

    In the first iteration pairs has grad_phi alone, [b, i, j]. Fills grad_c, or of a fixed length adds to the
    gradients of the betas, W_S and B_S; and adds to grad_f [b, i].
    """
    n_out, f = p.n_out, f[..., None]  # [b, i, 1]
    dot = pairs[..., n_out:] if pairs.shape[-1] > n_out else None  # [b, i, j]
    fixed = c is None
    c = betas(p, chunk, f[..., 0]) if fixed else c  # [b, i, 2 j or j]
    u, R, S = unscaled(p, chunk, c, dot)  # [b, i, j]
    grad_phi = pairs[..., :n_out] + grad_s[:, None]  # [b, i, j]
    if p.use is not None:
        grad_phi *= use_of(p, chunk)  # [b, i, j]
    grad_f += (u * grad_phi).sum(-1)  # [b, i]
    grad_phi *= f  # [b, i, j]
    flat = R is None
    grad_pairs = grad_phi if flat else torch.cat((R * grad_phi, -grad_phi), -1)  # [b, i, 2 j or j], of c
    if dot is not None:
        R_grad_R = grad_pairs[..., :n_out] * c[..., :n_out]  # [b, i, j]
        grad_S = R_grad_R - R * R_grad_R.sum(-1, keepdim=True)  # [b, i, j]
        grad_z = grad_S * -torch.expm1(S)  # [b, i, j]
        pairs[..., n_out:] = scores_backward(p, chunk, grad_z, dot, grads, fresh)  # [b, i, j]
    pairs[..., :n_out] = u * f  # [b, i, j]
    if fixed:
        grad_use, grad_ign = split_betas(p, grad_pairs.sum(0), flat)  # [i, j], [i, j]
        fresh &= chunk.samples.start == 0
        add(grads["beta_use"][chunk.rows], grad_use, fresh)
        add(grads["beta_ign"][chunk.rows], grad_ign, fresh)
    else:
        grad_c.copy_(grad_pairs)


def betas(p: Problem, chunk: Chunk, f: Tensor) -> Tensor:
    """c_sum and c_ign of a fixed length, [b, i, 2 j], for as many samples as f [b, i] has."""
    use, ign = p.w.beta_use[chunk.rows].to(p.dtype), p.w.beta_ign[chunk.rows].to(p.dtype)  # [i, j]
    return torch.cat((use + ign, ign), -1).expand(len(f), -1, -1)  # [b, i, 2 j]


def unscaled(p: Problem, chunk: Chunk, c: Tensor, dot):
    """phi / f(a_inp), R and S, each [b, i, j]; the first iteration has no S, and no R if c is flat."""
    n_out = p.n_out
    use: Any = None if p.use is None else use_of(p, chunk).expand(*c.shape[:2], n_out)  # [b, i, j]
    if c.shape[-1] == n_out:
        return (c if use is None else c * use), None, None
    S = None
    if dot is not None:
        B_S = p.w.B_S if p.variable else p.w.B_S[chunk.rows]  # [1 or i, j]
        S = log_f((dot if p.variable else dot * p.w.W_S[chunk.rows]) + B_S)  # [b, i, j]
        R = masked_softmax(S, use, -1)  # [b, i, j]
    elif use is None:
        R = c.new_full((1, 1, 1), p.prior)  # [1, 1, 1]
    else:
        R = use / use.sum(-1, keepdim=True).clamp(min=1).to(p.dtype)  # [b, i, j]
    u = c[..., :n_out] * R - c[..., n_out:]  # [b, i, j]
    return (u if use is None else u * use), R, S


def scores_backward(p: Problem, chunk: Chunk, grad_z: Tensor, dot: Tensor, grads, fresh) -> Tensor:
    """Gradient of x_inp x_hat from that of z, [b, i, j]; of a fixed length adds to those of W_S and B_S."""
    if p.variable:
        return grad_z
    fresh &= chunk.samples.start == 0
    add(grads["B_S"][chunk.rows], grad_z.sum(0), fresh)  # [i, j]
    add(grads["W_S"][chunk.rows], (grad_z * dot).sum(0), fresh)  # [i, j]
    return grad_z * p.w.W_S[chunk.rows]  # [b, i, j]


def activations(p: Problem, x: Tensor, chunk: Chunk) -> Tensor:
    """a_inp of a fixed length, [b, i]."""
    a_inp = (x.to(p.dtype) * p.w.W_A[chunk.rows]).sum(-1)  # [b, i]
    return a_inp / p.sqrt_n_inp[chunk.samples] + p.w.B_A[chunk.rows]  # [b, i]


def inputs_backward(p: Problem, chunk: Chunk, x, pairs, M, grad_a: Tensor, into, grads) -> None:
    """Of a fixed length, at last: add pairs M to grad_x, and what grad_a [b, i] brings to it, W_A and B_A."""
    scaled = (grad_a / p.sqrt_n_inp[chunk.samples])[..., None]  # [b, i, 1]
    if into.grad_x is not None:
        grad_x = into.grad_x[chunk.batch, chunk.rows]  # [b, i, d]
        accumulate(p, grad_x, pairs, M, into.fresh)
        grad_x.addcmul_(scaled.to(grad_x.dtype), p.w.W_A[chunk.rows].to(grad_x.dtype))  # [b, i, d]
    fresh = chunk.samples.start == 0  # no other iteration comes here
    add(grads["W_A"][chunk.rows], (scaled * x).sum(0), fresh)  # [i, d]
    add(grads["B_A"][chunk.rows], grad_a.sum(0), fresh)  # [i]
