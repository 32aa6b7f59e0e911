"""The layers support the usual operations of PyTorch: copy, save, cast, transform, checkpoint, autocast."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import vecroute as vr
from tests.helpers.samples import D_INP, D_OUT, KINDS, N_OUT, inputs, make

LENGTHS = [pytest.param(None, id="variable"), pytest.param(11, id="fixed")]
VECTOR = ("auto", "reference")


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def loss_of(x_out: Tensor) -> Tensor:
    """Return the sum of cubes. (The sum of squares is constant for a normalised x_out.)"""
    return x_out.pow(3).sum()


def gradients(layer: nn.Module, x_out: Tensor) -> list[Tensor]:
    """Return the gradients of ``loss_of`` for every parameter."""
    return list(torch.autograd.grad(loss_of(x_out), list(layer.parameters()), materialize_grads=True))


@pytest.mark.parametrize("n_inp", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
class TestCopies:
    def test_state_dict_goes_through_a_file_into_another_layer(self, kind, n_inp):
        layer, other, x = make(kind, n_inp), make(kind, n_inp), inputs()
        assert not torch.equal(layer(*x), other(*x))
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        assert not any(other.load_state_dict(torch.load(file, weights_only=True)))
        assert torch.equal(layer(*x), other(*x))

    def test_a_deepcopy_gives_the_same_and_shares_nothing(self, kind, n_inp):
        layer, x = make(kind, n_inp), inputs()
        before = layer(*x)
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(*x), before)
        nn.init.ones_(next(twin.parameters()))
        assert not torch.equal(twin(*x), before)
        assert torch.equal(layer(*x), before)

    def test_pickle_keeps_the_layer(self, kind, n_inp):
        layer, x = make(kind, n_inp), inputs()
        assert torch.equal(pickle.loads(pickle.dumps(layer))(*x), layer(*x))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
    def test_to_dtype_moves_everything(self, kind, n_inp, dtype):
        layer, (x_inp, *masks) = make(kind, n_inp), inputs()
        truth = copy.deepcopy(layer).double()(x_inp.double(), *masks)
        moved = layer.to(dtype)
        x_out = moved(x_inp.to(dtype), *masks)
        assert {p.dtype for p in moved.parameters()} == {x_out.dtype} == {dtype}
        assert (x_out.double() - truth).norm() <= 20 * torch.finfo(dtype).eps * truth.norm()

    def test_the_meta_device_gives_shapes(self, kind, n_inp):
        x_inp, *masks = (t.to("meta") for t in inputs())
        assert make(kind, n_inp).to("meta")(x_inp, *masks).shape == (2, N_OUT, D_OUT)


@pytest.mark.parametrize("n_inp", LENGTHS)
def test_the_state_dict_has_the_papers_names_alone(n_inp):
    betas = {"W_use", "B_use", "W_ign", "B_ign"} if n_inp is None else {"beta_use", "beta_ign"}
    shared = {"W_A", "B_A", "W_F1", "W_F2", "B_F2", "W_G1", "W_G2", "B_G2", "W_S", "B_S"}
    assert set(make("auto", n_inp).state_dict()) == shared | betas


@pytest.mark.parametrize("implementation", VECTOR)
def test_layers_are_built_where_and_as_asked(implementation):
    sizes = {"n_inp": None, "n_out": 2, "d_inp": 3, "d_out": 4, "implementation": implementation}
    on_meta = vr.VectorRouting(**sizes, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in on_meta.parameters()} == {("meta", torch.float64)}
    filled = on_meta.to_empty(device="cpu")
    filled.reset_parameters()
    assert filled(torch.randn(5, 3, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
class TestFunctionTransforms:
    def test_vmap_is_the_batch(self, kind):
        layer, x = make(kind), inputs(3)
        assert_same(vmap(layer)(*x), layer(*x))
        without_masks = vmap(lambda x_inp: layer(x_inp))(x[0])
        assert_same(without_masks, layer(x[0]))

    def test_vmap_over_masks_alone(self, kind):
        layer, (x_inp, input_mask, pair_mask) = make(kind), inputs(3)
        got = vmap(layer, in_dims=(None, 0, 0))(x_inp[0], input_mask, pair_mask)
        assert_same(got, layer(x_inp[:1].expand(3, -1, -1), input_mask, pair_mask))

    def test_functional_call_uses_the_given_parameters(self, kind):
        layer, other, x = make(kind), make(kind), inputs()
        before = layer(*x)
        assert_same(functional_call(layer, dict(other.named_parameters()), x), other(*x))
        assert torch.equal(layer(*x), before)

    def test_an_ensemble_of_stacked_layers(self, kind):
        layers, x = [make(kind) for _ in range(3)], inputs()
        parameters, buffers = stack_module_state(layers)
        base = copy.deepcopy(layers[0]).to("meta")
        together = vmap(lambda p, b: functional_call(base, (p, b), x))(parameters, buffers)
        assert_same(together, torch.stack([layer(*x) for layer in layers]))

    def test_gradients_per_sample(self, kind):
        layer, x = make(kind), inputs(3)
        parameters = dict(layer.named_parameters())

        def loss(parameters, x_inp, input_mask, pair_mask):
            return loss_of(functional_call(layer, parameters, (x_inp, input_mask, pair_mask)))

        together = vmap(grad(loss), in_dims=(None, 0, 0, 0))(parameters, *x)
        for sample in range(3):
            alone = gradients(layer, layer(*(t[sample] for t in x)))
            for (name, got), expected in zip(together.items(), alone, strict=True):
                torch.testing.assert_close(got[sample], expected, rtol=1e-4, atol=1e-5, msg=name)


def test_function_transforms_of_packed_samples():
    layer, x_inp = make("auto"), inputs(3)[0]
    n, packed = x_inp.shape[1], x_inp.flatten(0, 1)
    cu_seqlens = torch.arange(4) * n

    def loss(packed):
        return loss_of(layer(packed, cu_seqlens=cu_seqlens))

    of_packed = grad(loss)(packed).unflatten(0, (3, n))
    torch.testing.assert_close(of_packed, grad(lambda x_inp: loss_of(layer(x_inp)))(x_inp))
    together = vmap(lambda packed: layer(packed, cu_seqlens=cu_seqlens))(torch.stack([packed, -packed]))
    assert_same(together, torch.stack([layer(x_inp), layer(-x_inp)]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_activation_checkpointing_changes_no_gradient(kind, autocast):
    layer, x = make(kind), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        plain = layer(*x)
        again = checkpoint(layer, *x, use_reentrant=False)
    assert torch.equal(plain, again)
    for got, expected in zip(gradients(layer, again), gradients(layer, plain), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_double_backward(kind, masked):
    layer, (x_inp, *masks) = make(kind).double(), inputs(1, 3, torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def route(x_inp, *parameters):
        named = dict(zip(names, parameters, strict=True))
        return functional_call(layer, named, (x_inp, *masks) if masked else (x_inp,))

    arguments = (x_inp.requires_grad_(), *layer.parameters())
    if kind == "auto":
        with pytest.raises(RuntimeError, match=r"second derivatives need .*implementation='reference'"):
            torch.autograd.gradgradcheck(route, arguments, atol=1e-4, fast_mode=True)
    else:
        assert torch.autograd.gradgradcheck(route, arguments, atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("n_inp", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_control_flow_depends_on_data(kind, n_inp):
    """Fake tensors have no values: a Python branch on one raises."""
    with FakeTensorMode():
        layer, (x_inp, *masks) = make(kind, n_inp), inputs()
        layer(x_inp.requires_grad_(), *masks).sum().backward()
    assert x_inp.grad.shape == x_inp.shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_near_float64_forward_and_backward(kind, dtype):
    layer, (x_inp, *masks) = make(kind), inputs(2, 64)
    exact = copy.deepcopy(layer).double()
    truth = exact(x_inp.double(), *masks)
    with torch.autocast("cpu", dtype=dtype):
        x_out = layer(x_inp, *masks)
    # On a CPU the streamed loop computes float16 in float32, because rounding would save nothing.
    exempt = kind == "auto" and dtype == torch.float16
    assert exempt or not torch.equal(x_out.float(), layer(x_inp, *masks))
    assert (x_out.double() - truth).norm() <= 4 * torch.finfo(dtype).eps * truth.norm()
    for parameter, expected in zip(gradients(layer, x_out), gradients(exact, truth), strict=True):
        assert parameter.dtype == torch.float32
        assert (parameter.double() - expected).norm() <= 20 * torch.finfo(dtype).eps * expected.norm() + 1e-4


@pytest.mark.parametrize("implementation", VECTOR)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
class TestAutocastKeepsFloat32:
    def test_where_the_softmax_is(self, implementation, dtype):
        layer = make(implementation, n_inp=300)
        with torch.no_grad():
            for name, value in {"W_A": 0.0, "B_A": 0.0, "beta_use": 2.0, "beta_ign": 0.0}.items():
                getattr(layer, name).fill_(value)
        with torch.autocast("cpu", dtype=dtype):
            phi = layer.route(torch.randn(300, D_INP)).phi  # [i, j], here R: 2 f(0) = 1
        assert phi.dtype == torch.float32
        assert phi.std() > 0.01
        assert (phi.double().sum(-1) - 1).abs().max() < 1e-6

    def test_where_the_sums_over_inputs_are(self, implementation, dtype):
        layer = make(implementation)
        layer.normalize = False
        nn.init.zeros_(layer.W_F2)  # then x_out_jh = B_F2_jh sum_i phi_ij
        with torch.autocast("cpu", dtype=dtype):
            # With equal inputs, a sum in half precision would stop growing after a few hundred terms.
            x_out, phi = layer.route(torch.randn(1, D_INP).expand(5000, -1))
        s = phi.double().sum(0)  # [j]
        torch.testing.assert_close(x_out.double(), s[:, None] * layer.B_F2.double(), rtol=1e-5, atol=0)

    def test_where_half_precision_has_not_the_range(self, implementation, dtype):
        layer, x_inp = make(implementation), 1e3 * torch.randn(2000, D_INP)
        with torch.autocast("cpu", dtype=dtype):
            x_out = layer(x_inp)
        truth = copy.deepcopy(layer).double()(x_inp.double())
        assert (x_out.double() - truth).norm() <= 4 * torch.finfo(dtype).eps * truth.norm()
        assert all(grad.isfinite().all() for grad in gradients(layer, x_out))

    def test_float64_is_left_alone(self, implementation, dtype):
        layer, (x_inp, *masks) = make(implementation).double(), inputs(dtype=torch.float64)
        with torch.autocast("cpu", dtype=dtype):
            x_out = layer(x_inp, *masks)
        assert torch.equal(x_out, layer(x_inp, *masks))
