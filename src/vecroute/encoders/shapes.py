"""Batches for a CPU, in which each text gets the same bits, whatever the other texts are.

All rows of a batch have the same length. A matrix product of few rows may sum in another order than one of
many, so a small batch is filled with repeated rows: see ``batch_positions``.
"""

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch

from vecroute.encoders.text import TextEncoder
from vecroute.encoders.vision import VisionEncoder
from vecroute.ops.common import cdiv

MOST = 512  # positions of a batch whose size does not change bits
CANDIDATES = 16, 32  # least positions of such a batch; the first that passes the trial
TRIED = 2, 9, 17  # lengths of the rows in a trial: powers of two alone pass where other lengths differ
WORTH = 2**14  # positions from which on a trial costs less than it saves
# By encoder, then number of threads.
_found: WeakKeyDictionary[TextEncoder, dict[int, tuple[int, int]]] = WeakKeyDictionary()


def same_shapes(lengths: Sequence[int], most: int, least: int) -> Iterator[list[int]]:
    """Group rows of equal length. Repeat rows in a group until it has enough positions.

    Args:
        lengths: the length of each row.
        most: positions of a full group. A longer row is a group of its own.
        least: positions that a group needs, at most ``most``.
    """
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(length, []).append(row)
    for length, rows in by_length.items():
        size = max(most // max(length, 1), 1)
        enough = min(size, cdiv(least, max(length, 1)))
        for start in range(0, len(rows), size):
            group = rows[start : start + size]
            yield [group[k % len(group)] for k in range(max(len(group), enough))]


def batch_positions(encoder: TextEncoder | VisionEncoder, n_positions: int) -> tuple[int, int]:
    """Return the most and the least positions of a batch, so that its size does not change bits.

    In batches of one fixed size for each length, matrix products sum in one order. But these need many
    repeated rows. Most libraries also sum in one order in all batches of at least 16 or 32 positions. A trial
    finds out, once for each encoder and number of threads. Images all have one length, so their batches
    always have one size.

    Args:
        n_positions: positions of all texts.
    """
    fixed = encoder.filled, encoder.filled
    if isinstance(encoder, VisionEncoder) or n_positions < WORTH:
        return fixed
    found, n_threads = _found.setdefault(encoder, {}), torch.get_num_threads()
    if n_threads not in found:
        passed = ((MOST, least) for least in CANDIDATES if has_same_bits(encoder, least))
        found[n_threads] = next(passed, fixed)
    return found[n_threads]


def has_same_bits(encoder: TextEncoder, least: int) -> bool:
    """Return whether the rows of the least and of the largest batches of one text all have the same bits."""
    ids = encoder.tokenizer("a")["input_ids"]
    for n in TRIED:
        row = torch.tensor((ids * n)[: min(n, encoder.max_length)])  # [n]
        try:
            few, many = (encoder.states(row.expand(cdiv(size, len(row)), -1)) for size in (least, MOST))
        except (RuntimeError, LookupError, ValueError):  # the encoder does not take such a batch
            return False
        if not all(torch.equal(states, few[:1].expand_as(states)) for states in (few, many)):
            return False
    return True
