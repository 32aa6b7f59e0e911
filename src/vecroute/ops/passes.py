"""One iteration as a pass over chunks of inputs, forward and backward; docs/math.md derives both.

With c_sum = beta_use + beta_ign and c_ign = beta_ign, the coefficients of an iteration are

    phi_ij = f(a_inp_i) (c_sum_ij R_ij - c_ign_ij).

A pass multiplies x_inp with the rows of one matrix M (see ``Columns``). The result is ``pairs`` [b, i, q],
all quantities of a pair i, j side by side. The module ``p.pairs`` does the work on each pair, in plain
PyTorch (``chunked``) or Triton (``fused``). Only two kinds of arrays of size i x j outlive their chunk: kept
arrays, within a budget (``Plan.kept``), and the pairs that wait in ``InputGradient``.
"""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops.chunks import Room, alike, as_operand, chunks, inputs, of_chunk
from vecroute.ops.columns import Columns
from vecroute.ops.matmul import accumulate, accumulate_over_inputs, over_batch
from vecroute.ops.pieces import between_pieces
from vecroute.ops.plan.rows import backward_row, forward_row
from vecroute.ops.problem import Grads, Problem, over_samples


def new_kept(p: Problem) -> Tensor:
    """Allocate the memory for ``Plan.kept``."""
    shape, dtype = p.plan.kept
    return p.x_inp.new_empty(shape, dtype=dtype)  # [b, i, k]


def kept_in(p: Problem, kept: Tensor, t: int) -> Tensor:
    """Return the columns of a kept array that iteration t fills or reads."""
    return kept if p.variable else kept[..., max(0, t - 1) * p.width : t * p.width]  # [b, i, k]


def new_grads(p: Problem, n_iters: int) -> Grads:
    """Allocate gradients of the parameters with an i. Backward passes write or add to them.

    B_A is not among them: its gradient is computed at the end, as a sum over the gradient of a_inp. With one
    sample, nothing is added to the gradient of W_A, so it need not have the dtype of sums.
    """
    if p.variable:
        return Grads()
    names = ("W_A", "beta_use", "beta_ign") + (("W_S", "B_S") if n_iters > 1 else ())
    new = torch.empty_like if len(p.x_inp) else torch.zeros_like  # without samples, nothing writes to them
    grads = {name: new(getattr(p.w, name), dtype=p.dtype) for name in names}
    if len(p.x_inp) == 1:
        grads["W_A"] = new(p.w.W_A)  # [i, d]
    return Grads(grads)


def writes(p: Problem) -> bool:
    """Return whether the first chunk of a sample stores its sums. A packed sample may have no chunks."""
    return p.offsets is None and p.x_inp.numel() > 0


def forward_pass(p: Problem, M, f_a_inp, kept, y, s, phi_out, outputs) -> None:
    """Run one iteration: fill y [b, j, d] and s [b, j], and in the first iteration f_a_inp.

    Args:
        M: [b, j, d] from ``scores_matrix``, or None in the first iteration.
        f_a_inp: [b, i] activations of the inputs.
        kept: from ``kept_in``.
        phi_out: [b, i, j] to fill with phi, or None.
        outputs: the columns of phi to write, None for all.
    """
    first = M is None
    if p.plan.clusters and phi_out is None:
        return p.path.iterate(p, M, f_a_inp, y, s)
    if not writes(p):
        y.zero_()
        s.zero_()
    columns, room = Columns(p, M, kept, first=first, forward=True), Room()
    dtype = p.dtype if phi_out is not None else p.plan.pair_dtype
    row = forward_row(p.plan, first, dtype != p.dtype)
    for same in alike(chunks(p, row, p.plan.forward_share)):
        like = same[0]
        f, y_b = f_a_inp[like.batch], y[like.samples]  # [b, i], [b, j, d]
        pairs = columns.kept_whole(like, dtype)  # [b, i, j]
        if pairs is None:
            pairs = room.take("pairs", f, *like.shape, columns.n_computed, dtype=dtype)  # [b, i, q]
        computed = columns.matrix(like.samples, columns.computed)  # [b, q, d]
        c, multiply = columns.products(pairs, computed, like)  # [b, i, 2 j or j]
        dot = None if first else pairs[..., : p.n_out]  # [b, i, j]
        a = pairs[..., columns.a :] if first and p.variable else None  # [b, i, 1 to 8]
        phi, to_sum, fill_phi = p.pairs.coefficients(
            p, like, c, dot, a, f, dtype, room
        )  # [b, i, j], [b, j, k]
        phi_T, add_sum = phi.mT, p.pairs.summer(s[like.samples], to_sum)  # [b, j, i]
        for chunk in same:
            if p.plan.on_cpu:
                between_pieces()
            x = inputs(p, chunk)  # [b, i, d]
            if first and not p.variable:
                p.pairs.activations(p, chunk, x, of_chunk(f, chunk))
            x = as_operand(p, x, chunk)  # [b, i, d]
            multiply(chunk, x)
            fill_phi(chunk)
            fresh = writes(p) and chunk.rows.start == 0
            add_sum(to_sum, fresh)  # here, because phi is still in the cache
            accumulate_over_inputs(p, y_b, phi_T, x, fresh)
            if phi_out is not None:
                phi_out[chunk.batch, chunk.rows] = phi if outputs is None else phi[..., outputs]  # [b, i, j]


def backward_pass(p: Problem, g, f_a_inp, kept, M, grad_s, into, grad_f, grads, fresh) -> Tensor:
    """Run one iteration backward: add to grad_f, grads and ``into``, and return grad_x_hat [b, j, d].

    The pass turns pairs = x M^T into results: phi in the columns of grad_y, gradients in the others. The
    product of the results with x_inp is the gradient of M, their product with M is grad_x. The pass of the
    first iteration leaves the gradient of W_A x_inp in grad_f.

    Args:
        g: [b, j, d] from ``predicted``, or None in the first iteration.
        kept: from ``kept_in``.
        M: [b, j or 2 j, d] grad_y, followed by the matrix of the scores if there is a g.
        fresh: True in the first backward pass of a call, which stores gradients instead of adding.
    """
    first, room = g is None, Room()
    columns = Columns(p, M, kept, first=first, forward=False, adds_up=into.waits)
    n_summed = columns.n - p.width
    new_sums = grad_s.new_empty if writes(p) else grad_s.new_zeros
    # In the first iteration these rows of M are the same for all samples.
    grad_M = new_sums(1 if first else len(M), n_summed, M.shape[-1])  # [b or 1, q - j, d]
    sums = new_sums(len(M), n_summed)  # [b, q - j]
    samples: Any = None
    n_pairs = max(columns.n_computed, columns.n_own, 0 if into.waits else columns.n)
    dtype = p.dtype if into.waits else p.plan.pair_dtype
    row = backward_row(p.plan, first, into.waits, dtype.itemsize)
    for same in alike(chunks(p, row, into.share)):
        like = same[0]
        if samples != like.samples:
            samples = like.samples
            computed = columns.matrix(samples, columns.computed)[:, : columns.n_computed]  # [b, q, d]
            all_M = into.matrix(samples, columns)  # [b, w + q, d]
        f, grad_f_all = f_a_inp[like.batch], grad_f[like.batch]  # [b, i] each
        pairs = room.take("pairs", f, *like.shape, n_pairs, dtype=dtype)  # [b, i, q]
        c, multiply = columns.products(pairs, computed, like)  # [b, i, 2 j or j]
        results, all_results, grad_c = into.results(like, pairs, columns, room)
        copies = into.waiting(like, all_results, columns)
        to_sum, fill = p.pairs.coefficients_backward(
            p, like, c, pairs, results, grad_c, columns, f, grad_s[samples], grad_f_all, grads, fresh, into,
            room,
        )  # fmt: skip
        total_M = grad_M if first else grad_M[samples]  # [b or 1, q - j, d]
        add_sum = p.pairs.summer(sums[samples], of_chunk(to_sum, like).mT) if p.variable else None
        for chunk in same:
            # A GPU needs no pause: its work ends soon, and other code could change the matmul precision.
            if p.plan.on_cpu:
                between_pieces()
            x, at = inputs(p, chunk), (chunk.batch, chunk.rows)  # [b, i, d]
            operand = as_operand(p, x, chunk)  # [b, i, d]
            multiply(chunk, operand)
            for out, waiting in copies:
                out.copy_(of_chunk(waiting, chunk))
            fill(chunk)
            if n_summed:
                summed, rows = of_chunk(to_sum, chunk), operand  # [b, i, q - j], [b, i, d]
                new = writes(p) and chunk.rows.start == 0
                if add_sum is not None:
                    add_sum(summed.mT, new)
                if first:
                    summed, rows = over_batch(summed), over_batch(rows)  # [1, b i, q - j], [1, b i, d]
                    new = new and chunk.samples.start == 0
                accumulate_over_inputs(p, total_M, summed.mT, rows, new)  # [b or 1, q - j, d]
            if first and not p.variable:
                p.pairs.inputs_backward(
                    p, chunk, x, of_chunk(all_results, chunk), all_M, grad_f[at], into, grads
                )
            elif into.grad_x is not None and (first or not into.waits):
                accumulate(p, into.grad_x[at], of_chunk(all_results, chunk), all_M, into.fresh)  # [b, i, d]
    if first and not p.variable:
        grads["B_A"] = over_samples(grad_f * p.sqrt_n_inp)  # [i]
    if into.waits:
        into.columns.append(columns)
    else:
        into.fresh = False
    return columns.finish(grad_M, sums, g, grads)  # [b, j, d]
