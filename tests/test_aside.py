"""What runs beside the rest in a CUDA graph gives the same numbers."""

import pytest
import torch
from samples import with_noise

import vecroute as vr
from vecroute.ops import Tuning, aside

SHAPES = [  # n_inp, the shape of x_inp, rows of a chunk
    (None, (3, 700, 64), 0),
    (None, (3, 700, 64), 128),  # the same memory again, chunk after chunk
    (None, (900, 256), 0),  # pairs wait
    (500, (2, 500, 64), 0),
    (500, (500, 64), 128),
]


def test_elsewhere_it_is_done_in_turn():
    beside = aside.Aside(torch.device("cpu"))
    total = torch.zeros(2)
    with beside(total):
        total += 1
    assert not beside.used
    beside.join()
    assert total.tolist() == [1, 1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # PyTorch captures on another
@pytest.mark.parametrize(("n_inp", "shape", "rows"), SHAPES, ids=str)
def test_captured_as_eager(n_inp, shape, rows, tf32, monkeypatch):
    calls, stream_of = [], aside.stream_of
    monkeypatch.setattr(aside, "stream_of", lambda device: (calls.append(1), stream_of(device))[1])
    with torch.device("cuda"):
        layer = vr.VectorRouting(n_inp=n_inp, n_out=48, d_inp=shape[-1], d_out=64, n_iters=3)
        layer = with_noise(layer)
        layer.tuning = Tuning(rows=rows)
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(4)]
        upstream = torch.randn(*shape[:-2], 48, 64)

        def gradients(function, x_inp):
            grads = torch.autograd.grad(function(x_inp), [x_inp, *layer.parameters()], upstream)
            return [grad.clone() for grad in grads]

        eager = [gradients(layer, x_inp) for x_inp in inputs]
        assert not calls
        captured = torch.cuda.make_graphed_callables(layer, (inputs[0],))
        assert calls
        for x_inp, expected in zip(inputs * 3, eager * 3, strict=True):
            for got, each in zip(gradients(captured, x_inp), expected, strict=True):
                torch.testing.assert_close(got, each, rtol=2e-3, atol=2e-3 * float(each.abs().max()))
