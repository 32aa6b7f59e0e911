"""Iterations that read x_inp once, in clusters of multiprocessors, only on Hopper GPUs."""

import pytest
import torch
from torch.utils import cpp_extension

import vecroute as vr
from tests.helpers.constants import named_constants
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import assert_as_good, twin
from vecroute.ops.paths import long
from vecroute.ops.paths.long import clusters, hopper
from vecroute.ops.plan.hopper import cluster_bytes
from vecroute.ops.plan.limits import CLUSTER_D

GPU = pytest.mark.gpu
CASES = [  # n_inp, n_out, d_inp, n_iters
    (1000, 100, 1024, 2),
    (64, 100, 1024, 2),
    (17, 32, 512, 3),  # fewer rows than a cluster handles at a time
    (3000, 100, 512, 3),
    (9000, 64, 2048, 2),
    (20011, 64, 1024, 3),
    (20011, 104, 1024, 2),
]


@pytest.fixture
def calls(monkeypatch, tf32, limits):
    """Use clusters for layers of any length, on a GPU in tf32. The list has an entry per iteration."""
    if not torch.cuda.is_available():
        pytest.fail("needs a GPU")
    calls, iterate = [], clusters.iterate
    limits(CLUSTER_ROWS=1)
    monkeypatch.setattr(long, "iterate", lambda *a: (calls.append(1), iterate(*a))[1])
    with torch.device("cuda"):
        yield calls


def make(n_inp: int, n_out: int, d_inp: int, n_iters: int = 2) -> vr.VectorRouting:
    sizes = {"n_inp": n_inp, "n_out": n_out, "d_inp": d_inp, "d_out": 64, "n_iters": n_iters}
    return with_chunks(with_noise(vr.VectorRouting(**sizes, implementation="fused")))


def assert_x_out_as_good(layer: vr.VectorRouting, x_inp: torch.Tensor) -> None:
    with torch.no_grad():
        truth = twin(layer, torch.float64)(x_inp.double())  # [j, h]
        assert_as_good("x_out", layer(x_inp), twin(layer, torch.float32)(x_inp), truth)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("c", "n_out"), [(2, 100), (4, 100), (4, 32), (8, 64)])
def test_shared_memory_is_as_large_as_the_kernel_divides(c, n_out, first):
    tiles = -(-n_out // 8)
    given = {"C": c, "NT": tiles, "FIRST": int(first), "TILES": -(-tiles // clusters.scorers(c))}
    constants = named_constants("clusters.cu", given)
    assert cluster_bytes(c, n_out, first) == constants["BARRIERS"] + 2 * 8
    assert (constants["D"], constants["THREADS"]) == (CLUSTER_D, clusters.THREADS)
    places = [name for name in ("X16", "PHI", "X_HAT") if not (first and name == "X_HAT")]
    assert all(constants[name] % 1024 == 0 for name in places)  # places that the tensor cores read


def test_source_has_the_sizes():
    source = clusters.source(4, 100, first=False)
    assert "constexpr int C = 4, NT = 13, FIRST = 0;\nconstexpr int SCORERS = 2, TILES = 7;" in source
    assert "m64n104k16" in source
    assert "m64n56k16" in source
    assert source.index("INLINE void sum_mma") < source.index("struct Block")


def test_no_toolkit_is_needed(monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(OSError, match="CUDA_HOME"):
        cpp_extension.include_paths("cuda")
    with hopper.without_headers():
        cpp_extension.include_paths("cuda")
    assert cpp_extension.CUDA_HOME is None


def test_a_cpu_goes_another_way(monkeypatch, tf32, limits):
    limits(CLUSTER_ROWS=1)
    monkeypatch.setattr(long, "iterate", None)
    layer = make(20, 32, 512)
    if torch.cuda.is_available():  # then no interpreter can run the kernel on the CPU
        layer.implementation = "chunked"
    assert layer(torch.randn(20, 512)).isfinite().all()


@GPU
@pytest.mark.parametrize("case", CASES, ids=str)
def test_x_out_is_as_good_as_tf32(case, calls, nan_filled_memory):
    n_inp, _, d_inp, n_iters = case
    assert_x_out_as_good(make(*case), torch.randn(n_inp, d_inp))
    assert len(calls) == n_iters


@GPU
def test_x_out_without_a_toolkit(calls, monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    clusters.kernel.cache_clear()
    assert_x_out_as_good(make(100, 40, 512), torch.randn(100, 512))
    assert calls


@GPU
def test_rows_have_units_of_their_own(calls):
    """Rows, and coefficients of outputs, differ by more than the range of float16."""
    layer = make(3000, 40, 1024)
    with torch.no_grad():  # once transformers has loaded a model, `with torch.device` misses linspace
        layer.beta_use *= 10.0 ** torch.linspace(-3, 3, 40, device="cuda")
        layer.beta_ign *= 10.0 ** torch.linspace(-3, 3, 40, device="cuda")
    for size in (1e-12, 1.0, 1e12):
        x_inp = (
            torch.randn(3000, 1024)
            * 10.0 ** torch.linspace(-4, 4, 3000, device="cuda")[torch.randperm(3000), None]
            * size
        )
        assert_x_out_as_good(layer, x_inp)
    assert calls


@GPU
@pytest.mark.parametrize("bias", [-300.0, -60.0, 60.0])
def test_scores_that_say_nothing(bias, calls):
    """f(z) of every output is almost 0, or almost 1."""
    layer = make(500, 32, 512)
    with torch.no_grad():
        layer.B_S += bias
    assert_x_out_as_good(layer, torch.randn(500, 512))
    assert calls


@GPU
def test_coefficients_at_the_edge_of_float16(calls):
    """phi is almost twice its unit's power of two, and one output has all of R."""
    layer = make(300, 32, 512)
    with torch.no_grad():
        layer.beta_use.fill_(1.99999)
        layer.beta_ign.zero_()
        layer.B_A.fill_(30)
        layer.B_S.fill_(-100)
        layer.B_S[:, 3] = 100
    assert_x_out_as_good(layer, torch.randn(300, 512))
    assert calls


@GPU
def test_gradients_are_as_good_as_tf32(calls):
    layer, x_inp = make(2000, 100, 1024), torch.randn(2000, 1024)
    upstream = torch.randn(100, 64)
    grads = []
    for each in (layer, twin(layer, torch.float32), twin(layer, torch.float64)):
        dtype = each.W_A.dtype
        x = x_inp.to(dtype, copy=True).requires_grad_()
        each(x).backward(upstream.to(dtype))
        grads.append({"x_inp": x.grad} | {name: w.grad for name, w in each.named_parameters()})
    for name in grads[0]:
        assert_as_good(name, *(each[name] for each in grads))
    assert len(calls) == 2


@GPU
def test_rows_apart_and_autocast(calls):
    layer, x_inp = make(700, 100, 1024), torch.randn(700, 1100)[:, :1024]
    assert_x_out_as_good(layer, x_inp)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        x_out = layer(x_inp)  # [j, h]
    assert torch.equal(x_out, layer(x_inp))
    assert len(calls) == 6


@GPU
def test_the_same_again_and_captured(calls):
    layer, x_inp = make(20000, 100, 1024), torch.randn(20000, 1024)
    with torch.no_grad():
        x_out = layer(x_inp)  # [j, h]
        assert torch.equal(layer(x_inp), x_out)
        captured = torch.cuda.make_graphed_callables(layer, (x_inp,))
        assert torch.equal(captured(x_inp), x_out)
    assert calls


@GPU
def test_phi_is_found_another_way(calls):
    layer, x_inp = make(500, 32, 512), torch.randn(500, 512)
    with torch.no_grad():
        routed = layer.route(x_inp)
        torch.testing.assert_close(routed.x_out, layer(x_inp), rtol=1e-2, atol=1e-3)
    assert len(calls) == 1 + 2


@GPU
@pytest.mark.parametrize("n_out", [28, 102, 108])
def test_other_sizes_go_another_way(n_out, calls):
    assert_x_out_as_good(make(100, n_out, 512), torch.randn(100, 512))
    assert_x_out_as_good(make(100, 32, 768), torch.randn(100, 768))
    assert not calls


@GPU
def test_other_problems_go_another_way(calls):
    layer, x_inp = make(100, 32, 512), torch.randn(100, 512)
    with torch.no_grad():
        layer(x_inp.expand(2, -1, -1))
        layer(x_inp, input_mask=torch.rand(100) > 0.5)
        layer.double()(x_inp.double())
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        layer.float()(x_inp)
    assert not calls


@GPU
def test_without_a_compiler_it_goes_another_way(calls, no_compiler):
    with pytest.warns(UserWarning, match="NVRTC"):
        assert_x_out_as_good(make(100, 32, 512), torch.randn(100, 512))
    assert not calls
