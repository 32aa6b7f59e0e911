"""On a GPU, a layer gives the same numbers in a CUDA graph, compiled, and eager."""

import pytest
import torch

import vecroute as vr
from tests.helpers.samples import with_chunks, with_noise
from vecroute.ops import autograd

SHAPES = [  # n_inp, the shape of x_inp, rows of a chunk (None for the batch path)
    (None, (3, 700, 64), None),
    (None, (3, 700, 64), 0),
    (None, (3, 700, 64), 128),  # chunks reuse the same memory
    (None, (900, 256), 0),  # the backward pass stores pairs in the rows of grad_x
    (500, (2, 500, 64), None),
    (500, (2, 500, 64), 0),
    (500, (500, 64), 128),
]


def make(n_inp: int | None, shape: tuple[int, ...], rows: int | None) -> vr.VectorRouting:
    layer = with_noise(vr.VectorRouting(n_inp=n_inp, n_out=48, d_inp=shape[-1], d_out=64, n_iters=3))
    return layer if rows is None else with_chunks(layer, rows)


def gradients(layer: vr.VectorRouting, function, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Call a function of the layer on the same four inputs, and return each x_out and every gradient."""
    torch.manual_seed(1)
    found = []
    for _ in range(4):
        x_inp = torch.randn(shape, requires_grad=True)
        x_out = function(x_inp)  # [..., j, h]
        grads = torch.autograd.grad(x_out, [x_inp, *layer.parameters()], torch.randn(x_out.shape))
        found += [t.detach().clone() for t in (x_out, *grads)]  # a CUDA graph reuses their memory
    return found


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compare to the digits of tf32, except single numbers (grad B_A), where a long sum cancels."""
    for each, other in ((a, b) for a, b in zip(got, expected, strict=True) if b.numel() > 1):
        torch.testing.assert_close(each, other, rtol=2e-3, atol=2e-3 * float(other.abs().max()))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # PyTorch captures on another stream
@pytest.mark.parametrize(("n_inp", "shape", "rows"), SHAPES, ids=str)
def test_captured(n_inp, shape, rows, tf32):
    with torch.device("cuda"):
        layer = make(n_inp, shape, rows)
        expected = gradients(layer, layer, shape)
        captured = torch.cuda.make_graphed_callables(layer, (torch.randn(shape, requires_grad=True),))
        for _ in range(3):
            assert_same(gradients(layer, captured, shape), expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # compilers emit many warnings
@pytest.mark.parametrize("options", [{"backend": "aot_eager"}, {"mode": "reduce-overhead"}], ids=str)
@pytest.mark.parametrize(("n_inp", "shape", "rows"), SHAPES, ids=str)
def test_compiled(n_inp, shape, rows, options, tf32, monkeypatch):
    torch.compiler.reset()
    with torch.device("cuda"):
        layer = make(n_inp, shape, rows)
        expected = gradients(layer, layer, shape)
        seen, run_loop = [], autograd.run_loop
        monkeypatch.setattr(autograd, "run_loop", lambda *args: (seen.append(1), run_loop(*args))[1])
        compiled = torch.compile(layer, fullgraph=True, **options)
        for _ in range(2):
            assert_same(gradients(layer, compiled, shape), expected)
        assert seen  # the streamed loop ran, not the reference
