"""A small layer of every kind, all with the same signature, and inputs and masks for them."""

import torch
from torch import Tensor, nn

import vecroute as vr
from vecroute.ops import Tuning

N_OUT, D_INP, D_OUT = 5, 7, 3
KINDS = ("auto", "reference", "general", "general over inputs", "matrix", "matrix skm")


class MatrixOfVectors(nn.Module):
    """MatrixRouting with the signature of the others: each vector is a matrix with one row.

    The first feature of a vector is its activation.
    """

    def __init__(self, **options):
        super().__init__()
        self.routing = vr.MatrixRouting(n_out=N_OUT, d_cov=1, d_inp=D_INP, d_out=D_OUT, **options)

    def forward(
        self, x_inp: Tensor, input_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> Tensor:
        a_out, mu_out, sig2_out = self.routing(x_inp[..., 0], x_inp[..., None, :], input_mask, pair_mask)
        return (mu_out + sig2_out)[..., 0, :] + a_out[..., None]  # [..., j, h]


def with_noise(module: nn.Module) -> nn.Module:
    """Add noise to the parameters, so that none is zero, and return the module."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return module


def with_chunks(layer: vr.VectorRouting, rows: int = 0) -> vr.VectorRouting:
    """Make a layer work in chunks instead of the batch path of ``fused``, and return it.

    Any tuning other than the default does this. A budget of one more byte changes nothing else.
    """
    layer.tuning = Tuning(rows, Tuning().keep_bytes + 1)
    return layer


def make(kind: str, n_inp: int | None = None) -> nn.Module:
    """Build a float32 layer of the named kind without zero parameters."""
    if kind in ("auto", "reference"):
        layer: nn.Module = vr.VectorRouting(
            n_inp=n_inp, n_out=N_OUT, d_inp=D_INP, d_out=D_OUT, implementation=kind
        )
    elif kind in ("matrix", "matrix skm"):
        layer = MatrixOfVectors(n_inp=n_inp, p_model="gaussian" if kind == "matrix" else "skm")
    else:
        layer = vr.GeneralRouting(
            A=vr.networks.LinearActivation(n_inp=n_inp, d_inp=D_INP),
            F=vr.networks.EfficientVotes(n_out=N_OUT, d_inp=D_INP, d_out=D_OUT),
            G=vr.networks.EfficientPrediction(n_out=N_OUT, d_out=D_OUT, d_inp=D_INP),
            S=vr.networks.LogLogistic(n_inp=n_inp, n_out=N_OUT, d_inp=D_INP),
            n_inp=n_inp,
            n_out=N_OUT,
            d_inp=D_INP,
            compete_over="inputs" if kind == "general over inputs" else "outputs",
        )
    return with_noise(layer)


def inputs(
    batch: int = 2, n_inp: int = 11, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x_inp [batch, i, d] and random masks: input_mask [batch, i] and pair_mask [batch, i, j]."""
    x_inp = torch.randn(batch, n_inp, D_INP, dtype=dtype)  # [batch, i, d]
    input_mask = torch.rand(batch, n_inp) > 0.3  # [batch, i]
    input_mask[:, 0] = True
    pair_mask = torch.rand(batch, n_inp, N_OUT) > 0.3  # [batch, i, j]
    return x_inp, input_mask, pair_mask
