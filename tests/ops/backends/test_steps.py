"""The small steps between two passes, in both implementations, against autograd in float64."""

import pytest
import torch
import torch.nn.functional as nnf
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vecroute as vr
from tests.helpers.problems import problem_of
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import twin, upstream
from vecroute.ops.backends.fused import norm as fused_norm
from vecroute.ops.common import cdiv, next_power_of_2
from vecroute.ops.plan.blocks import parts_of_samples
from vecroute.ops.problem import Grads, Problem

SIZES = [  # b, n_out, d_inp, d_out
    (1, 5, 17, 9),
    (3, 1, 1, 1),
    (2, 4, 1030, 3),  # features in more than one block
    (11, 3, 6, 300),
    (200, 2, 7, 5),  # samples in more than one part
]


@pytest.fixture(autouse=True)
def device():
    """A GPU if there is one. Otherwise Triton's interpreter runs the kernels."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield device


def make(implementation, b, n_out, d_inp, d_out, *, fixed=True, dtype=torch.float64) -> Problem:
    """Return a problem of b samples of 3 inputs, half of them masked, so that n_inp is not 1."""
    sizes = {"n_inp": 3 if fixed else None, "n_out": n_out, "d_inp": d_inp, "d_out": d_out}
    layer = with_noise(vr.VectorRouting(**sizes, dtype=dtype))
    mask = (torch.arange(3) < torch.arange(b)[:, None] % 3 + 1).expand(b, 3)  # [b, i]
    x_inp = torch.randn(b, 3, d_inp, dtype=dtype)
    p = problem_of(layer, x_inp, implementation, input_mask=mask)
    p.w = type(p.w)._make(None if w is None else w.detach() for w in p.w)
    return p


def leaves(p: Problem, *names: str) -> list[torch.Tensor]:
    return [getattr(p.w, name).clone().requires_grad_() for name in names]


def assert_equal(name, got, expected, digits=1e-11):
    torch.testing.assert_close(got, expected, rtol=digits, atol=digits, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("added", [False, True], ids=["new", "added to"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("implementation", ["chunked", "fused"])
def test_outputs_and_their_gradients(implementation, size, added, nan_filled_memory):
    p, (b, j, d, h) = make(implementation, *size), size
    total, s = torch.randn(b, j, d).double().requires_grad_(), torch.randn(b, j).double().requires_grad_()
    W_F1, W_F2, B_F2 = leaves(p, "W_F1", "W_F2", "B_F2")
    truth = (total / p.sqrt_n_inp[..., None] * W_F1) @ W_F2 + s[..., None] * B_F2  # [b, j, h]
    grad = torch.randn(b, j, h).double()
    truth.backward(grad)
    y = total.detach().clone()  # [b, j, d]
    assert_equal("x_out", p.steps.outputs(p, y, s.detach()), truth)
    assert torch.equal(y, total)
    before = {name: torch.randn(w.shape).double() for name, w in p.w._asdict().items() if w is not None}
    grads = Grads({name: before[name].clone() for name in ("W_F1", "W_F2", "B_F2")} if added else {})
    M = torch.empty(b, 2 * j, d, dtype=torch.float64)  # rows of the scores come after grad_y
    assert_equal("s", p.steps.outputs_backward(p, grad, y, s.detach(), grads, M[:, :j]), s.grad)
    assert_equal("y", M[:, :j], total.grad)
    assert M[:, j:].isnan().all()
    for name, w in (("W_F1", W_F1), ("W_F2", W_F2), ("B_F2", B_F2)):
        assert_equal(name, grads[name], w.grad + before[name] if added else w.grad)


@pytest.mark.parametrize("added", [False, True], ids=["new", "added to"])
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("implementation", ["chunked", "fused"])
def test_predictions_and_their_gradients(implementation, size, fixed, added, nan_filled_memory):
    p, (b, j, d, h) = make(implementation, *size, fixed=fixed), size
    x_out = torch.randn(b, j, h).double().requires_grad_()
    W_G1, W_G2, B_G2 = leaves(p, "W_G1", "W_G2", "B_G2")
    v = nnf.layer_norm(x_out, (h,)) if h > 1 else x_out  # [b, j, h]
    x_hat = W_G2 * (v @ W_G1) + B_G2  # [b, j, d]
    grad = torch.randn(b, j + 1, d).double()[:, :j]  # other rows follow in memory
    x_hat.backward(grad)
    g = p.steps.predicted(p, x_out.detach())  # [b, j, d]
    M = torch.empty(b, 2 * j, d, dtype=torch.float64)
    p.steps.scores_matrix(p, g, M[:, j:])
    assert_equal("scores", M[:, j:], x_hat.detach() if fixed else x_hat.detach() * p.w.W_S.mT)
    assert M[:, :j].isnan().all()
    before = {name: torch.randn(w.shape).double() for name, w in p.w._asdict().items() if w is not None}
    grads = Grads({name: before[name].clone() for name in ("W_G1", "W_G2", "B_G2")} if added else {})
    assert_equal("x_out", p.steps.predictions_backward(p, grad, x_out.detach(), g, grads), x_out.grad)
    for name, w in (("W_G1", W_G1), ("W_G2", W_G2), ("B_G2", B_G2)):
        assert_equal(name, grads[name], w.grad + before[name] if added else w.grad)


def test_parts_of_samples():
    """There are enough parts to keep a GPU busy, and no more than a grid may have."""
    assert parts_of_samples(200, 14) == (3, 67)
    assert parts_of_samples(32, 14) == (1, 32)
    assert parts_of_samples(10_000, 2**18) == (1, 10_000)
    assert parts_of_samples(10**7, 1) == (1024, 9766)


@pytest.mark.parametrize("size", [(1, 5, 9), (2, 7, 300), (1, 3, 2500), (3, 1, 2), (2, 3, 1)], ids=str)
def test_vectors_are_normalised_and_rounded_at_once(size, nan_filled_memory):
    """The interpreter cuts digits off instead of rounding."""
    x = torch.randn(size) * 3 + 1
    grad_v, in_float64 = torch.randn(size).bfloat16(), x.double().requires_grad_()
    exact = nnf.layer_norm(in_float64, size[-1:]) if size[-1] > 1 else in_float64 * 1  # [b, j, h]
    exact.backward(grad_v.double())
    for dtype, digits in ((torch.bfloat16, 2**-7), (torch.float32, 1e-5)):
        v, grad = fused_norm.normalized_backward(grad_v.to(dtype), x)
        for each in (v, fused_norm.normalized(x, dtype)):
            assert each.dtype == dtype
            torch.testing.assert_close(each.double(), exact.detach(), rtol=digits, atol=1e-6)
        torch.testing.assert_close(grad, in_float64.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("b", [1, 3])
def test_rounded_operands(b, monkeypatch, nan_filled_memory):
    """Operands of products and intermediate products are rounded to bfloat16, and nothing else is."""
    p = make("fused", b, 5, 40, 24, dtype=torch.float32)
    y, s, x_out, grad = (torch.randn(b, 5, n) for n in (40, 1, 24, 24))
    grad_x_hat, M = torch.randn(b, 5, 40), torch.empty(b, 5, 40)

    def results() -> dict[str, torch.Tensor]:
        g, grads = p.steps.predicted(p, x_out), Grads()
        grad_s = p.steps.outputs_backward(p, grad, y, s[..., 0], grads, M)
        grad_x_out = p.steps.predictions_backward(p, grad_x_hat, x_out, g, grads)
        found = {"x_out": p.steps.outputs(p, y, s[..., 0].contiguous()), "g": g, "grad_y": M.clone()}
        return {**grads, **found, "grad_s": grad_s, "grad_x_out": grad_x_out}

    exact = results()
    monkeypatch.setitem(vars(p.plan), "step_dtype", torch.bfloat16)
    for name, value in results().items():
        error = (value - exact[name]).norm() / exact[name].norm()
        if name in ("B_F2", "B_G2", "grad_s"):
            assert error == 0, name
        else:
            assert 1e-4 < error < 1e-2, f"{name}: {error}"


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("implementation", ["chunked", "fused"])
def test_autocast(implementation, fixed, device, nan_filled_memory):
    """Operands are rounded to bfloat16. The matrix of a pass is rounded when it is written."""
    sizes = {"n_inp": 60 if fixed else None, "n_out": 12, "d_inp": 40, "d_out": 24}
    layer = with_chunks(with_noise(vr.VectorRouting(**sizes, implementation=implementation)))
    results = []
    for each, dtype in ((layer, torch.float32), (twin(layer, torch.float64), torch.float64)):
        x_inp = torch.linspace(-2, 2, 3 * 60 * 40, dtype=dtype).cos().mul(3).view(3, 60, 40).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            x_out = each(x_inp)
        x_out.backward(upstream(x_out))
        results.append([x_out, x_inp.grad, *(w.grad for w in each.parameters())])
    names = ["x_out", "x_inp", *(name for name, _ in layer.named_parameters())]
    for name, got, truth in zip(names, *results, strict=True):
        if truth.numel() > 1:
            assert (got - truth).norm() < 0.1 * truth.norm(), name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 2**40), st.integers(1, 2**20))
def test_sizes_of_blocks(a, b):
    assert next_power_of_2(a) == triton.next_power_of_2(a)
    assert cdiv(a, b) == triton.cdiv(a, b)
