"""The work on each pair i, j of a chunk, by Triton kernels."""

from functools import partial

import torch
from torch import Tensor

from vecroute.ops.backends.fused.activations import activations_backward_kernel, activations_kernel
from vecroute.ops.backends.fused.matrix import shared_rows as shared_rows
from vecroute.ops.backends.fused.matrix import shared_rows_backward as shared_rows_backward
from vecroute.ops.backends.fused.matrix import stacked as stacked
from vecroute.ops.backends.fused.pair_kernels import (
    coefficients_backward_kernel,
    coefficients_kernel,
    in_units,
    sum_samples_kernel,
    triton_dtype,
)
from vecroute.ops.backends.fused.product import rows_times
from vecroute.ops.backends.fused.sums import summer as summer
from vecroute.ops.chunks import Chunk, Room, has_all_rows, use_of_samples
from vecroute.ops.common import cdiv, next_power_of_2
from vecroute.ops.matmul import accumulate, has_kernel
from vecroute.ops.plan import blocks, limits
from vecroute.ops.problem import Problem


def pair_arguments(p: Problem, like: Chunk, c, f: Tensor, first: bool, strides: dict[str, int]) -> dict:
    """Return the arguments that both kernels over pairs share, except start, and add to ``strides``."""
    fixed, both = c is None, c is not None and c.shape[-1] > p.n_out
    flat = not fixed and p.plan.is_flat(first)
    if fixed:
        c_sum, c_ign = p.w.beta_use.expand(len(f), -1, -1), p.w.beta_ign  # [b, i, j], [i, j]
    else:
        c_sum, c_ign = c, c[..., p.n_out :] if both else c  # [b, i, j]
    strides |= {"c_b": c_sum.stride(0), "c_i": c_sum.stride(1)}
    use, use_strides = f, [0, 0, 0]
    if p.use is not None:
        use = use_of_samples(p, like).view(torch.uint8).expand(*f.shape, p.n_out)  # [b, i, j]
        use_strides = list(use.stride())
    return {
        "c_sum": c_sum, "c_ign": c_ign, "W_S": p.w.W_S, "B_S": p.w.B_S, "use": use, "f": f,
        "sqrt_n_inp": p.sqrt_n_inp[like.samples], "n_inp": like.shape[1], "f_b": f.stride(0),
        "use_b": use_strides[0], "use_i": use_strides[1], "use_j": use_strides[2],
        "FIRST": first, "FIXED": fixed, "BOTH": flat and both, "MASKED": p.use is not None,
        "PRIOR": p.prior if flat else 0.0,  # a constant: Triton compiles a kernel for each value
        "TRANSPOSED": transposes(p, like), "C_OF_ALL": has_all_rows(c_sum, like),
        **in_units(strides, p.n_out),
    }  # fmt: skip


def transposes(p: Problem, like: Chunk) -> bool:
    """Return whether values to be summed over i are contiguous in i, which is fastest if rows are aligned."""
    return like.shape[1] % 4 == 0 and p.n_out <= limits.TRANSPOSED_OUTPUTS


def to_be_summed(p: Problem, name: str, chunk: Chunk, like: Tensor, room: Room) -> Tensor:
    """Allocate memory for numbers [b, i, j] that are summed over i, in the dtype of ``like``."""
    (b, i), j = chunk.shape, p.n_out
    return room.take(name, like, b, j, i).mT if transposes(p, chunk) else room.take(name, like, b, i, j)


def coefficients(p: Problem, like: Chunk, c, dot, a, f: Tensor, dtype: torch.dtype, room: Room):
    """Do the same as ``chunked.coefficients``."""
    if dtype != p.dtype:
        return p.path.coefficients(p, like, dot, f, dtype, room)
    b, i = like.shape
    phi = to_be_summed(p, "phi", like, f, room)  # [b, i, j]
    linear = a if dot is None else dot  # [b, i, 1 to 8 or j]
    strides = {"dot_i": 0 if linear is None else linear.stride(1)}
    block = blocks.of_pairs(p.n_out)
    launch = partial(
        coefficients_kernel[cdiv(i, block["BLOCK_I"]), b], dot=f if linear is None else linear, B_A=p.w.B_A,
        phi=phi, ACTIVATE=a is not None, **pair_arguments(p, like, c, f, dot is None, strides), **block,
    )  # fmt: skip
    return phi, phi.mT, lambda chunk: launch(start=chunk.rows.start)


def coefficients_backward(
    p: Problem, like: Chunk, c, pairs, results, grad_c, columns, f, grad_s, grad_f, grads, fresh, into, room
):
    """Do the same as ``chunked.coefficients_backward``."""
    n_out, (b, i), first = p.n_out, like.shape, columns.first
    names = ("beta_use", "beta_ign") if first else ("beta_use", "beta_ign", "W_S", "B_S")
    if c is not None:
        fresh = fresh or not columns.adds_up
        of_pairs = [grad_c, grad_c if grad_c.shape[-1] == n_out else grad_c[..., n_out:]]  # [b, i, j] each
    elif b == 1:
        of_pairs = [grads[name][None] for name in names]  # [1, i, j] each
    else:
        # Each sample has its own part, and the parts are summed below. So no two programs write to the same
        # place.
        parts = room.take("parts", f, len(names), b, i, n_out)  # [2 or 4, b, i, j]
        of_pairs = list(parts)  # [b, i, j] each
    if c is None:
        fresh = fresh and like.samples.start == 0
    stored = fresh or (c is None and b > 1)
    to_sum = results[..., p.width :]  # [b, i, q - j]
    if pairs.dtype != p.dtype and not into.halved:
        launch = p.path.backward(p, like, pairs, columns, f, grad_s, grad_f, of_pairs, stored)
    else:
        if c is None and not first:
            to_sum = to_be_summed(p, "grad_dot", like, f if into.halved else results, room)  # [b, i, j]
        launch = backward(
            p, like, c, pairs, results, to_sum, of_pairs, columns, f, grad_s, grad_f, stored, into
        )

    def fill(chunk: Chunk) -> None:
        launch(chunk)
        if c is None and b > 1:
            sums = [grads[name][chunk.rows] for name in names]  # [i, j] each
            n, block = i * n_out, blocks.SAMPLES
            sum_samples_kernel[cdiv(n, block["BLOCK_N"]), len(names)](
                parts, sums[0], sums[1], sums[-2], sums[-1], b, n, int(fresh), T=triton_dtype(p), **block
            )

    return to_sum, fill


def backward(
    p: Problem, like: Chunk, c, pairs, results, to_sum, of_pairs, columns, f, grad_s, grad_f, stored, into
):
    """Return a function of a chunk that turns pairs into results, and stores or adds gradients [b, i, j]."""
    (b, i), first = like.shape, columns.first
    strides = {"grad_c_b": of_pairs[0].stride(0), "grad_c_i": of_pairs[0].stride(1)}
    strides |= {"results_b": results.stride(0), "results_i": results.stride(1), "pairs_i": pairs.stride(1)}
    block = blocks.of_pairs(p.n_out, 2048 if first else 1024, num_warps=8)
    tops = into.top[len(into.columns) :] if into.halved else f  # [2 or more, i]
    launch = partial(
        coefficients_backward_kernel[cdiv(i, block["BLOCK_I"]), b],
        pairs=pairs, results=results, grad_s=grad_s, grad_f=grad_f, a_0=columns.a,
        grad_sum=of_pairs[0], grad_ign=of_pairs[1], grad_W_S=of_pairs[-2], grad_B_S=of_pairs[-1],
        fresh=int(stored), ADDS_UP=columns.adds_up, grad_dot=to_sum, tops=tops, HALVED=into.halved,
        M_tops=into.M_tops if into.halved else f, RESULTS_OF_ALL=has_all_rows(results, like),
        GRADS_OF_ALL=has_all_rows(of_pairs[0], like), **block,
        **pair_arguments(p, like, c, f, first, strides),
    )  # fmt: skip
    return lambda chunk: launch(start=chunk.rows.start)


def activations(p: Problem, chunk: Chunk, x: Tensor, f: Tensor) -> None:
    """Do the same as ``chunked.activations``."""
    b, i, d = x.shape
    W_A, B_A = p.w.W_A[chunk.rows], p.w.B_A[chunk.rows]  # [i, d], [i]
    block = {"BLOCK_I": 4, "BLOCK_D": min(next_power_of_2(d), 1024), "T": triton_dtype(p)}
    activations_kernel[cdiv(i, block["BLOCK_I"]), b](
        x, W_A, B_A, p.sqrt_n_inp[chunk.samples], f, i, d, *x.stride(), W_A.stride(0), f.stride(0), **block
    )  # fmt: skip


def inputs_backward(p: Problem, chunk: Chunk, x, pairs, M, grad_a: Tensor, into, grads) -> None:
    """Do the same as ``chunked.inputs_backward``, with one kernel if there is one sample in IEEE float32."""
    if into.halved:
        rows, w = chunk.rows, p.plan.n_waiting
        waiting, top = into.place[0, rows, :w], into.top[1:, rows]  # [i, w], [t, i]
        tensors = p.w.W_A[rows], into.grad_x[0, rows], grads["W_A"][rows]  # [i, d] each
        p.path.input_gradient(waiting, pairs[0], M, top, x[0], *tensors, grad_a[0])
        return
    (b, i, d), fresh = x.shape, chunk.samples.start == 0
    W_A, grad_W_A = p.w.W_A[chunk.rows], grads["W_A"][chunk.rows]  # [i, d], [i, d]
    out = x if into.grad_x is None else into.grad_x[chunk.batch, chunk.rows]  # [b, i, d]
    if into.grad_x is not None:
        if b == 1 and fresh and has_kernel(p, x, W_A, out):
            # Copy the pairs that are stored in the rows of grad_W_A, because other programs overwrite them.
            pairs = pairs.clone() if into.aside else pairs  # [1, i, q]
            rows_times(pairs, M.mT.contiguous(), out, into.fresh, (x[0], W_A, grad_W_A, grad_a[0]))
            return
        accumulate(p, out, pairs, M, into.fresh)
    block = blocks.of_inputs(i, d)
    block["BLOCK_D"] = min(next_power_of_2(d), block["BLOCK_D"])
    activations_backward_kernel[cdiv(i, block["BLOCK_I"]), cdiv(d, block["BLOCK_D"])](
        x, W_A, grad_a, out, grad_W_A, b, i, d, *x.stride(), W_A.stride(0), grad_a.stride(0), *out.stride(),
        grad_W_A.stride(0), int(fresh), GRAD_X=into.grad_x is not None, T=triton_dtype(p), **block,
    )  # fmt: skip
