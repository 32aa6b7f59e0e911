"""Rules that turn operations of PyTorch into affine maps, by holding gates, weights and scales fixed.

A rule is ``rule(func, *args, **kwargs) -> (value, affine)``. The value has the gradient of the affine map,
and ``affine`` is this map as a function of other arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FULL = (torch.float32, torch.float64)
Rule = Callable[..., tuple[Any, Callable[..., Any]]]


class NotAffine(ValueError):
    """An operation is not affine in x, and no rule holds it fixed."""

    def __init__(self, name: str):
        super().__init__(
            f"{name} is not affine in x, and no rule holds it fixed: use operations that have a rule "
            "(docs/credit.md), or hold its result fixed with .detach()"
        )


class NoScore(NotAffine):
    """The result of a module is a gate, which is held fixed, so nothing in it depends on x."""

    def __init__(self, name: str):
        ValueError.__init__(
            self,
            f"its result comes from {name}, which is held fixed, so there is nothing to split: "
            f"return the scores before {name}, and explain them",
        )


class _Linear(torch.autograd.Function):
    """A value with a custom gradient."""

    @staticmethod
    def forward(ctx, x, value, gradient):
        ctx.gradient, ctx.dtype = gradient, x.dtype
        return value[0]

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient(grad).to(ctx.dtype), None, None


def linear(x: Tensor, value: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the value. In the backward pass, x gets gradient(g) for an upstream gradient g."""
    return _Linear.apply(x, [value], gradient)  # in a list, so that autograd does not treat it as an input


def with_value(value: Tensor, affine: Tensor) -> Tensor:
    """Return the value of one tensor with the gradient of another."""
    return linear(affine, value.detach().clone(), lambda grad: grad)


def gated(func, input, *args, **kwargs):
    """Write f(u) as gate * u, for a function with f(0) = 0. At u = 0 the gate is the slope of f."""
    with torch.no_grad():
        zero = input == 0
        u = input.masked_fill(zero, 1e-6)
        changes_u = kwargs.get("inplace") or func.__name__.endswith("_")
        value = func(u.clone() if changes_u else u, *args, **kwargs)
        gate = value / u
        value = value.masked_fill(zero, 0.0)
    return linear(input, value, lambda grad: grad * gate), lambda input, *_, **__: gate * input


def constantly(value: Any) -> Callable[..., Any]:
    """Return a function that always returns the value: a gate, or the scale of a normalisation."""
    return lambda *_, **__: value


def times(which: int, gate: Tensor) -> Callable[..., Tensor]:
    """Return the product of two factors as a function that holds one of them fixed."""
    return lambda *factors: factors[1 - which] * gate


def copied(affine: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt an affine map to an operation that works in place."""
    return lambda *args, **kwargs: args[0].copy_(affine(*args, **kwargs))


def dropout(func, input, p=0.5, training=True, inplace=False):
    if training:
        return gated(func, input, p=p, training=True, inplace=inplace)
    return input, lambda input, *_, **__: input


def layer_norm(func, input, normalized_shape, weight=None, bias=None, eps=1e-5, *__):
    dims = tuple(range(-len(normalized_shape), 0))
    with torch.no_grad():
        # On a GPU, native_layer_norm returns a scale of full precision for half precision too.
        full = input.dtype in FULL or (input.is_cuda and not torch.is_autocast_enabled("cuda"))
        if full and (weight is None or weight.dtype == input.dtype):
            value, _, scale = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
        else:
            value = func(input, normalized_shape, weight, bias, eps)
            scale = (input.float().var(dims, correction=0, keepdim=True) + eps).rsqrt()
        scale = scale if weight is None else scale * weight.detach()

    def gradient(grad):
        grad = grad * scale
        return grad - grad.mean(dims, keepdim=True)

    def affine(input, *_, **__):
        x = input - input.mean(dims, keepdim=True)
        return (x * scale if bias is None else torch.addcmul(bias, x, scale)).to(value.dtype)

    return linear(input, value, gradient), affine


def rms_norm(func, input, normalized_shape, weight=None, eps=None):
    dims = tuple(range(-len(normalized_shape), 0))
    with torch.no_grad():
        value = func(input, normalized_shape, weight, eps)
        square = _float(input).square().mean(dims, keepdim=True)
        scale = (square + (torch.finfo(input.dtype).eps if eps is None else eps)).rsqrt()
        scale = scale if weight is None else scale * weight
    affine = lambda input, *_, **__: (input * scale).to(value.dtype)  # noqa: E731
    return linear(input, value, lambda grad: grad * scale), affine


def normalize(func, input, p=2.0, dim=1, eps=1e-12, out=None):
    with torch.no_grad():
        value, scale = func(input, p, dim, eps), input.norm(p, dim, keepdim=True).clamp(min=eps)
    return linear(input, value, lambda grad: grad / scale), lambda input, *_, **__: input / scale


def batch_norm(func, input, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    if training or mean is None:
        raise NotAffine("batch_norm in training, which mixes samples,")
    affine = lambda input, *_, **__: func(input, mean, var, weight, bias, False, momentum, eps)  # noqa: E731
    return affine(input), affine


def glu(func, input, dim=-1):
    gate = input.detach().chunk(2, dim)[1].sigmoid()
    affine = lambda input, *_, **__: input.chunk(2, dim)[0] * gate  # noqa: E731
    return with_value(func(input.detach(), dim), affine(input)), affine


def attention(func, query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
    """Hold the weights fixed, by holding query, key and mask. Attention is then a mean of the values.

    The weights themselves are never stored, whichever kernel runs.
    """
    if dropout_p:
        raise NotAffine("dropout in scaled_dot_product_attention, which .eval() turns off,")
    held = query.detach(), key.detach()
    mask = None if attn_mask is None else attn_mask.detach()
    affine = lambda query, key, value, *_, **__: func(*held, value, mask, 0.0, *args, **kwargs)  # noqa: E731
    return affine(query, key, value), affine


def multi_head_attention(func, query, key, value, *args, **kwargs):
    if kwargs.get("training", True) and (args[6] if len(args) > 6 else kwargs.get("dropout_p")):
        raise NotAffine("dropout in multi_head_attention_forward, which .eval() turns off,")
    held = query.detach(), key.detach()
    affine = lambda query, key, value, *_, **__: func(*held, value, *args, **kwargs)  # noqa: E731
    return affine(query, key, value), affine


def clamp(func, input, *args, **kwargs):
    with torch.no_grad():
        value = func(input, *args, **kwargs)
        inside = value == input
    affine = lambda input, *_, **__: input.where(inside, value)  # noqa: E731
    return affine(input), affine


def maximum(func, input, other):
    with torch.no_grad():
        first = func(input, other) == input
    affine = lambda input, other: torch.where(first, input, other)  # noqa: E731
    return affine(input, other), affine


def largest(func, input, dim=None, keepdim=False):
    """Hold the position of the largest (or smallest) element along a dimension fixed."""
    if not isinstance(dim, int):
        raise NotAffine(f"{func.__name__} of more than one dimension")
    with torch.no_grad():
        out = (torch.max if func.__name__ in ("max", "amax") else torch.min)(input, dim, keepdim=True)

    def affine(input, *_, **__):
        found = input.gather(dim, out.indices)
        found = found if keepdim else found.squeeze(dim)
        if func.__name__.startswith("a"):
            return found
        return type(out)((found, out.indices if keepdim else out.indices.squeeze(dim)))

    return affine(input), affine


def log_softmax(func, input, dim=None, *args, **kwargs):
    with torch.no_grad():
        value = func(input, dim, *args, **kwargs)
        shift = input - value
    return linear(input, value, lambda grad: grad), lambda input, *_, **__: input - shift


def carrier(name: str, args: tuple, kwargs: dict) -> Any:
    """Return the argument that the result of a rule is affine in."""
    if RULES[name] in (attention, multi_head_attention):
        return args[2] if len(args) > 2 else kwargs["value"]
    if RULES[name] is maximum:
        return list(args)
    return args[0] if args else kwargs["input"]


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _names(text: str) -> set[str]:
    return set(text.split())


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        _names("""
            relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish hardswish tanh tanhshrink softsign
            softshrink hardshrink dropout1d dropout2d dropout3d abs
        """),
        gated,
    ),
    "dropout": dropout,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "normalize": normalize,
    "batch_norm": batch_norm,
    "glu": glu,
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head_attention,
    **dict.fromkeys(_names("clamp clip clamp_min clamp_max hardtanh"), clamp),
    **dict.fromkeys(_names("maximum minimum"), maximum),
    **dict.fromkeys(_names("max min amax amin"), largest),
    "log_softmax": log_softmax,
}
RANDOM = _names("dropout dropout1d dropout2d dropout3d rrelu")

# The results of these are held fixed: gates, scales of hand-written normalisations, and detached tensors.
CONSTANT = _names("""
    sigmoid hardsigmoid softmax sqrt rsqrt std norm linalg_norm linalg_vector_norm logsumexp detach data
""")

# These are linear in each argument alone, so they are affine if only one argument depends on x. Those in
# WITH_SUMMAND also add their first argument.
WITH_SUMMAND = _names("addmm baddbmm addmv")
MULTILINEAR = WITH_SUMMAND | _names("""
    mul div matmul bmm mm mv dot linear einsum outer inner tensordot bilinear
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d
""")

# These are affine in all arguments together. Indices, masks and sizes do not depend on x, or they are held.
SUMS = _names("""
    sum mean cumsum avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d interpolate
""")
LINEAR = SUMS | _names("""
    add sub rsub neg positive view view_as reshape reshape_as transpose permute movedim swapaxes t T mT H mH
    expand expand_as cat concat concatenate stack hstack vstack chunk split tensor_split unbind __getitem__
    __setitem__ select narrow index_select gather take_along_dim contiguous to float double half bfloat16 type
    type_as cpu cuda clone flatten unflatten squeeze unsqueeze pad roll flip repeat repeat_interleave tile
    where masked_fill masked_scatter tril triu diagonal diag_embed unfold fold real copy zero fill index_add
    index_copy scatter scatter_add broadcast_to broadcast_tensors unsafe_chunk unsafe_split ravel adjoint
""")

# These depend only on the size, dtype and device of a tensor.
INDEPENDENT = _names("""
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_full new_empty
    new_tensor shape size dim ndim ndimension dtype device numel nelement stride layout is_contiguous
    is_floating_point is_complex is_cuda is_cpu is_nested is_sparse is_quantized is_leaf is_inference
    requires_grad grad_fn grad element_size get_device storage_offset data_ptr __len__ __hash__ __repr__
    __format__ finfo iinfo result_type promote_types
""")

# These turn values of a tensor into Python numbers, on which code may branch.
DECISIONS = _names("__bool__ __int__ __float__ __index__ item tolist numpy equal allclose")
OTHER_NAMES = {
    "__rsub__": "rsub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
}
