"""Random nested networks, and a simple dense computation of their credit."""

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import vecroute as vr

D = 3


def routing(n_inp: int | None, n_out: int, d_inp: int = D, d_out: int = D, **options) -> vr.VectorRouting:
    """Build a float64 layer without zero parameters."""
    layer = vr.VectorRouting(
        n_inp=n_inp, n_out=n_out, d_inp=d_inp, d_out=d_out, dtype=torch.float64, **options
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return layer


def mlp(d_inp: int = D, d_out: int = D) -> nn.Sequential:
    like = {"dtype": torch.float64}
    return nn.Sequential(
        nn.LayerNorm(d_inp, **like), nn.Linear(d_inp, 5, **like), nn.GELU(), nn.Linear(5, d_out, **like)
    )


@st.composite
def networks(draw, n_inp: int, n_out: int, depth: int = 3) -> nn.Module:
    """Draw a network from n_inp to n_out vectors with at most ``depth`` levels of nesting."""
    kinds = ["routing"]
    if depth:
        kinds += (
            ["sequential", "sum"] + ["concat"] * (n_out > 1) + ["residual", "per vector"] * (n_inp == n_out)
        )
    kind = draw(st.sampled_from(kinds))
    if kind == "routing":
        return routing(draw(st.sampled_from([n_inp, None])), n_out)
    if kind == "per vector":
        return vr.PerVector(mlp())
    if kind == "residual":
        return vr.Residual(draw(networks(n_inp, n_out, depth - 1)))
    if kind == "sequential":
        n_mid = draw(st.integers(1, 4))
        first, second = draw(networks(n_inp, n_mid, depth - 1)), draw(networks(n_mid, n_out, depth - 1))
        return vr.Sequential(first, second)
    if kind == "sum":
        return vr.Sum(draw(networks(n_inp, n_out, depth - 1)), draw(networks(n_inp, n_out, depth - 1)))
    n_first = draw(st.integers(1, n_out - 1))
    return vr.Concat(
        draw(networks(n_inp, n_first, depth - 1)), draw(networks(n_inp, n_out - n_first, depth - 1))
    )


def dense_route(network: nn.Module, x: Tensor, mask: Tensor | None = None):
    """Return x_out [j, h], the end-to-end phi [i, j], and the mask of the outputs [j] or None.

    Args:
        network: one of the networks above, with one tensor as input.
        x: [i, d] the vectors of one sample.
        mask: [i] True for used inputs, or None if all are used.
    """
    every = torch.ones(len(x), dtype=torch.bool) if mask is None else mask  # [i]
    eye = torch.diag(every.to(x.dtype))  # [i, i]
    x = zeroed(x, mask)  # [i, d]
    if isinstance(network, vr.VectorRouting):
        return *network.route(x, input_mask=every), None
    if isinstance(network, vr.PerVector):
        return network.module(x), eye, mask
    if isinstance(network, vr.Residual):
        x_res, phi, mask = dense_route(network.routing, x, mask)
        return x + x_res, eye + phi, mask
    if isinstance(network, vr.Sequential):
        phi = eye  # [i, i]
        for part in network:
            x, phi_part, mask = dense_route(part, x, mask)
            phi = phi @ phi_part  # [i, j]
        return x, phi, mask
    xs, phis, masks = zip(*(dense_route(branch, x, mask) for branch in network.branches), strict=True)
    masked = [m for m in masks if m is not None]
    if isinstance(network, vr.Sum):
        x_out = sum(zeroed(x_part, m) for x_part, m in zip(xs, masks, strict=True))  # [j, h]
        return x_out, sum(phis), masked[0] if len(masked) == len(masks) else None
    assert isinstance(network, vr.Concat)
    full = [
        torch.ones(len(x_part), dtype=torch.bool) if m is None else m
        for x_part, m in zip(xs, masks, strict=True)
    ]
    return torch.cat(xs), torch.cat(phis, 1), torch.cat(full) if masked else None


def zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [i, d] with unused vectors set to zero."""
    return x if mask is None else x.where(mask[:, None], 0.0)
