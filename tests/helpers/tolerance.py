"""The tolerance rule.

An implementation passes if its error against the float64 truth is at most twice the error of the eager
reference in the same dtype, plus a tiny floor. The rule holds for outputs and every gradient, for the
greatest error and for the RMS error.
"""

import copy

import torch
from torch import Tensor

import vecroute as vr
from vecroute.ops.common import compute_dtype


def assert_as_good(name: str, got: Tensor, same_dtype_reference: Tensor, truth: Tensor) -> None:
    """Raise unless the error of ``got`` is at most twice the error of the reference, plus the floor.

    Both errors are against the float64 truth. The floor is relative to the greatest element of the truth: 32
    units in the last place of the dtype of sums, plus one unit of the dtype of the result. It is needed
    because the reference may be exact by luck, while another order of summation is not.
    """
    shape, dtype, reference_dtype = list(truth.shape), got.dtype, same_dtype_reference.dtype
    assert list(got.shape) == shape, f"{name}: shape {list(got.shape)}, the truth has {shape}"
    assert dtype == reference_dtype, f"{name}: {dtype}, the reference has {reference_dtype}"
    assert truth.dtype == torch.float64, f"{name}: the truth is {truth.dtype}, not float64"
    assert truth.isfinite().all(), f"{name}: the truth is not finite"
    error, reference_error = got.double() - truth, same_dtype_reference.double() - truth
    summed_in, stored_in = torch.finfo(compute_dtype(dtype)), torch.finfo(dtype)
    floor = (32 * summed_in.eps + stored_in.eps) * max(greatest(truth), stored_in.smallest_normal)
    if truth.numel() == 1:
        floor *= 16  # for a single number, it is luck which of two results is closer to the truth
    for measure in (greatest, rms):
        allowed = 2 * measure(reference_error) + floor
        # The condition is written so that NaN fails.
        if not measure(error) <= allowed:
            raise AssertionError(
                f"{name}: max error {greatest(error):.3e}, RMS error {rms(error):.3e}; "
                f"allowed {measure.__name__} error {allowed:.3e}; "
                f"truth up to {greatest(truth):.3e}, shape {shape}, dtype {dtype}"
            )


def assert_layer_as_good(layer: vr.VectorRouting, x_inp: Tensor, **masks: Tensor) -> None:
    """Compare x_out, phi and every gradient of a layer with the reference, by the tolerance rule."""
    got = outcome(layer, x_inp, **masks)
    same_dtype_reference = outcome(twin(layer, x_inp.dtype), x_inp, **masks)
    truth = outcome(twin(layer, torch.float64), x_inp.double(), **masks)
    assert got.keys() == truth.keys()
    for name in truth:
        assert_as_good(name, got[name], same_dtype_reference[name], truth[name])


def outcome(layer: vr.VectorRouting, x_inp: Tensor, **masks: Tensor) -> dict[str, Tensor]:
    """Return x_out, phi, and the gradients of x_inp and every parameter (``grad W_A``; zero if None).

    The upstream gradient of x_out has the same random numbers in every dtype.
    """
    layer.zero_grad()
    x_inp = x_inp.detach().clone().requires_grad_()  # [..., i, d]
    routed = layer.route(x_inp, **masks)
    routed.x_out.backward(upstream(routed.x_out))
    values = {"x_out": routed.x_out.detach(), "phi": routed.phi.detach(), "grad x_inp": x_inp.grad}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        values[f"grad {name}"] = torch.zeros_like(parameter) if grad is None else grad.clone()
    return values


def twin(layer: vr.VectorRouting, dtype: torch.dtype) -> vr.VectorRouting:
    """Return a copy of the layer in another dtype, with the reference implementation."""
    layer = copy.deepcopy(layer).to(dtype)
    layer.implementation = "reference"
    return layer


def upstream(value: Tensor) -> Tensor:
    """Return a random gradient for value, which bfloat16 holds exactly, so it is the same in every dtype."""
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(value.shape, generator=generator, device="cpu").bfloat16().to(value)


def greatest(x: Tensor) -> float:
    """Return the greatest absolute value: 0 if x is empty, NaN if x contains NaN."""
    return x.abs().max().item() if x.numel() else 0.0


def rms(x: Tensor) -> float:
    """Return the root of the mean square, 0 if x is empty."""
    return x.square().mean().sqrt().item() if x.numel() else 0.0
