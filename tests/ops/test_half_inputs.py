"""x_inp in float16 for all passes of a call, where tf32 is asked for."""

import pytest
import torch

import vecroute as vr
from tests.helpers.samples import with_noise
from tests.helpers.tolerance import assert_as_good, outcome, twin, upstream
from vecroute.ops import Tuning, half_inputs, half_passes

pytestmark = pytest.mark.usefixtures("tf32", "device")
CASES = [  # b, n_inp, n_out, d_inp
    (2, 70, 8, 128),
    (1, 64, 16, 128),
    (3, 130, 40, 384),
    (2, 5, 64, 128),
    (1, 200, 56, 256),
    (2, 130, 16, 640),  # five parts of M: each place has one more than once
]


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


def make(n_out: int, d_inp: int) -> vr.VectorRouting:
    sizes = {"n_inp": None, "n_out": n_out, "d_inp": d_inp, "d_out": 24}
    return with_noise(vr.VectorRouting(**sizes, implementation="fused"))


def relative_errors(layer: vr.VectorRouting, x_inp: torch.Tensor) -> dict[str, float]:
    """Of x_out, phi and gradients, by their lengths; that of B_A, one number, by W_A."""
    got, truth = outcome(layer, x_inp), outcome(twin(layer, torch.float64), x_inp.double())
    of_B_A = got["grad B_A"].double() - truth.pop("grad B_A")
    assert of_B_A.abs() < 2**-6 * truth["grad W_A"].norm()
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


@pytest.mark.parametrize("size", [1e-15, 1e15, 1e31])
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_one_sample_does_not_spoil_another(calls):
    layer, x_inp = make(16, 128), torch.randn(3, 70, 128)
    good = outcome(layer, x_inp)
    for value in (float("nan"), float("inf"), 3e38):
        x_inp[1, 5, 7] = value
        found = outcome(layer, x_inp)
        for name in ("x_out", "phi", "grad x_inp"):
            assert torch.equal(found[name][::2], good[name][::2]), name
    assert len(calls) == 4


def test_backward_again(calls):
    layer, x_inp = make(16, 128), torch.randn(2, 70, 128, requires_grad=True)
    total = layer(x_inp).square().sum()
    first, second = (torch.autograd.grad(total, x_inp, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert calls


def test_no_sums_in_float16(calls, monkeypatch):
    """Whatever PyTorch is allowed, products of float16 with units would leave its range."""
    matmul, seen, multiply = torch.backends.cuda.matmul, [], half_passes.product

    def watched(*args):
        seen.append(matmul.allow_fp16_accumulation)
        multiply(*args)

    monkeypatch.setattr(half_passes, "product", watched)
    before, matmul.allow_fp16_accumulation = matmul.allow_fp16_accumulation, True
    try:
        make(16, 128)(torch.randn(2, 9, 128, requires_grad=True)).sum().backward()
        assert matmul.allow_fp16_accumulation
    finally:
        matmul.allow_fp16_accumulation = before
    assert seen == [False] * 4


def test_opcheck(calls):
    """What is kept has the dtypes and shapes that compilers are promised."""
    weights = [w for w in make(8, 128).weights() if w is not None]
    x_inp, sqrt_n_inp = torch.randn(2, 9, 128, requires_grad=True), torch.full((2, 1), 3.0)
    options = None, 1 / 8, torch.float32, list(Tuning()), "fused", "", 2, False, None
    arguments = x_inp, weights, None, sqrt_n_inp, *options
    checks = "test_schema", "test_faketensor"
    result = torch.library.opcheck(torch.ops.vecroute.loop.default, arguments, test_utils=checks)
    assert set(result.values()) == {"SUCCESS"}
    assert calls


OTHERS = {  # calls that go another way: what is other of the layer, of x_inp and of half_inputs
    "a fixed length": {"n_inp": 40},
    "outputs": {"n_out": 20},
    "many outputs": {"n_out": 72},
    "features": {"d_inp": 192},
    "iterations": {"n_iters": 3},
    "not contiguous": {"strided": True},
    "little to keep": {"keep_bytes": 2 * 40 * 40 * 4 - 1},
    "a large copy": {"keep_bytes": 2 * 40 * 128 * 2 // 4 - 1},
    "little": {"LEAST_BYTES": 2 * 40 * 128 * 4 + 1},
    "few programs": {"LEAST_PROGRAMS": 3},
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_calls_go_another_way(other, calls, monkeypatch):
    changes = dict(OTHERS[other])
    for name in ("LEAST_BYTES", "LEAST_PROGRAMS"):
        monkeypatch.setattr(half_inputs, name, changes.pop(name, 1))
    strided, keep_bytes = changes.pop("strided", False), changes.pop("keep_bytes", 2**26)
    sizes = {"n_inp": None, "n_out": 16, "d_inp": 128, "d_out": 8, **changes}
    layer = vr.VectorRouting(**sizes, implementation="fused")
    layer.tuning = Tuning(keep_bytes=keep_bytes)
    x_inp = torch.randn(2, 40, sizes["d_inp"] * (2 if strided else 1))
    layer(x_inp[..., : sizes["d_inp"]]).sum().backward()
    assert not calls


def test_masked_and_packed_calls_go_another_way(calls):
    layer, x_inp = make(16, 128), torch.randn(2, 40, 128)
    layer(x_inp, torch.rand(2, 40) > 0.5)
    layer(x_inp.flatten(0, 1), cu_seqlens=torch.tensor([0, 40, 80]))
    assert not calls
    layer(x_inp)
    assert calls


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
