"""Work that nothing waits for, beside what follows, while a CUDA graph is captured."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


class Aside:
    """``with aside(...)``: what is queued within may run beside what follows, until ``join``.

    Only in a CUDA graph: eager, events would take the host longer than the GPU gains.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.used: list[Tensor] = []  # by what is under way: nobody else may have their memory

    @contextmanager
    def __call__(self, *used: Tensor) -> Iterator[None]:
        """Args: all tensors used within that were made outside."""
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            yield
            return
        side = stream_of(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        self.used.extend(used)
        with torch.cuda.stream(side):
            yield

    def join(self) -> None:
        """Wait for it."""
        if self.used:
            torch.cuda.current_stream(self.device).wait_stream(stream_of(self.device))
            self.used.clear()


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all: the libraries have a workspace for each."""
    return torch.cuda.Stream(device)
