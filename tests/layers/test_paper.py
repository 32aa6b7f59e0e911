"""Statements of the paper about the algorithm: sections 2 to 4, Appendices B and C."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import vecroute as vr

f = torch.sigmoid
N_INP, N_OUT, D_INP, D_OUT = 7, 5, 6, 4
SIZES = {"n_out": N_OUT, "d_inp": D_INP, "d_out": D_OUT}


def vector_layer(n_inp: int | None = N_INP, n_iters: int = 4) -> vr.VectorRouting:
    """Build Algorithm 2 with random parameters, including biases."""
    layer = vr.VectorRouting(n_inp=n_inp, **SIZES, n_iters=n_iters, normalize=False, dtype=torch.float64)
    return randomize(layer)


def general_layer(n_inp: int | None = N_INP, n_iters: int = 4) -> vr.GeneralRouting:
    """Build Algorithm 1 with other networks than Algorithm 2 has."""
    layer = vr.GeneralRouting(
        A=vr.networks.MLP(d_inp=D_INP, d_hid=3, d_out=1),
        F=vr.networks.EfficientVotes(**SIZES),
        G=nn.Linear(D_OUT, D_INP),
        S=vr.networks.NegativeSquaredDistance(),
        n_inp=n_inp,
        n_out=N_OUT,
        d_inp=D_INP,
        n_iters=n_iters,
    )
    return randomize(layer.double())


def randomize(layer: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return layer


def inputs() -> Tensor:
    return torch.randn(2, N_INP, D_INP, dtype=torch.float64)


def masks() -> dict[str, Tensor]:
    """Return both masks. They exclude an input, a row of pairs and some pairs."""
    input_mask, pair_mask = torch.ones(2, N_INP).bool(), torch.rand(2, N_INP, N_OUT) < 0.7
    input_mask[0, 3], pair_mask[1, 2] = False, False
    return {"input_mask": input_mask, "pair_mask": pair_mask}


def votes(layer: vr.VectorRouting, x_inp: Tensor) -> Tensor:
    """Return all votes V = F_2(F_1(x_inp)) of section 4, [..., i, j, h]."""
    F_1 = x_inp[..., :, None, :] * layer.W_F1 / math.sqrt(x_inp.shape[-2])  # [..., i, j, d]
    return torch.einsum("dh,...ijd->...ijh", layer.W_F2, F_1) + layer.B_F2


def betas(layer: nn.Module, x_inp: Tensor) -> tuple[Tensor, Tensor]:
    if layer.n_inp is not None:
        return layer.beta_use, layer.beta_ign
    return x_inp @ layer.W_use + layer.B_use, x_inp @ layer.W_ign + layer.B_ign


LAYERS = pytest.mark.parametrize(
    ("make", "n_inp"),
    [(vector_layer, N_INP), (vector_layer, None), (general_layer, N_INP), (general_layer, None)],
    ids=["vector-fixed", "vector-variable", "general-fixed", "general-variable"],
)


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13, check_dtype=True)


@LAYERS
def test_every_bit_is_used_or_ignored(make, n_inp):
    """Section 2.4.2: D_use + D_ign = f(a_inp), sum_j D_use = f(a_inp), and the bounds of both."""
    for it in make(n_inp).trace(inputs()):
        f_a_inp = f(it.a_inp)[..., None]
        assert_close(it.D_use + it.D_ign, f_a_inp.expand_as(it.D_use))
        assert_close(it.D_use.sum(-1), f_a_inp[..., 0])
        for D in (it.D_use, it.D_ign):
            assert (D >= 0).all()
            assert (f_a_inp + 1e-15 >= D).all()
        assert (f_a_inp <= 1).all()


@LAYERS
def test_under_masks_every_bit_left_is_used_or_ignored(make, n_inp):
    """The same sums hold over the allowed pairs, and masked pairs have 0."""
    mask = masks()
    use = mask["input_mask"][..., None] & mask["pair_mask"]
    some_left = use.any(-1)
    assert not some_left.all()
    for it in make(n_inp).trace(inputs(), **mask):
        f_a_inp = f(it.a_inp)[..., None]
        assert_close((it.D_use + it.D_ign)[use], f_a_inp.expand_as(use)[use])
        assert_close(it.D_use.sum(-1)[some_left], f_a_inp[..., 0][some_left])
        assert_close(it.R.sum(-1), some_left.double())
        for quantity in (it.R, it.D_use, it.D_ign, it.phi):
            assert quantity[~use].eq(0).all()
        assert it.phi[use].ne(0).all()


@LAYERS
def test_routing_probabilities(make, n_inp):
    """Section 2.4.1: flat prior in the first iteration, softmax over j of the scores afterwards."""
    first, *others = make(n_inp).trace(inputs())
    assert first.R.eq(1 / N_OUT).all()
    assert first.S is None
    assert first.x_hat is None
    assert len(others) == 3
    for it in others:
        assert_close(it.R, it.S.exp() / it.S.exp().sum(-1, keepdim=True))


@LAYERS
def test_flat_prior_over_the_outputs_left(make, n_inp):
    mask = masks()
    use = mask["input_mask"][..., None] & mask["pair_mask"]
    first = make(n_inp).trace(inputs(), **mask)[0]
    assert_close(first.R[use], (1 / use.sum(-1, keepdim=True).double()).expand_as(use)[use])


def test_scores_of_algorithm_2():
    """S = log f(z), so that R_ij = f(z_ij) / sum_j f(z_ij), with z from the predictions of G."""
    layer, x_inp = vector_layer(), inputs()
    iterations = layer.trace(x_inp)
    for before, it in pairwise(iterations):
        x = before.x_out
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        x_hat = layer.W_G2 * ((x - mean) / (variance + 1e-5).sqrt() @ layer.W_G1) + layer.B_G2
        assert_close(it.x_hat, x_hat)
        z = layer.W_S * (x_inp @ x_hat.mT) + layer.B_S
        assert_close(it.S, f(z).log())
        assert_close(it.R, f(z) / f(z).sum(-1, keepdim=True))


def test_activations_of_algorithm_2():
    for n_inp in (N_INP, None):
        layer, x_inp = vector_layer(n_inp), inputs()
        a_inp = (layer.W_A * x_inp).sum(-1) / math.sqrt(N_INP) + layer.B_A
        for it in layer.trace(x_inp):
            assert_close(it.a_inp, a_inp)


@LAYERS
def test_credit(make, n_inp):
    """Section 3.1: phi = beta_use D_use - beta_ign D_ign and x_out = sum_i phi V, in every iteration."""
    layer, x_inp = make(n_inp), inputs()
    V = votes(layer, x_inp) if isinstance(layer, vr.VectorRouting) else layer.F(x_inp)
    beta_use, beta_ign = betas(layer, x_inp)
    for it in layer.trace(x_inp):
        assert_close(it.phi, beta_use * it.D_use - beta_ign * it.D_ign)
        assert_close(it.x_out, torch.einsum("...ij,...ijh->...jh", it.phi, V))
    routed = layer.route(x_inp)
    assert_close(routed.phi, it.phi)
    assert_close(routed.x_out, it.x_out)
    assert torch.equal(layer(x_inp), routed.x_out)


def test_output_vectors_as_net_benefit_less_net_cost():
    """Algorithm 2 computes the last line of Algorithm 1 without storing the votes (Appendix C)."""
    layer, x_inp = vector_layer(), inputs()
    V, (beta_use, beta_ign) = votes(layer, x_inp), betas(layer, x_inp)
    for it in layer.trace(x_inp):
        benefit = ((beta_use * it.D_use)[..., None] * V).sum(-3)
        cost = ((beta_ign * it.D_ign)[..., None] * V).sum(-3)
        assert_close(it.x_out, benefit - cost)


@LAYERS
def test_update_rule(make, n_inp):
    """Section 3.3, Appendix B: U(x_out | x_inp) = sum_i (R(x_out | x_inp) M(x_inp) - B(x_inp))."""
    layer, x_inp = make(n_inp), inputs()
    is_vector = isinstance(layer, vr.VectorRouting)
    V = votes(layer, x_inp) if is_vector else layer.F(x_inp)  # [..., i, j, h]
    iterations = layer.trace(x_inp)
    beta_use, beta_ign = betas(layer, x_inp)
    f_a_inp = f(iterations[0].a_inp)[..., None]
    M = ((beta_use + beta_ign) * f_a_inp)[..., None] * V  # [..., i, j, h]
    B = (beta_ign * f_a_inp)[..., None] * V  # [..., i, j, h]

    def R(x_out: Tensor) -> Tensor:
        if is_vector:
            x_hat = layer.W_G2 * (nnf.layer_norm(x_out, (D_OUT,)) @ layer.W_G1) + layer.B_G2
            return nnf.logsigmoid(layer.W_S * (x_inp @ x_hat.mT) + layer.B_S).softmax(-1)
        return layer.S(x_inp, layer.G(x_out)).softmax(-1)

    def U(x_out: Tensor) -> Tensor:
        return (R(x_out)[..., None] * M - B).sum(-3)  # [..., j, h]

    x_out = (M / N_OUT - B).sum(-3)  # the initial state, [..., j, h]
    for it in iterations:
        assert_close(it.x_out, x_out)
        x_out = U(x_out)


@pytest.mark.parametrize("sizes", [(7, 5, 6, 4), (100, 10, 32, 16), (3, 1, 2, 1)], ids=str)
def test_parameter_counts(sizes):
    """Section 4.1: F has n_out d_inp + d_inp d_out + n_out d_out parameters. Algorithm 2 lists the others."""
    n_inp, n_out, d_inp, d_out = sizes
    sizes = {"n_out": n_out, "d_inp": d_inp, "d_out": d_out}

    def count(layer: nn.Module, *names: str) -> int:
        return sum(getattr(layer, name).numel() for name in names)

    F = vr.networks.EfficientVotes(**sizes)
    assert sum(p.numel() for p in F.parameters()) == n_out * d_inp + d_inp * d_out + n_out * d_out
    fixed, variable = vr.VectorRouting(n_inp=n_inp, **sizes), vr.VectorRouting(n_inp=None, **sizes)
    for layer, one_or_n_inp in ((fixed, n_inp), (variable, 1)):
        assert count(layer, "W_F1", "W_F2", "B_F2") == n_out * d_inp + d_inp * d_out + n_out * d_out
        assert count(layer, "W_A", "B_A") == one_or_n_inp * (d_inp + 1)
        assert count(layer, "W_G1", "W_G2", "B_G2") == d_out * d_inp + 2 * n_out * d_inp
        assert count(layer, "W_S", "B_S") == 2 * one_or_n_inp * n_out
    assert count(fixed, "beta_use", "beta_ign") == 2 * n_inp * n_out
    assert count(variable, "W_use", "B_use", "W_ign", "B_ign") == 2 * (d_inp + 1) * n_out
    F_and_G = (2 * d_inp + d_inp + d_out) * n_out + 2 * d_inp * d_out
    rest_fixed, rest_variable = n_inp * (d_inp + 1 + 4 * n_out), (d_inp + 1) * (1 + 2 * n_out) + 2 * n_out
    assert sum(p.numel() for p in fixed.parameters()) == F_and_G + rest_fixed
    assert sum(p.numel() for p in variable.parameters()) == F_and_G + rest_variable


def test_never_gated():
    """Section 2.2: A = infinity makes every activation 1."""
    layer = general_layer()
    layer.A = vr.networks.ConstantActivation()
    for it in layer.trace(inputs()):
        assert_close(it.D_use, it.R)
        assert_close(it.D_use.sum(-1), torch.ones(2, N_INP, dtype=torch.float64))


def test_learned_memories():
    """Section 2.3: if F is a parameter, all inputs choose among the same votes."""
    layer = general_layer()
    layer.F = vr.networks.LearnedMemories(n_inp=N_INP, n_out=N_OUT, d_out=D_OUT, dtype=torch.float64)
    x_inp = inputs()
    routed = layer.route(x_inp)
    assert_close(routed.x_out, torch.einsum("...ij,ijh->...jh", routed.phi, layer.F.W_mem))
    assert not torch.equal(routed.x_out[0], routed.x_out[1])


def test_repeated_application_of_the_update_rule():
    """Section 3.3: t iterations and u more from their result equal t + u iterations."""
    layer, x_inp = general_layer(n_iters=5), inputs()
    whole = layer.trace(x_inp)
    layer.n_iters = 2
    begun = layer(x_inp)
    assert_close(begun, whole[1].x_out)
    layer.n_iters = 3
    assert_close(layer(x_inp, x_init=begun), whole[-1].x_out)


def test_fixed_point():
    """Section 3.3: if the updates converge, U(x_out) = x_out."""
    layer, x_inp = general_layer(n_iters=200), inputs() / 10
    stable = layer(x_inp)
    layer.n_iters = 1
    assert_close(layer(x_inp, x_init=stable), stable)
    assert not torch.allclose(layer(x_inp), stable, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_attention_is_a_special_case(masked):
    """Section 3.3, (a) to (e): no cost to ignore, unit benefit, no gates, one sequence of votes."""
    queries = torch.randn(2, N_OUT, D_INP, dtype=torch.float64)
    x_inp = inputs()
    values = nn.Linear(D_INP, D_INP, dtype=torch.float64)
    layer = vr.GeneralRouting(
        A=vr.networks.ConstantActivation(),
        F=lambda x: values(x)[..., :, None, :].expand(*x.shape[:-1], N_OUT, D_INP),
        G=nn.Identity(),
        S=vr.networks.ScaledDotProduct(),
        n_inp=None,
        n_out=N_OUT,
        d_inp=D_INP,
        n_iters=1,
        compete_over="inputs",
        beta_use=1,
        beta_ign=0,
    )
    pair_mask = torch.rand(2, N_INP, N_OUT) < 0.6 if masked else None
    attended = nnf.scaled_dot_product_attention(
        queries, x_inp, values(x_inp), attn_mask=pair_mask.mT if masked else None
    )
    assert_close(layer(x_inp, x_init=queries, pair_mask=pair_mask), attended)


def test_one_output_has_no_competitor():
    """With n_out = 1, R is 1: the output uses every input fully and ignores nothing."""
    layer = vr.VectorRouting(n_inp=None, n_out=1, d_inp=D_INP, d_out=D_OUT, dtype=torch.float64)
    for it in layer.trace(inputs()):
        assert it.R.eq(1).all()
        assert it.D_ign.eq(0).all()
        assert_close(it.D_use, f(it.a_inp)[..., None])


def test_normalize():
    """Algorithm 2 does not normalise x_out. normalize=True scales each vector to mean 0 and variance 1."""
    layer, x_inp = vector_layer(), 10 * inputs()
    plain = layer(x_inp)
    layer.normalize = True
    x_out = layer(x_inp)
    torch.testing.assert_close(x_out.mean(-1), torch.zeros(2, N_OUT).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(x_out.var(-1, correction=0), torch.ones(2, N_OUT).double(), rtol=1e-3, atol=0)
    variance, mean = torch.var_mean(plain, -1, correction=0, keepdim=True)
    assert_close(x_out, (plain - mean) / (variance + 1e-5).sqrt())
    assert_close(layer.trace(x_inp)[-1].x_out, plain)
