"""Hidden states on disk: computed once per text, memory-mapped, checked, safe to share and to kill."""

import functools
import itertools
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vecroute.encoders.entries import Entry, halved, header, read_entries, text_key
from vecroute.encoders.text import TextEncoder

logger = logging.getLogger(__name__)

GIB = 1024**3
SEGMENT_BYTES = 64 * 1024**2  # what is lost at most if the process is killed
WINDOW_BYTES = 128 * 1024**2  # of hidden states computed at a time, if there are several texts
KEEP_FREE = GIB  # of the disk, for everybody else
ABANDONED_AFTER = 3600  # seconds; a temporary file that old belongs to a process that died


def default_folder() -> Path:
    """``$VECROUTE_CACHE``, else ``vecroute`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("VECROUTE_CACHE") or Path(base) / "vecroute")


class FeatureCache:
    """The hidden states of one encoder by text, in files that are written once and never changed.

    A segment is a safetensors file with the hidden states of some texts. Its header names the encoder, and
    gives the dtype, the shape and a checksum for each text. It is written under a temporary name and then
    renamed, so it is there as a whole or not at all, and two processes may add segments at the same time. A
    segment that is damaged or of another encoder is deleted, and its texts are computed again.

    Args:
        folder: where the segments of all encoders are, each in a folder of its own.
        key: ``TextEncoder.key``, which tells one encoder's hidden states from another's.
        max_bytes: limit for the whole folder. Segments that were not used for longest make room.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | os.PathLike, key: str, max_bytes: int = 20 * GIB):
        self.folder, self.key = Path(folder), key
        self.own = self.folder / key[:32]
        self.own.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self._files: dict[Path, Any] = {}  # open segments
        self._where: dict[str, Path] = {}  # key of a text -> its segment
        self._entries: dict[str, Entry] = {}  # what the header of the segment says of it
        self._refused: set[Path] = set()  # damaged segments, which may be there still
        self._checked: set[str] = set()
        self._waiting: dict[str, Tensor] = {}  # not yet on the disk
        self._waiting_bytes = 0
        self._full = False
        for path in self.folder.glob("*/*.tmp"):
            with suppress(OSError):  # another process has just finished it, or the folder is read-only
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER:
                    path.unlink()
        self.refresh()

    def refresh(self) -> None:
        """Look for segments that came since, from this or another process."""
        for path in sorted(self.own.glob("*.safetensors")):
            if path in self._files or path in self._refused:
                continue
            try:
                file = safe_open(path, "pt")
                entries = read_entries(file.metadata() or {}, self.key)
                if set(entries) != set(file.keys()):
                    raise ValueError("its tensors are not those of its header")
            except (OSError, SafetensorError, ValueError) as error:
                self._drop(path, error)
                continue
            self._files[path] = file
            self._where.update(dict.fromkeys(entries, path))
            self._entries |= entries

    def n_pos(self, text: str) -> int | None:
        """How many positions the text has, None if it is not here."""
        key = text_key(text)
        if key in self._waiting:
            return len(self._waiting[key])
        return self._entries[key].shape[0] if key in self._where else None

    def get(self, text: str) -> Tensor | None:
        """The hidden states [n_pos, depth, d_emb] of a text, memory-mapped; None if not here or damaged."""
        key = text_key(text)
        if key in self._waiting:
            return self._waiting[key]
        path = self._where.get(key)
        if path is None:
            return None
        hidden = self._files[path].get_tensor(key)  # [n_pos, depth, d_emb]
        if key not in self._checked:
            if Entry.of(hidden) != self._entries[key]:
                self._drop(path, "shape, dtype or checksum differs")
                return None
            self._checked.add(key)
        return hidden

    def put(self, text: str, hidden: Tensor) -> None:
        """Keep the hidden states [n_pos, depth, d_emb] of a text; they are on the disk after ``flush``."""
        if self._full:
            return
        stored = halved(hidden).cpu().contiguous()  # [n_pos, depth, d_emb]
        self._waiting[text_key(text)] = stored
        self._waiting_bytes += stored.nbytes
        if self._waiting_bytes >= SEGMENT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one segment. A full disk is no error: what does not fit is not kept."""
        if not self._waiting:
            return
        path = self.own / f"{uuid.uuid4().hex}.safetensors"
        temporary = path.with_suffix(".tmp")
        try:
            entries = {key: Entry.of(hidden) for key, hidden in self._waiting.items()}
            save_file(self._waiting, temporary, header(self.key, entries))
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            logger.warning("hidden states cannot be written to %s (%s): going on without", self.own, error)
            self._full = True
        self._waiting, self._waiting_bytes = {}, 0
        self.refresh()

    def make_room(self, needed: int, using: Sequence[str]) -> int:
        """Delete segments that were not used for longest until so many bytes fit, if they can.

        Args:
            needed: bytes.
            using: texts whose segments must stay.

        Returns:
            How many bytes may be written now.
        """
        mine = {self._where[key] for key in map(text_key, using) if key in self._where}
        for path in mine:
            with suppress(OSError):  # a folder that is read-only
                os.utime(path)
        sizes: dict[Path, tuple[float, int]] = {}
        for path in self.folder.glob("*/*"):
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process made room too
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

    def _drop(self, path: Path, why: object) -> None:
        logger.info("cached hidden states deleted: %s (%s)", path, why)
        self._refused.add(path)
        with suppress(OSError):  # in a folder that is read-only it stays, but is not used
            path.unlink(missing_ok=True)
        self._files.pop(path, None)
        self._where = {key: where for key, where in self._where.items() if where != path}


class Features:
    """The hidden states of texts: from the cache where they are there, else computed when asked for.

    They are the same numbers either way, on the CPU to the last bit: computed ones are rounded as the cache
    rounds them, and go through the encoder in batches whose shape depends on the length of the text alone.

    Args:
        encoder: what computes them.
        texts: as many as you like; only those asked for are in memory.
        cache: None to compute them each time.
    """

    def __init__(self, encoder: TextEncoder, texts: Sequence[str], cache: FeatureCache | None = None):
        self.encoder, self.texts, self.cache = encoder, texts, cache
        self.position_bytes = encoder.depth * encoder.d_emb * 4  # in float32
        self.lengths = self._lengths()

    def __len__(self) -> int:
        return len(self.texts)

    def _lengths(self) -> list[int]:
        """How many positions each text has; those that the cache does not know are tokenized for it."""
        known = [None if self.cache is None else self.cache.n_pos(text) for text in self.texts]
        unknown = iter([text for text, n_pos in zip(self.texts, known, strict=True) if n_pos is None])
        counted: list[int] = []
        while some := list(itertools.islice(unknown, 1024)):
            counted += [tokenized.n_pos for tokenized in self.encoder.tokenize(some)]
        rest = iter(counted)
        return [next(rest) if n_pos is None else n_pos for n_pos in known]

    @property
    def nbytes(self) -> int:
        """What the hidden states of all texts take in the cache."""
        return sum(self.lengths) * self.encoder.depth * self.encoder.d_emb * 2

    def prepare(self, share: tuple[int, int] = (0, 1), step: Callable[[int], None] | None = None) -> int:
        """Compute what the cache does not have yet, as far as there is room for it.

        Args:
            share: (rank, number of processes) for each process to compute its part.
            step: called with the number of texts that are there, of all processes, each time some come.

        Returns:
            For how many texts there is no room.
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
        for group in windows([lengths[text] * size for text in own], WINDOW_BYTES):
            for k, hidden in self._encode([own[k] for k in group]):
                self.cache.put(own[group[k]], hidden)
            there += len(group) * share[1]  # the others are about as fast
            if step:
                step(min(there, len(lengths)))
        self.cache.flush()
        return len(missing) - fitting

    def batch(self, which: Sequence[int], device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states [b, n_pos, depth, d_emb] of some texts, maybe in half precision; mask [b, n_pos]."""
        device = device or self.encoder.device
        found: dict[int, Tensor] = {}
        for k in which:
            hidden = self.cache.get(self.texts[k]) if self.cache else None
            if hidden is not None and hidden.shape == self._shape(k):
                found[k] = hidden  # [n_pos, depth, d_emb]
        missing = [k for k in dict.fromkeys(which) if k not in found]
        for k, hidden in self._encode([self.texts[k] for k in missing]):
            found[missing[k]] = hidden  # [n_pos, depth, d_emb]
        # As they are stored: half precision is half the work, and much of it may be left out.
        dtype = functools.reduce(torch.promote_types, {hidden.dtype for hidden in found.values()})
        where = self.encoder.device if missing else torch.device("cpu")
        padded = pad_sequence([found[k].to(where, dtype) for k in which], batch_first=True)
        lengths = torch.tensor([self.lengths[k] for k in which])  # [b]
        mask = torch.arange(padded.shape[1]) < lengths[:, None]  # [b, n_pos]
        return padded.to(device), mask.to(device)

    def _shape(self, k: int) -> tuple[int, int, int]:
        return self.lengths[k], self.encoder.depth, self.encoder.d_emb

    def _encode(self, texts: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
        """The hidden states [n_pos, depth, d_emb] of each text, rounded as they are stored, in any order."""
        tokenized = self.encoder.tokenize(texts)
        filled = self.encoder.filled if self.encoder.device.type == "cpu" else None
        # A text of several chunks comes alone, as one of more positions than a batch is filled with.
        long = [len(getattr(one, "chunks", "1")) > 1 for one in tokenized]
        lengths = [sys.maxsize if long[k] else one.n_pos for k, one in enumerate(tokenized)]
        for which in same_shapes(lengths, filled):
            # A batch is filled up with texts that it has already, which are left out again.
            rows = list(dict.fromkeys(which))
            for batch in self.encoder.batches([tokenized[k] for k in which]):
                for row, k in enumerate(batch.which):
                    if k < len(rows):
                        yield which[k], halved(batch.hidden[row][batch.mask[row]])  # [n_pos, depth, d_emb]


def same_shapes(lengths: Sequence[int], filled: int | None) -> Iterator[list[int]]:
    """Group rows of one length; if they are to be filled, each group of a length has as many rows.

    Matrix products of other shapes may add up in another order. On a CPU, batches of one shape give each text
    the same bits, whatever texts are beside it.

    Args:
        lengths: of each row.
        filled: repeat rows until a group has about so many positions; repeated rows come last. None not to.
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
    """Group neighbours so that the sizes in a group add up to the limit at most; a larger one comes alone."""
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
