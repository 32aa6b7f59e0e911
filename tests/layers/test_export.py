"""The layers compile in one graph for every length, and export to torch.export and ONNX with masks."""

import io
import shutil
from collections.abc import Iterable

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch.export import Dim

import vecroute as vr
from tests.helpers.samples import KINDS, inputs, make

INDUCTOR = [
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.slow,
]
# "auto" exports as "reference". The two general kinds and the two matrix kinds differ in one operator each.
DEFAULT_KINDS = ("auto", "general", "matrix")
BOTH_MASKS = ["input_mask", "pair_mask"]
MASKS = ([], ["input_mask"], ["pair_mask"], BOTH_MASKS)


def case(*values: object, slow: bool):
    """Return one parametrized case, named after its values."""
    names = [" and ".join(value) or "no mask" if isinstance(value, list) else str(value) for value in values]
    return pytest.param(*values, id="-".join(names), marks=[pytest.mark.slow] if slow else [])


# Each graph takes seconds to build. The default run has every kind of layer and every kind of mask, and the
# slow tests have all their combinations.
BACKENDS = [
    *(case("aot_eager", kind, slow=kind not in DEFAULT_KINDS) for kind in KINDS),
    *(pytest.param("inductor", kind, marks=INDUCTOR) for kind in KINDS),
]
EXPORTS = [
    case(kind, masks, slow=kind not in DEFAULT_KINDS or (masks != BOTH_MASKS and kind != "auto"))
    for kind in KINDS
    for masks in MASKS
]


@pytest.fixture(autouse=True)
def no_graphs_from_before(tmp_path):
    """Start without the graphs of earlier tests. Inductor caches them on disk by the names of operators."""
    torch.compiler.reset()
    with fresh_cache(dir=tmp_path):
        yield


def gradients(layer: nn.Module, x_out: Tensor, x_inp: Tensor) -> list[Tensor]:
    of = [x_inp, *layer.parameters()]
    return list(torch.autograd.grad(x_out.square().sum(), of, materialize_grads=True))


@pytest.mark.parametrize(("backend", "kind"), BACKENDS)
def test_compile_in_one_graph_for_every_length(backend, kind):
    layer, counter = make(kind).double(), CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n_inp in (11, 13, 17, 6):
        x_inp, *masks = inputs(2, n_inp, torch.float64)
        x_inp.requires_grad_()
        got, expected = compiled(x_inp, *masks), layer(x_inp, *masks)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            gradients(layer, got, x_inp), gradients(layer, expected, x_inp), rtol=1e-9, atol=1e-9
        )
    # One graph for the first length, and one for all others.
    assert counter.frame_count == 2


@pytest.mark.parametrize("kind", ["auto", "reference"])
def test_compile_route_of_a_fixed_layer_for_every_batch(kind):
    layer, counter = make(kind, n_inp=11).double(), CompileCounterWithBackend("aot_eager")
    route = torch.compile(layer.route, fullgraph=True, backend=counter)
    for batch in (2, 3, 5):
        arguments = inputs(batch, dtype=torch.float64)
        torch.testing.assert_close(tuple(route(*arguments)), tuple(layer.route(*arguments)))
    assert counter.frame_count == 2


@pytest.mark.parametrize("kind", KINDS)
def test_compile_under_autocast(kind):
    layer, x = make(kind), inputs()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = compiled(*x), layer(*x)
    assert not torch.equal(expected.float(), layer(*x))
    torch.testing.assert_close(got, expected)


class Everything(nn.Module):
    """Return everything that a layer returns as a flat tuple, the outputs of an exported graph."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.eval()

    def forward(
        self, x_inp: Tensor, input_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if isinstance(self.layer, vr.VectorRouting | vr.GeneralRouting):
            return tuple(self.layer.route(x_inp, input_mask, pair_mask))
        return (self.layer(x_inp, input_mask, pair_mask),)


def arguments(batch: int, n_inp: int, masks: list[str]) -> dict[str, Tensor]:
    """Return x_inp and the named masks. If there are masks, the last sample is unused and contains NaN."""
    x_inp, input_mask, pair_mask = inputs(batch, n_inp)
    if masks:
        input_mask[-1], pair_mask[-1] = False, False
        x_inp[-1] = torch.nan
    named = {"input_mask": input_mask, "pair_mask": pair_mask}
    return {"x_inp": x_inp, **{name: named[name] for name in masks}}


def example_of(n_inp: int | None, masks: list[str]) -> dict:
    """Return the arguments of both exporters, with dynamic batch and, unless n_inp is given, length."""
    dynamic = {0: Dim("batch", min=1), **({} if n_inp else {1: Dim("n_inp", min=1)})}
    example = arguments(2, 11, masks)
    return {"args": (), "kwargs": example, "dynamic_shapes": dict.fromkeys(example, dynamic)}


def assert_all_same(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for value, expected_value in zip(got, expected, strict=True):
        assert expected_value.isfinite().all()
        torch.testing.assert_close(value, expected_value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "masks"), EXPORTS)
def test_torch_export_for_every_batch_and_length(kind, masks):
    module, file = Everything(make(kind)), io.BytesIO()
    torch.export.save(torch.export.export(module, **example_of(None, masks)), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch, n_inp in ((2, 11), (1, 1), (5, 29)):
        example = arguments(batch, n_inp, masks)
        assert_all_same([t.detach() for t in loaded(**example)], module(**example))


# Warnings of the exporter about its own code.
@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:# The axis name. .* will not be used:UserWarning:torch.onnx")
class TestOnnx:
    # The test of low scores has the input mask alone.
    @pytest.mark.parametrize("masks", [case(masks, slow=masks == ["input_mask"]) for masks in MASKS])
    def test_every_mask(self, masks, tmp_path):
        self.check(make("auto"), masks, tmp_path)

    @pytest.mark.parametrize("kind", [case(k, slow=k not in DEFAULT_KINDS) for k in KINDS if k != "auto"])
    def test_every_layer(self, kind, tmp_path):
        self.check(make(kind), BOTH_MASKS, tmp_path)

    def test_a_fixed_length(self, tmp_path):
        self.check(make("auto", 11), BOTH_MASKS, tmp_path, n_inp=11)

    @pytest.mark.parametrize("kind", [case("auto", slow=False), case("general", slow=True)])
    def test_scores_so_low_that_every_logistic_underflows(self, kind, tmp_path):
        layer = make(kind)
        nn.init.constant_(layer.B_S if kind == "auto" else layer.S.B_S, -300.0)
        self.check(layer, ["input_mask"], tmp_path)

    def check(self, layer: nn.Module, masks: list[str], tmp_path, n_inp: int | None = None) -> None:
        """Compare onnxruntime with PyTorch for several batches and, unless n_inp is given, lengths."""
        module = Everything(layer)
        program = torch.onnx.export(module, **example_of(n_inp, masks), dynamo=True, verbose=False)
        program.save(tmp_path / "layer.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "layer.onnx")
        for batch, length in ((2, 11), (1, 1), (5, 29), (3, 4)):
            example = arguments(batch, n_inp or length, masks)
            outputs = session.run(None, {name: value.numpy() for name, value in example.items()})
            assert_all_same(map(torch.from_numpy, outputs), module(**example))
