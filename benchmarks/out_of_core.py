"""Route vectors larger than memory from a file: ``python benchmarks/out_of_core.py``.

The benchmark writes a file of 20 GB of float16 vectors, routes it and removes it. On the CPU it runs in
processes that may use at most 2 GB (RLIMIT_DATA; it also measures the peak of resident memory).
``streamed_s`` is the time of one call for the whole file.

To judge this time, the benchmark also measures lower bounds on parts of the file. For each part the
measurements alternate, so that other load on the machine affects all of them equally:

- streaming: route the part from the file;
- reading: only read the part, in as many passes;
- copying: only copy as many bytes from pinned memory to the GPU, if there is one;
- in_memory: route the same part from memory (GPU memory, if there is a GPU), chunk by chunk;
- arithmetic: route as many vectors, but always the same chunk, which stays in the caches.

``share`` is the longest of reading, copying and arithmetic, divided by the time of streaming.
``share_in_memory`` uses in_memory instead of arithmetic. The file is read without the system's page cache,
as files larger than memory are, or through it with --cached.

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
from vecroute.distributed.files import FileVectors, Segment

BLOCK = 64 * MB  # size of the block of random numbers that the file repeats
PASSES = {"forward": 2, "both": 4}  # number of passes over the file
TIMED = ("reading", "copying", "arithmetic", "in_memory", "streaming")


class InMemory:
    """Vectors in memory, repeated until there are n_inp of them."""

    reads_ahead = True

    def __init__(self, x_inp: Tensor, n_inp: int):
        self.x_inp, self.n_inp, self.d_inp, self.dtype = x_inp, n_inp, x_inp.shape[1], x_inp.dtype

    def chunks(self, rows: int, pinned: bool = False) -> Iterator[Tensor]:
        left = self.n_inp
        while left:
            for chunk in self.x_inp[:left].split(rows):  # [rows, d]
                left -= len(chunk)
                yield chunk


def make_file(path: Path, n_inp: int, d_inp: int) -> None:
    """Write a .npy file [n_inp, d_inp] of float16."""
    rows = max(1, BLOCK // (2 * d_inp))
    block = np.random.default_rng(0).standard_normal((rows, d_inp), np.float32).astype(np.float16)
    with open(path, "wb") as file:
        head = {"descr": "<f2", "fortran_order": False, "shape": (n_inp, d_inp)}
        np.lib.format.write_array_header_2_0(file, head)
        for start in range(0, n_inp, rows):
            file.write(block[: min(rows, n_inp - start)].data)
        file.flush()
        os.fsync(file.fileno())


def part_of(path: Path, start: int, n_inp: int, cached: bool) -> FileVectors:
    """Return some rows of a file, to be read without the page cache, or through it if cached."""
    whole = open_vectors(path)
    offset = whole.segments[0].offset + start * whole.row_bytes
    part = FileVectors([Segment(path, offset, n_inp)], whole.d_inp, whole.dtype)
    part.direct = not cached
    return part


def loaded(part: FileVectors, rows: int, device: str) -> Tensor:
    """Load vectors of a file into memory, [i, d]."""
    x_inp = torch.empty(part.n_inp, part.d_inp, dtype=part.dtype, device=device)  # [i, d]
    for to, chunk in zip(x_inp.split(rows), part.chunks(rows), strict=True):
        to.copy_(chunk)
    return x_inp


def read(source: FileVectors, passes: int, rows: int, device: str) -> float:
    """Return the seconds that it takes to read the vectors ``passes`` times."""
    start = time.perf_counter()
    for _ in range(passes):
        for _ in source.chunks(rows, common.is_cuda(device)):
            pass
    return time.perf_counter() - start


def copy(chunk: Tensor, n_inp: int, passes: int, device: str) -> float:
    """Return the seconds that it takes to copy n_inp vectors from pinned memory to a GPU ``passes`` times."""
    there = chunk.to(device)  # [rows, d]
    start = time.perf_counter()
    for _ in range(passes * n_inp // len(chunk)):
        there.copy_(chunk, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def route(source: Any, sizes: dict[str, int], which: str, rows: int, device: str) -> float:
    """Return the seconds that it takes to route vectors in chunks, forward or forward and backward."""
    torch.manual_seed(0)
    layer = vr.VectorRouting(n_inp=None, **sizes, device=device)
    start = time.perf_counter()
    with torch.set_grad_enabled(which == "both"):
        x_out = stream(layer, source, rows=rows)
        if which == "both":
            x_out.square().sum().backward()
    assert x_out.isfinite().all()
    if common.is_cuda(device):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_turns(
    path: Path, sizes: dict[str, int], which: str, options: argparse.Namespace
) -> dict[str, float]:
    """Return the seconds of streaming and of each lower bound, summed over some parts of the file."""
    whole, rows, device = open_vectors(path), options.rows, options.device
    size = min(int(options.part_gb * 1e9) // whole.row_bytes, whole.n_inp)
    chunk = torch.randn(min(rows, size), whole.d_inp).half()  # [rows, d]
    if common.is_cuda(device):
        chunk = chunk.pin_memory()
    same = InMemory(chunk.to(device), size)
    # Warm up, also with the size of the last, shorter chunk, for which a GPU compiles separate kernels.
    route(InMemory(same.x_inp, len(chunk) + size % rows), sizes, which, rows, device)
    sums: dict[str, float] = {}
    for k in range(options.parts):
        part = part_of(path, (whole.n_inp - size) * k // max(1, options.parts - 1), size, options.cached)
        x_inp = loaded(part, rows, device)  # [size, d]
        turns = {
            "reading": lambda part=part: read(part, PASSES[which], rows, device),
            "arithmetic": lambda: route(same, sizes, which, rows, device),
            "in_memory": lambda x=x_inp: route(InMemory(x, size), sizes, which, rows, device),
            "streaming": lambda part=part: route(part, sizes, which, rows, device),
        }
        if common.is_cuda(device):
            turns["copying"] = lambda: copy(chunk, size, PASSES[which], device)
        for name, turn in turns.items():
            sums[name] = sums.get(name, 0.0) + turn()
    return sums


def limited(options: argparse.Namespace, function, *arguments) -> tuple[Any, dict[str, float | None]]:
    """Call a function in a new process, on the CPU with limited memory. Return its result and peak memory."""
    context = multiprocessing.get_context("spawn")
    limits = None if common.is_cuda(options.device) else options.limit_mb, options.threads
    with ProcessPoolExecutor(1, mp_context=context, initializer=limit, initargs=limits) as pool:
        return pool.submit(function, *arguments).result(), pool.submit(peaks, options.device).result()


def limit(limit_mb: int | None, threads: int) -> None:
    if limit_mb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mb * MB, limit_mb * MB))
    torch.set_num_threads(threads)


def peaks(device: str) -> dict[str, float | None]:
    """Return the peak memory of this process in MB."""
    on_gpu = torch.cuda.max_memory_allocated() / MB if common.is_cuda(device) else None
    return {"peak_mb": common.resident("VmHWM") / MB, "peak_gpu_mb": on_gpu}


def measure(path: Path, options: argparse.Namespace) -> None:
    """Write one row for forward and one for forward + backward."""
    sizes = {"n_out": options.n_out, "d_inp": options.d_inp, "d_out": options.d_inp, "n_iters": 2}
    n_inp = open_vectors(path).n_inp
    for which in options.which:
        parts, _ = limited(options, take_turns, path, sizes, which, options)
        whole = part_of(path, 0, n_inp, options.cached)
        streamed, most = limited(options, route, whole, sizes, which, options.rows, options.device)
        bounds = [parts[name] for name in ("reading", "copying") if name in parts]
        row = {
            "which": which,
            "gigabytes": path.stat().st_size / 1e9,
            "n_inp": n_inp,
            **sizes,
            "rows": options.rows,
            "threads": options.threads,
            "read_from": "cache" if options.cached else "disk",
            "streamed_s": streamed,
            "limit_mb": None if common.is_cuda(options.device) else options.limit_mb,
            **most,
            "parts_gb": options.parts * options.part_gb,
            **{f"parts_{name}_s": parts.get(name) for name in TIMED},
            "share": max(*bounds, parts["arithmetic"]) / parts["streaming"],
            "share_in_memory": max(*bounds, parts["in_memory"]) / parts["streaming"],
            "load": os.getloadavg()[1],
            **common.about(options.device),
        }
        print({key: common.written(value) for key, value in row.items()}, flush=True)
        common.append(options.results / "out_of_core.csv", [row])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--d-inp", type=int, default=1024)
    parser.add_argument("--n-out", type=int, default=8)
    parser.add_argument("--rows", type=int, help="rows of a chunk; default: 2048 on a CPU, 32768 on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute; other threads read")
    parser.add_argument(
        "--parts", type=int, default=10, help="parts of the file on which shares are measured"
    )
    parser.add_argument("--part-gb", type=float, default=0.5, help="size of a part in GB")
    parser.add_argument("--cached", action="store_true", help="read through the system's page cache")
    parser.add_argument("--limit-mb", type=int, default=2048, help="memory limit on a CPU")
    parser.add_argument("--which", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--file", type=Path, help="a .npy file of float16 to use instead of a new one")
    parser.add_argument("--folder", type=Path, help="folder for the temporary file")
    options = parser.parse_args()
    options.rows = options.rows or (32768 if common.is_cuda(options.device) else 2048)
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
