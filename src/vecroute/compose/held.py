"""A network as an affine map at x, with phi, weights, scales and gates held fixed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.compose.affine import Affine, hold
from vecroute.compose.masks import Masks, check_not_nested, leaves, masks_of, used
from vecroute.compose.modules import (
    Head,
    Network,
    PerVector,
    check_pair_mask,
    check_parts,
    group_of,
    is_foreign,
    module_name,
)


class Held:
    """One run of a network: its output, with the gradient of the affine map at these inputs.

    Args:
        network: see ``contributions``.
        x_inp: [..., i, d], or a tuple of inputs; hidden states for a head.
        input_mask, pair_mask: as in ``forward``.
        votes: True to assign the bias of the first routing's votes to its inputs.

    Attributes:
        inputs: [..., i, d] each, leaves of the graph.
        units: [..., i] each, the factors of the biases of votes; empty unless ``votes``.
        x_out: [..., j, h].
        group: name of the group of ranks that share the inputs, "" for none.
        foreign: True if there are parts other than routings and their compositions.
    """

    def __init__(
        self,
        network: Any,
        x_inp: Any,
        input_mask: Any = None,
        pair_mask: Any = None,
        *,
        votes: bool = False,
    ):
        self.name = module_name(network)
        if isinstance(network, Head):
            x_inp, input_mask = network.flatten(x_inp, input_mask)  # [..., i, d], [..., i]
            network = network.network
        check_parts(network)
        check_not_nested(x_inp)
        self.network, self.masks = network, masks_of(x_inp, input_mask, pair_mask)
        for t in leaves(x_inp):
            if t.shape[:-2].numel() == 0:
                raise ValueError(f"x_inp must have at least one sample, got {list(t.shape)}")
        self.group, self.foreign = group_of(network), is_foreign(network)
        self.parts: list[Affine] = []
        x = _map(_leaf, x_inp, self.masks)
        self.inputs = leaves(x)  # [..., i, d] each
        self.units = [torch.ones_like(t[..., 0], requires_grad=True) for t in self.inputs if votes]
        at_one = _with_units(self.masks, iter(self.units))
        self.x_out = _run(network, x, at_one, lambda *part: hold(self.parts, *part))  # [..., j, h]
        check_pair_mask(network, self.masks)

    def at(self, x_inp: Any) -> Tensor:
        """Return the affine map at other inputs, [..., j, h]."""
        at_zero = _with_units(self.masks, map(torch.zeros_like, self.units))
        held = iter(self.parts)
        return _run(self.network, x_inp, at_zero, lambda _, t, m: next(held)(t, m.unit))  # [..., j, h]

    def at_zero(self) -> Tensor:
        """Return the affine map at x = 0, [..., j, h]."""
        zeros = iter([torch.zeros_like(t) for t in self.inputs])
        return self.at(_map(lambda *_: next(zeros), self.masks, self.masks))


def _leaf(x: Tensor, masks: Masks) -> Tensor:
    """Return the used inputs [..., i, d] as a leaf of a graph."""
    x = used(x.detach(), masks.input_mask)  # [..., i, d]
    return (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def _run(network: nn.Module, x: Any, masks: Any, part: Callable[..., Tensor]) -> Tensor:
    """Run the network with ``part(module, x, masks)`` in place of each routing and each other module."""

    def visit(module: nn.Module, x: Any, masks: Any) -> tuple[Tensor, None]:
        if isinstance(module, Network) and not isinstance(module, PerVector):
            return module.run(x, masks, visit)[0], None
        return part(module, x, masks), None

    return visit(network, x, masks)[0]


def _map(f: Callable[[Any, Masks], Any], x: Any, masks: Any) -> Any:
    """Apply f to each tensor in x and its masks, and return the results in the same nested tuples."""
    if isinstance(masks, Masks):
        return f(x, masks)
    return tuple(_map(f, *pair) for pair in zip(x, masks, strict=True))


def _with_units(masks: Any, units: Iterator[Tensor]) -> Any:
    """Give each of the masks the next unit, as long as there are units."""
    return _map(lambda m, _: m._replace(unit=next(units, None)), masks, masks)
