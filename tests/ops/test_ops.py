"""The streamed implementations against the reference: forward and every gradient."""

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

import vecroute as vr
from tests.helpers.problems import problem_of
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import assert_layer_as_good, outcome, twin
from vecroute.ops import Tuning, Weights
from vecroute.ops.autograd import operator_arguments, sqrt_lengths
from vecroute.ops.chunks import chunks

SIZES = [  # n_inp, n_out, d_inp, d_out
    (63, 5, 17, 9),
    (64, 2, 16, 1),
    (37, 67, 19, 31),
    (41, 4, 36, 7),  # all pairs of a later iteration fit the rows of grad_x
]
IDS = ["i{}-j{}-d{}-h{}".format(*size) for size in SIZES]
IMPLEMENTATIONS = ["chunked", "fused"]
PATHS = [*IMPLEMENTATIONS, "fused in chunks"]  # "fused" alone takes the batch path
TUNINGS = {"default": Tuning(), "rows7": Tuning(rows=7), "nothing kept": Tuning(rows=10, keep_bytes=0)}
MASKS = ["", "input", "pair", "input and pair"]


pytestmark = pytest.mark.usefixtures("device")


def make(n_inp, n_out, d_inp, d_out, *, fixed, implementation="auto", **options) -> vr.VectorRouting:
    """Return a layer without zero parameters. Its implementation may be one of PATHS."""
    sizes = {"n_inp": n_inp if fixed else None, "n_out": n_out, "d_inp": d_inp, "d_out": d_out}
    implementation, _, in_chunks = implementation.partition(" in ")
    layer = with_noise(vr.VectorRouting(**sizes, implementation=implementation, **options))
    return with_chunks(layer) if in_chunks else layer


def masks_for(kinds: str, batch: tuple[int, ...], n_inp: int, n_out: int) -> dict[str, torch.Tensor]:
    """Return the named masks. They exclude the last input, and all inputs of the first sample."""
    masks = {}
    if "input" in kinds:
        masks["input_mask"] = torch.rand(*batch, n_inp) > 0.3
        masks["input_mask"][..., -1] = False
        if batch:
            masks["input_mask"][0] = False
    if "pair" in kinds:
        masks["pair_mask"] = torch.rand(*batch, n_inp, n_out) > 0.3
        masks["pair_mask"][..., -1, :] = False
    return masks


def cases() -> Iterator:
    """Yield every path, size and mask. The slowest cases of interpreted kernels are slow tests."""
    for path, (size, name), masked in product(PATHS, zip(SIZES, IDS, strict=True), MASKS):
        slow = path != "chunked" and size[1] > 64 and masked in ("input", "pair")
        marks = [pytest.mark.slow] if slow else []
        yield pytest.param(path, size, masked, id=f"{path}-{name}-{masked}", marks=marks)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize(("implementation", "size", "masked"), list(cases()))
def test_as_good_as_the_reference(implementation, size, fixed, masked, nan_filled_memory):
    # The usual seed draws a sample in which an output nearly cancels. There, grad W_S has 10 times the error
    # of other draws, and twice that again with the exp of Triton's interpreter: NumPy's, 2.5 units off.
    torch.manual_seed(1)
    layer = make(*size, fixed=fixed, implementation=implementation)
    x_inp = torch.randn(2, 3, size[0], size[2])
    assert_layer_as_good(layer, x_inp, **masks_for(masked, (2, 3), size[0], size[1]))


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (1, 2, 3, 2), (5, 1, 2, 3), (7, 3, 5, 4)], ids=str)
@pytest.mark.parametrize("implementation", PATHS)
def test_smallest_sizes(implementation, size, fixed, masked, nan_filled_memory):
    """Test in float64. With few numbers, it is luck which of two float32 results is closer to the truth."""
    layer = make(*size, fixed=fixed, implementation=implementation, dtype=torch.float64)
    x_inp, masks = torch.randn(2, size[0], size[2]).double(), masks_for(masked, (2,), size[0], size[1])
    truth = outcome(twin(layer, torch.float64), x_inp, **masks)
    for name, value in outcome(layer, x_inp, **masks).items():
        torch.testing.assert_close(
            value, truth[name], rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("implementation", "fixed"),
    [
        ("chunked", True),
        ("chunked", False),
        ("fused", True),
        pytest.param("fused", False, marks=pytest.mark.slow),
    ],
)
def test_more_outputs_than_a_block_has(implementation, fixed, nan_filled_memory):
    layer = make(3, 4100, 5, 3, fixed=fixed, implementation=implementation, dtype=torch.float64)
    x_inp, masks = torch.randn(1, 3, 5).double(), masks_for("pair", (1,), 3, 4100)
    truth = outcome(twin(layer, torch.float64), x_inp, **masks)
    for name, value in outcome(layer, x_inp, **masks).items():
        torch.testing.assert_close(
            value, truth[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


# All combinations for chunked. For fused, which is slow in the interpreter, some of them.
SETTINGS = [("chunked", *rest) for rest in product([(), (1,), (2, 3)], [1, 2, 5], TUNINGS)]
SETTINGS += [("fused", (), 1, "default"), ("fused", (2, 3), 2, "rows7"), ("fused", (1,), 3, "nothing kept")]


@pytest.mark.parametrize(("implementation", "batch", "n_iters", "tuning"), SETTINGS, ids=str)
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
def test_chunks_batches_and_iterations(implementation, fixed, batch, n_iters, tuning, nan_filled_memory):
    layer = make(29, 5, 11, 6, fixed=fixed, implementation=implementation, n_iters=n_iters)
    layer.tuning = TUNINGS[tuning]
    assert_layer_as_good(layer, torch.randn(*batch, 29, 11), **masks_for("input", batch, 29, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("implementation", PATHS)
def test_dtypes(implementation, fixed, dtype, nan_filled_memory):
    layer = make(60, 12, 40, 24, fixed=fixed, implementation=implementation, dtype=dtype)
    assert_layer_as_good(layer, torch.randn(3, 60, 40).to(dtype))


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
def test_gradcheck(fixed):
    layer = make(6, 3, 4, 2, fixed=fixed, implementation="chunked", n_iters=3, dtype=torch.float64)
    names = [name for name, _ in layer.named_parameters()]
    mask = torch.tensor([[True] * 6, [True, False, True, True, False, True]])

    def route(x_inp, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x_inp, mask))

    x_inp = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(route, (x_inp, *layer.parameters()))


@pytest.mark.parametrize("implementation", PATHS)
def test_any_strides(implementation):
    layer = make(12, 3, 8, 4, fixed=True, implementation=implementation)
    x_inp = torch.randn(8, 12, 4, 5).permute(2, 3, 1, 0)[:, ::2]  # [4, 3, i, d]
    assert_layer_as_good(layer, x_inp)


@pytest.mark.parametrize("implementation", PATHS)
def test_no_gradient_of_x_where_none_is_needed(implementation):
    layer = make(12, 3, 8, 4, fixed=False, implementation=implementation)
    x_inp = torch.randn(5, 12, 8)
    expected = outcome(layer, x_inp)
    layer.zero_grad()
    out = layer(x_inp)
    out.backward(torch.ones_like(out))
    layer_grad = layer.W_use.grad.clone()
    layer.zero_grad()
    x_needs = x_inp.clone().requires_grad_()
    layer(x_needs).backward(torch.ones_like(out))
    torch.testing.assert_close(layer_grad, layer.W_use.grad)
    assert expected["grad x_inp"].shape == x_inp.shape
    assert x_inp.grad is None


@pytest.mark.parametrize("implementation", ["reference", *PATHS])
def test_scores_of_unused_pairs_may_be_anything(implementation):
    layer = make(6, 5, 4, 3, fixed=True, implementation=implementation)
    x_inp, pair_mask = torch.randn(6, 4), torch.ones(6, 5, dtype=torch.bool)
    pair_mask[2, 3] = False
    with torch.no_grad():
        expected = layer(x_inp, pair_mask=pair_mask)  # [j, h]
        layer.B_S[2, 3] = torch.nan
        assert torch.equal(layer(x_inp, pair_mask=pair_mask), expected)


@pytest.mark.parametrize("implementation", ["reference", *PATHS])
def test_packed_equals_single(implementation, nan_filled_memory):
    layer = make(1, 5, 8, 6, fixed=False, implementation=implementation, dtype=torch.float64)
    lengths = [3, 0, 17, 1, 9]
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x_inp = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    packed = layer.route(x_inp, cu_seqlens=cu_seqlens)
    packed.x_out.square().sum().backward()
    packed_grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
    grad_x, x_inp.grad = x_inp.grad.clone(), None
    layer.zero_grad()
    for b, part in enumerate(x_inp.split(lengths)):
        if lengths[b] == 0:
            assert (packed.x_out[b] == 0).all()
            continue
        single = layer.route(part)
        torch.testing.assert_close(packed.x_out[b], single.x_out)
        torch.testing.assert_close(packed.phi.split(lengths)[b], single.phi)
        single.x_out.square().sum().backward()
    torch.testing.assert_close(grad_x, x_inp.grad)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(
            packed_grads[name], parameter.grad, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_nested_equals_padded(implementation):
    layer = make(1, 5, 8, 6, fixed=False, implementation=implementation, dtype=torch.float64)
    lengths = torch.tensor([3, 17, 1])
    x_inp = torch.randn(3, 17, 8, dtype=torch.float64)
    samples = [x[:n].clone() for x, n in zip(x_inp, lengths, strict=True)]
    nested = torch.nested.nested_tensor(samples, layout=torch.jagged, requires_grad=True)
    mask = torch.arange(17) < lengths[:, None]
    routed, padded = layer.route(nested), layer.route(x_inp.requires_grad_(), input_mask=mask)
    torch.testing.assert_close(routed.x_out, padded.x_out)
    assert [len(phi) for phi in routed.phi.unbind()] == lengths.tolist()
    torch.testing.assert_close(routed.phi.values(), padded.phi[mask])
    routed.x_out.square().sum().backward()
    padded.x_out.square().sum().backward()
    torch.testing.assert_close(nested.grad.values(), x_inp.grad[mask])


def test_nothing_but_empty_samples(device):
    layer = make(1, 5, 8, 6, fixed=False)
    routed = layer.route(torch.randn(0, 8), cu_seqlens=torch.tensor([0, 0, 0]))
    assert routed.phi.shape == (0, 5)
    assert torch.equal(routed.x_out, torch.zeros(2, 5, 6))
    layer.route(torch.randn(0, 8), cu_seqlens=torch.tensor([0, 0, 0]), phi_out=torch.empty(0, 5))


def test_nested_must_be_jagged():
    layer = make(1, 5, 8, 6, fixed=False)
    with pytest.warns(UserWarning, match="prototype"):
        strided = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.strided)
    with pytest.raises(ValueError, match=r"a nested x_inp must be jagged"):
        layer(strided)
    jagged = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"cu_seqlens must be None for a nested x_inp"):
        layer(jagged, cu_seqlens=torch.tensor([0, 5]))
    starts, lengths = torch.tensor([0, 0]), torch.tensor([3, 6])
    holes = torch.nested.narrow(torch.randn(2, 6, 8), 1, starts, lengths, layout=torch.jagged)
    with pytest.raises(ValueError, match=r"a nested x_inp must have no holes"):
        layer(holes)
    with pytest.raises(TypeError, match=r"x_inp must be a tensor .*got a nested one"):
        layer.trace(jagged)


@pytest.mark.parametrize("implementation", ["reference", *PATHS])
def test_phi_of_some_outputs_and_into_a_memory_map(implementation, tmp_path, device):
    layer = make(20, 6, 8, 4, fixed=True, implementation=implementation)
    x_inp = torch.randn(3, 20, 8)
    whole = layer.route(x_inp)
    assert torch.equal(layer.route(x_inp, outputs=[4, 1]).phi, whole.phi[..., [4, 1]])
    file = torch.from_file(str(tmp_path / "phi"), shared=True, size=360, device="cpu").view(3, 20, 6)
    routed = layer.route(x_inp, phi_out=file)
    assert routed.phi is file
    again = torch.from_file(str(tmp_path / "phi"), shared=False, size=360, device="cpu").view(3, 20, 6)
    assert torch.equal(again.to(device), whole.phi)
    torch.testing.assert_close(routed.x_out, whole.x_out)
    assert not routed.x_out.requires_grad
    assert not file.requires_grad


def test_fused_says_why_it_cannot(monkeypatch):
    layer = make(20, 6, 8, 4, fixed=True, implementation="fused").cpu()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'fused' needs x_inp on a CUDA device .*got cpu"):
        layer(torch.randn(20, 8, device="cpu"))
    monkeypatch.setattr("vecroute.ops.HAS_TRITON", False)
    with pytest.raises(ValueError, match=r"'fused' needs the package triton"):
        layer(torch.randn(20, 8, device="cpu"))


def test_bad_outputs_and_phi_out():
    layer = make(20, 6, 8, 4, fixed=True)
    x_inp = torch.randn(3, 20, 8)
    with pytest.raises(ValueError, match=r"outputs must be .* from 0 to n_out - 1 = 5, got \[6\]"):
        layer.route(x_inp, outputs=[6])
    for outputs in (2, [1.5], "ab"):
        with pytest.raises(TypeError, match=r"outputs must be a sequence of ints .*got"):
            layer.route(x_inp, outputs=outputs)
    with pytest.raises(ValueError, match=r"phi_out must be .*here \[3, 20, 6\], .*got \[3, 20, 5\]"):
        layer.route(x_inp, phi_out=torch.empty(3, 20, 5))
    with pytest.raises(TypeError, match=r"phi_out must be .*got list"):
        layer.route(x_inp, phi_out=[1.0])
    with pytest.raises(ValueError, match=r"phi_out must be a floating-point tensor .*got torch.int64"):
        layer.route(x_inp, phi_out=torch.empty(3, 20, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"phi_out must be .*requires_grad=True"):
        layer.route(x_inp, phi_out=torch.empty(3, 20, 6, requires_grad=True))


@pytest.mark.parametrize(
    ("x_shape", "cu_seqlens", "message"),
    [
        ((30, 8), [0, 30], "cu_seqlens must be .*got list"),
        ((30, 8), torch.tensor([0.0, 30.0]), "cu_seqlens must be .*got dtype torch.float32"),
        ((30, 8), torch.tensor([0, 29]), r"rises from 0 to total=30, got \[0, 29\]"),
        ((30, 8), torch.tensor([0, 20, 10, 30]), r"got \[0, 20, 10, 30\]"),
        ((30, 8), torch.tensor([30]), r"got \[1\]"),
        ((2, 30, 8), torch.tensor([0, 30]), r"x_inp \[total, d_inp\] and no masks, got n_inp=None"),
    ],
)
def test_bad_cu_seqlens(x_shape, cu_seqlens, message, device):
    layer = make(1, 5, 8, 6, fixed=False)
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.to(device)  # [b + 1]
    with pytest.raises((ValueError, TypeError), match=message):
        layer(torch.randn(x_shape), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("masked", ["", "input and pair"])
@pytest.mark.parametrize("implementation", PATHS)
def test_opcheck(implementation, masked, fixed, nan_filled_memory):
    """torch.library's own checks: schema, autograd, fake implementation, compiled with autograd.

    They compare every byte that is saved for the backward pass, so unwritten memory must always be the same.
    """
    layer = make(9, 3, 4, 2, fixed=fixed, implementation=implementation)
    options = {"implementation": layer.implementation, "tuning": layer.tuning}
    masks = masks_for(masked, (2,), 9, 3)
    x_inp = torch.randn(2, 9, 4, requires_grad=True)
    arguments = operator_arguments(
        x_inp, layer.weights(), masks.get("input_mask"), masks.get("pair_mask"), 1 / 3, **options
    )
    result = torch.library.opcheck(torch.ops.vecroute.loop.default, (*arguments, 2, True, None))
    assert set(result.values()) == {"SUCCESS"}


def test_without_a_graph_nothing_is_saved_for_backward():
    layer = make(9, 3, 4, 2, fixed=False, implementation="chunked")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t), torch.no_grad():
        layer(torch.randn(2, 9, 4, requires_grad=True))
    assert saved == []


@pytest.mark.parametrize("implementation", PATHS)
def test_no_samples_have_no_gradient(implementation, nan_filled_memory):
    layer = make(5, 3, 8, 4, fixed=True, implementation=implementation)
    for name, value in outcome(layer, torch.randn(0, 5, 8)).items():
        assert not value.any(), name  # unwritten memory is NaN, which is not zero


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("implementation", PATHS)
def test_parameters_with_any_strides(implementation, fixed, nan_filled_memory):
    """The results are the same to the last digit."""
    layer = make(12, 3, 20, 4, fixed=fixed, implementation=implementation)
    expected = outcome(layer, x_inp := torch.randn(2, 12, 20))
    for parameter in layer.parameters():
        parameter.data = torch.stack((parameter.data, parameter.data), -1)[..., 0]
    for name, value in outcome(layer, x_inp).items():
        assert torch.equal(value, expected[name]), name
    assert_layer_as_good(layer, x_inp)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("implementation", PATHS)
def test_one_output_has_no_gradient_of_its_scores(implementation, fixed):
    """Not even rounding leaves a gradient, which would be large: with d_out = 1 nothing is normalised."""
    layer = make(7, 1, 3, 1, fixed=fixed, implementation=implementation, n_iters=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter *= 30
    values = outcome(layer, torch.randn(2, 7, 3))
    for name in ("W_G1", "W_G2", "B_G2", "W_S", "B_S"):
        assert not values[f"grad {name}"].any(), name


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("shift", [20, -200])
@pytest.mark.parametrize("implementation", PATHS)
def test_gradients_of_extreme_scores(implementation, shift, fixed):
    """For such scores, f(z) is 1 or 0 in float32, but 1 - f(z) and R are not."""
    layer = make(13, 4, 17, 6, fixed=fixed, implementation=implementation)
    with torch.no_grad():
        layer.B_S += shift
    assert_layer_as_good(layer, torch.randn(2, 13, 17))


def test_chunks_fit_a_grid():
    """CUDA launches at most 65,535 blocks in each dimension but the first. Samples use another one."""
    layer = make(1, 2, 1, 1, fixed=True)
    p = problem_of(layer, torch.randn(140_000, 1, 1), "chunked", tuning=Tuning(rows=100_000))
    samples = [chunk.samples for chunk in chunks(p, 1, 1)]
    assert samples == [slice(0, 65_535), slice(65_535, 131_070), slice(131_070, 140_000)]


def test_each_thread_has_as_many_samples(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    layer = make(350, 64, 2, 1, fixed=False).cpu()
    p = problem_of(layer, torch.randn(9, 350, 2, device="cpu"), "chunked")
    assert [chunk.samples for chunk in chunks(p, 1, 1)] == [
        slice(0, 4), slice(4, 8), slice(8, 9)
    ]  # fmt: skip


@pytest.mark.parametrize(("n_out", "rows"), [(50, 0), (3, 1)], ids=["whole rows", "one row"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pairs_that_fill_the_memory_they_wait_in(implementation, n_out, rows, nan_filled_memory):
    """A single sample stores pairs in the gradient of W_A, which other programs write at the same time."""
    layer = make(5, n_out, 150, 3, fixed=True, implementation=implementation)
    assert_layer_as_good(with_chunks(layer, rows), torch.randn(5, 150))


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pairs_of_several_iterations_wait(implementation, fixed, nan_filled_memory):
    """The pairs of all iterations are side by side, in the order of the rows of M."""
    layer = make(13, 2, 20, 6, fixed=fixed, implementation=implementation, n_iters=4)
    assert_layer_as_good(with_chunks(layer), torch.randn(3, 13, 20))


@pytest.mark.parametrize("implementation", PATHS)
def test_plain_calls_go_past_the_dispatcher(implementation, monkeypatch):
    """The numbers equal the operator's, which only compilers, modes and fake tensors need.

    The operator does not normalise x_out. PyTorch does after it, with other rounding than our kernels.
    """
    layer = make(9, 3, 5, 4, fixed=True, implementation=implementation, normalize=False)
    x_inp = torch.randn(2, 9, 5)
    plain = outcome(layer, x_inp)
    monkeypatch.setattr("vecroute.ops.autograd.is_plain", lambda x: False)
    for name, expected in outcome(layer, x_inp).items():
        torch.testing.assert_close(plain[name], expected, rtol=0, atol=0)
    monkeypatch.undo()
    for op in ("loop_op", "loop_backward_op"):
        monkeypatch.setattr(f"vecroute.ops.autograd.{op}", None)
    outcome(layer, x_inp)


@pytest.mark.parametrize("implementation", PATHS)
def test_plain_calls_and_operators_normalise_alike(implementation, monkeypatch):
    layer = make(9, 3, 5, 4, fixed=True, implementation=implementation)
    x_inp = torch.randn(2, 9, 5)
    plain = outcome(layer, x_inp)
    monkeypatch.setattr("vecroute.ops.autograd.is_plain", lambda x: False)
    for name, expected in outcome(layer, x_inp).items():
        torch.testing.assert_close(plain[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fixed", [True, False])
def test_names_of_parameters(fixed):
    weights = make(9, 3, 5, 4, fixed=fixed).weights()
    given = [name for name, w in weights._asdict().items() if w is not None]
    assert list(Weights.names(variable=not fixed)) == given


def test_lengths_of_plain_calls():
    """sqrt(n_inp) of every sample, and 1 where there are no inputs."""
    for n_inp in (0, 1, 7, 350, 4925, 999_983):
        lengths = sqrt_lengths(torch.empty(1, 4).expand(2, 3, n_inp, 4), None, None, "")  # [6, 1]
        expected = torch.full((6, 1), math.sqrt(max(1, n_inp)))  # [6, 1]
        torch.testing.assert_close(lengths, expected, rtol=2e-7, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_is_traced_is_an_operator():
    """The traced graph has an operator, because a Python function could not be saved."""
    layer, x_inp = make(9, 3, 5, 4, fixed=True, implementation="chunked"), torch.randn(9, 5)
    assert "vecroute::loop" in str(torch.jit.trace(layer, x_inp, check_trace=False).inlined_graph)
