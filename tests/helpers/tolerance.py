"""The one tolerance rule.

An implementation passes if its error against the float64 truth is at most twice that of the eager reference
in the same dtype, plus a tiny floor: forward and every gradient, in the greatest and in the RMS error.
"""

import copy

import torch
from torch import Tensor

import vecroute as vr
from vecroute.ops.common import compute_dtype


def assert_as_good(name: str, got: Tensor, same_dtype_reference: Tensor, truth: Tensor) -> None:
    """Raise unless ``got`` is within a factor 2 as near to the float64 truth as the reference in its dtype.

    The floor, relative to the greatest element of the truth: 32 units in the last place of the dtype that
    sums are computed in, and one of the dtype that the result is stored in. Where the reference is exact by
    luck, another order of summation may not be.
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
        floor *= 16  # which of two single numbers is nearer to a third is luck
    for measure in (greatest, rms):
        allowed = 2 * measure(reference_error) + floor
        # Written so that NaN fails.
        if not measure(error) <= allowed:
            raise AssertionError(
                f"{name}: max error {greatest(error):.3e}, RMS error {rms(error):.3e}; "
                f"allowed {measure.__name__} error {allowed:.3e}; "
                f"truth up to {greatest(truth):.3e}, shape {shape}, dtype {dtype}"
            )


def assert_layer_as_good(layer: vr.VectorRouting, x_inp: Tensor, **masks: Tensor) -> None:
    """Hold x_out, phi and every gradient of a layer against the reference, by the one rule."""
    got = outcome(layer, x_inp, **masks)
    same_dtype_reference = outcome(twin(layer, x_inp.dtype), x_inp, **masks)
    truth = outcome(twin(layer, torch.float64), x_inp.double(), **masks)
    assert got.keys() == truth.keys()
    for name in truth:
        assert_as_good(name, got[name], same_dtype_reference[name], truth[name])


def outcome(layer: vr.VectorRouting, x_inp: Tensor, **masks: Tensor) -> dict[str, Tensor]:
    """x_out, phi, and the gradients of x_inp and of every parameter (``grad W_A``, zero where there is none).

    The gradient upstream of x_out is the same random numbers in every dtype.
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
    """The same layer in another dtype, routing by the reference."""
    layer = copy.deepcopy(layer).to(dtype)
    layer.implementation = "reference"
    return layer


def upstream(value: Tensor) -> Tensor:
    """A random gradient for value, the same for one shape in every dtype, since bfloat16 can hold it."""
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(value.shape, generator=generator, device="cpu").bfloat16().to(value)


def greatest(x: Tensor) -> float:
    """The greatest absolute value, 0 if x is empty; NaN if there is one."""
    return x.abs().max().item() if x.numel() else 0.0


def rms(x: Tensor) -> float:
    """The root of the mean square, 0 if x is empty."""
    return x.square().mean().sqrt().item() if x.numel() else 0.0
