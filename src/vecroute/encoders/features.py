"""The hidden states of texts, from a cache or computed on demand, in batches for training."""

import functools
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vecroute.encoders.ahead import ahead
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.entries import Packed, rounded, text_key
from vecroute.encoders.shapes import batch_positions, same_shapes
from vecroute.encoders.text import TextEncoder

logger = logging.getLogger(__name__)

WINDOW_BYTES = 128 * 1024**2  # hidden states computed at a time on a CPU, if there are several texts
GPU_WINDOW_BYTES = 1024**3  # on a GPU, more texts at a time mean larger batches of similar length
GPU_BATCH_BYTES = 64 * 1024**2  # hidden states of a batch on a GPU; the next one runs during their copy
TOGETHER = 1024  # texts that are tokenized at a time to count their positions
REMEMBERED = 2**20  # positions of tokenized texts that are remembered, in about 200 MB


class Features:
    """The hidden states of texts, from the cache or computed on demand.

    The numbers are the same either way, on the CPU to the last bit. Computed hidden states are rounded as in
    the cache, and the other texts of a batch do not change the bits of a text (see ``batch_positions``).

    Args:
        encoder: the encoder.
        texts: any number of texts. Only the hidden states in use are in memory.
        cache: the cache, None to compute hidden states each time.
    """

    def __init__(self, encoder: TextEncoder, texts: Sequence[str], cache: FeatureCache | None = None):
        self.encoder, self.texts, self.cache = encoder, texts, cache
        self.position_bytes = encoder.depth * encoder.d_emb * 4  # in float32
        self.keys = [] if cache is None else [text_key(text) for text in texts]  # in the cache
        self._tokenized: dict[int, Any] = {}  # texts that ``prepare`` need not tokenize again
        self.lengths = self._lengths()

    def __len__(self) -> int:
        return len(self.texts)

    def _lengths(self) -> list[int]:
        """Return the number of positions of each text. Texts that are not in the cache are tokenized."""
        known: dict[int, Any] = {}
        if self.cache is not None:
            known.update(enumerate(map(self.cache.n_pos, self.keys)))
        unknown = [k for k in range(len(self)) if known.get(k) is None]
        total = 0
        for start in range(0, len(unknown), TOGETHER):
            some = unknown[start : start + TOGETHER]
            tokenized = self._tokenize(some)
            counts = [one.n_pos for one in tokenized]
            known.update(zip(some, counts, strict=True))
            total += sum(counts)
            if self.cache is not None and total <= REMEMBERED:
                self._tokenized.update(zip(some, tokenized, strict=True))
        return [known[k] for k in range(len(self))]

    @property
    def nbytes(self) -> int:
        """Return the size of the hidden states of all texts in the cache."""
        return sum(self.lengths) * self.encoder.depth * self.encoder.d_emb * 2

    def prepare(self, share: tuple[int, int] = (0, 1), step: Callable[[int], None] | None = None) -> int:
        """Compute the hidden states that are not in the cache, as far as there is room for them.

        Args:
            share: (rank, number of processes), if each process computes its part.
            step: called with the number of finished texts of all processes, after each group of texts.

        Returns:
            The number of texts for which there is no room.
        """
        if self.cache is None:
            return len(self)
        size = self.encoder.depth * self.encoder.d_emb * 2
        distinct = dict(zip(self.keys, range(len(self)), strict=True))  # key -> index of one of its texts
        missing = [k for key, k in distinct.items() if self.cache.n_pos(key) is None]
        needed = [self.lengths[k] * size for k in missing]
        room = self.cache.make_room(sum(needed), self.keys)
        fitting = sum(total <= room for total in itertools.accumulate(needed))
        if missing:
            where, gigabytes = self.cache.folder, sum(needed) / 1e9
            logger.info("hidden states of %d texts take %.2f GB in %s", len(missing), gigabytes, where)
        if fitting < len(missing):
            logger.warning(
                "%s has room for %.2f GB: hidden states of %d texts are computed anew each time",
                self.cache.folder,
                room / 1e9,
                len(missing) - fitting,
            )
        own, there = missing[share[0] : fitting : share[1]], len(distinct) - len(missing)
        window = WINDOW_BYTES if self.encoder.device.type == "cpu" else GPU_WINDOW_BYTES
        groups = [[own[k] for k in group] for group in windows([self.lengths[k] * size for k in own], window)]
        for group, tokenized in zip(groups, ahead(self._tokenize, groups), strict=True):
            for packed in self._encode([self.keys[k] for k in group], tokenized):
                self.cache.put(packed)
            there += len(group) * share[1]  # assume that the other processes are as fast
            if step:
                step(min(there, len(distinct)))
        self._tokenized.clear()
        self.cache.flush()
        return len(missing) - fitting

    def batch(self, which: Sequence[int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Return hidden states [b, n_pos, depth, d_emb] of some texts, as stored, and a mask [b, n_pos]."""
        device = device or self.encoder.device
        found: dict[int, Tensor] = {}
        for k in which:
            hidden = self.cache.get(self.keys[k]) if self.cache else None
            if hidden is not None and hidden.shape == self._shape(k):
                found[k] = hidden  # [n_pos, depth, d_emb]
        missing = [k for k in dict.fromkeys(which) if k not in found]
        for packed in self._encode(missing, self._tokenize(missing)):
            found.update(zip(packed.names, packed.hidden.split(packed.counts), strict=True))
        # Copy hidden states as stored. Half precision is half of the work, and training may drop many.
        dtype = functools.reduce(torch.promote_types, {hidden.dtype for hidden in found.values()})
        padded = pad_sequence([found[k].to(dtype) for k in which], batch_first=True)
        if not padded.shape[1]:  # texts without a token; layers refuse an input without positions
            padded = padded.new_zeros(len(which), 1, *padded.shape[2:])
        lengths = torch.tensor([self.lengths[k] for k in which])  # [b]
        mask = torch.arange(padded.shape[1]) < lengths[:, None]  # [b, n_pos]
        return padded.to(device), mask.to(device)

    def _shape(self, k: int) -> tuple[int, int, int]:
        return self.lengths[k], self.encoder.depth, self.encoder.d_emb

    def _tokenize(self, which: Sequence[int]) -> list[Any]:
        """Tokenize texts that are not remembered. Remembered texts are forgotten."""
        found = {k: self._tokenized.pop(k, None) for k in which}
        rest = [k for k, one in found.items() if one is None]
        found.update(zip(rest, self.encoder.tokenize([self.texts[k] for k in rest]), strict=True))
        return [found[k] for k in which]

    def _encode(self, names: Sequence[Any], tokenized: Sequence[Any]) -> Iterator[Packed]:
        """Yield the hidden states of all texts under their names, rounded as stored, in any order."""
        if not tokenized:
            return
        if self.encoder.device.type != "cpu":
            yield from self._encode_by_length(names, tokenized)
            return
        # A text with several chunks, or with more positions than a full batch, is a batch of its own.
        long = [len(getattr(one, "keep", "1")) > 1 for one in tokenized]
        lengths = [sys.maxsize if long[k] else one.n_pos for k, one in enumerate(tokenized)]
        for which in same_shapes(lengths, *batch_positions(self.encoder, sum(self.lengths))):
            # A batch is filled with repeated texts, whose results are dropped.
            n = len(set(which))
            for batch in self.encoder.batches([tokenized[k] for k in which]):
                is_first = torch.tensor([k < n for k in batch.which])  # [b]
                texts = [which[k] for k in batch.which if k < n]
                counts = [tokenized[k].n_pos for k in texts]
                hidden = used(batch.hidden, batch.mask & is_first[:, None], sum(counts))
                yield from rounded(Packed([names[k] for k in texts], counts, hidden))

    def _encode_by_length(self, names: Sequence[Any], tokenized: Sequence[Any]) -> Iterator[Packed]:
        """Do the same as ``_encode`` in batches of similar length. The next batch runs during each copy."""
        limit = max(GPU_BATCH_BYTES // (self.encoder.depth * self.encoder.d_emb * 2), 1)
        copying = None
        for batch in self.encoder.batches(tokenized, limit):
            counts = [tokenized[k].n_pos for k in batch.which]
            hidden = used(batch.hidden, batch.mask, sum(counts))  # [sum of counts, depth, d_emb]
            started = Copy(Packed([names[k] for k in batch.which], counts, hidden))
            if copying is not None:
                yield from copying.result()
            copying = started
        if copying is not None:
            yield from copying.result()


class Copy:
    """A copy of hidden states to the CPU, rounded as stored. A GPU makes it while the caller goes on."""

    def __init__(self, packed: Packed):
        self.packed, tensors = packed, [packed.hidden]
        if packed.hidden.element_size() > 2:
            half = packed.hidden.half()  # [sum of counts, depth, d_emb]
            # Whether all numbers fit is copied too: to ask for it now would wait for the GPU.
            tensors = [half, half.isfinite().all()]
        self.copies, self.event = copies(tensors)

    def result(self) -> Iterator[Packed]:
        """Wait for the copy and yield it."""
        if self.event is not None:
            self.event.synchronize()
        hidden, *fits = self.copies
        if all(fits):
            yield self.packed._replace(hidden=hidden)
        else:  # a number is too large for float16
            yield from rounded(self.packed._replace(hidden=self.packed.hidden.cpu()))


def copies(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
    """Start copies of tensors to the CPU. Return them and an event, None if they are complete."""
    if tensors[0].device.type != "cuda":
        return [tensor.cpu() for tensor in tensors], None
    found = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for copy, tensor in zip(found, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))
    return found, event


def used(hidden: Tensor, mask: Tensor, n: int) -> Tensor:
    """Return the n used hidden states [n, depth, d_emb] of a batch.

    ``hidden[mask]`` would wait for a GPU, because it counts them there.

    Args:
        hidden: [b, n_pos, depth, d_emb].
        mask: [b, n_pos], True at n positions.
    """
    rows = hidden.flatten(0, 1)  # [b * n_pos, depth, d_emb]
    if n == len(rows):
        return rows
    order = (~mask.flatten()).to(torch.uint8).argsort(stable=True)  # [b * n_pos], used positions first
    return rows[order[:n]]  # [n, depth, d_emb]


def windows(sizes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Group neighbours so that the sizes in a group sum to at most the limit. A larger item is a group."""
    group: list[int] = []
    total = 0
    for k, size in enumerate(sizes):
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(k)
        total += size
    if group:
        yield group
