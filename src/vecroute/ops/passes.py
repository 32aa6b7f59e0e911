"""One iteration as a pass over chunks of inputs, forward and backward; docs/math.md derives both.

With c_sum = beta_use + beta_ign and c_ign = beta_ign, the coefficients of an iteration are

    phi_ij = f(a_inp_i) (c_sum_ij R_ij - c_ign_ij).

A pass multiplies x_inp with the rows of one matrix M (see ``Columns``), which gives ``pairs`` [b, i, q], all
that depends on a pair i, j side by side. What is done to each pair is in ``p.pairs`` (``chunked``: plain
PyTorch, ``fused``: Triton). Nothing of size i x j outlives its chunk but c_sum and c_ign, where they fit the
budget, and the pairs that wait in ``InputGradient``.
"""

import math
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
    multiply,
    operand_dtype,
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
            for rows in parts(p.offsets[b], p.offsets[b + 1], size):
                yield Chunk(slice(b, b + 1), slice(0, 1), rows)
        return
    together = max(1, size // max(1, n_rows))
    for b in range(0, n_samples, together):
        samples = slice(b, min(b + together, n_samples))
        for rows in parts(0, n_rows, size):
            yield Chunk(samples, samples, rows)


def parts(start: int, end: int, size: int) -> Iterator[slice]:
    """As few parts of at most so many rows as there can be, about as large as each other."""
    n = -(-(end - start) // size)
    step = min(size, -(-(end - start) // max(1, 16 * n)) * 16)  # aligned
    for first in range(start, end, step or 1):
        yield slice(first, min(first + step, end))


def rows_of_a_chunk(p: Problem) -> int:
    """Rows whose i x j quantities fit the cache of a CPU; a GPU wants tall products more than cache hits."""
    if p.x_inp.device.type == "cpu":
        return max(64, min(2048, 2**18 // p.n_out))
    # What a row has in buffers of a forward pass; together they stay small beside x_inp and the parameters.
    row, share = (4 * p.n_out, 30) if p.variable else (2 * p.n_out, 22)
    least = 2**27 if p.n_out < 512 else 2**28
    return max(
        1024, max(least, p.x_inp.numel() * p.x_inp.element_size() // share) // (row * p.dtype.itemsize)
    )


class Room(dict[str, Tensor]):
    """Memory for what lives in one chunk, by name, used again by the next."""

    def take(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tensor of the dtype of another."""
        size = math.prod(shape)
        if name not in self or self[name].numel() < size:
            self.pop(name, None)
            self[name] = like.new_empty(size)
        return self[name][:size].view(shape)


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
    first = x_hat is None
    if p.offsets is not None or not p.x_inp.shape[1]:  # a sample may have no rows
        y.zero_()
        s.zero_()
    columns, room = Columns(p, x_hat, kept), Room()
    for chunk in chunks(p):
        x, f = inputs(p, chunk), f_a_inp[chunk.batch, chunk.rows]  # [b, i, d], [b, i]
        pairs = room.take("pairs", f, *f.shape, columns.n_computed)  # [b, i, q]
        M = columns.matrix(chunk.samples, columns.computed)  # [b, q, d]
        c = columns.multiply(pairs, x, M, chunk)  # [b, i, 2 j or j]
        if first and not p.variable:
            p.pairs.activations(p, chunk, x, f)
        dot = None if first else pairs[..., : p.n_out]  # [b, i, j]
        a = pairs[..., columns.a] if first and p.variable else None  # [b, i]
        phi = p.pairs.coefficients(p, chunk, c, dot, a, f, room)  # [b, i, j]
        fresh = p.offsets is None and chunk.rows.start == 0
        accumulate_over_inputs(p, y[chunk.samples], phi.mT, x, fresh)  # [b, j, d]
        add_sum(p, s[chunk.samples], phi, fresh)  # [b, j]
        if phi_out is not None:
            phi_out[chunk.batch, chunk.rows] = phi if outputs is None else phi[..., outputs]  # [b, i, j]


class InputGradient:
    """grad_x [b, i, d], the sum of pairs @ M over the iterations, written once where that can be.

    Until the first iteration, the last of a backward, the pairs of the others wait side by side, if they fit,
    in the rows of a gradient that is written last: that of W_A, where one sample alone has it, else grad_x.
    There the gradient of c, which has the same matrix in every iteration, adds up after them and after room
    for phi of the first. Where they do not fit every pass adds its product.
    """

    def __init__(self, p: Problem, n_iters: int, needed: bool, grad_W_A: Tensor | None = None):
        self.grad_x: Any = torch.empty_like(p.x_inp) if needed else None  # [b, i, d]
        self.aside = grad_W_A is not None and len(p.x_inp) == 1
        place: Any = grad_W_A[None] if grad_W_A is not None and self.aside else self.grad_x  # [b, i, d]
        self.n_waiting = (n_iters - 1) * 2 * p.n_out
        self.n_kept = self.n_waiting + (3 if p.variable else 1) * p.n_out
        fits = needed and n_iters > 1 and self.n_kept <= p.x_inp.shape[-1]
        self.place, self.waits = place, fits and place.dtype == p.dtype and place.stride(-1) == 1
        self.columns: list[Columns] = []  # of the pairs that wait
        self.fresh = True

    def results(self, chunk: Chunk, pairs: Tensor, columns: "Columns", room: Room):
        """Where the results of a pass go, [b, i, q]; the same with those that wait; and the gradient of c."""
        (b, i, _), n_out = pairs.shape, columns.p.n_out
        if not self.waits:
            results = pairs[..., : columns.n]  # [b, i, q]
            return results, results, results[..., columns.a - columns.n_c : columns.a]
        rows = self.place[chunk.batch, chunk.rows]  # [b, i, d]
        if not columns.first:
            w = sum(other.n for other in self.columns)
            results = rows[..., w : w + columns.n]  # [b, i, 2 j]
            return results, results, rows[..., self.n_waiting + n_out : self.n_kept]
        if not self.aside:
            kept, rows = rows, room.take("all", pairs, b, i, self.n_waiting + columns.n)  # [b, i, w + q]
            rows[..., : self.n_kept] = kept[..., : self.n_kept]
        results = rows[..., self.n_waiting : self.n_waiting + columns.n]  # [b, i, q]
        return results, rows[..., : self.n_waiting + columns.n], results[..., n_out : columns.a]

    def matrix(self, samples: slice, M: Tensor) -> Tensor:
        """M of those that wait, and then M [b, q, d] itself, [b, w + q, d]."""
        return torch.cat([columns.matrix(samples) for columns in self.columns] + [M], 1)


def backward_pass(p: Problem, x_hat, f_a_inp, kept, grad_y, grad_s, into, grad_f, grads, fresh) -> Tensor:
    """Gradient of one iteration: adds to grad_f, grads and ``into``, and returns grad_x_hat [b, j, d].

    A fresh pass, the first of a backward, writes what has an i instead of adding to it.
    ``pairs`` = x M^T turn into phi, which belongs to grad_y, and the gradients of the other columns: one
    product with x_inp sums these over i, which is the gradient of M, one with M itself is grad_x.
    The pass of the first iteration leaves the gradient of W_A x_inp in grad_f.
    """
    first, n_out = x_hat is None, p.n_out
    columns, room = Columns(p, x_hat, kept, grad_y, into.waits), Room()
    grad_M = grad_y.new_zeros(len(grad_y), columns.n - n_out, grad_y.shape[-1])  # [b, q - j, d]
    sums = grad_M.new_zeros(grad_M.shape[:2])  # [b, q - j]
    samples: Any = None
    for chunk in chunks(p):
        at = chunk.batch, chunk.rows
        if samples != chunk.samples:
            samples = chunk.samples
            computed, M = columns.matrix(samples, columns.computed), columns.matrix(samples)  # [b, q, d] each
            all_M = into.matrix(samples, M) if first else M  # [b, w + q, d]
        x, f = inputs(p, chunk), f_a_inp[at]  # [b, i, d], [b, i]
        pairs = room.take("pairs", f, *f.shape, max(columns.n, columns.n_computed))  # [b, i, q]
        c = columns.multiply(pairs, x, computed, chunk)  # [b, i, 2 j or j]
        results, all_results, grad_c = into.results(chunk, pairs, columns, room)
        to_sum = p.pairs.coefficients_backward(
            p, chunk, c, pairs, results, grad_c, columns, f, grad_s[samples], grad_f[at], grads, fresh, room
        )  # [b, i, q - j]
        if p.variable:
            add_sum(p, sums[samples], to_sum)
        if columns.n > n_out:
            accumulate_over_inputs(p, grad_M[samples], to_sum.mT, x)  # [b, q - j, d]
        if first and not p.variable:
            p.pairs.inputs_backward(p, chunk, x, all_results, all_M, grad_f[at], into, grads)
        elif into.grad_x is not None and (first or not into.waits):
            accumulate(p, into.grad_x[at], all_results, all_M, into.fresh)  # [b, i, d]
    if first and not p.variable:
        grads["B_A"] = (grad_f * p.sqrt_n_inp).sum(0)  # [i]
    if into.waits:
        into.columns.append(columns)
    else:
        into.fresh = False
    n_own = 0 if first else n_out
    columns.finish(grad_M[:, n_own:].sum(0), sums[:, n_own:], grads)
    grad_x_hat_S = grad_M[:, :n_own]  # [b, j, d]
    if first or not p.variable:
        return grad_x_hat_S
    grads.add("W_S", (grad_x_hat_S * x_hat).sum((0, 2))[None])  # [1, j]
    grads.add("B_S", sums[:, :n_out].sum(0, keepdim=True))  # [1, j]
    return grad_x_hat_S * p.w.W_S.mT  # [b, j, d]


class Columns:
    """What x_inp is multiplied with in a pass, as the rows of one matrix M; x_inp M^T has side by side

    - in a backward pass grad_phi, from grad_y,
    - in every iteration but the first the dot product of the scores, from x_hat,
    - of a variable length c: c_sum and c_ign, or in the first iteration, where all outputs have the same R
      (unless pairs are masked), their one combination prior c_sum - c_ign; and there a_inp.

    Of a fixed length c is None: ``p.pairs`` has the betas themselves. A c that is kept is computed once.

    The results of a backward pass have the same columns. Where the gradient of c adds up over the iterations
    until the first (``adds_up``), it is c_sum and c_ign there, and is missing in the others.
    """

    def __init__(self, p: Problem, x_hat, kept: Tensor, grad_y=None, adds_up: bool = False):
        self.p, self.first, forward = p, x_hat is None, grad_y is None
        self.flat = self.first and (p.use is None or p.use.shape[-1] == 1)
        self.kept: Any = kept if len(kept) else None
        self.filling = forward and self.first and self.kept is not None
        self.adds_up = adds_up and p.variable
        own = [m for m in (grad_y, scores_matrix(p, x_hat)) if m is not None]  # [b, j, d] each
        self.own: Any = torch.cat(own, 1) if own else None  # [b, k, d]
        self.computed = self.shared = self.bias = None  # type: Any
        self.a = self.n = self.n_computed = n_own = len(own) * p.n_out
        self.n_c = 0
        if not p.variable:
            return
        W, B = p.beta_rows  # [2 j, d], [2 j]
        W_c, B_c = (self._flatten(W, 0), self._flatten(B, 0)) if self.flat and not self.filling else (W, B)
        self.n_c = len(B_c)
        if self.kept is None or self.filling:
            self.computed = self._with_activations(W_c, n_own)  # [q - k, d]
            self.n_computed += len(self.computed)
            self.bias = nnf.pad(B_c, (n_own, len(self.computed) - len(B_c)))  # [q]
        if forward:
            self.a += self.n_c
        elif self.first or not self.adds_up:
            W_c = W if self.adds_up else W_c  # [2 j or j, d]
            self.shared, self.a = self._with_activations(W_c, n_own), n_own + len(W_c)  # [q - k, d]
            self.n += len(self.shared)

    def _flatten(self, c: Tensor, dim: int) -> Tensor:
        c_sum, c_ign = c.chunk(2, dim)
        return self.p.prior * c_sum - c_ign

    def _with_activations(self, W: Tensor, n_own: int) -> Tensor:
        """In the first iteration W_A is one more row, and zeros that keep columns aligned."""
        if not self.first:
            return W
        zeros = W.new_zeros(-(n_own + len(W) + 1) % 8, W.shape[1])  # [0 to 7, d]
        return torch.cat((W, self.p.w.W_A.to(W.dtype), zeros))  # [q - k, d]

    def matrix(self, samples: slice, shared: Any = None) -> Any:
        """M of some samples, [b, q, d], or [1, q, d] if it is the same for all; None if there is nothing.

        Args:
            shared: the rows that all samples have, by default those of the results.
        """
        shared = self.shared if shared is None else shared
        if self.own is None:
            return None if shared is None else shared[None]
        own = self.own[samples]  # [b, k, d]
        return own if shared is None else torch.cat((own, shared.expand(len(own), -1, -1)), 1)

    def multiply(self, pairs: Tensor, x: Tensor, M, chunk: Chunk):
        """Fill pairs [b, i, q] with x M^T and the bias, and give c [b, i, 2 j or j] (None if fixed)."""
        p, n, at = self.p, self.n_computed, (chunk.batch, chunk.rows)
        if n:
            multiply(p, x, M[:, :n], self.bias, out=pairs[..., :n])
        if not p.variable:
            return None
        if self.computed is None:
            return self._flatten(self.kept[at], -1) if self.flat else self.kept[at]
        n_own = n - len(self.computed)
        c = pairs[..., n_own : n_own + self.n_c]  # [b, i, 2 j or j]
        if self.filling:
            self.kept[at] = c
        return c

    def finish(self, grad_rows: Tensor, grad_B: Tensor, grads) -> None:
        """Hand over the gradients of the shared rows: [q - k, d], and summed over inputs, [b, q - k]."""
        if self.shared is None:
            return
        flat = self.flat and not self.adds_up
        k = self.p.n_out if flat else 2 * self.p.n_out
        for name, grad in (("W", grad_rows[:k].mT), ("B", grad_B[:, :k].sum(0))):
            grad_use, grad_ign = split_betas(self.p, grad, flat)
            grads.add(f"{name}_use", grad_use)
            grads.add(f"{name}_ign", grad_ign)
        if self.first:
            grads.add("W_A", grad_rows[None, k].clone())  # [1, d]
            grads.add("B_A", (grad_B[:, k, None] * self.p.sqrt_n_inp).sum(0))  # [1]


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


def split_betas(p: Problem, grad_c: Tensor, flat: bool) -> tuple[Tensor, Tensor]:
    """The gradients with respect to beta_use and beta_ign, from that of c_sum and c_ign, or of the flat c."""
    if flat:
        return grad_c * p.prior, grad_c * (p.prior - 1)
    grad_sum, grad_ign = grad_c.chunk(2, -1)
    return grad_sum, grad_sum + grad_ign
