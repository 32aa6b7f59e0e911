"""Triton kernels for M, the matrix that x_inp is multiplied with; ``pair_kernels`` explains the names."""

import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.backends.fused.pair_kernels import sum_samples_kernel, triton_dtype
from vecroute.ops.common import cdiv, multiple_of_8
from vecroute.ops.plan import blocks
from vecroute.ops.plan.blocks import MATRIX
from vecroute.ops.problem import Grads, Problem


@triton.jit
def beta(use, ign, is_sum, PRIOR: tl.constexpr, FLAT: tl.constexpr, WITH_SUM: tl.constexpr):
    """Return the parameters of c_sum, c_ign or the flat c, from the parameters of beta_use and beta_ign."""
    other = PRIOR * (use + ign) - ign if FLAT else ign
    return tl.where(is_sum, use + ign, other) if WITH_SUM else other


@triton.jit
def shared_rows_kernel(
    W_use, W_ign, B_use, B_ign, W_A,  # [d, j] twice, [j] twice, [d]
    out, bias,  # [q, d], [q]
    n_out, n_rows, d_inp,
    PRIOR: tl.constexpr,
    FLAT: tl.constexpr,
    WITH_SUM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Write the rows for c_sum (if WITH_SUM), c_ign (if FLAT, c) and a_inp, then zeros; and their biases."""
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    n_c = 2 * n_out if WITH_SUM else n_out
    is_c, is_sum, j = q < n_c, q < n_out, q % n_out
    o, m_d = d[:, None] * n_out + j[None, :], d[:, None] < d_inp
    b_use = tl.load(W_use + o, mask=m_d & is_c[None, :], other=0.0).to(T)
    b_ign = tl.load(W_ign + o, mask=m_d & is_c[None, :], other=0.0).to(T)
    columns = beta(b_use, b_ign, is_sum[None, :], PRIOR, FLAT, WITH_SUM)  # [d, q]
    b_A = tl.load(W_A + d, mask=d < d_inp, other=0.0).to(T)
    rows = tl.where((q == n_c)[:, None], b_A[None, :], tl.trans(columns))
    m = (q < n_rows)[:, None] & (d < d_inp)[None, :]
    tl.store(out + q[:, None] * d_inp + d[None, :], rows, mask=m)
    if tl.program_id(1) == 0:
        bias_use = tl.load(B_use + j, mask=is_c, other=0.0).to(T)
        bias_ign = tl.load(B_ign + j, mask=is_c, other=0.0).to(T)
        tl.store(bias + q, beta(bias_use, bias_ign, is_sum, PRIOR, FLAT, WITH_SUM), mask=q < n_rows)


@triton.jit
def beta_backward(of_sum, of_other, PRIOR: tl.constexpr, FLAT: tl.constexpr):
    """Return the gradients of beta_use and beta_ign, from gradients of c_sum and of c_ign or the flat c."""
    if FLAT:
        return of_sum + PRIOR * of_other, of_sum + (PRIOR - 1) * of_other
    return of_sum, of_sum + of_other


@triton.jit
def shared_rows_backward_kernel(
    grad, sums,  # [q, d] gradient of the rows; [b, q] gradient of their biases, for each sample
    sqrt_n_inp,  # [b]
    grad_W_use, grad_W_ign, grad_B_use, grad_B_ign, grad_W_A,  # as above
    grad_B_A,  # [1]
    n_out, n_batch, d_inp, sums_b,
    PRIOR: tl.constexpr,
    FLAT: tl.constexpr,
    WITH_SUM: tl.constexpr,
    FIRST: tl.constexpr,  # whether there is a_inp
    BLOCK_B: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ``shared_rows_kernel``, and the gradient of B_A."""
    j = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_j, m_d = j < n_out, d < d_inp
    p_grad, m = grad + j[:, None] * d_inp + d[None, :], m_j[:, None] & m_d[None, :]
    n_sum = n_out if WITH_SUM else 0
    of_sum = tl.load(p_grad, mask=m & WITH_SUM, other=0.0)
    of_other = tl.load(p_grad + tl.cast(n_sum, tl.int64) * d_inp, mask=m, other=0.0)
    use, ign = beta_backward(of_sum, of_other, PRIOR, FLAT)
    o, m = d[:, None] * n_out + j[None, :], m_d[:, None] & m_j[None, :]
    tl.store(grad_W_use + o, tl.trans(use), mask=m)
    tl.store(grad_W_ign + o, tl.trans(ign), mask=m)
    n_c = n_sum + n_out
    if FIRST and tl.program_id(0) == 0:
        of_a = tl.load(grad + tl.cast(n_c, tl.int64) * d_inp + d, mask=m_d, other=0.0)
        tl.store(grad_W_A + d, of_a, mask=m_d)
    if tl.program_id(1) == 0:
        sum_sum = tl.zeros([BLOCK_B, BLOCK_Q], T)
        sum_other = tl.zeros([BLOCK_B, BLOCK_Q], T)
        sum_a = tl.zeros([BLOCK_B], T)
        for start in range(0, n_batch, BLOCK_B):
            b = start + tl.arange(0, BLOCK_B).to(tl.int64)
            m_b = b < n_batch
            p_sums, m_sums = sums + b[:, None] * sums_b + j[None, :], m_b[:, None] & m_j[None, :]
            sum_sum += tl.load(p_sums, mask=m_sums & WITH_SUM, other=0.0)
            sum_other += tl.load(p_sums + n_sum, mask=m_sums, other=0.0)
            if FIRST:
                scale = tl.load(sqrt_n_inp + b, mask=m_b, other=0.0)
                sum_a += scale * tl.load(sums + b * sums_b + n_c, mask=m_b, other=0.0)
        bias_use, bias_ign = beta_backward(tl.sum(sum_sum, 0), tl.sum(sum_other, 0), PRIOR, FLAT)
        tl.store(grad_B_use + j, bias_use, mask=m_j)
        tl.store(grad_B_ign + j, bias_ign, mask=m_j)
        if FIRST and tl.program_id(0) == 0:
            tl.store(grad_B_A, tl.sum(sum_a, 0))


@triton.jit
def stacked_kernel(
    own, shared,  # [b, k, d], [q - k, d]
    out,  # [b, d, q]
    n_own, n_rows, d_inp,  # k, q
    own_b, out_b, out_d,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the rows of each sample, followed by the rows that all samples share, as columns."""
    q = tl.program_id(0).to(tl.int64) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    b = tl.program_id(2).to(tl.int64)
    m_d, is_own, is_shared = (d < d_inp)[None, :], q < n_own, (q >= n_own) & (q < n_rows)
    o = q[:, None] * d_inp + d[None, :]
    rows = tl.load(own + b * own_b + o, mask=is_own[:, None] & m_d, other=0.0)
    o = (q - n_own)[:, None] * d_inp + d[None, :]
    after = tl.load(shared + o, mask=is_shared[:, None] & m_d, other=0.0)
    rows = tl.where(is_own[:, None], rows, after.to(rows.dtype))
    m = (d < d_inp)[:, None] & (q < n_rows)[None, :]
    tl.store(out + b * out_b + d[:, None] * out_d + q[None, :], tl.trans(rows), mask=m)


@triton.jit
def scores_matrix_backward_kernel(
    grad,  # [b, j, d] gradient of x_hat W_S, turned into the gradient of x_hat
    g, W_G2, B_G2, W_S,  # [b, j, d], [j, d] twice, [j]
    sums,  # [b, j] gradient of z, summed over i
    parts,  # [2, b, j] gradients of W_S and B_S
    n_rows, n_out, d_inp, grad_b, sums_b,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x_hat W_S, with x_hat = W_G2 g + B_G2. A row is one output of one sample."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    m_row, b, j = row < n_rows, row // n_out, row % n_out
    b_S = tl.load(W_S + j, mask=m_row, other=0.0).to(T)
    total = tl.zeros([BLOCK_R, BLOCK_D], T)
    for start in range(0, d_inp, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)[None, :]
        m = m_row & (o_d < d_inp)
        b_W = tl.load(W_G2 + j * d_inp + o_d, mask=m, other=0.0).to(T)
        b_B = tl.load(B_G2 + j * d_inp + o_d, mask=m, other=0.0).to(T)
        p_grad = grad + b * grad_b + j * d_inp + o_d
        b_grad = tl.load(p_grad, mask=m, other=0.0)
        total += b_grad * (b_W * tl.load(g + row * d_inp + o_d, mask=m, other=0.0).to(T) + b_B)
        tl.store(p_grad, b_grad * b_S, mask=m)
    tl.store(parts + row, tl.sum(total, 1)[:, None], mask=m_row)
    b_sum = tl.load(sums + b * sums_b + j, mask=m_row, other=0.0)
    tl.store(parts + n_rows + row, b_sum, mask=m_row)


def shared_rows(p: Problem, flat: bool, n: int) -> tuple[Tensor, Tensor]:
    """Do the same as ``chunked.shared_rows``."""
    d = p.x_inp.shape[-1]
    rows, bias = p.sqrt_n_inp.new_empty(n, d), p.sqrt_n_inp.new_empty(n)  # [q, d] and [q]
    grid = cdiv(n, MATRIX["BLOCK_Q"]), cdiv(d, MATRIX["BLOCK_D"])
    shared_rows_kernel[grid](
        p.w.W_use, p.w.W_ign, p.w.B_use, p.w.B_ign, p.w.W_A, rows, bias, p.n_out, n, d,
        PRIOR=p.prior if flat else 0.0, FLAT=flat, WITH_SUM=not flat, T=triton_dtype(p), **MATRIX,
    )  # fmt: skip
    return rows, bias


def shared_rows_backward(
    p: Problem, grad: Tensor, sums: Tensor, flat: bool, first: bool, grads: Grads
) -> None:
    """Do the same as ``chunked.shared_rows_backward``."""
    names = ("W_use", "W_ign", "B_use", "B_ign", *(("W_A", "B_A") if first else ()))
    found = [grad.new_empty(getattr(p.w, name).shape) for name in names]
    grid = cdiv(p.n_out, MATRIX["BLOCK_Q"]), cdiv(grad.shape[1], MATRIX["BLOCK_D"])
    shared_rows_backward_kernel[grid](
        grad, sums, p.sqrt_n_inp, *found[:4], found[-2], found[-1], p.n_out, len(sums), grad.shape[1],
        sums.stride(0), PRIOR=p.prior if flat else 0.0, FLAT=flat, WITH_SUM=not flat,
        FIRST=first, BLOCK_B=32, T=triton_dtype(p), **MATRIX,
    )  # fmt: skip
    for name, value in zip(names, found, strict=True):
        grads.add(name, value)


def stacked(own: Tensor, shared: Tensor | None) -> Tensor:
    """Do the same as ``columns.with_shared``, but contiguous in q. This makes products fastest."""
    if shared is None:
        return own
    (b, k, d), n = own.shape, own.shape[1] + len(shared)
    out = own.new_empty(b, d, multiple_of_8(n))[..., :n]  # [b, d, q]
    grid = cdiv(n, MATRIX["BLOCK_Q"]), cdiv(d, MATRIX["BLOCK_D"]), b
    stacked_kernel[grid](own, shared, out, k, n, d, own.stride(0), *out.stride()[:2], **MATRIX)
    return out.mT


def scores_matrix_backward(p: Problem, grad: Tensor, sums: Tensor, g: Tensor, grads: Grads) -> Tensor:
    """Do the same as ``chunked.steps.scores_matrix_backward``."""
    b, j, d = g.shape
    parts, block = sums.new_empty(2, b, j), blocks.of_rows(d)  # [2, b, j]
    scores_matrix_backward_kernel[cdiv(b * j, block["BLOCK_R"]),](
        grad, g, p.w.W_G2, p.w.B_G2, p.w.W_S, sums, parts, b * j, j, d, grad.stride(0), sums.stride(0),
        T=triton_dtype(p), **block,
    )  # fmt: skip
    grad_W, grad_B = sums.new_empty(1, j), sums.new_empty(1, j)  # [1, j] each
    sum_samples_kernel[cdiv(j, blocks.SAMPLES["BLOCK_N"]), 2](
        parts, grad_W, grad_B, grad_W, grad_B, b, j, 1, T=triton_dtype(p), **blocks.SAMPLES
    )
    grads.add("W_S", grad_W)
    grads.add("B_S", grad_B)
    return grad
