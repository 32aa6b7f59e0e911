"""x_inp in float16 for all passes of a call, where tf32 is asked for."""

import pytest
import torch
from samples import with_noise
from tolerance import assert_layer_as_good, outcome, twin

import vecroute as vr
from vecroute.ops import half_inputs, input_gradient

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
    """Of x_out, phi and every gradient, by their lengths; not of single numbers, sums that may all but cancel."""
    got, truth = outcome(layer, x_inp), outcome(twin(layer, torch.float64), x_inp.double())
    return {
        name: float((got[name].double() - t).norm() / t.norm().clamp(min=1e-300))
        for name, t in truth.items()
        if t.numel() > 1
    }


def assert_as_tf32(layer: vr.VectorRouting, x_inp: torch.Tensor) -> None:
    """By the one rule on a GPU; the interpreter multiplies exactly, so that float16 alone rounds there."""
    if x_inp.is_cuda:
        assert_layer_as_good(layer, x_inp)
        return
    errors = relative_errors(layer, x_inp)
    assert max(errors.values()) < 2**-9, errors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_have_the_digits_of_tf32(case, calls, nan_filled_memory):
    b, i, j, d = case
    assert_as_tf32(make(j, d), torch.randn(b, i, d))
    assert calls
