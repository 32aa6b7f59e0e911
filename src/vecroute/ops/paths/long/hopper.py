"""CUDA C++ for GPUs of compute capability 9.0 (Hopper), compiled by PyTorch when it is first called."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import torch


def source(name: str, *definitions: str) -> str:
    """Concatenate ``hopper.cu``, some definitions, and a kernel that uses both."""
    here = files("vecroute.ops.paths.long")
    return "\n".join((here.joinpath("hopper.cu").read_text(), *definitions, here.joinpath(name).read_text()))


def multiplication(name: str, tiles: int, transposed: int = 0) -> str:
    """Return a function that adds a @ b, [64, 16] @ [16, 8 tiles], to r, or writes it there if not ``add``.

    Both are in shared memory, either both transposed or none.
    """
    n = 4 * tiles
    registers = ", ".join(f"%{k}" for k in range(n))
    outputs = ", ".join(f'"+f"(r[{k}])' for k in range(n))
    return (
        f"INLINE void {name}(float (&r)[{n}], u64 a, u64 b, int add = 1) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{n + 2}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.f16.f16 "
        f'{{{registers}}}, %{n}, %{n + 1}, p, 1, 1, {transposed}, {transposed};\\n}}"\n'
        f'        : {outputs} : "l"(a), "l"(b), "r"(add));\n}}\n'
    )


def compiled(text: str, name: str, shared: int, device: torch.device) -> Any:
    """Compile a kernel that may use ``shared`` bytes of shared memory.

    Raises:
        RuntimeError: the compiler refuses the kernel, with its log, or the device cannot load it.
    """
    with torch.cuda.device(device), without_headers():
        try:
            kernel = torch.cuda._compile_kernel(text, name, compute_capability="90a")
            kernel.set_shared_memory_config(shared)
        except RuntimeError as error:
            raise RuntimeError(
                f"the CUDA kernel {name} of vecroute is not usable on {device}: {error}"
            ) from error
    return kernel


@contextmanager
def without_headers() -> Iterator[None]:
    """Compile without the headers of the CUDA toolkit. We need none, and PyTorch fails without them."""
    from torch.utils import cpp_extension

    before = cpp_extension.CUDA_HOME
    cpp_extension.CUDA_HOME = before or ""
    try:
        yield
    finally:
        cpp_extension.CUDA_HOME = before
