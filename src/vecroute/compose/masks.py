"""Masks that pass through a network: which vectors are used, and which pairs the first routing may use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.ops.checks import check_mask


class Masks(NamedTuple):
    """Number and masks of the vectors at one point of a network. A tuple input has a tuple of ``Masks``."""

    n: int | None  # number of vectors, None after a module that does not declare it
    input_mask: Tensor | None = None  # [..., i], None: every vector is used
    pair_mask: Tensor | None = None  # [..., i, j] for the first routing, None: every pair is used
    # Ones for the inputs of the network. The first routing multiplies the bias of its votes by them.
    unit: Tensor | None = None  # [..., i]


def used(x: Tensor, input_mask: Tensor | None) -> Tensor:
    """Return x [..., i, d] with unused vectors set to zero."""
    return x if input_mask is None else x.where(input_mask[..., None], 0.0)  # [..., i, d]


def masks_of(x: Any, input_mask: Any, pair_mask: Any) -> Any:
    """Check the masks that the user gave, and return one ``Masks`` per tensor in x."""
    if not isinstance(x, tuple):
        if not isinstance(x, Tensor) or x.dim() < 2:
            came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"x_inp must be a tensor [..., n_inp, d_inp] or a tuple of them, got {came}")
        n_inp = x.shape[-2]
        input_mask = check_mask("input_mask", input_mask, x, sizes={"n_inp": n_inp})
        return Masks(n_inp, input_mask, pair_mask)
    each = []
    for name, mask in (("input_mask", input_mask), ("pair_mask", pair_mask)):
        if mask is not None and (not isinstance(mask, tuple) or len(mask) != len(x)):
            came = f"a tuple of {len(mask)}" if isinstance(mask, tuple) else type(mask).__name__
            raise ValueError(f"{name} must be None or a tuple of {len(x)}, one per input, got {came}")
        each.append(mask or (None,) * len(x))
    return tuple(masks_of(*parts) for parts in zip(x, *each, strict=True))


def check_not_nested(x: Any) -> None:
    """Raise if a tensor in x is nested: credit is [..., i, j], with one number of inputs."""
    if any(isinstance(t, Tensor) and t.is_nested for t in leaves(x)):
        raise TypeError(
            "x_inp must be a tensor [..., n_inp, d_inp], got a nested tensor: pad it and pass input_mask"
        )


def as_arguments(masks: Any) -> tuple[Any, Any]:
    """Return input_mask and pair_mask in the form that ``forward`` takes."""
    if isinstance(masks, Masks):
        return masks.input_mask, masks.pair_mask
    pairs = [as_arguments(m) for m in masks]
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


def leaves(tree: Any) -> list[Any]:
    """Flatten nested tuples to a list."""
    if isinstance(tree, tuple) and not isinstance(tree, Masks):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def joined_input_mask(masks: Any) -> Tensor | None:
    """Return the input_mask [..., i] of all inputs. The masks of a tuple are concatenated."""
    each = leaves(masks)
    return concatenated([m.input_mask for m in each], [m.n for m in each], -1)


def concatenated(masks: Sequence[Tensor | None], lengths: Sequence[int | None], dim: int) -> Tensor | None:
    """Concatenate masks along dim. None counts as a mask of ones. Return None if every mask is None."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    rest = given[0].shape[dim + 1 :] if dim < -1 else ()
    full = [
        given[0].new_ones(n or 0, *rest) if mask is None else mask
        for mask, n in zip(masks, lengths, strict=True)
    ]
    batch = torch.broadcast_shapes(*(mask.shape[:dim] for mask in full))
    return torch.cat([mask.expand(*batch, *mask.shape[dim:]) for mask in full], dim)


def all_or_none(given: Sequence[Tensor | None]) -> list[Tensor] | None:
    present = [t for t in given if t is not None]
    return present if len(present) == len(given) else None
