"""Long work in pieces: the routing loop asks between two chunks whether to continue."""

import threading

import pytest
import torch

import vecroute as vr
from vecroute.ops.pieces import between_pieces, in_pieces


class Stop(Exception):
    pass


def test_a_loop_asks_before_each_chunk_forward_and_backward():
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=8, d_out=8)
    asked = []
    x_inp = torch.randn(9000, 8, requires_grad=True)  # [i, d], 5 chunks
    with in_pieces(lambda: asked.append(1)):
        x_out = layer(x_inp)  # [j, h]
        forward = len(asked)
        x_out.sum().backward()
    assert forward >= 5 * layer.n_iters
    assert len(asked) >= 2 * forward


def test_what_is_raised_between_pieces_ends_the_work():
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=8, d_out=8)
    left = iter(range(3))

    def between():
        if next(left, None) is None:
            raise Stop

    x_inp = torch.randn(9000, 8)  # [i, d]
    expected = layer(x_inp)  # [j, h]
    with pytest.raises(Stop), in_pieces(between):
        layer(x_inp)
    assert torch.equal(layer(x_inp), expected)  # the stopped call leaves no trace


def test_other_threads_are_not_asked():
    asked = []
    with in_pieces(lambda: asked.append(threading.current_thread())):
        thread = threading.Thread(target=between_pieces)
        thread.start()
        thread.join()
        assert asked == []
        between_pieces()
    between_pieces()
    assert asked == [threading.current_thread()]
