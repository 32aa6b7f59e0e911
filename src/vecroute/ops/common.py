"""Parameters, masks and arithmetic that all implementations of the routing loop share."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

# Devices that have autocast. Computed once at import, because compilers cannot trace the call.
AUTOCAST = set(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla")))


class Weights(NamedTuple):
    """The parameters of Algorithm 2 by the paper's names; ``I`` is n_inp, or 1 if the length is variable."""

    W_A: Tensor  # [I, d]
    B_A: Tensor  # [I]
    W_F1: Tensor  # [j, d]
    W_F2: Tensor  # [d, h]
    B_F2: Tensor  # [j, h]
    W_G1: Tensor  # [h, d]
    W_G2: Tensor  # [j, d]
    B_G2: Tensor  # [j, d]
    W_S: Tensor  # [I, j]
    B_S: Tensor  # [I, j]
    # Fixed length: the betas themselves, else None.
    beta_use: Any = None  # [i, j]
    beta_ign: Any = None  # [i, j]
    # Variable length: the betas are linear in x_inp; else None.
    W_use: Any = None  # [d, j]
    B_use: Any = None  # [j]
    W_ign: Any = None  # [d, j]
    B_ign: Any = None  # [j]

    @classmethod
    def names(cls, variable: bool) -> tuple[str, ...]:
        """Return the names of the parameters that are not None, by whether the length is variable."""
        return cls._fields[:10] + (cls._fields[12:] if variable else cls._fields[10:12])

    def to(self, dtype: torch.dtype) -> "Weights":
        """Return the same parameters in another dtype."""
        return Weights._make(None if w is None else w.to(dtype) for w in self)


class Iteration(NamedTuple):
    """Every quantity of one iteration of the loop (``x_hat`` and ``S`` are None under the flat prior)."""

    a_inp: Tensor  # [..., i]
    x_hat: Tensor | None  # [..., j, d]
    S: Tensor | None  # [..., i, j]
    R: Tensor  # [..., i, j]
    D_use: Tensor  # [..., i, j]
    D_ign: Tensor  # [..., i, j]
    phi: Tensor  # [..., i, j]
    x_out: Tensor  # [..., j, h], before any final normalisation


def normalize(x: Tensor) -> Tensor:
    """Apply the paper's N: scale each vector to mean 0 and variance 1. A vector of size 1 stays as it is."""
    if x.shape[-1] == 1:
        return x
    if not x.is_cuda:
        # On a CPU, layer_norm loses digits if the mean of a vector is large compared with its deviation. So
        # centre the vector first.
        x = x - x.mean(-1, keepdim=True)
    return nnf.layer_norm(x, x.shape[-1:], eps=1e-5)


def log_f(z: Tensor) -> Tensor:
    """Return log f(z) of the logistic f: finite for every finite z, in exported graphs too.

    ONNX has no logsigmoid. There log(sigmoid(z)) is -inf for very negative z, but softplus stays finite.
    """
    return -nnf.softplus(-z, threshold=40)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of everything except operands of products, such as sums: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product_dtype(x_inp: Tensor) -> torch.dtype:
    """Return the dtype to which operands of products are rounded: the dtype of autocast, else of x_inp."""
    device = x_inp.device.type
    autocast = device in AUTOCAST and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast and x_inp.dtype != torch.float64 else x_inp.dtype


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which autocast is off. A device without autocast, such as meta, needs none."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if device in AUTOCAST else nullcontext()


def is_exporting() -> bool:
    """Return whether torch.export traces. In PyTorch 2.11, the public test is True in torch.compile too."""
    return torch.compiler._is_exporting_flag


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. On the host, Triton's own function takes twenty times as long."""
    return -(-a // b)


def multiple_of_8(n: int) -> int:
    """Return the least multiple of 8 that is not less than n."""
    return cdiv(n, 8) * 8


def aligned(t: Tensor) -> Tensor:
    """Return t, or a copy that is contiguous and begins at a multiple of 16 bytes. Kernels rely on both."""
    if t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def from_16(t: Any) -> Any:
    """Return t, or a copy that begins at a multiple of 16 bytes. None stays None."""
    return t if t is None or t.data_ptr() % 16 == 0 else t.clone()


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n >= 1. Like ``cdiv``, it is faster than Triton's."""
    return 1 << (n - 1).bit_length()


def used_pairs(input_mask: Tensor | None, pair_mask: Tensor | None) -> Tensor | None:
    """Return the pairs that take part in the competition, [..., i, j] or [..., i, 1]; None if all do."""
    if input_mask is None:
        return pair_mask
    inputs = input_mask[..., None]  # [..., i, 1]
    return inputs if pair_mask is None else inputs & pair_mask  # [..., i, j]


def masked_softmax(S: Tensor, use: Tensor | None, dim: int) -> Tensor:
    """Compute the softmax over the used pairs. It is exactly 0 at the others, even if no pair is left.

    Args:
        S: [..., i, j] scores.
        use: [..., i, j] True at the used pairs, or None.
        dim: -1 to compete over outputs, -2 over inputs.
    """
    if use is None:
        return S.softmax(dim)  # [..., i, j]
    # Use the lowest finite number instead of -inf: then a row without used pairs stays finite, forward and
    # backward.
    S = S.masked_fill(~use, torch.finfo(S.dtype).min)  # [..., i, j]
    return S.softmax(dim).masked_fill(~use, 0.0)  # [..., i, j]
