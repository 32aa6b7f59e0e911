"""The batch path: operands as float16 with units, masks, packed samples, tensors that are not aligned."""

import pytest
import torch

import vecroute as vr
from tests.helpers.samples import with_noise
from tests.helpers.tolerance import assert_layer_as_good, outcome, twin
from vecroute.ops.common import normalize as N
from vecroute.ops.plan import make_plan

pytestmark = pytest.mark.usefixtures("device")
SHAPES = [  # b, n_inp, d_inp, n_out, d_out, n_iters
    (2, 70, 19, 5, 7, 2),
    (3, 130, 33, 3, 1, 3),
    (2, 65, 64, 17, 4, 1),
    (1, 300, 16, 1, 5, 2),
]


def make(
    d_inp: int, n_out: int, d_out: int, n_iters: int, n_inp: int | None = None, **options
) -> vr.VectorRouting:
    sizes = {"n_inp": n_inp, "n_out": n_out, "d_inp": d_inp, "d_out": d_out, "n_iters": n_iters}
    return with_noise(vr.VectorRouting(**sizes, implementation="fused", **options))


def assert_near(layer: vr.VectorRouting, x_inp: torch.Tensor, bound: float, **masks: torch.Tensor) -> None:
    """Every result within ``bound`` of the float64 truth, relative to its norm.

    B_A and B_S, few numbers that are left of long sums, have ten times as much.
    """
    assert layer.plan(x_inp, **masks).path == "batch"
    truth = outcome(twin(layer, torch.float64), x_inp.double(), **masks)
    for name, got in outcome(layer, x_inp, **masks).items():
        error = (got.double() - truth[name]).norm() / truth[name].norm().clamp(min=1e-6)
        assert error <= bound * (10 if name in ("grad B_A", "grad B_S") else 1), f"{name}: {error:.1e}"


@pytest.mark.parametrize("masked", ["", "inputs", "pairs", "both"])
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_halves_have_the_digits_of_tf32(shape, fixed, masked, tf32, nan_filled_memory):
    b, n_inp, d_inp, n_out, d_out, n_iters = shape
    layer = make(d_inp, n_out, d_out, n_iters, n_inp if fixed else None)
    x_inp, masks = torch.randn(b, n_inp, d_inp), {}
    assert layer.plan(x_inp).half
    if masked in ("inputs", "both"):
        masks["input_mask"] = torch.rand(b, n_inp) > 0.4
        x_inp[~masks["input_mask"]] = torch.nan  # unused inputs are never read
    if masked in ("pairs", "both"):
        masks["pair_mask"] = torch.rand(b, n_inp, n_out) > 0.4
    assert_near(layer, x_inp, 2e-2, **masks)


@pytest.mark.parametrize("d_out", [1, 7])
@pytest.mark.parametrize("normalize", [True, False])
def test_kernels_normalise_outputs(normalize, d_out):
    layer = make(19, 5, d_out, 2, normalize=normalize)
    x_inp = torch.randn(2, 70, 19)
    assert layer.plan(x_inp).normalizes == normalize
    expected = N(layer.state(x_inp)) if normalize else layer.state(x_inp)
    torch.testing.assert_close(layer(x_inp), expected)


def test_gradients_with_a_graph_are_the_same():
    """The backward pass then is the operator, which also has to undo the normalisation."""
    layer, x_inp = make(19, 5, 7, 2), torch.randn(2, 70, 19, requires_grad=True)
    of = [x_inp, *layer.parameters()]
    plain = torch.autograd.grad(layer(x_inp).square().sum(), of)
    with_graph = torch.autograd.grad(layer(x_inp).square().sum(), of, create_graph=True)
    torch.testing.assert_close(with_graph, plain, rtol=0, atol=0)


LENGTHS = [[70], [0, 70, 5, 0, 1325], [1, 0, 1, 1, 0], [64, 128, 63, 65]]


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_samples_are_those_one_by_one(lengths, n_iters, nan_filled_memory):
    layer = make(20, 6, 9, n_iters, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    assert_near(layer, torch.randn(sum(lengths), 20).double(), 1e-9, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packed_halves(dtype, tf32, nan_filled_memory):
    layer = make(20, 6, 9, 2)
    cu_seqlens = torch.tensor([0, 130, 130, 200]).to(dtype)
    assert_near(layer, torch.randn(200, 20), 2e-2, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("exponent", [-40, 40])
def test_inputs_of_any_size(exponent, tf32):
    """Units absorb a power of two, so that no digit of the result changes."""
    layer = make(24, 4, 6, 1, normalize=False)
    with torch.no_grad():
        for name in ("W_A", "W_use", "W_ign", "B_F2"):
            getattr(layer, name).zero_()  # so that x_out is linear in x_inp
    x_inp = torch.randn(2, 70, 24)
    torch.testing.assert_close(layer(x_inp * 2.0**exponent) / 2.0**exponent, layer(x_inp), rtol=0, atol=0)


def test_one_sample_does_not_spoil_another(tf32):
    layer = make(24, 4, 6, 2)
    x_inp = torch.randn(3, 70, 24)
    expected = layer(x_inp)
    x_inp[1] *= 1e6
    got = layer(x_inp)
    torch.testing.assert_close(got[[0, 2]], expected[[0, 2]], rtol=0, atol=0)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
def test_tensors_that_begin_anywhere(fixed, nan_filled_memory):
    """Views have odd offsets and strides, but kernels are compiled for multiples of 16 bytes."""
    layer = make(20, 5, 7, 2, 70 if fixed else None)
    for parameter in layer.parameters():
        odd = torch.cat((parameter.data.new_zeros(1), parameter.data.flatten()))[1:]
        parameter.data = odd.view(parameter.shape)
    wide = torch.randn(2, 70, 23)
    for x_inp in (wide[..., 3:], wide[..., ::1][..., :20], torch.randn(70, 2, 20).transpose(0, 1)):
        assert_layer_as_good(layer, x_inp)
    assert_layer_as_good(layer, torch.randn(2 * 70 * 20 + 1)[1:].view(2, 70, 20))


def test_masks_and_offsets_that_begin_anywhere(device, tf32):
    """Offsets of eight samples are loaded four at a time."""
    layer = make(24, 4, 6, 2)
    x_inp, use = torch.randn(2, 70, 24), torch.rand(2 * 70 * 4 + 1) > 0.3
    pair_mask = use[1:].view(2, 70, 4)
    expected = layer(x_inp, pair_mask=pair_mask.clone())
    torch.testing.assert_close(layer(x_inp, pair_mask=pair_mask), expected, rtol=0, atol=0)
    packed, starts = x_inp.flatten(0, 1), torch.tensor([9, 0, 3, 20, 20, 64, 70, 100, 140], dtype=torch.int32)
    expected = layer(packed, cu_seqlens=starts[1:].clone())
    torch.testing.assert_close(layer(packed, cu_seqlens=starts[1:]), expected, rtol=0, atol=0)


def test_route_agrees_with_a_call(tf32):
    layer, x_inp = make(24, 4, 6, 2), torch.randn(2, 70, 24)
    torch.testing.assert_close(layer.route(x_inp).x_out, layer(x_inp), rtol=0, atol=0)


def test_backward_twice_and_without_a_gradient_of_x_inp():
    layer = make(24, 4, 6, 3)
    x_inp = torch.randn(2, 70, 24, requires_grad=True)
    x_out = layer(x_inp)
    grad = torch.randn_like(x_out)
    first = torch.autograd.grad(x_out, [x_inp, *layer.parameters()], grad, retain_graph=True)
    again = torch.autograd.grad(x_out, [x_inp, *layer.parameters()], grad)
    alone = torch.autograd.grad(layer(x_inp.detach()), list(layer.parameters()), grad)
    for a, b in zip((*first, *first[1:]), (*again, *alone), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_plans_are_made_once():
    layer, x_inp = make(24, 4, 6, 2), torch.randn(2, 70, 24)
    assert layer.plan(x_inp) is layer.plan(torch.randn(2, 70, 24))
    assert layer.plan(x_inp) is not layer.plan(torch.randn(2, 71, 24))
    assert make_plan.cache_info().maxsize is not None


@pytest.mark.gpu
def test_wrong_offsets_are_an_assertion_on_the_device():
    """The call runs in its own process, because the failed assertion makes the GPU unusable there."""
    import subprocess
    import sys

    program = """
import torch, vecroute as vr
layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=8, d_out=8, device="cuda")
layer(torch.randn(10, 8, device="cuda"), cu_seqlens=torch.tensor([0, 7, 5, 99], dtype=torch.int32,
                                                                 device="cuda"))
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "cu_seqlens must rise from 0" in done.stderr
