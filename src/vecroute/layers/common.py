"""What the layers share."""

import math
from typing import Any, NamedTuple

from torch import Tensor, nn

ANY_LENGTH = "any length"


class Routed(NamedTuple):
    """Output vectors and the credit of every input for every output."""

    x_out: Tensor  # [..., j, h]
    phi: Any  # [..., i, j]: a Tensor if one layer routed, a Credit if a network did


def reset_betas(layer: nn.Module, d_inp: int) -> None:
    """Learned betas: standard normal if fixed, as ``nn.Linear`` draws its own if linear in x_inp."""
    for name, parameter in layer.named_parameters(recurse=False):
        if name in ("beta_use", "beta_ign"):
            nn.init.normal_(parameter)
        elif name in ("W_use", "B_use", "W_ign", "B_ign"):
            bound = 1 / math.sqrt(d_inp)
            nn.init.uniform_(parameter, -bound, bound)
