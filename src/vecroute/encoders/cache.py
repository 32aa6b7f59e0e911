"""Hidden states on disk: computed once per text, memory-mapped, checked, safe to share and to kill."""

import functools
import hashlib
import itertools
import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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

    A segment is a safetensors file with the hidden states of some texts, each with a checksum. It is written
    under a temporary name and then renamed, so it is there as a whole or not at all, and two processes may
    add segments at the same time. A segment that turns out damaged is deleted, and what was in it computed
    again.

    Args:
        folder: where the segments of all encoders are, each in a folder of its own.
        key: ``TextEncoder.key``, which tells one encoder's hidden states from another's.
        max_bytes: limit for the whole folder. Segments that were not used for longest make room.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, folder: str | os.PathLike, key: str, max_bytes: int = 20 * GIB):
        self.folder = Path(folder)
        self.own = self.folder / key[:32]
        self.own.mkdir(parents=True, exist_ok=True)
        self.max_bytes = max_bytes
        self._files: dict[Path, Any] = {}  # open segments
        self._where: dict[str, Path] = {}  # key of a text -> its segment
        self._checked: set[str] = set()
        self._waiting: dict[str, Tensor] = {}  # not yet on the disk
        self._waiting_bytes = 0
        self._full = False
        for path in self.folder.glob("*/*.tmp"):
            with suppress(FileNotFoundError):  # another process has just finished it
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER:
                    path.unlink()
        self.refresh()

    def refresh(self) -> None:
        """Look for segments that came since, from this or another process."""
        for path in sorted(self.own.glob("*.safetensors")):
            if path in self._files:
                continue
            try:
                file = safe_open(path, "pt")
                checksums = file.metadata()
                keys = [key for key in file.keys() if key in checksums]  # noqa: SIM118 (no dict)
            except (OSError, SafetensorError, TypeError) as error:
                self._drop(path, error)
                continue
            self._files[path] = file
            self._where.update(dict.fromkeys(keys, path))

    def n_pos(self, text: str) -> int | None:
        """How many positions the text has, None if it is not here."""
        key = text_key(text)
        if key in self._waiting:
            return len(self._waiting[key])
        if key not in self._where:
            return None
        return self._files[self._where[key]].get_slice(key).get_shape()[0]

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
            if checksum(hidden) != self._files[path].metadata()[key]:
                self._drop(path, "checksum differs")
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
            save_file(self._waiting, temporary, {key: checksum(t) for key, t in self._waiting.items()})
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
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
                room += size
        return max(room, 0)

    def _drop(self, path: Path, why: object) -> None:
        logger.info("cached hidden states deleted: %s (%s)", path, why)
        path.unlink(missing_ok=True)
        self._files.pop(path, None)
        self._where = {key: where for key, where in self._where.items() if where != path}


class Features:
    """The hidden states of texts: from the cache where they are there, else computed when asked for.

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
            if hidden is not None:
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

    def _encode(self, texts: Sequence[str]) -> Iterator[tuple[int, Tensor]]:
        for batch in self.encoder.batches(self.encoder.tokenize(texts)):
            for row, k in enumerate(batch.which):
                yield k, batch.hidden[row][batch.mask[row]]  # [n_pos, depth, d_emb]


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


def text_key(text: Any) -> str:
    """What a text is known by; an image, a ``Picture``, brings a key of its own."""
    if not isinstance(text, str):
        return text.key
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def checksum(hidden: Tensor) -> str:
    return f"{zlib.crc32(hidden.reshape(-1).view(torch.uint8).numpy().data):08x}"


def halved(hidden: Tensor) -> Tensor:
    """In two bytes per number: float16, bfloat16 where the numbers are too great for it."""
    if hidden.element_size() == 2:
        return hidden
    half = hidden.half()
    return half if half.isfinite().all() else hidden.bfloat16()
