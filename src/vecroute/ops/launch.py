"""Prepared launches: a plan binds everything that a launch needs, except its pointers (see ``recording``)."""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vecroute.ops.common import cdiv
from vecroute.ops.recording import Pointer, Recorder, cublas_lt, driver, references

_loaded: dict[tuple, "Loaded"] = {}  # by the values that Triton specialises on


class Loaded(NamedTuple):
    """A compiled kernel in the memory of a device.

    ``others`` is the format of its arguments after the pointers, ``passed`` which sizes are among them.
    """

    compiled: Any  # keeps the kernel loaded
    resources: tuple[int, int]  # threads, and bytes of shared memory
    others: struct.Struct
    passed: list[bool]
    scratch: tuple[int, ...]


class Launch:
    """A Triton kernel with its grid, sizes and constants; the pointers come first in its signature.

    Args:
        kernel: a ``triton.jit`` function whose parameters are pointers, then sizes, then constants.
        grid: three numbers of programs.
        dtypes: dtypes of the elements that the pointers point to.
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

    def __call__(self, recorder: Recorder, *pointers: Pointer) -> None:
        if recorder.interpreted:
            self.kernel[self.grid](*pointers, *self.sizes, **self.constants)
            return
        prepared = self.prepared.get(recorder.device)
        if prepared is None:
            prepared = self.prepared[recorder.device] = self.prepare(recorder.device)
        before, n_bytes, others = prepared
        recorder.add(self, "kernel", [*before, len(pointers), n_bytes, *references(pointers), *others])

    def prepare(self, device: int) -> tuple:
        """Return the first words of a launch, the bytes of all arguments, and the arguments but pointers."""
        looks = specialised(self.kernel)[len(self.dtypes) :]
        sizes = zip(self.sizes, looks, strict=False)
        classes = tuple([(look and n == 1, look and n % 16 == 0, n >= 2**31) for n, look in sizes])
        key = self.kernel, device, self.dtypes, classes, tuple(self.constants.items())
        loaded = _loaded.get(key)
        if loaded is None:
            loaded = _loaded[key] = self.load()
        passed = [n for n, is_passed in zip(self.sizes, loaded.passed, strict=True) if is_passed]
        others = loaded.others.pack(*passed, *loaded.scratch)
        n_words = cdiv(len(others), 8)
        words = struct.unpack(f"@{n_words}Q", others.ljust(8 * n_words, b"\0"))
        before = loaded.compiled.function, *self.grid, *loaded.resources
        return before, 8 * len(self.dtypes) + len(others), words

    def load(self) -> Loaded:
        """Compile the kernel and load it to the current device."""
        n_pointers, n_sizes = len(self.dtypes), len(self.sizes)
        # For Triton, a dtype means a pointer aligned to 16 bytes, and all our pointers are.
        compiled = self.kernel.warmup(*self.dtypes, *self.sizes, grid=self.grid, **self.constants)
        _ = compiled.run  # loads the kernel
        kinds = list(compiled.src.signature.values())[n_pointers : n_pointers + n_sizes]
        passed = [kind != "constexpr" for kind in kinds]
        # Triton appends pointers to scratch memory, which these kernels do not use.
        n_scratch = n_parameters(compiled.function) - n_pointers - sum(passed)
        numbers = "".join({"i32": "i", "i64": "q"}[kind] for kind in kinds if kind != "constexpr")
        others = struct.Struct("@" + numbers + "Q" * n_scratch)
        resources = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        return Loaded(compiled, resources, others, passed, (0,) * n_scratch)

    def __repr__(self) -> str:
        return f"{self.kernel.__name__} {' x '.join(map(str, self.grid))}"


def n_parameters(function: int) -> int:
    """Return the number of parameters of a kernel."""
    n, offset, size = 0, ctypes.c_size_t(), ctypes.c_size_t()
    info = driver().cuFuncGetParamInfo
    while info(ctypes.c_void_p(function), ctypes.c_size_t(n), ctypes.byref(offset), ctypes.byref(size)) == 0:
        n += 1
    return n


@cache
def specialised(kernel: Any) -> list[bool]:
    """Return for which parameters Triton compiles a kernel anew if they are 1 or divisible by 16."""
    return [not parameter.do_not_specialize for parameter in kernel.params]


class Product:
    """A product out = a @ b of contiguous matrices by cuBLASLt. The first call chooses the algorithm.

    Args:
        sizes: rows and columns of out, and the size that is summed over.
        dtype: float32 or float64, for all three matrices.
        transposed: for each operand, True if memory holds its transpose.
        add: True to add the product to out.
        tf32: True if float32 operands may be rounded to tf32.
        workspace: bytes that the algorithm may use.
    """

    def __init__(
        self, sizes: tuple[int, int, int], dtype: torch.dtype, *, workspace: int, transposed: tuple[bool,
            bool] = (False, False),
        add: bool = False, tf32: bool = False,
    ):  # fmt: skip
        self.sizes, self.dtype, self.transposed, self.add, self.tf32 = sizes, dtype, transposed, add, tf32
        self.workspace = workspace
        number = ctypes.c_double if dtype == torch.float64 else ctypes.c_float
        self.one, self.beta = number(1), number(int(add))
        self.prepared: dict[int, tuple] = {}  # by the index of the device
        self.found: list[Any] = []

    def __call__(self, recorder: Recorder, a: Pointer, b: Pointer, out: Pointer, workspace: Pointer) -> None:
        if recorder.interpreted:
            return self.interpret(a, b, out)
        prepared = self.prepared.get(recorder.device)
        if prepared is None:
            prepared = self.prepared[recorder.device] = self.prepare()
        # cuBLAS stores matrices by columns, so ask it for out^T = b^T a^T.
        recorder.add(self, "product", [*prepared, self.workspace, *references((b, a, out, workspace))])

    def prepare(self) -> tuple:
        """Return the addresses of the objects that describe the product to cuBLASLt."""
        lt, (m, n, k), (a_T, b_T) = cublas_lt(), self.sizes, self.transposed
        double = self.dtype == torch.float64
        kind, compute = (1, 70) if double else (0, 77 if self.tf32 else 68)
        operation, preference = ctypes.c_void_p(), ctypes.c_void_p()
        check(lt.cublasLtMatmulDescCreate(ctypes.byref(operation), compute, kind), self)
        for attribute, value in ((3, b_T), (4, a_T)):  # transposition of the first and the second operand
            flag = ctypes.c_int32(int(value))
            check(lt.cublasLtMatmulDescSetAttribute(operation, attribute, ctypes.byref(flag), 4), self)
        layouts: list[Any] = []
        for rows, columns in ((m, k) if a_T else (k, m), (k, n) if b_T else (n, k), (n, m)):
            layout = ctypes.c_void_p()
            create = lt.cublasLtMatrixLayoutCreate
            check(
                create(
                    ctypes.byref(layout),
                    kind,
                    ctypes.c_uint64(rows),
                    ctypes.c_uint64(columns),
                    ctypes.c_int64(rows),
                ),
                self,
            )
            layouts.append(layout)
        check(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), self)
        most = ctypes.c_size_t(self.workspace)
        check(lt.cublasLtMatmulPreferenceSetAttribute(preference, 1, ctypes.byref(most), 8), self)
        found, n_found = (ctypes.c_uint64 * 16)(), ctypes.c_int()  # the algorithm is the first 64 bytes
        a, b, out = layouts
        check(
            lt.cublasLtMatmulAlgoGetHeuristic(
                ctypes.c_void_p(torch.cuda.current_blas_handle()), operation, b, a, out, out, preference, 1,
                ctypes.byref(found), ctypes.byref(n_found),
            ),
            self,
        )  # fmt: skip
        lt.cublasLtMatmulPreferenceDestroy(preference)
        if not n_found.value:
            raise RuntimeError(f"cuBLASLt has no algorithm for {self}")
        self.found.append(found)  # algorithms must live as long as the product, since programs point to them
        one, beta = ctypes.addressof(self.one), ctypes.addressof(self.beta)
        of_a, of_b, of_out = (layout.value for layout in layouts)
        return operation.value, one, of_b, of_a, beta, of_out, ctypes.addressof(found)

    def interpret(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        m, n, k = self.sizes
        a = a.view(k, m).mT if self.transposed[0] else a.view(m, k)  # [m, k]
        b = b.view(n, k).mT if self.transposed[1] else b.view(k, n)  # [k, n]
        out = out.view(m, n)  # [m, n]
        out.add_(a @ b) if self.add else out.copy_(a @ b)

    def __repr__(self) -> str:
        return f"cuBLASLt {' x '.join(map(str, self.sizes))}"


def check(status: int, product: Product) -> None:
    if status:
        raise RuntimeError(f"{product}: cuBLASLt answers with status {status}")


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
            end += -(-size // 256) * 256  # the alignment of PyTorch's allocator
        self.n_bytes = end

    def new(self, like: Tensor) -> Tensor:
        """Return the allocation, on the device of another tensor."""
        return torch.empty(self.n_bytes, dtype=torch.uint8, device=like.device)

    def at(self, memory: Pointer) -> dict[str, Pointer]:
        """Return the pointer to each array."""
        if isinstance(memory, Tensor):
            return {name: self.tensor(memory, name) for name in self.arrays}
        return {name: memory + offset for name, offset in self.offsets.items()}

    def distance(self, name: str, other: str) -> int:
        """Return the distance between the starts of two arrays, in elements of the first."""
        return (self.offsets[other] - self.offsets[name]) // self.arrays[name][1].itemsize

    def tensor(self, memory: Tensor, name: str) -> Tensor:
        """Return one of the arrays."""
        shape, dtype = self.arrays[name]
        size = dtype.itemsize
        for n in shape:
            size *= n
        start = self.offsets[name]
        return memory[start : start + size].view(dtype).view(shape)
