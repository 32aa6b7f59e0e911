"""Products of the large tensors of a pass, in the precision that was asked for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vecroute.ops.paths.long import rounded
from vecroute.ops.problem import Problem

# The blocks of ``fused_halves``, found by trial on one H200 for 1,000,000 rows.
HALVES = {"BLOCK_I": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
HALVES_ROWS = 20_000  # below, making halves of M takes longer than they save
MANY_ROWS = 2**13  # of one sample, from where on a product with ones sums them fastest


def multiplier(p: Problem, M: Tensor, bias: Tensor | None, out: Tensor) -> Callable[[Tensor], object]:
    """What fills out [b, i, q] with x M^T + bias, a function of x [b, i, d].

    Args: M [b or 1, q, d], and a bias [q] or None.
    """
    if out.dtype == torch.bfloat16 and p.operand_dtype == p.dtype:
        return rounded.multiplier(M, p.n_out, out)
    b, M_T = len(out), M.to(p.operand_dtype).expand(len(out), -1, -1).mT  # [b, d, q]
    if p.operand_dtype != p.dtype or has_kernel(p, p.x_inp, out):

        def multiply(x: Tensor) -> None:
            product(p, x, M_T, out)
            if bias is not None:
                out.add_(bias)

        return multiply
    if len(M) == 1 and (b == 1 or out.is_contiguous()):
        M_0, rows = M_T[0], out[0] if b == 1 else out.flatten(0, 1)  # [d, q], [b i, q]
        if bias is None:
            return lambda x: torch.mm(x.flatten(0, 1), M_0, out=rows)
        return lambda x: torch.addmm(bias, x.flatten(0, 1), M_0, out=rows)
    if bias is None:
        return lambda x: torch.bmm(x, M_T, out=out)
    return lambda x: torch.baddbmm(bias, x, M_T, out=out)


def product(p: Problem, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched a @ b, in p.dtype if out has no other, its operands rounded where that is faster."""
    operand, dtype = p.operand_dtype, p.dtype if out is None else out.dtype
    a, b = a.to(operand), b.to(operand)
    if has_kernel(p, a, *([] if out is None else [out])):
        out = a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out  # [b, i, j]
        return multiply_rows(out, a, b, fresh=True)
    if operand == dtype:
        return torch.bmm(a, b, out=out)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=dtype, out=out)
    result = torch.bmm(a, b).to(dtype)  # [b, i, j]
    return result if out is None else out.copy_(result)


def accumulate(p: Problem, out: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """out += a @ b, in place, or out = a @ b if fresh, for many rows of a."""
    if has_kernel(p, a, out):
        multiply_rows(out, a, b, fresh)
    else:
        accumulate_over_inputs(p, out, a, b, fresh)


def accumulate_over_inputs(p: Problem, out: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """The same where the product is itself a sum over inputs: few rows of a, as long as there are inputs."""
    if p.operand_dtype == out.dtype:
        out.baddbmm_(a.to(out.dtype), b.to(out.dtype), beta=0 if fresh else 1)
    elif fresh and out.dtype == p.dtype:
        product(p, a, b, out)
    elif a.is_cuda and out.dtype == p.dtype:
        operand = p.operand_dtype
        torch.baddbmm(out, a.to(operand), b.to(operand), out_dtype=out.dtype, out=out)
    else:
        add(out, product(p, a, b), fresh)


def add(out: Tensor, value: Tensor, fresh: bool, weight: float = 1) -> None:
    """out += weight value, in place, or out = weight value if fresh."""
    if fresh:
        torch.mul(value, weight, out=out)
    else:
        out.add_(value, alpha=weight)


def widened(*tensors: Tensor) -> list[Tensor]:
    """Tensors [b, i, k], to be copied to each other, as numbers of 16 bytes where all rows allow it.

    A GPU copies those twice as fast.
    """
    wide = 16 // tensors[0].element_size()
    sizes = [n for t in tensors for n in (t.shape[-1], *t.stride()[:-1], t.storage_offset())]
    has_wide = all(t.device.type in ("cpu", "cuda") and t.stride(-1) == 1 for t in tensors)
    has_wide = has_wide and all(n % wide == 0 for n in sizes)
    return [t.view(torch.complex128) if has_wide else t for t in tensors]  # [b, i, k / wide or k]


def add_product(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """out [n, m] += a @ b, in place, or = if fresh."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=0 if fresh else 1)
    elif not a.is_cuda:
        add(out, a @ b, fresh)
    elif fresh:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def summer(out: Tensor, n_rows: int) -> Callable[[Tensor, bool], object]:
    """What adds to out [b, k] the sum over i of values [b, k, i], in place, or stores it if fresh."""
    if out.is_cuda and len(out) == 1 and n_rows >= MANY_ROWS:
        # A product with ones is twice as fast as a sum of so many rows.
        total, ones = out[0], out.new_ones(n_rows)  # [k], [i]
        return lambda values, fresh: torch.addmv(total, values[0], ones, beta=0 if fresh else 1, out=total)
    return lambda values, fresh: torch.sum(values, -1, out=out) if fresh else out.add_(values.sum(-1))


def over_batch(t: Tensor) -> Tensor:
    """The rows of all samples one after another, [1, b i, k]."""
    return t if len(t) == 1 else t.flatten(0, 1)[None]


def has_kernel(p: Problem, *tensors: Tensor) -> bool:
    """Whether ``fused_product`` multiplies them: cuBLAS keeps IEEE float32 off the tensor cores."""
    exact = p.implementation == "fused" and p.operand_dtype == p.dtype
    ieee = exact and torch.backends.cuda.matmul.fp32_precision != "tf32"
    return ieee and all(t.dtype == torch.float32 and t.stride(-1) == 1 for t in tensors)


def multiply_rows(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> Tensor:
    from vecroute.ops.backends.fused.product import rows_times

    return rows_times(a, b.mT.contiguous(), out, fresh)


def has_halves(p: Problem, n_waiting: int, grad_x: Any, grad_W_A: Any) -> bool:
    """Whether ``fused_halves`` makes the gradient of x_inp: one sample of a fixed length, in tf32.

    Pairs that wait in a row of grad_W_A must fit its first block of columns, which is written last, and those
    of every iteration start at a multiple of 16 bytes.
    """
    tf32 = p.implementation == "fused" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    tf32 &= p.x_inp.shape[1] >= HALVES_ROWS
    fits = n_waiting <= 2 * HALVES["BLOCK_N"] <= 2 * p.x_inp.shape[-1]
    aligned = n_waiting == 2 * p.n_out or p.n_out % 4 == 0
    large = p.x_inp[0], p.w.W_A, grad_x[0], grad_W_A  # [i, d] each
    return tf32 and fits and aligned and all(fits_descriptor(t) for t in large)


def fits_descriptor(t: Tensor) -> bool:
    """Whether a descriptor can be of [i, d] numbers: float32, each row after the other, 16 bytes aligned."""
    aligned = t.data_ptr() % 16 == 0 and t.stride(0) % 4 == 0 and t.stride(0) >= t.shape[1]
    return t.dtype == torch.float32 and t.stride(1) == 1 and aligned


def row_weights(M: Tensor) -> Tensor:
    """The greatest of each row of M [..., q, d], [..., q, 1]; 1 where a GPU could not divide by it."""
    greatest = torch.linalg.vector_norm(M, torch.inf, -1, keepdim=True)  # [..., q, 1]
    return greatest.masked_fill_(greatest < 1e-37, 1)


def halves_of(matrices: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Matrices [1, q, d] over their row weights, one after another in float16, [1, d, k].

    Each is filled up with zeros to whole blocks of columns. All are multiplied with 2^14: then what is 2^-28
    of the greatest in its row still has all digits.
    """
    block = HALVES["BLOCK_K"]
    halves = [
        nnf.pad((M / w * 2**14).half(), (0, 0, 0, -M.shape[1] % block))
        for M, w in zip(matrices, weights, strict=True)
    ]  # [1, q, d] each
    return torch.cat(halves, 1).mT.contiguous()  # [1, d, k]
