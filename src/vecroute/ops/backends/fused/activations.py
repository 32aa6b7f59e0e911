"""Triton kernels for the activations of inputs if n_inp is given; ``pair_kernels`` explains the names."""

import triton
import triton.language as tl

from vecroute.ops.backends.fused.pair_kernels import add_to


@triton.jit
def activations_kernel(
    x, W_A, B_A, sqrt_n_inp, f,  # [b, i, d], [i, d], [i], [b], [b, i]
    n_inp, d_inp, x_b, x_i, x_d, W_i, f_b, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Compute f(a_inp_i), the logistic function of sum_d W_A_id x_inp_id / sqrt(n_inp) + B_A_i."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    b = tl.program_id(1).to(tl.int64)
    m_i = o_i < n_inp
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    for start in range(0, d_inp, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
        m = m_i & (o_d < d_inp)
        b_x = tl.load(x + b * x_b + o_i * x_i + o_d * x_d, mask=m, other=0.0).to(T)
        total += b_x * tl.load(W_A + o_i * W_i + o_d, mask=m, other=0.0).to(T)
    a = tl.sum(total, 1)[:, None] / tl.load(sqrt_n_inp + b) + tl.load(B_A + o_i, mask=m_i, other=0.0)
    tl.store(f + b * f_b + o_i, 1.0 / (1.0 + tl.exp(-a)), mask=m_i)


@triton.jit
def activations_backward_kernel(
    x, W_A, scaled, grad_x, grad_W_A,  # [b, i, d], [i, d], [b, i], [b, i, d], [i, d]
    n_batch, n_inp, d_inp, x_b, x_i, x_d, W_i, scaled_b, grad_x_b, grad_x_i, grad_x_d, grad_W_i, fresh,
    GRAD_X: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Add scaled_i W_A_id to grad_x_id, and sum scaled_i x_id over the batch to grad_W_A_id."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    o_d = tl.program_id(1).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    m_i = o_i < n_inp
    m = m_i & (o_d < d_inp)
    b_W = tl.load(W_A + o_i * W_i + o_d, mask=m, other=0.0).to(T)
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    for b in range(tl.full([], 0, tl.int64), n_batch):
        b_a = tl.load(scaled + b * scaled_b + o_i, mask=m_i, other=0.0)
        total += b_a * tl.load(x + b * x_b + o_i * x_i + o_d * x_d, mask=m, other=0.0).to(T)
        if GRAD_X:
            add_to(grad_x + b * grad_x_b + o_i * grad_x_i + o_d * grad_x_d, b_a * b_W, m, 0, T)
    add_to(grad_W_A + o_i * grad_W_i + o_d, total, m, fresh, T)
