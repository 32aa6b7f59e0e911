"""The layers: gradients, sizes, scales, initial values, and their repr."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import functional_call

import vecroute as vr
from tests.helpers.samples import KINDS, inputs, make
from tests.helpers.tolerance import outcome
from vecroute.ops import IMPLEMENTATIONS
from vecroute.ops.common import normalize

ON_CPU = [name for name in IMPLEMENTATIONS if name not in ("auto", "fused")]
SIZES = {"n_out": 4, "d_inp": 6, "d_out": 5}


def check_gradients(layer: nn.Module, *args: Tensor | None, verb: str = "forward", fast: bool = True) -> None:
    """Compare the gradients of the first argument and every parameter with finite differences."""
    names = [name for name, _ in layer.named_parameters()]
    values = [value.detach().clone().requires_grad_() for value in layer.parameters()]

    class Verb(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, *args):
            return tuple(getattr(self.layer, verb)(*args)) if verb == "route" else self.layer(*args)

    def function(x: Tensor, *values: Tensor):
        parameters = {f"layer.{name}": value for name, value in zip(names, values, strict=True)}
        return functional_call(Verb(), parameters, (x, *args[1:]))

    assert gradcheck(function, (args[0].requires_grad_(), *values), fast_mode=fast, atol=1e-6)


def masked_inputs(masked: bool, n_inp: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return float64 inputs, and masks that exclude an input, a row of pairs, and a whole sample."""
    x_inp, input_mask, pair_mask = inputs(batch=3, n_inp=n_inp, dtype=torch.float64)
    input_mask[0, 1], input_mask[2], pair_mask[1, 2] = False, False, False
    return (x_inp, input_mask, pair_mask) if masked else (x_inp, None, None)


MASKED = pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
LENGTH = pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])


@MASKED
@LENGTH
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, fixed, masked):
    check_gradients(make(kind, 5 if fixed else None).double(), *masked_inputs(masked, n_inp=5))


@MASKED
@LENGTH
@pytest.mark.parametrize("kind", ["reference", "general", "general over inputs"])
def test_gradients_of_phi(kind, fixed, masked):
    check_gradients(make(kind, 5 if fixed else None).double(), *masked_inputs(masked, n_inp=5), verb="route")


@pytest.mark.slow
@MASKED
@LENGTH
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_element_by_element(kind, fixed, masked):
    check_gradients(make(kind, 5 if fixed else None).double(), *masked_inputs(masked, n_inp=5), fast=False)


@pytest.mark.parametrize(
    "options", [{"n_iters": 1}, {"n_iters": 4}, {"normalize": False}, {"d_out": 1}], ids=str
)
@pytest.mark.parametrize("implementation", ON_CPU)
def test_gradients_of_other_vector_layers(implementation, options):
    options = {"n_inp": None, **SIZES} | options
    layer = vr.VectorRouting(**options, implementation=implementation, dtype=torch.float64)
    check_gradients(layer, torch.randn(2, 5, 6, dtype=torch.float64))


@pytest.mark.parametrize("implementation", ON_CPU)
@pytest.mark.parametrize("n_inp", [1, 2, 7, 31, 127])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 2), (2, 1, 3), (2, 17, 1), (13, 5, 7)], ids=str)
@LENGTH
def test_sizes(fixed, sizes, n_inp, implementation):
    """For odd sizes and sizes of 1, shapes are right, and there is no NaN forward or backward."""
    n_out, d_inp, d_out = sizes
    layer = vr.VectorRouting(
        n_inp=n_inp if fixed else None, n_out=n_out, d_inp=d_inp, d_out=d_out, implementation=implementation
    )
    values = outcome(layer, torch.randn(n_inp, d_inp))
    assert values["x_out"].shape == (n_out, d_out)
    assert values["phi"].shape == (n_inp, n_out)
    assert all(value.isfinite().all() for value in values.values())


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_batch_dimensions(kind, batch):
    """With any number of batch dimensions, each sample has the same result as alone."""
    layer = make(kind)
    x_inp = torch.randn(*batch, 5, 7)
    x_out = layer(x_inp)
    assert x_out.shape == (*batch, 5, 3)
    flat = x_inp.reshape(-1, 5, 7) if batch != (0,) else x_inp
    for alone, together in zip(flat, x_out.reshape(-1, 5, 3) if batch != (0,) else x_out, strict=True):
        torch.testing.assert_close(layer(alone), together, rtol=1e-5, atol=1e-6)


def assert_finite(values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        assert value.isfinite().all(), name


SCALES = [(torch.float32, 10.0**k) for k in (-20, -10, -3, 0, 2, 4)]
SCALES += [(dtype, scale) for dtype in (torch.bfloat16, torch.float16) for scale in (1e-3, 1.0, 1e2)]


@pytest.mark.parametrize(("dtype", "scale"), SCALES, ids=str)
@pytest.mark.parametrize("implementation", ON_CPU)
@LENGTH
def test_scales(fixed, implementation, dtype, scale):
    """For very small and very large inputs, outputs, phi and every gradient are finite."""
    wide = {"n_out": 16, "d_inp": 64, "d_out": 64}
    for n_inp, sizes in ((9, SIZES), (1, wide), (200, wide)):
        for n_iters in (1, 2, 5):
            layer = vr.VectorRouting(
                n_inp=n_inp if fixed else None,
                **sizes,
                n_iters=n_iters,
                implementation=implementation,
                dtype=dtype,
            )
            x_inp = (scale * torch.randn(2, n_inp, sizes["d_inp"])).to(dtype)
            values = outcome(layer, x_inp)
            assert_finite(values)
            assert values["x_out"].dtype == values["phi"].dtype == values["grad x_inp"].dtype == dtype


@pytest.mark.parametrize("implementation", ON_CPU)
def test_many_inputs_in_float16(implementation):
    """Sums over inputs may exceed the range of float16."""
    layer = vr.VectorRouting(n_inp=None, **SIZES, implementation=implementation, dtype=torch.float16)
    x_inp = 100 * torch.randn(5000, 6).half()
    assert layer.trace(x_inp)[0].x_out.abs().max() > torch.finfo(torch.float16).max
    routed = layer.route(x_inp)
    assert_finite({"x_out": routed.x_out, "phi": routed.phi})


@pytest.mark.parametrize("d_out", [2, 5, 64])
def test_n_keeps_the_digits_of_vectors_with_a_large_mean(d_out):
    x_out = torch.randn(1000, d_out) + 100
    error = normalize(x_out) - normalize(x_out.double())
    assert error.abs().max() < 2e-6


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1.0, 1e4])
@pytest.mark.parametrize("p_model", ["gaussian", "skm"])
def test_scales_of_matrices(p_model, scale):
    layer = vr.MatrixRouting(n_inp=9, **SIZES, d_cov=3, p_model=p_model)
    a_inp, mu_inp = torch.randn(2, 9, requires_grad=True), (scale * torch.randn(2, 9, 3, 6)).requires_grad_()
    outputs = layer(a_inp, mu_inp)
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    tensors = [*outputs, a_inp.grad, mu_inp.grad, *(p.grad for p in layer.parameters())]
    assert_finite(dict(enumerate(tensors)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", ON_CPU)
@MASKED
def test_scores_so_negative_that_every_f_underflows(masked, implementation, dtype):
    """R is still the ratio of the f(z), which is f(z_1) / f(z_2) = exp(z_1 - z_2) for such z."""
    layer = vr.VectorRouting(n_inp=3, **SIZES, implementation=implementation, dtype=dtype)
    below = torch.tensor([0.0, -1.0, -2.0, -300.0], dtype=dtype)
    with torch.no_grad():
        layer.W_S.zero_()
        layer.B_S.copy_(below - 3000)
    assert torch.sigmoid(layer.B_S.double()).eq(0).all()
    pair_mask = torch.ones(3, 4).bool()
    if masked:
        pair_mask[1, 0], pair_mask[2] = False, False
    x_inp = torch.randn(2, 3, 6).to(dtype)
    assert_finite(outcome(layer, x_inp, pair_mask=pair_mask))
    R = layer.trace(x_inp, pair_mask=pair_mask)[-1].R  # [b, i, j]
    z = layer.B_S.detach().to(R.dtype).masked_fill(~pair_mask, -math.inf)
    expected = (z - z.max()).exp() / (z - z.max()).exp().sum(-1, keepdim=True)
    expected = expected.nan_to_num(0.0)  # where no pair is left
    torch.testing.assert_close(R, expected.expand_as(R))


@pytest.mark.parametrize("implementation", ON_CPU)
def test_one_score_very_negative(implementation):
    """Test z up to 1e30 and down to -1e30, beyond the scores of any finite layer."""
    layer = vr.VectorRouting(n_inp=4, **SIZES, implementation=implementation)
    with torch.no_grad():
        layer.B_S.copy_(torch.tensor([1e30, -1e30, 0.0, -1e10]))
    assert_finite(outcome(layer, torch.randn(4, 6)))


def test_initial_values():
    """Initial values have the distributions that the authors chose."""
    layer = vr.VectorRouting(n_inp=300, n_out=200, d_inp=400, d_out=100)
    for name, std in {
        "W_A": 2 / math.sqrt(400),
        "W_F1": 1.0,
        "W_F2": 2 / math.sqrt(400),
        "W_G1": 1 / math.sqrt(100),
        "W_G2": 1.0,
        "W_S": 1 / math.sqrt(400),
        "beta_use": 1.0,
        "beta_ign": 1.0,
    }.items():
        value = getattr(layer, name)
        assert abs(value.std().item() / std - 1) < 0.02, name
        assert abs(value.mean().item() / std) < 0.03, name
        assert value.abs().max() > 3.5 * std, name  # normal, not uniform
    for name in ("B_A", "B_F2", "B_G2", "B_S"):
        assert getattr(layer, name).eq(0).all(), name

    for layer in (vr.VectorRouting(n_inp=None, n_out=200, d_inp=400, d_out=100), make("general")):
        linear = nn.Linear(layer.d_inp, layer.n_out)
        for name in ("W_use", "W_ign", "B_use", "B_ign"):
            layer.reset_parameters()
            value = getattr(layer, name)
            assert value.abs().max() <= 1 / math.sqrt(layer.d_inp), name
            assert value.numel() < 1000 or abs(value.std() / linear.weight.std() - 1) < 0.02, name


def test_initial_values_of_matrices():
    layer = vr.MatrixRouting(n_inp=20, n_out=20, d_cov=3, d_inp=10, d_out=10)
    assert abs(layer.W.std().item() * 10 - 1) < 0.02
    for name in ("B", "beta_use", "beta_ign"):
        assert getattr(layer, name).eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_reset_parameters_draws_anew(kind):
    layer = make(kind)
    layer = layer.routing if hasattr(layer, "routing") else layer
    own = dict(layer.named_parameters(recurse=False))
    before = {name: value.clone() for name, value in own.items()}
    torch.manual_seed(7)
    layer.reset_parameters()
    once = {name: value.clone() for name, value in own.items()}
    torch.manual_seed(7)
    layer.reset_parameters()
    for name, value in own.items():
        assert torch.equal(value, once[name])
        assert not torch.equal(value, before[name])


PARAMETERS = {
    "W_A": (7, 6),
    "B_A": (7,),
    "W_F1": (4, 6),
    "W_F2": (6, 5),
    "B_F2": (4, 5),
    "W_G1": (5, 6),
    "W_G2": (4, 6),
    "B_G2": (4, 6),
    "W_S": (7, 4),
    "B_S": (7, 4),
}


def test_names_and_shapes_of_parameters():
    def shapes(layer: nn.Module) -> dict:
        return {name: tuple(value.shape) for name, value in layer.named_parameters()}

    fixed = PARAMETERS | {"beta_use": (7, 4), "beta_ign": (7, 4)}
    assert shapes(vr.VectorRouting(n_inp=7, **SIZES)) == fixed
    no_i = {"W_A": (1, 6), "B_A": (1,), "W_S": (1, 4), "B_S": (1, 4)}
    betas = {"W_use": (6, 4), "B_use": (4,), "W_ign": (6, 4), "B_ign": (4,)}
    assert shapes(vr.VectorRouting(n_inp=None, **SIZES)) == PARAMETERS | no_i | betas
    assert set(vr.VectorRouting(n_inp=7, **SIZES).state_dict()) == set(fixed)


def test_device_and_dtype():
    for make_layer in (vr.VectorRouting, vr.MatrixRouting):
        sizes = SIZES | ({"d_cov": 3} if make_layer is vr.MatrixRouting else {})
        layer = make_layer(n_inp=None, **sizes, device="meta", dtype=torch.float16)
        assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}


def test_repr():
    layer = vr.VectorRouting(n_inp=None, **SIZES, implementation="reference")
    assert repr(layer) == (
        "VectorRouting(n_inp=None, n_out=4, d_inp=6, d_out=5, n_iters=2, normalize=True, "
        "implementation='reference')"
    )


@pytest.mark.parametrize("implementation", ON_CPU)
def test_route_and_trace_and_forward_agree(implementation):
    layer = vr.VectorRouting(n_inp=None, **SIZES, n_iters=3, implementation=implementation).double()
    x_inp, mask = torch.randn(2, 9, 6, dtype=torch.float64), torch.rand(2, 9) < 0.8
    routed, iterations = layer.route(x_inp, mask), layer.trace(x_inp, mask)
    assert isinstance(routed, vr.Routed)
    assert routed._fields == ("x_out", "phi")
    assert torch.equal(layer(x_inp, mask), routed.x_out)
    assert len(iterations) == 3
    torch.testing.assert_close(iterations[-1].phi, routed.phi)
    layer.normalize = False
    torch.testing.assert_close(iterations[-1].x_out, layer(x_inp, mask))


@pytest.mark.parametrize("kind", ["auto", "reference", "general"])
def test_one_iteration_has_all_its_quantities(kind):
    layer = make(kind)
    layer.n_iters = 1
    x_inp = torch.randn(5, 7)
    (only,) = layer.trace(x_inp)
    assert only.S is None
    assert only.R.eq(1 / 5).all()
    assert only._fields == ("a_inp", "x_hat", "S", "R", "D_use", "D_ign", "phi", "x_out")
    torch.testing.assert_close(only.phi, layer.route(x_inp).phi)
