"""Whether routing settles, and what keeps it settling while it learns.

Both look at J = dU/dx_out, the Jacobian of one iteration U (section 3.3 of the paper), at the state of a
layer: its outputs after the last iteration. They go by the reference, which has second derivatives.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vecroute.layers.general import GeneralRouting
from vecroute.layers.vector import VectorRouting
from vecroute.ops.checks import check_size


class Stability(NamedTuple):
    """How routing settles, sample by sample."""

    spectral_radius: Tensor  # [...] of J: below 1, small changes of the state die out
    residuals: Tensor  # [..., t] |U(x) - x| / |U(x)| after each step of plain iteration


def probe(
    layer: VectorRouting | GeneralRouting,
    x_inp: Tensor,
    input_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    *,
    n_steps: int = 50,
) -> Stability:
    """The spectral radius of J by power iteration, and the curve along which plain iteration settles.

    The radius is the growth of |J^T v| per step, averaged over the second half of the steps: the greatest
    eigenvalues may be a complex pair, and then it goes up and down from one step to the next.

    Args:
        layer: with any ``n_iters``; plain iteration starts from its flat prior, whatever ``n_iters`` is.
        n_steps: number of steps of both.

    Raises:
        ValueError, TypeError: an argument of the wrong shape or type.
    """
    check_size("n_steps", n_steps)
    x, y = _one_iteration(layer, x_inp, input_mask, pair_mask)  # [..., j, h] each
    growth, v = [], torch.randn_like(y)  # [..., j, h]
    for _ in range(n_steps):
        length = _norm(v)[..., None, None]  # [..., 1, 1]
        v = v / length.where(length > 0, 1.0)  # [..., j, h]
        (v,) = torch.autograd.grad(y, x, v, retain_graph=True)
        growth.append(_norm(v))  # [...]
    radius = torch.stack(growth[n_steps // 2 :], -1).log().mean(-1).exp()  # [...]

    residuals = []
    with torch.no_grad():
        x_out = layer.update(x_inp, None, input_mask, pair_mask)  # [..., j, h]
        for _ in range(n_steps):
            before, x_out = x_out, layer.update(x_inp, x_out, input_mask, pair_mask)  # [..., j, h]
            length = _norm(x_out)  # [...]
            residuals.append(_norm(x_out - before) / length.where(length > 0, 1.0))  # [...]
    return Stability(radius, torch.stack(residuals, -1))


def jacobian_penalty(
    layer: VectorRouting | GeneralRouting,
    x_inp: Tensor,
    input_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    *,
    n_draws: int = 1,
) -> Tensor:
    """The mean square of an element of J^T v for random v of variance 1: |J|^2 / (n_out d_out), estimated.

    A regulariser: a multiple of it, added to the loss, keeps a layer converging while it learns. The state is
    taken as given; the gradient is that of J with respect to the parameters and x_inp.

    Args:
        n_draws: how many v to average over.
    """
    check_size("n_draws", n_draws)
    x, y = _one_iteration(layer, x_inp, input_mask, pair_mask)  # [..., j, h] each
    draws = [torch.autograd.grad(y, x, torch.randn_like(y), create_graph=True)[0] for _ in range(n_draws)]
    return torch.stack(draws).square().mean()


@torch.enable_grad()
def _one_iteration(layer, x_inp: Tensor, input_mask, pair_mask) -> tuple[Tensor, Tensor]:
    """The state of the layer and what one iteration makes of it, [..., j, h] each, with the graph between."""
    if not isinstance(layer, VectorRouting | GeneralRouting):
        raise TypeError(f"layer must be a VectorRouting or GeneralRouting, got {type(layer).__name__}")
    with torch.no_grad():
        x = layer.state(x_inp, input_mask, pair_mask)  # [..., j, h]
    x = x.requires_grad_()  # [..., j, h]
    # A U that does not depend on the state has a J too, of zeros.
    return x, layer.update(x_inp, x, input_mask, pair_mask) + 0 * x


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1))  # [...]
