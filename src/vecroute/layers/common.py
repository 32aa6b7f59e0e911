"""The result type and the initial values that the layers share."""

import math
from typing import Any, NamedTuple

from torch import Tensor, nn

ANY_LENGTH = "any length"


class Routed(NamedTuple):
    """Output vectors and the credit of every input for every output."""

    x_out: Tensor  # [..., j, h]
    phi: Any  # [..., i, j] a Tensor from a layer, a Credit from a network


def reset_betas(layer: nn.Module, d_inp: int) -> None:
    """Draw new learned betas.

    ``beta_use`` and ``beta_ign`` (fixed length) are standard normal. The weights and biases that compute the
    betas from x_inp (variable length) are uniform, as in ``nn.Linear``.
    """
    for name, parameter in layer.named_parameters(recurse=False):
        if name in ("beta_use", "beta_ign"):
            nn.init.normal_(parameter)
        elif name in ("W_use", "B_use", "W_ign", "B_ign"):
            bound = 1 / math.sqrt(d_inp)
            nn.init.uniform_(parameter, -bound, bound)
