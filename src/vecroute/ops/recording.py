"""Passes whose launches are recorded once. Then C starts all kernels of a pass, in about 3 us each.

A program is a list of 64-bit words: the number of commands, the addresses of ``cuLaunchKernel`` and
``cublasLtMatmul``, and the commands. A command begins with its kind and its length. A reference to an array
is the number of a tensor and an offset in bytes. The other words of a command:

    kernel   function, grid (3 words), threads, bytes of shared memory, number of pointers, bytes of all
             arguments, references of the pointers, the other arguments as the kernel reads them
    product  operation, address of 1, layouts of both operands, address of beta, layout of out, algorithm,
             bytes of the workspace, references of both operands, out and the workspace
"""

import ctypes
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A pointer is a tensor if Triton interprets kernels on the CPU. In a recording it is an int: the number of a
# tensor times TENSOR, plus an offset in bytes.
Pointer = Any
TENSOR = 2**48
KINDS = {"kernel": 0, "product": 1}
MOST_WORDS = 128  # arguments of a kernel; the size of an array in replay.c


class Recorder:
    """Collects the launches of a pass, or runs them at once if Triton interprets kernels on the CPU."""

    def __init__(self, device: torch.device):
        self.interpreted, self.device = device.type != "cuda", device.index
        self.launches: list[Any] = []
        self.words: list[int] = []

    def add(self, launch: Any, kind: str, words: list[int]) -> None:
        assert len(words) <= MOST_WORDS, launch
        self.launches.append(launch)
        self.words += [KINDS[kind], len(words) + 2, *words]


class Pass:
    """The launches of one pass, forward or backward.

    Args:
        launch: a function that calls them, given a recorder and pointers by name.
    """

    def __init__(self, launch: Callable[[Recorder, dict[str, Pointer]], None]):
        self.launch = launch
        self.recorded: dict[tuple, tuple[array, list[Any]]] = {}  # by device and names of tensors

    def __call__(self, device: torch.device, tensors: dict[str, Tensor]) -> None:
        """Run the pass on the current stream of ``device``, which is the current device."""
        if device.type != "cuda":
            self.launch(Recorder(device), tensors)
            return
        key = device.index, *tensors
        recorded = self.recorded.get(key)
        if recorded is None:
            recorded = self.recorded[key] = self.record(device, tensors)
        program, launches = recorded
        stream, handle = torch._C._cuda_getCurrentRawStream(device.index), torch.cuda.current_blas_handle()
        addresses = [t.data_ptr() for t in tensors.values()]
        if failed := replayer()(program.buffer_info()[0], stream, handle, *addresses):
            k, status = divmod(failed, 2**32)
            raise RuntimeError(f"{launches[k - 1]}: CUDA could not launch it, status {status}")

    def record(self, device: torch.device, tensors: dict[str, Tensor]) -> tuple[array, list[Any]]:
        """Return the program of a pass, and its launches."""
        recorder = Recorder(device)
        self.launch(recorder, {name: k * TENSOR for k, name in enumerate(tensors)})
        functions = address_of(driver().cuLaunchKernel), address_of(cublas_lt().cublasLtMatmul)
        return array("Q", [len(recorder.launches), *functions, *recorder.words]), recorder.launches


def references(pointers: Iterable[Pointer]) -> list[int]:
    """Return the tensor and the offset of each recorded pointer."""
    words = []
    for pointer in pointers:
        words += divmod(pointer, TENSOR)
    return words


@cache
def replayer() -> Callable[..., int]:
    """Return ``run`` of replay.c. Triton's C compiler, which Triton needs anyway, builds and caches it."""
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_name("replay.c").read_text(encoding="utf-8")
    return compile_module_from_src(source, "vecroute_replay").run


@cache
def driver() -> Any:
    """Return the library of CUDA's driver."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def cublas_lt() -> Any:
    """Return the library of cuBLASLt that PyTorch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcublasLt.so.{major}")


def address_of(function: Any) -> int:
    """Return the address of a function of a library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
