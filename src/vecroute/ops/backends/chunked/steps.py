"""The small steps between two passes, in plain PyTorch, for any device."""

import torch
from torch import Tensor

from vecroute.ops.common import normalize
from vecroute.ops.problem import Grads, Problem, over_samples


def outputs(p: Problem, y: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x_out = (y W_F1 / sqrt(n_inp)) W_F2 + s B_F2, [b, j, h], from y [b, j, d] and s [b, j]."""
    u = (y * p.w.W_F1).div_(p.sqrt_n_inp[..., None])  # [b, j, d]
    x_out = matmul(p, u, p.w.W_F2.to(p.dtype), out)  # [b, j, h]
    return x_out.addcmul_(s[..., None], p.w.B_F2.to(p.dtype))  # [b, j, h]


def predicted(p: Problem, x_out: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute g = N(x_out) W_G1, [b, j, d]."""
    return matmul(p, normalize(x_out), p.w.W_G1.to(p.dtype), out)  # [b, j, d]


def scaled(p: Problem, g: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x_hat = W_G2 g + B_G2, [b, j, d]."""
    return torch.addcmul(p.w.B_G2.to(p.dtype), g, p.w.W_G2.to(p.dtype), out=out)  # [b, j, d]


def scores_matrix(p: Problem, g: Tensor, out: Tensor) -> Tensor:
    """Return the matrix [b, j, d] for the scores z: x_hat, times W_S if W_S has no i (n_inp is None)."""
    return torch.mul(scaled(p, g), p.w.W_S.mT, out=out) if p.variable else scaled(p, g, out)


def scores_matrix_backward(p: Problem, grad: Tensor, sums: Tensor, g: Tensor, grads: Grads) -> Tensor:
    """If n_inp is None, turn the gradient of x_hat W_S into grad_x_hat [b, j, d], in place.

    The function also adds to the gradients of W_S and B_S.

    Args:
        sums: [b, j] sums of the gradient of z over i.
        g: [b, j, d] from ``predicted``.
    """
    grads.add("W_S", scaled(p, g).mul_(grad).sum((0, 2))[None])  # [1, j]
    grads.add("B_S", sums.sum(0, keepdim=True))  # [1, j]
    return grad.mul_(p.w.W_S.mT)  # [b, j, d]


def outputs_backward(p: Problem, grad_x_out: Tensor, y: Tensor, s: Tensor, grads: Grads, out: Tensor):
    """Fill out with grad_y [b, j, d], from grad_x_out [b, j, h], and return grad_s [b, j]."""
    sqrt_n_inp = p.sqrt_n_inp[..., None]  # [b, 1, 1]
    grad_u = matmul(p, grad_x_out, p.w.W_F2.mT.to(p.dtype)).div_(sqrt_n_inp)  # [b, j, d]
    u = (y * p.w.W_F1).div_(sqrt_n_inp)  # [b, j, d]
    grads.add("W_F2", matmul(p, u.flatten(0, 1).mT, grad_x_out.flatten(0, 1)))  # [d, h]
    grads.add("W_F1", over_samples(torch.mul(grad_u, y, out=u)))  # [j, d]
    del u
    grads.add("B_F2", over_samples(s[..., None] * grad_x_out))  # [j, h]
    torch.mul(grad_u, p.w.W_F1, out=out)  # [b, j, d]
    return (grad_x_out * p.w.B_F2).sum(-1)  # [b, j]


def predictions_backward(p: Problem, grad_x_hat: Tensor, x_out: Tensor, g: Tensor, grads: Grads) -> Tensor:
    """Return grad_x_out [b, j, h] from grad_x_hat [b, j, d], which is overwritten."""
    grads.add("W_G2", over_samples(grad_x_hat * g))  # [j, d]
    grads.add("B_G2", grad_x_hat.sum(0))  # [j, d], a copy, because a view would keep all rows
    grad_g = grad_x_hat.mul_(p.w.W_G2)  # [b, j, d]
    v, size = x_out, x_out.shape[-1:]
    if size[0] > 1:
        v, mean, rstd = torch.native_layer_norm(x_out, size, None, None, 1e-5)  # [b, j, h], [b, j, 1] twice
    grads.add("W_G1", matmul(p, v.flatten(0, 1).mT, grad_g.flatten(0, 1)))  # [h, d]
    del v  # with many small samples, tensors [b, j, d] take more memory than all others
    grad_v = matmul(p, grad_g, p.w.W_G1.mT.to(p.dtype))  # [b, j, h]
    if size[0] > 1:
        grad_v, _, _ = torch.ops.aten.native_layer_norm_backward(
            grad_v, x_out, size, mean, rstd, None, None, [True, False, False]
        )  # [b, j, h]
    return grad_v


def matmul(p: Problem, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply small matrices without rounding to float16, because sums over many inputs may overflow it.

    Under autocast of a float32 x_inp these products are tf32.
    """
    if p.x_inp.dtype == torch.bfloat16 and a.is_cuda:
        product = a.to(p.plan.case.rounded) @ b.to(p.plan.case.rounded)
        return product.to(p.dtype) if out is None else out.copy_(product)
    return torch.matmul(a, b, out=out)
