"""Input checks and per-vector MLPs that the heads share."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from vecroute.ops.checks import check_float_tensor, check_mask, is_whole_mask


class Linears(nn.Module):
    """Apply k linear maps in one product: W_m x_m + b_m, for x [k, ..., n, d] -> [k, ..., n, h].

    The weights [k, h, d] and biases [k, h] start like the parameters of k separate ``nn.Linear``.
    """

    def __init__(self, k: int, d: int, h: int):
        super().__init__()
        maps = [nn.Linear(d, h) for _ in range(k)]
        self.weight = nn.Parameter(torch.stack([m.weight.detach() for m in maps]))  # [k, h, d]
        self.bias = nn.Parameter(torch.stack([m.bias.detach() for m in maps]))  # [k, h]

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1, -2)  # [k, b, d]
        out = torch.baddbmm(self.bias[:, None], flat, self.weight.mT)  # [k, b, h]
        return out.unflatten(1, x.shape[1:-1])  # [k, ..., n, h]


def linear_of(n_members: int) -> Callable[[int, int], nn.Module]:
    """Return the class of linear maps for this number of members."""
    return nn.Linear if n_members == 1 else partial(Linears, n_members)


def mlp_width(d: int, thirds: int) -> int:
    """Return the width of an MLP for vectors of size d: about thirds / 3 of d, a multiple of 8 if d >= 24.

    cuBLAS uses slower kernels for products whose rows are not aligned to 16 bytes.
    """
    width = max(thirds * d // 3, 1)
    return width - width % 8 if d >= 24 else width


class ResidualMLP(nn.Module):
    """Compute x + W_2 gelu(W_1 x + b_1) + b_2 for each vector, [..., d] -> [..., d].

    At first it is the identity. With several members, each has its own weights, and x is [k, ..., n, d].
    """

    def __init__(self, d: int, d_mlp: int, n_members: int = 1):
        super().__init__()
        linear = linear_of(n_members)
        self.inner, self.outer = linear(d, d_mlp), linear(d_mlp, d)
        for parameter in self.outer.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(nnf.gelu(self.inner(x)))  # [..., d]


class GatedMLP(nn.Module):
    """Compute x + W_2 (silu(W_g x + b_g) * (W_1 x + b_1)) + b_2 for each vector, [..., d] -> [..., d].

    At first it is the identity. With several members, each has its own weights, and x is [k, ..., n, d].
    """

    def __init__(self, d: int, d_mlp: int, n_members: int = 1):
        super().__init__()
        linear = linear_of(n_members)
        self.gate, self.inner, self.outer = linear(d, d_mlp), linear(d, d_mlp), linear(d_mlp, d)
        for parameter in self.outer.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(nnf.silu(self.gate(x)) * self.inner(x))  # [..., d]


def check_hidden_states(
    hidden_states: Tensor,
    input_mask: Tensor | None,
    *,
    depth: int,
    d_emb: int,
    like: Tensor,
    may_be_empty: bool = False,
) -> Tensor | None:
    """Check the inputs of a head, and return the mask as booleans [..., n_pos, depth], or None.

    Args:
        hidden_states: [..., n_pos, depth, d_emb].
        input_mask: [..., n_pos] or [..., n_pos, depth], True (or 1) means *use*.
        depth, d_emb: the sizes that the head expects.
        like: a parameter. The hidden states must have its dtype and device.
        may_be_empty: True to allow n_pos = 0.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, type, dtype or device.
    """
    expected = f"[..., n_pos, depth={depth}, d_emb={d_emb}]"
    check_float_tensor("hidden_states", hidden_states, expected, like)
    shape = list(hidden_states.shape)
    if len(shape) < 3 or shape[-2:] != [depth, d_emb]:
        raise ValueError(f"hidden_states must be {expected}, got {shape}")
    if shape[-3] == 0 and not may_be_empty:
        raise ValueError(f"hidden_states must be {expected} with at least one vector, got {shape}")
    if isinstance(input_mask, Tensor):
        if input_mask.shape == hidden_states.shape[:-2]:
            input_mask = input_mask[..., None].expand(hidden_states.shape[:-1])  # [..., n_pos, depth]
        if is_whole_mask(input_mask, hidden_states, (depth,)):
            return input_mask
        if input_mask.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"input_mask must be [..., n_pos] or [..., n_pos, depth] for hidden_states {shape}, "
                f"got {list(input_mask.shape)}"
            )
    sizes = {"n_pos": shape[-3], "depth": depth}
    return check_mask("input_mask", input_mask, hidden_states[..., 0], sizes=sizes)
