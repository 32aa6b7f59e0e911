"""Read vectors that are stored row after row in files: parse file headers, and reuse a few buffers."""

import json
import math
import mmap
import os
import zlib
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.storage import require

# The number of buffers, and of threads that fill them, with pinned memory (True) and without (False). One
# buffer is in use while the others are filled or wait.
BUFFERS = {True: 5, False: 4}
READERS = {True: 4, False: 2}
BLOCK = 4096  # bytes; direct reads need offsets and memory addresses that are multiples of this
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Segment(NamedTuple):
    """Consecutive rows of vectors in a file."""

    path: Path
    offset: int  # bytes before the first row
    n_inp: int


class FileVectors:
    """Vectors in files, row after row. Files are not memory-mapped, because a mapped file must not shrink.

    Vectors larger than half of the machine's memory bypass the system's cache (O_DIRECT). The cache could not
    hold them until the next pass, and the system would spend as much time on its cache as routing takes.

    Raises:
        ValueError: a file is shorter than its header says, or has changed since it was opened.
    """

    reads_ahead = True

    def __init__(self, segments: Sequence[Segment], d_inp: int, dtype: torch.dtype):
        self.segments, self.d_inp, self.dtype = segments, d_inp, dtype
        self.n_inp = sum(segment.n_inp for segment in segments)
        self.row_bytes = d_inp * dtype.itemsize
        self.direct = 2 * self.n_inp * self.row_bytes > memory_bytes()
        self.stamps = [stamp(segment.path) for segment in segments]
        for segment, before in zip(segments, self.stamps, strict=True):
            end = segment.offset + segment.n_inp * self.row_bytes
            if before.size < end:
                shape = f"[{segment.n_inp}, {d_inp}] of {dtype}"
                raise ValueError(
                    f"{segment.path} is cut short: {shape} ends at byte {end}, the file at {before.size}"
                )

    def chunks(self, rows: int, pinned: bool = False) -> Generator[Tensor]:
        """Yield chunks [at most rows, d], and read ahead meanwhile. A chunk is valid until the next one."""
        most = min(rows, max(self.n_inp, 1)) * self.row_bytes
        buffers = cycle([aligned(most + 2 * BLOCK, pinned) for _ in range(BUFFERS[pinned])])
        reads: deque[Future[Tensor]] = deque()
        with ThreadPoolExecutor(READERS[pinned], "vecroute reader") as pool:
            for segment, before in zip(self.segments, self.stamps, strict=True):
                direct = self.direct and segment.offset % self.dtype.itemsize == 0
                for start in range(0, segment.n_inp, rows):
                    begin = segment.offset + start * self.row_bytes
                    size = min(rows, segment.n_inp - start) * self.row_bytes
                    reads.append(pool.submit(read, segment.path, before, begin, size, next(buffers), direct))
                    if len(reads) == BUFFERS[pinned]:
                        yield self._as_rows(reads.popleft())  # [rows, d]
            while reads:
                yield self._as_rows(reads.popleft())  # [rows, d]

    def _as_rows(self, reading: "Future[Tensor]") -> Tensor:
        """Wait for the bytes, and return them as vectors [rows, d]."""
        return reading.result().view(self.dtype).view(-1, self.d_inp)  # [rows, d]


def aligned(size: int, pinned: bool) -> Tensor:
    """Allocate memory [size] that begins at a multiple of BLOCK."""
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pinned)  # [size + BLOCK]
    return memory[-memory.data_ptr() % BLOCK :][:size]


def read(path: Path, before: "Stamp", begin: int, size: int, buffer: Tensor, direct: bool) -> Tensor:
    """Read bytes [size] of a file into the buffer, and return the part of the buffer that holds them.

    Args:
        before: the ``stamp`` of the file when it was opened.
        buffer: made by ``aligned``, at least size + 2 * BLOCK bytes.
        direct: True to bypass the system's cache, if the file system allows it.
    """
    with told(path, before):
        if direct:
            try:
                return fill(path, begin, size, buffer, getattr(os, "O_DIRECT", 0))  # [size]
            except OSError:  # file systems in memory refuse O_DIRECT, some when opening, some when reading
                pass
        return fill(path, begin, size, buffer)  # [size]


def fill(path: Path, begin: int, size: int, buffer: Tensor, flag: int = 0) -> Tensor:
    """Do the work of ``read``. With a flag for the system (O_DIRECT), read whole blocks."""
    skip = begin % BLOCK if flag else 0
    wanted, done = skip + size, 0
    memory = buffer[: -(-wanted // BLOCK) * BLOCK].numpy().data
    with open(path, "rb", buffering=0, opener=lambda name, mode: os.open(name, mode | flag)) as file:
        while done < wanted:
            file.seek(begin - skip + done)
            n = file.readinto(memory[done:])
            if flag and done + n < wanted:
                n -= n % BLOCK  # after a short read, the next one must begin at a block too
            if n == 0:
                length = os.fstat(file.fileno()).st_size
                raise ValueError(f"{path} has become shorter while it was read: it ends at byte {length}")
            done += n
    return buffer[skip:wanted]


class told:
    """A context that turns read errors into a ValueError with the file's name, and refuses a changed file.

    Args:
        before: the ``stamp`` of the file when it was opened, None if it was not opened before.
    """

    def __init__(self, path: Path, before: "Stamp | None" = None):
        self.path, self.before = path, before

    def __enter__(self) -> None:
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {self.path}")
        self.check()

    def check(self) -> None:
        if self.before not in (None, stamp(self.path)):
            raise ValueError(f"{self.path} has changed since it was opened")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        arrow = kind is not None and kind.__module__.startswith("pyarrow")
        if arrow or isinstance(error, OSError | UnicodeDecodeError):
            raise ValueError(f"{self.path} cannot be read: {error}") from error
        if kind is None:
            self.check()  # the file may have changed during the read


def memory_bytes() -> int:
    """Return the size of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def npy_head(path: Path) -> tuple[int, list[int], torch.dtype]:
    """Return the offset of the numbers in a .npy file, their shape and their dtype."""
    numpy_format = require("numpy.lib.format", "data")
    with open(path, "rb") as file:
        try:
            version = numpy_format.read_magic(file)
            read_head = getattr(numpy_format, f"read_array_header_{1 if version == (1, 0) else 2}_0")
            shape, fortran, dtype = read_head(file)
        except (ValueError, SyntaxError, TokenError) as error:  # the header is not a Python literal
            raise ValueError(f"{path} is no .npy file, or damaged: {error}") from error
        if fortran:
            raise ValueError(f"{path} must hold rows one after the other, holds columns (fortran_order)")
        end, size = file.tell() + math.prod(shape) * dtype.itemsize, path.stat().st_size
        if size > end:
            raise ValueError(f"{path} is damaged: {shape} of {dtype} ends at byte {end}, the file at {size}")
        return file.tell(), list(shape), torch_dtype(dtype, path)


def safetensors_head(path: Path, name: str | None) -> tuple[int, list[int], torch.dtype]:
    """Do the same as ``npy_head`` for a tensor in a safetensors file.

    Such a file has 8 bytes with the length of a JSON header, then the header, then the numbers.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            fits = 0 < length <= os.fstat(file.fileno()).st_size
            tensors: Any = json.loads(file.read(length)) if fits else None
            tensors.pop("__metadata__", None)
            name = name or (next(iter(tensors)) if len(tensors) == 1 else None)
            about = tensors.get(name)
            if about is None:
                raise KeyError(f"name must be one of {list(tensors)}, got {name!r}")
            if about["dtype"] not in DTYPES:
                raise KeyError(f"tensor {name!r} must be one of {', '.join(DTYPES)}, is {about['dtype']}")
            shape, dtype, (begin, end) = about["shape"], DTYPES[about["dtype"]], about["data_offsets"]
            if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError("the numbers of a tensor take another place than it says")
            return 8 + length + begin, shape, dtype
        except KeyError as error:
            raise ValueError(f"{path}: {error.args[0]}") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is no safetensors file, or damaged") from error


def mapped(array: Any) -> Segment:
    """Return the segment of a file that a memory map [n_inp, d_inp], or a contiguous part of one, covers."""
    numpy = require("numpy", "data")
    if array.ndim != 2 or not array.flags.c_contiguous or array.filename is None:
        raise ValueError(f"x_inp must be a contiguous memory map [n_inp, d_inp] of a file, got {array.shape}")
    base = numpy.frombuffer(array._mmap, numpy.uint8).ctypes.data
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return Segment(Path(array.filename), start + array.ctypes.data - base, len(array))


def torch_dtype(dtype: Any, where: object = "x_inp") -> torch.dtype:
    """Convert a floating-point dtype of NumPy to torch."""
    found = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}.get(str(dtype))
    if found is None:
        raise ValueError(f"{where} must be of float16, float32 or float64, got {dtype}")
    return found


class Stamp(NamedTuple):
    """A fingerprint of a file, to notice that it changed between two passes.

    A program can write to a file and then restore its modification time, but not ``st_ctime``. Systems
    update ``st_ctime`` in steps of a few milliseconds. A checksum of the first and last bytes can reveal a
    change within one step.
    """

    size: int
    modified: int  # nanoseconds; ``os.utime`` can set it
    changed: int  # nanoseconds; only the system sets it
    inode: int
    ends: int  # checksum of the first and the last bytes


def stamp(path: Path) -> Stamp:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        ends = zlib.crc32(file.read(BLOCK))
        file.seek(max(status.st_size - BLOCK, 0))
        ends = zlib.crc32(file.read(BLOCK), ends)
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, ends)
