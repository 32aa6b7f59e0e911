"""What is random in training: the order of samples, what of them is left out, the mixing of samples."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

POOL = 50  # batches whose samples are sorted by length together


def seeded(*about: Any) -> torch.Generator:
    """Random numbers that depend on what they are for, and on nothing that happened before."""
    digest = hashlib.sha256(repr(about).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") // 2)


def shuffled_batches(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> list[list[int]]:
    """All samples in random batches of similar length."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), POOL * batch_size):
        pool = sorted(order[start : start + POOL * batch_size], key=lengths.__getitem__)
        batches += [pool[k : k + batch_size] for k in range(0, len(pool), batch_size)]
    return [batches[k] for k in torch.randperm(len(batches), generator=generator).tolist()]


def drop_inputs(mask: Tensor, depth: int, share: float, generator: torch.Generator) -> Tensor:
    """Leave out a share of the used inputs of each sample at random, but never all of them.

    Args:
        mask: [b, n_pos] the used positions.
        depth: inputs at each position.
        share: from 0 to 1.
        generator: on the CPU.

    Returns:
        [b, n_pos, depth] True at the inputs that stay.
    """
    used = mask[..., None].expand(*mask.shape, depth)  # [b, n_pos, depth]
    if not share:
        return used
    # As many of each sample, not a coin for each input: few more are left of one sample than of its
    # neighbours of the same length, so that a batch without unused inputs is small.
    n_kept = ((1 - share) * used.sum((1, 2))).round().clamp(min=1)  # [b]
    drawn = torch.rand(used.shape, generator=generator).to(mask.device)  # [b, n_pos, depth]
    rank = drawn.masked_fill(~used, 2.0).flatten(1).argsort(1).argsort(1)  # [b, n_pos depth]
    return used & (rank < n_kept[:, None]).view(used.shape)  # [b, n_pos, depth]


def drop_features(hidden: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Set a share of the features to zero, the same ones in all hidden states of a sample.

    Args:
        hidden: [b, n_pos, depth, d_emb].
        share: from 0 to 1.
        generator: on the CPU.
    """
    if not share:
        return hidden
    drawn = torch.rand(len(hidden), 1, 1, hidden.shape[-1], generator=generator)  # [b, 1, 1, d_emb]
    return hidden * (drawn >= share).to(hidden.device)  # [b, n_pos, depth, d_emb]


def mix(
    hidden: Tensor, keep: Tensor, targets: Tensor, alpha: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix each sample with another one of the batch; where only one of the two has an input, it stays whole.

    Args:
        hidden: [b, n_pos, depth, d_emb], keep: [b, n_pos, depth], targets: [b, n_cls].
        alpha: both parameters of the beta distribution from which the shares are drawn.
        generator: on the CPU.
    """
    b = len(hidden)
    other = torch.randperm(b, generator=generator).to(hidden.device)  # [b]
    drawn = torch._standard_gamma(torch.full((2, b), alpha), generator=generator)  # [2, b]
    share = (drawn[0] / drawn.sum(0)).nan_to_num(0.5).to(hidden.device)  # [b]
    first = share[:, None, None] * keep  # [b, n_pos, depth]
    second = (1 - share)[:, None, None] * keep[other]  # [b, n_pos, depth]
    first = (first / (first + second).clamp(min=1e-12))[..., None]  # [b, n_pos, depth, 1]
    mixed = first * hidden + (1 - first) * hidden[other]  # [b, n_pos, depth, d_emb]
    return mixed, keep | keep[other], share[:, None] * targets + (1 - share)[:, None] * targets[other]
