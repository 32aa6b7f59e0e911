"""Networks side by side: members that read the same inputs, and whose outputs are averaged."""

from typing import Any

import torch
from torch import Tensor, nn

from vecroute.compose.factors import Block, Blocks, Factor, Matrix, divided
from vecroute.compose.masks import Masks
from vecroute.compose.modules import Network, Sequential, Visit, after, check_one_tensor


class Each(Network, nn.ModuleList):
    """One routing for each member, [k, ..., i, d] -> [k, ..., j, h]. The first dimension counts members.

    Args:
        routings: k layers of the same sizes.
    """

    def __init__(self, *routings: nn.Module):
        nn.ModuleList.__init__(self, routings)

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        check_one_tensor(self, x)
        inputs = zip(self, x.unbind(), masks_of_members(masks, x), strict=True)
        xs, factors = zip(*(visit(*member) for member in inputs), strict=True)
        if any(factor is None for factor in factors):
            return torch.stack(xs), None  # [k, ..., j, h]
        return torch.stack(xs), Matrix(torch.stack([factor.dense() for factor in factors]))

    def after(self, masks: Any) -> Masks:
        return after(self[0], masks)


class Members(Sequential):
    """k networks on the same inputs, trained side by side. Their outputs and credits are averaged.

        x_out = 1 / k sum_m x_out_m,    phi = 1 / k sum_m phi_m

    The parts take and return [k, ..., i, d], with members in the first dimension. Parts are modules with k
    sets of weights in ``PerVector``, and routings in ``Each``.

    Args:
        parts: the parts in order, at least one of them an ``Each``.
    """

    def __init__(self, *parts: nn.Module):
        super().__init__(*parts)
        self.n_members = next(len(part) for part in parts if isinstance(part, Each))

    def run(self, x: Any, masks: Any, visit: Visit) -> tuple[Tensor, Factor | None]:
        check_one_tensor(self, x)
        x_out, factor = super().run(x.expand(self.n_members, *x.shape), masks, visit)  # [k, ..., j, h]
        if factor is None:
            return x_out.mean(0), None  # [..., j, h]
        share = divided(factor, x_out.new_full((1, 1), self.n_members))  # [k, ..., i, j]
        blocks = [Block(member_of(share, m), 0, 0) for m in range(self.n_members)]  # [..., i, j] each
        return x_out.mean(0), Blocks(blocks, *factor.shape[-2:])


def member_of(factor: Factor, m: int) -> Factor:
    """Return the factor [..., i, j] of one member, out of the factor [k, ..., i, j] of all."""
    return factor.map(lambda tensor, _: tensor[m])


def masks_of_members(masks: Masks, x: Tensor) -> list[Masks]:
    """Return the masks of each member, given masks that can be broadcast to x [k, ..., i, d]."""
    sizes = {"input_mask": (), "pair_mask": () if masks.pair_mask is None else masks.pair_mask.shape[-1:]}
    sizes |= {"unit": ()}
    each = {
        name: getattr(masks, name).expand(*x.shape[:-1], *size)  # [k, ..., i] or [k, ..., i, j]
        for name, size in sizes.items()
        if getattr(masks, name) is not None
    }
    return [masks._replace(**{name: mask[m] for name, mask in each.items()}) for m in range(len(x))]
