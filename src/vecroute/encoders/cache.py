"""A cache of hidden states on disk. Several processes may share it, and killing one does not damage it."""

import functools
import itertools
import logging
import os
import re
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vecroute.encoders.ahead import ahead
from vecroute.encoders.entries import Entry, halved, header, read_entries, text_key, write_segment
from vecroute.encoders.text import TextEncoder

logger = logging.getLogger(__name__)

GIB = 1024**3
SEGMENT_BYTES = 64 * 1024**2  # size of a segment; a killed process loses a few of them at most
WINDOW_BYTES = 128 * 1024**2  # hidden states computed at a time on a CPU, if there are several texts
GPU_WINDOW_BYTES = 1024**3  # on a GPU, more texts at a time mean larger batches of similar length
GPU_BATCH_BYTES = 128 * 1024**2  # hidden states of a batch on a GPU; the next one runs during their copy
WRITERS = 8  # threads that write segments, while more hidden states are computed
KEEP_FREE = GIB  # free space to leave on the disk
ABANDONED_AFTER = 3600  # seconds after which a temporary file must belong to a dead process
OWN = re.compile("[0-9a-f]{32}")  # name of a subfolder of a cache


def default_folder() -> Path:
    """Return ``$VECROUTE_CACHE``, or ``vecroute`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("VECROUTE_CACHE") or Path(base) / "vecroute")


class FeatureCache:
    """The hidden states of one encoder for many texts, in files that are written once and never changed.

    A segment is a safetensors file with the hidden states of some texts. Its header names the encoder, and
    gives the dtype, the shape and a checksum for each text. It is written under a temporary name and then
    renamed, so there are no partial segments, and two processes may add segments at the same time. A segment
    that is damaged or belongs to another encoder is deleted, and its texts are computed again.

    Args:
        folder: the folder of the cache. Each encoder has a subfolder for its segments.
        key: ``TextEncoder.key``, which identifies the hidden states of the encoder.
        max_bytes: limit for the whole folder. Least recently used segments are deleted first.

    Raises:
        OSError: the folder cannot be created or read.
    """

    def __init__(self, folder: str | os.PathLike, key: str, max_bytes: int = 20 * GIB):
        self.folder, self.key = Path(folder), key
        self.own = self.folder / key[:32]
        self.own.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self._files: dict[Path, Any] = {}  # open segments
        self._where: dict[str, Path] = {}  # key of a text -> its segment
        self._entries: dict[str, Entry] = {}  # key of a text -> its entry in the header
        self._refused: set[Path] = set()  # damaged segments that could not be deleted
        self._checked: set[str] = set()
        self._waiting: dict[str, Tensor] = {}  # hidden states not yet written to the disk
        self._waiting_bytes = 0
        self._writers: tuple[int, ThreadPoolExecutor] | None = None  # with the process that they belong to
        self._writing: list[tuple[dict[str, Tensor], Future]] = []  # oldest first
        self._full = False
        self._dropping = threading.Lock()  # several threads may find damage at the same time
        for path in self._own_files():
            with suppress(OSError):  # another process has just renamed it, or the folder is read-only
                if path.suffix == ".tmp" and time.time() - path.stat().st_mtime > ABANDONED_AFTER:
                    path.unlink()
        self.refresh()

    def refresh(self) -> None:
        """Look for new segments of this or another process."""
        for path in sorted(self.own.glob("*.safetensors")):
            if path in self._files or path in self._refused:
                continue
            try:
                file = safe_open(path, "pt")
                entries = read_entries(file.metadata() or {}, self.key)
                if set(entries) != set(file.keys()):
                    raise ValueError("its tensors do not match its header")
            except (OSError, SafetensorError, ValueError) as error:
                self._drop(path, error)
                continue
            self._add(path, file, entries)

    def _add(self, path: Path, file: Any, entries: dict[str, Entry]) -> None:
        self._files[path] = file
        self._where.update(dict.fromkeys(entries, path))
        self._entries |= entries
        self._checked -= entries.keys()  # an earlier segment may hold the same texts

    def n_pos(self, text: str) -> int | None:
        """Return the number of positions of a text, None if it is not in the cache."""
        key = text_key(text)
        if (hidden := self._in_memory(key)) is not None:
            return len(hidden)
        return self._entries[key].shape[0] if key in self._where else None

    def get(self, text: str) -> Tensor | None:
        """Return the memory-mapped hidden states [n_pos, depth, d_emb] of a text, None if there are none."""
        key = text_key(text)
        if (hidden := self._in_memory(key)) is not None:
            return hidden
        path = self._where.get(key)
        file = self._files.get(path) if path is not None else None
        if path is None or file is None:
            return None
        hidden = file.get_tensor(key)  # [n_pos, depth, d_emb]
        if key not in self._checked:
            if Entry.of(hidden) != self._entries[key]:
                self._drop(path, "shape, dtype or checksum differs")
                return None
            self._checked.add(key)
        return hidden

    def put(self, text: str, hidden: Tensor) -> None:
        """Add the hidden states [n_pos, depth, d_emb] of a text, on the CPU. ``flush`` writes them."""
        if self._full:
            return
        stored = halved(hidden).contiguous()  # [n_pos, depth, d_emb]
        self._waiting[text_key(text)] = stored
        self._waiting_bytes += stored.nbytes
        if self._waiting_bytes >= SEGMENT_BYTES:
            self._start_writing()
            if len(self._writing) > WRITERS:
                self._end_writing()

    def flush(self) -> None:
        """Write the added hidden states. Those that do not fit the disk are dropped."""
        if self._waiting:
            self._start_writing()
        while self._writing:
            self._end_writing()

    def _in_memory(self, key: str) -> Tensor | None:
        """Return hidden states that are not yet on the disk."""
        several = [self._waiting, *(segment for segment, _ in self._writing)]
        return next((segment[key] for segment in several if key in segment), None)

    def _start_writing(self) -> None:
        """Write the waiting hidden states as one segment, in a thread."""
        if self._writers is None or self._writers[0] != os.getpid():  # a forked process has no threads yet
            self._writers = os.getpid(), ThreadPoolExecutor(WRITERS)
        self._writing.append((self._waiting, self._writers[1].submit(self._write, self._waiting)))
        self._waiting, self._waiting_bytes = {}, 0

    def _end_writing(self) -> None:
        """Wait until the oldest segment is written."""
        try:
            written = self._writing[0][1].result()
        finally:
            self._writing.pop(0)
        if written is not None:
            with suppress(OSError, SafetensorError):  # another process has just deleted it to make room
                self._add(written[0], safe_open(written[0], "pt"), written[1])

    def _write(self, segment: dict[str, Tensor]) -> tuple[Path, dict[str, Entry]] | None:
        """Write a segment. Return its path and entries, None if that is not possible."""
        path = self.own / f"{uuid.uuid4().hex}.safetensors"
        temporary = path.with_suffix(".tmp")
        try:
            entries = {key: Entry.of(hidden) for key, hidden in segment.items()}
            # No fsync, which would take longer than all else: a checksum finds what a power failure destroys.
            write_segment(temporary, segment, header(self.key, entries))
            temporary.replace(path)
            return path, entries
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not self._full:
                logger.warning(
                    "hidden states cannot be written to %s (%s): continuing without", self.own, error
                )
            self._full = True
            return None

    def make_room(self, needed: int, using: Sequence[str]) -> int:
        """Delete the least recently used segments until the needed bytes fit, if possible.

        Args:
            needed: number of bytes.
            using: texts whose segments must stay.

        Returns:
            The number of bytes that may be written now.
        """
        mine = {self._where[key] for key in map(text_key, using) if key in self._where}
        for path in mine:
            with suppress(OSError):  # the folder is read-only
                os.utime(path)
        sizes: dict[Path, tuple[float, int]] = {}
        for path in self._own_files():
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process deleted it
                continue
            sizes[path] = (stat.st_mtime, stat.st_size)
        used = sum(size for _, size in sizes.values())
        room = min(self.max_bytes - used, shutil.disk_usage(self.folder).free - KEEP_FREE)
        for path, (_, size) in sorted(sizes.items(), key=lambda item: item[1]):
            if room >= needed:
                break
            if path not in mine and path.suffix == ".safetensors":
                self._drop(path, "making room")
                room += 0 if path.exists() else size
        return max(room, 0)

    def _own_files(self) -> Iterator[Path]:
        """Yield the files of all encoders. The user may have chosen a folder that holds other files too."""
        for path in self.folder.glob("*/*"):
            if OWN.fullmatch(path.parent.name):
                yield path

    def _drop(self, path: Path, why: object) -> None:
        logger.info("cached hidden states deleted: %s (%s)", path, why)
        self._refused.add(path)
        with suppress(OSError):  # in a read-only folder it stays, but is not used
            path.unlink(missing_ok=True)
        with self._dropping:
            self._files.pop(path, None)
            self._where = {key: where for key, where in self._where.items() if where != path}


class Features:
    """The hidden states of texts, from the cache or computed on demand.

    The numbers are the same either way, on the CPU to the last bit. Computed hidden states are rounded as in
    the cache, and the shape of an encoder's batch depends only on the length of the texts.

    Args:
        encoder: the encoder.
        texts: any number of texts. Only the hidden states in use are in memory.
        cache: the cache, None to compute hidden states each time.
    """

    def __init__(self, encoder: TextEncoder, texts: Sequence[str], cache: FeatureCache | None = None):
        self.encoder, self.texts, self.cache = encoder, texts, cache
        self.position_bytes = encoder.depth * encoder.d_emb * 4  # in float32
        self.lengths = self._lengths()

    def __len__(self) -> int:
        return len(self.texts)

    def _lengths(self) -> list[int]:
        """Return the number of positions of each text. Texts that are not in the cache are tokenized."""
        known = [None if self.cache is None else self.cache.n_pos(text) for text in self.texts]
        unknown = iter([text for text, n_pos in zip(self.texts, known, strict=True) if n_pos is None])
        counted: list[int] = []
        while some := list(itertools.islice(unknown, 1024)):
            counted += [tokenized.n_pos for tokenized in self.encoder.tokenize(some)]
        rest = iter(counted)
        return [next(rest) if n_pos is None else n_pos for n_pos in known]

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
        lengths = dict(zip(self.texts, self.lengths, strict=True))
        missing = [text for text in lengths if self.cache.n_pos(text) is None]
        needed = [lengths[text] * size for text in missing]
        room = self.cache.make_room(sum(needed), self.texts)
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
        own, there = missing[share[0] : fitting : share[1]], len(lengths) - len(missing)
        window = WINDOW_BYTES if self.encoder.device.type == "cpu" else GPU_WINDOW_BYTES
        groups = [
            [own[k] for k in group] for group in windows([lengths[text] * size for text in own], window)
        ]
        for group, tokenized in zip(groups, ahead(self.encoder.tokenize, groups), strict=True):
            for k, hidden in self._encode(tokenized):
                self.cache.put(group[k], hidden)
            there += len(group) * share[1]  # assume that the other processes are as fast
            if step:
                step(min(there, len(lengths)))
        self.cache.flush()
        return len(missing) - fitting

    def batch(self, which: Sequence[int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Return hidden states [b, n_pos, depth, d_emb] of some texts, as stored, and a mask [b, n_pos]."""
        device = device or self.encoder.device
        found: dict[int, Tensor] = {}
        for k in which:
            hidden = self.cache.get(self.texts[k]) if self.cache else None
            if hidden is not None and hidden.shape == self._shape(k):
                found[k] = hidden  # [n_pos, depth, d_emb]
        missing = [k for k in dict.fromkeys(which) if k not in found]
        for k, hidden in self._encode(self.encoder.tokenize([self.texts[k] for k in missing])):
            found[missing[k]] = hidden  # [n_pos, depth, d_emb]
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

    def _encode(self, tokenized: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """Yield the hidden states [n_pos, depth, d_emb] of each text, rounded as stored, in any order."""
        if self.encoder.device.type != "cpu":
            yield from self._encode_by_length(tokenized)
            return
        filled = self.encoder.filled
        # A text with several chunks, or with more positions than a full batch, is a batch of its own.
        long = [len(getattr(one, "keep", "1")) > 1 for one in tokenized]
        lengths = [sys.maxsize if long[k] else one.n_pos for k, one in enumerate(tokenized)]
        for which in same_shapes(lengths, filled):
            # A batch is filled with repeated texts, whose results are dropped.
            rows = list(dict.fromkeys(which))
            for batch in self.encoder.batches([tokenized[k] for k in which]):
                for row, k in enumerate(batch.which):
                    if k < len(rows):
                        yield which[k], halved(batch.hidden[row][batch.mask[row]])  # [n_pos, depth, d_emb]

    def _encode_by_length(self, tokenized: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """Do the same as ``_encode`` in batches of similar length. The next batch runs during each copy."""
        limit = max(GPU_BATCH_BYTES // (self.encoder.depth * self.encoder.d_emb * 2), 1)
        copying: Any = None
        for batch in self.encoder.batches(tokenized, limit):
            half = halved(batch.hidden)  # [b, n_pos, depth, d_emb]
            # If numbers are too large for float16, each text is rounded on its own, as if it were alone.
            stored = half if half.dtype == torch.float16 else batch.hidden  # [b, n_pos, depth, d_emb]
            started = batch.which, *copies(stored, batch.mask)
            if copying is not None:
                yield from split(*copying)
            copying = started
        if copying is not None:
            yield from split(*copying)


def copies(*tensors: Tensor) -> list[Any]:
    """Start copies of tensors to the CPU. Return the copies and an event, None if they are complete."""
    if tensors[0].device.type != "cuda":
        return [*(tensor.cpu() for tensor in tensors), None]
    found: list[Any] = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
    for copy, tensor in zip(found, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))
    return [*found, event]


def split(which: Sequence[int], hidden: Tensor, mask: Tensor, event: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the used hidden states [n_pos, depth, d_emb] of each text of a batch, after the event."""
    if event is not None:
        event.synchronize()
    counts = mask.sum(1)  # [b]
    in_front = torch.arange(mask.shape[1]) < counts[:, None]  # [b, n_pos]
    is_slice = (mask == in_front).all(1).tolist()  # [b]
    for row, (k, n) in enumerate(zip(which, counts.tolist(), strict=True)):
        yield k, halved(hidden[row, :n] if is_slice[row] else hidden[row][mask[row]])  # [n_pos, depth, d_emb]


def same_shapes(lengths: Sequence[int], filled: int | None) -> Iterator[list[int]]:
    """Group rows of equal length. If filled, all groups of a length have the same number of rows.

    Matrix products of different shapes may sum in a different order. On a CPU, batches of one shape give each
    text the same bits, whatever the other texts of the batch are.

    Args:
        lengths: the length of each row.
        filled: repeat rows at the end of each group until the group has about this many positions, None for
            no repeated rows.
    """
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        by_length.setdefault(length, []).append(row)
    for length, rows in by_length.items():
        size = len(rows) if filled is None else max(filled // max(length, 1), 1)
        for start in range(0, len(rows), size):
            group = rows[start : start + size]
            yield [group[k % len(group)] for k in range(len(group) if filled is None else size)]


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
