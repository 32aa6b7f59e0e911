"""MatrixRouting: the 2019 variant."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vecroute as vr
from tests.helpers.tolerance import greatest

f = torch.sigmoid
N_INP, N_OUT, D_COV, D_INP, D_OUT = 7, 4, 3, 5, 2
SIZES = {"n_out": N_OUT, "d_cov": D_COV, "d_inp": D_INP, "d_out": D_OUT}
P_MODELS = pytest.mark.parametrize("p_model", ["gaussian", "skm"])


def matrix_layer(n_inp: int | None = N_INP, **options) -> vr.MatrixRouting:
    """Build a layer with random parameters."""
    layer = vr.MatrixRouting(n_inp=n_inp, **(SIZES | options)).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return layer


def matrices(*batch: int, n_inp: int = N_INP) -> tuple[Tensor, Tensor]:
    return torch.randn(*batch, n_inp).double(), torch.randn(*batch, n_inp, D_COV, D_INP).double()


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@P_MODELS
@pytest.mark.parametrize("n_inp", [N_INP, None], ids=["fixed", "variable"])
def test_formulas(n_inp, p_model):
    """Compare every iteration with the definition: votes, shares, mixtures, and their probabilities."""
    layer = matrix_layer(n_inp, p_model=p_model, n_iters=4)
    a_inp, mu_inp = matrices(2)
    V = torch.einsum("ijdh,bicd->bijch", layer.W.expand(N_INP, -1, -1, -1), mu_inp) + layer.B
    R = torch.full((2, N_INP, N_OUT), 1 / N_OUT).double()
    for it in layer.trace(a_inp, mu_inp):
        assert_same(it.R, R)
        assert_same(it.D_use, f(a_inp)[..., None] * R)
        assert_same(it.D_use + it.D_ign, f(a_inp)[..., None].expand_as(R))
        assert_same(it.phi, layer.beta_use * it.D_use - layer.beta_ign * it.D_ign)
        assert_same(it.a_out, it.phi.sum(-2))
        share = (it.D_use / (it.D_use.sum(-2, keepdim=True) + 1e-5))[..., None, None]
        mu_out = (share * V).sum(1)
        assert_same(it.mu_out, mu_out)
        assert_same(it.sig2_out, (share * (V - mu_out[:, None]).square()).sum(1) + 1e-5)
        if p_model == "gaussian":
            mixture = torch.distributions.Normal(it.mu_out[:, None], it.sig2_out[:, None].sqrt())
            log_p = mixture.log_prob(V).sum((-2, -1))
        else:
            log_p = -(V - mu_out[:, None]).square().sum((-2, -1))
        R = (f(it.a_out)[:, None].log() + log_p).softmax(-1)
    for got, last in zip(layer(a_inp, mu_inp), it[-3:], strict=True):
        assert torch.equal(got, last)


def test_the_probability_models_differ():
    torch.manual_seed(1)
    gaussian = matrix_layer(p_model="gaussian")
    torch.manual_seed(1)
    skm = matrix_layer(p_model="skm")
    a_inp, mu_inp = matrices()
    assert not torch.allclose(gaussian(a_inp, mu_inp)[1], skm(a_inp, mu_inp)[1])


def of_rows(layer: vr.MatrixRouting, rows: Tensor) -> vr.MatrixRouting:
    """Return the layer for these inputs only. With fixed length it has their rows of the parameters."""
    if layer.n_inp is None:
        return layer
    options = {"p_model": layer.p_model, "single_beta": layer.single_beta, "n_iters": layer.n_iters}
    alone = matrix_layer(len(rows), n_out=layer.n_out, **options)
    alone.load_state_dict({name: value[rows] for name, value in layer.state_dict().items()})
    return alone


def check_padding(data: st.DataObject) -> None:
    """Check that padded, alone and permuted samples agree, whatever the unused inputs contain."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    n_inp, n_out = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 5))
    layer = matrix_layer(
        data.draw(st.sampled_from([n_inp, None])),
        n_out=n_out,
        n_iters=data.draw(st.integers(1, 4)),
        p_model=data.draw(st.sampled_from(["gaussian", "skm"])),
        single_beta=data.draw(st.booleans()),
    )
    a_inp, mu_inp = matrices(n_inp=n_inp)
    input_mask = torch.rand(n_inp) < data.draw(st.sampled_from([0.3, 0.7, 1.0]))
    pair_mask = torch.rand(n_inp, n_out) < data.draw(st.sampled_from([0.7, 1.0]))
    a_inp[~input_mask], mu_inp[~input_mask] = math.nan, math.inf
    together = layer(a_inp, mu_inp, input_mask, pair_mask)
    order = torch.randperm(n_inp)
    permuted = of_rows(layer, order)(a_inp[order], mu_inp[order], input_mask[order], pair_mask[order])
    rows = input_mask.nonzero()[:, 0]
    if len(rows):
        alone = of_rows(layer, rows)(a_inp[rows], mu_inp[rows], pair_mask=pair_mask[rows])
    else:
        alone = [torch.zeros_like(t) for t in together[:2]] + [torch.full_like(together[2], layer.eps)]
    for a, b, c in zip(together, alone, permuted, strict=True):
        assert greatest(a - b) <= 1e-10 * max(1, greatest(b))
        assert greatest(a - c) <= 1e-10 * max(1, greatest(b))


@given(st.data())
def test_padded_is_alone_is_permuted(data):
    check_padding(data)


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.data())
def test_padded_is_alone_is_permuted_thoroughly(data):
    check_padding(data)


def test_masked_pairs_leave_the_competition():
    layer, use = matrix_layer(p_model="skm"), torch.rand(2, N_INP, N_OUT) < 0.6
    use[0, 3] = False
    for it in layer.trace(*matrices(2), pair_mask=use):
        assert_same(it.R.sum(-1), use.any(-1).double())
        for quantity in (it.R, it.D_use, it.D_ign, it.phi):
            assert quantity[~use].eq(0).all()
        assert it.phi[use].ne(0).all()


def test_single_beta():
    """beta_ign and beta_use are one parameter, with the sum of both gradients."""
    one, two = matrix_layer(single_beta=True), matrix_layer()
    assert {name for name, _ in one.named_parameters()} == {"W", "B", "beta_use"}
    assert one.beta_ign is one.beta_use
    two.load_state_dict(one.state_dict())
    a_inp, mu_inp = matrices(2)
    for layer in (one, two):
        layer(a_inp, mu_inp)[0].square().sum().backward()
    assert_same(one(a_inp, mu_inp)[0], two(a_inp, mu_inp)[0])
    assert_same(one.beta_use.grad, two.beta_use.grad + two.beta_ign.grad)
    assert one.float().beta_ign is one.beta_use


def test_weights_of_the_public_module_with_a_single_beta():
    """The public module may store one beta or both."""
    layer, source = matrix_layer(single_beta=True), matrix_layer(single_beta=True)
    both = source.state_dict()
    for state_dict in (both, {name: value for name, value in both.items() if name != "beta_ign"}):
        layer.reset_parameters()
        vr.load_reference_state_dict(layer, state_dict)
        assert torch.equal(layer.beta_ign, source.beta_use)
        assert layer.beta_ign is layer.beta_use


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@P_MODELS
def test_half_precision_is_summed_in_float32(p_model, dtype):
    """Sums that would overflow in float16 are finite."""
    layer = matrix_layer(p_model=p_model).to(dtype)
    a_inp, mu_inp = matrices(2)
    a_inp, mu_inp = a_inp.to(dtype), (100 * mu_inp).to(dtype).requires_grad_()
    outputs = layer(a_inp, mu_inp)
    assert {output.dtype for output in outputs} == {dtype}
    assert layer.trace(a_inp, mu_inp)[-1].sig2_out.dtype == torch.float32
    torch.autograd.backward(outputs[:2], [torch.randn_like(output) for output in outputs[:2]])
    for tensor in (*outputs, mu_inp.grad, *(p.grad for p in layer.parameters())):
        assert tensor.isfinite().all()


@P_MODELS
def test_autocast(p_model):
    """Votes are bfloat16, everything else is float32, and the result has the dtype of the inputs."""
    layer = matrix_layer(p_model=p_model).float()
    a_inp, mu_inp = (tensor.float() for tensor in matrices(2))
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(a_inp, mu_inp)
        assert layer.trace(a_inp, mu_inp)[0].mu_out.dtype == torch.float32
    for got, expected in zip(cast, layer(a_inp, mu_inp), strict=True):
        assert got.dtype == torch.float32
        assert not torch.equal(got, expected)
        torch.testing.assert_close(got, expected, rtol=0.2, atol=0.1)


def test_one_output_has_no_competitor():
    layer = matrix_layer(n_out=1)
    for it in layer.trace(*matrices(2)):
        assert it.R.eq(1).all()
        assert it.D_ign.eq(0).all()


def test_repr():
    assert repr(matrix_layer(p_model="skm")) == (
        "MatrixRouting(n_inp=7, n_out=4, d_cov=3, d_inp=5, d_out=2, n_iters=3, "
        "p_model='skm', single_beta=False)"
    )
