"""The gradient of x_inp: every element is written once, after the pairs of all iterations are known."""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops.chunks import Chunk, Room
from vecroute.ops.columns import Columns, new_matrix
from vecroute.ops.common import multiple_of_8
from vecroute.ops.matmul import widened
from vecroute.ops.problem import Problem


def new_grad_x(p: Problem, needed: bool) -> Tensor | None:
    """Allocate the gradient of x_inp, [b, i, d], or return None if it is not needed."""
    return torch.empty_like(p.x_inp, memory_format=torch.contiguous_format) if needed else None


class InputGradient:
    """The gradient of x_inp, grad_x [b, i, d]: the sum of pairs @ M over the iterations.

    A backward pass ends with the first iteration. Until then, the pairs of the other iterations *wait*: they
    are stored side by side in a row of ``place``, if they fit there (``plan.waits_in``). After them, the row
    has space for phi of the first iteration, and for the gradient of c. Every iteration adds to the gradient
    of c, because c has the same matrix in all of them. If pairs do not fit, every pass adds its product to
    grad_x.

    On the long path, waiting pairs are float16 (``halved``). Each column is multiplied by the top of its row
    of M (``M_tops``). Then each row is divided by its own ``top``, the power of two below its greatest
    element so far.
    """

    def __init__(self, p: Problem, grad_x: Tensor | None, grad_W_A: Tensor | None = None):
        plan = p.plan
        self.plan, self.grad_x = plan, grad_x  # type: Any, Any
        self.waits = grad_x is not None and bool(plan.waits_in)
        self.place: Any = grad_x  # [b, i, d]
        self.aside = self.waits and plan.waits_in == "grad_W_A"
        self.apart = self.waits and plan.waits_in == "apart"
        self.halved = self.waits and plan.halves
        if self.aside:
            assert grad_W_A is not None
            self.place = grad_W_A[None]  # [1, i, d]
        elif self.apart:
            shape = *p.x_inp.shape[:2], multiple_of_8(plan.n_all)
            self.place = p.x_inp.new_empty(shape, dtype=p.dtype)  # [b, i, w + q]
        self.top = self.M_tops = None  # type: Any
        if self.halved:
            self.top = self.place.new_zeros(plan.case.n_iters + 1, self.place.shape[1])  # [1 + t, i]
            self.place = self.place.view(torch.float16)  # [1, i, 2 d]
        self.share = plan.backward_share(self.waits)
        self.M: Any = None  # [b, w + j, d] rows for the waiting pairs, then for the first iteration
        self.columns: list[Columns] = []  # layouts of the waiting pairs
        self.fresh = True  # True until something is added to grad_x

    def new_matrix(self, p: Problem, first: bool) -> Tensor:
        """Allocate rows of M: grad_y, and except in the first iteration the matrix of the scores."""
        if not self.waits or self.halved:
            return new_matrix(p, 1 if first else 2)  # [b, n, d]
        if self.M is None:  # if pairs wait, p.width is n_out
            self.M = new_matrix(p, self.plan.n_waiting // p.n_out + 1)  # [b, w + j, d]
        n = p.n_out if first else 2 * p.n_out
        w = self.plan.n_waiting if first else len(self.columns) * n
        return self.M[:, w : w + n]  # [b, n, d]

    def results(self, like: Chunk, pairs: Tensor, columns: Columns, room: Room):
        """Return the memory to which a pass writes its results.

        Returns:
            The results [b, i, q]; a view that also covers the waiting pairs, [b, i, w + q]; and the gradient
            of c. If pairs wait, these have all rows, else only the rows of a chunk.
        """
        (b, i, _), n_out, w = pairs.shape, columns.p.n_out, self.plan.n_waiting
        if not self.waits:
            results = pairs[..., : columns.n]  # [b, i, q]
            # If results are used only in products, they have the dtype of operands.
            if not columns.p.variable and self.plan.operand_dtype != pairs.dtype:
                dtype = self.plan.operand_dtype
                results = room.take("results", pairs, *results.shape, dtype=dtype)  # [b, i, q]
            return results, results, results[..., columns.a - columns.n_c : columns.a]
        rows = self.place[like.batch]  # [b, i, d]
        if not columns.first:
            before = sum(other.n for other in self.columns)
            results = rows[..., before : before + columns.n]  # [b, i, 2 j]
            return results, results, rows[..., w + n_out : self.plan.n_kept]
        if self.halved:
            results = room.take("halves", self.place, b, i, multiple_of_8(n_out))[..., :n_out]  # [1, i, j]
            return results, results, None
        if not self.aside and not self.apart:
            rows = room.take("all", pairs, b, i, w + columns.n)  # [b, i, w + q]
        results = rows[..., w : w + columns.n]  # [b, i, q]
        return results, rows[..., : w + columns.n], results[..., n_out : columns.a]

    def waiting(self, like: Chunk, rows: Tensor, columns: Columns) -> list[list[Tensor]]:
        """Return the copies that the first iteration makes of pairs in grad_x, before it overwrites them.

        Args:
            rows: [b, i, w + q] from ``results``.

        Returns:
            For each copy, a view of rows and a view of grad_x, [b, i, k] with all rows.
        """
        if not columns.first or not self.waits or self.aside or self.apart:
            return []
        place, n_first = self.place[like.batch], self.plan.n_waiting + columns.p.n_out  # [b, i, d]
        kept = slice(self.plan.n_waiting), slice(n_first, self.plan.n_kept)
        return [widened(rows[..., which], place[..., which]) for which in kept]

    def matrix(self, samples: slice, columns: Columns) -> Tensor:
        """Return M of a pass's results, [b, q, d]. In the first iteration, M of waiting pairs comes before.

        If pairs are ``halved``, M of the first iteration has the layout of the kernel of the long path.
        """
        p = columns.p
        if self.halved:
            all_columns = [*self.columns, columns] if columns.first else [columns]
            matrices = [each.matrix(samples, each.shared) for each in all_columns]  # [1, q, d] each
            M, self.M_tops = p.path.scaled_matrix(matrices, columns.first)  # and [q]
            return M
        if columns.first and self.waits:
            return p.pairs.stacked(self.M[samples], columns.shared)  # [b, w + q, d]
        return columns.matrix(samples, columns.shared)  # [b, q, d]
