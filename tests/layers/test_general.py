"""GeneralRouting: Algorithm 1, and its equality with Algorithm 2 if it has the same networks."""

import pytest
import torch
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.samples import with_noise

networks = vr.networks
N_INP, N_OUT, D_INP, D_OUT = 7, 5, 6, 4
SIZES = {"n_out": N_OUT, "d_inp": D_INP}


def general(n_inp: int | None = N_INP, **options) -> vr.GeneralRouting:
    """Build a routing with small networks. Arguments replace them."""
    defaults = {
        "A": nn.Linear(D_INP, 1),
        "F": networks.EfficientVotes(**SIZES, d_out=D_OUT),
        "G": nn.Linear(D_OUT, D_INP),
        "S": networks.DotProduct(),
    }
    return vr.GeneralRouting(n_inp=n_inp, **SIZES, **(defaults | options)).double()


def like(vector: vr.VectorRouting) -> vr.GeneralRouting:
    """Return Algorithm 1 with the networks and parameters of a layer of Algorithm 2."""
    sizes = {"n_out": vector.n_out, "d_inp": vector.d_inp}
    layer = vr.GeneralRouting(
        A=networks.LinearActivation(n_inp=vector.n_inp, d_inp=vector.d_inp),
        F=networks.EfficientVotes(**sizes, d_out=vector.d_out),
        G=networks.EfficientPrediction(**sizes, d_out=vector.d_out),
        S=networks.LogLogistic(n_inp=vector.n_inp, **sizes),
        n_inp=vector.n_inp,
        **sizes,
        n_iters=vector.n_iters,
    ).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(getattr(vector, name.split(".")[-1]))
    return layer


def x_inp(*batch: int) -> Tensor:
    return torch.randn(*batch, N_INP, D_INP, dtype=torch.float64)


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("n_iters", [1, 2, 4])
@pytest.mark.parametrize("n_inp", [N_INP, None], ids=["fixed", "variable"])
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_algorithm_1_is_algorithm_2(batch, n_inp, n_iters, masked):
    """With the same networks, outputs, phi, every iteration and every gradient agree."""
    vector = vr.VectorRouting(
        n_inp=n_inp, **SIZES, d_out=D_OUT, n_iters=n_iters, normalize=False, dtype=torch.float64
    )
    with_noise(vector)
    layer = like(vector)
    masks = {}
    if masked:
        masks = {
            "input_mask": torch.rand(*batch, N_INP) < 0.7,
            "pair_mask": torch.rand(*batch, N_INP, N_OUT) < 0.7,
        }
    x = x_inp(*batch).requires_grad_()
    x_too = x.detach().clone().requires_grad_()
    routed, expected = layer.route(x, **masks), vector.route(x_too, **masks)
    assert_same(routed.x_out, expected.x_out)
    assert_same(routed.phi, expected.phi)
    for ours, theirs in zip(layer.trace(x, **masks), vector.trace(x_too, **masks), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if a is None or b is None:
                assert a is b
            else:
                assert_same(a, b)

    upstream = torch.randn_like(expected.x_out)
    routed.x_out.backward(upstream)
    expected.x_out.backward(upstream)
    assert_same(x.grad, x_too.grad)
    for name, parameter in layer.named_parameters():
        theirs = getattr(vector, name.split(".")[-1]).grad
        assert_same(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, theirs)


def test_lengths_vary():
    layer = general(n_inp=None)
    for n_inp in (1, 2, 11):
        x = torch.randn(3, n_inp, D_INP, dtype=torch.float64)
        routed = layer.route(x)
        assert routed.x_out.shape == (3, N_OUT, D_OUT)
        assert routed.phi.shape == (3, n_inp, N_OUT)
    assert {name for name, _ in layer.named_parameters(recurse=False)} == {"W_use", "B_use", "W_ign", "B_ign"}


def test_competition_over_inputs():
    """R sums to 1 over the inputs of each output, and is flat in the first iteration."""
    layer = general(compete_over="inputs", n_iters=3)
    use = torch.rand(2, N_INP, N_OUT) < 0.7
    use[0, :, 3] = False  # an output without inputs
    first, *others = layer.trace(x_inp(2), pair_mask=use)
    some_left = use.any(-2)
    assert_same(first.R, use / use.sum(-2, keepdim=True).clamp(min=1).double())
    for it in others:
        assert_same(it.R.sum(-2), some_left.double())
        scores = it.S.masked_fill(~use, -torch.inf)
        assert_same(it.R.mT[some_left], scores.mT[some_left].softmax(-1))
        assert it.R[~use].eq(0).all()
        assert it.x_out[0, 3].eq(0).all()


def test_competition_over_outputs_is_the_default():
    last = general().trace(x_inp(2))[-1]
    assert_same(last.R, last.S.softmax(-1))


def test_x_init_is_scored_in_place_of_the_flat_prior():
    layer, x = general(n_iters=1), x_inp(2)
    x_init = torch.randn(2, N_OUT, D_OUT, dtype=torch.float64)
    (it,) = layer.trace(x, x_init=x_init)
    assert_same(it.x_hat, layer.G(x_init))
    assert_same(it.S, layer.S(x, it.x_hat))
    assert_same(it.R, it.S.softmax(-1))
    assert_same(layer(x, x_init=x_init), it.x_out)
    assert not torch.allclose(layer(x), it.x_out)


def test_x_init_may_be_one_for_the_batch_and_learned():
    layer, x = general(), x_inp(2, 3)
    x_init = torch.randn(N_OUT, D_OUT, dtype=torch.float64, requires_grad=True)
    x_out = layer(x, x_init=x_init)
    assert_same(x_out, layer(x, x_init=x_init.expand(2, 3, N_OUT, D_OUT)))
    x_out.sum().backward()
    assert x_init.grad.ne(0).all()


def test_betas_that_are_numbers():
    layer, x = general(beta_use=2, beta_ign=0.5), x_inp(2)
    last = layer.trace(x)[-1]
    assert_same(last.phi, 2 * last.D_use - 0.5 * last.D_ign)
    assert not dict(layer.named_parameters(recurse=False))


def test_betas_that_are_computed():
    """Betas may come from a function or a module. The layer then owns the module's parameters."""
    module = nn.Linear(D_INP, N_OUT)
    layer, x = general(n_inp=None, beta_use=module, beta_ign=lambda x: x[..., :N_OUT].exp()), x_inp(2)
    last = layer.trace(x)[-1]
    assert_same(last.phi, module(x) * last.D_use - x[..., :N_OUT].exp() * last.D_ign)
    assert "beta_use.weight" in dict(layer.named_parameters())


@pytest.mark.parametrize("n_inp", [N_INP, None], ids=["fixed", "variable"])
def test_one_beta_learned(n_inp):
    layer, x = general(n_inp=n_inp, beta_ign=0), x_inp(2)
    learned = {name for name, _ in layer.named_parameters(recurse=False)}
    assert learned == ({"beta_use"} if n_inp else {"W_use", "B_use"})
    last = layer.trace(x)[-1]
    beta_use = layer.beta_use if n_inp else x @ layer.W_use + layer.B_use
    assert_same(last.phi, beta_use * last.D_use)


def test_scores_of_a_with_or_without_a_last_dimension():
    x = x_inp(2)
    A = nn.Linear(D_INP, 1).double()
    layer = general(A=A)
    with_one = layer(x)
    layer.A = nn.Sequential(A, nn.Flatten(-2))
    assert torch.equal(layer(x), with_one)


def test_plain_functions():
    F = networks.EfficientVotes(**SIZES, d_out=D_OUT).double()
    layer = general(
        A=lambda x: x.sum(-1),
        F=lambda x: F(x),
        G=lambda x: torch.cat((x, x[..., :2]), -1),
        S=lambda x, x_hat: -torch.cdist(x, x_hat),
    )
    x = x_inp(2).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert {name for name, _ in layer.named_parameters()} == {"beta_use", "beta_ign"}


def test_networks_that_ask_for_the_mask_are_given_it():
    asked = {}

    def A(x: Tensor, input_mask: Tensor | None = None) -> Tensor:
        asked["A"] = input_mask
        return x.sum(-1)

    class F(networks.EfficientVotes):
        def forward(self, x: Tensor, input_mask: Tensor | None = None) -> Tensor:
            asked["F"] = input_mask
            return super().forward(x, input_mask)

    layer = general(A=A, F=F(**SIZES, d_out=D_OUT))
    layer(x_inp(2))
    assert asked == {"A": None, "F": None}
    mask = torch.rand(2, N_INP) < 0.7
    layer(x_inp(2), mask.int())
    assert torch.equal(asked["A"], mask)
    assert torch.equal(asked["F"], mask)


def test_networks_that_do_not_like_zeros():
    """Unused inputs reach the networks as zeros, and the results for them are ignored, even NaN."""
    layer = general(
        A=lambda x: 1 / x.square().sum(-1).sqrt() - 1 / x[..., 0].square(),  # NaN at 0
        F=lambda x: (1 / x)[..., None, :].expand(*x.shape[:-1], N_OUT, D_INP),
        G=nn.Identity(),
        beta_use=lambda x: 1 / x[..., :N_OUT],
        beta_ign=lambda x: x[..., :N_OUT].square().log(),
    )
    x, mask = x_inp(2), torch.ones(2, N_INP).bool()
    mask[:, 3] = False
    routed = layer.route(x, mask)
    assert routed.x_out.isfinite().all()
    assert routed.phi[:, 3].eq(0).all()
    without = [0, 1, 2, 4, 5, 6]
    expected = layer.route(x, torch.arange(N_INP) != 3)
    assert_same(routed.x_out, expected.x_out)
    layer.n_inp = None
    assert_same(routed.x_out, layer(x[:, without]))


WRONG = {
    "A": (
        {"A": nn.Linear(D_INP, 2)},
        r"A must return \[..., n_inp\] or \[..., n_inp, 1\], here \[3, 7\] or \[3, 7, 1\], got \[3, 7, 2\]",
    ),
    "A no tensor": ({"A": lambda x: 1.0}, r"A must return .* got float"),
    "F": (
        {"F": nn.Linear(D_INP, D_OUT)},
        r"F must return \[..., n_inp, n_out, d_out\], here \[3, 7, 5, any\], got \[3, 7, 4\]",
    ),
    "F one row": (
        {"F": lambda x: x.new_zeros(3, 1, N_OUT, D_OUT)},
        r"F must return .* here \[3, 7, 5, any\], got \[3, 1, 5, 4\]",
    ),
    "G": (
        {"G": nn.Linear(D_OUT, D_INP + 1)},
        r"G must return \[..., n_out=5, d_inp=6\], here \[3, 5, 6\], got \[3, 5, 7\]",
    ),
    "S": (
        {"S": lambda x, x_hat: x_hat @ x.mT},
        r"S must return \[..., n_inp, n_out=5\], here \[3, 7, 5\], got \[3, 5, 7\]",
    ),
    "beta_use": (
        {"beta_use": lambda x: x},
        r"beta_use must return \[..., n_inp, n_out=5\], here \[3, 7, 5\], got \[3, 7, 6\]",
    ),
    "beta_ign": ({"beta_ign": lambda x: x[..., 0]}, r"beta_ign must return .* got \[3, 7\]"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_a_network_that_returns_the_wrong_shape(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        general(**options)(x_inp(3))


def test_x_init_of_the_wrong_shape_or_type():
    layer, x = general(), x_inp(2)
    with pytest.raises(ValueError, match=r"^x_init must be \[..., n_out=5, d_out=4\], got \[2, 5, 6\]$"):
        layer(x, x_init=x[:, :5])
    with pytest.raises(TypeError, match=r"^x_init must be a floating-point tensor .* got list$"):
        layer(x, x_init=[1.0])
    with pytest.raises(TypeError, match=r"^x_init must have the dtype of the layer, torch.float64"):
        layer(x, x_init=torch.zeros(N_OUT, D_OUT))
