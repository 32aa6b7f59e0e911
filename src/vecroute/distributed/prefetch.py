"""Read ahead during computation: a thread reads files, and a separate CUDA stream copies to the GPU."""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from vecroute.distributed.vectors import Vectors


def prefetched(vectors: Vectors, rows: int, device: torch.device) -> Generator[Tensor]:
    """Yield the chunks [rows, d] of vectors on the device, and read and copy the next ones meanwhile.

    A chunk is valid until the next one is requested. Errors of the reading thread are raised here.
    """
    on_gpu = device.type == "cuda"
    read = vectors.chunks if vectors.reads_ahead else partial(by_a_thread, vectors)
    with closing(read(rows, on_gpu)) as chunks:
        yield from copied(chunks, device) if on_gpu else chunks


def by_a_thread(vectors: Vectors, rows: int, pinned: bool) -> Generator[Tensor]:
    """Yield the chunks of vectors while a thread reads the next chunk."""
    with closing(vectors.chunks(rows, pinned)) as chunks, ThreadPoolExecutor(1, "vecroute reader") as thread:
        coming = thread.submit(next, chunks, None)
        while (chunk := coming.result()) is not None:
            coming = thread.submit(next, chunks, None)
            yield chunk


def copied(chunks: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Copy chunks from pinned memory to a GPU on a separate stream. The GPU holds at most two at a time."""
    copies, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    before: torch.cuda.Event | None = None  # marks the end of the work on the previous chunk
    for chunk in chunks:
        with torch.cuda.stream(copies):
            there = chunk.to(device, non_blocking=True)  # [rows, d]
            arrived = copies.record_event()
        compute.wait_event(arrived)
        there.record_stream(compute)
        yield there
        after = compute.record_event()
        arrived.synchronize()  # only now may the reader overwrite the pinned buffer
        if before is not None:
            before.synchronize()
        before = after
