"""One iteration over x_inp in float16, forward and backward: ``passes`` for large batches of a variable length.

All rows of all samples go together. Products are float16 by cuBLAS, sums over inputs by a kernel of
``fused_half``, which has their units; docs/math.md says why that is as precise as tf32.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vecroute.ops.input_gradient import input_gradient_of_batch
from vecroute.ops.columns import new_matrix
from vecroute.ops.common import aligned, cdiv, next_power_of_2
from vecroute.ops.fused_half import (
    half_coefficients_backward_kernel,
    half_coefficients_kernel,
    half_sums_kernel,
    halves_kernel,
)
from vecroute.ops.fused_matrix import shared_rows, shared_rows_backward
from vecroute.ops.half_inputs import FEATURES, ROWS
from vecroute.ops.problem import Grads, Problem, over_samples

WARPS = 16  # of a tile of pairs


class HalfInputs:
    """x_inp in float16: x [b, i, d], its tops [b, i], and the rows of M that all samples share."""

    def __init__(self, p: Problem, x: Tensor, tops: Tensor):
        self.p, self.x, self.tops = p, x, tops
        self.n_tiles = cdiv(x.shape[1], ROWS)

    def fill(self) -> "HalfInputs":
        fill_halves(self.p.x_inp, self.x, self.tops, n_free=self.x.shape[1])
        return self

    @cached_property
    def shared(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that give c_sum, c_ign and a_inp, and zeros, in float16 [q, d]; their tops and biases [q]."""
        rows, bias = shared_rows(self.p, False, aligned(2 * self.p.n_out + 1))  # [q, d], [q]
        halves, tops = torch.empty_like(rows, dtype=torch.float16), torch.empty_like(bias)  # [q, d], [q]
        fill_halves(rows[None], halves[None], tops[None])
        return halves, tops, bias

    def sums(self, pairs: Tensor, tops, parts, out: Tensor, sums: Tensor, a: Tensor | None = None) -> None:
        """Fill out [b, q, d] with pairs^T x_inp, and sums [b, q] with those of pairs.

        Args:
            pairs, tops: [b, i, k] in float16, times the tops of x_inp, and [b, n].
            parts: [b, n, q] sums of pairs over tiles.
            a: [b, i] one more column, if any.
        """
        (b, i, d), k, q = self.x.shape, pairs.shape[-1], parts.shape[-1]
        half_sums_kernel[cdiv(d, FEATURES), b](
            pairs, self.x, tops, parts, tops if a is None else a, self.tops, out, sums, i, k // 8, q, d // 8,
            OF_A=a is not None, BLOCK_I=ROWS, BLOCK_J=max(16, next_power_of_2(k)), BLOCK_D=FEATURES, STAGES=4,
            num_warps=8,
        )  # fmt: skip


class HalfGradient:
    """grad_x [b, i, d], from the pairs of all iterations, which wait side by side in float16.

    A row has phi and the gradient of dot of every iteration but the first, then phi of the first, then the
    gradients of c, which add up over the iterations, and of a_inp, each times the top of its row of M. A top
    of M is at least 2^-10 where it is that of a parameter: pairs times less would be lost beside others.
    """

    def __init__(self, p: Problem, n_iters: int, grad_x: Tensor | None):
        b, i, d = p.x_inp.shape
        n_own = (2 * n_iters - 1) * p.n_out
        n_all = n_own + aligned(2 * p.n_out + 1)
        self.grad_x, self.n_iters, self.n_own = grad_x, n_iters, n_own
        self.pairs = p.x_inp.new_empty(b, i, n_all, dtype=torch.float16)  # [b, i, k]
        self.M = p.x_inp.new_empty(b, n_own, d, dtype=torch.float16)  # [b, w + j, d]
        self.M_tops = p.x_inp.new_empty(b, n_own)  # [b, w + j]
        self.tops = p.x_inp.new_empty(n_iters, b, cdiv(i, ROWS))  # [t, b, n]
        self.n_done = 0

    def new_matrix(self, p: Problem, first: bool) -> Tensor:
        """As ``InputGradient.new_matrix``."""
        return new_matrix(p, 1 if first else 2)  # [b, n, d]


def forward_pass(p: Problem, M, f_a_inp, kept, y, s, phi_out, outputs) -> None:
    """As ``passes.forward_pass``, with what is kept as products of float16 give it."""
    half: HalfInputs = p.half
    W, W_tops, bias = half.shared  # [q, d], [q], [q]
    first, n, (b, i), j = M is None, half.n_tiles, half.tops.shape, p.n_out
    dot: Any = kept  # not read in the first iteration
    M_tops: Any = W_tops
    if first:
        product(half.x.flatten(0, 1), W.mT, kept.flatten(0, 1))
    else:
        dot, halves, M_tops = y.new_empty(b, i, j), torch.empty_like(M, dtype=torch.float16), y.new_empty(b, j)
        fill_halves(M, halves, M_tops)
        product(half.x, halves.mT, dot)
    phi, tops = half.x.new_empty(b, i, j), y.new_empty(b, n)  # [b, i, j], [b, n]
    parts = y.new_empty(b, n, j)  # [b, n, j]
    shown: Any = None if phi_out is None else y.new_empty(b, i, j)  # [b, i, j]
    half_coefficients_kernel[n, b](
        dot, kept, half.tops, M_tops, W_tops, bias, p.w.B_S, p.w.B_A, p.sqrt_n_inp, f_a_inp, phi, tops, parts,
        parts if shown is None else shown, i, j // 8, kept.shape[-1] // 8, PRIOR=p.prior if first else 0.0,
        FIRST=first, SHOWN=shown is not None, BLOCK_I=ROWS, BLOCK_J=next_power_of_2(j), num_warps=WARPS,
    )  # fmt: skip
    if shown is not None:
        phi_out.copy_(shown if outputs is None else shown[..., outputs])  # [b, i, j]
    half.sums(phi, tops, parts, y, s)


def backward_pass(p: Problem, g, f_a_inp, kept, M, grad_s, into: HalfGradient, grad_f, grads: Grads) -> Any:
    """As ``passes.backward_pass``; in the first iteration nothing is returned."""
    half: HalfInputs = p.half
    W, W_tops, bias = half.shared  # [q, d], [q], [q]
    first, n, (b, i), j = g is None, half.n_tiles, half.tops.shape, p.n_out
    w, n_own = into.n_done * 2 * j, M.shape[1]
    halves, M_tops = into.M[:, w : w + n_own], into.M_tops[:, w : w + n_own]  # [b, 2 j, d], [b, 2 j]
    fill_halves(M, halves, M_tops, n_free=j)
    pairs = grad_s.new_empty(b, i, n_own)  # [b, i, 2 j or j]
    product(half.x, halves.mT, pairs)
    results, grad_c = into.pairs[..., w:], into.pairs[..., into.n_own :]  # [b, i, k] each
    to_sum, sum_tops = half.x.new_empty(b, i, 2 * j if first else j), grad_s.new_empty(b, n)  # and [b, n]
    parts = grad_s.new_empty(b, n, 2 * j + 1 if first else j)  # [b, n, q]
    half_coefficients_backward_kernel[n, b](
        pairs, kept, half.tops, M_tops, W_tops, bias, p.w.B_S, p.sqrt_n_inp, f_a_inp, grad_s, grad_f, results,
        grad_c, into.tops[max(0, into.n_done - 1)], into.tops[into.n_done], to_sum, sum_tops, parts, i, j // 8,
        kept.shape[-1] // 8, into.pairs.shape[-1] // 8, parts.shape[-1], M_tops.stride(0), PRIOR=p.prior if first else 0.0,
        FIRST=first, FRESH=into.n_done == 0, BLOCK_I=ROWS, BLOCK_J=next_power_of_2(j), num_warps=WARPS,
    )  # fmt: skip
    into.n_done += 1
    sums = grad_s.new_empty(b, parts.shape[-1])  # [b, q]
    grad_M = grad_s.new_empty(*sums.shape, M.shape[-1])  # [b, q, d]
    half.sums(to_sum, sum_tops, parts, grad_M, sums, grad_f if first else None)
    if not first:
        return p.steps.scores_matrix_backward(p, grad_M, sums, g, grads)  # [b, j, d]
    if into.grad_x is not None:
        input_gradient_of_batch(into.pairs, into.M, W, into.tops, into.grad_x)
    shared_rows_backward(p, over_samples(grad_M), sums, False, True, grads)
    return None


def fill_halves(values: Tensor, out: Tensor, tops: Tensor, n_free: int = 0) -> None:
    """Fill out [b, n, d] with values in float16, over tops [b, n], which are filled too.

    Args:
        n_free: rows of a sample that may have tops as small as their numbers.
    """
    b, n, d = values.shape
    halves_kernel[n, b](
        values, out, tops, n_free, d, *values.stride()[:2], out.stride(0), tops.stride(0),
        BLOCK=next_power_of_2(d),
    )  # fmt: skip


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, of float16 in float32."""
    if not a.is_cuda:
        out.copy_(a.float() @ b.float())
    elif a.dim() == 2:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
