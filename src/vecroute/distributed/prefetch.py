"""Reading while something else is computed: a thread for files, a stream of its own for copies to a GPU."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from vecroute.distributed.vectors import Vectors


def prefetched(vectors: Vectors, rows: int, device: torch.device) -> Generator[Tensor]:
    """The chunks [rows, d] of vectors on the device; the next ones are read and copied in the meantime.

    Each is good until the next is asked for. What reading raises is raised here.
    """
    on_gpu = device.type == "cuda"
    read = vectors.chunks if vectors.reads_ahead else partial(by_a_thread, vectors)
    with closing(read(rows, on_gpu)) as chunks:
        yield from copied(chunks, device) if on_gpu else chunks


def by_a_thread(vectors: Vectors, rows: int, pinned: bool) -> Generator[Tensor]:
    """The chunks of vectors, the next of which a thread gets in the meantime."""
    with closing(vectors.chunks(rows, pinned)) as chunks, ThreadPoolExecutor(1, "vecroute reader") as thread:
        coming = thread.submit(next, chunks, None)
        while (chunk := coming.result()) is not None:
            coming = thread.submit(next, chunks, None)
            yield chunk


def copied(chunks: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Chunks in pinned memory on a GPU, copied by a stream of its own, at most two there at a time."""
    copies, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    before: torch.cuda.Event | None = None  # the end of the work on the chunk before
    for chunk in chunks:
        with torch.cuda.stream(copies):
            there = chunk.to(device, non_blocking=True)  # [rows, d]
            arrived = copies.record_event()
        compute.wait_event(arrived)
        there.record_stream(compute)
        yield there
        after = compute.record_event()
        arrived.synchronize()  # then the pinned buffer may be filled again
        if before is not None:
            before.synchronize()
        before = after
