"""Heads: they map the hidden states of every position and depth to class scores."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vecroute.heads.inputs import GatedMLP, ResidualMLP
from vecroute.heads.pooling import (
    AttentivePool,
    EfficientPool,
    FirstPosition,
    HopfieldPool,
    MeanPool,
    PoolingHead,
    ScalarMix,
    SetPool,
)
from vecroute.heads.routing import RoutingHead
from vecroute.ops.checks import check_choice

__all__ = [
    "CHOOSING",
    "HEADS",
    "AttentivePool",
    "EfficientPool",
    "FirstPosition",
    "GatedMLP",
    "HopfieldPool",
    "MeanPool",
    "PoolingHead",
    "ResidualMLP",
    "RoutingHead",
    "ScalarMix",
    "SetPool",
    "make_head",
]

# The names that ``RoutingClassifier(head=...)`` takes.
HEADS: dict[str, Callable[..., nn.Module]] = {
    "routing": RoutingHead,
    "wide": RoutingHead.wide,
    "paper": RoutingHead.paper,
    "mean_last": PoolingHead.mean_last,
    "mean_all": PoolingHead.mean_all,
    "scalar_mix": PoolingHead.scalar_mix,
    "cls": PoolingHead.first_position,
    "probe": PoolingHead.probe,
    "probe_4": PoolingHead.probe_4,
    "efficient": PoolingHead.efficient,
    "pma": PoolingHead.pma,
    "hopfield": PoolingHead.hopfield,
}

# Heads that weight each hidden state. Training drops random hidden states for these heads only. The other
# heads take means or read one position.
CHOOSING = ("routing", "wide", "paper", "probe", "probe_4", "efficient", "pma", "hopfield")


def make_head(name: str, *, seed: int, **options: Any) -> nn.Module:
    """Build a head by name. The seed determines its initial weights.

    Raises:
        ValueError: no head has that name.
    """
    check_choice("head", name, tuple(HEADS))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HEADS[name](**options)
