"""Read vectors one chunk at a time, again in every pass: from files, Parquet or an iterable."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vecroute.distributed.files import (
    FileVectors,
    Segment,
    Stamp,
    mapped,
    npy_head,
    safetensors_head,
    stamp,
    told,
    torch_dtype,
)
from vecroute.ops.checks import check_size
from vecroute.storage import require

EXPECTED = (
    "a file .npy, files .safetensors or .parquet, a raw file with d_inp and dtype, a memory map, a tensor, "
    "or chunks [rows, d_inp] that can be iterated again and again"
)


class Vectors(Protocol):
    """A source of vectors [n_inp, d_inp]."""

    n_inp: int
    d_inp: int
    dtype: torch.dtype
    reads_ahead: bool  # True if the source reads the next chunks by itself

    def chunks(self, rows: int, pinned: bool = False) -> Generator[Tensor]:
        """Yield chunks [at most rows, d_inp] in order, in pinned memory if pinned=True."""
        ...


class ParquetVectors:
    """Vectors in a column of Parquet files that holds lists, all of the same length."""

    reads_ahead = False

    def __init__(self, paths: Sequence[Path], column: str | None):
        parquet = self.parquet = require("pyarrow.parquet", "cli")
        self.paths, self.n_inp, self.d_inp = paths, 0, 0
        self.stamps: list[Stamp] = []
        for path in paths:
            with told(path), parquet.ParquetFile(path) as file:
                self.stamps.append(stamp(path))
                self.n_inp += rows_of(path, file.metadata)
                lists = [field.name for field in file.schema_arrow if hasattr(field.type, "value_type")]
                column = column or next(iter(lists), None)
                if column not in lists:
                    raise ValueError(f"{path} must have a column of lists {column or ''}, has {lists}")
        self.column = column
        first = next(iter(self.chunks(1)), None)
        if first is None:
            raise ValueError(f"{paths[0]} has no rows, from which d_inp could be known")
        self.d_inp, self.dtype = first.shape[1], first.dtype

    def chunks(self, rows: int, pinned: bool = False) -> Generator[Tensor]:
        pyarrow, compute = require("pyarrow", "cli"), require("pyarrow.compute", "cli")
        for path, before in zip(self.paths, self.stamps, strict=True):
            where = f"column {self.column!r} of {path}"
            with told(path, before), self.parquet.ParquetFile(path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(rows, columns=[self.column], use_threads=False):
                    lists = batch.column(0)
                    lengths = compute.unique(compute.list_value_length(lists)).to_pylist()
                    if len(lengths) > 1 or None in lengths or self.d_inp not in (0, lengths[0]):
                        raise ValueError(f"{where} must have lists of one length, has {lengths}")
                    numbers = lists.flatten()
                    if not pyarrow.types.is_floating(numbers.type) or numbers.null_count:
                        found = f"{numbers.type} with {numbers.null_count} missing values"
                        raise ValueError(f"{where} must have floating-point numbers, has {found}")
                    flat = numbers.to_numpy(zero_copy_only=False)
                    chunk = torch.from_numpy(flat.reshape(len(lists), -1).copy())  # [rows, d]
                    yield chunk.pin_memory() if pinned else chunk


def rows_of(path: Path, metadata: Any) -> int:
    """Return the number of rows of a Parquet file.

    Raises:
        ValueError: the number differs from the sum over its row groups.
    """
    groups = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
    if metadata.num_rows != sum(groups) or min(groups, default=0) < 0:
        raise ValueError(f"{path} is damaged: it has {metadata.num_rows} rows, and row groups of {groups}")
    return metadata.num_rows


class IteratedVectors:
    """Vectors from chunks that can be iterated repeatedly, or from a function that returns an iterator."""

    reads_ahead = False

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

    def chunks(self, rows: int, pinned: bool = False) -> Generator[Tensor]:
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
    """Open vectors [n_inp, d_inp] that are read one chunk at a time.

    Args:
        source: one of these:

            - the path of a .npy file or of a raw file,
            - one or more paths of .safetensors or .parquet files, whose rows are concatenated,
            - a ``numpy.memmap``, whose file is read,
            - a tensor,
            - an iterable of chunks [rows, d_inp] that can be iterated repeatedly, or a function that returns
              an iterator. Each chunk needs its own memory, because the next one is requested ahead of time.
        name: name of the tensor in .safetensors files or of the column in .parquet files. None if there is
            only one.
        d_inp, dtype: vector size and dtype of a raw file.
        n_inp: number of vectors of an iterable, None to count them first.

    Raises:
        ValueError, TypeError: the source is of another kind, or a file is missing, truncated or damaged.
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
