"""One iteration as a pass over chunks of inputs, forward and backward; docs/math.md derives both.

With c_sum = beta_use + beta_ign and c_ign = beta_ign, the coefficients of an iteration are

    phi_ij = f(a_inp_i) (c_sum_ij R_ij - c_ign_ij).

The products are here, for every implementation; what is done to each pair i, j between them is in ``p.pairs``
(``chunked``: plain PyTorch, ``fused``: Triton). Nothing of size i x j outlives its chunk but c_sum and c_ign,
where they fit the budget.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vecroute.ops.problem import Problem
from vecroute.ops.products import (
    accumulate,
    accumulate_over_inputs,
    add_sum,
    linear,
    operand_dtype,
    product,
)


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
    together = max(1, size // max(1, n_rows))
    for b in range(0, n_samples, together):
        samples = slice(b, min(b + together, n_samples))
        for start in range(0, n_rows, size):
            yield Chunk(samples, samples, slice(start, min(start + size, n_rows)))


def rows_of_a_chunk(p: Problem) -> int:
    """Rows whose i x j quantities fit the cache of a CPU; a GPU wants tall products more than cache hits."""
    if p.x_inp.device.type == "cpu":
        return max(64, min(2048, 2**18 // p.n_out))
    # What a row has in buffers; together they stay small beside x_inp, or beside many outputs.
    row = (6 if p.variable else 3) * p.n_out * p.dtype.itemsize
    least = 2**26 if p.n_out < 512 else 2**28
    return max(1024, max(least, p.x_inp.numel() * p.x_inp.element_size() // 28) // row)


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
    if p.offsets is not None or not p.x_inp.shape[1]:  # a sample may have no rows
        y.zero_()
        s.zero_()
    columns = Columns(p, x_hat is None, kept, filling=True)
    x_hat_S = scores_matrix(p, x_hat)  # [b, j, d]
    for chunk in chunks(p):
        x = inputs(p, chunk)  # [b, i, d]
        c, a_inp = columns(x, chunk)  # [b, i, 2 j or j], [b, i]
        if x_hat is None:
            if not p.variable:
                a_inp = p.pairs.activations(p, x, chunk)  # [b, i]
            torch.sigmoid(a_inp, out=f_a_inp[chunk.batch, chunk.rows])  # [b, i]
        dot = None if x_hat_S is None else product(p, x, x_hat_S[chunk.samples].mT)  # [b, i, j]
        phi = p.pairs.coefficients(p, chunk, c, dot, f_a_inp[chunk.batch, chunk.rows])  # [b, i, j]
        fresh = p.offsets is None and chunk.rows.start == 0
        accumulate_over_inputs(p, y[chunk.samples], phi.mT, x, fresh)  # [b, j, d]
        add_sum(p, s[chunk.samples], phi, fresh)  # [b, j]
        if phi_out is not None:
            phi_out[chunk.batch, chunk.rows] = phi if outputs is None else phi[..., outputs]  # [b, i, j]


class InputGradient:
    """grad_x [b, i, d], the sum of pairs @ M over the iterations, written once where that can be.

    Until the first iteration, the last of a backward, the pairs of the others wait in the rows of grad_x
    itself, side by side, if they fit there; else every pass adds its product.
    """

    def __init__(self, p: Problem, n_iters: int, needed: bool):
        grad_x: Any = torch.empty_like(p.x_inp) if needed else None  # [b, i, d]
        n_waiting = (n_iters - 1) * (4 if p.variable else 2) * p.n_out
        fits = needed and 0 < n_waiting <= p.x_inp.shape[-1] and p.x_inp.dtype == p.dtype
        self.grad_x, self.waits = grad_x, fits and grad_x.stride(-1) == 1
        self.M: list[Tensor] = []  # [b, q, d] each, of the pairs that wait
        self.fresh = True

    def room(self, chunk: Chunk, f: Tensor, q: int, first: bool) -> tuple[Tensor, Tensor]:
        """Room for the q pairs of a pass, [b, i, q], and the same with those that wait before it."""
        w = sum(M.shape[1] for M in self.M)
        if self.waits and not first:
            pairs = self.grad_x[chunk.batch, chunk.rows, w : w + q]  # [b, i, q]
            return pairs, pairs
        pairs = f.new_empty(*f.shape, w + q)  # [b, i, w + q]
        if w:
            pairs[..., :w] = self.grad_x[chunk.batch, chunk.rows, :w]
        return pairs[..., w:], pairs


def backward_pass(p: Problem, x_hat, f_a_inp, kept, grad_y, grad_s, into, grad_f, grads, fresh) -> Tensor:
    """Gradient of one iteration: adds to grad_f, grads and ``into``, and returns grad_x_hat [b, j, d].

    A fresh pass, the first of a backward, writes the large gradients (those with an i) instead of adding.
    The gradients of all that x_inp is multiplied with, and phi, which belongs to grad_y, stand side by side
    in ``pairs``: one product with x_inp sums them over i, one with the matrices themselves, ``M``, is grad_x.
    """
    first, n_out = x_hat is None, p.n_out
    columns = Columns(p, first, kept, filling=False)
    x_hat_S = scores_matrix(p, x_hat)  # [b, j, d]
    both = grad_y if first else torch.cat((grad_y, x_hat_S), dim=-2)  # [b, 2 j, d]
    n_both = both.shape[1]
    M = torch.cat((both, columns.rows.expand(len(both), -1, -1)), 1) if p.variable else both  # [b, q, d]
    all_M = torch.cat((*into.M, M), 1) if into.M and first else M  # [b, w + q, d]
    grad_M = torch.zeros_like(M[:, n_out:])  # [b, q - j, d]
    sums = grad_M.new_zeros(grad_M.shape[:2])  # [b, q - j]
    for chunk in chunks(p):
        at = chunk.batch, chunk.rows
        x, f = inputs(p, chunk), f_a_inp[at]  # [b, i, d], [b, i]
        c, _ = columns(x, chunk)  # [b, i, 2 j or j]
        pairs, all_pairs = into.room(chunk, f, M.shape[1], first)  # [b, i, q], [b, i, w + q]
        product(p, x, both[chunk.samples].mT, out=pairs[..., :n_both])  # [b, i, 2 j], grad_phi and the scores
        grad_c: Any = pairs[..., n_both : n_both + c.shape[-1]] if p.variable else None  # [b, i, 2 j or j]
        p.pairs.coefficients_backward(
            p, chunk, c, pairs[..., :n_both], grad_c, f, grad_s[chunk.samples], grad_f[at], grads, fresh
        )  # pairs is now phi and the gradient of the scores and of c
        grad_a: Any = torch.ops.aten.sigmoid_backward(grad_f[at], f) if first else None  # [b, i]
        if p.variable:
            if first:
                pairs[..., n_both + c.shape[-1] + 1 :] = 0
                torch.div(grad_a, p.sqrt_n_inp[chunk.samples], out=pairs[..., n_both + c.shape[-1]])  # [b, i]
            add_sum(p, sums[chunk.samples], pairs[..., n_out:])
        if grad_M.shape[1]:
            accumulate_over_inputs(p, grad_M[chunk.samples], pairs[..., n_out:].mT, x)  # [b, q - j, d]
        if first and not p.variable:
            p.pairs.inputs_backward(p, chunk, x, all_pairs, all_M[chunk.samples], grad_a, into, grads)
        elif into.grad_x is not None and (first or not into.waits):
            accumulate(p, into.grad_x[at], all_pairs, all_M[chunk.samples], into.fresh)  # [b, i, d]
    if into.waits:
        into.M.append(M)
    else:
        into.fresh = False
    columns.finish(grad_M[:, n_both - n_out :].sum(0), sums[:, n_both - n_out :], grads)
    grad_x_hat_S = grad_M[:, : n_both - n_out]  # [b, j, d]
    if first or not p.variable:
        return grad_x_hat_S
    grads.add("W_S", (grad_x_hat_S * x_hat).sum((0, 2))[None])  # [1, j]
    grads.add("B_S", sums[:, :n_out].sum(0, keepdim=True))  # [1, j]
    return grad_x_hat_S * p.w.W_S.mT  # [b, j, d]


def scores_matrix(p: Problem, x_hat):
    """What x_inp is multiplied with for z: x_hat, with W_S already in it if that has no i; [b, j, d]."""
    if x_hat is None or not p.variable:
        return x_hat
    return x_hat * p.w.W_S.mT  # [b, j, d]


def inputs(p: Problem, chunk: Chunk) -> Tensor:
    """x_inp of a chunk, with zeros in place of unused inputs, so that not even NaN in them counts."""
    x = p.x_inp[chunk.batch, chunk.rows]  # [b, i, d]
    if p.use is not None:
        x = x.where(use_of(p, chunk).any(-1, keepdim=True), 0)  # [b, i, d]
    return x.to(operand_dtype(p))  # [b, i, d]


def use_of(p: Problem, chunk: Chunk) -> Tensor:
    """The used pairs of a chunk, [b or 1, i, j or 1]."""
    assert p.use is not None
    return p.use[chunk.batch if len(p.use) > 1 else slice(None), chunk.rows]


class Columns:
    """What is linear in x_inp in a pass of variable length, as the columns of one product, and its gradient.

    These are c_sum and c_ign, side by side; in the first iteration, where all outputs have the same R (unless
    pairs are masked), their one combination prior c_sum - c_ign; and there a_inp, in one more column.
    Of a fixed length, c_sum and c_ign are None: ``p.pairs`` has the betas themselves.
    """

    def __init__(self, p: Problem, first: bool, kept: Tensor, filling: bool):
        self.p, self.first = p, first
        self.flat = first and (p.use is None or p.use.shape[-1] == 1)
        self.kept: Any = kept if len(kept) else None
        self.filling = filling and first and self.kept is not None
        if not p.variable:
            return
        W, B = p.beta_columns  # [d, 2 j], [2 j]
        W_c, B_c = (self._flatten(W), self._flatten(B)) if self.flat else (W, B)  # [d, 2 j or j], [2 j or j]
        # While c is kept it is computed whole; its gradient needs the flat combination alone.
        self.W, self.B = (W, B) if self.filling else (W_c, B_c)
        self.n_c = len(self.B), len(B_c)
        if first:
            self.W, W_c = (torch.cat((t, self._activation_columns(t)), 1) for t in (self.W, W_c))
            self.B = nnf.pad(self.B, (0, self.W.shape[1] - len(self.B)))  # [2 j or j, and 0 for a_inp]
        self.rows = W_c.mT[None]  # [1, q, d]

    def _flatten(self, c: Tensor) -> Tensor:
        c_sum, c_ign = c.chunk(2, -1)  # [..., j], [..., j]
        return self.p.prior * c_sum - c_ign  # [..., j]

    def _activation_columns(self, W: Tensor) -> Tensor:
        """W_A as a column, and zeros that keep rows aligned, [d, 1 to 8]."""
        zeros = W.new_zeros(W.shape[0], -(W.shape[1] + 1) % 8)  # [d, 0 to 7]
        return torch.cat((self.p.w.W_A.mT.to(W.dtype), zeros), 1)

    def __call__(self, x: Tensor, chunk: Chunk):
        """c of a chunk, [b, i, 2 j or j], and in the first forward pass a_inp [b, i]; None if fixed."""
        p, at = self.p, (chunk.batch, chunk.rows)
        if not p.variable:
            return None, None
        if self.kept is not None and not self.filling:
            c = self.kept[at]  # [b, i, 2 j]
            return self._flatten(c) if self.flat else c, None
        columns, k = linear(p, x, self.W, self.B), self.n_c[0]  # [b, i, 2 j or j, and the activations]
        c, a_inp = columns[..., :k], None  # [b, i, 2 j or j]
        if self.first:
            a_inp = torch.addcdiv(p.w.B_A.to(p.dtype), columns[..., k], p.sqrt_n_inp[chunk.samples])  # [b, i]
        if self.filling:
            self.kept[at] = c
            c = self._flatten(c) if self.flat else c
        return c, a_inp

    def finish(self, grad_rows: Tensor, grad_B: Tensor, grads) -> None:
        """Hand over the gradients of the columns: grad_rows [q, d], and summed over inputs, grad_B [b, q]."""
        if not self.p.variable:
            return
        k = self.n_c[1]
        for name, grad in (("W", grad_rows[:k].mT), ("B", grad_B[:, :k].sum(0))):
            grad_use, grad_ign = split_betas(self.p, grad, self.flat)
            grads.add(f"{name}_use", grad_use)
            grads.add(f"{name}_ign", grad_ign)
        if self.first:
            grads.add("W_A", grad_rows[None, k].clone())  # [1, d]
            grads.add("B_A", (grad_B[:, k, None] * self.p.sqrt_n_inp).sum(0))  # [1]


def split_betas(p: Problem, grad_c: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
    """The gradients with respect to beta_use and beta_ign, from that of c_sum and c_ign, or of the flat c."""
    if flat:
        return grad_c * p.prior, grad_c * (p.prior - 1)
    grad_sum, grad_ign = grad_c.chunk(2, -1)
    return grad_sum, grad_sum + grad_ign
