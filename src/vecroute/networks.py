"""Ready-made networks A, F, G and S for ``GeneralRouting`` (sections 2 and 4 of the paper).

You may also pass any other module or function with the right shapes: ``nn.Linear(d_inp, 1)`` is an A, and
``nn.Linear(d_out, d_inp)`` is a G. The layer passes ``input_mask`` to an A or F whose ``forward`` takes it.
"""

import math

import torch
from torch import Tensor, nn

from vecroute.ops.checks import check_size
from vecroute.ops.common import log_f, normalize


def _sqrt_n_inp(x_inp: Tensor, input_mask: Tensor | None) -> Tensor:
    """Return the square root of the number of used inputs, [..., 1]."""
    if input_mask is None:
        return x_inp.new_full((1,), x_inp.shape[-2]).sqrt()  # [1]
    return input_mask.sum(-1, keepdim=True).clamp(min=1).to(x_inp.dtype).sqrt()  # [..., 1]


class MLP(nn.Sequential):
    """Two linear layers with a GELU between them, applied to each vector separately: an A (d_out=1) or a G.

    Args:
        d_inp, d_hid, d_out: sizes of input, hidden and output vectors; [..., d_inp] -> [..., d_out].
    """

    def __init__(self, *, d_inp: int, d_hid: int, d_out: int, device=None, dtype=None):
        for name, value in (("d_inp", d_inp), ("d_hid", d_hid), ("d_out", d_out)):
            check_size(name, value)
        like = {"device": device, "dtype": dtype}
        super().__init__(nn.Linear(d_inp, d_hid, **like), nn.GELU(), nn.Linear(d_hid, d_out, **like))


class ConstantActivation(nn.Module):
    """The constant A = infinity: f(a_inp) = 1, so every input is fully active (section 2.2)."""

    def forward(self, x_inp: Tensor) -> Tensor:
        return x_inp.new_full(x_inp.shape[:-1], math.inf)  # [..., i]


class LinearActivation(nn.Module):
    """The A of Algorithm 2: a_inp_i = sum_d W_A_id x_inp_id / sqrt(n_inp) + B_A_i.

    Args:
        n_inp: number of inputs, or None to share one row of W_A and B_A among all inputs.
        d_inp: size of the inputs.
    """

    def __init__(self, *, n_inp: int | None, d_inp: int, device=None, dtype=None):
        super().__init__()
        check_size("n_inp", n_inp, none_means="any length")
        check_size("d_inp", d_inp)
        self.W_A = nn.Parameter(torch.empty(n_inp or 1, d_inp, device=device, dtype=dtype))
        self.B_A = nn.Parameter(torch.zeros(n_inp or 1, device=device, dtype=dtype))
        nn.init.normal_(self.W_A, std=2 / math.sqrt(d_inp))

    def forward(self, x_inp: Tensor, input_mask: Tensor | None = None) -> Tensor:
        a_inp = (self.W_A * x_inp).sum(-1)  # [..., i]
        return a_inp / _sqrt_n_inp(x_inp, input_mask) + self.B_A  # [..., i]


class LearnedMemories(nn.Module):
    """An F that returns a parameter: the votes are W_mem_ijh for every sample (section 2.3)."""

    def __init__(self, *, n_inp: int, n_out: int, d_out: int, device=None, dtype=None):
        super().__init__()
        for name, value in (("n_inp", n_inp), ("n_out", n_out), ("d_out", d_out)):
            check_size(name, value)
        self.W_mem = nn.Parameter(torch.randn(n_inp, n_out, d_out, device=device, dtype=dtype))

    def forward(self, x_inp: Tensor) -> Tensor:
        return self.W_mem.expand(*x_inp.shape[:-2], -1, -1, -1)  # [..., i, j, h]


class EfficientVotes(nn.Module):
    """The F of Algorithm 2, evaluated eagerly: V_ijh = sum_d W_F2_dh W_F1_jd x_id / sqrt(n_inp) + B_F2_jh."""

    def __init__(self, *, n_out: int, d_inp: int, d_out: int, device=None, dtype=None):
        super().__init__()
        for name, value in (("n_out", n_out), ("d_inp", d_inp), ("d_out", d_out)):
            check_size(name, value)
        like = {"device": device, "dtype": dtype}
        self.W_F1 = nn.Parameter(torch.randn(n_out, d_inp, **like))
        self.W_F2 = nn.Parameter(torch.randn(d_inp, d_out, **like) * (2 / math.sqrt(d_inp)))
        self.B_F2 = nn.Parameter(torch.zeros(n_out, d_out, **like))

    def forward(self, x_inp: Tensor, input_mask: Tensor | None = None) -> Tensor:
        x = x_inp / _sqrt_n_inp(x_inp, input_mask)[..., None]  # [..., i, d]
        return (x[..., None, :] * self.W_F1) @ self.W_F2 + self.B_F2  # [..., i, j, h]


class EfficientPrediction(nn.Module):
    """The G of Algorithm 2: x_hat_jd = W_G2_jd sum_h W_G1_hd N(x_out_jh) + B_G2_jd."""

    def __init__(self, *, n_out: int, d_out: int, d_inp: int, device=None, dtype=None):
        super().__init__()
        for name, value in (("n_out", n_out), ("d_out", d_out), ("d_inp", d_inp)):
            check_size(name, value)
        like = {"device": device, "dtype": dtype}
        self.W_G1 = nn.Parameter(torch.randn(d_out, d_inp, **like) / math.sqrt(d_out))
        self.W_G2 = nn.Parameter(torch.randn(n_out, d_inp, **like))
        self.B_G2 = nn.Parameter(torch.zeros(n_out, d_inp, **like))

    def forward(self, x_out: Tensor) -> Tensor:
        return self.W_G2 * (normalize(x_out) @ self.W_G1) + self.B_G2  # [..., j, d]


class GaussianPrediction(nn.Module):
    """A generative G that samples x_hat ~ N(mu(x_out), sigma(x_out)^2) with the reparameterisation trick.

    In evaluation mode it returns the mean. Use it with ``GaussianLogDensity`` (footnote of section 2.4.1).
    """

    def __init__(self, *, d_out: int, d_inp: int, device=None, dtype=None):
        super().__init__()
        check_size("d_out", d_out)
        check_size("d_inp", d_inp)
        self.mu = nn.Linear(d_out, d_inp, device=device, dtype=dtype)
        self.log_sigma = nn.Linear(d_out, d_inp, device=device, dtype=dtype)

    def forward(self, x_out: Tensor) -> Tensor:
        mu = self.mu(x_out)  # [..., j, d]
        if not self.training:
            return mu
        return mu + self.log_sigma(x_out).exp() * torch.randn_like(mu)  # [..., j, d]


class DotProduct(nn.Module):
    """Score each pair by a dot product: S_ij = sum_d x_inp_id x_hat_jd."""

    def forward(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        return x_inp @ x_hat.mT  # [..., i, j]


class ScaledDotProduct(nn.Module):
    """Score each pair by a scaled dot product: S_ij = sum_d x_inp_id x_hat_jd / sqrt(d_inp)."""

    def forward(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        return x_inp @ x_hat.mT / math.sqrt(x_inp.shape[-1])  # [..., i, j]


class NegativeSquaredDistance(nn.Module):
    """Score each pair by minus the squared distance: S_ij = -sum_d (x_inp_id - x_hat_jd)^2."""

    def forward(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        return -(x_inp[..., :, None, :] - x_hat[..., None, :, :]).square().sum(-1)  # [..., i, j]


class RBF(nn.Module):
    """Score each pair by a radial basis function: S_ij = exp(-gamma sum_d (x_inp_id - x_hat_jd)^2).

    gamma is learned, and starts at 1 / d_inp.
    """

    def __init__(self, *, d_inp: int, device=None, dtype=None):
        super().__init__()
        check_size("d_inp", d_inp)
        self.log_gamma = nn.Parameter(torch.tensor(-math.log(d_inp), device=device, dtype=dtype))
        self.distance = NegativeSquaredDistance()

    def forward(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        return (self.log_gamma.exp() * self.distance(x_inp, x_hat)).exp()  # [..., i, j]


class GaussianLogDensity(nn.Module):
    """Score each pair by a Gaussian log density: S_ij = log N(x_inp_i; x_hat_j, sigma^2).

    Each feature d has a learned sigma_d.
    """

    def __init__(self, *, d_inp: int, device=None, dtype=None):
        super().__init__()
        check_size("d_inp", d_inp)
        self.log_sigma = nn.Parameter(torch.zeros(d_inp, device=device, dtype=dtype))

    def forward(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        error = x_inp[..., :, None, :] - x_hat[..., None, :, :]  # [..., i, j, d]
        square = (error / self.log_sigma.exp()).square().sum(-1)  # [..., i, j]
        d_inp = x_inp.shape[-1]
        return -square / 2 - self.log_sigma.sum() - d_inp * math.log(2 * math.pi) / 2  # [..., i, j]


class LogLogistic(nn.Module):
    """The S of Algorithm 2: S_ij = log f(W_S_ij sum_d x_inp_id x_hat_jd + B_S_ij).

    Args:
        n_inp: number of inputs, or None to share one row of W_S and B_S among all inputs.
        n_out: number of outputs.
        d_inp: size of the inputs. It sets the initial scale of W_S.
    """

    def __init__(self, *, n_inp: int | None, n_out: int, d_inp: int, device=None, dtype=None):
        super().__init__()
        check_size("n_inp", n_inp, none_means="any length")
        check_size("n_out", n_out)
        check_size("d_inp", d_inp)
        W_S = torch.randn(n_inp or 1, n_out, device=device, dtype=dtype) / math.sqrt(d_inp)  # [I, j]
        self.W_S = nn.Parameter(W_S)
        self.B_S = nn.Parameter(torch.zeros_like(W_S))

    def forward(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        return log_f(self.W_S * (x_inp @ x_hat.mT) + self.B_S)  # [..., i, j]
