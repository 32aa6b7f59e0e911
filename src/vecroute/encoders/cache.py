"""A cache of hidden states on disk. Several processes may share it, and killing one does not damage it."""

import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vecroute.encoders.entries import (
    Contents,
    Entry,
    Packed,
    checksum_of,
    checksum_of_open,
    read_contents,
    write_segment,
)

logger = logging.getLogger(__name__)

GIB = 1024**3
SEGMENT_BYTES = 48 * 1024**2  # least size of a segment; a killed process loses a few of them at most
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

    A segment is a safetensors file with the hidden states of some texts. Its header names the encoder and has
    a checksum, which is compared when the first of these texts is read. The file is written under a temporary
    name and then renamed, so there are no partial segments, and two processes may add segments at the same
    time. A segment that is damaged or of another encoder is deleted, and its texts are computed again.

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
        self._unchecked: dict[Path, Contents] = {}  # of segments that were not read yet
        self._checking: dict[Path, threading.Lock] = {}
        self._waiting: list[Packed] = []  # the next segment
        self._waiting_bytes = 0
        self._writers: tuple[int, ThreadPoolExecutor] | None = None  # with the process that they belong to
        self._writing: list[tuple[list[Packed], Future]] = []  # segments, oldest first
        self._in_memory: dict[str, Packed] = {}  # key of a text -> where it is in all these
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
                contents = read_contents(path, self.key)
            except (OSError, SafetensorError, ValueError) as error:
                self._drop(path, error)
                continue
            self._add(path, file, contents)

    def _add(self, path: Path, file: Any, contents: Contents) -> None:
        self._files[path] = file
        self._unchecked[path], self._checking[path] = contents, threading.Lock()
        self._where.update(dict.fromkeys(contents.entries, path))
        self._entries |= contents.entries

    def n_pos(self, key: str) -> int | None:
        """Return the number of positions of a text, None if it is not in the cache."""
        packed = self._in_memory.get(key)
        if packed:
            return packed.counts[packed.names.index(key)]
        return self._entries[key].shape[0] if key in self._where else None

    def get(self, key: str) -> Tensor | None:
        """Return the memory-mapped hidden states [n_pos, depth, d_emb] of a text, None if there are none."""
        packed = self._in_memory.get(key)
        if packed:
            return packed.one(key)
        path = self._where.get(key)
        file = self._files.get(path) if path is not None else None
        if path is None or file is None:
            return None
        if not self._is_sound(path, file):
            self._drop(path, "its checksum differs")
            return None
        hidden = file.get_tensor(key)  # [n_pos, depth, d_emb]
        if Entry.of(hidden) != self._entries[key]:
            self._drop(path, "shape or dtype differs")
            return None
        return hidden

    def _is_sound(self, path: Path, file: Any) -> bool:
        """Return whether a segment has its checksum, which is computed once. Other threads wait meanwhile."""
        if path not in self._unchecked:
            return True
        with self._checking[path]:
            contents = self._unchecked.get(path)
            if contents is None or path in self._refused:
                return contents is None
            try:
                found = checksum_of(path)
            except FileNotFoundError:  # another process has deleted it; this one can still read it
                found = checksum_of_open(file, contents.entries)
            except OSError:
                return False
            if found == contents.checksum:
                del self._unchecked[path]
            return found == contents.checksum

    def put(self, packed: Packed) -> None:
        """Add hidden states of texts, in two bytes per number, on the CPU. ``flush`` writes them."""
        if self._full:
            return
        if not self._in_memory.keys().isdisjoint(packed.names):
            self._start_writing()  # a segment cannot hold a text twice
        self._waiting.append(packed)
        self._waiting_bytes += packed.hidden.nbytes
        self._in_memory.update(dict.fromkeys(packed.names, packed))
        if self._waiting_bytes >= SEGMENT_BYTES:
            self._start_writing()
        # Written segments give their memory back, which takes long to allocate for copies from a GPU.
        while self._writing and (len(self._writing) > WRITERS or self._writing[0][1].done()):
            self._end_writing()

    def flush(self) -> None:
        """Write the added hidden states. Those that do not fit the disk are dropped."""
        self._start_writing()
        while self._writing:
            self._end_writing()

    def _start_writing(self) -> None:
        """Write the waiting hidden states as one segment, in a thread."""
        if not self._waiting:
            return
        if self._writers is None or self._writers[0] != os.getpid():  # a forked process has no threads yet
            self._writers = os.getpid(), ThreadPoolExecutor(WRITERS)
        self._writing.append((self._waiting, self._writers[1].submit(self._write, self._waiting)))
        self._waiting, self._waiting_bytes = [], 0

    def _end_writing(self) -> None:
        """Wait until the oldest segment is written."""
        segment, future = self._writing.pop(0)
        try:
            written = future.result()
            if written is not None:
                with suppress(OSError, SafetensorError):  # another process has just deleted it to make room
                    self._add(written[0], safe_open(written[0], "pt"), written[1])
        finally:
            for packed in segment:
                for key in packed.names:
                    if self._in_memory.get(key) is packed:  # else it was added again since
                        del self._in_memory[key]

    def _write(self, segment: list[Packed]) -> tuple[Path, Contents] | None:
        """Write a segment. Return its path and contents, None if that is not possible."""
        path = self.own / f"{uuid.uuid4().hex}.safetensors"
        temporary = path.with_suffix(".tmp")
        try:
            # No fsync, which would take longer than all else: a checksum finds what a power failure destroys.
            contents = write_segment(temporary, segment, self.key)
            temporary.replace(path)
            return path, contents
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
            using: keys of texts whose segments must stay.

        Returns:
            The number of bytes that may be written now.
        """
        mine = {self._where[key] for key in using if key in self._where}
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
