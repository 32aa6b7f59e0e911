"""One call of the routing loop: its tensors and options, and the small steps between two passes."""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from vecroute.ops.common import Weights, compute_dtype, normalize
from vecroute.ops.group import add_up

# From how many outputs on bfloat16 pays for rounding float32 operands, found by trial on one H200.
MANY_OUTPUTS = 1024


class Tuning(NamedTuple):
    """How a call is cut up: rows of a chunk (0: chosen from the shapes), bytes of i x j quantities kept."""

    rows: int = 0
    keep_bytes: int = 64 * 2**20


@dataclass
class Problem:
    """One call of the loop, its batch dimensions flattened to one, ``b``.

    A packed call has x_inp [1, total, d] and in cu_seqlens the offsets of its samples.
    """

    x_inp: Tensor  # [b, i, d]
    w: Weights
    use: Tensor | None  # [b or 1, i, j or 1]
    sqrt_n_inp: Tensor  # [b, 1]
    cu_seqlens: Tensor | None  # [b + 1]
    prior: float
    rounded: torch.dtype  # of the operands of products
    tuning: Tuning
    implementation: str
    group: str = ""  # of the ranks that hold the other inputs

    @cached_property
    def pairs(self) -> ModuleType:
        """What is done to each pair i, j, as ``passes`` takes it: ``chunked`` or ``fused``."""
        return import_module(f"vecroute.ops.{self.implementation}")

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of everything but the operands of products."""
        return compute_dtype(self.x_inp.dtype)

    @cached_property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of the operands of large products.

        On a CPU float16 is neither fast nor wide enough. On a GPU a float32 x_inp is not copied to be
        rounded: tf32 products take it as it is, and round less than autocast would. With many outputs they
        are bound by arithmetic, so that bfloat16 pays for the copy.
        """
        if self.x_inp.device.type == "cpu":
            return self.dtype if self.rounded == torch.float16 else self.rounded
        if self.x_inp.dtype == self.dtype:
            many = self.rounded == torch.bfloat16 and self.n_out >= MANY_OUTPUTS
            return self.rounded if many else self.dtype
        return self.rounded

    @cached_property
    def offsets(self) -> list[int] | None:
        """cu_seqlens on the host."""
        return None if self.cu_seqlens is None else self.cu_seqlens.tolist()

    @cached_property
    def variable(self) -> bool:
        return self.w.W_use is not None

    @cached_property
    def beta_rows(self) -> tuple[Tensor, Tensor]:
        """Of a variable length, the matrix [2 j, d] and bias [2 j] that give c_sum and c_ign from x_inp."""
        w = self.w
        W = torch.cat(((w.W_use + w.W_ign).mT, w.W_ign.mT))  # [2 j, d]
        return W.to(self.dtype), torch.cat((w.B_use + w.B_ign, w.B_ign)).to(self.dtype)  # [2 j, d], [2 j]

    @cached_property
    def n_out(self) -> int:
        return self.w.W_F1.shape[0]

    def matmul(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """Product of small matrices; not rounded to float16, whose range sums over many inputs may leave.

        Nor under autocast of a float32 x_inp: these products are tf32 then.
        """
        if self.x_inp.dtype == torch.bfloat16 and a.is_cuda:
            product = a.to(self.rounded) @ b.to(self.rounded)
            return product.to(self.dtype) if out is None else out.copy_(product)
        return torch.matmul(a, b, out=out)

    def total(self, *sums: Tensor) -> None:
        """Make sums over the inputs here sums over those of every rank, in place."""
        if self.group:
            add_up(self.group, *sums)

    def outputs(self, y: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
        """x_out = (y W_F1) W_F2 + s B_F2, [b, j, h], where y is already divided by sqrt(n_inp)."""
        x_out = self.matmul(y * self.w.W_F1, self.w.W_F2.to(self.dtype), out)  # [b, j, h]
        return x_out.addcmul_(s[..., None], self.w.B_F2.to(self.dtype))  # [b, j, h]

    def predicted(self, x_out: Tensor, out: Tensor | None = None) -> Tensor:
        """g = N(x_out) W_G1, [b, j, d]."""
        return self.matmul(normalize(x_out), self.w.W_G1.to(self.dtype), out)  # [b, j, d]

    def scaled(self, g: Tensor) -> Tensor:
        """x_hat = W_G2 g + B_G2, [b, j, d]."""
        return torch.addcmul(self.w.B_G2.to(self.dtype), g, self.w.W_G2.to(self.dtype))  # [b, j, d]

    def outputs_backward(self, grad_x_out: Tensor, y: Tensor, s: Tensor, grads: "Grads"):
        """grad_y [b, j, d] (of the sum itself) and grad_s [b, j] from grad_x_out [b, j, h]."""
        grad_u = self.matmul(grad_x_out, self.w.W_F2.mT.to(self.dtype))  # [b, j, d]
        u = y * self.w.W_F1  # [b, j, d]
        grads.add("W_F2", self.matmul(u.flatten(0, 1).mT, grad_x_out.flatten(0, 1)))  # [d, h]
        grads.add("W_F1", over_samples(torch.mul(grad_u, y, out=u)))  # [j, d]
        del u
        grads.add("B_F2", over_samples(s[..., None] * grad_x_out))  # [j, h]
        grad_s = (grad_x_out * self.w.B_F2).sum(-1)  # [b, j]
        return grad_u.mul_(self.w.W_F1).div_(self.sqrt_n_inp[..., None]), grad_s  # [b, j, d], [b, j]

    def predictions_backward(self, grad_x_hat: Tensor, x_out: Tensor, g: Tensor, grads: "Grads") -> Tensor:
        """grad_x_out [b, j, h] from grad_x_hat [b, j, d]."""
        grads.add("W_G2", over_samples(grad_x_hat * g))  # [j, d]
        grads.add("B_G2", grad_x_hat.sum(0))  # [j, d], a view would keep more rows than these
        grad_g = grad_x_hat * self.w.W_G2  # [b, j, d]
        v, size = x_out, x_out.shape[-1:]
        if size[0] > 1:
            v, mean, rstd = torch.native_layer_norm(
                x_out, size, None, None, 1e-5
            )  # [b, j, h], [b, j, 1] twice
        grads.add("W_G1", self.matmul(v.flatten(0, 1).mT, grad_g.flatten(0, 1)))  # [h, d]
        grad_v = self.matmul(grad_g, self.w.W_G1.mT.to(self.dtype))  # [b, j, h]
        del v, grad_g
        if size[0] > 1:
            grad_v, _, _ = torch.ops.aten.native_layer_norm_backward(
                grad_v, x_out, size, mean, rstd, None, None, [True, False, False]
            )  # [b, j, h]
        return grad_v


def over_samples(values: Tensor) -> Tensor:
    """The sum over b of values [b, ...]; of one sample its own."""
    return values[0] if len(values) == 1 else values.sum(0)


class Grads(dict[str, Tensor]):
    """Gradients by the names of the parameters."""

    def add(self, name: str, value: Tensor) -> None:
        """Add to a gradient, which is 0 so far if it is not there."""
        self[name] = self[name].add_(value) if name in self else value
