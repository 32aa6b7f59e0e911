"""Which call takes which path, for devices that need not be there."""

import pytest
import torch

import vecroute as vr
from vecroute.ops.plan import Case, Tuning, make_plan

CUDA = torch.device("cuda", 0)


def case(shape: tuple[int, ...], n_out: int, **changes) -> Case:
    """A call with float32 inputs of a layer with n_inp=None, in tf32, on a GPU."""
    plain = Case(
        shape=shape, dtype=torch.float32, rounded=torch.float32, w_dtype=torch.float32, n_out=n_out,
        d_out=64, n_iters=2,
        variable=True, input_mask=False, use_strides=None, packed=None, prior=1 / n_out,
        implementation="fused",
        tuning=Tuning(), group=False, tf32=True, need_phi=False, device=CUDA,
    )  # fmt: skip
    return plain._replace(**changes)


TABLE = {  # what: the call, its path, whether operands are halves
    "a batch": (case((32, 1850, 1024), 64), "batch", True),
    "masked": (case((32, 1850, 1024), 64, input_mask=True), "batch", True),
    "packed": (case((59_200, 1024), 64, packed=(32, torch.int32)), "batch", True),
    "128 outputs": (case((16, 4925, 1024), 128), "batch", True),
    "129 outputs": (case((16, 100, 1024), 129), "chunks", None),
    "a fixed length": (case((32, 64, 1024), 64, variable=False), "batch", True),
    "a head": (case((64, 448, 384), 4, input_mask=True), "batch", True),
    "IEEE products": (case((32, 1850, 1024), 64, tf32=False), "batch", False),
    "float64": (case((2, 10, 8), 4, dtype=torch.float64, w_dtype=torch.float64, tf32=False), "batch", False),
    "float16": (case((2, 10, 8), 4, dtype=torch.float16, w_dtype=torch.float16, tf32=False), "batch", True),
    "bfloat16": (
        case((2, 10, 8), 4, dtype=torch.bfloat16, w_dtype=torch.bfloat16, tf32=False),
        "batch",
        False,
    ),
    "vectors too large for a row of halves": (case((2, 10, 8193), 4), "batch", False),
    "a million vectors": (case((1_000_000, 1024), 100, variable=False), "chunks", None),
    "outputs too large to normalise": (case((2, 10, 8), 4, d_out=8193), "chunks", None),
    "no inputs": (case((0, 10, 8), 4), "chunks", None),
    "chunks asked for": (case((2, 10, 8), 4, tuning=Tuning(rows=5)), "chunks", None),
    "sharded inputs": (case((2, 10, 8), 4, group=True), "chunks", None),
    "a CPU": (case((2, 10, 8), 4, implementation="chunked", device=torch.device("cpu")), "chunked", None),
}


@pytest.mark.parametrize("what", TABLE)
def test_paths(what):
    call, path, half = TABLE[what]
    plan = make_plan(call)
    assert plan.path == path
    assert plan.why
    if half is not None:
        assert plan.half == half


def test_a_printed_plan_tells_path_reason_memory_and_kernels():
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=16, d_out=16, implementation="fused")
    text = str(layer.plan(torch.empty(3, 50, 16), input_mask=torch.ones(3, 50, dtype=torch.bool)))
    for words in (
        "path: batch",
        "few outputs",
        "150 vectors in 3 samples",
        "MB",
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


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of PyTorch's own derivatives
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
