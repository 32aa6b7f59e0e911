"""Explain words by means over random sub-texts, which is slower and more faithful.

The contribution of a word depends on the other words. So its value here is the mean of its contributions over
random sub-texts that contain it. The base is the base of the full text. These means do not add up to the
score of the full text. The difference is called *not explained*.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from vecroute.encoders.text import Chunk, Tokenized
from vecroute.explain.rows import Rows, Splitter, TextSplit
from vecroute.explain.segment import locate, words


def check_samples(samples: Any, of: str = "words", images: bool = False, by_depth: bool = False) -> None:
    """Check that samples is an even number, and 0 if there are no words to leave out."""
    if isinstance(samples, bool) or not isinstance(samples, Integral) or samples < 0 or samples % 2:
        raise ValueError(f"samples must be an even number, 0 for none, got {samples!r}")
    if samples and of != "words":
        raise ValueError(f"samples must be 0 unless of='words', got {samples} with of={of!r}")
    if samples and images:
        raise ValueError(f"samples must be 0 for images, got {samples}")
    if samples and by_depth:
        raise ValueError(f"samples must be 0 with by_depth=True, got {samples}")


def split_samples(
    split: Splitter,
    texts: Sequence[Tokenized],
    outputs: Sequence[Sequence[int]],
    rows: Sequence[Rows],
    samples: int,
    seed: int = 0,
) -> list[tuple[TextSplit, Tensor]]:
    """Return contributions of the rows of each text, as means over sub-texts, and what is not explained [k].

    Args:
        split: explains texts and sub-texts.
        texts, outputs, rows: the arguments of ``split``.
        samples: number of sub-texts per text, an even number. Sub-texts come in pairs: each word is in
            exactly one of the two.
        seed: seed of the random sub-texts.
    """
    full = split(texts, outputs, rows)
    parts: list[tuple[int, Tokenized, Rows]] = []  # index of a text, and a sub-text of it
    for k, (text, own) in enumerate(zip(texts, rows, strict=True)):
        for keep in sub_texts(words_of(own, text.text), samples, seed):
            parts.append((k, *part_of(text, own, keep)))
    which = [k for k, _, _ in parts]
    found = split([t for _, t, _ in parts], [outputs[k] for k in which], [own for _, _, own in parts])
    total = [torch.zeros_like(one.values) for one in full]  # [n, 1, k] each
    count = [torch.zeros(len(own.start)) for own in rows]  # [n] each
    for (k, _, own), one in zip(parts, found, strict=True):
        total[k] += one.values
        count[k][[row for index in own.of for row in index]] += 1
    explained = []
    for one, summed, times in zip(full, total, count, strict=True):
        if times.any():
            one = one._replace(values=summed / times.to(summed)[:, None, None])  # [n, 1, k]
            explained.append((one, one.scores - one.base - one.values.sum((0, 1))))
        else:  # a single word cannot be halved
            explained.append((one, torch.zeros_like(one.scores)))
    return explained


def words_of(rows: Rows, text: str) -> list[int]:
    """Return the number of the word of each row; -1 for special tokens, which are in every sub-text."""
    spans = list(zip(rows.start, rows.end, strict=True))
    numbers = locate(spans, words(text))
    return [-1 if special else word for special, word in zip(rows.special, numbers, strict=True)]


def sub_texts(group: Sequence[int], samples: int, seed: int) -> list[list[bool]]:
    """Return masks over the rows: random halves of the words, each followed by its complement.

    Args:
        group: the word of each row; see ``words_of``.
        samples, seed: see ``split_samples``.
    """
    generator, number = torch.Generator().manual_seed(seed), torch.tensor(group)  # [n]
    names = number[number >= 0].unique()  # [w]
    found = []
    for _ in range(samples // 2 if len(names) > 1 else 0):
        half = names[torch.randperm(len(names), generator=generator)[: (len(names) + 1) // 2]]
        inside = torch.isin(number, half)  # [n]
        found += [(inside | (number < 0)).tolist(), (~inside | (number < 0)).tolist()]
    return found


def part_of(whole: Tokenized, rows: Rows, keep: Sequence[bool]) -> tuple[Tokenized, Rows]:
    """Return a text that has only the rows to keep, in the same chunks, and the rows of its positions."""
    stays = [[k for k, row in enumerate(index) if keep[row]] for index in rows.of]

    def part(values: Sequence[Sequence[Any]]) -> list[list[Any]]:
        return [[row[k] for k in places] for row, places in zip(values, stays, strict=True)]

    columns = zip(part(whole.chunks), part(whole.special), part(whole.spans), strict=True)
    chunks = [Chunk(*values) for values in columns]
    return Tokenized(whole.text, chunks, part(whole.keep)), rows._replace(of=part(rows.of))
