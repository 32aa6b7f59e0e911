"""Numerical probes of what a module does with each vector of a sequence, on vectors made up for it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vecroute.freeze import Gates

# It is the structure of a module that is probed, so a few vectors will do where it takes any number.
N_PROBE = 64


def check_independent(name: str, module: Callable[[Tensor], Tensor], x: Tensor, probed: set) -> None:
    """Raise if an output vector of the module depends on another input vector than its own.

    NaN in one vector reaches everything that is computed from it, whatever the weights, so it may show in the
    output of that vector alone.

    Args:
        name: how the error calls the module.
        module: [..., i, d] -> [..., i, and any more].
        x: [..., i, d] tells the number, size, dtype and device of the vectors.
        probed: where to remember that the module passed.
    """
    if x.shape[-2] == 1 or _key("independent", module, x) in probed:
        return
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        vectors = _vectors(module, x)  # [..., n, d]
        own = (*(0 for _ in x.shape[:-2]), vectors.shape[-2] // 2)  # a vector of the first of two samples
        poisoned = vectors.clone()  # [..., n, d]
        poisoned[own] = torch.nan
        spread = _call(module, poisoned).isnan() & ~_call(module, vectors).isnan()  # [..., n, any more]
        spread[own] = False
    if spread.any():
        raise ValueError(f"{name} mixes vectors: one of its outputs depends on another input than its own")
    probed.add(_key("independent", module, vectors))


def check_affine(name: str, module: Callable[[Tensor], Tensor], x: Tensor, probed: set) -> None:
    """Raise unless the module is affine once its gates and scales are held.

    Probed with noise added to the parameters, so that zeros among them hide nothing. Arguments as above.
    """
    if _key("affine", module, x) in probed:
        return
    gates = Gates()
    noise = _noise(module, x)
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        a = _vectors(module, x)  # [..., n, d]
        b = 2 - 3 * a.flip(-1)  # [..., n, d]

        def f(v: Tensor) -> Tensor:
            return gates.run(lambda v: _call(module, v, noise), v)  # [..., n, any more]

        value = f(a)  # [..., n, any more]
        try:
            f_a, f_b, f_mix = f(a), f(b), f(0.3 * a + 0.7 * b)  # [..., n, any more] each
            error = torch.maximum((f_a - value).abs(), (0.3 * f_a + 0.7 * f_b - f_mix).abs()).max()
            fits = error <= torch.finfo(x.dtype).eps ** 0.5 * torch.maximum(f_a.abs(), f_b.abs()).max()
        except (IndexError, RuntimeError):  # it took another path through its code
            fits = False
    if not fits:
        raise ValueError(
            f"{name} cannot be split into contributions: with its gates and scales held fixed it is not "
            "affine in its input"
        )
    probed.add(_key("affine", module, a))


def _key(probe: str, module: Callable[[Tensor], Tensor], x: Tensor) -> tuple:
    """What a probe holds for; any number of vectors above N_PROBE is as good as N_PROBE."""
    return probe, min(x.shape[-2], N_PROBE), x.shape[-1], getattr(module, "training", False)


def _vectors(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Two samples of positive vectors [2, ..., n, d], like x [..., i, d]; n = i if no less will do."""
    i, d = x.shape[-2:]
    for n in sorted({min(i, N_PROBE), i}):
        vectors = (torch.arange(n * d, device=x.device) % 7 + 1).to(x.dtype) / 4  # [n d]
        batch = (2, *(1 for _ in x.shape[1:-2])) if x.dim() > 2 else ()
        vectors = vectors.expand(*batch, -1).reshape(*batch, n, d)  # [2, ..., n, d]
        try:
            _call(module, vectors)
            break
        except Exception:  # a table of positions of another length, say
            if n == i:
                raise
    return vectors


def _call(
    module: Callable[[Tensor], Tensor], x: Tensor, parameters: dict[str, Tensor] | None = None
) -> Tensor:
    """Call a module with copies of x and of its buffers, which it may change, so that nothing stays in it."""
    x = x.clone()  # [..., n, d]
    if not isinstance(module, nn.Module):
        return module(x)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return functional_call(module, {**buffers, **(parameters or {})}, (x,))


def _noise(module: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """The parameters of a module with noise added."""
    if not isinstance(module, nn.Module):
        return {}
    generator = torch.Generator(x.device).manual_seed(0)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
        for name, p in module.named_parameters()
        if p.is_floating_point()
    }
