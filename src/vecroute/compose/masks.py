"""Masks on their way through a network: which vectors are used, and which pairs the first routing may use."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.ops.checks import check_mask


class Masks(NamedTuple):
    """What is known of the vectors at one place of a network; a tuple of these where a tuple comes in."""

    n: int | None  # how many they are, None after a module that does not say
    input_mask: Tensor | None = None  # [..., i], None: every vector is used
    pair_mask: Tensor | None = None  # [..., i, j] for the first routing, None: every pair takes part
    # 1 for each input of the network, until the first routing: the factor of the bias of its votes.
    unit: Tensor | None = None  # [..., i]


def used(x: Tensor, input_mask: Tensor | None) -> Tensor:
    """x [..., i, d] with zeros in place of unused vectors."""
    return x if input_mask is None else x.where(input_mask[..., None], 0.0)  # [..., i, d]


def masks_of(x: Any, input_mask: Any, pair_mask: Any) -> Any:
    """Masks as they come from the user, one ``Masks`` per tensor in x."""
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
            came = f"{len(mask)} of them" if isinstance(mask, tuple) else type(mask).__name__
            raise ValueError(f"{name} must be None or a tuple of {len(x)}, one per input, got {came}")
        each.append(mask or (None,) * len(x))
    return tuple(masks_of(*parts) for parts in zip(x, *each, strict=True))


def check_not_nested(x: Any) -> None:
    """Raise if a tensor in x is nested: credit is [..., i, j], with one number of inputs."""
    if any(isinstance(t, Tensor) and t.is_nested for t in leaves(x)):
        raise TypeError(
            "x_inp must be a tensor [..., n_inp, d_inp], got a nested one: pad it, with input_mask"
        )


def as_arguments(masks: Any) -> tuple[Any, Any]:
    """input_mask and pair_mask, as ``forward`` takes them."""
    if isinstance(masks, Masks):
        return masks.input_mask, masks.pair_mask
    pairs = [as_arguments(m) for m in masks]
    return tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


def leaves(tree: Any) -> list[Any]:
    """What nested tuples hold, in order."""
    if isinstance(tree, tuple) and not isinstance(tree, Masks):
        return [leaf for part in tree for leaf in leaves(part)]
    return [tree]


def joined_input_mask(masks: Any) -> Tensor | None:
    """The input_mask [..., i] of all inputs, those of a tuple one after the other."""
    each = leaves(masks)
    return concatenated([m.input_mask for m in each], [m.n for m in each], -1)


def concatenated(masks: Sequence[Tensor | None], lengths: Sequence[int | None], dim: int) -> Tensor | None:
    """Masks one after the other, ones in place of None; None if all are."""
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
