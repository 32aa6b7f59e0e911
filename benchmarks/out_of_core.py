"""Vectors larger than memory, routed from a file: ``python benchmarks/out_of_core.py``.

A file of 20 GB of float16 vectors is made, routed and removed again, in processes that may not have more
than 2 GB (RLIMIT_DATA; the peak of resident memory is measured too). ``streamed_s`` is the time of one call
for all of it.

How good that is, is measured on some parts of the file, on each in turn, so that what else the machine does
weighs on all alike: the time to route the part from the file, that of reading it alone as often, and that of
routing as many vectors that are in memory. Neither of the two can be beaten; ``share`` is the slower of them
over the time of streaming. Files are dropped from the system's cache before they are read.

Rows are appended to out_of_core.csv.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import MB
from torch import Tensor

import vecroute as vr
from vecroute.distributed import open_vectors, stream
from vecroute.distributed.vectors import FileVectors, Segment

BLOCK = 64 * MB  # of random numbers, which the file repeats
PASSES = {"forward": 2, "both": 4}  # over the file


class InMemory:
    """As many vectors as a file has, all of them the same few, which need no reading."""

    def __init__(self, n_inp: int, d_inp: int):
        self.n_inp, self.d_inp, self.dtype = n_inp, d_inp, torch.float16

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        chunk = torch.randn(rows, self.d_inp, pin_memory=pinned).half()  # [rows, d]
        for start in range(0, self.n_inp, rows):
            yield chunk[: min(rows, self.n_inp - start)]


def make_file(path: Path, n_inp: int, d_inp: int) -> None:
    """A .npy file [n_inp, d_inp] of float16."""
    rows = max(1, BLOCK // (2 * d_inp))
    block = np.random.default_rng(0).standard_normal((rows, d_inp), np.float32).astype(np.float16)
    with open(path, "wb") as file:
        head = {"descr": "<f2", "fortran_order": False, "shape": (n_inp, d_inp)}
        np.lib.format.write_array_header_2_0(file, head)
        for start in range(0, n_inp, rows):
            file.write(block[: min(rows, n_inp - start)].data)
        file.flush()
        os.fsync(file.fileno())


class Cold:
    """Some rows of a file, which is dropped from the system's cache before every pass."""

    def __init__(self, path: Path, start: int = 0, n_inp: int | None = None):
        whole = open_vectors(path)
        self.path, self.d_inp, self.dtype = path, whole.d_inp, whole.dtype
        self.n_inp = whole.n_inp if n_inp is None else n_inp
        (segment,) = whole.segments
        offset = segment.offset + start * whole.row_bytes
        self.rows = FileVectors([Segment(path, offset, self.n_inp)], self.d_inp, self.dtype)

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        with open(self.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield from self.rows.chunks(rows, pinned)


def read(source: Cold, passes: int, rows: int) -> float:
    """Seconds to read vectors so many times, and to do nothing with them."""
    start = time.perf_counter()
    for _ in range(passes):
        for _ in source.chunks(rows):
            pass
    return time.perf_counter() - start


def route(source, sizes: dict[str, int], which: str, rows: int, device: str) -> float:
    """Seconds to route vectors a chunk at a time, forward or forward and backward."""
    torch.manual_seed(0)
    layer = vr.VectorRouting(n_inp=None, **sizes, device=device)
    start = time.perf_counter()
    with torch.set_grad_enabled(which == "both"):
        x_out = stream(layer, source, rows=rows)
        if which == "both":
            x_out.square().sum().backward()
    assert x_out.isfinite().all()
    return time.perf_counter() - start


def take_turns(
    path: Path, sizes: dict[str, int], which: str, options: argparse.Namespace
) -> dict[str, float]:
    """Seconds of reading, of arithmetic and of streaming, over some parts of the file."""
    n_inp = open_vectors(path).n_inp
    size = min(int(1e9) // (2 * options.d_inp), n_inp)
    route(InMemory(options.rows, options.d_inp), sizes, which, options.rows, options.device)  # warms up
    sums = dict.fromkeys(("reading", "arithmetic", "streaming"), 0.0)
    for k in range(options.parts):
        part = Cold(path, (n_inp - size) * k // max(1, options.parts - 1), size)
        sums["reading"] += read(part, PASSES[which], options.rows)
        memory = InMemory(size, options.d_inp)
        sums["arithmetic"] += route(memory, sizes, which, options.rows, options.device)
        sums["streaming"] += route(part, sizes, which, options.rows, options.device)
    return sums


def limited(options: argparse.Namespace, function, *arguments) -> tuple[Any, float]:
    """What a function returns, and the peak of resident memory in MB, in a process with a limit."""
    context = multiprocessing.get_context("spawn")
    limits = options.limit_mb, options.threads
    with ProcessPoolExecutor(1, mp_context=context, initializer=limit, initargs=limits) as pool:
        return pool.submit(function, *arguments).result(), pool.submit(peak_mb).result()


def limit(limit_mb: int, threads: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit_mb * MB, limit_mb * MB))
    torch.set_num_threads(threads)


def peak_mb() -> float:
    return common.resident("VmHWM") / MB


def measure(path: Path, options: argparse.Namespace) -> None:
    """One row for forward and one for forward + backward."""
    sizes = {"n_out": options.n_out, "d_inp": options.d_inp, "d_out": options.d_inp, "n_iters": 2}
    for which in options.which:
        parts, _ = limited(options, take_turns, path, sizes, which, options)
        arguments = sizes, which, options.rows, options.device
        streamed, peak = limited(options, route, Cold(path), *arguments)
        row = {
            "which": which,
            "gigabytes": path.stat().st_size / 1e9,
            "n_inp": open_vectors(path).n_inp,
            **sizes,
            "rows": options.rows,
            "threads": options.threads,
            "streamed_s": streamed,
            "limit_mb": options.limit_mb,
            "peak_mb": peak,
            "parts_gb": options.parts,
            **{f"parts_{name}_s": seconds for name, seconds in parts.items()},
            "share": max(parts["reading"], parts["arithmetic"]) / parts["streaming"],
            **common.about(options.device),
        }
        print({key: common.written(value) for key, value in row.items()}, flush=True)
        common.append(options.results / "out_of_core.csv", [row])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--d-inp", type=int, default=1024)
    parser.add_argument("--n-out", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2048, help="of a chunk")
    parser.add_argument("--threads", type=int, default=1, help="that compute; one more reads")
    parser.add_argument("--parts", type=int, default=5, help="of 1 GB, on which shares are measured")
    parser.add_argument("--limit-mb", type=int, default=2048)
    parser.add_argument("--which", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--file", type=Path, help="a .npy file of float16 to use instead of a new one")
    parser.add_argument("--folder", type=Path, help="for the file, a temporary one if left out")
    options = parser.parse_args()
    gigabytes = 0.05 if options.short else options.gigabytes
    if options.file is not None:
        measure(options.file, options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "vectors.npy"
        make_file(path, int(gigabytes * 1e9) // (2 * options.d_inp), options.d_inp)
        measure(path, options)


if __name__ == "__main__":
    main()
