"""Hidden states on the device of the head: all of them where they fit, else those of the next batches."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vecroute.encoders.ahead import ahead
from vecroute.encoders.text import length_batches
from vecroute.training.recipe import Source

MEMORY_SHARE = 0.4  # share of the free memory of a GPU for hidden states; copying them takes twice as much
PART_BYTES = 256 * 1024**2  # size of the hidden states that are read at a time
AHEAD = 2  # batches that are read before they are needed
READERS = 4  # threads that read and check hidden states from the disk


class OnDevice:
    """All hidden states of a source, copied once to the device. It is a source itself.

    Attributes:
        rows: [sum of n_pos * depth, d_emb] the hidden states of all samples, one sample after the other.
        first: [n] the number of positions before each sample, on the CPU.
    """

    def __init__(self, source: Source, device: torch.device):
        self.lengths, self.position_bytes = source.lengths, source.position_bytes
        groups = list(length_batches(source.lengths, max(PART_BYTES // source.position_bytes, 1)))
        order = [k for which in groups for k in which]
        parts = []
        read = partial(source.batch, device=torch.device("cpu"))
        for hidden, mask in ahead(read, groups, READERS, READERS):  # [b, n_pos, depth, d_emb], [b, n_pos]
            parts.append(hidden.to(device)[mask.to(device)])  # [m, depth, d_emb]
        states = torch.cat(parts)  # [sum of n_pos, depth, d_emb]
        self.depth, self.rows = states.shape[1], states.flatten(0, 1)
        lengths = torch.tensor(self.lengths)[order]  # [n]
        self.first = torch.empty_like(lengths)  # [n]
        self.first[order] = lengths.cumsum(0) - lengths

    def batch(self, which: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return hidden states [b, n_pos, depth, d_emb], zero at padding, and a mask [b, n_pos]."""
        index = torch.tensor(which)  # [b]
        lengths = torch.tensor([self.lengths[k] for k in which])[:, None]  # [b, 1]
        position = torch.arange(max(int(lengths.max()), 1))  # [n_pos]
        mask = position < lengths  # [b, n_pos]
        position = (self.first[index][:, None] + position).masked_fill(~mask, 0)  # [b, n_pos]
        position, mask = position.to(self.rows.device), mask.to(self.rows.device)
        hidden = self.rows.unflatten(0, (-1, self.depth))[position]  # [b, n_pos, depth, d_emb]
        hidden = hidden.masked_fill(~mask[..., None, None], 0)  # [b, n_pos, depth, d_emb]
        return hidden.to(device), mask.to(device)


def on_device(source: Any, device: torch.device) -> Any:
    """Return the source with its hidden states on a GPU, or the source itself without GPU or room."""
    if device.type != "cuda" or isinstance(source, OnDevice) or not source.lengths:
        return source
    needed = sum(source.lengths) * source.position_bytes // 2  # hidden states are stored in half precision
    if needed > MEMORY_SHARE * free_bytes(device):
        return source
    try:
        return OnDevice(source, device)
    except torch.cuda.OutOfMemoryError:  # other processes use the GPU too
        return source


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, including memory that PyTorch holds but does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def read_ahead(source: Source, batches: Sequence[list[int]], device: torch.device) -> Iterator[Tensor]:
    """Yield the hidden states [b, n_pos, depth, d_emb] of each batch, on the device.

    A thread reads the next batches and copies them through pinned memory, on a stream of its own, while the
    device works.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(which: list[int]) -> tuple[Tensor, torch.cuda.Event | None]:
        hidden, _ = source.batch(which, torch.device("cpu"))  # [b, n_pos, depth, d_emb]
        if stream is None:
            return hidden, None
        with torch.cuda.stream(stream):
            hidden = hidden.pin_memory().to(device, non_blocking=True)  # [b, n_pos, depth, d_emb]
            return hidden, stream.record_event()

    for hidden, copied in ahead(read, batches, AHEAD):
        if copied is not None:
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            hidden.record_stream(current)
        yield hidden
