"""Measure whether routing converges, and compute a penalty that keeps it converging during training.

Both functions use J = dU/dx_out, the Jacobian of one iteration U (section 3.3 of the paper), at the state of
the layer, which is x_out after the last iteration. They run the reference implementation, because only the
reference has second derivatives.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vecroute.layers.general import GeneralRouting
from vecroute.layers.vector import VectorRouting
from vecroute.ops.checks import check_size


class Stability(NamedTuple):
    """How routing converges, for each sample."""

    spectral_radius: Tensor  # [...] spectral radius of J; if it is below 1, small changes of the state fade
    residuals: Tensor  # [..., t] |U(x) - x| / |U(x)| after each step of plain iteration


def probe(
    layer: VectorRouting | GeneralRouting,
    x_inp: Tensor,
    input_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    *,
    n_steps: int = 50,
) -> Stability:
    """Estimate the spectral radius of J by power iteration, and record the residuals of plain iteration.

    The radius is the growth of |J^T v| per step, averaged over the second half of the steps. The average is
    needed because the largest eigenvalues may be a complex pair, and then the growth oscillates.

    Args:
        layer: a layer with any ``n_iters``. Plain iteration always starts from the flat prior.
        n_steps: number of steps of power iteration and of plain iteration.

    Raises:
        ValueError, TypeError: an argument has the wrong shape or type.
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
    """Estimate |J|^2 / (n_out d_out): the mean square of J^T v for random v of variance 1.

    This is a regulariser. Add a multiple of it to the loss to keep a layer converging during training. Its
    gradient goes through J to the parameters and x_inp. The state is treated as a constant.

    Args:
        n_draws: number of random v to average over.
    """
    check_size("n_draws", n_draws)
    x, y = _one_iteration(layer, x_inp, input_mask, pair_mask)  # [..., j, h] each
    draws = [torch.autograd.grad(y, x, torch.randn_like(y), create_graph=True)[0] for _ in range(n_draws)]
    return torch.stack(draws).square().mean()


@torch.enable_grad()
def _one_iteration(layer, x_inp: Tensor, input_mask, pair_mask) -> tuple[Tensor, Tensor]:
    """Return the state x of the layer and y = U(x), [..., j, h] each, with the graph from x to y."""
    if not isinstance(layer, VectorRouting | GeneralRouting):
        raise TypeError(f"layer must be a VectorRouting or GeneralRouting, got {type(layer).__name__}")
    with torch.no_grad():
        x = layer.state(x_inp, input_mask, pair_mask)  # [..., j, h]
    x = x.requires_grad_()  # [..., j, h]
    # Adding 0 * x gives U a Jacobian of zeros even if U does not depend on the state.
    return x, layer.update(x_inp, x, input_mask, pair_mask) + 0 * x


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1))  # [...]
