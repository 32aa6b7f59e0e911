"""Numerical probes: check on artificial vectors how a module treats each vector of a sequence."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vecroute.compose.gates import Gates
from vecroute.compose.rules import NotAffine

# A probe checks the structure of a module, so a few vectors are enough if it takes any number.
N_PROBE = 64


def check_independent(name: str, module: Callable[[Tensor], Tensor], x: Tensor, probed: set) -> None:
    """Raise if an output vector of the module depends on any input vector but its own.

    NaN in a vector reaches everything that is computed from it, for all weights. So it may appear only in the
    output of that vector. The probe numbers the vectors of all samples. Each run fills the vectors whose
    number has a certain bit with NaN. Two numbers differ in at least one bit, so in some run only one of the
    two vectors is NaN.

    Args:
        name: name of the module in the error.
        module: [..., i, d] -> [..., i, any further dimensions].
        x: [..., i, d] tells the number, size, dtype and device of the vectors.
        probed: the set that remembers which modules passed.

    Tensors on the meta device hold no values, so there is nothing to probe.
    """
    if x.is_meta or x.shape[:-1].numel() <= 1 or _key("independent", module, x) in probed:
        return
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        vectors = _vectors(module, x)  # [..., n, d]
        shape, count = vectors.shape[:-1], vectors.shape[:-1].numel()
        numbers = torch.arange(count, device=x.device).reshape(shape)  # [..., n]
        clean = _call(module, vectors).isnan()  # [..., n, any more]
        for bit in range((count - 1).bit_length()):
            odd = (numbers >> bit) % 2 == 1  # [..., n]
            for own in (odd, ~odd):  # [..., n]
                poisoned = vectors.masked_fill(own[..., None], torch.nan)  # [..., n, d]
                spread = _call(module, poisoned).isnan() & ~clean  # [..., n, any more]
                if spread[~own].any():
                    raise ValueError(
                        f"{name} mixes vectors: one of its outputs depends on another input than its own"
                    )
    probed.add(_key("independent", module, vectors))


def check_affine(name: str, module: Callable[[Tensor], Tensor], x: Tensor, probed: set) -> None:
    """Raise unless the module is affine once its gates and scales are held.

    The probe adds noise to the parameters, so that zeros among them hide nothing. The arguments are the same
    as in ``check_independent``.
    """
    if not x.shape[:-1].numel() or _key("affine", module, x) in probed:
        return
    gates = Gates()
    noise = _noise(module, x)
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        a = _vectors(module, x)  # [..., n, d]
        b = 2 - 3 * a.flip(-1)  # [..., n, d]

        def f(v: Tensor) -> Tensor:
            return gates.run(lambda v: _call(module, v, noise), v)  # [..., n, any more]

        try:
            value = f(a)  # [..., n, any more]
            f_a, f_b, f_mix = f(a), f(b), f(0.3 * a + 0.7 * b)  # [..., n, any more] each
            error = torch.maximum((f_a - value).abs(), (0.3 * f_a + 0.7 * f_b - f_mix).abs()).max()
            tolerance = torch.finfo(precision(x)).eps ** 0.5 * torch.maximum(f_a.abs(), f_b.abs()).max()
            fits = bool(error.isfinite() and error <= tolerance)  # both may be infinite, so check that too
        except (NotAffine, RuntimeError):  # the module took another path through its code
            fits = False
    if not fits:
        raise ValueError(
            f"{name} cannot be split into contributions: with its gates and scales held fixed it is not "
            "affine in its input"
        )
    probed.add(_key("affine", module, a))


def _key(probe: str, module: Callable[[Tensor], Tensor], x: Tensor) -> tuple:
    """Return a key for the cases that a probe covers. More than N_PROBE vectors count as N_PROBE."""
    return (
        probe,
        precision(x),
        x.dim(),
        min(x.shape[-2], N_PROBE),
        x.shape[-1],
        getattr(module, "training", False),
    )


def precision(x: Tensor) -> torch.dtype:
    """Return the dtype in which modules compute: the dtype of autocast if it is on, else of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _vectors(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return positive vectors [..., n, d] like x [..., i, d], with a number n that the module accepts.

    Try at most N_PROBE vectors and two samples along each batch dimension first, and the shape of x last.
    """
    i, d = x.shape[-2:]
    batches = [tuple(2 for _ in x.shape[:-2]), (*(2 for _ in x.shape[:-2][:1]), *x.shape[1:-2]), x.shape[:-2]]
    sizes = [
        (*batch, n) for batch in dict.fromkeys(map(tuple, batches)) for n in sorted({min(i, N_PROBE), i})
    ]
    for size in sizes:
        vectors = (torch.arange(size[-1] * d, device=x.device) % 7 + 1).to(x.dtype) / 4  # [n d]
        vectors = vectors.expand(*size[:-1], -1).reshape(*size, d)  # [..., n, d]
        try:
            _call(module, vectors)
            break
        except Exception:  # for example, a table of positions has another length
            if size == sizes[-1]:
                raise
    return vectors


def _call(
    module: Callable[[Tensor], Tensor], x: Tensor, parameters: dict[str, Tensor] | None = None
) -> Tensor:
    """Call a module with copies of x and of its buffers, so that the call leaves no trace in them."""
    x = x.clone()  # [..., n, d]
    if not isinstance(module, nn.Module):
        return module(x)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return functional_call(module, {**buffers, **(parameters or {})}, (x,))


def _noise(module: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a module with noise added."""
    if not isinstance(module, nn.Module):
        return {}
    generator = torch.Generator(x.device).manual_seed(0)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
        for name, p in module.named_parameters()
        if p.is_floating_point()
    }
