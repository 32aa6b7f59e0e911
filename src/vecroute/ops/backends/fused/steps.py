"""The small steps between two passes, the same as in ``chunked.steps``, in a few Triton kernels.

Each kernel does all elementwise work between two products. It sums over samples without atomics, so that
every run gives the same result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.backends.fused.matrix import scores_matrix_backward as scores_matrix_backward
from vecroute.ops.backends.fused.norm import normalized, normalized_backward
from vecroute.ops.backends.fused.pair_kernels import add_to, triton_dtype
from vecroute.ops.common import cdiv
from vecroute.ops.matmul import add_product
from vecroute.ops.plan import blocks
from vecroute.ops.problem import Grads, Problem, over_samples


@triton.jit
def outputs_kernel(
    y, s, sqrt_n_inp, W_F1, B_F2, u, x_out,  # [b, j, d], [b, j], [b], [j, d], [j, h], [b, j, d], [b, j, h]
    n_rows, n_out, d_inp, d_out, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute u = y W_F1 / sqrt_n_inp and x_out = s B_F2. A row is one output of one sample."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    m_row, j = row < n_rows, row % n_out
    scale = tl.load(sqrt_n_inp + row // n_out, mask=m_row, other=1.0)
    b_s = tl.load(s + row, mask=m_row, other=0.0)
    for start in range(0, d_inp, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)[None, :]
        m = m_row & (o_d < d_inp)
        b_y = tl.load(y + row * d_inp + o_d, mask=m, other=0.0) / scale
        b_u = b_y * tl.load(W_F1 + j * d_inp + o_d, mask=m, other=0.0).to(T)
        tl.store(u + row * d_inp + o_d, b_u.to(u.dtype.element_ty), mask=m)
    for start in range(0, d_out, BLOCK_D):
        o_h = start + tl.arange(0, BLOCK_D)[None, :]
        m = m_row & (o_h < d_out)
        b_B = tl.load(B_F2 + j * d_out + o_h, mask=m, other=0.0).to(T)
        tl.store(x_out + row * d_out + o_h, b_s * b_B, mask=m)


@triton.jit
def scores_matrix_kernel(
    g, W_G2, B_G2, W_S, out,  # [b, j, d], [j, d] twice, [j], [b, j, d] from out_0 on
    n_rows, n_out, d_inp, out_b, out_0,
    FIXED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute x_hat = W_G2 g + B_G2, times W_S unless FIXED. A row is one output of one sample."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    m_row, b, j = row < n_rows, row // n_out, row % n_out
    for start in range(0, d_inp, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)[None, :]
        m = m_row & (o_d < d_inp)
        b_W = tl.load(W_G2 + j * d_inp + o_d, mask=m, other=0.0).to(T)
        b_B = tl.load(B_G2 + j * d_inp + o_d, mask=m, other=0.0).to(T)
        x_hat = b_W * tl.load(g + row * d_inp + o_d, mask=m, other=0.0).to(T) + b_B
        if not FIXED:
            x_hat *= tl.load(W_S + j, mask=m_row, other=0.0).to(T)
        tl.store(out + b * out_b + out_0 + j * d_inp + o_d, x_hat.to(out.dtype.element_ty), mask=m)


@triton.jit
def scale_backward(grad, x, W, sqrt_n_inp, grad_x, u, grad_W, grad_B, k, part, first, last, n, grad_b,
                   grad_x_b, fresh, OF_SUM: tl.constexpr, OF_B: tl.constexpr, BLOCK_B: tl.constexpr,
                   BLOCK_N: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Compute the gradients of W x + B, given its gradient ``grad``, for a block of the n numbers j, d.

    grad_x is W grad. grad_W is the sum of x grad over samples, and grad_B is the sum of grad over samples, if
    OF_B. If OF_SUM, x is divided by sqrt_n_inp before, and the kernel also stores u = W x.
    """
    o = k.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m_o = o < n
    b_W = tl.load(W + o, mask=m_o, other=0.0).to(T)
    sum_W = tl.zeros([BLOCK_B, BLOCK_N], T)
    sum_B = tl.zeros([BLOCK_B, BLOCK_N], T)
    for start in range(first, last, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)[:, None].to(tl.int64)
        m = (b < last) & m_o
        b_grad = tl.load(grad + b * grad_b + o, mask=m, other=0.0).to(T)
        b_x = tl.load(x + b * n + o, mask=m, other=0.0).to(T)
        b_grad_x = b_grad * b_W
        if OF_SUM:
            scale = tl.load(sqrt_n_inp + b, mask=b < last, other=1.0)
            b_x /= scale
            b_grad_x /= scale
            tl.store(u + b * n + o, (b_x * b_W).to(u.dtype.element_ty), mask=m)
        sum_W += b_grad * b_x
        sum_B += b_grad
        tl.store(grad_x + b * grad_x_b + o, b_grad_x.to(grad_x.dtype.element_ty), mask=m)
    add_to(grad_W + part * n + o, tl.sum(sum_W, 0)[None, :], m_o, fresh, T)
    if OF_B:
        add_to(grad_B + part * n + o, tl.sum(sum_B, 0)[None, :], m_o, fresh, T)


@triton.jit
def bias_backward(grad, s, grad_B, k, part, first, last, n_out, d_out, n, fresh, BLOCK_B: tl.constexpr,
                  BLOCK_N: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Sum s grad over samples to grad_B, for a block of the n numbers j, h."""
    o = k.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    m_o, j = o < n, o // d_out
    total = tl.zeros([BLOCK_B, BLOCK_N], T)
    for start in range(first, last, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)[:, None].to(tl.int64)
        m = (b < last) & m_o
        b_s = tl.load(s + b * n_out + j, mask=m, other=0.0)
        total += b_s * tl.load(grad + b * n + o, mask=m, other=0.0)
    add_to(grad_B + part * n + o, tl.sum(total, 0)[None, :], m_o, fresh, T)


@triton.jit
def bias_backward_rows(grad, s, B, grad_B, grad_s, rounded, k, n_rows, n_out, d_out, fresh, ONE: tl.constexpr,
                       ROUNDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
                       T: tl.constexpr):  # fmt: skip
    """Sum B grad over h to grad_s, for some rows b, j. If there is ONE sample, also add s grad to grad_B."""
    row = k * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    m_row, j = row < n_rows, row % n_out
    total = tl.zeros([BLOCK_R, BLOCK_D], T)
    for start in range(0, d_out, BLOCK_D):
        o_h = start + tl.arange(0, BLOCK_D)[None, :]
        m = m_row & (o_h < d_out)
        b_grad = tl.load(grad + row * d_out + o_h, mask=m, other=0.0)
        total += b_grad * tl.load(B + j * d_out + o_h, mask=m, other=0.0).to(T)
        if ONE:
            b_s = tl.load(s + row, mask=m_row, other=0.0)
            add_to(grad_B + row * d_out + o_h, b_s * b_grad, m, fresh, T)
        if ROUNDS:
            tl.store(rounded + row * d_out + o_h, b_grad.to(rounded.dtype.element_ty), mask=m)
    tl.store(grad_s + row, tl.sum(total, 1)[:, None], mask=m_row)


@triton.jit(do_not_specialize=["n_W", "n_B"])
def outputs_backward_kernel(
    grad_x_out,  # [b, j, h]
    grad_u, y, s, sqrt_n_inp, W_F1, B_F2,  # [b, j, d] twice, [b, j], [b], [j, d], [j, h]
    grad_y,  # [b, j, d]
    u,  # [b, j, d] y W_F1 / sqrt_n_inp
    rounded,  # [b, j, h] grad_x_out in another dtype, where ROUNDS
    grad_s,  # [b, j]
    grad_W_F1, grad_B_F2,  # [parts, j, d], [parts, j, h]
    n_W, n_B,  # numbers of programs for W_F1 and for B_F2
    n_batch, n_rows, n_out, d_out, n_d, n_h,  # sizes of b, b j, j, h, j d, j h
    grad_y_b, grad_y_0,  # stride over b of grad_y, and the offset of its first element
    step,  # samples per part
    fresh_W, fresh_B,  # whether these gradients are stored instead of added to
    ONE: tl.constexpr,  # whether there is one sample; then the programs for s also compute grad_B_F2
    ROUNDS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,  # samples and numbers
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,  # rows and features
    T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``outputs_kernel``: programs for W_F1 come first, then for B_F2, then for s."""
    k, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = part * step, tl.minimum((part + 1) * step, n_batch)
    k_B, k_s = k - n_W, k - n_W - n_B
    if k_B < 0:
        scale_backward(grad_u, y, W_F1, sqrt_n_inp, grad_y + grad_y_0, u, grad_W_F1, grad_W_F1, k, part,
                       first, last,
                       n_d, n_d, grad_y_b, fresh_W, True, False, BLOCK_B, BLOCK_N, T)  # fmt: skip
    elif k_s < 0:
        bias_backward(grad_x_out, s, grad_B_F2, k_B, part, first, last, n_out, d_out, n_h, fresh_B, BLOCK_B,
                      BLOCK_N, T)  # fmt: skip
    else:
        row_block = k_s * tl.num_programs(1) + part
        bias_backward_rows(grad_x_out, s, B_F2, grad_B_F2, grad_s, rounded, row_block, n_rows, n_out, d_out,
                           fresh_B, ONE, ROUNDS, BLOCK_R, BLOCK_D, T)  # fmt: skip


@triton.jit
def predictions_backward_kernel(
    grad_x_hat, g, W_G2, grad_g,  # [b, j, d] twice, [j, d], [b, j, d]
    grad_W_G2, grad_B_G2,  # [parts, j, d] each
    n_batch, n_d, grad_x_hat_b, step, fresh,  # as above
    OF_B: tl.constexpr,  # whether the gradient of B_G2 is needed
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x_hat = W_G2 g + B_G2."""
    k, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = part * step, tl.minimum((part + 1) * step, n_batch)
    scale_backward(grad_x_hat, g, W_G2, g, grad_g, grad_g, grad_W_G2, grad_B_G2, k, part, first, last, n_d,
                   grad_x_hat_b, n_d, fresh, False, OF_B, BLOCK_B, BLOCK_N, T)  # fmt: skip


def outputs(p: Problem, y: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Do the same as ``chunked.steps.outputs``."""
    (b, j, d), h = y.shape, p.w.B_F2.shape[1]
    u = torch.empty_like(y, dtype=p.plan.step_dtype)  # [b, j, d]
    x_out = y.new_empty(b, j, h) if out is None else out  # [b, j, h]
    block = blocks.of_rows(max(d, h))
    outputs_kernel[cdiv(b * j, block["BLOCK_R"]),](
        y, s, p.sqrt_n_inp, p.w.W_F1, p.w.B_F2, u, x_out, b * j, j, d, h, T=triton_dtype(p), **block,
    )  # fmt: skip
    add_product(x_out.view(-1, h), u.view(-1, d), p.in_dtype("W_F2", p.w.W_F2, u.dtype), fresh=False)
    return x_out


def predicted(p: Problem, x_out: Tensor, out: Tensor | None = None) -> Tensor:
    """Do the same as ``chunked.steps.predicted``."""
    dtype, size = p.plan.step_dtype, (*x_out.shape[:2], p.w.W_G1.shape[1])
    g = x_out.new_empty(size, dtype=dtype) if out is None else out  # [b, j, d]
    v = normalized(x_out, dtype)  # [b, j, h]
    add_product(g.flatten(0, 1), v.flatten(0, 1), p.in_dtype("W_G1", p.w.W_G1, dtype), fresh=True)
    return g


def scores_matrix(p: Problem, g: Tensor, out: Tensor) -> Tensor:
    """Do the same as ``chunked.steps.scores_matrix``."""
    b, j, d = g.shape
    block = blocks.of_rows(d)
    scores_matrix_kernel[cdiv(b * j, block["BLOCK_R"]),](
        g, p.w.W_G2, p.w.B_G2, p.w.W_S, out, b * j, j, d, out.stride(0), 0,
        FIXED=not p.variable, T=triton_dtype(p), **block,
    )  # fmt: skip
    return out


def outputs_backward(p: Problem, grad_x_out: Tensor, y: Tensor, s: Tensor, grads: Grads, out: Tensor):
    """Do the same as ``chunked.steps.outputs_backward``."""
    (b, j, d), h = y.shape, grad_x_out.shape[-1]
    grad_x_out, s = grad_x_out.contiguous(), s.contiguous()  # [b, j, h], [b, j]
    dtype, rounds = p.plan.step_dtype, p.plan.step_dtype != p.dtype
    rounded = torch.empty_like(grad_x_out, dtype=dtype) if rounds else grad_x_out  # [b, j, h]
    grad_u, u = torch.empty_like(y, dtype=dtype), torch.empty_like(y, dtype=dtype)  # [b, j, d] each
    sums, by_row = blocks.of_samples(b), blocks.of_rows(h)
    parts, step = blocks.parts_of_samples(b, j * max(d, h))
    grad_W, fresh_W = sums_of(p, grads, "W_F1", parts)  # [parts, j, d]
    grad_B, fresh_B = sums_of(p, grads, "B_F2", parts)  # [parts, j, h]
    grad_s = torch.empty_like(s)  # [b, j]

    def launch(n_W: int, n_B: int, n_s: int) -> None:
        outputs_backward_kernel[n_W + n_B + n_s, parts](
            grad_x_out, grad_u, y, s, p.sqrt_n_inp, p.w.W_F1, p.w.B_F2, out, u, rounded, grad_s, grad_W,
            grad_B, n_W, n_B, b, b * j, j, h, j * d, j * h, out.stride(0), 0, step, fresh_W, fresh_B,
            ONE=b == 1, ROUNDS=rounds, T=triton_dtype(p), **sums, **by_row,
        )  # fmt: skip

    n_W = cdiv(j * d, sums["BLOCK_N"])
    n_B = 0 if b == 1 else cdiv(j * h, sums["BLOCK_N"])
    n_s = cdiv(b * j, by_row["BLOCK_R"] * parts)
    if rounds:
        launch(0, n_B, n_s)  # before the product, which needs the rounded grad_x_out
    rows = rounded.view(-1, h)  # [b j, h]
    add_product(grad_u.view(-1, d), rows, p.in_dtype("W_F2", p.w.W_F2, dtype).mT, fresh=True)
    launch(n_W, *((0, 0) if rounds else (n_B, n_s)))
    add_parts(grads, "W_F1", grad_W)
    add_parts(grads, "B_F2", grad_B)
    add_gradient(p, grads, "W_F2", u.view(-1, d).mT, rows)
    return grad_s


def predictions_backward(p: Problem, grad_x_hat: Tensor, x_out: Tensor, g: Tensor, grads: Grads) -> Tensor:
    """Do the same as ``chunked.steps.predictions_backward``."""
    (b, j, d), h = g.shape, x_out.shape[-1]
    grad_g = torch.empty_like(g, dtype=p.plan.step_dtype)  # [b, j, d]
    block, (parts, step) = blocks.of_samples(b), blocks.parts_of_samples(b, j * d)
    grad_W, fresh = sums_of(p, grads, "W_G2", parts)  # [parts, j, d]
    # With one sample and no other rows in grad_x_hat, it is itself the gradient of B_G2.
    own = b == 1 and not p.variable and "B_G2" not in grads and p.width == j
    grad_B = grad_x_hat if own else sums_of(p, grads, "B_G2", parts)[0]  # [parts, j, d]
    predictions_backward_kernel[cdiv(j * d, block["BLOCK_N"]), parts](
        grad_x_hat, g, p.w.W_G2, grad_g, grad_W, grad_B, b, j * d, grad_x_hat.stride(0), step, fresh,
        OF_B=not own, T=triton_dtype(p), **block,
    )  # fmt: skip
    add_parts(grads, "W_G2", grad_W)
    add_parts(grads, "B_G2", grad_B)
    grad_v, rows = grad_g.new_empty(b, j, h), grad_g.view(-1, d)  # [b, j, h], [b j, d]
    add_product(grad_v.view(-1, h), rows, p.in_dtype("W_G1", p.w.W_G1, rows.dtype).mT, fresh=True)
    v, grad_x_out = normalized_backward(grad_v, x_out)  # [b, j, h] each
    add_gradient(p, grads, "W_G1", v.flatten(0, 1).mT, rows)
    return grad_x_out


def sums_of(p: Problem, grads: Grads, name: str, parts: int) -> tuple[Tensor, int]:
    """Return the memory [parts, j, d] in which a kernel sums a gradient, and whether it is new.

    With one part, the kernel adds to the existing gradient.
    """
    if parts == 1 and name in grads:
        return grads[name][None], 0
    return p.sqrt_n_inp.new_empty(parts, *getattr(p.w, name).shape), 1  # [parts, j, d]


def add_parts(grads: Grads, name: str, sums: Tensor) -> None:
    """Add the sums [parts, j, d] to the gradient, unless they are the gradient itself."""
    if name not in grads or len(sums) > 1:
        grads.add(name, over_samples(sums))  # [j, d]


def add_gradient(p: Problem, grads: Grads, name: str, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a gradient, or store it if there is none yet."""
    fresh = name not in grads
    if fresh:
        grads[name] = a.new_empty(a.shape[0], b.shape[1], dtype=p.dtype)  # [n, m]
    add_product(grads[name], a, b, fresh)
