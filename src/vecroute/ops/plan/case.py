"""The facts of a call that its plan depends on."""

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import _utils


class Tuning(NamedTuple):
    """Options for memory: rows of a chunk (0: chosen from the shapes), and bytes for kept i x j arrays.

    Any tuning other than the default forces the loop over chunks.
    """

    rows: int = 0
    keep_bytes: int = 64 * 2**20


class Device(NamedTuple):
    """The properties of a device that plans look at."""

    kind: str  # as in torch.device: "cpu", "cuda", "meta"
    capability: tuple[int, int] = (0, 0)  # compute capability of an NVIDIA GPU
    shared_bytes: int = 0  # bytes of shared memory for one block
    processors: int = 3  # multiprocessors; the default is for Triton's interpreter
    compiles: bool = False  # whether CUDA C++ can be compiled


class Case(NamedTuple):
    """The shapes, dtypes, masks and options of a call, and its device."""

    shape: tuple[int, ...]  # of x_inp
    dtype: torch.dtype  # of x_inp
    rounded: torch.dtype  # operands are rounded to it: the dtype of autocast, else of x_inp
    w_dtype: torch.dtype
    n_out: int
    d_out: int
    n_iters: int
    variable: bool  # whether n_inp is None
    input_mask: bool
    use_strides: tuple[int, int, int] | None  # of pair_mask [b, i, j], None if there is none
    packed: tuple[int, torch.dtype] | None  # number of samples, and dtype of cu_seqlens
    prior: float
    implementation: str
    tuning: Tuning
    group: bool  # whether inputs are sharded over ranks
    tf32: bool  # whether products of float32 may be rounded to tf32
    need_phi: bool
    device: Device
    aligned: bool = True  # whether each row of x_inp is contiguous and begins at a multiple of 16 bytes
    one_by_one: bool = False  # whether the caller runs single iterations instead of the whole loop
    normalized: bool = False  # whether the layer normalises x_out; the batch path then does it


@cache
def device_of(device: torch.device) -> Device:
    """Return the properties of a device."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return Device(device.type)
    found: Any = torch.cuda.get_device_properties(device)
    capability = found.major, found.minor
    return Device(
        "cuda", capability, found.shared_memory_per_block_optin, found.multi_processor_count,
        capability == (9, 0) and has_compiler(),
    )  # fmt: skip


def has_compiler() -> bool:
    """Return whether PyTorch finds NVRTC, the compiler of CUDA C++. If not, warn once."""
    if not hasattr(torch.cuda, "_compile_kernel"):
        return False
    names = "_get_gpu_rtc_library", "_get_nvrtc_library"  # the second in older releases
    find = next((getattr(_utils, name) for name in names if hasattr(_utils, name)), None)
    try:
        if find is not None:
            find()
    except OSError as error:
        warnings.warn(
            f"vecroute routes long sequences without its CUDA C++ kernels, which need NVRTC: {error}",
            stacklevel=2,
        )
        return False
    return True


def has_aligned_rows(x: Tensor) -> bool:
    """Return whether each row of x [..., i, d] is contiguous and begins at a multiple of 16 bytes."""
    step = x.stride(-2)
    aligned = step * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return aligned and x.stride(-1) == 1 and step >= x.shape[-1]


def mask_strides(mask: Tensor, x_inp: Tensor) -> Any:
    """Return the strides of a pair mask [b, i, j], with all batch dimensions of x_inp in one."""
    batch = x_inp.shape[:-2]
    mask = mask.expand(*batch, *mask.shape[-2:])  # [..., i, j]
    return (mask if len(batch) == 1 else mask.reshape(math.prod(batch), *mask.shape[-2:])).stride()


def is_tf32(x_inp: Tensor, rounded: torch.dtype) -> bool:
    """Return whether float32 products are tf32: if PyTorch is set to tf32, or autocast would round more."""
    if x_inp.dtype != torch.float32:
        return False
    return rounded != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32"
