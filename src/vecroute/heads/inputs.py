"""Input checks and per-vector MLPs that the heads share."""

import torch.nn.functional as nnf
from torch import Tensor, nn

from vecroute.ops.checks import check_float_tensor, check_mask


class ResidualMLP(nn.Module):
    """x + W_2 gelu(W_1 x + b_1) + b_2 for each vector, [..., d] -> [..., d]. Initially the identity."""

    def __init__(self, d: int, d_mlp: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(d, d_mlp), nn.Linear(d_mlp, d)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(nnf.gelu(self.inner(x)))  # [..., d]


class GatedMLP(nn.Module):
    """x + W_2 (silu(W_g x + b_g) * (W_1 x + b_1)) + b_2, [..., d] -> [..., d]. Initially the identity."""

    def __init__(self, d: int, d_mlp: int):
        super().__init__()
        self.gate, self.inner, self.outer = nn.Linear(d, d_mlp), nn.Linear(d, d_mlp), nn.Linear(d_mlp, d)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

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
        if input_mask.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"input_mask must be [..., n_pos] or [..., n_pos, depth] for hidden_states {shape}, "
                f"got {list(input_mask.shape)}"
            )
    sizes = {"n_pos": shape[-3], "depth": depth}
    return check_mask("input_mask", input_mask, hidden_states[..., 0], sizes=sizes)
