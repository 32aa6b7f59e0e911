"""Vectors larger than memory, routed from a file: ``python benchmarks/out_of_core.py``.

A file of 20 GB of float16 vectors is made, streamed and removed again, in processes that may not have more
than 2 GB (RLIMIT_DATA, and the peak of resident memory is measured). Beside the time of streaming stand those
of its two parts, each alone: reading the file as often, and routing as many vectors that are in memory.
Neither can be beaten; ``share`` is the slower of them over the time of streaming, 1 if the faster is hidden.

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

import common
import numpy as np
import torch
from common import MB
from torch import Tensor

import vecroute as vr
from vecroute.distributed import open_vectors, stream

BLOCK = 64 * MB  # of random numbers, which the file repeats
WHICH = ("forward", "both")


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


def forget(path: Path) -> None:
    """Ask the system to drop the file from its cache, so that reading reads."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path, passes: int, rows: int) -> float:
    """Seconds to read the file so many times, and to do nothing with it."""
    start = time.perf_counter()
    for _ in range(passes):
        for _ in open_vectors(path).chunks(rows):
            pass
    return time.perf_counter() - start


def route(source, sizes: dict[str, int], which: str, rows: int, device: str) -> float:
    """Seconds to stream the vectors, forward or forward and backward."""
    torch.manual_seed(0)
    layer = vr.VectorRouting(n_inp=None, **sizes, device=device)
    start = time.perf_counter()
    with torch.set_grad_enabled(which == "both"):
        x_out = stream(layer, source, rows=rows)
        if which == "both":
            x_out.square().sum().backward()
    assert x_out.isfinite().all()
    return time.perf_counter() - start


def limited(limit_mb: int, threads: int, function, *arguments) -> tuple[float, float]:
    """Seconds of a function, and the peak of resident memory in MB, in a process of its own with a limit."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=limit, initargs=(limit_mb, threads)) as pool:
        return pool.submit(function, *arguments).result(), pool.submit(peak_mb).result()


def limit(limit_mb: int, threads: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit_mb * MB, limit_mb * MB))
    torch.set_num_threads(threads)


def peak_mb() -> float:
    return common.resident("VmHWM") / MB


def measure(path: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    """One row for forward and one for forward + backward."""
    sizes = {"n_out": options.n_out, "d_inp": options.d_inp, "d_out": options.d_inp, "n_iters": 2}
    n_inp, rows, limits = open_vectors(path).n_inp, options.rows, (options.limit_mb, options.threads)
    found: list[dict[str, object]] = []
    forget(path)
    per_pass, _ = limited(*limits, read, path, 1, rows)
    for which in options.which:
        passes = 2 if which == "forward" else 4
        memory = InMemory(n_inp, options.d_inp)
        arithmetic, _ = limited(*limits, route, memory, sizes, which, rows, options.device)
        forget(path)
        streamed, peak = limited(*limits, route, path, sizes, which, rows, options.device)
        reading = passes * per_pass
        found.append(
            {
                "which": which,
                "gigabytes": path.stat().st_size / 1e9,
                "n_inp": n_inp,
                **sizes,
                "rows": rows,
                "threads": options.threads,
                "passes": passes,
                "reading_s": reading,
                "arithmetic_s": arithmetic,
                "streamed_s": streamed,
                "share": max(reading, arithmetic) / streamed,
                "limit_mb": options.limit_mb,
                "peak_mb": peak,
                **common.about(options.device),
            }
        )
        print({key: common.written(value) for key, value in found[-1].items()}, flush=True)
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--d-inp", type=int, default=1024)
    parser.add_argument("--n-out", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2048, help="of a chunk")
    parser.add_argument("--threads", type=int, default=1, help="that compute; one more reads")
    parser.add_argument("--limit-mb", type=int, default=2048)
    parser.add_argument("--which", nargs="+", choices=WHICH, default=list(WHICH))
    parser.add_argument("--folder", type=Path, help="for the file, a temporary one if left out")
    options = parser.parse_args()
    gigabytes = 0.05 if options.short else options.gigabytes
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "vectors.npy"
        make_file(path, int(gigabytes * 1e9) // (2 * options.d_inp), options.d_inp)
        common.append(options.results / "out_of_core.csv", measure(path, options))


if __name__ == "__main__":
    main()
