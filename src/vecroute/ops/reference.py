"""Algorithm 2 of the paper, line by line, in eager PyTorch: the truth for all other implementations."""

import torch
from torch import Tensor

from vecroute.ops.common import (
    Iteration,
    Weights,
    compute_dtype,
    log_f,
    masked_softmax,
    normalize,
    product_dtype,
    used_pairs,
    without_autocast,
)


def route_reference(
    x_inp: Tensor,
    weights: Weights,
    n_iters: int,
    input_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    prior: float | None = None,
    trace: list[Iteration] | None = None,
    x_init: Tensor | None = None,
) -> Iteration:
    """Route x_inp by Algorithm 2 and return the last iteration, its x_out not yet normalised.

    Args:
        x_inp: [..., i, d] input vectors.
        weights: the parameters.
        n_iters: number of iterations, at least 1.
        input_mask: [..., i] True where an input is used; n_inp counts these.
        pair_mask: [..., i, j] True where a pair takes part in the competition.
        prior: routing probability in the first iteration where no mask is given, None for 1 / n_out.
        trace: a list to which every iteration is appended.
        x_init: [..., j, h] outputs that the first iteration scores, None for the flat prior.
    """
    dtype, rounded = compute_dtype(x_inp.dtype), product_dtype(x_inp)

    def contract(equation: str, *operands: Tensor) -> Tensor:
        result = torch.einsum(equation, *(round_to(t, rounded) for t in operands))
        # Eager products round their results too. Results in float16 are not rounded, since they may overflow.
        return result if rounded == torch.float16 else round_to(result, rounded)

    f, N = torch.sigmoid, normalize
    with without_autocast(x_inp):
        x_inp = x_inp.to(dtype)  # [..., i, d]
        w = weights.to(dtype)
        n_inp, n_out = x_inp.shape[-2], w.W_F1.shape[0]
        sqrt_n_inp = torch.full((1,), n_inp, dtype=dtype, device=x_inp.device).sqrt()  # [1]
        use = used_pairs(input_mask, pair_mask)  # [..., i, j]
        if use is not None:
            # Replace unused inputs by zeros, so that not even NaN in them reaches a product.
            x_inp = x_inp.where(use.any(-1, keepdim=True), 0.0)  # [..., i, d]
            use = use.expand(*x_inp.shape[:-1], n_out)  # [..., i, j]
        if input_mask is not None:
            sqrt_n_inp = input_mask.sum(-1, keepdim=True).clamp(min=1).to(dtype).sqrt()  # [..., 1]

        beta_use, beta_ign = betas(x_inp, w, contract)  # [..., i, j], [..., i, j]
        # x_inp comes first: ONNX takes the size of i from the first operand, and W_A may have a single row.
        a_inp = contract("...id,id->...i", x_inp, w.W_A) / sqrt_n_inp + w.B_A  # [..., i]
        f_a_inp = f(a_inp)[..., None]  # [..., i, 1]
        if use is not None:
            # Unused pairs have nothing to use or to ignore: D_use = D_ign = phi = 0.
            f_a_inp = f_a_inp.where(use, 0.0)  # [..., i, j]
        x_hat, S, x_out = None, None, x_init
        for _ in range(n_iters):
            # E-step
            if x_out is None:
                R = x_inp.new_full((*x_inp.shape[:-1], n_out), prior or 1 / n_out)  # [..., i, j]
                if use is not None:
                    R = use / use.sum(-1, keepdim=True).clamp(min=1).to(dtype)  # [..., i, j]
            else:
                x_hat = w.W_G2 * contract("hd,...jh->...jd", w.W_G1, N(x_out)) + w.B_G2  # [..., j, d]
                z = w.W_S * contract("...id,...jd->...ij", x_inp, x_hat) + w.B_S  # [..., i, j]
                S = log_f(z)  # [..., i, j]
                R = masked_softmax(S, use, -1)  # [..., i, j]
            # D-step
            D_use = f_a_inp * R  # [..., i, j]
            D_ign = f_a_inp - D_use  # [..., i, j]
            # M-step
            phi = beta_use * D_use - beta_ign * D_ign  # [..., i, j]
            y = contract("...ij,...id->...jd", phi, x_inp) / sqrt_n_inp[..., None]  # [..., j, d]
            # Not rounded, because sums over many inputs may overflow float16.
            x_out = torch.einsum("dh,...jd->...jh", w.W_F2, w.W_F1 * y)  # [..., j, h]
            x_out = x_out + phi.sum(-2)[..., None] * w.B_F2  # [..., j, h]
            iteration = Iteration(a_inp, x_hat, S, R, D_use, D_ign, phi, x_out)
            if trace is not None:
                trace.append(iteration)
    return iteration


def round_to(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Round t to dtype, and its gradient too, except for float16, in which gradients may overflow."""
    if dtype == torch.float16:
        return t + (t.to(dtype).to(t.dtype) - t).detach()
    return t.to(dtype).to(t.dtype)


def betas(x_inp: Tensor, w: Weights, contract) -> tuple[Tensor, Tensor]:
    """Return beta_use (net benefit to use) and beta_ign (net cost to ignore), [..., i, j] each.

    They are parameters, or linear in x_inp.
    """
    if w.beta_use is not None and w.beta_ign is not None:
        return w.beta_use, w.beta_ign  # [i, j], [i, j]
    beta_use = contract("...id,dj->...ij", x_inp, w.W_use) + w.B_use  # [..., i, j]
    beta_ign = contract("...id,dj->...ij", x_inp, w.W_ign) + w.B_ign  # [..., i, j]
    return beta_use, beta_ign
