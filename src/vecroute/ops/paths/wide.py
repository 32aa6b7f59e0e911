"""Many outputs of a fixed length in bfloat16: Triton kernels over whole rows of pairs.

A program handles whole rows, one after another, so that it loads nothing twice. Pairs are bfloat16: dot
products, phi and their gradients. Parameters, their gradients and everything in between are float32.
``backends/fused/pair_kernels`` explains the names in kernels.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.backends.fused.functions import logistic
from vecroute.ops.backends.fused.pair_kernels import in_units
from vecroute.ops.chunks import Chunk, Room, has_all_rows
from vecroute.ops.columns import Columns
from vecroute.ops.common import cdiv
from vecroute.ops.plan.blocks import of_whole_rows
from vecroute.ops.problem import Problem


@triton.jit
def scores_of_row(dot, W_S, B_S, o_dot, o_S, o_j, m):
    """Return z = W_S dot + B_S of a row, dot and W_S."""
    b_dot = tl.load(dot + o_dot + o_j, mask=m, other=0.0).to(tl.float32)
    b_W = tl.load(W_S + o_S + o_j, mask=m, other=0.0).to(tl.float32)
    return b_dot * b_W + tl.load(B_S + o_S + o_j, mask=m, other=0.0).to(tl.float32), b_dot, b_W


@triton.jit
def f_of_row(z, m):
    """Return f(z), 0 outside of the row, and 1 - f(z)."""
    small, q, rest = logistic(z)
    return tl.where(m, tl.where(z < 0.0, small * q, q), 0.0), rest


@triton.jit
def of_small(dot, W_S, B_S, o_dot, o_S, o_j, m):
    """Return exp(z) over its greatest value in the row. It is proportional to f(z) if all f(z) are near 0."""
    z, _, _ = scores_of_row(dot, W_S, B_S, o_dot, o_S, o_j, m)
    z = tl.where(m, z, -float("inf"))
    return tl.exp(z - tl.max(z, 0))


# Triton does not specialise on strides here, so that it spreads all pairs of a row over the threads by VEC.
@triton.jit(do_not_specialize=["start", "n_rows", "n_inp", "n_out", "dot_i", "phi_i"])
def rows_kernel(
    dot,  # [b, i, j], where FIRST not read
    beta_use, beta_ign, W_S, B_S,  # [i, j] each
    f,  # [b, i]
    phi,  # [b, i, j] the result
    sums,  # [b, k, j] its sums over the rows of each program
    start,  # the first row of the chunk in f and the parameters, which have all rows
    n_rows,  # rows per program
    n_inp, n_out, dot_i, phi_i, f_b,  # n_out, dot_i and phi_i in units of VEC
    FIRST: tl.constexpr,
    STAGES: tl.constexpr,  # if more than 1, a program loads the next row while it computes this one
    BLOCK_J: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Compute phi = f ((beta_use + beta_ign) R - beta_ign)."""
    n_out = n_out * VEC
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_j = tl.arange(0, BLOCK_J)
    m = o_j < n_out
    total = tl.zeros([BLOCK_J], tl.float32)
    for i in tl.range(part * n_rows, tl.minimum((part + 1) * n_rows, n_inp), num_stages=STAGES):
        o_row = (start + i).to(tl.int64)
        o_S, o_pair = o_row * n_out, b * n_inp + i
        b_ign = tl.load(beta_ign + o_S + o_j, mask=m, other=0.0).to(tl.float32)
        b_sum = tl.load(beta_use + o_S + o_j, mask=m, other=0.0).to(tl.float32) + b_ign
        if FIRST:
            R = 1.0 / n_out
        else:
            o_dot = o_pair * dot_i * VEC
            z, _, _ = scores_of_row(dot, W_S, B_S, o_dot, o_S, o_j, m)
            R, _ = f_of_row(z, m)
            of_row = tl.sum(R, 0)
            if of_row < 1e-30:
                R = of_small(dot, W_S, B_S, o_dot, o_S, o_j, m)
                of_row = tl.sum(R, 0)
            R *= 1.0 / of_row
        b_phi = (b_sum * R - b_ign) * tl.load(f + b * f_b + o_row)
        tl.store(phi + o_pair * phi_i * VEC + o_j, b_phi.to(phi.dtype.element_ty), mask=m)
        total += b_phi
    tl.store(sums + (b * tl.num_programs(0) + part) * n_out + o_j, total, mask=m)


@triton.jit
def add_three(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c


@triton.jit
def give(pointer, value, m, ADD: tl.constexpr):
    """Store a value, or add it to memory if ADD."""
    if ADD:
        value += tl.load(pointer, mask=m, other=0.0)
    tl.store(pointer, value, mask=m)


@triton.jit(do_not_specialize=["start", "grad_start", "n_rows", "n_inp", "n_out", "pairs_i", "width", "dot_0",
                               "dot_i", "waiting_i"])  # fmt: skip
def rows_backward_kernel(
    pairs,  # [b, i, ...] grad_phi, turned into phi; unless FIRST the gradient of dot goes to column width
    dot,  # [b, i, ...] from column dot_0 on; where FIRST not read
    beta_use, beta_ign, W_S, B_S, f,  # as above
    sqrt_n_inp,  # [b]
    grad_s,  # [b, j]
    grad_f,  # [b, i], added to; where FIRST turned into the gradient of W_A x_inp
    grad_use, grad_ign, grad_W_S, grad_B_S,  # [b, i, j] each, with all rows if b is 1, else rows of the chunk
    waiting,  # [i, 2 j] where WAITS: grad_use as bfloat16
    start, grad_start,  # the first row of the chunk in f and the parameters, and in the four gradients above
    n_rows,  # rows per program
    n_inp, n_out, pairs_i, width, dot_0, dot_i, waiting_i,  # all but n_inp in units of VEC
    f_b, grad_s_b,
    FIRST: tl.constexpr,
    ADD: tl.constexpr,  # whether the kernel adds to these gradients
    WAITS: tl.constexpr,  # whether the gradients of c_sum and of -c_ign are stored until FIRST reads them
    STAGES: tl.constexpr,
    BLOCK_J: tl.constexpr,
    VEC: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``rows_kernel``."""
    n_out = n_out * VEC
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_j = tl.arange(0, BLOCK_J)
    m = o_j < n_out
    b_s = tl.load(grad_s + b * grad_s_b + o_j, mask=m, other=0.0)
    for i in tl.range(part * n_rows, tl.minimum((part + 1) * n_rows, n_inp), num_stages=STAGES):
        o_row, o_pair = (start + i).to(tl.int64), b * n_inp + i
        o_S, o_grad = o_row * n_out, (o_pair + grad_start) * n_out
        p_pairs = pairs + o_pair * pairs_i * VEC + o_j
        b_f = tl.load(f + b * f_b + o_row)
        b_ign = tl.load(beta_ign + o_S + o_j, mask=m, other=0.0).to(tl.float32)
        b_sum = tl.load(beta_use + o_S + o_j, mask=m, other=0.0).to(tl.float32) + b_ign
        grad_phi = tl.load(p_pairs, mask=m, other=0.0).to(tl.float32)
        grad_phi += b_s
        p_waiting = waiting + (o_pair + grad_start) * waiting_i * VEC + o_j
        if ADD and WAITS:  # load all of a row before the sums below, store it after them
            used_before = tl.load(p_waiting, mask=m, other=0.0).to(tl.float32)
            ignored_before = tl.load(p_waiting + n_out, mask=m, other=0.0).to(tl.float32)
        if FIRST:
            R = 1.0 / n_out
            of_f = tl.sum((b_sum * R - b_ign) * grad_phi, 0)
        else:
            o_dot = (o_pair * dot_i + dot_0) * VEC
            z, b_dot, b_W = scores_of_row(dot, W_S, B_S, o_dot, o_S, o_j, m)
            R, rest = f_of_row(z, m)
            # Compute three sums in one reduction, because each reduction waits for all threads.
            ignored, of_row, used = tl.reduce((b_ign * grad_phi, R, R * (b_sum * grad_phi)), 0, add_three)
            if of_row < 1e-30:
                R = of_small(dot, W_S, B_S, o_dot, o_S, o_j, m)
                of_row = tl.sum(R, 0)
                used = tl.sum(R * (b_sum * grad_phi), 0)
            R *= 1.0 / of_row
            used *= 1.0 / of_row
            of_f = used - ignored
            grad_z = R * (b_sum * grad_phi - used) * rest * b_f
            give(grad_W_S + o_grad + o_j, grad_z * b_dot, m, ADD)
            give(grad_B_S + o_grad + o_j, grad_z, m, ADD)
            grad_dot = tl.where(m, grad_z * b_W, 0.0)  # zeros up to the width
            tl.store(p_pairs + width * VEC, grad_dot.to(pairs.dtype.element_ty), mask=o_j < width * VEC)
        b_phi = (b_sum * R - b_ign) * b_f
        tl.store(p_pairs, b_phi.to(pairs.dtype.element_ty), mask=m)
        grad_phi *= b_f
        grad_sum = R * grad_phi
        if ADD and WAITS:
            grad_sum += used_before
            grad_phi += ignored_before
        if WAITS and not FIRST:
            tl.store(p_waiting, grad_sum.to(waiting.dtype.element_ty), mask=m)
            tl.store(p_waiting + n_out, grad_phi.to(waiting.dtype.element_ty), mask=m)
        else:
            give(grad_use + o_grad + o_j, grad_sum, m, ADD and not WAITS)
            give(grad_ign + o_grad + o_j, grad_sum - grad_phi, m, ADD and not WAITS)
        p_f = grad_f + b * f_b + o_row
        of_f += tl.load(p_f)
        if FIRST:
            of_f *= b_f * (1.0 - b_f) / tl.load(sqrt_n_inp + b)
        tl.store(p_f, of_f)


def cut(p: Problem, like: Chunk, programs: int) -> tuple[int, int]:
    """Return the number of programs per sample, and of rows per program."""
    b, i = like.shape
    n_rows = cdiv(i * b, p.plan.case.device.processors * programs)
    return cdiv(i, n_rows), n_rows


def coefficients(p: Problem, like: Chunk, dot, f: Tensor, dtype: torch.dtype, room: Room):
    """Do the same as ``chunked.coefficients``."""
    (b, i), first = like.shape, dot is None
    blocks = of_whole_rows(p.n_out, first=first, backward=False)
    n_programs, n_rows = cut(p, like, blocks.pop("programs"))
    phi = room.take("phi", f, b, i, p.width, dtype=dtype)[..., : p.n_out]  # [b, i, j]
    sums = room.take("sums", f, b, n_programs, p.n_out)  # [b, k, j]
    dot = phi if dot is None else dot  # [b, i, j]
    launch = partial(
        rows_kernel[n_programs, b], dot=dot, beta_use=p.w.beta_use, beta_ign=p.w.beta_ign, W_S=p.w.W_S,
        B_S=p.w.B_S, f=f, phi=phi, sums=sums, n_rows=n_rows, n_inp=i, f_b=f.stride(0), FIRST=first, **blocks,
        **in_units({"dot_i": dot.stride(1), "phi_i": phi.stride(1)}, p.n_out),
    )  # fmt: skip
    return phi, sums.mT, lambda chunk: launch(start=chunk.rows.start)


def backward(p: Problem, like: Chunk, pairs, columns: Columns, f, grad_s, grad_f, grads, stored: bool):
    """Do the same as ``backends.fused.pairs.backward``, in place.

    Args:
        grads: gradients of beta_use, beta_ign, and after the first iteration W_S and B_S, [b, i, j]. With one
            sample, gradients of the betas wait in the rows of grads[0], as bfloat16, for the first iteration.
    """
    (b, i), first = like.shape, columns.first
    blocks = of_whole_rows(p.width, first=first, backward=True)
    n_programs, n_rows = cut(p, like, blocks.pop("programs"))
    kept, all_rows = columns.kept_whole(like, pairs.dtype), has_all_rows(grads[0], like)
    strides = {
        "pairs_i": pairs.stride(1), "width": p.width, "dot_0": p.width, "dot_i": pairs.stride(1),
        "waiting_i": 2 * p.n_out,
    }  # fmt: skip
    if kept is not None:
        strides |= {"dot_0": 0, "dot_i": kept.stride(1)}
    launch = partial(
        rows_backward_kernel[n_programs, b], pairs=pairs, dot=pairs if kept is None else kept,
        beta_use=p.w.beta_use, beta_ign=p.w.beta_ign, W_S=p.w.W_S, B_S=p.w.B_S, f=f,
        sqrt_n_inp=p.sqrt_n_inp[like.samples], grad_s=grad_s, grad_f=grad_f, grad_use=grads[0],
        grad_ign=grads[1], grad_W_S=grads[-2], grad_B_S=grads[-1], waiting=grads[0].view(torch.bfloat16),
        n_rows=n_rows, n_inp=i, f_b=f.stride(0), grad_s_b=grad_s.stride(0), FIRST=first, ADD=not stored,
        WAITS=len(p.x_inp) == 1, **blocks, **in_units(strides, p.n_out),
    )  # fmt: skip

    def fill(chunk: Chunk) -> None:
        launch(start=chunk.rows.start, grad_start=chunk.rows.start if all_rows else 0)

    return fill
