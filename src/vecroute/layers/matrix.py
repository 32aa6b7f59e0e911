"""MatrixRouting: the 2019 variant, "An Algorithm for Routing Capsules in All Domains"."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vecroute.layers.common import ANY_LENGTH
from vecroute.ops.checks import check_bool, check_choice, check_float_tensor, check_masks, check_size
from vecroute.ops.common import compute_dtype, log_f, masked_softmax, used_pairs, without_autocast


class MatrixIteration(NamedTuple):
    """Every quantity of one iteration of the loop."""

    R: Tensor  # [..., i, j]
    D_use: Tensor  # [..., i, j]
    D_ign: Tensor  # [..., i, j]
    phi: Tensor  # [..., i, j]
    a_out: Tensor  # [..., j]
    mu_out: Tensor  # [..., j, c, h]
    sig2_out: Tensor  # [..., j, c, h]


class MatrixRouting(nn.Module):
    """Route matrices with activation scores: the 2019 variant that the paper starts from.

        V_ijch = sum_d mu_inp_icd W_ijdh + B_ijch
        R_ij = softmax_j (log f(a_out_j) + log p_j(V_ij))
        a_out_j = sum_i (beta_use_ij D_use_ij - beta_ign_ij D_ign_ij)
        mu_out, sig2_out: mean and variance of the votes, weighted by D_use

    Args:
        n_inp: number of input matrices, or None for any number.
        n_out: number of output matrices.
        d_cov: rows of all matrices; index c.
        d_inp, d_out: columns of input and output matrices.
        n_iters: number of iterations.
        p_model: "gaussian" mixtures or "skm", soft k-means.
        single_beta: True to use one parameter for both beta_use and beta_ign.

    Shapes:
        a_inp [..., n_inp], mu_inp [..., n_inp, d_cov, d_inp] ->
        a_out [..., n_out], mu_out and sig2_out [..., n_out, d_cov, d_out]. Masks work as in
        ``VectorRouting``.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, type, dtype or device.
    """

    eps = 1e-5

    def __init__(
        self,
        *,
        n_inp: int | None,
        n_out: int,
        d_cov: int,
        d_inp: int,
        d_out: int,
        n_iters: int = 3,
        p_model: str = "gaussian",
        single_beta: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_size("n_inp", n_inp, none_means=ANY_LENGTH)
        for name, value in (("n_out", n_out), ("d_cov", d_cov), ("d_inp", d_inp), ("d_out", d_out)):
            check_size(name, value)
        check_size("n_iters", n_iters)
        check_choice("p_model", p_model, ("gaussian", "skm"))
        check_bool("single_beta", single_beta)
        self.n_inp, self.n_out, self.d_cov, self.d_inp, self.d_out = n_inp, n_out, d_cov, d_inp, d_out
        self.n_iters, self.p_model, self.single_beta = n_iters, p_model, single_beta
        like = {"device": device, "dtype": dtype}
        one_or_n_inp = n_inp or 1
        self.W = nn.Parameter(torch.empty(one_or_n_inp, n_out, d_inp, d_out, **like))
        self.B = nn.Parameter(torch.empty(one_or_n_inp, n_out, d_cov, d_out, **like))
        self.beta_use = nn.Parameter(torch.empty(one_or_n_inp, n_out, **like))
        self.beta_ign = self.beta_use if single_beta else nn.Parameter(torch.empty_like(self.beta_use))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values that the paper's authors chose."""
        nn.init.normal_(self.W, std=1 / self.d_inp)
        for parameter in (self.B, self.beta_use, self.beta_ign):
            nn.init.zeros_(parameter)

    def extra_repr(self) -> str:
        names = "n_inp n_out d_cov d_inp d_out n_iters p_model single_beta"
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())

    def forward(
        self,
        a_inp: Tensor,
        mu_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        last = self.trace(a_inp, mu_inp, input_mask, pair_mask)[-1]
        return last.a_out.to(a_inp.dtype), last.mu_out.to(mu_inp.dtype), last.sig2_out.to(mu_inp.dtype)

    def trace(
        self,
        a_inp: Tensor,
        mu_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> list[MatrixIteration]:
        """Return every quantity of every iteration, in float32 or float64."""
        self._check(a_inp, mu_inp)
        # check_masks expects vectors. The added dimension turns each activation into a vector of size 1.
        input_mask, pair_mask = check_masks(a_inp[..., None], input_mask, pair_mask, self.n_out)
        use = used_pairs(input_mask, pair_mask)  # [..., i, j]
        if use is not None:
            used = use.any(-1)  # [..., i]
            a_inp = a_inp.where(used, 0.0)  # [..., i]
            mu_inp = mu_inp.where(used[..., None, None], 0.0)  # [..., i, c, d]
            use = use.expand(*a_inp.shape, self.n_out)  # [..., i, j]

        V = mu_inp[..., None, :, :] @ self.W  # [..., i, j, c, h]
        with without_autocast(V):
            dtype = compute_dtype(V.dtype)
            V = V.to(dtype) + self.B  # [..., i, j, c, h]
            f_a_inp = torch.sigmoid(a_inp.to(dtype))[..., None]  # [..., i, 1]
            if use is not None:
                f_a_inp = f_a_inp.where(use, 0.0)  # [..., i, j]
            S = V.new_zeros(V.shape[:-2])  # [..., i, j]
            iterations: list[MatrixIteration] = []
            for _ in range(self.n_iters):
                if iterations:
                    S = self._scores(V, iterations[-1])  # [..., i, j]
                iterations.append(self._step(V, f_a_inp, S, use))
        return iterations

    def _step(self, V: Tensor, f_a_inp: Tensor, S: Tensor, use: Tensor | None) -> MatrixIteration:
        """Run one iteration, given the scores S."""
        R = masked_softmax(S, use, -1)  # [..., i, j]
        D_use = f_a_inp * R  # [..., i, j]
        D_ign = f_a_inp - D_use  # [..., i, j]
        phi = self.beta_use * D_use - self.beta_ign * D_ign  # [..., i, j]
        share = D_use / (D_use.sum(-2, keepdim=True) + self.eps)  # [..., i, j]
        mu_out = torch.einsum("...ij,...ijch->...jch", share, V)  # [..., j, c, h]
        error2 = (V - mu_out[..., None, :, :, :]).square()  # [..., i, j, c, h]
        sig2_out = torch.einsum("...ij,...ijch->...jch", share, error2) + self.eps  # [..., j, c, h]
        return MatrixIteration(R, D_use, D_ign, phi, phi.sum(-2), mu_out, sig2_out)

    def _scores(self, V: Tensor, last: MatrixIteration) -> Tensor:
        """Return log f(a_out_j) + log p_j(V_ij), up to a constant over j, [..., i, j]."""
        error2 = (V - last.mu_out[..., None, :, :, :]).square()  # [..., i, j, c, h]
        if self.p_model == "skm":
            log_p = -error2.sum((-2, -1))  # [..., i, j]
        else:
            log_p = -torch.einsum("...ijch,...jch->...ij", error2, 1 / (2 * last.sig2_out))  # [..., i, j]
            log_p = log_p - last.sig2_out.log().sum((-2, -1))[..., None, :] / 2  # [..., i, j]
        return log_f(last.a_out)[..., None, :] + log_p  # [..., i, j]

    def _check(self, a_inp: object, mu_inp: object) -> None:
        n_inp = "n_inp" if self.n_inp is None else f"n_inp={self.n_inp}"
        mu_letters = f"[..., {n_inp}, d_cov={self.d_cov}, d_inp={self.d_inp}]"
        a_shape = list(check_float_tensor("a_inp", a_inp, f"[..., {n_inp}]", self.W).shape)
        mu_shape = list(check_float_tensor("mu_inp", mu_inp, mu_letters, self.W).shape)
        if not a_shape or a_shape[-1] == 0 or a_shape[-1] != (self.n_inp or a_shape[-1]):
            raise ValueError(f"a_inp must be [..., {n_inp}] with at least one input, got {a_shape}")
        if mu_shape != [*a_shape, self.d_cov, self.d_inp]:
            raise ValueError(f"mu_inp must be {mu_letters} for a_inp {a_shape}, got {mu_shape}")
