"""One of two iterations over x_inp in float16: ``passes`` for large batches of a variable length.

With the flat c, prior c_sum - c_ign, phi is f c in the first, and f (c_sum (R - prior) + c) in the second.

All rows of all samples go together. Products are float16 by cuBLAS, sums over inputs by a kernel of
``fused_half``, which has their units; docs/math.md says why that is as precise as tf32.
"""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops.columns import new_matrix
from vecroute.ops.common import multiple_of_8, cdiv, next_power_of_2
from vecroute.ops.fused_half import (
    first_phi_backward_kernel,
    first_phi_kernel,
    half_sums_kernel,
    halves_kernel,
    last_phi_backward_kernel,
    last_phi_kernel,
)
from vecroute.ops.fused_matrix import shared_rows, shared_rows_backward
from vecroute.ops.half_inputs import FEATURES, ROWS
from vecroute.ops.input_gradient import input_gradient_of_batch
from vecroute.ops.problem import Grads, Problem, over_samples

# How kernels run best, found by trial on one H200: those over pairs, and sums over inputs.
FORWARD, BACKWARD = {"num_warps": 4}, {"num_warps": 8, "maxnreg": 128}
SUMS = {"STAGES": 4, "num_warps": 8}
LEAST_TOP = 2.0**-10  # of W: pairs times less, that of the flat c among them, would be lost beside others


class HalfInputs:
    """What all passes share, from ``new_half_inputs``.

    That is x_inp in float16, x [b, i, d], and its tops [b, i]; and the rows of M that give c_sum, the flat c
    and a_inp, and zeros, W [q, d], with W_tops and bias [q].
    """

    def __init__(self, x: Tensor, tops: Tensor, W: Tensor, W_tops: Tensor, bias: Tensor):
        self.x, self.tops, self.W, self.W_tops, self.bias = x, tops, W, W_tops, bias
        self.n_tiles = cdiv(x.shape[1], ROWS)

    def fill(self, p: Problem) -> "HalfInputs":
        """Fill all of it."""
        fill_halves(p.x_inp, self.x, self.tops)
        rows, _ = shared_rows(p, True, len(self.W), with_sum=True, bias=self.bias)  # [q, d]
        fill_halves(rows[None], self.W[None], self.W_tops[None], LEAST_TOP)
        return self

    def sums(self, pairs: Tensor, tops: Tensor, parts: Tensor, out: Tensor, sums: Tensor) -> None:
        """Fill out [b, q, d] with pairs^T x_inp, and sums [b, q] with those of pairs.

        Args:
            pairs, tops: [b, i, k] in float16, times the tops of x_inp, and [b, n]; k >= q.
            parts: [b, n, q] sums of pairs over tiles.
        """
        (b, i, d), k, q = self.x.shape, pairs.shape[-1], parts.shape[-1]
        half_sums_kernel[d // FEATURES, b](
            pairs, self.x, tops, parts, out, sums, pairs.stride(1) // 8, out.stride(0), sums.stride(0), i,
            k // 8, q, d // 8, BLOCK_I=ROWS, BLOCK_J=max(16, next_power_of_2(k)), BLOCK_D=FEATURES, **SUMS,
        )  # fmt: skip


class HalfGradient:
    """grad_x [b, i, d], from the pairs of both iterations, which wait side by side in float16.

    A row has phi and the gradient of dot of the second, phi of the first, then the gradients of c_sum, of the
    flat c, to which both add, and of a_inp, each times the top of its row of M.
    """

    def __init__(self, p: Problem, grad_x: Tensor | None):
        (b, i, d), j = p.x_inp.shape, p.n_out

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return p.x_inp.new_empty(*shape, dtype=dtype)

        self.grad_x = grad_x
        self.pairs = new_pairs(p.x_inp, 3 * j + multiple_of_8(2 * j + 1))  # [b, i, k]
        self.M, self.M_tops = (
            empty(b, 3 * j, d, dtype=torch.float16),
            empty(b, 3 * j),
        )  # grad_y, x_hat, grad_y
        self.tops = empty(2, b, i)  # [2, b, i] of pairs, after each iteration
        self.grad_M, self.sums = empty(b, 3 * j + 1, d), empty(b, 3 * j + 1)  # of dot, c_sum, flat c, a_inp

    def new_matrix(self, p: Problem, first: bool) -> Tensor:
        """As ``InputGradient.new_matrix``."""
        return new_matrix(p, 1 if first else 2)  # [b, n, d]


def forward_pass(p: Problem, M, f_a_inp, kept, y, s, phi_out, outputs) -> None:
    """As ``passes.forward_pass``, with what is kept as products of float16 give it."""
    half: HalfInputs = p.half
    n, (b, i), j = half.n_tiles, half.tops.shape, p.n_out
    phi, tops, parts = new_pairs(p.x_inp, j), y.new_empty(b, n), y.new_empty(b, n, j)  # [b, i, j], ...
    blocks = {"BLOCK_I": ROWS, "BLOCK_J": next_power_of_2(j), **FORWARD}
    sizes, of_c = (
        (i, j // 8, kept.shape[-1] // 8, phi.stride(1) // 8),
        (kept, half.tops, half.W_tops, half.bias),
    )
    if M is None:
        product(half.x.flatten(0, 1), half.W.mT, kept.flatten(0, 1))
        first_phi_kernel[n, b](*of_c, p.w.B_A, p.sqrt_n_inp, f_a_inp, phi, tops, parts, *sizes, **blocks)
    else:
        halves, M_tops = torch.empty_like(M, dtype=torch.float16), y.new_empty(b, j)  # [b, j, d], [b, j]
        fill_halves(M, halves, M_tops)
        dot = y.new_empty(b, i, j)  # [b, i, j]
        product(half.x, halves.mT, dot)
        shown: Any = parts if phi_out is None else phi_out  # not written, or [b, i, j]
        if phi_out is not None and (outputs is not None or not phi_out.is_contiguous()):
            shown = y.new_empty(b, i, j)  # [b, i, j]
        last_phi_kernel[n, b](
            dot, M_tops, *of_c, p.w.B_S, f_a_inp, phi, tops, parts, shown, *sizes, PRIOR=p.prior,
            SHOWN=phi_out is not None, **blocks,
        )  # fmt: skip
        if phi_out is not None and shown is not phi_out:
            phi_out.copy_(shown if outputs is None else shown[..., outputs])  # [b, i, j]
    half.sums(phi, tops, parts, y, s)


def backward_pass(p: Problem, g, f_a_inp, kept, M, grad_s, into: HalfGradient, grad_f, grads: Grads) -> Any:
    """As ``passes.backward_pass``; of the first iteration nothing is returned."""
    half: HalfInputs = p.half
    first, n, (b, i), j = g is None, half.n_tiles, half.tops.shape, p.n_out
    own, summed = (slice(2 * j, 3 * j), slice(2 * j, None)) if first else (slice(2 * j), slice(2 * j))
    halves, M_tops = into.M[:, own], into.M_tops[:, own]  # [b, 2 j or j, d], [b, 2 j or j]
    fill_halves(M, halves, M_tops)
    pairs = grad_s.new_empty(b, i, M.shape[1])  # [b, i, 2 j or j]
    product(half.x, halves.mT, pairs)
    grad_M, sums = into.grad_M[:, summed], into.sums[:, summed]  # [b, 2 j or j + 1, d], [b, 2 j or j + 1]
    to_sum, sum_tops = new_pairs(p.x_inp, multiple_of_8(sums.shape[1])), grad_s.new_empty(b, n)  # [b, i, .], [b, n]
    parts = grad_s.new_empty(b, n, sums.shape[1])  # [b, n, 2 j or j + 1]
    of_pairs = pairs, M_tops, kept, half.tops, half.W_tops, half.bias
    of_sums = to_sum, sum_tops, parts
    sizes = i, j // 8, kept.shape[-1] // 8, into.pairs.stride(1) // 8, to_sum.stride(1) // 8, M_tops.stride(0)
    blocks = {"BLOCK_I": ROWS, "BLOCK_J": next_power_of_2(j), **BACKWARD}
    if not first:
        last_phi_backward_kernel[n, b](
            *of_pairs, p.w.B_S, f_a_inp, grad_s, grad_f, into.pairs, into.tops[0], *of_sums, *sizes,
            PRIOR=p.prior, **blocks,
        )  # fmt: skip
        half.sums(*of_sums, grad_M, sums)
        return p.steps.scores_matrix_backward(p, grad_M[:, :j], sums[:, :j], g, grads)  # [b, j, d]
    first_phi_backward_kernel[n, b](
        *of_pairs, p.sqrt_n_inp, f_a_inp, grad_s, grad_f, into.pairs, *into.tops, *of_sums, *sizes, **blocks
    )
    half.sums(*of_sums, grad_M, sums)
    shared_rows_backward(
        p, over_samples(into.grad_M[:, j:]), into.sums[:, j:], True, True, grads, with_sum=True
    )
    if into.grad_x is not None:
        input_gradient_of_batch(into.pairs, into.M, half.W, into.tops, into.grad_x)
    return None


def new_pairs(x_inp: Tensor, k: int) -> Tensor:
    """Memory for pairs in float16, [b, i, k], in rows of whole 128 bytes: less is written more slowly."""
    return x_inp.new_empty(*x_inp.shape[:2], cdiv(k, 64) * 64, dtype=torch.float16)[..., :k]


def fill_halves(values: Tensor, out: Tensor, tops: Tensor, least: float = 0.0) -> None:
    """Fill out [b, n, d] with values in float16, over tops [b, n], filled too, which are not less."""
    b, n, d = values.shape
    strides = *values.stride()[:2], out.stride(0), tops.stride(0)
    halves_kernel[n, b](values, out, tops, least, d, *strides, BLOCK=next_power_of_2(d))


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, of float16 in float32."""
    if not a.is_cuda:
        out.copy_(a.float() @ b.float())
    elif a.dim() == 2:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
