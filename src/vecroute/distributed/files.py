"""Vectors that lie in files row after row: what the heads of the files say, and reading into few buffers."""

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.storage import require

# One that is used, one that is filled, and those that wait: few if they are pinned, and large; otherwise some
# more, so that a busy machine need not change between reading and routing at every chunk.
BUFFERS = {True: 3, False: 8}
READERS = 4  # threads that fill a pinned buffer: one cannot read as fast as a GPU takes
BLOCK = 4096  # what places in files and in memory are multiples of in direct reads
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Segment(NamedTuple):
    """Rows of vectors that lie in a file one after the other."""

    path: Path
    offset: int  # in bytes
    n_inp: int


class FileVectors:
    """Vectors in files, row after row. They are read, not mapped, so that a file may shrink without a crash.

    Those that take more than half of the machine's memory are read past the system's cache (O_DIRECT), where
    they would not be found again in the next pass, while making room for them costs as much as routing.

    Raises:
        ValueError: a file is shorter than it says, or has changed since.
    """

    def __init__(self, segments: Sequence[Segment], d_inp: int, dtype: torch.dtype):
        self.segments, self.d_inp, self.dtype = segments, d_inp, dtype
        self.n_inp = sum(segment.n_inp for segment in segments)
        self.row_bytes = d_inp * dtype.itemsize
        self.direct = 2 * self.n_inp * self.row_bytes > memory_bytes()
        self.stamps = [stamp(segment.path) for segment in segments]
        for segment, (size, _) in zip(segments, self.stamps, strict=True):
            end = segment.offset + segment.n_inp * self.row_bytes
            if size < end:
                shape = f"[{segment.n_inp}, {d_inp}] of {dtype}"
                raise ValueError(
                    f"{segment.path} is cut short: {shape} ends at byte {end}, the file at {size}"
                )

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        most = min(rows, max(self.n_inp, 1)) * self.row_bytes
        buffers = cycle([aligned(most + 2 * BLOCK, pinned) for _ in range(BUFFERS[pinned])])
        with ThreadPoolExecutor(READERS, "vecroute reader") as pool:
            for segment, before in zip(self.segments, self.stamps, strict=True):
                if stamp(segment.path) != before:
                    raise ValueError(f"{segment.path} has changed since it was opened")
                direct = self.direct and segment.offset % self.dtype.itemsize == 0
                with OpenFile(segment.path, direct, pool if pinned else None) as file:
                    for start in range(0, segment.n_inp, rows):
                        n = min(rows, segment.n_inp - start)
                        begin = segment.offset + start * self.row_bytes
                        found = file.read(begin, n * self.row_bytes, next(buffers))  # [n * row_bytes]
                        yield found.view(self.dtype).view(n, self.d_inp)  # [rows, d]


def aligned(size: int, pinned: bool) -> Tensor:
    """Memory of so many bytes that begins at a block, [size]."""
    memory = torch.empty(size + BLOCK, dtype=torch.uint8, pin_memory=pinned)  # [size + BLOCK]
    return memory[-memory.data_ptr() % BLOCK :][:size]


class OpenFile:
    """A file that is read past the system's cache, if it is to be and the file system can.

    The threads of a pool, if there is one, each read a part.
    """

    def __init__(self, path: Path, direct: bool, pool: ThreadPoolExecutor | None):
        self.path, self.direct, self.pool = path, direct, pool

    def __enter__(self) -> "OpenFile":
        try:
            self.file = os.open(self.path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if self.direct else 0))
        except OSError:
            if not self.direct:
                raise
            self.file = os.open(self.path, os.O_RDONLY)
        return self

    def __exit__(self, *error: Any) -> None:
        os.close(self.file)

    def read(self, begin: int, size: int, buffer: Tensor) -> Tensor:
        """So many bytes of the file, [size], which are then in the buffer, somewhere in its first block."""
        skip = begin % BLOCK if self.direct else 0
        whole = -(-(skip + size) // BLOCK) * BLOCK
        part = whole if self.pool is None else -(-whole // (READERS * BLOCK)) * BLOCK
        memory, offset, end = buffer.numpy().data, begin - skip, begin + size

        def read_part(start: int) -> None:
            done, stop = start, min(start + part, whole)
            while offset + done < min(offset + stop, end):
                done += os.preadv(self.file, [memory[done:stop]], offset + done)
                length = os.fstat(self.file).st_size
                if length < end:
                    raise ValueError(
                        f"{self.path} has become shorter while it was read: it ends at byte {length}"
                    )

        # What another thread is given costs time: one part is read here.
        list(map(read_part, [0]) if self.pool is None else self.pool.map(read_part, range(0, whole, part)))
        return buffer[skip : skip + size]


def memory_bytes() -> int:
    """Of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def npy_head(path: Path) -> tuple[int, list[int], torch.dtype]:
    """Where the numbers of a .npy file begin, their shape and dtype."""
    numpy_format = require("numpy.lib.format", "data")
    with open(path, "rb") as file:
        try:
            version = numpy_format.read_magic(file)
            read = (
                numpy_format.read_array_header_1_0
                if version == (1, 0)
                else numpy_format.read_array_header_2_0
            )
            shape, fortran, dtype = read(file)
        except ValueError as error:
            raise ValueError(f"{path} is no .npy file, or damaged: {error}") from error
        if fortran:
            raise ValueError(f"{path} must hold rows one after the other, holds columns (fortran_order)")
        return file.tell(), list(shape), torch_dtype(dtype, path)


def safetensors_head(path: Path, name: str | None) -> tuple[int, list[int], torch.dtype]:
    """The same of a tensor in a safetensors file: length in 8 bytes, JSON of that length, numbers."""
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
            return 8 + length + about["data_offsets"][0], about["shape"], DTYPES[about["dtype"]]
        except KeyError as error:
            raise ValueError(f"{path}: {error.args[0]}") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} is no safetensors file, or damaged") from error


def mapped(array: Any) -> Segment:
    """Where in its file a memory map [n_inp, d_inp], or a part of one that is contiguous, lies."""
    numpy = require("numpy", "data")
    if array.ndim != 2 or not array.flags.c_contiguous or array.filename is None:
        raise ValueError(f"x_inp must be a contiguous memory map [n_inp, d_inp] of a file, got {array.shape}")
    base = numpy.frombuffer(array._mmap, numpy.uint8).ctypes.data
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return Segment(Path(array.filename), start + array.ctypes.data - base, len(array))


def torch_dtype(dtype: Any, where: object = "x_inp") -> torch.dtype:
    """The torch dtype of a floating-point one of numpy."""
    found = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}.get(str(dtype))
    if found is None:
        raise ValueError(f"{where} must be of float16, float32 or float64, got {dtype}")
    return found


def stamp(path: Path) -> tuple[int, int]:
    """Size and time of change of a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
