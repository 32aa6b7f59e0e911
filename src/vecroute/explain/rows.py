"""The rows of an explanation of words, and which positions of the encoder's input each of them is."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from vecroute.encoders.text import TextEncoder, Tokenized, strip_span


class Rows(NamedTuple):
    """The rows of an explanation of words: one for each token of the text, and for each special token."""

    of: list[list[int]]  # the row of each position of each chunk
    start: list[int]  # first character in the text; 0 for special tokens
    end: list[int]  # one past the last
    special: list[bool]
    chunk: list[int]
    ids: list[int]  # in the vocabulary


class TextSplit(NamedTuple):
    """The scores of one text, split into what its words add."""

    values: Tensor  # [n, depth or 1, k] of the rows
    base: Tensor  # [k]
    scores: Tensor  # [k]
    all_scores: Tensor  # [n_cls]


# Splits scores of texts into what their rows add, given the texts, their outputs and their rows.
Splitter = Callable[[Sequence[Tokenized], Sequence[Sequence[int]], Sequence[Rows]], list[TextSplit]]


def chunk_step(encoder: TextEncoder) -> int:
    """Return how many tokens after the start of a chunk the next one starts."""
    return encoder.max_length - encoder.tokenizer.num_special_tokens_to_add(pair=False) - encoder.stride


def rows_of(text: Tokenized, step: int) -> Rows:
    """Return the rows of a text. A token that several chunks have read has one row.

    Args:
        text: the text.
        step: see ``chunk_step``.
    """
    numbers: list[list[int]] = []  # of each position: the token of the text, or a negative number
    home: dict[int, tuple[int, int]] = {}  # chunk and position from which a token goes to the head
    for chunk, special in enumerate(text.special):
        numbers.append([])
        content = 0
        for position, is_special in enumerate(special):
            key = -1 - len(home) if is_special else chunk * step + content
            content += not is_special
            numbers[-1].append(key)
            if is_special or text.keep[chunk][position] or key not in home:
                home[key] = (chunk, position)
    places = sorted(home, key=home.__getitem__)
    row = {key: k for k, key in enumerate(places)}
    columns = []
    for key in places:
        chunk, position = home[key]
        span = (0, 0) if key < 0 else strip_span(text.text, *text.spans[chunk][position])
        columns.append((*span, key < 0, chunk, text.chunks[chunk][position]))
    return Rows([[row[key] for key in keys] for keys in numbers], *map(list, zip(*columns, strict=True)))
