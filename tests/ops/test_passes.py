"""Where the passes of ``fused`` put their results: kept arrays, waiting pairs, sums."""

import pytest
import torch

import vecroute as vr
from tests.helpers.problems import problem_of
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import assert_layer_as_good
from vecroute.ops import Tuning, gradient, matmul, passes
from vecroute.ops.backends.chunked import pairs as chunked
from vecroute.ops.backends.chunked import steps as chunked_steps
from vecroute.ops.backends.fused import pairs as fused
from vecroute.ops.backends.fused import steps as fused_steps
from vecroute.ops.backends.fused import sums as fused_sums
from vecroute.ops.chunks import Chunk
from vecroute.ops.columns import Columns
from vecroute.ops.problem import Grads

pytestmark = pytest.mark.usefixtures("device")


def make(n_inp=None, n_out=4, d_inp=36, d_out=7, n_iters=2, dtype=torch.float32) -> vr.VectorRouting:
    sizes = {"n_inp": n_inp, "n_out": n_out, "d_inp": d_inp, "d_out": d_out}
    return with_noise(vr.VectorRouting(**sizes, n_iters=n_iters, implementation="fused", dtype=dtype))


@pytest.mark.parametrize("rows", [0, 7], ids=["whole samples", "parts"])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "in grad_x"])
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
def test_wherever_pairs_wait(fixed, apart, rows, limits, nan_filled_memory):
    if not apart:
        limits(APART_BYTES=0)
    layer = make(19 if fixed else None, n_iters=3)
    with_chunks(layer, rows)
    assert_layer_as_good(layer, torch.randn(3, 19, 36))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pairs_of_half_precision_wait_apart(dtype, nan_filled_memory):
    """They have the dtype of sums, which differs from the dtype of grad_x."""
    layer = with_chunks(make(n_out=8, d_inp=48, dtype=dtype))
    x_inp = torch.randn(3, 40, 48).to(dtype)
    assert gradient.InputGradient(problem_of(layer, x_inp), torch.empty_like(x_inp)).waits
    assert_layer_as_good(layer, x_inp)


def test_pairs_wait_apart_within_the_budget(limits):
    """2 x 5 rows and M of 2 samples need 8 stored pairs, 4 of phi, 8 of c and one of a_inp, aligned."""
    layer, x_inp = make(), torch.randn(2, 5, 36)
    n_bytes = 4 * (2 * 5 + 2 * 36) * 24
    limits(APART_BYTES=n_bytes)
    assert gradient.InputGradient(problem_of(layer, x_inp), torch.empty_like(x_inp)).apart
    assert not gradient.InputGradient(problem_of(layer, x_inp, "chunked"), torch.empty_like(x_inp)).apart
    frugal = problem_of(layer, x_inp, tuning=Tuning(keep_bytes=0))
    assert not gradient.InputGradient(frugal, torch.empty_like(x_inp)).apart
    limits(APART_BYTES=n_bytes - 1)
    into = gradient.InputGradient(problem_of(layer, x_inp), torch.empty_like(x_inp))
    assert into.waits
    assert into.place is into.grad_x


def test_products_that_are_kept_are_written_once(nan_filled_memory):
    """The first product fills the stored values: c, a_inp and zeros."""
    layer, x_inp = make(), torch.randn(3, 11, 36)
    p = problem_of(layer, x_inp)
    kept = passes.new_kept(p)  # [b, i, 16]
    assert kept.shape == (3, 11, 16)
    columns = Columns(p, None, kept, first=True, forward=True)
    samples, rows = slice(1, 3), slice(0, 11)
    pairs = columns.kept_whole(Chunk(samples, samples, rows), torch.float32)  # [2, i, 16]
    assert pairs.data_ptr() == kept[1].data_ptr()
    assert columns.kept_whole(Chunk(samples, samples, slice(0, 10)), torch.float32) is None
    f, y, s = kept.new_empty(3, 11), kept.new_empty(3, 4, 36), kept.new_empty(3, 4)
    passes.forward_pass(p, None, f, kept, y, s, None, None)
    w = layer.weights()
    c_sum, c_ign = x_inp @ (w.W_use + w.W_ign) + (w.B_use + w.B_ign), x_inp @ w.W_ign + w.B_ign  # [b, i, j]
    expected = torch.cat((c_sum, c_ign, x_inp @ w.W_A.mT), -1)  # [b, i, 9]
    torch.testing.assert_close(kept[..., :9], expected)
    assert not kept[..., 9:].any()


@pytest.mark.parametrize("n", [3, 8, 17])
@pytest.mark.parametrize("n_inp", [1, 5, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_over_inputs(dtype, n_inp, n, limits):
    """Sum some columns of longer rows, and store or add the result."""
    limits(LEAST_SUMS=1)
    values = torch.randn(3, n_inp, 24, dtype=dtype)[..., 4 : 4 + n].mT  # [b, k, i]
    out, expected = torch.full((3, n), torch.nan, dtype=dtype), values.double().sum(-1)  # [b, k] each
    allowed = 2 * torch.finfo(dtype).eps * values.double().abs().sum(-1)  # [b, k]
    add = fused_sums.summer(out, values)
    add(values, True)
    assert ((out - expected).abs() <= allowed).all()
    add(values, False)
    assert ((out - 2 * expected).abs() <= 2 * allowed).all()


def test_few_sums_are_left_to_pytorch(monkeypatch):
    """PyTorch also sums values that are contiguous in i, and values of one long sample."""
    asked = []
    monkeypatch.setattr(matmul, "summer", lambda out, n_rows: asked.append(n_rows))
    fused_sums.summer(torch.empty(2, 255), torch.empty(2, 3, 255).mT)
    fused_sums.summer(torch.empty(2, 256), torch.empty(2, 256, 5))
    assert fused_sums.summer(torch.empty(2, 256), torch.empty(2, 7, 256).mT) is not None
    fused_sums.summer(torch.empty(1, 512), torch.empty(1, 1, 512).expand(1, 2**13, 512).mT)
    assert fused_sums.summer(torch.empty(1, 512), torch.empty(1, 7, 512).mT) is not None
    assert asked == [3, 5, 2**13]


@pytest.mark.parametrize("n_out", [3, 40])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rows_that_samples_share(dtype, flat, n_out, nan_filled_memory):
    """Test rows for c alone, and rows for c, a_inp and zeros."""
    layer = make(n_out=n_out, d_inp=37, dtype=dtype)
    p = problem_of(layer, torch.randn(2, 5, 37).to(dtype))
    n_c = n_out if flat else 2 * n_out
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}  # one adds in bfloat16
    for n in (n_c, n_c + 1, n_c + 6):
        for found, expected in zip(
            fused.shared_rows(p, flat, n), chunked.shared_rows(p, flat, n), strict=True
        ):
            assert len(found) == n
            torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("b", [3, 40])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_gradient_of_rows_that_samples_share(flat, first, b, nan_filled_memory):
    layer = make(n_out=35, d_inp=37)
    p = problem_of(layer, torch.randn(b, 5, 37))
    p.sqrt_n_inp += torch.rand(b, 1)
    n = (35 if flat else 70) + 2 * first
    grad, sums, found, expected = torch.randn(n, 37), torch.randn(b, n + 4)[:, 4:], Grads(), Grads()
    fused.shared_rows_backward(p, grad, sums, flat, first, found)
    chunked.shared_rows_backward(p, grad, sums, flat, first, expected)
    assert len(found) == (6 if first else 4)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [5, 61])
def test_matrices_with_rows_that_samples_share(n, dtype, nan_filled_memory):
    """The matrix is contiguous and aligned in q, the dimension that products with pairs sum over."""
    own = torch.randn(3, n + 4, 37).to(dtype)[:, :n]  # [b, k, d]
    shared = torch.randn(33, 37).bfloat16().float()  # [q, d], already rounded
    found = fused.stacked(own, shared)
    assert torch.equal(found, chunked.stacked(own, shared))
    assert found.stride(1) == 1
    assert found.stride(2) % 8 == 0
    assert fused.stacked(own, None) is own


def test_gradient_of_the_matrix_of_scores(nan_filled_memory):
    layer = make(n_out=5, d_inp=37)
    p = problem_of(layer, torch.randn(3, 6, 37))
    grad, sums, g = torch.randn(3, 9, 37)[:, :5], torch.randn(3, 9)[:, :5], torch.randn(3, 5, 37)
    found, expected = {}, {}
    for steps, values in ((fused_steps, found), (chunked_steps, expected)):
        grads = Grads()
        for _ in range(2):  # stored, then added
            values["x_hat"] = steps.scores_matrix_backward(p, grad.clone(), sums, g, grads)  # [b, j, d]
        values |= grads
    assert found.keys() == expected.keys() == {"x_hat", "W_S", "B_S"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda m, name=name: f"{name}: {m}")
