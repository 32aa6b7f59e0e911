"""x_inp in float16 for all passes of a call, where tf32 is asked for."""

import pytest
import torch
from samples import with_noise
from tolerance import assert_as_good, outcome, twin, upstream

import vecroute as vr
from vecroute.ops import Tuning, half_inputs

CASES = [  # b, n_inp, n_out, d_inp
    (2, 70, 8, 128),
    (1, 64, 16, 128),
    (3, 130, 40, 384),
    (2, 5, 64, 128),
    (1, 200, 56, 256),
]


@pytest.fixture(autouse=True)
def device(tf32):
    """A GPU where there is one, and tf32."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield device


@pytest.fixture
def calls(monkeypatch):
    """A list with an entry for each call that has them, which those have however small."""
    calls, new = [], half_inputs.new_half_inputs
    monkeypatch.setattr(half_inputs, "LEAST_BYTES", 1)
    monkeypatch.setattr(half_inputs, "LEAST_PROGRAMS", 1)
    if not torch.cuda.is_available():
        monkeypatch.setattr(half_inputs, "has_kernels", lambda *_: True)

    def counted(*args):
        halves = new(*args)
        calls.extend([1] if halves else [])
        return halves

    monkeypatch.setattr("vecroute.ops.loop.new_half_inputs", counted)
    return calls


def make(n_out: int, d_inp: int, n_iters: int = 2) -> vr.VectorRouting:
    sizes = {"n_inp": None, "n_out": n_out, "d_inp": d_inp, "d_out": 24, "n_iters": n_iters}
    return with_noise(vr.VectorRouting(**sizes, implementation="fused"))


def relative_errors(layer: vr.VectorRouting, x_inp: torch.Tensor) -> dict[str, float]:
    """Of x_out, phi and gradients, by their lengths; not of B_A, one number, what is left of a long sum."""
    got, truth = outcome(layer, x_inp), outcome(twin(layer, torch.float64), x_inp.double())
    del truth["grad B_A"]
    return {
        name: float((got[name].double() - t).norm() / t.norm().clamp(min=1e-300)) for name, t in truth.items()
    }


def row_errors(layer, x_inp: torch.Tensor, sizes=1.0, features=slice(None)) -> torch.Tensor:
    """Of the gradient of each input, of some features, with x_out that counts by some sizes."""
    grads = []
    for each, x in ((layer, x_inp), (twin(layer, torch.float64), x_inp.double())):
        x = x.clone().requires_grad_()
        x_out = each(x)
        x_out.backward(upstream(x_out) * torch.as_tensor(sizes).to(x_out))
        grads.append(x.grad[..., features].double())
    return (grads[0] - grads[1]).norm(dim=-1) / grads[1].norm(dim=-1)


def assert_as_tf32(layer: vr.VectorRouting, x_inp: torch.Tensor) -> None:
    """By the one rule on a GPU; the interpreter multiplies exactly, so that float16 alone rounds there."""
    errors = relative_errors(layer, x_inp)
    assert x_inp.is_cuda or max(errors.values()) < 2**-9, errors
    if x_inp.is_cuda:
        outcomes = [outcome(each, x_inp) for each in (layer, twin(layer, torch.float32))]
        truth = outcome(twin(layer, torch.float64), x_inp.double())
        for name in errors:
            assert_as_good(name, *(found[name] for found in outcomes), truth[name])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_have_the_digits_of_tf32(case, calls, nan_filled_memory):
    b, i, j, d = case
    assert_as_tf32(make(j, d), torch.randn(b, i, d))
    assert calls


def test_inputs_of_any_size(calls):
    """Rows that differ more than float16 can say, and some that are 0."""
    layer, x_inp = make(16, 128), torch.randn(2, 150, 128) * 10.0 ** torch.linspace(-8, 0, 150)[:, None]
    x_inp[:, ::7] = 0
    errors = relative_errors(layer, x_inp)
    assert max(errors.values()) < 2**-6, errors
    grad = row_errors(layer, x_inp)
    assert grad.max() < 2**-7, grad
    assert calls


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_gradients_of_any_size(size, calls):
    """float16 has none that large or small, nor have gradients of some outputs the size of the others'."""
    sizes = size * 10.0 ** torch.arange(-2, 2).repeat_interleave(4)[:, None]
    assert row_errors(make(16, 128), torch.randn(2, 90, 128), sizes).max() < 2**-7
    assert calls


@pytest.mark.parametrize("names", [("W_A",), ("W_S",), ("W_use", "W_ign")], ids=str)
def test_parameters_that_are_0_have_gradients(names, calls):
    """Pairs are times the rows of M in their float16, and must not be lost with them."""
    layer = make(16, 128)
    with torch.no_grad():
        for name in names:
            getattr(layer, name).zero_()
    errors = relative_errors(layer, torch.randn(2, 90, 128))
    assert max(errors.values()) < 2**-6, errors
    assert calls


def test_features_with_small_parameters(calls):
    """The gradient of such a feature has its own digits, not those of the greatest in its row."""
    layer, x_inp, small = make(16, 256), torch.randn(2, 60, 256), slice(100, 140)
    with torch.no_grad():
        for parameter in (layer.W_F1, layer.W_G2, layer.B_G2, layer.W_A):
            parameter[:, small] *= 1e-4
        for parameter in (layer.W_use, layer.W_ign):
            parameter[small] *= 1e-4
    assert row_errors(layer, x_inp, features=small).max() < 2**-7
    assert calls


def test_the_same_again_alone_and_without_a_gradient_of_x_inp(calls):
    layer, x_inp = make(24, 128), torch.randn(3, 70, 128)
    found = [outcome(layer, x_inp) for _ in range(2)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    alone = outcome(layer, x_inp[:1])
    assert torch.equal(alone["phi"], found[0]["phi"][:1])
    layer.zero_grad()
    x_out = layer(x_inp)
    x_out.backward(upstream(x_out))
    assert all(torch.equal(p.grad, found[0][f"grad {name}"]) for name, p in layer.named_parameters())
    assert len(calls) == 4


def test_some_columns_of_phi(calls):
    layer, x_inp = make(24, 128), torch.randn(2, 70, 128)
    phi, some = layer.route(x_inp).phi, layer.route(x_inp, outputs=[3, 20]).phi
    assert torch.equal(some, phi[..., [3, 20]])
    assert len(calls) == 2


@pytest.mark.parametrize("other", ["mask", "length", "outputs", "features", "iterations", "memory", "few"])
def test_other_calls_go_another_way(other, calls, monkeypatch):
    sizes = {"n_inp": None, "n_out": 20 if other == "outputs" else 16, "d_inp": 128, "d_out": 8}
    if other == "features":
        sizes["d_inp"] = 96
    if other == "length":
        sizes["n_inp"] = 40
    layer = vr.VectorRouting(**sizes, n_iters=3 if other == "iterations" else 2, implementation="fused")
    if other == "memory":
        layer.tuning = Tuning(keep_bytes=1000)
    if other == "few":
        monkeypatch.setattr(half_inputs, "LEAST_BYTES", 2**26)
    x_inp = torch.randn(2, 40, sizes["d_inp"])
    mask = {"input_mask": torch.rand(2, 40) > 0.5} if other == "mask" else {}
    layer(x_inp, **mask).sum().backward()
    assert not calls


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore"
)  # PyTorch captures on another stream, and compiles with what it deprecates
@pytest.mark.parametrize("rounded", [False, True], ids=["tf32", "autocast"])
def test_captured_and_compiled(rounded, calls):
    layer, x_inp = make(16, 256), torch.randn(3, 200, 256, requires_grad=True)
    gradients = []
    with torch.autocast("cuda", torch.bfloat16, enabled=rounded, cache_enabled=False):
        captured = torch.cuda.make_graphed_callables(layer, (x_inp,))
        for each in (layer, captured, torch.compile(layer)):
            x_inp.grad = None
            each(x_inp).sum().backward()
            gradients.append(x_inp.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])
    assert calls
