"""Explanation: what each token of a text adds to each class score, at each depth."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor


class Part(NamedTuple):
    """One part of a text and what it adds to a score."""

    piece: str
    start: int  # first character in the text
    end: int  # one past the last; equal to start where it has no characters
    value: float


class Explanation:
    """What each token of one text adds to each class score at each depth, and the credit phi.

        scores = values.sum((0, 1)) + base_values

    Arrays are numpy float32; sums are made in float64. Several texts have a list of explanations.

    Args:
        values: [n, depth, n_cls] contributions of every token, arrays or tensors.
        phi: [n, depth, n_cls] credit of every token.
        base_values: [n_cls] the scores with no contribution.
        scores: [n_cls] what the network computed.
        output_names: the names of the n_cls classes.
        text: the text as it was given.
        offsets: [n, 2] first character of each token in the text and one past the last, equal if it has none.
        pieces: the string of each token, None for its characters in the text.
        special: [n] True at tokens that the tokenizer put there, None for none.
        chunk: [n] which chunk of the text each token was encoded in, None for one chunk.
        depths: which hidden states these are, 0 for the embeddings; None for 0, ..., depth - 1.

    Raises:
        ValueError: shapes that do not fit one another, offsets outside the text, numbers that are not finite.
    """

    def __init__(
        self,
        *,
        values: Any,
        phi: Any,
        base_values: Any,
        scores: Any,
        output_names: Sequence[Any],
        text: str,
        offsets: Any,
        pieces: Sequence[str] | None = None,
        special: Any = None,
        chunk: Any = None,
        depths: Sequence[int | str] | None = None,
    ):
        self.values = as_array(values)  # [n, depth, n_cls]
        self.phi = as_array(phi)  # [n, depth, n_cls]
        self.base_values = as_array(base_values)  # [n_cls]
        self.scores = as_array(scores)  # [n_cls]
        self.output_names = [str(name) for name in output_names]
        self.text = text
        self.offsets = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)  # [n, 2]
        n = len(self.values)
        self.special = np.zeros(n, dtype=bool) if special is None else np.asarray(special, dtype=bool)  # [n]
        self.chunk = (
            np.zeros(n, dtype=np.int64) if chunk is None else np.asarray(chunk, dtype=np.int64)
        )  # [n]
        self.depths = list(range(self.values.shape[1])) if depths is None else list(depths)
        self.pieces = list(pieces or [])


def as_array(values: Any) -> np.ndarray:
    """Arrays, tensors and numbers as a float32 array."""
    if isinstance(values, Tensor):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float32)
