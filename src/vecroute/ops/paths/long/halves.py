"""The gradients of x_inp and of W_A in one Triton kernel.

The gradient of x_inp is a product of pairs with a small matrix M, plus grad_a W_A. Both operands of the
product are float16, which has the digits of tf32, at half the bytes and twice the rate. The range of float16
is too small for unscaled numbers, so each row of pairs and of M is divided by its top (see ``row_tops``).
"""

import torch
import torch.nn.functional as nnf
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vecroute.ops.common import cdiv
from vecroute.ops.plan.blocks import HALVES


@triton.jit
def input_gradient_kernel(
    # All tensors but top and grad_a are tensor descriptors.
    waiting,  # [i, w] pairs of the iterations after the first, side by side
    phi,  # [i, j] phi of the first iteration
    M,  # [n, k] the matrices of all iterations, each padded to whole blocks of columns
    top,  # [t, i] the tops of pairs, in the order of the backward pass: the first iteration comes last
    x, W_A, grad_x, grad_W_A,  # [i, n]
    grad_a,  # [i] gradient of W_A x_inp
    n_rows,
    n_out,
    top_t,
    start, n_blocks,  # the first block of columns, and the number of blocks
    WAITING: tl.constexpr,  # number of iterations whose pairs wait
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute grad_x = sum_t top_t (pairs_t M_t) + grad_a W_A, and grad_W_A = grad_a x_inp.

    The tops top_t of a row rise with t.
    """
    # Neighbouring programs use the same rows of pairs, so that these come from the cache.
    row = tl.program_id(0) // n_blocks * BLOCK_I
    column = (start + tl.program_id(0) % n_blocks) * BLOCK_N
    o_i = row.to(tl.int64) + tl.arange(0, BLOCK_I)
    m_i = o_i < n_rows
    padded = tl.cdiv(2 * n_out, BLOCK_K) * BLOCK_K
    total = tl.zeros([BLOCK_I, BLOCK_N], tl.float32)  # in units of b_top, which rises with t
    b_top = tl.full([BLOCK_I], 1.0, tl.float32)
    for t in tl.static_range(WAITING + 1):
        before, b_top = b_top, tl.load(top + t * top_t + o_i, mask=m_i, other=1.0)
        total *= (before / b_top)[:, None]
        if t < WAITING:
            for k in range(0, 2 * n_out, BLOCK_K):
                b_M = M.load([column, t * padded + k]).T
                total = tl.dot(waiting.load([row, t * 2 * n_out + k]), b_M, total)
        else:
            for k in range(0, n_out, BLOCK_K):
                total = tl.dot(phi.load([row, k]), M.load([column, t * padded + k]).T, total)
    total = total * (1.0 / 2**28) * b_top[:, None]  # both operands were multiplied by 2^14
    b_a = tl.load(grad_a + o_i, mask=m_i, other=0.0)[:, None]
    grad_W_A.store([row, column], b_a * x.load([row, column]))
    grad_x.store([row, column], total + b_a * W_A.load([row, column]))


def input_gradient(waiting: Tensor, phi, M, top, x, W_A, grad_x, grad_W_A, grad_a: Tensor) -> None:
    """Fill grad_x and grad_W_A, [i, n]. Pairs of later iterations wait in the rows of grad_W_A.

    Args:
        waiting: [i, w] phi and the gradient of dot of every iteration but the first, in float16.
        phi: [i, j] of the first iteration, in float16.
        M: [1, n, k] from ``scaled_matrix``.
        top: [t, i] the tops of pairs, powers of two.
        x, W_A: [i, n], grad_a: [i].
    """
    M = M[0]  # [n, k]
    rows, columns, inner = HALVES["BLOCK_I"], HALVES["BLOCK_N"], HALVES["BLOCK_K"]
    pairs = [TensorDescriptor.from_tensor(t, [rows, inner]) for t in (waiting, phi)]
    large = [TensorDescriptor.from_tensor(t, [rows, columns]) for t in (x, W_A, grad_x, grad_W_A)]
    n_blocks = cdiv(M.shape[0], columns)
    # The first block of columns has its own launch, the last one, because it overwrites the waiting pairs.
    for start, n in ((1, n_blocks - 1), (0, 1)):
        if n:
            input_gradient_kernel[cdiv(len(x), rows) * n,](
                *pairs, TensorDescriptor.from_tensor(M, [columns, inner]), top, *large, grad_a, len(x),
                phi.shape[1], top.stride(0), start, n, WAITING=len(top) - 1, **HALVES,
            )  # fmt: skip


def row_tops(M: Tensor) -> Tensor:
    """Return the tops of rows of M [..., q, d] in float32, as ``backends.fused.functions.top_below`` does."""
    greatest = torch.linalg.vector_norm(M, torch.inf, -1, keepdim=True)  # [..., q, 1]
    bits = greatest.view(torch.int32).bitwise_and_(0x7F800000).clamp_(min=32 << 23)  # [..., q, 1]
    return bits.view(torch.float32)  # [..., q, 1]


def scaled_matrix(matrices: list[Tensor], first: bool) -> tuple[Tensor, Tensor]:
    """Return M in the layout of ``input_gradient``, and the tops of the rows of M for the newest pairs.

    Args:
        matrices: [1, q, d] in the first iteration one for every iteration whose pairs wait, then its own. The
            other iterations pass only their own, because they need its tops but not yet M.
    """
    tops = [row_tops(M) for M in matrices]  # [1, q, 1] each
    return halves_of(matrices, tops) if first else matrices[0], tops[-1].flatten()


def halves_of(matrices: list[Tensor], tops: list[Tensor]) -> Tensor:
    """Convert matrices [1, q, d] to halves, and put them side by side, [1, d, k].

    Each matrix is padded with zeros to whole blocks of columns. A half is 2^14 times a number divided by the
    top of its row, so that numbers down to 2^-28 of the greatest in the row keep all digits.
    """
    block = HALVES["BLOCK_K"]
    halves = [
        nnf.pad((M / top * 2**14).half(), (0, 0, 0, -M.shape[1] % block))
        for M, top in zip(matrices, tops, strict=True)
    ]  # [1, q, d] each
    return torch.cat(halves, 1).mT.contiguous()  # [1, d, k]
