"""Random choices in training: the order of samples, dropped inputs and features, and mixed samples."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

POOL = 50  # number of batches whose samples are sorted by length together


def seeded(*about: Any) -> torch.Generator:
    """Return a generator that depends only on its purpose, not on earlier random numbers."""
    return torch.Generator().manual_seed(seed_of(*about))


def seed_of(*about: Any) -> int:
    """Return the seed of a generator for this purpose."""
    digest = hashlib.sha256(repr(about).encode()).digest()
    return int.from_bytes(digest[:8], "big") // 2


def shuffled_batches(lengths: Sequence[int], batch_size: int, generator: torch.Generator) -> list[list[int]]:
    """Return all samples in random batches of similar length."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), POOL * batch_size):
        pool = sorted(order[start : start + POOL * batch_size], key=lengths.__getitem__)
        batches += [pool[k : k + batch_size] for k in range(0, len(pool), batch_size)]
    return [batches[k] for k in torch.randperm(len(batches), generator=generator).tolist()]


def drop_inputs(mask: Tensor, depth: int, share: float, generator: torch.Generator) -> Tensor:
    """Leave out a share of the used inputs of each sample at random; see ``kept_inputs``.

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
    n_kept = kept_inputs(used.sum((1, 2)), share)  # [b]
    drawn = torch.rand(used.shape, generator=generator).to(mask.device)  # [b, n_pos, depth]
    drawn = drawn.masked_fill(~used, 2.0)  # [b, n_pos, depth]
    last = drawn.flatten(1).sort(1).values.gather(1, n_kept[:, None] - 1)  # [b, 1]
    return used & (drawn <= last[..., None])  # [b, n_pos, depth]


def kept_inputs(n_used: Tensor, share: float) -> Tensor:
    """Return how many of the used inputs of each sample stay, [..., b], but never none.

    If lengths differ by at most a tenth, the same number of inputs stays in each sample of the batch.
    """
    if not share:
        return n_used
    # Each sample drops a fixed number of inputs, instead of each input with a probability. Samples of similar
    # length are batched together and drop the same number. So the remaining inputs need no padding or mask.
    n_kept = ((1 - share) * n_used).round().clamp(min=1)  # [..., b]
    mean = n_kept.mean(-1, keepdim=True).round()  # [..., 1]
    alike = ((n_kept - mean).abs() <= mean / 10).all(-1, keepdim=True)  # [..., 1]
    return torch.where(alike, mean, n_kept).long()  # [..., b]


def compact(x_inp: Tensor, input_mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Remove unused inputs, down to the length of the longest sample. Routing then does less work.

    Args:
        x_inp: [b, i, d], input_mask: [b, i], or [m b, i] with a mask for each of m members.

    Returns:
        [m b, k, d], the used inputs first, and their mask [m b, k], None where all are used.
    """
    n_used = input_mask.sum(-1)  # [m b]
    least, most = n_used.aminmax()
    k = min(max(int(most), 1), input_mask.shape[1])
    order = input_mask.byte().argsort(dim=-1, descending=True, stable=True)[:, :k]  # [m b, k]
    sample = torch.arange(len(order), device=order.device) % len(x_inp)  # [m b]
    x_used = x_inp[sample[:, None], order]  # [m b, k, d]
    if int(least) == k:
        return x_used, None
    return x_used, torch.arange(k, device=order.device) < n_used[:, None]  # [m b, k]


def drop_features(hidden: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Set a share of the features to zero, the same ones in all hidden states of a sample.

    Args:
        hidden: [b, ..., d_emb].
        share: from 0 to 1.
        generator: on the CPU.
    """
    if not share:
        return hidden
    b, *several, d_emb = hidden.shape
    drawn = torch.rand(b, *(1 for _ in several), d_emb, generator=generator)  # [b, ..., d_emb]
    return hidden * (drawn >= share).to(hidden.device)  # [b, ..., d_emb]


def mix(
    hidden: Tensor, keep: Tensor, targets: Tensor, alpha: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix each sample with another sample of the batch. An input that only one of them has is not scaled.

    Args:
        hidden: [m b, n_pos, depth, d_emb] for each of m members, keep: [m b, n_pos, depth].
        targets: [m, b, n_cls].
        alpha: both parameters of the beta distribution from which the shares are drawn.
        generator: on the CPU.

    Returns:
        The first three arguments, mixed.
    """
    m, b, _ = targets.shape
    drawn = [torch.randperm(b, generator=generator) + b * member for member in range(m)]  # [b] each
    other = torch.cat(drawn).to(hidden.device)  # [m b]
    gamma = torch._standard_gamma(torch.full((2, m * b), alpha), generator=generator)  # [2, m b]
    share = (gamma[0] / gamma.sum(0)).nan_to_num(0.5).to(hidden.device)  # [m b]
    first = share[:, None, None] * keep  # [m b, n_pos, depth]
    second = (1 - share)[:, None, None] * keep[other]  # [m b, n_pos, depth]
    first = (first / (first + second).clamp(min=1e-12))[..., None]  # [m b, n_pos, depth, 1]
    mixed = first * hidden + (1 - first) * hidden[other]  # [m b, n_pos, depth, d_emb]
    flat = targets.flatten(0, 1)  # [m b, n_cls]
    targets = (share[:, None] * flat + (1 - share)[:, None] * flat[other]).view(targets.shape)
    return mixed, keep | keep[other], targets
