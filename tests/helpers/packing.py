"""Hidden states as a cache takes them."""

import torch
from torch import Tensor

from vecroute.encoders.entries import Packed


def pack(states: dict[str, Tensor]) -> Packed:
    """Pack the hidden states [n_pos, depth, d_emb] of each key, of one dtype."""
    return Packed(list(states), [len(hidden) for hidden in states.values()], torch.cat([*states.values()]))
