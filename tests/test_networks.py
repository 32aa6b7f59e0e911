"""The ready-made networks: formulas, gradients, and use in a routing."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import vecroute as vr

networks = vr.networks
N_INP, N_OUT, D_INP, D_OUT = 5, 3, 4, 2
ONE = {"dtype": torch.float64}

ACTIVATIONS = {
    "constant": lambda: networks.ConstantActivation(),
    "linear": lambda: nn.Linear(D_INP, 1, **ONE),
    "linear, fixed": lambda: networks.LinearActivation(n_inp=N_INP, d_inp=D_INP, **ONE),
    "linear, variable": lambda: networks.LinearActivation(n_inp=None, d_inp=D_INP, **ONE),
    "MLP": lambda: networks.MLP(d_inp=D_INP, d_hid=6, d_out=1, **ONE),
}
VOTES = {
    "memories": lambda: networks.LearnedMemories(n_inp=N_INP, n_out=N_OUT, d_out=D_OUT, **ONE),
    "efficient": lambda: networks.EfficientVotes(n_out=N_OUT, d_inp=D_INP, d_out=D_OUT, **ONE),
}
PREDICTIONS = {
    "linear": lambda: nn.Linear(D_OUT, D_INP, **ONE),
    "MLP": lambda: networks.MLP(d_inp=D_OUT, d_hid=6, d_out=D_INP, **ONE),
    "efficient": lambda: networks.EfficientPrediction(n_out=N_OUT, d_out=D_OUT, d_inp=D_INP, **ONE),
    "Gaussian": lambda: networks.GaussianPrediction(d_out=D_OUT, d_inp=D_INP, **ONE).eval(),
}
SCORES = {
    "dot product": lambda: networks.DotProduct(),
    "scaled dot product": lambda: networks.ScaledDotProduct(),
    "squared distance": lambda: networks.NegativeSquaredDistance(),
    "RBF": lambda: networks.RBF(d_inp=D_INP, **ONE),
    "Gaussian": lambda: networks.GaussianLogDensity(d_inp=D_INP, **ONE),
    "log-logistic, fixed": lambda: networks.LogLogistic(n_inp=N_INP, n_out=N_OUT, d_inp=D_INP, **ONE),
    "log-logistic, variable": lambda: networks.LogLogistic(n_inp=None, n_out=N_OUT, d_inp=D_INP, **ONE),
}
COMBINATIONS = (
    [{"A": A} for A in ACTIVATIONS]
    + [{"F": F} for F in VOTES]
    + [{"G": G} for G in PREDICTIONS]
    + [{"S": S} for S in SCORES]
)


def x_inp(*batch: int) -> Tensor:
    return torch.randn(*batch, N_INP, D_INP, **ONE)


def x_hat(*batch: int) -> Tensor:
    return torch.randn(*batch, N_OUT, D_INP, **ONE)


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("names", COMBINATIONS, ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_in_a_routing(names, masked):
    """Check outputs and the gradients of x_inp and every parameter, for a batch, with and without masks."""
    layer = vr.GeneralRouting(
        A=ACTIVATIONS[names.get("A", "linear")](),
        F=VOTES[names.get("F", "efficient")](),
        G=PREDICTIONS[names.get("G", "linear")](),
        S=SCORES[names.get("S", "dot product")](),
        n_inp=None,
        n_out=N_OUT,
        d_inp=D_INP,
        **ONE,
    )
    masks = (torch.tensor([1, 1, 0, 1, 1]), torch.rand(2, N_INP, N_OUT) < 0.7) if masked else ()
    parameters = dict(layer.named_parameters())

    def function(x: Tensor, *values: Tensor):
        replaced = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(layer, replaced, (x, *masks))

    values = [value.detach().clone().requires_grad_() for value in parameters.values()]
    assert function(x_inp(2), *values).shape == (2, N_OUT, D_OUT)
    assert gradcheck(function, (x_inp(2).requires_grad_(), *values), fast_mode=True)


def test_constant_activation():
    a_inp = networks.ConstantActivation()(x_inp(2))
    assert a_inp.shape == (2, N_INP)
    assert torch.sigmoid(a_inp).eq(1).all()


@pytest.mark.parametrize("n_inp", [N_INP, None], ids=["fixed", "variable"])
def test_linear_activation(n_inp):
    A, x = networks.LinearActivation(n_inp=n_inp, d_inp=D_INP, **ONE), x_inp(2)
    nn.init.normal_(A.B_A)
    assert_same(A(x), torch.einsum("id,bid->bi", A.W_A.expand(N_INP, D_INP), x) / math.sqrt(N_INP) + A.B_A)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]).bool()
    sqrt_n_inp = torch.tensor([[3.0], [4.0]], **ONE).sqrt()
    assert_same(A(x, input_mask=mask), (A.W_A * x).sum(-1) / sqrt_n_inp + A.B_A)


def test_learned_memories():
    F = VOTES["memories"]()
    assert torch.equal(F(x_inp(2, 3)), F.W_mem.expand(2, 3, N_INP, N_OUT, D_OUT))


def test_efficient_votes():
    F, x = VOTES["efficient"](), x_inp(2)
    with torch.no_grad():
        F.B_F2.normal_()
    V = torch.einsum("dh,jd,bid->bijh", F.W_F2, F.W_F1, x)
    assert_same(F(x), V / math.sqrt(N_INP) + F.B_F2)
    mask = torch.tensor([1, 1, 1, 0, 0]).bool()
    assert_same(F(x, input_mask=mask), V / math.sqrt(3) + F.B_F2)


def test_efficient_prediction():
    G, x_out = PREDICTIONS["efficient"](), torch.randn(2, N_OUT, D_OUT, **ONE)
    with torch.no_grad():
        G.B_G2.normal_()
    variance, mean = torch.var_mean(x_out, -1, correction=0, keepdim=True)
    normalized = (x_out - mean) / (variance + 1e-5).sqrt()
    assert_same(G(x_out), G.W_G2 * torch.einsum("hd,bjh->bjd", G.W_G1, normalized) + G.B_G2)


def test_gaussian_prediction_samples():
    """In training x_hat ~ N(mu, sigma^2) with gradients for mu and sigma; in evaluation mode it is mu."""
    G = networks.GaussianPrediction(d_out=D_OUT, d_inp=D_INP, **ONE)
    x_out = torch.randn(N_OUT, D_OUT, **ONE)
    mu, sigma = G.mu(x_out), G.log_sigma(x_out).exp()
    samples = G(x_out.expand(20000, N_OUT, D_OUT))
    assert ((samples.mean(0) - mu).abs() < 5 * sigma / math.sqrt(20000)).all()
    torch.testing.assert_close(samples.std(0), sigma, rtol=0.03, atol=0)
    samples.square().mean().backward()
    for parameter in G.parameters():
        assert parameter.grad.ne(0).any()
    assert torch.equal(G.eval()(x_out), mu)


def test_gaussian_prediction_is_repeatable_from_the_same_random_numbers():
    G, x_out = networks.GaussianPrediction(d_out=D_OUT, d_inp=D_INP, **ONE), torch.randn(N_OUT, D_OUT, **ONE)

    def seeded(x_out: Tensor) -> Tensor:
        torch.manual_seed(3)
        return G(x_out)

    assert gradcheck(seeded, x_out.requires_grad_())


def test_dot_products():
    x, h = x_inp(2), x_hat(2)
    products = torch.einsum("bid,bjd->bij", x, h)
    assert_same(networks.DotProduct()(x, h), products)
    assert_same(networks.ScaledDotProduct()(x, h), products / 2)


def test_distances():
    x, h = x_inp(2), x_hat(2)
    squares = torch.cdist(x, h, compute_mode="donot_use_mm_for_euclid_dist").square()
    assert_same(networks.NegativeSquaredDistance()(x, h), -squares)
    rbf = networks.RBF(d_inp=D_INP, **ONE)
    assert_same(rbf.log_gamma.exp(), torch.tensor(1 / D_INP, **ONE))
    assert_same(rbf(x, h), (-squares / D_INP).exp())
    nn.init.constant_(rbf.log_gamma, 0.5)
    assert_same(rbf(x, h), (-squares * math.exp(0.5)).exp())


def test_gaussian_log_density():
    x, h = x_inp(2), x_hat(2)
    S = networks.GaussianLogDensity(d_inp=D_INP, **ONE)
    nn.init.normal_(S.log_sigma)
    density = torch.distributions.Normal(h[:, None], S.log_sigma.exp()).log_prob(x[:, :, None]).sum(-1)
    assert_same(S(x, h), density)


@pytest.mark.parametrize("n_inp", [N_INP, None], ids=["fixed", "variable"])
def test_log_logistic(n_inp):
    x, h = x_inp(2), x_hat(2)
    S = networks.LogLogistic(n_inp=n_inp, n_out=N_OUT, d_inp=D_INP, **ONE)
    nn.init.normal_(S.B_S)
    assert_same(S(x, h), torch.sigmoid(S.W_S * torch.einsum("bid,bjd->bij", x, h) + S.B_S).log())
    nn.init.constant_(S.B_S, -1e9)
    assert S(x, h).isfinite().all()


def test_mlp():
    mlp, x = networks.MLP(d_inp=D_INP, d_hid=6, d_out=2, **ONE), x_inp(2)
    hidden = nn.functional.gelu(x @ mlp[0].weight.mT + mlp[0].bias)
    assert_same(mlp(x), hidden @ mlp[2].weight.mT + mlp[2].bias)


def test_initial_values_are_those_of_algorithm_2():
    sizes = {"n_out": 200, "d_inp": 400}
    A = networks.LinearActivation(n_inp=300, d_inp=400)
    F = networks.EfficientVotes(**sizes, d_out=100)
    G = networks.EfficientPrediction(**sizes, d_out=100)
    S = networks.LogLogistic(n_inp=300, **sizes)
    stds = {A.W_A: 0.1, F.W_F1: 1, F.W_F2: 0.1, G.W_G1: 0.1, G.W_G2: 1, S.W_S: 0.05}
    for value, std in stds.items():
        assert abs(value.std().item() / std - 1) < 0.02
    for bias in (A.B_A, F.B_F2, G.B_G2, S.B_S):
        assert bias.eq(0).all()


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (networks.MLP, {"d_inp": 1, "d_hid": 2, "d_out": 3}),
        (networks.LinearActivation, {"n_inp": 1, "d_inp": 2}),
        (networks.LearnedMemories, {"n_inp": 1, "n_out": 2, "d_out": 3}),
        (networks.EfficientVotes, {"n_out": 1, "d_inp": 2, "d_out": 3}),
        (networks.EfficientPrediction, {"n_out": 1, "d_inp": 2, "d_out": 3}),
        (networks.GaussianPrediction, {"d_inp": 1, "d_out": 2}),
        (networks.RBF, {"d_inp": 1}),
        (networks.GaussianLogDensity, {"d_inp": 1}),
        (networks.LogLogistic, {"n_inp": 1, "n_out": 2, "d_inp": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_sizes_are_checked(make, sizes):
    layer = make(**sizes, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    for name in sizes:
        with pytest.raises(ValueError, match=rf"^{name} must be a positive int.*, got 0$"):
            make(**sizes | {name: 0})
        with pytest.raises(TypeError, match=rf"^{name} must be a positive int.*, got 4.0 \(float\)$"):
            make(**sizes | {name: 4.0})
