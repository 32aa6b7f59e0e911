"""Which call takes which path, on devices that this machine need not have."""

import pytest
import torch

import vecroute as vr
from tests.helpers.problems import problem_of
from vecroute.ops.columns import Columns, new_matrix
from vecroute.ops.passes import new_kept
from vecroute.ops.plan import Case, Device, Tuning, make_plan
from vecroute.ops.plan.rows import n_computed, n_own, n_results

CPU, A100 = Device("cpu"), Device("cuda", (8, 0), 163 * 1024, 108)
H200 = Device("cuda", (9, 0), 227 * 1024, 132, compiles=True)
CHUNKED = {"implementation": "chunked", "device": CPU}
BF16 = {"rounded": torch.bfloat16}  # autocast


def case(shape: tuple[int, ...], n_out: int, **changes) -> Case:
    """Return a call with float32 inputs of a layer with n_inp=None, in tf32, on an H200."""
    plain = Case(
        shape=shape, dtype=torch.float32, rounded=torch.float32, w_dtype=torch.float32, n_out=n_out,
        d_out=64, n_iters=2, variable=True, input_mask=False, use_strides=None, packed=None, prior=1 / n_out,
        implementation="fused", tuning=Tuning(), group=False, tf32=True, need_phi=False, device=H200,
    )  # fmt: skip
    return plain._replace(**changes)


def fixed(shape: tuple[int, ...], n_out: int, **changes) -> Case:
    return case(shape, n_out, variable=False, **changes)


def in_dtype(dtype: torch.dtype) -> dict:
    return {"dtype": dtype, "rounded": dtype, "w_dtype": dtype, "tf32": False}


BATCH = {  # name: the call, whether operands are halves
    "a batch": (case((32, 1850, 1024), 64), True),
    "a batch on an A100": (case((32, 1850, 1024), 64, device=A100), True),
    "masked": (case((32, 1850, 1024), 64, input_mask=True), True),
    "packed": (case((59_200, 1024), 64, packed=(32, torch.int32)), True),
    "128 outputs": (case((16, 4925, 1024), 128), True),
    "a fixed length": (fixed((32, 64, 1024), 64), True),
    "a head": (case((64, 448, 384), 4, input_mask=True), True),
    "IEEE products": (case((32, 1850, 1024), 64, tf32=False), False),
    "many IEEE products of packed samples": (
        case((100_000, 1024), 100, tf32=False, packed=(32, torch.int32)),
        False,
    ),
    "as many float64 products": (fixed((100_000, 1024), 40, **in_dtype(torch.float64)), False),
    "float64": (case((2, 10, 8), 4, **in_dtype(torch.float64)), False),
    "float16": (case((2, 10, 8), 4, **in_dtype(torch.float16)), True),
    "bfloat16": (case((2, 10, 8), 4, **in_dtype(torch.bfloat16)), False),
    "vectors too large for a row of halves": (case((2, 10, 8193), 4), False),
}
MILLION = 1_000_000, 1024
PATHS = {  # name: the call, its path, and its clusters, halves, and where pairs wait
    "a CPU": (case((2, 10, 8), 4, **CHUNKED), "chunked", (False, False, "")),
    "a long sequence on a CPU": (fixed(MILLION, 100, **CHUNKED), "chunked", (False, False, "grad_W_A")),
    "129 outputs": (case((16, 100, 1024), 129), "fused", (False, False, "apart")),
    "one long sample": (fixed(MILLION, 100), "long", (True, True, "grad_W_A")),
    "under autocast": (fixed(MILLION, 100, **BF16), "long", (True, True, "grad_W_A")),
    "on an A100": (fixed(MILLION, 100, device=A100), "long", (False, True, "grad_W_A")),
    "without NVRTC": (
        fixed(MILLION, 100, device=H200._replace(compiles=False)), "long",
        (False, True, "grad_W_A"),
    ),
    "one iteration": (fixed(MILLION, 100, n_iters=1), "long", (True, False, "")),
    "a masked one": (fixed(MILLION, 100, input_mask=True), "long", (False, True, "grad_W_A")),
    "one by one": (fixed(MILLION, 100, one_by_one=True), "long", (True, True, "grad_W_A")),
    "rows that begin anywhere": (fixed(MILLION, 100, aligned=False), "fused", (False, False, "grad_W_A")),
    "many IEEE products": (fixed((100_000, 1024), 100, tf32=False), "fused", (False, False, "grad_W_A")),
    "IEEE": (fixed(MILLION, 100, tf32=False), "fused", (False, False, "grad_W_A")),
    "a variable length": (case(MILLION, 100), "fused", (False, False, "grad_x")),
    "two long samples": (fixed((2, *MILLION), 100), "fused", (False, False, "grad_x")),
    "768 features": (fixed((MILLION[0], 768), 100), "long", (False, True, "grad_W_A")),
    "770 features": (fixed((MILLION[0], 770), 100), "fused", (False, False, "grad_W_A")),
    "many outputs": (fixed((10_000, 1024), 1024, **BF16), "wide", (False, False, "")),
    "many outputs in tf32": (fixed((10_000, 1024), 1024), "fused", (False, False, "")),
    "too many outputs": (fixed((100, 1024), 100_000, **BF16), "fused", (False, False, "")),
    "many outputs of any length": (case((10_000, 1024), 1024, **BF16), "fused", (False, False, "")),
    "outputs too large to normalise": (case((2, 10, 8), 4, d_out=8193), "fused", None),
    "no inputs": (case((0, 10, 8), 4), "fused", None),
    "chunks asked for": (case((2, 10, 8), 4, tuning=Tuning(rows=5)), "fused", None),
    "sharded inputs": (case((2, 10, 8), 4, group=True), "fused", None),
}  # fmt: skip


@pytest.mark.parametrize("what", BATCH)
def test_the_batch_path(what):
    call, half = BATCH[what]
    plan = make_plan(call)
    assert (plan.path, plan.half) == ("batch", half)


@pytest.mark.parametrize("what", PATHS)
def test_other_paths(what):
    call, path, parts = PATHS[what]
    plan = make_plan(call)
    assert plan.path == path
    if parts is not None:
        assert (plan.clusters, plan.halves, plan.waits_in) == parts
    text = str(plan)
    for word in (f"path: {path} ({plan.why})", "chunks: ", "memory on top: ", "kernels: "):
        assert word in text


def test_a_printed_plan_names_its_kernels_and_the_memory_it_uses_twice():
    text = str(make_plan(fixed(MILLION, 100, **BF16)))
    for words in (
        "clusters.cu",
        "halves.input_gradient_kernel",
        "wait in the rows of grad_W_A",
        "chunks: none",
    ):
        assert words in text
    assert "rows_backward_kernel" in str(make_plan(PATHS["many outputs"][0]))
    assert "coefficients_kernel" in str(make_plan(case(MILLION, 100)))
    assert "24 of at most 41943 rows in forward" in str(make_plan(case(MILLION, 100)))


@pytest.mark.parametrize("keep", [0, 2**26])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_rows_of_chunks_count_the_columns_that_there_are(variable, masked, keep):
    """The rows of chunks follow from the number of columns, which must be as in ``Columns``."""
    layer = vr.VectorRouting(n_inp=None if variable else 9, n_out=5, d_inp=40, d_out=3)
    mask = torch.ones(2, 9, dtype=torch.bool) if masked else None
    for implementation in ("chunked", "fused"):
        tuning = Tuning(keep_bytes=keep + 1)
        p = problem_of(layer.requires_grad_(False), torch.randn(2, 9, 40), implementation, 2, tuning, mask)
        for first in (True, False):
            for forward in (True, False):
                blocks = (not first) + (not forward)
                own = new_matrix(p, blocks) if blocks else None
                adds_up = not forward and bool(p.plan.waits_in)
                columns = Columns(p, own, new_kept(p), first=first, forward=forward, adds_up=adds_up)
                assert columns.n_own == n_own(p.plan, first, forward)
                assert columns.n_computed == n_computed(p.plan, first, forward)
                if not forward:
                    assert columns.n == n_results(p.plan, first, adds_up)


@pytest.mark.parametrize(
    ("implementation", "why"),
    [("auto", "implementation='auto', and x_inp is on cpu"), ("chunked", "implementation='chunked'")],
)
def test_a_printed_plan_tells_why_a_call_is_chunked(implementation, why):
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=16, d_out=16, implementation=implementation)
    assert f"path: chunked ({why}" in str(layer.plan(torch.empty(3, 50, 16)))


def test_a_printed_plan_tells_path_reason_memory_and_kernels():
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=16, d_out=16, implementation="fused")
    text = str(layer.plan(torch.empty(3, 50, 16), input_mask=torch.ones(3, 50, dtype=torch.bool)))
    for words in (
        "path: batch",
        "few outputs",
        "150 vectors in 3 samples",
        "KB",
        "next_backward_kernel 3 x 1 x 1",
    ):
        assert words in text


def test_plans_on_the_meta_device():
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=16, d_out=16, device="meta")
    assert layer.plan(torch.empty(3, 50, 16, device="meta")).path == "chunked"


def test_what_has_no_plan():
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=16, d_out=16, n_iters=vr.Converge())
    with pytest.raises(ValueError, match="Converge has no plan"):
        layer.plan(torch.randn(5, 16))
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=16, d_out=16, implementation="reference")
    with pytest.raises(ValueError, match="'reference' has no plan"):
        layer.plan(torch.randn(5, 16))


def derivatives(layer, x_inp, tangent):
    """The same forward-mode derivative in three ways."""

    def dual():
        with torch.autograd.forward_ad.dual_level():
            x_out = layer(torch.autograd.forward_ad.make_dual(x_inp, tangent))
            return torch.autograd.forward_ad.unpack_dual(x_out).tangent.clone()

    yield lambda: torch.func.jvp(layer, (x_inp,), (tangent,))[1]
    yield lambda: torch.func.jacfwd(layer)(x_inp).flatten(2) @ tangent.flatten()
    yield dual


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own derivatives warn
@pytest.mark.parametrize("implementation", ["auto", "chunked"])
def test_forward_mode_derivatives_are_right_or_refused(implementation):
    options = {"n_inp": None, "n_out": 3, "d_inp": 4, "d_out": 5, "dtype": torch.float64}
    layer = vr.VectorRouting(**options, implementation=implementation)
    x_inp, tangent = torch.randn(2, 6, 4).double().unbind(0)
    step = 1e-6 * tangent
    with torch.no_grad():
        expected = (layer(x_inp + step) - layer(x_inp - step)) / 2e-6  # [j, h]
    for derivative in derivatives(layer, x_inp, tangent):
        if implementation == "auto":
            torch.testing.assert_close(derivative().detach(), expected, rtol=1e-6, atol=1e-6)
        else:
            with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
                derivative()
