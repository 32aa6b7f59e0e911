"""The layers reproduce every number of the golden files: float64 runs of the public implementation."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.paths import TESTS

FILES = sorted((TESTS / "golden").glob("*.npz"))


def read(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Return the configuration and the tensors of one file."""
    with np.load(path, allow_pickle=False) as arrays:
        config = json.loads(bytes(arrays["config"]))
        return config, {name: torch.from_numpy(arrays[name]) for name in arrays if name != "config"}


def named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def files(kind: str) -> list:
    return [pytest.param(path, id=path.stem) for path in FILES if read(path)[0]["kind"] == kind]


def assert_same(name: str, got: Tensor, golden: Tensor) -> None:
    """Compare to a relative error of 1e-10, plus 1e-13 of the greatest element, plus 1e-14."""
    assert got.shape == golden.shape, name
    limit = 1e-10 * golden.abs() + 1e-13 * golden.abs().max() + 1e-14
    worst = ((got - golden).abs() - limit).max().item()
    assert worst <= 0, f"{name} is {worst:.1e} beyond the limit"


def assert_same_gradients(layer: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Compare every gradient with the file. If the file has none, ours must be None or 0."""
    grads = {}
    for name, golden in named(tensors, "grad.").items():
        kind, _, what = name.removeprefix("compute_beta_").partition(".")
        if name.startswith("compute_beta_"):  # weight [j, d] there, W_use [d, j] here
            grads[f"{'W' if what == 'weight' else 'B'}_{kind}"] = golden.mT if what == "weight" else golden
        else:
            grads[name] = golden
    for name, parameter in layer.named_parameters():
        if name in grads:
            assert_same(f"grad {name}", parameter.grad, grads.pop(name))
        else:
            assert parameter.grad is None or parameter.grad.eq(0).all(), f"grad {name}"
    assert not grads, f"gradients of no parameter of ours: {list(grads)}"


def vector_layer(config: dict, dtype: torch.dtype = torch.float64) -> vr.VectorRouting:
    sizes = {name: config[name] for name in ("n_inp", "n_out", "d_inp", "d_out", "n_iters", "normalize")}
    return vr.VectorRouting(**sizes, implementation="reference", dtype=dtype)


def test_there_is_a_file_of_every_kind():
    kinds = [read(path)[0]["kind"] for path in FILES]
    assert {kind: kinds.count(kind) for kind in kinds} == {"efficient": 10, "general": 1, "matrix": 2}


@pytest.mark.parametrize("path", files("efficient"))
def test_vector(path):
    config, tensors = read(path)
    layer = vector_layer(config)
    vr.load_reference_state_dict(layer, named(tensors, "param."))
    x_inp = tensors["x_inp"].requires_grad_()
    pair_mask = ~tensors["mask"] if "mask" in tensors else None  # True = ignore there, use here

    routed = layer.route(x_inp, pair_mask=pair_mask)
    assert_same("x_out", routed.x_out, tensors["x_out"])
    if config["n_iters"] > 1:
        assert_same("phi", routed.phi, tensors["phi"])
        last = layer.trace(x_inp, pair_mask=pair_mask)[-1]
        for name in ("a_inp", "S", "R", "D_use", "D_ign", "phi"):
            assert_same(name, getattr(last, name), tensors[name])
    routed.x_out.backward(tensors["grad_x_out"])
    assert_same("grad x_inp", x_inp.grad, tensors["grad_x_inp"])
    assert_same_gradients(layer, tensors)


@pytest.mark.parametrize("path", files("general"))
def test_general(path):
    config, tensors = read(path)
    n_inp, n_out, d_inp, d_out = (config[name] for name in ("n_inp", "n_out", "d_inp", "d_out"))
    layer = vr.GeneralRouting(
        A=nn.Linear(d_inp, 1),
        F=vr.networks.LearnedMemories(n_inp=n_inp, n_out=n_out, d_out=d_out),
        G=nn.Linear(d_out, d_inp),
        S=vr.networks.ScaledDotProduct(),
        n_inp=n_inp,
        n_out=n_out,
        d_inp=d_inp,
        n_iters=config["n_iters"],
    ).double()
    vr.load_reference_state_dict(layer, named(tensors, "param."))
    x_inp = tensors["x_inp"].requires_grad_()

    last = layer.trace(x_inp)[-1]
    for name in ("x_out", "phi", "a_inp", "S", "R", "D_use", "D_ign"):
        assert_same(name, getattr(last, name), tensors[name])
    layer(x_inp).backward(tensors["grad_x_out"])
    assert_same("grad x_inp", x_inp.grad, tensors["grad_x_inp"])
    assert_same_gradients(layer, tensors)


@pytest.mark.parametrize("path", files("matrix"))
def test_matrix(path):
    config, tensors = read(path)
    names = ("n_inp", "n_out", "d_cov", "d_inp", "d_out", "n_iters", "p_model", "single_beta")
    layer = vr.MatrixRouting(**{name: config[name] for name in names}, dtype=torch.float64)
    vr.load_reference_state_dict(layer, named(tensors, "param."))
    a_inp, mu_inp = tensors["a_inp_in"].requires_grad_(), tensors["x_inp"].requires_grad_()

    a_out, mu_out, sig2_out = layer(a_inp, mu_inp)
    assert_same("a_out", a_out, tensors["a_out"])
    assert_same("mu_out", mu_out, tensors["mu_out"])
    assert_same("sig2_out", sig2_out, tensors["sig2_out"])
    assert_same("R", layer.trace(a_inp, mu_inp)[-1].R, tensors["R"])
    torch.autograd.backward([mu_out, a_out], [tensors["grad_mu_out"], tensors["grad_a_out"]])
    assert_same("grad a_inp", a_inp.grad, tensors["grad_a_inp_in"])
    assert_same("grad mu_inp", mu_inp.grad, tensors["grad_x_inp"])
    assert_same_gradients(layer, tensors)


@pytest.mark.parametrize("path", files("efficient"))
def test_in_float32_the_prior_of_the_public_code_is_ours(path):
    """The public code stores 1 / n_out in float32 for every dtype. Only float64 shows the difference."""
    config, tensors = read(path)
    theirs, ours = vector_layer(config, torch.float32), vector_layer(config, torch.float32)
    vr.load_reference_state_dict(theirs, named(tensors, "param."))
    ours.load_state_dict(theirs.state_dict())
    assert ours.prior == 1 / config["n_out"]
    x_inp = tensors["x_inp"].float()
    for a, b in zip(ours.route(x_inp), theirs.route(x_inp), strict=True):
        assert torch.equal(a, b)


def test_in_float64_the_prior_of_the_public_code_shows():
    config, tensors = read(next(path for path in FILES if path.stem == "fixed_small"))
    layer = vector_layer(config)
    vr.load_reference_state_dict(layer, named(tensors, "param."))
    layer.prior = 1 / config["n_out"]
    with pytest.raises(AssertionError, match="x_out is"):
        assert_same("x_out", layer(tensors["x_inp"]), tensors["x_out"])


def test_constant_buffers_may_be_there_or_not():
    config, tensors = read(next(path for path in FILES if path.stem == "variable_small"))
    state_dict = named(tensors, "param.")
    layer = vector_layer(config)
    vr.load_reference_state_dict(layer, state_dict | {"CONST_ones_over_n_out": torch.ones(3) / 3})
    with_buffers = layer(tensors["x_inp"])
    vr.load_reference_state_dict(layer, state_dict)
    assert torch.equal(with_buffers, layer(tensors["x_inp"]))
