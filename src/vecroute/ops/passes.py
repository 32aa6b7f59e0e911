"""One iteration as a pass over chunks of inputs, forward and backward; docs/math.md derives both.

With c_sum = beta_use + beta_ign and c_ign = beta_ign, the coefficients of an iteration are

    phi_ij = f(a_inp_i) (c_sum_ij R_ij - c_ign_ij).

A pass multiplies x_inp with the rows of one matrix M (see ``Columns``), which gives ``pairs`` [b, i, q], all
that depends on a pair i, j side by side. What is done to each pair is in ``p.pairs`` (``chunked``: plain
PyTorch, ``fused``: Triton). Nothing of size i x j outlives its chunk but what is kept (``new_kept``), within
a budget, and the pairs that wait in ``InputGradient``.
"""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops.chunks import Room, alike, as_operand, chunks, inputs, of_chunk
from vecroute.ops.columns import Columns
from vecroute.ops.common import multiple_of_8
from vecroute.ops.matmul import (
    accumulate,
    accumulate_over_inputs,
    over_batch,
)
from vecroute.ops.paths.long import clusters, rounded
from vecroute.ops.pieces import between_pieces
from vecroute.ops.problem import SMALL_COPY, Grads, Problem, over_samples

# One part in so many of x_inp that buffers of a forward pass may take on a GPU, by whether the length is
# variable: with all else, 2 % of inputs and parameters. A backward pass has more (``InputGradient.share``).
FORWARD_SHARE = {False: 22, True: 64}


def new_kept(p: Problem, n_iters: int) -> Tensor:
    """Memory of ``kept_array``."""
    shape, dtype = kept_array(p, n_iters)
    return p.x_inp.new_empty(shape, dtype=dtype)  # [b, i, k]


def kept_array(p: Problem, n_iters: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of what is kept of every pair, [b, i, k]; none if it costs no product or does not fit.

    Of a variable length that is c_sum and c_ign, for ``fused`` as a product gives them: before a_inp. Of a
    fixed length, on a CPU or with many outputs, the dot product of every iteration but the first; else a GPU
    multiplies as fast as it would read them.
    """
    b, i = p.x_inp.shape[:2]
    k = 2 * p.n_out if p.variable else (n_iters - 1) * p.width
    if p.variable and p.implementation == "fused":
        k = multiple_of_8(k + 1)
    keep = n_iters > 1 and b * i * k * p.pair_dtype.itemsize <= p.tuning.keep_bytes
    keep &= p.variable or p.x_inp.device.type == "cpu" or p.pair_dtype != p.dtype
    return (b if keep else 0, i, k), p.pair_dtype


def x_hat_array(p: Problem, n_iters: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the matrices of the scores, [t - 1, b, j, d], where a copy is faster to have.

    That is where they are small, and rounded: what they are made of is not.
    """
    b, j, d = p.sqrt_n_inp.shape[0], p.width, p.w.W_F1.shape[1]  # not len, a constant for compilers
    size = (n_iters - 1) * b * j * d * p.operand_dtype.itemsize
    keep = p.pair_dtype != p.dtype and size <= min(SMALL_COPY, p.tuning.keep_bytes)
    return (n_iters - 1 if keep else 0, b, j, d), p.operand_dtype


def kept_in(p: Problem, kept: Tensor, t: int) -> Tensor:
    """What iteration t fills or reads of it."""
    return kept if p.variable else kept[..., max(0, t - 1) * p.width : t * p.width]  # [b, i, k]


def new_grads(p: Problem, n_iters: int) -> Grads:
    """Gradients of the parameters with an i, which live once: a backward writes them, then adds to them.

    B_A is not among them: its gradient comes from that of a_inp, at last. That of W_A is not added to where
    there is one sample, so it need not be in the dtype of sums.
    """
    if p.variable:
        return Grads()
    names = ("W_A", "beta_use", "beta_ign") + (("W_S", "B_S") if n_iters > 1 else ())
    new = torch.empty_like if len(p.x_inp) else torch.zeros_like  # of no sample there is none to write them
    grads = {name: new(getattr(p.w, name), dtype=p.dtype) for name in names}
    if len(p.x_inp) == 1:
        grads["W_A"] = new(p.w.W_A)  # [i, d]
    return Grads(grads)


def writes(p: Problem) -> bool:
    """Whether the first chunk of a sample writes sums over inputs; a packed sample may have no rows."""
    return p.offsets is None and p.x_inp.numel() > 0


def forward_pass(p: Problem, M, f_a_inp, kept, y, s, phi_out, outputs) -> None:
    """One iteration: fill y [b, j, d] and s [b, j] (and f_a_inp in the first).

    Args:
        M: [b, j, d] from ``scores_matrix``, or None in the first iteration.
        f_a_inp: [b, i] activations of the inputs.
        kept: from ``kept_in``.
        phi_out: [b, i, j] to fill with phi, or None.
        outputs: the columns of phi to write, None for all.
    """
    first = M is None
    if phi_out is None and clusters.can_iterate(p, first):
        return clusters.iterate(p, M, f_a_inp, y, s)
    if not writes(p):
        y.zero_()
        s.zero_()
    columns, room = Columns(p, M, kept, first=first, forward=True), Room()
    dtype = p.dtype if phi_out is not None else p.pair_dtype
    row = columns.n_computed + p.n_out
    if dtype != p.dtype:
        row = row // 2  # pairs and phi are bfloat16
    elif p.operand_dtype != p.dtype:
        row += p.n_out // 2  # phi, rounded to be multiplied
    for same in alike(chunks(p, row, FORWARD_SHARE[p.variable])):
        like = same[0]
        f, y_b = f_a_inp[like.batch], y[like.samples]  # [b, i], [b, j, d]
        pairs = columns.kept_whole(like, dtype)  # [b, i, j]
        if pairs is None:
            pairs = room.take("pairs", f, *like.shape, columns.n_computed, dtype=dtype)  # [b, i, q]
        computed = columns.matrix(like.samples, columns.computed)  # [b, q, d]
        c, multiply = columns.products(pairs, computed, like)  # [b, i, 2 j or j]
        dot = None if first else pairs[..., : p.n_out]  # [b, i, j]
        a = pairs[..., columns.a :] if first and p.variable else None  # [b, i, 1 to 8]
        phi, to_sum, fill_phi = p.pairs.coefficients(p, like, c, dot, a, f, dtype, room)  # and [b, j, k]
        phi_T, add_sum = phi.mT, p.pairs.summer(s[like.samples], to_sum)  # [b, j, i]
        for chunk in same:
            if p.x_inp.is_cpu:
                between_pieces()
            x = inputs(p, chunk)  # [b, i, d]
            if first and not p.variable:
                p.pairs.activations(p, chunk, x, of_chunk(f, chunk))
            x = as_operand(p, x, chunk)  # [b, i, d]
            multiply(chunk, x)
            fill_phi(chunk)
            fresh = writes(p) and chunk.rows.start == 0
            add_sum(to_sum, fresh)  # while it is in the cache
            accumulate_over_inputs(p, y_b, phi_T, x, fresh)
            if phi_out is not None:
                phi_out[chunk.batch, chunk.rows] = phi if outputs is None else phi[..., outputs]  # [b, i, j]


def backward_pass(p: Problem, g, f_a_inp, kept, M, grad_s, into, grad_f, grads, fresh) -> Tensor:
    """Gradient of one iteration: adds to grad_f, grads and ``into``, and returns grad_x_hat [b, j, d].

    A fresh pass, the first of a backward, writes what has an i instead of adding to it.
    ``pairs`` = x M^T turn into phi, which belongs to grad_y, and the gradients of the other columns: one
    product with x_inp sums these over i, which is the gradient of M, one with M itself is grad_x.
    The pass of the first iteration leaves the gradient of W_A x_inp in grad_f.

    Args:
        g: [b, j, d] from ``predicted``, or None in the first iteration.
        kept: from ``kept_in``.
        M: [b, j or 2 j, d] grad_y, and where there is a g the matrix of the scores.
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
    dtype = p.dtype if into.waits else p.pair_dtype
    if into.by_rows and rounded.can_multiply(p):
        dtype = torch.bfloat16
    row = n_pairs * dtype.itemsize // p.dtype.itemsize + into.n_besides(columns)
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
            if p.x_inp.is_cpu:  # a GPU is soon done, and its settings of precision are those of the process
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
