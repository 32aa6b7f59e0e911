"""Captured in a CUDA graph, a layer gives the same numbers as launched kernel by kernel."""

import pytest
import torch
from samples import with_noise

import vecroute as vr
from vecroute.ops import Tuning

SHAPES = [  # n_inp, the shape of x_inp, rows of a chunk
    (None, (3, 700, 64), 0),
    (None, (3, 700, 64), 128),  # the same memory again, chunk after chunk
    (None, (900, 256), 0),  # pairs wait
    (500, (2, 500, 64), 0),
    (500, (500, 64), 128),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # PyTorch captures on another
@pytest.mark.parametrize(("n_inp", "shape", "rows"), SHAPES, ids=str)
def test_captured_as_eager(n_inp, shape, rows, tf32):
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
        captured = torch.cuda.make_graphed_callables(layer, (torch.randn(shape, requires_grad=True),))
        for x_inp, expected in zip(inputs * 3, eager * 3, strict=True):
            for got, each in zip(gradients(captured, x_inp), expected, strict=True):
                torch.testing.assert_close(got, each, rtol=2e-3, atol=2e-3 * float(each.abs().max()))
