"""Vectors that are read a chunk at a time, again for every pass: from files, Parquet or an iterable."""

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vecroute.ops.checks import check_size
from vecroute.storage import require

# One that is used, one that is filled, and those that wait: few if they are pinned, and large; otherwise some
# more, so that a busy machine need not change between reading and routing at every chunk.
BUFFERS = {True: 3, False: 8}
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
EXPECTED = (
    "a file .npy, files .safetensors or .parquet, a raw file with d_inp and dtype, a memory map, a tensor, "
    "or chunks [rows, d_inp] that can be iterated again and again"
)


class Vectors(Protocol):
    """Vectors [n_inp, d_inp] somewhere."""

    n_inp: int
    d_inp: int
    dtype: torch.dtype

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        """Chunks [at most rows, d_inp] in order; each stays as it is while some more are read."""
        ...


class Segment(NamedTuple):
    """Rows of vectors that lie in a file one after the other."""

    path: Path
    offset: int  # in bytes
    n_inp: int


class FileVectors:
    """Vectors in files, row after row. They are read, not mapped, so that a file may shrink without a crash.

    Raises:
        ValueError: a file is shorter than it says, or has changed since.
    """

    def __init__(self, segments: Sequence[Segment], d_inp: int, dtype: torch.dtype):
        self.segments, self.d_inp, self.dtype = segments, d_inp, dtype
        self.n_inp = sum(segment.n_inp for segment in segments)
        self.row_bytes = d_inp * dtype.itemsize
        self.stamps = [stamp(segment.path) for segment in segments]
        for segment, (size, _) in zip(segments, self.stamps, strict=True):
            end = segment.offset + segment.n_inp * self.row_bytes
            if size < end:
                shape = f"[{segment.n_inp}, {d_inp}] of {dtype}"
                raise ValueError(
                    f"{segment.path} is cut short: {shape} ends at byte {end}, the file at {size}"
                )

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        buffers = [
            torch.empty(min(rows, max(self.n_inp, 1)), self.d_inp, dtype=self.dtype, pin_memory=pinned)
            for _ in range(BUFFERS[pinned])
        ]  # [rows, d] each
        turn = 0
        for segment, before in zip(self.segments, self.stamps, strict=True):
            if stamp(segment.path) != before:
                raise ValueError(f"{segment.path} has changed since it was opened")
            with open(segment.path, "rb", buffering=0) as file:
                for start in range(0, segment.n_inp, rows):
                    chunk = buffers[turn][: min(rows, segment.n_inp - start)]  # [rows, d]
                    read_into(chunk, file.fileno(), segment.offset + start * self.row_bytes, segment.path)
                    yield chunk
                    turn = (turn + 1) % BUFFERS[pinned]


class ParquetVectors:
    """Vectors in a column of lists of Parquet files, all lists of one length."""

    def __init__(self, paths: Sequence[Path], column: str | None):
        parquet = self.parquet = require("pyarrow.parquet", "cli")
        self.paths, self.n_inp, self.d_inp = paths, 0, 0
        for path in paths:
            with told(path), parquet.ParquetFile(path) as file:
                self.n_inp += file.metadata.num_rows
                lists = [field.name for field in file.schema_arrow if hasattr(field.type, "value_type")]
                column = column or next(iter(lists), None)
                if column not in lists:
                    raise ValueError(f"{path} must have a column of lists {column or ''}, has {lists}")
        self.column = column
        first = next(iter(self.chunks(1)), None)
        if first is None:
            raise ValueError(f"{paths[0]} has no rows, from which d_inp could be known")
        self.d_inp, self.dtype = first.shape[1], first.dtype

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        compute = require("pyarrow.compute", "cli")
        for path in self.paths:
            with told(path), self.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(rows, columns=[self.column], use_threads=False):
                    lists = batch.column(0)
                    lengths = compute.unique(compute.list_value_length(lists)).to_pylist()
                    if len(lengths) > 1 or None in lengths or self.d_inp not in (0, lengths[0]):
                        raise ValueError(
                            f"column {self.column!r} must have lists of one length, has {lengths}"
                        )
                    flat = lists.flatten().to_numpy(zero_copy_only=False)
                    chunk = torch.from_numpy(flat.reshape(len(lists), -1).copy())  # [rows, d]
                    if not chunk.is_floating_point():
                        raise ValueError(
                            f"column {self.column!r} must have floating-point numbers, has {flat.dtype}"
                        )
                    yield chunk.pin_memory() if pinned else chunk


class told:
    """A context in which errors of reading name the file, as ValueError."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {self.path}")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        arrow = kind is not None and kind.__module__.startswith("pyarrow")
        if error is not None and (arrow or isinstance(error, OSError)):
            raise ValueError(f"{self.path} cannot be read: {error}") from error


class IteratedVectors:
    """Vectors from chunks that can be iterated again and again, or a function that returns an iterator."""

    def __init__(self, source: Iterable[Any] | Callable[[], Iterator[Any]], n_inp: int | None):
        self.source, self.n_inp, self.d_inp = source, 0, 0
        first = next(iter(self._chunks()), None)
        if first is None:
            raise ValueError(f"x_inp must be {EXPECTED}, got no chunk at all")
        self.d_inp, self.dtype = first.shape[1], first.dtype
        self.n_inp = sum(len(chunk) for chunk in self._chunks()) if n_inp is None else n_inp

    def _chunks(self) -> Iterator[Tensor]:
        source: Any = self.source
        for chunk in source() if callable(source) else source:
            chunk = torch.as_tensor(chunk)  # [rows, d]
            if chunk.dim() != 2 or not chunk.is_floating_point():
                raise ValueError(
                    f"chunks must be floating-point [rows, d_inp], got {chunk.dtype} {list(chunk.shape)}"
                )
            if self.d_inp and (chunk.shape[1], chunk.dtype) != (self.d_inp, self.dtype):
                came = f"{chunk.dtype} {list(chunk.shape)}"
                raise ValueError(f"chunks must all be [rows, d_inp={self.d_inp}] of {self.dtype}, got {came}")
            yield chunk

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        n_inp = 0
        for chunk in self._chunks():
            n_inp += len(chunk)
            for part in chunk.split(rows):
                yield part.pin_memory() if pinned else part
        if n_inp != self.n_inp:
            raise ValueError(f"x_inp must give n_inp={self.n_inp} vectors in every pass, gave {n_inp}")


def open_vectors(
    source: Any,
    *,
    name: str | None = None,
    d_inp: int | None = None,
    dtype: torch.dtype | None = None,
    n_inp: int | None = None,
) -> Vectors:
    """Vectors [n_inp, d_inp] to be read a chunk at a time.

    Args:
        source: a path to a .npy file, one or more to .safetensors or .parquet files, whose rows follow one
            another, or one to a raw file; a ``numpy.memmap``; a tensor; chunks [rows, d_inp] in anything that
            can be iterated again and again, or a function that returns an iterator over them.
        name: of the tensor in safetensors files, of the column in Parquet files; None for the only one.
        d_inp, dtype: of a raw file.
        n_inp: of an iterable, None to count first.

    Raises:
        ValueError, TypeError: a source of no such kind, a file that is missing, truncated or damaged.
    """
    if hasattr(source, "chunks") and hasattr(source, "n_inp"):
        return source
    if isinstance(source, Tensor):
        return IteratedVectors([source], len(source))
    if type(source).__name__ == "memmap":
        return FileVectors([mapped(source)], source.shape[1], torch_dtype(source.dtype))
    if isinstance(source, str | os.PathLike):
        source = [source]
    if isinstance(source, Sequence) and source and all(isinstance(one, str | os.PathLike) for one in source):
        return open_files([Path(one) for one in source], name, d_inp, dtype)
    if hasattr(source, "__next__") or not (callable(source) or hasattr(source, "__iter__")):
        raise TypeError(f"x_inp must be {EXPECTED}, got {type(source).__name__}")
    return IteratedVectors(source, n_inp)


def open_files(paths: list[Path], name: str | None, d_inp: int | None, dtype: torch.dtype | None) -> Vectors:
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
    suffix = paths[0].suffix
    if suffix == ".parquet":
        return ParquetVectors(paths, name)
    if suffix in (".npy", ".safetensors"):
        heads = [npy_head(path) if suffix == ".npy" else safetensors_head(path, name) for path in paths]
    elif d_inp is None or dtype is None:
        raise ValueError(
            f"{paths[0]} must be a .npy, .safetensors or .parquet file, or d_inp and dtype be given"
        )
    else:
        check_size("d_inp", d_inp)
        sizes = [path.stat().st_size for path in paths]
        for path, size in zip(paths, sizes, strict=True):
            if size % (d_inp * dtype.itemsize):
                raise ValueError(f"{path} is cut short: {size} bytes are no rows of {d_inp} {dtype}")
        heads = [(0, [size // (d_inp * dtype.itemsize), d_inp], dtype) for size in sizes]
    for path, (_, shape, kind) in zip(paths, heads, strict=True):
        if len(shape) != 2 or (shape[1:], kind) != (heads[0][1][1:], heads[0][2]):
            expected = f"[n_inp, d_inp={heads[0][1][-1]}] of {heads[0][2]}"
            raise ValueError(f"{path} must hold {expected}, holds {shape} of {kind}")
    segments = [
        Segment(path, offset, shape[0]) for path, (offset, shape, _) in zip(paths, heads, strict=True)
    ]
    return FileVectors(segments, heads[0][1][1], heads[0][2])


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


def read_into(chunk: Tensor, file: int, offset: int, path: Path) -> None:
    """Fill a chunk from a place in a file."""
    view = chunk.view(torch.uint8).numpy().data.cast("B")
    done = 0
    while done < len(view):
        n = os.preadv(file, [view[done:]], offset + done)
        if n == 0:
            raise ValueError(f"{path} has become shorter while it was read: it ends at byte {offset + done}")
        done += n
