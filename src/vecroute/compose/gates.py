"""Hold the gates and scales of a module fixed, so that it becomes affine in its input.

An activation such as GELU is its argument times a gate, f(u) = (f(u) / u) u; a normalisation is a linear map
times a scale; a sigmoid or a softmax is a gate by itself. Run under ``Gates``, a module computes what it
always computes, but its gradient sees gates and scales as constants; run again, on another input, it keeps
them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A value, and the affine map with gates and scales held that has this value here.
Held = tuple[Tensor, Callable[..., Tensor]]


class Gates(TorchFunctionMode):
    """Gates and scales of one module: taken from its first run, held in every later one."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Callable[..., Tensor] | None] = []  # in the order of calls; None: nothing to hold
        self.calls: int | None = None  # how many of them this run has used; None in the first run

    def run(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The value of module(x) in the first run, that of the affine map it has become in later ones."""
        with self:
            x_out = module(_mark(x.view_as(x), "x"))
        self.calls = 0
        return x_out

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        rule = RULES.get(name)
        if self.calls is None:
            depends = any(map(_marked, (*args, *kwargs.values())))
            held = None
            if rule is not None and depends:
                with torch.no_grad():
                    held = rule(func, *args, **kwargs)
            if rule is not None:
                self.held.append(None if held is None else held[1])
            out = (
                func(*args, **kwargs) if held is None else _WithValue.apply(held[0], held[1](*args, **kwargs))
            )
            return _mark(out, "gate" if rule is _gated else "x") if depends else out
        if rule is None:
            return func(*args, **kwargs)
        affine = self.held[self.calls]
        self.calls += 1
        return func(*args, **kwargs) if affine is None else affine(*args, **kwargs)


class _WithValue(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx, value, affine):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return None, grad


with_value: Callable[[Tensor, Tensor], Tensor] = _WithValue.apply


def _gated(func, input, *args, **kwargs) -> Held:
    """f(u) = gate u, where f(0) = 0; at u = 0 the gate is the slope."""
    u = input.where(input != 0, 1e-6)
    value = func(u.clone(), *args, **kwargs)
    gate = value / u
    return value.where(input != 0, 0.0), lambda input, *_, **__: gate * input


def _constant(func, *args, **kwargs) -> Held:
    """A gate by itself, or the scale of a hand-written normalisation."""
    value = func(*args, **kwargs)
    return value, lambda *_, **__: value


def _layer_norm(func, input, normalized_shape, weight=None, bias=None, eps=1e-5, *args) -> Held:
    dims = tuple(range(-len(normalized_shape), 0))
    scale = (input.var(dims, correction=0, keepdim=True) + eps).rsqrt()

    def affine(input, normalized_shape, weight=None, bias=None, *_, **__):
        x = (input - input.mean(dims, keepdim=True)) * scale
        x = x if weight is None else x * weight
        return x if bias is None else x + bias

    return func(input, normalized_shape, weight, bias, eps), affine


def _rms_norm(func, input, normalized_shape, weight=None, eps=None) -> Held:
    dims = tuple(range(-len(normalized_shape), 0))
    scale = (input.square().mean(dims, keepdim=True) + (eps or torch.finfo(input.dtype).eps)).rsqrt()

    def affine(input, normalized_shape, weight=None, *_, **__):
        return input * scale if weight is None else input * scale * weight

    return func(input, normalized_shape, weight, eps), affine


def _normalize(func, input, p=2.0, dim=1, eps=1e-12, out=None) -> Held:
    scale = input.norm(p, dim, keepdim=True).clamp(min=eps)
    return func(input, p, dim, eps), lambda input, *_, **__: input / scale


def _glu(func, input, dim=-1) -> Held:
    gate = input.chunk(2, dim)[1].sigmoid()
    return func(input, dim), lambda input, *_, **__: input.chunk(2, dim)[0] * gate


def _mul(func, input, other) -> Held | None:
    """In a product of an activation with another function of x, as in SwiGLU, the activation is the gate."""
    gates = [_marked(t) == "gate" for t in (input, other)]
    if not (_marked(input) and _marked(other)) or gates[0] == gates[1]:
        return None
    if gates[0]:
        gate = input.detach()
        return func(input, other), lambda _, other: gate * other
    gate = other.detach()
    return func(input, other), lambda input, _: input * gate


GATED = """relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish hardswish tanh tanhshrink softsign
    softshrink hardshrink dropout dropout1d dropout2d dropout3d abs"""
CONSTANT = """sigmoid hardsigmoid softmax sqrt rsqrt std norm linalg_norm linalg_vector_norm"""
RULES: dict[str, Callable[..., Held | None]] = {
    **dict.fromkeys(GATED.split(), _gated),
    **dict.fromkeys(CONSTANT.split(), _constant),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "normalize": _normalize,
    "glu": _glu,
    "mul": _mul,
}


def _mark(value: Any, mark: str) -> Any:
    """Remember on a tensor, or on those in a tuple or list, that it depends on x."""
    if isinstance(value, Tensor):
        value.depends_on_x = mark  # type: ignore[attr-defined]
    elif isinstance(value, tuple | list):
        for part in value:
            _mark(part, mark)
    return value


def _marked(value: Any) -> str:
    """ "x" or "gate" if a tensor, or one in a tuple or list, depends on x; else an empty string."""
    if isinstance(value, Tensor):
        return getattr(value, "depends_on_x", "")
    if isinstance(value, tuple | list):
        return next((mark for mark in map(_marked, value) if mark), "")
    return ""
