"""Check arrays and tensors that are given to an explanation, and copy them to NumPy."""

from typing import Any

import numpy as np
from torch import Tensor


def as_array(values: Any, dtype: Any) -> np.ndarray:
    """Return a copy of an array, tensor or sequence."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.array(values, dtype=dtype)


def as_floats(name: str, values: Any, shape: tuple[int | None, ...], letters: str) -> np.ndarray:
    """Return a float32 copy of an array or tensor of the given shape, None for any size."""
    array = as_array(values, np.float32)
    if array.ndim != len(shape) or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
        sizes = [c if n is None else f"{c}={n}" for c, n in zip(letters.split(), shape, strict=True)]
        raise ValueError(f"{name} must be [{', '.join(sizes)}], got {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite numbers, got {array[~np.isfinite(array)][0]}")
    return array


def check_offsets(offsets: Any, n: int, text: str) -> np.ndarray:
    """Check that offsets [n, 2] lie inside the text, and return them as an array."""
    array = as_array(offsets, np.int32)  # [n, 2]
    array = array if array.size else array.reshape(0, 2)
    if array.shape != (n, 2):
        raise ValueError(f"offsets must be [n={n}, 2], got {list(array.shape)}")
    wrong = (array[:, 0] < 0) | (array[:, 0] > array[:, 1]) | (array[:, 1] > len(text))  # [n]
    if wrong.any():
        first = array[wrong][0].tolist()
        raise ValueError(f"offsets must be 0 <= start <= end <= {len(text)}, the length of text, got {first}")
    return array
