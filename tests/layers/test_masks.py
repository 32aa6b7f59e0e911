"""Masks: their definition, that padding changes nothing, and that unused inputs have no influence."""

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vecroute as vr
from tests.helpers.samples import KINDS, N_OUT, inputs, make, with_noise
from tests.helpers.tolerance import greatest, twin, upstream
from vecroute.ops import IMPLEMENTATIONS

ON_CPU = [name for name in IMPLEMENTATIONS if name not in ("auto", "fused")]
GARBAGE = [math.nan, math.inf, -math.inf, 1e30]


class Problem(NamedTuple):
    """A layer, inputs and masks."""

    layer: vr.VectorRouting
    x_inp: Tensor  # [..., i, d]
    input_mask: Tensor  # [..., i]
    pair_mask: Tensor | None  # [..., i, j]


@st.composite
def problems(draw, dtypes=(torch.float32, torch.float64), most: int = 9) -> Problem:
    """Draw layers of every kind and size, with garbage in masked inputs."""
    n_inp, n_out = draw(st.integers(1, most)), draw(st.integers(1, 6))
    d_inp, d_out = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    batch, dtype = draw(st.sampled_from([(), (1,), (3,), (2, 3)])), draw(st.sampled_from(dtypes))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    layer = vr.VectorRouting(
        n_inp=draw(st.sampled_from([n_inp, None])),
        n_out=n_out,
        d_inp=d_inp,
        d_out=d_out,
        n_iters=draw(st.integers(1, 3)),
        normalize=draw(st.booleans()),
        implementation=draw(st.sampled_from(ON_CPU)),
        dtype=dtype,
    )
    with_noise(layer)
    x_inp = torch.randn(*batch, n_inp, d_inp, dtype=dtype)
    input_mask = torch.rand(*batch, n_inp) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    x_inp[~input_mask] = draw(st.sampled_from(GARBAGE))
    pair_mask = torch.rand(*batch, n_inp, n_out) < 0.7 if draw(st.booleans()) else None
    if draw(st.booleans()):
        input_mask = input_mask.to(draw(st.sampled_from([torch.uint8, torch.int64])))
    return Problem(layer, x_inp, input_mask, pair_mask)


def of_rows(layer: vr.VectorRouting, rows: Tensor) -> vr.VectorRouting:
    """Return the layer for these inputs only. With fixed length it has their rows of the parameters."""
    if layer.n_inp is None:
        return layer
    layer = copy.deepcopy(layer)
    layer.n_inp = rows.shape[0]
    for name in ("W_A", "B_A", "W_S", "B_S", "beta_use", "beta_ign"):
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name)[rows]))
    return layer


def assert_near(name: str, got: vr.Routed, expected: vr.Routed, noise: Callable[[], vr.Routed]) -> None:
    """Compare to 1e-6 in float32 and 1e-12 in float64, relative to the greatest element, or to the noise."""
    for quantity, a, b in zip(vr.Routed._fields, got, expected, strict=True):
        limit = {torch.float32: 1e-6, torch.float64: 1e-12}[b.dtype] * max(1.0, greatest(b))
        error = greatest(a - b)
        if error > limit:
            limit += 10 * getattr(noise(), quantity)
        assert error <= limit, f"{quantity} {name}: error {error:.1e}, limit {limit:.1e}"


def noise(layer: vr.VectorRouting, x_inp: Tensor, *masks: Tensor | None) -> vr.Routed:
    """Return how much x_out and phi change if x_inp and parameters change in the last place of float32.

    Dividing by the standard deviation of a nearly constant vector, or summing terms that cancel, magnifies
    rounding errors. Two float32 results cannot be expected to agree better than this.
    """
    if x_inp.dtype == torch.float64:
        return vr.Routed(0.0, 0.0)
    exact = twin(layer, torch.float64)
    x_out, phi = exact.route(x_inp.double(), *masks)
    noises = []
    for _ in range(4):
        moved = twin(exact, torch.float64)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.copy_(moved_by_a_unit(parameter))
            routed = moved.route(moved_by_a_unit(x_inp.double()), *masks)
        noises.append((greatest(routed.x_out - x_out), greatest(routed.phi - phi)))
    return vr.Routed(*map(max, zip(*noises, strict=True)))


def moved_by_a_unit(x: Tensor) -> Tensor:
    return x * (1 + torch.finfo(torch.float32).eps * torch.randn_like(x))


def check_padded_is_alone_is_permuted(problem: Problem) -> None:
    layer, x_inp, input_mask, pair_mask = problem
    together = layer.route(x_inp, input_mask, pair_mask)
    assert together.x_out.shape == (*x_inp.shape[:-2], layer.n_out, layer.d_out)
    assert together.phi.shape == (*x_inp.shape[:-1], layer.n_out)
    for b in itertools.product(*map(range, x_inp.shape[:-2])):
        x, used = x_inp[b], input_mask[b].bool()
        pairs = None if pair_mask is None else pair_mask[b]
        in_batch, rows = vr.Routed(together.x_out[b], together.phi[b]), used.nonzero()[:, 0]
        assert in_batch.phi[~used].eq(0).all()
        if not len(rows):
            assert in_batch.x_out.eq(0).all()
            continue

        layer_alone, args = of_rows(layer, rows), (x[rows], None, None if pairs is None else pairs[rows])
        alone, noise_of = layer_alone.route(*args), partial(noise, layer_alone, *args)
        assert_near("alone", in_batch._replace(phi=in_batch.phi[rows]), alone, noise_of)

        order = torch.randperm(len(x))
        permuted = of_rows(layer, order).route(x[order], used[order], None if pairs is None else pairs[order])
        assert_near("permuted", permuted, in_batch._replace(phi=in_batch.phi[order]), noise_of)


@given(problems())
def test_padded_is_alone_is_permuted(problem):
    check_padded_is_alone_is_permuted(problem)


@pytest.mark.slow
@settings(max_examples=1000)
@given(problems())
def test_padded_is_alone_is_permuted_thoroughly(problem):
    check_padded_is_alone_is_permuted(problem)


def naive(problem: Problem) -> vr.Routed:
    """Compute x_out and phi of one sample by loops over i and j, with masks exactly as defined."""
    layer, x_inp, input_mask, pair_mask = problem
    n_out, p = layer.n_out, dict(layer.named_parameters())
    used = [i for i in range(len(x_inp)) if input_mask[i]]
    outputs = {i: [j for j in range(n_out) if pair_mask is None or pair_mask[i, j]] for i in used}
    sqrt_n_inp = math.sqrt(max(1, len(used)))
    for name in ("W_A", "B_A", "W_S", "B_S"):
        p[name] = p[name].expand(len(x_inp), *p[name].shape[1:])

    def beta(kind: str, i: int, j: int) -> Tensor:
        return p[f"beta_{kind}"][i, j] if layer.n_inp else x_inp[i] @ p[f"W_{kind}"][:, j] + p[f"B_{kind}"][j]

    def normalized(x: Tensor) -> Tensor:
        return x if len(x) == 1 else (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()

    x_out = None
    for _ in range(layer.n_iters):
        phi, x_new = torch.zeros(len(x_inp), n_out).to(x_inp), torch.zeros(n_out, layer.d_out).to(x_inp)
        for i in used:
            share = {j: torch.ones(()).to(x_inp) for j in outputs[i]}
            if x_out is not None:
                for j in outputs[i]:
                    x_hat = p["W_G2"][j] * (normalized(x_out[j]) @ p["W_G1"]) + p["B_G2"][j]
                    share[j] = torch.sigmoid(p["W_S"][i, j] * (x_inp[i] @ x_hat) + p["B_S"][i, j])
            f_a_inp = torch.sigmoid(p["W_A"][i] @ x_inp[i] / sqrt_n_inp + p["B_A"][i])
            for j in outputs[i]:
                R = share[j] / sum(share.values())
                D_use = f_a_inp * R
                phi[i, j] = beta("use", i, j) * D_use - beta("ign", i, j) * (f_a_inp - D_use)
                V = (x_inp[i] * p["W_F1"][j] / sqrt_n_inp) @ p["W_F2"] + p["B_F2"][j]
                x_new[j] += phi[i, j] * V
        x_out = x_new
    return vr.Routed(torch.stack([normalized(x) for x in x_out]) if layer.normalize else x_out, phi)


def check_definition(problem: Problem) -> None:
    routed = problem.layer.route(*problem[1:])
    for b in itertools.product(*map(range, problem.x_inp.shape[:-2])):
        pairs = None if problem.pair_mask is None else problem.pair_mask[b]
        with torch.no_grad():
            expected = naive(Problem(problem.layer, problem.x_inp[b], problem.input_mask[b], pairs))
        in_batch = vr.Routed(routed.x_out[b], routed.phi[b])
        assert_near("by definition", in_batch, expected, partial(noise, problem.layer, problem.x_inp[b]))


@given(problems(dtypes=(torch.float64,), most=5))
def test_masks_mean_what_they_are_defined_to_mean(problem):
    check_definition(problem)


@pytest.mark.slow
@settings(max_examples=1000)
@given(problems(dtypes=(torch.float64,), most=5))
def test_masks_mean_what_they_are_defined_to_mean_thoroughly(problem):
    check_definition(problem)


def both_masks(n_inp: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs, masks that exclude an input of each sample and a row of pairs, and the used inputs."""
    x_inp, input_mask, pair_mask = inputs(n_inp=n_inp)
    input_mask[:, 4], pair_mask[0, 2], pair_mask[:, :2] = False, False, True
    used = input_mask & pair_mask.any(-1)  # [b, i]
    assert used.any(-1).all()
    assert not used[0, 2]
    return x_inp, input_mask, pair_mask, used


def run(layer: torch.nn.Module, x_inp: Tensor, *masks: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of a layer, and the gradients of its inputs and parameters."""
    x_inp = x_inp.clone().requires_grad_()
    x_out = layer(x_inp, *masks)
    grads = torch.autograd.grad(x_out, [x_inp, *layer.parameters()], upstream(x_out))
    return x_out.detach(), list(grads)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("n_inp", [11, None], ids=["fixed", "variable"])
@pytest.mark.parametrize("kind", KINDS)
def test_unused_inputs_have_no_influence(kind, n_inp, garbage):
    """Outputs and gradients are identical bit by bit, whatever the unused inputs contain."""
    x_inp, input_mask, pair_mask, used = both_masks()
    layer = make(kind, n_inp)
    x_inp[~used] = 0.5
    x_out, grads = run(layer, x_inp, input_mask, pair_mask)
    x_inp[~used] = garbage
    x_out_garbage, grads_garbage = run(layer, x_inp, input_mask, pair_mask)

    assert x_out.isfinite().all()
    assert torch.equal(x_out_garbage, x_out)
    for with_garbage, without in zip(grads_garbage, grads, strict=True):
        assert without.isfinite().all()
        assert torch.equal(with_garbage, without)
    assert grads[0][~used].eq(0).all()
    assert grads[0][used].ne(0).any(-1).all()


@pytest.mark.parametrize("n_inp", [11, None], ids=["fixed", "variable"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_with_no_input_left(kind, n_inp):
    """All results are finite, and the other samples do not change."""
    x_inp, input_mask, pair_mask, _ = both_masks()
    layer = make(kind, n_inp)
    expected, _ = run(layer, x_inp, input_mask, pair_mask)
    for empty in ({"input_mask": input_mask.clone()}, {"pair_mask": pair_mask.clone()}):
        masks = {"input_mask": input_mask, "pair_mask": pair_mask} | empty
        next(iter(empty.values()))[1] = False
        x_out, grads = run(layer, x_inp, *masks.values())
        torch.testing.assert_close(x_out[0], expected[0], rtol=1e-6, atol=1e-6)
        assert x_out.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads)
        assert grads[0][1].eq(0).all()
        if hasattr(layer, "route"):
            routed = layer.route(x_inp, **masks)
            assert routed.phi[1].eq(0).all()
            assert routed.x_out[1].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_nan_on_the_way_back(kind):
    """No intermediate gradient is NaN, even if a later zero would hide it."""
    x_inp, input_mask, pair_mask, _ = both_masks()
    input_mask[1] = False
    with torch.autograd.set_detect_anomaly(True):
        _, grads = run(make(kind), x_inp, input_mask, pair_mask)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_n_inp_counts_the_input_mask_alone(kind):
    """A pair mask that excludes an input does not change the n_inp in sqrt(n_inp)."""
    x_inp = torch.randn(6, 7)
    input_mask, pair_mask = torch.ones(6).bool(), torch.ones(6, N_OUT).bool()
    input_mask[5], pair_mask[5] = False, False
    layer = make(kind)
    by_input_mask, by_pair_mask = layer(x_inp, input_mask), layer(x_inp, None, pair_mask)
    both = layer(x_inp, input_mask, pair_mask)
    torch.testing.assert_close(by_input_mask, layer(x_inp[:5]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_input_mask, both, rtol=1e-5, atol=1e-6)
    if kind.startswith("matrix"):  # no square root there
        torch.testing.assert_close(by_pair_mask, both, rtol=1e-5, atol=1e-6)
    else:
        assert not torch.allclose(by_pair_mask, both, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_ones_are_no_masks(kind):
    x_inp = torch.randn(2, 6, 7)
    layer = make(kind)
    ones = torch.ones(6, dtype=torch.int32), torch.ones(6, N_OUT, dtype=torch.uint8)
    torch.testing.assert_close(layer(x_inp, *ones), layer(x_inp), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_dimensions_of_masks_broadcast(kind):
    x_inp = torch.randn(2, 3, 6, 7)
    input_mask, pair_mask = torch.rand(3, 6) < 0.7, torch.rand(2, 1, 6, N_OUT) < 0.7
    layer = make(kind)
    everywhere = layer(x_inp, input_mask.expand(2, 3, 6), pair_mask.expand(2, 3, 6, N_OUT))
    assert torch.equal(layer(x_inp, input_mask, pair_mask), everywhere)
    assert not torch.allclose(layer(x_inp), everywhere)


def test_integers_are_booleans():
    x_inp, input_mask, pair_mask, _ = both_masks()
    layer = make("auto")
    expected = layer.route(x_inp, input_mask, pair_mask)
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        got = layer.route(x_inp, input_mask.to(dtype), pair_mask.to(dtype))
        assert torch.equal(got.x_out, expected.x_out)
        assert torch.equal(got.phi, expected.phi)


@pytest.mark.parametrize("implementation", ON_CPU)
def test_gradients_of_a_padded_batch_are_those_of_its_samples(implementation):
    """Gradients of x_inp agree sample by sample, and gradients of parameters are sums over samples."""
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=6, d_out=5, implementation=implementation).double()
    x_inp, lengths = torch.randn(3, 9, 6, dtype=torch.float64), [9, 1, 4]
    input_mask = torch.arange(9) < torch.tensor(lengths)[:, None]  # [b, i]
    x_inp[~input_mask] = math.nan
    weight = torch.randn(3, 4, 5, dtype=torch.float64)

    def grads(x: Tensor, weight: Tensor, *mask: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        return list(torch.autograd.grad((layer(x, *mask) * weight).sum(), [x, *layer.parameters()]))

    grad_x, *together = grads(x_inp, weight, input_mask)
    alone = [grads(x_inp[b, :n], weight[b]) for b, n in enumerate(lengths)]
    for b, n in enumerate(lengths):
        torch.testing.assert_close(grad_x[b, :n], alone[b][0], rtol=1e-10, atol=1e-12)
        assert grad_x[b, n:].eq(0).all()
    for k, grad in enumerate(together, start=1):
        torch.testing.assert_close(grad, sum(a[k] for a in alone), rtol=1e-10, atol=1e-12)
