"""Prepared launches: everything that a launch needs, but its pointers, is bound when a plan is made.

A call then costs the host about 10 us for each kernel, since Triton's compiled handle is called directly. On a GPU pointers are integers. Where Triton interprets kernels on the CPU,
they are tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pointer = Any  # an address on a GPU, a tensor where kernels are interpreted

_handles: dict[tuple, tuple] = {}  # compiled kernels, by what Triton specialises on


class Launch:
    """A Triton kernel with its grid, sizes and constants; the pointers come first in its signature.

    Args:
        kernel: a ``triton.jit`` function whose parameters are pointers, then sizes, then constants.
        grid: three numbers of programs.
        dtypes: of what the pointers point to.
        sizes: integers, in the order of the signature.
        constants: ``tl.constexpr`` parameters by name, and options of the compiler such as num_warps.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], dtypes: Sequence[torch.dtype], sizes: Sequence[int],
        **constants: Any,
    ):  # fmt: skip
        self.kernel, self.grid, self.dtypes = kernel, grid, tuple(dtypes)
        self.sizes, self.constants = tuple(sizes), constants
        self.prepared: dict[int, tuple] = {}  # by the index of the device

    def __call__(self, stream: "Stream", *pointers: Pointer) -> None:
        if stream.interpreted:
            self.kernel[self.grid](*pointers, *self.sizes, **self.constants)
            return
        prepared = self.prepared.get(stream.device)
        if prepared is None:
            prepared = self.prepared[stream.device] = self.prepare(stream.device)
        run, before, after = prepared
        run(*self.grid, stream.address, *before, *pointers, *after)

    def prepare(self, device: int) -> tuple:
        """The compiled kernel's launcher, and its arguments before and after the pointers."""
        classes = tuple((n == 1, n % 16 == 0, n >= 2**31) for n in self.sizes)
        key = self.kernel, device, self.dtypes, classes, tuple(self.constants.items())
        if key not in _handles:
            # Types stand for pointers that are aligned to 16 bytes, as all of ours are.
            compiled = self.kernel.warmup(*self.dtypes, *self.sizes, grid=self.grid, **self.constants)
            _handles[key] = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
        run, before = _handles[key]
        names = self.kernel.arg_names[len(self.dtypes) + len(self.sizes) :]
        return run, before, (*self.sizes, *(self.constants[name] for name in names))

    def __repr__(self) -> str:
        return f"{self.kernel.__name__} {' x '.join(map(str, self.grid))}"


class Stream:
    """Where launches of one pass go: a CUDA stream, or the interpreter."""

    __slots__ = ("address", "device", "interpreted")

    def __init__(self, device: torch.device):
        self.interpreted = device.type != "cuda"
        if not self.interpreted:
            self.device: int = torch.cuda.current_device()
            self.address: int = torch._C._cuda_getCurrentRawStream(self.device)


class Memory:
    """Named arrays that share one allocation.

    Args:
        arrays: shape and dtype of each, by name.
    """

    def __init__(self, arrays: dict[str, tuple[tuple[int, ...], torch.dtype]]):
        self.arrays, self.offsets, end = arrays, {}, 0
        for name, (shape, dtype) in arrays.items():
            self.offsets[name] = end
            size = dtype.itemsize
            for n in shape:
                size *= n
            end += -(-size // 256) * 256  # as PyTorch's allocator aligns
        self.n_bytes = end

    def new(self, like: Tensor) -> Tensor:
        """The allocation, on the device of another tensor."""
        return torch.empty(self.n_bytes, dtype=torch.uint8, device=like.device)

    def at(self, memory: Tensor) -> dict[str, Pointer]:
        """Where each array begins."""
        if not memory.is_cuda:
            return {name: self.tensor(memory, name) for name in self.arrays}
        start = memory.data_ptr()
        return {name: start + offset for name, offset in self.offsets.items()}

    def tensor(self, memory: Tensor, name: str) -> Tensor:
        """One of the arrays."""
        shape, dtype = self.arrays[name]
        size = dtype.itemsize
        for n in shape:
            size *= n
        start = self.offsets[name]
        return memory[start : start + size].view(dtype).view(shape)
