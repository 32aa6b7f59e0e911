"""The gradient of x_inp from pairs in float16, if products are tf32."""

import pytest
import torch

import vecroute as vr
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import assert_as_good, assert_layer_as_good, outcome, twin
from vecroute.ops.paths import long

pytestmark = pytest.mark.usefixtures("tf32", "device")
CASES = [  # n_iters, n_inp, n_out, d_inp, rows of a chunk
    (2, 90, 20, 256, 0),
    (3, 70, 20, 256, 32),
    (2, 40, 100, 512, 0),
    (2, 33, 7, 140, 16),  # less than one block of rows, between one and two blocks of columns
    (2, 20, 127, 384, 0),  # waiting pairs fill the first block of columns
]


@pytest.fixture
def calls(monkeypatch, limits):
    """Use the kernel for layers of any length. The list has an entry for each call."""
    calls, call = [], long.input_gradient
    limits(HALVES_ROWS=1)
    monkeypatch.setattr(long, "input_gradient", lambda *a: (calls.append(1), call(*a)))
    return calls


def make(n_iters: int, n_inp: int, n_out: int, d_inp: int, rows: int = 0) -> vr.VectorRouting:
    sizes = {"n_inp": n_inp, "n_out": n_out, "d_inp": d_inp, "d_out": 9, "n_iters": n_iters}
    return with_chunks(with_noise(vr.VectorRouting(**sizes, implementation="fused")), rows)


def row_error(got: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the error of each row, relative to its length."""
    return (got.double() - truth).norm(dim=-1) / truth.norm(dim=-1).clamp(min=1e-300)


def assert_as_tf32(layer: vr.VectorRouting, x_inp: torch.Tensor, **masks: torch.Tensor) -> None:
    """On a GPU, use the tolerance rule. The interpreter rounds only in this kernel, and no more than tf32."""
    if x_inp.is_cuda:
        assert_layer_as_good(layer, x_inp, **masks)
        return
    got, truth = outcome(layer, x_inp, **masks), outcome(twin(layer, torch.float64), x_inp.double(), **masks)
    reference = outcome(twin(layer, torch.float32), x_inp, **masks)
    for name in truth.keys() - {"grad x_inp"}:
        assert_as_good(name, got[name], reference[name], truth[name])
    assert row_error(got["grad x_inp"], truth["grad x_inp"]).max() < 2**-10


@pytest.mark.parametrize("masked", [False, True], ids=["all inputs", "masked"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_have_the_digits_of_tf32(case, masked, calls, nan_filled_memory):
    layer = make(*case)
    x_inp = torch.randn(case[1], case[3])
    assert_as_tf32(layer, x_inp, **({"input_mask": torch.rand(case[1]) > 0.3} if masked else {}))
    assert calls


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_gradients_of_any_size(size, calls):
    """Gradients exceed the range of float16, and outputs have gradients of very different sizes."""
    layer, x_inp = make(2, 50, 10, 128), torch.randn(50, 128)
    upstream = torch.randn(10, 9) * size * 10.0 ** torch.arange(-5, 5)[:, None]
    grads = []
    for each, x in ((layer, x_inp), (twin(layer, torch.float64), x_inp.double())):
        x = x.requires_grad_()
        each(x).backward(upstream.to(x))
        grads.append(x.grad)
    assert row_error(*grads).max() < (2**-8 if x_inp.is_cuda else 2**-10)  # on a GPU all products are tf32
    assert calls


def test_features_with_small_parameters(calls):
    """The gradient of such a feature keeps its digits, even if others in its row are much larger."""
    layer, x_inp = make(2, 60, 12, 256), torch.randn(60, 256)
    small = slice(100, 140)
    with torch.no_grad():
        for columns in (layer.W_F1, layer.W_G2, layer.B_G2, layer.W_A):
            columns[:, small] *= 1e-6
    upstream, grads = torch.randn(12, 9), []
    for each, x in ((layer, x_inp), (twin(layer, torch.float64), x_inp.double())):
        x = x.requires_grad_()
        each(x).backward(upstream.to(x))
        grads.append(x.grad[:, small].mT)  # [d, i]
    assert row_error(*grads).max() < 2**-9
    assert calls


def test_nothing_but_zeros(calls, nan_filled_memory):
    x_inp = torch.randn(20, 128, requires_grad=True)
    layer = make(2, 20, 5, 128)
    layer(x_inp).backward(torch.zeros(5, 9))
    assert not x_inp.grad.any()
    assert not layer.W_A.grad.any()
    assert calls


@pytest.mark.parametrize(
    ("n_iters", "n_out", "d_inp"), [(2, 129, 512), (2, 5, 130), (2, 5, 64), (3, 5, 128)], ids=str
)
def test_other_shapes_go_another_way(n_iters, n_out, d_inp, calls):
    """Pairs do not fit, rows have an odd size, columns are less than a block, or pairs are not aligned."""
    assert_layer_as_good(make(n_iters, 20, n_out, d_inp), torch.randn(20, d_inp))
    assert not calls


def test_other_memory_goes_another_way(calls):
    x_inp = torch.randn(20 * 128 + 1)[1:].view(20, 128).requires_grad_()
    make(2, 20, 5, 128)(x_inp).sum().backward()
    make(2, 20, 5, 128)(torch.randn(2, 20, 128, requires_grad=True)).sum().backward()
    make(2, 20, 5, 128)(torch.randn(1, 128, requires_grad=True).expand(20, -1)).sum().backward()
    assert not calls


def test_few_rows_go_another_way(calls, limits):
    """Converting M to halves takes as long as all the rest of a small layer."""
    limits(HALVES_ROWS=51)
    assert_as_tf32(make(2, 50, 10, 128), torch.randn(50, 128))
    assert not calls
    assert_as_tf32(make(2, 51, 10, 128), torch.randn(51, 128))
    assert calls
