"""Credit: how much each input of a network of routings counted for each output, end to end."""

import torch
from torch import Tensor

from vecroute.factors import Factor, Matrix


class Credit:
    """End-to-end credit phi [..., i, j] of a network of routings, kept as factors (Appendix A)."""

    def __init__(self, phi: Tensor | Factor, input_mask: Tensor | None = None):
        self.factor = Matrix(phi) if isinstance(phi, Tensor) else phi
        self.input_mask = input_mask

    @property
    def shape(self) -> torch.Size:
        """[..., n_inp, n_out]."""
        return torch.Size(self.factor.shape)

    def dense(self) -> Tensor:
        """Every element, [..., i, j]."""
        return self.factor.dense()

    def column(self, j: int) -> Tensor:
        raise NotImplementedError
