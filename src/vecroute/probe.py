"""Numerical probes of what a module does with a sequence of vectors."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call


def check_independent(name: str, module: Callable[[Tensor], Tensor], x: Tensor, probed: set) -> None:
    """Raise if an output vector of the module depends on another input vector than its own.

    NaN in one vector reaches everything that is computed from it, whatever the weights, so it may show in the
    output of that vector alone.

    Args:
        name: how the error calls the module.
        module: [..., i, d] -> [..., i, and any more].
        x: [..., i, d] tells the number, size, dtype and device of the vectors.
        probed: where to remember that a module passed; it is probed once for each number and size of vectors.
    """
    n, d = x.shape[-2:]
    key = (n, d, getattr(module, "training", False))
    if n == 1 or key in probed:
        return
    vectors = sample_vectors(x)  # [..., i, d]
    poisoned = vectors.clone()  # [..., i, d]
    poisoned[..., n // 2, :] = torch.nan
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        spread = call_on_copies(module, poisoned).isnan() & ~call_on_copies(module, vectors).isnan()
    others = torch.arange(n, device=x.device) != n // 2  # [i]
    if spread.movedim(x.dim() - 2, 0)[others].any():
        raise ValueError(f"{name} mixes vectors: one of its outputs depends on another input than its own")
    probed.add(key)


def sample_vectors(x: Tensor) -> Tensor:
    """One sample of positive vectors [1, ..., i, d], of the dimensions, dtype and device of x [..., i, d]."""
    n, d = x.shape[-2:]
    vectors = (torch.arange(n * d, device=x.device) % 7 + 1).to(x.dtype) / 4  # [i d]
    return vectors.reshape(*(1 for _ in x.shape[:-2]), n, d)  # [1, ..., i, d]


def call_on_copies(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a module with copies of its buffers, so that nothing of the probe stays in it."""
    if not isinstance(module, nn.Module):
        return module(x)
    return functional_call(module, {name: buffer.clone() for name, buffer in module.named_buffers()}, (x,))
