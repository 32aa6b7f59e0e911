"""Products of the large tensors of a pass, in the requested precision."""

from collections.abc import Callable

import torch
from torch import Tensor

from vecroute.ops.plan import limits
from vecroute.ops.problem import Problem


def multiplier(p: Problem, M: Tensor, bias: Tensor | None, out: Tensor) -> Callable[[Tensor], object]:
    """Return a function of x [b, i, d] that fills out [b, i, q] with x M^T + bias.

    Args:
        M: [b or 1, q, d].
        bias: [q], or None.
    """
    b, M_T = len(out), M.to(p.plan.operand_dtype).expand(len(out), -1, -1).mT  # [b, d, q]
    if p.plan.operand_dtype != p.dtype or has_kernel(p, p.x_inp, out):

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
    """Return the batched a @ b, in the dtype of out or p.dtype. Operands are rounded where that is faster."""
    operand, dtype = p.plan.operand_dtype, p.dtype if out is None else out.dtype
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
    """Compute out += a @ b in place, or out = a @ b if fresh, for many rows of a."""
    if has_kernel(p, a, out):
        multiply_rows(out, a, b, fresh)
    else:
        accumulate_over_inputs(p, out, a, b, fresh)


def accumulate_over_inputs(p: Problem, out: Tensor, a: Tensor, b: Tensor, fresh: bool = False) -> None:
    """Do the same as ``accumulate`` where a has few rows and the product sums over inputs."""
    if p.plan.operand_dtype == out.dtype:
        out.baddbmm_(a.to(out.dtype), b.to(out.dtype), beta=0 if fresh else 1)
    elif fresh and out.dtype == p.dtype:
        product(p, a, b, out)
    elif a.is_cuda and out.dtype == p.dtype:
        operand = p.plan.operand_dtype
        torch.baddbmm(out, a.to(operand), b.to(operand), out_dtype=out.dtype, out=out)
    else:
        add(out, product(p, a, b), fresh)


def add(out: Tensor, value: Tensor, fresh: bool, weight: float = 1) -> None:
    """Compute out += weight value in place, or out = weight value if fresh."""
    if fresh:
        torch.mul(value, weight, out=out)
    else:
        out.add_(value, alpha=weight)


def widened(*tensors: Tensor) -> list[Tensor]:
    """If rows allow it, view tensors [b, i, k] as numbers of 16 bytes. A GPU copies these twice as fast."""
    wide = 16 // tensors[0].element_size()
    sizes = [n for t in tensors for n in (t.shape[-1], *t.stride()[:-1], t.storage_offset())]
    has_wide = all(t.device.type in ("cpu", "cuda") and t.stride(-1) == 1 for t in tensors)
    has_wide = has_wide and all(n % wide == 0 for n in sizes)
    return [t.view(torch.complex128) if has_wide else t for t in tensors]  # [b, i, k / wide or k]


def add_product(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Compute out [n, m] += a @ b in place, or out = a @ b if fresh."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=0 if fresh else 1)
    elif not a.is_cuda:
        add(out, a @ b, fresh)
    elif fresh:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def summer(out: Tensor, n_rows: int) -> Callable[[Tensor, bool], object]:
    """Return a function that adds the sum over i of values [b, k, i] to out [b, k], or stores it if fresh."""
    if out.is_cuda and len(out) == 1 and n_rows >= limits.SUM_ROWS:
        total, ones = out[0], out.new_ones(n_rows)  # [k], [i]
        return lambda values, fresh: torch.addmv(total, values[0], ones, beta=0 if fresh else 1, out=total)
    return lambda values, fresh: torch.sum(values, -1, out=out) if fresh else out.add_(values.sum(-1))


def over_batch(t: Tensor) -> Tensor:
    """Return the rows of all samples one after another, [1, b i, k]."""
    return t if len(t) == 1 else t.flatten(0, 1)[None]


def has_kernel(p: Problem, *tensors: Tensor) -> bool:
    """Return whether our kernel for IEEE products takes these tensors: float32 with contiguous rows."""
    return p.plan.ieee_kernel and all(t.dtype == torch.float32 and t.stride(-1) == 1 for t in tensors)


def multiply_rows(out: Tensor, a: Tensor, b: Tensor, fresh: bool) -> Tensor:
    from vecroute.ops.backends.fused.product import rows_times

    return rows_times(a, b.mT.contiguous(), out, fresh)
