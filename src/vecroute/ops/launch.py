"""Prepared launches: everything that a launch needs, but its pointers, is bound when a plan is made.

A call then costs the host about 8 us for each kernel: Triton's compiled handle is called directly, and small
products call cuBLAS directly. On a GPU pointers are integers. Where Triton interprets kernels on the CPU,
they are tensors.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
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
    """Where launches of one pass go: a CUDA stream and its cuBLAS handle, or the interpreter."""

    __slots__ = ("address", "blas", "device", "interpreted")

    def __init__(self, device: torch.device):
        self.interpreted = device.type != "cuda"
        if not self.interpreted:
            self.device: int = torch.cuda.current_device()
            self.address: int = torch._C._cuda_getCurrentRawStream(self.device)
            self.blas: int = torch.cuda.current_blas_handle()


class Product:
    """out = a @ b of contiguous matrices by cuBLAS, or out += a @ b.

    Args:
        sizes: rows and columns of out, and the size that is summed over.
        dtype, out_dtype: of both operands, and of out.
        transposed: for each operand, whether memory holds its transpose.
        tf32: whether float32 operands may be rounded to tf32.
    """

    def __init__(
        self, sizes: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype, *,
        transposed: tuple[bool, bool] = (False, False), tf32: bool = False,
    ):  # fmt: skip
        self.sizes, self.transposed, self.dtype, self.out_dtype = sizes, transposed, dtype, out_dtype
        m, n, k = sizes
        (a_T, b_T), kind, out = transposed, CUDA_TYPE[dtype], CUDA_TYPE[out_dtype]
        compute = 70 if out_dtype == torch.float64 else 77 if tf32 and dtype == torch.float32 else 68
        # cuBLAS counts by columns: for it out^T = b^T a^T.
        self.before = [int(b_T), int(a_T), n, m, k]
        self.b, self.a, self.out = (kind, k if b_T else n), (kind, m if a_T else k), (out, n)
        self.compute = compute, -1  # the default algorithm
        number = ctypes.c_double if out_dtype == torch.float64 else ctypes.c_float
        self.one, self.zero = number(1), number(0)
        self.scales = [ctypes.addressof(number) for number in (self.zero, self.one)]

    def __call__(self, stream: Stream, a: Pointer, b: Pointer, out: Pointer, add: bool = False) -> None:
        if stream.interpreted:
            return self.interpret(a, b, out, add)
        one, beta = self.scales[1], self.scales[add]
        status = gemm()(
            stream.blas, *self.before, one, b, *self.b, a, *self.a, beta, out, *self.out, *self.compute
        )
        if status:
            raise RuntimeError(f"cuBLAS could not multiply {self.sizes}: status {status}")

    def interpret(self, a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
        m, n, k = self.sizes
        a = a.view(k, m).mT if self.transposed[0] else a.view(m, k)  # [m, k]
        b = b.view(n, k).mT if self.transposed[1] else b.view(k, n)  # [k, n]
        product = a.to(self.out_dtype) @ b.to(self.out_dtype)  # [m, n]
        out = out.view(m, n)  # [m, n]
        out.add_(product) if add else out.copy_(product)

    def __repr__(self) -> str:
        return f"cuBLAS {' x '.join(map(str, self.sizes))}"


# Numbers of cudaDataType, as cuBLAS takes them.
CUDA_TYPE = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 14}


@cache
def gemm() -> Any:
    """cublasGemmEx of the library that PyTorch has loaded."""
    major = (torch.version.cuda or "").partition(".")[0]
    function = ctypes.CDLL(f"libcublas.so.{major}").cublasGemmEx
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    operand = [pointer, integer, integer]
    function.argtypes = [pointer, *[integer] * 5, pointer, *operand, *operand, pointer, *operand, integer, integer]
    return function


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
