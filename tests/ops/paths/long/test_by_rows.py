"""The kernel that computes the gradients of x_inp and W_A by rows, only on Hopper GPUs."""

import re

import pytest
import torch

import vecroute as vr
from tests.helpers.constants import named_constants
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import assert_layer_as_good
from vecroute.ops.paths.long import by_rows
from vecroute.ops.plan import limits
from vecroute.ops.plan.hopper import by_rows_bytes, by_rows_stage_bytes

GPU = pytest.mark.gpu
SIZES = [  # n_inp, d_inp, n_out, n_iters
    (1000, 1024, 100, 2),
    (193, 512, 64, 2),  # one row more than a block has
    (40, 128, 20, 3),
    (777, 1024, 52, 3),
    (129, 512, 128, 2),
]


@pytest.fixture
def calls(monkeypatch, tf32, limits):
    """Use the kernel for layers of any length, on a GPU in tf32. The list has an entry for each call."""
    if not torch.cuda.is_available():
        pytest.fail("needs a GPU")
    calls, multiply = [], by_rows.input_gradient
    limits(HALVES_ROWS=1)
    monkeypatch.setattr(by_rows, "input_gradient", lambda *a: (calls.append(1), multiply(*a))[1])
    with torch.device("cuda"):
        yield calls


def make(n_inp: int, d_inp: int, n_out: int, n_iters: int) -> vr.VectorRouting:
    sizes = {"n_inp": n_inp, "n_out": n_out, "d_inp": d_inp, "d_out": 64, "n_iters": n_iters}
    return with_chunks(with_noise(vr.VectorRouting(**sizes, implementation="fused")))


@pytest.mark.parametrize(("waiting", "n_out"), [(1, 100), (2, 52), (1, 64)])
def test_shared_memory_is_as_large_as_the_kernel_divides(waiting, n_out, device):
    n_pairs = by_rows.n_pairs(waiting, n_out)
    columns, stages = limits.BY_ROWS_COLUMNS, limits.BY_ROWS_STAGES
    given = {"WAITING": waiting, "N_OUT": n_out, "STAGES": stages, "COLUMNS": columns}
    constants = named_constants("by_rows.cu", given)
    assert by_rows_bytes(n_pairs) == constants["BARRIERS"] + 2 * stages * 8
    assert by_rows_stage_bytes(n_pairs) == constants["STAGE"]
    M, scales = torch.zeros(constants["N_PAIRS"], columns), torch.ones(constants["N_PAIRS"], 1)
    assert by_rows.by_columns(M, scales).numel() * 2 == constants["STAGE"]
    for name in ("GROUPS", "ROWS"):
        assert constants[name] == getattr(by_rows, name)


def test_source_has_the_sizes():
    source = by_rows.source(1, 100)
    assert "constexpr int WAITING = 1, N_OUT = 100;" in source
    assert re.search(r"m64n64k16.f32.f16.f16 {.*%31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;", source)


@pytest.mark.parametrize("k", [300, 320, 60])
def test_columns_are_where_the_kernel_looks_for_them(k, device, nan_filled_memory):
    """Compare with loops. A thread has 8 of 32 rows, four at a time, two of these in each half of 16."""
    M = (2 * torch.rand(k, 128) - 1).half().float()
    weights = 2.0 ** torch.randint(-5, 5, (k, 1))
    arranged = by_rows.by_columns(M * weights, weights)  # [2, k / 64, 64, 8, 8]
    expected = (M * 2**14).half()
    thread, step, half = torch.meshgrid(*(torch.arange(n) for n in (4, 2, 2)), indexing="ij")
    for column in range(128):
        n = column % 64
        place = n // 16 * 16 + n % 4 // 2 * 8 + n % 16 // 4 * 2 + n % 2  # in the order of the tensor cores
        found = arranged[column // 64, :, place, torch.arange(8) ^ place % 8].flatten()  # [k]
        for block in range(0, k - 31, 32):
            at = block + 16 * step + 8 * half + 2 * thread  # [4, 2, 2] the places of two neighbours
            two = torch.stack((found[at], found[at + 1]), -1)  # [4, 2, 2, 2]
            assert torch.equal(two.flatten(), expected[block : block + 32, column])
    assert arranged.ne(0).sum() == expected.ne(0).sum()


@GPU
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [0, 64])
def test_gradients_are_as_good_as_tf32(sizes, rows, calls, nan_filled_memory):
    layer = make(*sizes)
    with_chunks(layer, rows)
    assert_layer_as_good(layer, torch.randn(*sizes[:2]))
    assert len(calls) == (1 if not rows else -(-sizes[0] // rows))


@GPU
def test_rows_have_units_of_their_own(calls):
    """The gradients of rows differ by more than the range of float16."""
    layer = make(400, 256, 40, 2)
    with torch.no_grad():  # once transformers has loaded a model, `with torch.device` misses linspace
        layer.beta_use *= 10.0 ** torch.linspace(-6, 6, 400, device="cuda")[:, None]
        layer.beta_ign *= 10.0 ** torch.linspace(6, -6, 400, device="cuda")[:, None]
    assert_layer_as_good(layer, torch.randn(400, 256))
    assert calls


@GPU
def test_the_same_again_and_rows_apart(calls):
    layer, x_inp = make(5000, 1024, 100, 2), torch.randn(5000, 1100)[:, :1024].requires_grad_()
    grads = []
    for _ in range(2):
        layer.zero_grad()
        layer(x_inp).square().sum().backward()
        grads.append((x_inp.grad, layer.W_A.grad))
        x_inp.grad = None
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])
    assert len(calls) == 2


@GPU
@pytest.mark.parametrize(("d_inp", "n_out"), [(160, 20), (256, 22)])
def test_other_sizes_go_another_way(d_inp, n_out, calls):
    assert_layer_as_good(make(90, d_inp, n_out, 2), torch.randn(90, d_inp))
    assert not calls


@GPU
def test_without_a_compiler_it_goes_another_way(calls, no_compiler):
    with pytest.warns(UserWarning, match="NVRTC"):
        assert_layer_as_good(make(90, 256, 20, 2), torch.randn(90, 256))
    assert not calls


@GPU
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # PyTorch captures on another stream
@pytest.mark.parametrize("rounded", [False, True], ids=["tf32", "autocast"])
def test_captured(rounded, calls):
    layer, x_inp = make(700, 256, 20, 2), torch.randn(700, 256, requires_grad=True)
    gradients = []
    with torch.autocast("cuda", torch.bfloat16, enabled=rounded, cache_enabled=False):
        captured = torch.cuda.make_graphed_callables(layer, (x_inp,))
        for each in (layer, captured, captured):
            x_inp.grad = None
            each(x_inp).sum().backward()
            gradients.append(x_inp.grad.clone())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[1], gradients[2])
    assert calls
