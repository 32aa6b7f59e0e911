"""``route(x_inp).x_out`` agrees with ``layer(x_inp)`` by the tolerance rule, whatever path each takes."""

import pytest
import torch

import vecroute as vr
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import assert_as_good, twin
from vecroute.ops import autograd

pytestmark = pytest.mark.usefixtures("device", "nan_filled_memory")
CASES = {  # name: n_inp, batch, implementation, whether the batch path is avoided, phi_out
    "batch": (None, (2,), "fused", False, False),
    "batch, fixed": (20, (2,), "fused", False, True),
    "chunks": (None, (2,), "fused", True, False),
    "one long sample": (20, (), "fused", True, False),
    "one long sample into memory": (20, (), "fused", True, True),
    "chunked": (None, (3,), "chunked", False, False),
    "chunked, fixed": (20, (), "chunked", False, True),  # without a backward pass no dot products are kept
}


@pytest.mark.parametrize("what", CASES)
def test_route_agrees_with_a_call(what, limits):
    n_inp, batch, implementation, chunks, into_memory = CASES[what]
    limits(HALVES_ROWS=1)
    sizes = {"n_inp": n_inp, "n_out": 8, "d_inp": 128, "d_out": 9, "n_iters": 3}
    layer = with_noise(vr.VectorRouting(**sizes, implementation=implementation))
    layer = with_chunks(layer, 7) if chunks else layer
    x_inp = torch.randn(*batch, 20, 128)
    phi_out = torch.empty(*batch, 20, 8) if into_memory else None
    with torch.no_grad():
        truth, reference = twin(layer, torch.float64)(x_inp.double()), twin(layer, torch.float32)(x_inp)
    for x_out in (layer(x_inp), layer.route(x_inp, phi_out=phi_out).x_out):
        assert_as_good("x_out", x_out.detach(), reference, truth)


def test_a_call_and_a_route_that_take_different_kernels(limits, monkeypatch):
    """With many outputs, pairs are bfloat16 in a call, but float32 in the last iteration of ``route``."""
    limits(WIDE_OUTPUTS=(8, 4096))
    layer = vr.VectorRouting(n_inp=20, n_out=16, d_inp=32, d_out=9, implementation="fused")
    layer, x_inp, seen = with_chunks(with_noise(layer)), torch.randn(20, 32), []
    plan_of = autograd.plan_of
    monkeypatch.setattr(autograd, "plan_of", lambda *a, **k: (seen.append(plan_of(*a, **k)), seen[-1])[1])
    with torch.no_grad(), torch.autocast(x_inp.device.type, torch.bfloat16):
        call, routed = layer(x_inp), layer.route(x_inp).x_out
        reference = twin(layer, torch.float32)(x_inp)
    assert {plan.path for plan in seen} == {"wide"}
    truth = twin(layer, torch.float64)(x_inp.double()).detach()
    error = (reference.double() - truth).norm()
    assert not torch.equal(call, routed)
    for x_out in (call, routed):
        assert (x_out.double() - truth).norm() <= 2 * error + 1e-5 * truth.norm()
