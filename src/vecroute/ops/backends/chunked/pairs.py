"""The work on each pair i, j of a chunk, in plain PyTorch, for any device.

Operations are few and in place, because on a CPU they cost as much as the products around them.
"""

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vecroute.ops import matmul
from vecroute.ops.chunks import Chunk, Room, of_chunk, use_of
from vecroute.ops.columns import with_shared
from vecroute.ops.matmul import accumulate, add
from vecroute.ops.problem import Grads, Problem, over_samples


def coefficients(p: Problem, like: Chunk, c, dot, a, f: Tensor, dtype: torch.dtype, room: Room):
    """Allocate phi for chunks of one shape, and return it with a function that fills it.

    Args:
        c: [b, i, 2 j] c_sum and c_ign, or under the flat prior [b, i, j] their combination. It has the rows
            of the chunk, or all rows. None if n_inp is given.
        dot: [b, i, j] x_inp times ``scores_matrix``, or None in the first iteration.
        a: [b, i, 1 or more] with x_inp times W_A in the first column, in the first iteration if n_inp is
            None; else None.
        f: [b, i] activations of all rows, filled if a is given.
        dtype: dtype of phi.
        room: buffers that chunks share.

    Returns:
        phi [b, i, j]; numbers [b, j, k] whose sum over k is the sum of phi over i; and a function that fills
        both for a chunk.
    """
    phi = room.take("R", f, *like.shape, p.n_out, dtype=dtype)  # [b, i, j]

    def fill(chunk: Chunk) -> None:
        f_chunk = of_chunk(f, chunk)  # [b, i]
        if a is not None:
            B_A = p.w.B_A.to(p.dtype)  # [1]
            torch.addcdiv(B_A, a[..., 0], p.sqrt_n_inp[chunk.samples], out=f_chunk).sigmoid_()
        c_chunk = None if c is None else of_chunk(c, chunk)  # [b, i, 2 j or j]
        c_sum, c_ign = betas(p, chunk, c_chunk, dot is None, room)  # [b or 1, i, j] each
        use: Any = None if p.use is None else use_of(p, chunk)  # [b, i, j or 1]
        if c_ign is None:
            torch.mul(c_sum, f_chunk[..., None], out=phi)
        else:
            responsibilities(p, chunk, dot, use, phi, room)
            phi.mul_(c_sum).sub_(c_ign).mul_(f_chunk[..., None])
        if use is not None:
            phi.mul_(use)

    return phi, phi.mT, fill


def summer(out: Tensor, values: Tensor):
    """Return a function that adds the sum over k of values [b, j, k] to out [b, j], or stores it if fresh."""
    return matmul.summer(out, values.shape[-1])


def coefficients_backward(
    p: Problem, like: Chunk, c, pairs, results, grad_c, columns, f, grad_s, grad_f, grads, fresh, into, room
):
    """Return a function that turns the pairs [b, i, q] of a chunk into phi and the other columns' gradients.

    The function adds to grad_f [b, i]. If n_inp is given, it also adds to the gradients of the betas, W_S and
    B_S. In the first iteration it turns grad_f into the gradient of W_A x_inp.

    Args:
        like, c: as in ``coefficients``.
        results: [b, i, q] memory for phi and the gradients, for the chunk or for all rows. It may be pairs.
        grad_c: [b, i, 2 j or j] memory for the gradient of c, which is added to if ``columns.adds_up``.
        columns: the layout of pairs and results.
        f, grad_f: [b, i], for all rows.
        grad_s: [b, j].
        into: the ``InputGradient``. It says whether results are float16 (``halved``).

    Returns:
        The results without phi, [b, i, q - j], and the function.
    """

    def fill(chunk: Chunk) -> None:
        rows = (None if t is None else of_chunk(t, chunk) for t in (c, results, grad_c, f, grad_f))
        turn(p, chunk, pairs, columns, grad_s, grads, fresh, room, *rows)

    return results[..., p.n_out :], fill  # [b, i, q - j]


def turn(
    p: Problem, chunk: Chunk, pairs, columns, grad_s, grads, fresh, room: Room, c, results, grad_c, f, grad_f
) -> None:
    """Do ``coefficients_backward`` for one chunk. The last five arguments hold only the rows of the chunk."""
    n_out, shape = p.n_out, (*f.shape, p.n_out)
    use: Any = None if p.use is None else use_of(p, chunk)  # [b, i, j or 1]
    dot = None if columns.first else pairs[..., n_out : 2 * n_out]  # [b, i, j]
    c_sum, c_ign = betas(p, chunk, c, columns.first, room)  # [b or 1, i, j] each
    grad_phi = pairs[..., :n_out].add_(grad_s[:, None])  # [b, i, j]
    u = room.take("u", f, *shape)  # [b, i, j], phi / f(a_inp)
    R = one_minus_f = R_c = None  # type: Any
    if c_ign is None:
        u.copy_(c_sum)  # a copy, because results may overwrite c_sum
    else:
        R = room.take("R", f, *shape)  # [b, i, j]
        one_minus_f = responsibilities(p, chunk, dot, use, R, room)  # [b, i, j]
        R_c = torch.mul(R, c_sum, out=room.take("R c", f, *shape))  # [b, i, j]
        torch.sub(R_c, c_ign, out=u)
    if use is not None:
        u, grad_phi = u.mul_(use), grad_phi.mul_(use)  # [b, i, j]
    grad_f += torch.mul(u, grad_phi, out=room.take("u grad_phi", f, *shape)).sum(-1)  # [b, i]
    grad_phi *= f[..., None]  # [b, i, j]
    if dot is not None:
        grad_S = R_c.mul_(grad_phi)  # [b, i, j], so far R grad_R
        grad_S.addcmul_(R, grad_S.sum(-1, keepdim=True), value=-1)
        grad_z = grad_S.mul_(one_minus_f)  # [b, i, j]
        scores_backward(p, chunk, grad_z, dot, results[..., n_out : 2 * n_out], grads, fresh)
    grad_sum = grad_phi if R is None else R.mul_(grad_phi)  # [b, i, j]
    if c is None:
        betas_backward(p, chunk, grad_sum, None if R is None else grad_phi, grads, fresh)
    elif not columns.adds_up or fresh:
        grad_c[..., :n_out] = grad_sum
        if R is not None:
            torch.neg(grad_phi, out=grad_c[..., n_out:])
    else:
        grad_c[..., :n_out].add_(grad_sum, alpha=p.prior if R is None else 1)
        grad_c[..., n_out:] -= grad_phi
    torch.mul(u, f[..., None], out=results[..., :n_out])
    if columns.first:
        activations_backward(p, chunk, f, grad_f, results[..., columns.a :] if p.variable else None)


def shared_rows(p: Problem, flat: bool, n: int) -> tuple[Tensor, Tensor]:
    """Return the n rows of M that all samples share.

    Returns:
        The rows [n, d], and their biases [n]: rows for c_sum and c_ign, or for the flat c. If n is larger, a
        row for a_inp follows, then zeros.
    """
    W, B = p.W_c, p.B_c  # [2 j, d], [2 j]
    if flat:
        W, B = W[: p.n_out] * p.prior - W[p.n_out :], B[: p.n_out] * p.prior - B[p.n_out :]  # [j, d], [j]
    if n == len(W):
        return W, B
    zeros = W.new_zeros(n - len(W) - 1, W.shape[1])  # [0 to 7, d]
    return torch.cat((W, p.w.W_A.to(W.dtype), zeros)), nnf.pad(B, (0, n - len(B)))  # [n, d], [n]


def shared_rows_backward(p: Problem, grad: Tensor, sums: Tensor, flat: bool, first: bool, grads: Grads):
    """Add the gradients of B_A, and of the parameters in the rows of ``shared_rows``, to grads.

    Args:
        grad: [n, d] gradient of the rows.
        sums: [b, n] gradients of their products, summed over inputs.
        first: True if there is a row for a_inp.
    """
    k = p.n_out if flat else 2 * p.n_out
    for name, of_c in (("W", grad[:k].mT), ("B", sums[:, :k].sum(0))):
        use, *ign = of_c.split(p.n_out, -1)  # [d, j] or [j] each
        grads.add(f"{name}_use", use * p.prior if flat else use)
        grads.add(f"{name}_ign", use * (p.prior - 1) if flat else use + ign[0])
    if first:
        grads.add("W_A", grad[None, k].clone())  # [1, d]
        grads.add("B_A", (sums[:, k, None] * p.sqrt_n_inp).sum(0))  # [1]


stacked = with_shared


def betas(p: Problem, chunk: Chunk, c, first: bool, room: Room) -> tuple[Tensor, Any]:
    """Return c_sum and c_ign, [b or 1, i, j] each, or under the flat prior their combination and None."""
    n_out, flat = p.n_out, p.plan.is_flat(first)
    if c is not None and c.shape[-1] == n_out:
        return c, None
    if c is not None:
        c_sum, c_ign = c[..., :n_out], c[..., n_out:]  # [b, i, j] each
        if not flat:
            return c_sum, c_ign
        out = room.take("c", c, *c_sum.shape)  # [b, i, j]
        return torch.mul(c_sum, p.prior, out=out).sub_(c_ign), None  # [b, i, j]
    use, ign = p.w.beta_use[chunk.rows].to(p.dtype), p.w.beta_ign[chunk.rows].to(p.dtype)  # [i, j]
    out = room.take("c", use, *use.shape)  # [i, j]
    if flat:
        return torch.mul(use, p.prior, out=out).add_(ign, alpha=p.prior - 1)[None], None  # [1, i, j]
    return torch.add(use, ign, out=out)[None], ign[None]  # [1, i, j]


def betas_backward(p: Problem, chunk: Chunk, grad_sum, grad_ign, grads, fresh: bool) -> None:
    """Add to the gradients of the betas, if n_inp is given.

    Args:
        grad_sum: [b, i, j] gradient of c_sum, or of the combination under the flat prior.
        grad_ign: [b, i, j] minus the gradient of c_ign, or None under the flat prior.
    """
    fresh &= chunk.samples.start == 0
    grad, flat = over_samples(grad_sum), grad_ign is None  # [i, j]
    add(grads["beta_use"][chunk.rows], grad, fresh, p.prior if flat else 1)
    add(grads["beta_ign"][chunk.rows], grad, fresh, p.prior - 1 if flat else 1)
    if not flat:
        grads["beta_ign"][chunk.rows] -= over_samples(grad_ign)


def responsibilities(p: Problem, chunk: Chunk, dot, use, out: Tensor, room: Room) -> Any:
    """Fill out [b, i, j] with R = f(z) / sum_j f(z), 0 at unused pairs; return 1 - f(z).

    f(z) = 1 / (1 + exp(-z)) is divided by exp(m), with m = min(0, the greatest z of the row), so that a row
    of very negative z does not become 0 / 0. Clamping m - z at 80 changes no digit of R. In the first
    iteration, R is the flat prior and the function returns None.
    """
    if dot is None:
        out.fill_(p.prior)
        if use is not None:
            out.copy_(use)
            out /= out.sum(-1, keepdim=True).clamp_(min=1)  # [b, i, j]
        return None
    i = slice(None) if p.variable else chunk.rows
    W_S, B_S = p.w.W_S[i].to(p.dtype), p.w.B_S[i].to(p.dtype)  # [1 or i, j]
    z = room.take("z", out, *dot.shape)  # [b, i, j]
    if p.variable:
        torch.add(dot, B_S, out=z)
    else:
        torch.addcmul(B_S, dot, W_S, out=z)
    used_z = z if use is None else z.masked_fill(~use, torch.finfo(z.dtype).min)  # [b, i, j]
    m = used_z.amax(-1, keepdim=True).clamp_(max=0)  # [b, i, 1]
    e = torch.sub(m, z, out=z).clamp_(-80, 80).exp_()  # [b, i, j], exp(m - z)
    t = torch.add(e, m.exp_(), out=out).reciprocal_()  # [b, i, j], f(z) / exp(m)
    one_minus_f = e.mul_(t)  # [b, i, j]
    if use is not None:
        t.masked_fill_(~use, 0)
    t /= t.sum(-1, keepdim=True).clamp_(min=torch.finfo(t.dtype).tiny)  # [b, i, j]
    return one_minus_f


def scores_backward(p: Problem, chunk: Chunk, grad_z: Tensor, dot: Tensor, out: Tensor, grads, fresh) -> None:
    """Fill out [b, i, j] with the gradient of dot. If n_inp is given, add to the gradients of W_S and B_S."""
    if p.variable:
        out.copy_(grad_z)
        return
    fresh &= chunk.samples.start == 0
    add(grads["B_S"][chunk.rows], over_samples(grad_z), fresh)  # [i, j]
    add(grads["W_S"][chunk.rows], over_samples(dot.mul_(grad_z)), fresh)  # [i, j]
    torch.mul(grad_z, p.w.W_S[chunk.rows], out=out)


def activations(p: Problem, chunk: Chunk, x: Tensor, f: Tensor) -> None:
    """Fill f(a_inp) [b, i], if n_inp is given."""
    a_inp = (x.to(p.dtype) * p.w.W_A[chunk.rows]).sum(-1)  # [b, i]
    torch.addcdiv(p.w.B_A[chunk.rows].to(p.dtype), a_inp, p.sqrt_n_inp[chunk.samples], out=f).sigmoid_()


def activations_backward(p: Problem, chunk: Chunk, f: Tensor, grad_f: Tensor, column) -> None:
    """Turn grad_f [b, i] into the gradient of W_A x_inp, and copy it to column[..., 0] if that is given."""
    grad_f *= f * (1 - f)
    grad_f /= p.sqrt_n_inp[chunk.samples]
    if column is not None:
        column[..., 0] = grad_f
        column[..., 1:] = 0


def inputs_backward(p: Problem, chunk: Chunk, x, pairs, M, grad_a: Tensor, into, grads) -> None:
    """In the first iteration, if n_inp is given, compute the gradient of W_A, and finish grad_x.

    The function adds pairs M + grad_a W_A to grad_x.

    Args:
        grad_a: [b, i] gradient of W_A x_inp.
    """
    grad_a = grad_a[..., None]  # [b, i, 1]
    if into.grad_x is not None:
        grad_x = into.grad_x[chunk.batch, chunk.rows]  # [b, i, d]
        accumulate(p, grad_x, pairs, M, into.fresh)
        grad_x.addcmul_(grad_a, p.w.W_A[chunk.rows])  # [b, i, d]
    fresh = chunk.samples.start == 0  # this function runs in the first iteration only
    grad_W_A = grads["W_A"][chunk.rows]  # [i, d]
    if fresh and len(x) == 1:
        torch.mul(grad_a[0], x[0], out=grad_W_A)
    else:
        add(grad_W_A, (grad_a * x).sum(0), fresh)
