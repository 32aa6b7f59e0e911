"""The gradient of x_inp, written once: pairs wait for it."""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops.chunks import Chunk, Room
from vecroute.ops.columns import Columns, new_matrix
from vecroute.ops.common import multiple_of_8
from vecroute.ops.matmul import halves_of, has_halves, row_weights, widened
from vecroute.ops.paths.long import by_rows
from vecroute.ops.problem import Problem

# Up to so many bytes, and twice ``Tuning.keep_bytes``, ``fused`` has memory for all pairs of a backward,
# which then wait nowhere else.
WHOLE_BYTES = 2**27


def new_grad_x(p: Problem, needed: bool) -> Tensor | None:
    """Memory for the gradient of x_inp, [b, i, d], None if it is not needed."""
    return torch.empty_like(p.x_inp) if needed else None


class InputGradient:
    """grad_x [b, i, d], the sum of pairs @ M over the iterations, written once where that can be.

    Until the first iteration, the last of a backward, the pairs of the others wait side by side, if they fit,
    in the rows of a gradient that is written last: that of W_A, where one sample alone has it, else grad_x;
    or in memory of their own, where that is little (``apart``). There the gradient of c, which has the same
    matrix in every iteration, adds up after them and after room for phi of the first. Where they do not fit
    every pass adds its product.

    ``halved``: pairs are float16, for the kernel of ``fused_halves`` or, ``by_rows``, of ``input_gradient``:
    divided by ``top``, the power of two below the greatest of a row so far, and multiplied with ``weights``,
    one for each column of a pass.
    """

    def __init__(self, p: Problem, n_iters: int, grad_x: Tensor | None, grad_W_A: Tensor | None = None):
        self.grad_x: Any = grad_x  # [b, i, d], None if it is not needed
        aside = grad_W_A is not None and len(p.x_inp) == 1
        place: Any = grad_W_A[None] if grad_W_A is not None and aside else self.grad_x  # [b, i, d]
        self.n_waiting = (n_iters - 1) * 2 * p.n_out
        self.n_kept = self.n_waiting + (3 if p.variable else 1) * p.n_out
        self.n_all = self.n_waiting + (
            multiple_of_8(3 * p.n_out + 1) if p.variable else p.n_out
        )  # with a_inp
        fits = grad_x is not None and n_iters > 1 and self.n_kept <= p.x_inp.shape[-1]
        fits &= p.width == p.n_out
        self.apart = fits and not aside and self._is_little(p)
        if self.apart:
            place = p.x_inp.new_empty(
                *p.x_inp.shape[:2], multiple_of_8(self.n_all), dtype=p.dtype
            )  # [b, i, w + q]
        self.place, self.waits = place, fits and place.dtype == p.dtype and place.stride(-1) == 1
        self.aside = aside and self.waits  # in grad_W_A
        self.halved = self.aside and has_halves(p, self.n_waiting, self.grad_x, grad_W_A)
        self.by_rows = self.halved and by_rows.can_multiply(p, self.n_waiting)
        self.top = self.weights = None  # type: Any
        if self.halved:
            self.place = place.view(torch.float16)  # [1, i, 2 d]
            self.top = place.new_zeros(n_iters + 1, place.shape[1])  # [1 + t, i], so far
        self.share = 5 if self.halved else 11 if self.waits else 30 if p.variable else 22
        self.M: Any = None  # [b, w + j, d] those that wait and the first
        self.columns: list[Columns] = []  # of the pairs that wait
        self.fresh = True

    def _is_little(self, p: Problem) -> bool:
        """Whether the pairs of all iterations, and M of every sample, may have memory of their own."""
        (b, i, d), n_samples = p.x_inp.shape, len(p.sqrt_n_inp)
        size = multiple_of_8(self.n_all) * (b * i + n_samples * d) * p.dtype.itemsize
        return p.implementation == "fused" and size <= min(WHOLE_BYTES, 2 * p.tuning.keep_bytes)

    def new_matrix(self, p: Problem, first: bool) -> Tensor:
        """Memory for rows of M: those of grad_y, and where it is not the first iteration of the scores."""
        if not self.waits or self.halved:
            return new_matrix(p, 1 if first else 2)  # [b, n, d]
        if self.M is None:  # where pairs wait, p.width is n_out
            self.M = new_matrix(p, self.n_waiting // p.n_out + 1)  # [b, w + j, d]
        n = p.n_out if first else 2 * p.n_out
        w = self.n_waiting if first else len(self.columns) * n
        return self.M[:, w : w + n]  # [b, n, d]

    def n_besides(self, columns: Columns) -> int:
        """Numbers that a row has in buffers of a pass besides ``pairs``."""
        if not columns.first:
            return 0 if columns.p.variable else columns.p.n_out  # the gradient of dot, to be summed
        if not self.waits or self.apart:
            return 0
        return columns.p.n_out // 2 if self.halved else self.n_waiting + columns.n

    def results(self, like: Chunk, pairs: Tensor, columns: Columns, room: Room):
        """Where the results of a pass go, [b, i, q]; the same with those that wait; and the gradient of c.

        Where pairs wait, of all rows, else of those of chunks like the given one.
        """
        (b, i, _), n_out = pairs.shape, columns.p.n_out
        if not self.waits:
            results = pairs[..., : columns.n]  # [b, i, q]
            if not columns.p.variable and columns.p.operand_dtype != pairs.dtype:  # only multiplied
                dtype = columns.p.operand_dtype
                results = room.take("results", pairs, *results.shape, dtype=dtype)  # [b, i, q]
            return results, results, results[..., columns.a - columns.n_c : columns.a]
        rows = self.place[like.batch]  # [b, i, d]
        if not columns.first:
            w = sum(other.n for other in self.columns)
            results = rows[..., w : w + columns.n]  # [b, i, 2 j]
            return results, results, rows[..., self.n_waiting + n_out : self.n_kept]
        if self.halved:
            results = room.take("halves", self.place, b, i, multiple_of_8(n_out))[..., :n_out]  # [1, i, j]
            return results, results, None
        if not self.aside and not self.apart:
            rows = room.take("all", pairs, b, i, self.n_waiting + columns.n)  # [b, i, w + q]
        results = rows[..., self.n_waiting : self.n_waiting + columns.n]  # [b, i, q]
        return results, rows[..., : self.n_waiting + columns.n], results[..., n_out : columns.a]

    def waiting(self, like: Chunk, rows: Tensor, columns: Columns) -> list[list[Tensor]]:
        """What the first iteration copies from grad_x, [b, i, k] of all rows, to all results, [b, i, w + q].

        Returns:
            Pairs of where it goes and where it has waited.
        """
        if not columns.first or not self.waits or self.aside or self.apart:
            return []
        place, n_first = self.place[like.batch], self.n_waiting + columns.p.n_out  # [b, i, d]
        kept = slice(self.n_waiting), slice(n_first, self.n_kept)
        return [widened(rows[..., which], place[..., which]) for which in kept]

    def matrix(self, samples: slice, columns: Columns) -> Tensor:
        """M of the results of a pass, in the first iteration after M of those that wait, [b, w + q, d].

        In the first iteration, if it is ``halved``, as the kernel reads it.
        """
        p = columns.p
        if self.halved:
            all_columns = [*self.columns, columns] if columns.first else [columns]
            matrices = [each.matrix(samples, each.shared) for each in all_columns]  # [1, q, d] each
            if columns.first and self.by_rows:
                M = torch.cat([M[0] for M in matrices])  # [w + j, d]
                w = row_weights(M)  # [w + j, 1]
                self.weights = w[-p.n_out :].flatten()  # [j]
                return by_rows.arranged(M, w)
            weights = [row_weights(M) for M in matrices]  # [1, q, 1] each
            self.weights = weights[-1].flatten()  # [q]
            return halves_of(matrices, weights) if columns.first else matrices[0]
        if columns.first and self.waits:
            return p.pairs.stacked(self.M[samples], columns.shared)  # [b, w + q, d]
        return columns.matrix(samples, columns.shared)  # [b, q, d]
