"""Parts of a network as affine maps, with phi, scales and gates held fixed at their values for x."""

from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor, nn

from vecroute.compose.gates import Gates, check_affine_marks, split_of
from vecroute.compose.masks import Masks, used
from vecroute.compose.modules import PerVector, check_independent_votes, check_one_tensor, module_name
from vecroute.compose.probe import check_affine, check_independent
from vecroute.compose.rules import with_value
from vecroute.layers import GeneralRouting, VectorRouting
from vecroute.layers.general import call_network
from vecroute.ops.common import compute_dtype, normalize
from vecroute.ops.group import total

# (x, unit) -> x_out. The map multiplies the bias of the votes of input i by unit_i, [..., i]. None means 1.
Affine = Callable[[Tensor, Tensor | None], Tensor]


def hold(parts: list[Affine], module: nn.Module, x: Tensor, masks: Masks) -> Tensor:
    """Return the output of a part of a network, with the gradient of its affine map at x.

    Args:
        parts: the list to which the affine map is appended.
        module: a ``PerVector``, a routing, or a module of standard operations.
        x: [..., i, d] the input of the module.
        masks: the masks of x.

    Raises:
        ValueError: the module is not affine, once its gates and scales are held.
    """
    check_one_tensor(module, x)
    if isinstance(module, PerVector):
        x_out, affine = _hold_per_vector(module, x, masks)
    elif isinstance(module, VectorRouting):
        x_out, affine = _hold_vector_routing(module, x, masks)
    elif isinstance(module, GeneralRouting):
        x_out, affine = _hold_general_routing(module, x, masks)
    else:
        x_out, affine = _hold_module(module, x, masks)
    parts.append(affine)
    return x_out


def _hold_per_vector(module: PerVector, x: Tensor, masks: Masks) -> tuple[Tensor, Affine]:
    gates = Gates()

    def affine(x: Tensor, unit: Tensor | None) -> Tensor:
        return gates.run(lambda x: module(x, masks.input_mask), x)  # [..., i, h]

    x = x.view_as(x)  # [..., i, d], a view that can have its own hook
    with split_of(module_name(module)):
        x_out = affine(x, None)  # [..., i, h]
        check_affine_marks(x_out, or_held=True)
    _stop_gradients_of_nothing(x, x_out)
    check_independent(module_name(module), module.module, x, module.probed)
    check_affine(module_name(module), module.module, x, module.probed)
    return x_out, affine


def _hold_module(module: Callable[..., Tensor], x: Tensor, masks: Masks) -> tuple[Tensor, Affine]:
    """Hold a module of standard operations, [..., i, d] -> [..., j, h] or [..., j]. It may mix vectors."""
    gates = Gates()
    given = () if masks.input_mask is None else (masks.input_mask,)
    if given and "input_mask" not in signature(getattr(module, "forward", module)).parameters:
        raise ValueError(f"input_mask: the forward of {module_name(module)} takes none")

    def affine(x: Tensor, unit: Tensor | None) -> Tensor:
        with split_of(module_name(module)):
            x_out = gates.run(lambda x: module(x, *given), x)  # [..., j] or [..., j, h]
        return x_out[..., None] if x_out.dim() == x.dim() - 1 else x_out  # [..., j, h]

    with split_of(module_name(module)):
        x_out = gates.run(lambda x: module(x, *given), x)  # [..., j] or [..., j, h]
        if not isinstance(x_out, Tensor) or x_out.dim() not in (x.dim() - 1, x.dim()):
            came = list(x_out.shape) if isinstance(x_out, Tensor) else type(x_out).__name__
            expected = f"[..., j] or [..., j, h] of x_inp {list(x.shape)}"
            raise ValueError(f"{module_name(module)} must return a tensor {expected}, got {came}")
        check_affine_marks(x_out)
    return (x_out[..., None] if x_out.dim() == x.dim() - 1 else x_out), affine


def _stop_gradients_of_nothing(x: Tensor, x_out: Tensor) -> None:
    """Set the gradients of inputs to 0, even if they are NaN, if nothing uses their outputs [..., i, h]."""
    if not (x.requires_grad and x_out.requires_grad):
        return
    counts = {}

    def look(gradient: Tensor) -> None:
        counts["i"] = (gradient != 0).any(-1, keepdim=True)  # [..., i, 1]

    x_out.register_hook(look)
    x.register_hook(lambda gradient: gradient.where(counts["i"], 0.0))


def _in_some_pair(masks: Masks) -> Tensor | None:
    """Return a mask [..., i] of the used inputs that have a used pair, or None if all inputs have one."""
    if masks.pair_mask is None:
        return masks.input_mask
    paired = masks.pair_mask.bool().any(-1)  # [..., i]
    return paired if masks.input_mask is None else paired & masks.input_mask


def _hold_vector_routing(layer: VectorRouting, x: Tensor, masks: Masks) -> tuple[Tensor, Affine]:
    """Hold phi and the scale of N in x_out_jh = N(sum_i phi_ij V_ijh). V is affine in x."""
    with torch.no_grad():
        value, phi = layer.route(x, masks.input_mask, masks.pair_mask)  # [..., j, h], [..., i, j]
        dtype = compute_dtype(x.dtype)
        phi = phi.to(dtype)  # [..., i, j]
        W_F1, W_F2, B_F2 = (w.detach().to(dtype) for w in (layer.W_F1, layer.W_F2, layer.B_F2))
        n_inp = (
            torch.full((), x.shape[-2], device=x.device)
            if masks.input_mask is None
            else masks.input_mask.sum(-1)
        )  # [...]
        (n_inp,) = total(layer.group, n_inp.expand(x.shape[:-2]))  # [...]
        sqrt_n_inp = n_inp.clamp(min=1).to(dtype).sqrt()[..., None, None]  # [..., 1, 1]

    N, paired = Gates(), _in_some_pair(masks)

    def affine(x: Tensor, unit: Tensor | None) -> Tensor:
        y = phi.mT @ used(x, paired).to(dtype)  # [..., j, d]
        s = phi.sum(-2) if unit is None else (phi * unit.to(dtype)[..., None]).sum(-2)  # [..., j]
        y, s = total(layer.group, y, s)  # [..., j, d], [..., j]
        x_out = (W_F1 * y / sqrt_n_inp) @ W_F2 + s[..., None] * B_F2  # [..., j, h]
        return (N.run(normalize, x_out) if layer.normalize else x_out).to(x.dtype)  # [..., j, h]

    return with_value(value, affine(x, masks.unit)), affine


def _hold_general_routing(layer: GeneralRouting, x: Tensor, masks: Masks) -> tuple[Tensor, Affine]:
    """Hold phi and the gates of F in x_out_jh = sum_i phi_ij V_ijh."""
    with torch.no_grad():
        value, phi = layer.route(x, masks.input_mask, masks.pair_mask)  # [..., j, h], [..., i, j]
    check_independent_votes(layer, x)
    check_affine(f"F ({module_name(layer.F)}) of GeneralRouting", layer.F, x, layer.probed)
    gates, paired = Gates(), _in_some_pair(masks)

    def votes(x: Tensor) -> Tensor:
        x = used(x, paired)  # [..., i, d]
        return gates.run(lambda x: call_network(layer.F, (x,), masks.input_mask), x)  # [..., i, j, h]

    def affine(x: Tensor, unit: Tensor | None) -> Tensor:
        V = votes(x)  # [..., i, j, h]
        if unit is not None:
            with torch.no_grad():
                bias = votes(torch.zeros_like(x))  # [..., i, j, h]
            V = V + (unit - 1)[..., None, None] * bias  # [..., i, j, h]
        return torch.einsum("...ij,...ijh->...jh", phi, V)  # [..., j, h]

    return with_value(value, affine(x, masks.unit)), affine
