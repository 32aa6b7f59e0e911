"""The rows of an explanation of words, and the positions of the encoder's input that belong to each row."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from vecroute.encoders.text import TextEncoder, Tokenized, strip_span


class Rows(NamedTuple):
    """The rows of an explanation of words: one for each token of the text, and for each special token."""

    of: list[list[int]]  # the row of each position of each chunk
    start: list[int]  # first character in the text; 0 for special tokens
    end: list[int]  # one past the last character
    special: list[bool]
    chunk: list[int]
    ids: list[int]  # ids in the vocabulary


class TextSplit(NamedTuple):
    """The scores of one text, split into the contributions of its words."""

    values: Tensor  # [n, depth or 1, k] contributions of the rows
    base: Tensor  # [k]
    scores: Tensor  # [k]
    all_scores: Tensor  # [n_cls]


# A function that splits scores into contributions of rows, from the texts, their outputs and their rows.
Splitter = Callable[[Sequence[Tokenized], Sequence[Sequence[int]], Sequence[Rows]], list[TextSplit]]


def chunk_step(encoder: TextEncoder) -> int:
    """Return the number of tokens between the starts of two chunks."""
    return encoder.max_length - encoder.tokenizer.num_special_tokens_to_add(pair=False) - encoder.stride


def rows_of(text: Tokenized, step: int) -> Rows:
    """Return the rows of a text. A token that occurs in several chunks has one row.

    Args:
        text: the text.
        step: see ``chunk_step``.
    """
    if len(text.encodings) == 1:  # each position is a row
        return _rows_of_chunk(text)
    numbers: list[list[int]] = []  # token of the text at each position; negative for special tokens
    home: dict[int, tuple[int, int]] = {}  # token -> the chunk and position whose state the head reads
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
    columns, spans, chunks = [], text.spans, text.chunks
    for key in places:
        chunk, position = home[key]
        span = (0, 0) if key < 0 else strip_span(text.text, *spans[chunk][position])
        columns.append((*span, key < 0, chunk, chunks[chunk][position]))
    return Rows([[row[key] for key in keys] for keys in numbers], *map(list, zip(*columns, strict=True)))


def _rows_of_chunk(text: Tokenized) -> Rows:
    (ids,), (mask,), (spans,) = text.chunks, text.special, text.spans
    special = list(map(bool, mask))
    shown = [
        (0, 0) if added else strip_span(text.text, *span) for added, span in zip(special, spans, strict=True)
    ]
    n = len(ids)
    return Rows([list(range(n))], [a for a, _ in shown], [b for _, b in shown], special, [0] * n, ids)
