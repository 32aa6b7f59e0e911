"""Check arguments. Each error names the argument, what was expected and what was given."""

from collections.abc import Collection
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor


def check_size(name: str, value: object, *, none_means: str | None = None) -> None:
    """Raise unless value is a positive int, or None if None has a meaning."""
    if value is None and none_means is not None:
        return
    expected = "a positive int" + (f" or None ({none_means})" if none_means else "")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} must be {expected}, got {value}")


def check_number(name: str, value: object) -> None:
    """Raise unless value is a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")


def check_bool(name: str, value: object) -> None:
    """Raise unless value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r} ({type(value).__name__})")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_vectors(
    name: str,
    x: object,
    *,
    n: int | None,
    d: int,
    like: Tensor | None,
    letters: str = "n_inp, d_inp",
    may_be_empty: bool = False,
) -> None:
    """Raise unless x is a floating-point tensor [..., n, d] of the dtype and device of ``like``.

    Args:
        name: name of the argument.
        x: its value.
        n: expected number of vectors, None for any number but 0.
        d: expected size of a vector.
        like: a parameter whose dtype and device x must have; None for any.
        letters: names of the two sizes in the message.
        may_be_empty: True if there may be no vectors.
    """
    n_name, d_name = letters.split(", ")
    expected = f"[..., {n_name}{'' if n is None else f'={n}'}, {d_name}={d}]"
    shape = list(check_float_tensor(name, x, expected, like).shape)
    if len(shape) < 2 or shape[-1] != d or (n is not None and shape[-2] != n):
        raise ValueError(f"{name} must be {expected}, got {shape}")
    if shape[-2] == 0 and not may_be_empty:
        raise ValueError(f"{name} must be {expected} with at least one vector, got {shape}")


def check_batch(name: str, x: Tensor, x_inp: Tensor) -> None:
    """Raise unless the batch of x [..., n, d] can be broadcast to the batch of x_inp."""
    batch, lead = x_inp.shape[:-2], x.shape[:-2]
    fits = all(m in (1, b) for m, b in zip(reversed(lead), reversed(batch), strict=False))
    if len(lead) > len(batch) or not fits:
        raise ValueError(
            f"{name} must have leading dimensions broadcastable to those of x_inp, {list(batch)}, "
            f"got {list(x.shape)}"
        )


def check_float_tensor(name: str, x: object, expected: str, like: Tensor | None) -> Tensor:
    """Return x if it is a floating-point tensor of the dtype (autocast aside) and device of ``like``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a floating-point tensor {expected}, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor {expected}, got dtype {x.dtype}")
    if x.is_nested:
        raise TypeError(f"{name} must be a tensor {expected}, got a nested one")
    if like is None:
        return x
    if x.device != like.device:
        raise ValueError(f"{name} must be on the device of the layer, {like.device}, got {x.device}")
    if x.dtype != like.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} must have the dtype of the layer, {like.dtype}, got {x.dtype}")
    return x


def check_mask(name: str, mask: object, x: Tensor, *, sizes: dict[str, int]) -> Tensor | None:
    """Return the mask as booleans; raise unless it is [..., sizes], broadcastable over the batch of x.

    Args:
        name: name of the argument.
        mask: True (or 1) means use; None for no mask.
        x: [..., i, d] the inputs that the mask is for.
        sizes: the names and sizes of the mask's last dimensions.
    """
    if mask is None or is_whole_mask(mask, x, sizes.values()):
        return mask

    # Only called for an error: torch.compile recompiles for every size that is printed.
    def expected() -> str:
        return f"[..., {', '.join(f'{key}={value}' for key, value in sizes.items())}]"

    if not isinstance(mask, Tensor):
        came = type(mask).__name__
        raise TypeError(f"{name} must be a bool or 0/1 integer tensor {expected()}, got {came}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name} must be a bool or 0/1 integer tensor {expected()}, got dtype {mask.dtype}")
    if mask.device != x.device:
        raise ValueError(f"{name} must be on the device of the inputs, {x.device}, got {mask.device}")
    batch, k = tuple(x.shape[:-2]), len(sizes)
    lead = tuple(mask.shape[: max(mask.dim() - k, 0)])
    fits = (
        mask.dim() >= k
        and list(mask.shape[mask.dim() - k :]) == list(sizes.values())
        and len(lead) <= len(batch)
        and all(m in (1, b) for m, b in zip(reversed(lead), reversed(batch), strict=False))
    )
    if not fits:
        raise ValueError(
            f"{name} must be {expected()}, its leading dimensions broadcastable to those of the inputs, "
            f"{list(batch)}, got {list(mask.shape)}"
        )
    return mask if mask.dtype == torch.bool else mask != 0


def is_whole_mask(mask: object, x: Tensor, sizes: Collection[int]) -> TypeGuard[Tensor]:
    """Return whether a mask has a boolean for every sample of x, as most masks do. Then nothing is wrong."""
    return (
        isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.device == x.device
        and mask.dim() == x.dim() - 2 + len(sizes)  # else an export would compare sizes of other meaning
        and mask.shape == (*x.shape[:-2], *sizes)
    )


def check_masks(
    x: Tensor, input_mask: object, pair_mask: object, n_out: int
) -> tuple[Tensor | None, Tensor | None]:
    """Check both masks of a routing and return them as booleans."""
    if input_mask is None and pair_mask is None:
        return None, None
    n_inp = x.shape[-2]
    return (
        check_mask("input_mask", input_mask, x, sizes={"n_inp": n_inp}),
        check_mask("pair_mask", pair_mask, x, sizes={"n_inp": n_inp, "n_out": n_out}),
    )
