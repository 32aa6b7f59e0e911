"""The columns of ``pairs``: all quantities of a pair i, j that are linear in x_inp, side by side."""

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vecroute.ops.chunks import Chunk, has_all_rows, of_chunk
from vecroute.ops.common import multiple_of_8
from vecroute.ops.matmul import multiplier
from vecroute.ops.problem import Problem, over_samples


class Columns:
    """The rows of one matrix M that a pass multiplies x_inp with. The columns of pairs = x_inp M^T are

    - grad_phi, from grad_y, in a backward pass,
    - the dot product of the scores, from x_hat, in every iteration but the first,
    - c, if n_inp is None: c_sum and c_ign. In the first iteration, unless pairs are masked, all outputs have
      the same R, and one column prior c_sum - c_ign replaces both. The first iteration also has a_inp.

    If n_inp is given, c is None, since the betas are parameters. A kept array (c or the dot product) is
    computed once.

    The results of a backward pass have the same columns. If pairs wait (``adds_up``), every iteration adds to
    one gradient of c_sum and c_ign, which only the first iteration has among its columns.
    """

    def __init__(self, p: Problem, own, kept: Tensor, *, first: bool, forward: bool, adds_up: bool = False):
        """Lay out the columns.

        Rows of M (None if there are none): ``own`` [b, k, d] differ between samples; ``computed`` are shared
        by all samples; ``shared`` are the shared rows for the results. Numbers of columns: ``n_computed`` in
        pairs, ``n`` in the results, ``n_own`` in own, ``n_c`` in c. ``a`` is the column of a_inp.
        """
        self.p, self.own, self.first, self.forward = p, own, first, forward
        self.flat = p.plan.is_flat(first)
        self.kept: Any = kept if len(kept) else None
        self.filling = self.forward and self.kept is not None and self.first == p.variable
        self.adds_up = adds_up and p.variable
        self.computed = self.shared = self.bias = None  # type: Any
        self.n_own = n_own = 0 if own is None else own.shape[1]
        self.a = self.n = self.n_computed = n_own
        self.n_c = 0
        if not p.variable:
            if self.kept is not None and not self.first and not self.forward:
                self.n_computed = p.width  # only grad_phi
            return
        flat = self.flat and not self.filling
        self.n_c = p.n_out if flat else 2 * p.n_out
        if self.kept is None or self.filling:
            self.computed, bias = self._shared_rows(flat)  # [q - k, d], [q - k]
            self.n_computed += len(self.computed)
            self.bias = nnf.pad(bias, (n_own, 0)) if n_own else bias  # [q]
        if self.forward:
            self.a += self.n_c
        elif self.first or not self.adds_up:
            other = self.computed is None or (flat and self.adds_up)
            flat &= not self.adds_up
            self.shared = self._shared_rows(flat)[0] if other else self.computed  # [q - k, d]
            self.a += p.n_out if flat else 2 * p.n_out
            self.n += len(self.shared)

    def _shared_rows(self, flat: bool) -> tuple[Tensor, Tensor]:
        """Return the rows of M for c; in the first iteration also W_A, and zeros that align the columns."""
        n = self.p.n_out if flat else 2 * self.p.n_out
        if self.first:
            n = multiple_of_8(self.n_own + n + 1) - self.n_own
        return self.p.pairs.shared_rows(self.p, flat, n)  # [q - k, d], [q - k]

    def matrix(self, samples: slice, shared: Any) -> Any:
        """Return M of some samples, [b, q, d], or [1, q, d] if all samples share it; None if it has no rows.

        Args:
            shared: ``computed``, or ``shared`` for the matrix of the results.
        """
        return with_shared(None if self.own is None else self.own[samples], shared)

    def kept_whole(self, like: Chunk, dtype: torch.dtype) -> Any:
        """Return the kept array [b, i, k] if it can serve as ``pairs`` of the chunk, else None.

        It can if it holds all columns of a pass in their dtype, and only the rows of the chunk. That is true
        for c and a_inp when they are first computed, and for dot products on the wide path.
        """
        if self.p.variable:
            whole = self.filling and self.kept.shape[-1] == self.n_computed
        else:
            whole = self.kept is not None and not self.first and dtype != self.p.dtype
        kept = self.kept[like.batch] if whole else None  # [b, i, k]
        return None if kept is None or has_all_rows(kept, like) else kept

    def products(self, pairs: Tensor, M, like: Chunk):
        """Return c for chunks of one shape, and a function that fills pairs.

        Returns:
            c [b, i, 2 j or j], or None if n_inp is given. A kept c has all rows, and both c_sum and c_ign.
            A function of a chunk and its x that fills pairs [b, i, q] with x M^T and the bias.
        """
        p, n = self.p, self.n_computed
        multiply = multiplier(p, M, self.bias, pairs[..., :n]) if n else None
        copied = self.kept is not None and self.kept_whole(like, pairs.dtype) is None
        kept = self.kept[like.batch] if copied else None  # [b, i, k]
        if p.variable and kept is not None:
            kept = kept[..., : 2 * p.n_out]  # [b, i, 2 j]
        c: Any = None
        if self.computed is not None:
            n_own = n - len(self.computed)
            c = pairs[..., n_own : n_own + self.n_c]  # [b, i, 2 j or j]
        elif p.variable:
            c = kept

        def fill(chunk: Chunk, x: Tensor) -> None:
            if multiply is not None:
                multiply(x)
            if kept is None:
                return
            rows = of_chunk(kept, chunk)  # [b, i, k]
            if self.filling:
                rows.copy_(c if p.variable else pairs)
            elif not p.variable:
                pairs[..., n:] = rows  # [b, i, j]

        return c, fill

    def finish(self, grad_M: Tensor, sums: Tensor, g, grads) -> Tensor:
        """Add the gradients of the parameters in M to grads, and return grad_x_hat [b, j, d].

        grad_M may be overwritten.

        Args:
            grad_M: [b or 1, q - j, d] for all rows of M except grad_y.
            sums: [b, q - j] sums of the results over the inputs.
            g: [b, j, d] from ``predicted``, or None in the first iteration.
        """
        p, n = self.p, 0 if self.first else self.p.n_out
        if self.shared is not None:
            flat = self.flat and not self.adds_up
            grad_rows = over_samples(grad_M[:, n:])  # [q - k, d]
            p.pairs.shared_rows_backward(p, grad_rows, sums[:, n:], flat, self.first, grads)
        grad_x_hat = grad_M[:, :n]  # [b, j, d]
        if self.first or not p.variable:
            return grad_x_hat
        return p.steps.scores_matrix_backward(p, grad_x_hat, sums[:, :n], g, grads)  # [b, j, d]


def new_rows(p: Problem, *shape: int) -> Tensor:
    """Allocate rows of M in the dtype of products, [*shape, j, d]. Rows without an output are zeros."""
    rows = p.x_inp.new_empty(*shape, p.width, p.x_inp.shape[-1], dtype=p.plan.operand_dtype)  # [*shape, j, d]
    if p.width > p.n_out:
        rows[..., p.n_out :, :] = 0
    return rows


def new_matrix(p: Problem, n_blocks: int) -> Tensor:
    """Allocate the rows of M of each sample, n_blocks rows per output, [b, n, d]."""
    return new_rows(p, len(p.sqrt_n_inp), n_blocks).flatten(1, 2)  # [b, n, d]


def block_of(p: Problem, M: Tensor, k: int) -> Tensor:
    """Return block k of the rows of M [b, n, d]: one row per output, [b, j, d]."""
    return M[:, k * p.width : k * p.width + p.n_out]


def with_shared(own: Any, shared: Any) -> Any:
    """Concatenate the rows of each sample, [b, k, d], and the rows that all samples share, if any."""
    if own is None or shared is None:
        return own if shared is None else shared[None]  # [b, k, d] or [1, q - k, d]
    return torch.cat((own, shared.to(own.dtype).expand(len(own), -1, -1)), 1)  # [b, q, d]
