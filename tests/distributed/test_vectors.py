"""Reading vectors: ahead of time, without the system's cache, from files that are damaged or change."""

import fcntl
import io
import os
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.distributed.test_streaming import (
    D_INP,
    N_INP,
    SOURCES,
    as_function,
    as_npy,
    as_parquet,
    as_raw,
    make,
    vectors,
)
from vecroute.distributed import files, open_vectors, stream
from vecroute.distributed.files import FileVectors, Segment, aligned
from vecroute.distributed.prefetch import prefetched

CPU = torch.device("cpu")

# Reading


def test_reading_goes_on_while_a_chunk_is_used():
    """The second chunk is read while the first is in use. Without a thread, this test would never end."""
    asked = threading.Event()

    def chunks():
        yield torch.zeros(1, 2)
        asked.set()
        yield torch.ones(1, 2)

    seen = []
    for chunk in prefetched(open_vectors(chunks, n_inp=2), 10, CPU):
        assert asked.wait(10)
        seen.append(chunk.sum().item())
    assert seen == [0, 2]


def test_buffers_are_not_filled_while_they_are_used(tmp_path):
    x = vectors()
    source = open_vectors(as_npy(tmp_path, x))
    parts = [chunk.clone() for chunk in prefetched(source, 4, CPU)]
    assert torch.equal(torch.cat(parts), x)


@pytest.mark.parametrize("source", [as_npy, as_parquet, as_function])
def test_a_reader_that_is_left_alone_ends(source, tmp_path):
    before = threading.active_count()
    chunks = prefetched(open_vectors(source(tmp_path, vectors())), 1, CPU)
    next(chunks)
    assert threading.active_count() > before
    chunks.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("source", [as_npy, as_parquet])
def test_a_reader_that_fails_ends(source, tmp_path):
    before = threading.active_count()
    opened = open_vectors(source(tmp_path, vectors()))
    cut(sorted(tmp_path.iterdir())[-1], 20)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        stream(make("layer"), opened, rows=1)
    assert threading.active_count() == before


# Without the system's cache


@pytest.fixture
def flags(monkeypatch) -> list[int]:
    """A list of the flags with which files are opened."""
    seen, os_open = [], os.open

    def counting(path, flags, *more, **options):
        seen.append(flags)
        return os_open(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", counting)
    return seen


@pytest.mark.parametrize("memory", [N_INP * D_INP * 16 - 1, N_INP * D_INP * 16])
@pytest.mark.parametrize("source", ["npy", "memmap", "raw", "safetensors"])
def test_vectors_of_more_than_half_the_memory_are_read_directly(source, memory, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "memory_bytes", lambda: memory)
    x = vectors()
    opened = open_vectors(SOURCES[source](tmp_path, x))
    flags.clear()
    assert torch.equal(torch.cat([chunk.clone() for chunk in opened.chunks(5)]), x)
    assert flags
    assert all(bool(flag & os.O_DIRECT) == (memory < N_INP * D_INP * 16) for flag in flags)


def test_numbers_that_do_not_lie_at_their_multiples_are_not_read_directly(flags, tmp_path):
    x = vectors()
    (tmp_path / "x.raw").write_bytes(b"xyz" + x.numpy().tobytes())
    odd = FileVectors([Segment(tmp_path / "x.raw", 3, N_INP)], D_INP, torch.float64)
    odd.direct = True
    flags.clear()
    assert torch.equal(torch.cat([chunk.clone() for chunk in odd.chunks(5)]), x)
    assert not any(flag & os.O_DIRECT for flag in flags)


def test_a_file_system_that_cannot_read_directly(tmp_path, monkeypatch):
    x, os_open = vectors(), os.open

    def refusing(path, flags, *more, **options):
        if flags & os.O_DIRECT:
            raise OSError("Invalid argument")
        return os_open(path, flags, *more, **options)

    opened = open_vectors(as_npy(tmp_path, x))
    opened.direct = True
    monkeypatch.setattr(os, "open", refusing)
    assert torch.equal(torch.cat([chunk.clone() for chunk in opened.chunks(5)]), x)


def is_direct(file: io.FileIO) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


class RefusesDirectReads(io.FileIO):
    """A file of a file system that refuses direct reads only when something is read."""

    def readinto(self, memory):
        if is_direct(self):
            raise OSError("Invalid argument")
        return super().readinto(memory)


class ReadsLess(io.FileIO):
    """A file whose reads are interrupted. Direct reads must begin at a block."""

    def readinto(self, memory):
        assert not is_direct(self) or self.tell() % files.BLOCK == 0
        return min(super().readinto(memory), 5000)


class Fails(io.FileIO):
    def readinto(self, memory):
        raise OSError("Input/output error")


def opens_as(monkeypatch, kind: type[io.FileIO]) -> None:
    """Open all files as this class."""
    monkeypatch.setattr(
        files, "open", lambda path, mode, buffering, opener: kind(path, mode, opener=opener), raising=False
    )


def test_a_disk_that_fails(tmp_path, monkeypatch):
    opened = open_vectors(as_npy(tmp_path, vectors()))
    opens_as(monkeypatch, Fails)
    with pytest.raises(ValueError, match=r"x\.npy cannot be read: Input/output error"):
        stream(make("layer"), opened)


@pytest.mark.parametrize("kind", [io.FileIO, ReadsLess, RefusesDirectReads])
@pytest.mark.parametrize("direct", [False, True])
def test_bytes_of_any_size_and_place(direct, kind, tmp_path, monkeypatch):
    """Reads may reach the end of the file, but not go beyond it."""
    opens_as(monkeypatch, kind)
    data = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)
    path = tmp_path / "x.raw"
    data.tofile(path)
    for begin, size in ((0, 1), (1, 4095), (5000, 4096), (3, 4097), (100, 50_000), (4096, 65_904)):
        buffer = aligned(size + 2 * files.BLOCK, False).fill_(7)
        found = files.read(path, files.stamp(path), begin, size, buffer, direct)
        assert np.array_equal(found.numpy(), data[begin : begin + size]), (begin, size)
    with pytest.raises(ValueError, match="has become shorter while it was read: it ends at byte 70000"):
        files.read(path, files.stamp(path), 60_000, 10_001, aligned(20_000, False), direct)


# Damaged and wrong input


def cut(path: Path, n: int) -> Path:
    os.truncate(path, path.stat().st_size - n)
    return path


def overwritten(path: Path, data: bytes, place: int = 0) -> Path:
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(data)
    return path


def appended(path: Path) -> Path:
    return overwritten(path, b"1", path.stat().st_size)


def with_other_head(path: Path, before: bytes, after: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    return path


def mixed(folder: Path, other: Tensor) -> list[Path]:
    """Return two shards, the second with another shape or dtype."""
    save_file({"x": vectors()}, folder / "a.safetensors")
    save_file({"x": other}, folder / "b.safetensors")
    return [folder / "a.safetensors", folder / "b.safetensors"]


def parquet_of(folder: Path, lists: list) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"vector": lists, "number": [1.0] * len(lists)}), folder / "x.parquet")
    return folder / "x.parquet"


WRONG = {
    "missing": (lambda f: f / "none.npy", "there is no file"),
    "cut npy": (lambda f: cut(as_npy(f, vectors()), 5), "is cut short"),
    "no npy": (lambda f: overwritten(as_npy(f, vectors()), b"nonsense"), "no .npy file, or damaged"),
    "no Python": (lambda f: overwritten(as_npy(f, vectors()), b"(", 80), "no .npy file, or damaged"),
    "longer npy": (
        lambda f: appended(as_npy(f, vectors())),
        r"\(37, 6\) of float64 ends at byte 1904",
    ),
    "integers": (lambda f: as_npy(f, torch.ones(3, D_INP, dtype=torch.int64)), "float16, float32 or float64"),
    "columns": (lambda f: as_npy(f, vectors().T), "fortran_order"),
    "three axes": (lambda f: as_npy(f, torch.ones(2, 3, D_INP)), r"holds \[2, 3, 6\]"),
    "cut safetensors": (lambda f: cut(mixed(f, vectors())[0], 5), "is cut short"),
    "no safetensors": (lambda f: overwritten(mixed(f, vectors())[0], b"\xff" * 20), "or damaged"),
    "shards of other size": (lambda f: mixed(f, vectors()[:, :2].clone()), r"holds \[37, 2\]"),
    "shards of other dtype": (lambda f: mixed(f, vectors().float()), "holds .* of torch.float32"),
    "safetensors of integers": (
        lambda f: mixed(f, torch.ones(3, D_INP, dtype=torch.int32))[1],
        "tensor 'x' must be one of F64, F32, F16, BF16, is I32",
    ),
    "safetensors of another place": (
        lambda f: with_other_head(mixed(f, vectors())[0], b"[37,6]", b"[31,6]"),
        "no safetensors file, or damaged",
    ),
    "cut parquet": (lambda f: cut(as_parquet(f, vectors())[0], 20), "cannot be read"),
    "lists of many lengths": (
        lambda f: parquet_of(f, [[1.0] * 6, [1.0] * 5, [1.0] * 7]),
        "lists of one length",
    ),
    "numbers that are missing": (
        lambda f: parquet_of(f, [[1.0, None] * 3]),
        r"'vector' of .*x\.parquet must have floating-point numbers, has double with 3 missing values",
    ),
    "lists of integers": (
        lambda f: parquet_of(f, [[1] * 6]),
        "must have floating-point numbers, has int64",
    ),
    "vectors of nothing": (lambda f: as_npy(f, torch.ones(3, 0)), "d_inp of x_inp must be a positive int"),
    "d_inp": (lambda f: as_npy(f, torch.ones(3, 5)), r"d_inp=6\], got d_inp=5"),
    "raw": (lambda f: as_raw(f, vectors()).segments[0].path, "or d_inp and dtype be given"),
    "chunks of other size": (lambda f: [vectors(), vectors()[:, :3]], "chunks must all be"),
    "no vectors": (lambda f: as_npy(f, torch.ones(0, D_INP)), "at least one vector"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, tmp_path):
    source, message = WRONG[case]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        stream(make("layer"), source(tmp_path))


def test_an_iterator_can_be_read_only_once():
    with pytest.raises(TypeError, match="iterated again and again, got list_iterator"):
        stream(make("layer"), iter([vectors()]))


def test_an_iterable_that_gives_less_the_second_time():
    left = [3, 3, 2]
    source = open_vectors(lambda: iter([vectors()] * left.pop(0)))
    with pytest.raises(ValueError, match="n_inp=111 vectors in every pass, gave 74"):
        stream(make("layer"), source)


@pytest.mark.parametrize("when", ["between passes", "within a pass"])
def test_a_file_that_shrinks(when, tmp_path):
    path = as_npy(tmp_path, vectors())
    chunks = open_vectors(path).chunks(4)
    if when == "within a pass":
        next(chunks)
    cut(path, N_INP * D_INP * 4)
    with pytest.raises(ValueError, match=r"x\.npy has changed since it was opened"):
        list(chunks)


def overwrite_keeping_the_time(path):
    """Overwrite numbers and restore the modification time, as some tools do."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"\1" * 64)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns


@pytest.mark.parametrize("when", ["before", "between passes", "within a pass"])
@pytest.mark.parametrize("kind", ["npy", "safetensors", "raw", "memmap"])
def test_a_file_that_is_overwritten_with_its_time_restored(kind, when, tmp_path):
    x = torch.randn(5000, D_INP)  # the change is far from both ends
    path = tmp_path / f"x.{kind}"
    if kind in ("npy", "memmap"):
        path = as_npy(tmp_path, x)
    elif kind == "safetensors":
        save_file({"x": x}, path)
    else:
        path.write_bytes(x.numpy().tobytes())
    time.sleep(0.02)  # longer than a step of the system's clock
    options = {"d_inp": D_INP, "dtype": x.dtype} if kind == "raw" else {}
    source = open_vectors(np.load(path, mmap_mode="r") if kind == "memmap" else path, **options)
    chunks = source.chunks(100)
    if when == "within a pass":
        next(chunks)
    elif when == "between passes":
        list(source.chunks(100))
    overwrite_keeping_the_time(path)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        list(chunks)


def test_a_file_that_is_overwritten_within_a_step_of_the_clock(tmp_path, monkeypatch):
    path = as_npy(tmp_path, vectors())
    before = path.stat()
    source = open_vectors(path)
    path.write_bytes(path.read_bytes()[:-4] + b"\1\1\1\1")
    monkeypatch.setattr(files.os, "fstat", lambda _: before)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        list(source.chunks(4))


def test_a_parquet_file_that_is_overwritten_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "x.parquet"
    rows = [row.numpy() for row in vectors()]
    pd.DataFrame({"x": rows}).to_parquet(path)
    time.sleep(0.02)
    chunks = open_vectors(path).chunks(4)
    next(chunks)
    overwrite_keeping_the_time(path)
    with pytest.raises(ValueError, match=r"has changed since it was opened|cannot be read"):
        list(chunks)


def test_a_file_that_shrinks_within_a_read(tmp_path, monkeypatch):
    """The file shrinks after it was checked, and after some reads have finished."""
    path = as_npy(tmp_path, vectors())
    source, before = open_vectors(path), files.stamp(path)
    monkeypatch.setattr(files, "stamp", lambda _: before)
    cut(path, N_INP * D_INP * 4)
    with pytest.raises(ValueError, match="has become shorter while it was read"):
        stream(make("layer"), source, rows=4)
