"""Functions of Triton kernels: the competition of the outputs for an input, and tops of rows."""

import triton
import triton.language as tl


@triton.jit
def top_below(greatest):
    """Return the power of two below a non-negative number; at least 2^-95, by which a GPU can divide."""
    bits = greatest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(bits, 32 << 23).to(tl.float32, bitcast=True)


@triton.jit
def logistic(z):
    """Return exp(-|z|), q = 1 / (1 + exp(-|z|)), and 1 - f(z), which is exact even if f(z) is almost 1."""
    small = tl.exp(-tl.abs(z))
    q = 1.0 / (1.0 + small)
    return small, q, q * tl.where(z > 0.0, small, 1.0)


@triton.jit
def f_of(z):
    """Return low = min(z, 0) and q of f(z) = exp(low) q, which keeps digits for very low z; and 1 - f(z)."""
    _, q, rest = logistic(z)
    return tl.minimum(z, 0.0), q, rest


@triton.jit
def share(value, total):
    """Return value / total: R of an output. It is exactly 1 if all other outputs underflow to 0."""
    return tl.where(value == total, 1.0, value / total)


@triton.jit
def scores_backward(R, R_grad_R, total, rest):
    """Return the gradient of z from R times the gradient of R, whose sum over j is ``total``.

    The products are the same as in the sum, so that they cancel exactly if one output has all of R.
    """
    return (R_grad_R - R * total) * rest
