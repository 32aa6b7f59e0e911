"""Words explained with samples: means over random sub-texts, slower and more faithful.

A word counts in other ways when other words are gone. So its value is the mean of what it adds over random
sub-texts that contain it. The base is that of the full text. The means do not add up to its score: what is
missing is called *not explained*.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.encoders.text import TextEncoder, Tokenized
from vecroute.explain.segment import locate, words
from vecroute.explain.text import ALL_DEPTHS, Rows, fields_of, rows_of, split_texts


def check_samples(samples: Any, of: str, images: bool, by_depth: bool) -> None:
    """Raise unless samples is an even number, 0 where there are no words to leave out."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0 or samples % 2:
        raise ValueError(f"samples must be an even number, 0 for none, got {samples!r}")
    if samples and of != "words":
        raise ValueError(f"samples are for of='words', got of={of!r}")
    if samples and images:
        raise ValueError("samples are for texts: an encoder of images always sees all patches")
    if samples and by_depth:
        raise ValueError("samples are for all depths together, got by_depth=True")


def explain_samples(
    encoder: TextEncoder,
    head: nn.Module,
    texts: Sequence[str],
    outputs: Sequence[Sequence[int]],
    samples: int,
    *,
    seed: int = 0,
) -> list[tuple[dict[str, Any], Tensor]]:
    """What each word adds, as a mean over random sub-texts: fields of explanations, and all scores.

    Args:
        samples: how many sub-texts of each text, an even number: they come in pairs, and each word is in one
            of the two.
        seed: of the sub-texts.
    """
    tokenized = encoder.tokenize(texts)
    rows = [rows_of(encoder, text) for text in tokenized]
    full = split_texts(encoder, head, tokenized, outputs, rows=rows)
    found = []
    for text, whole, own, split, chosen in zip(texts, tokenized, rows, full, outputs, strict=True):
        group = words_of(own, text)  # [n] which word each row is, -1 for special tokens
        if len(set(group) - {-1}) > 1:
            values = sampled(encoder, head, whole, own, group, split.values, chosen, samples, seed)
            missing = split.scores - split.base - values.sum((0, 1))  # [k]
            split = split._replace(values=values)
        else:
            missing = torch.zeros_like(split.scores)  # [k]
        fields = fields_of(encoder, text, own, split, [ALL_DEPTHS])
        found.append(({**fields, "not_explained": missing}, split.all_scores))
    return found


def words_of(rows: Rows, text: str) -> list[int]:
    """The word of each row, by its number; -1 for special tokens, which always stay."""
    parts = words(text)
    spans = list(zip(rows.start, rows.end, strict=True))
    return [-1 if special else word for special, word in zip(rows.special, locate(spans, parts), strict=True)]


def sampled(
    encoder: TextEncoder,
    head: nn.Module,
    whole: Tokenized,
    rows: Rows,
    group: Sequence[int],
    values: Tensor,
    outputs: Sequence[int],
    samples: int,
    seed: int,
) -> Tensor:
    """The means [n, 1, k] of what each row adds, over the sub-texts that contain it."""
    number = torch.tensor(group)  # [n]
    present = sub_texts(sorted(set(group) - {-1}), number, samples, seed)  # [samples, n]
    parts = [part_of(whole, rows, keep.tolist()) for keep in present]
    splits = split_texts(
        encoder,
        head,
        [part for part, _ in parts],
        [list(outputs)] * len(parts),
        rows=[own for _, own in parts],
    )
    total = torch.stack([split.values for split in splits]).sum(0)  # [n, 1, k]
    count = present.sum(0).clamp(min=1).to(total)[:, None, None]  # [n, 1, 1]
    return total / count  # [n, 1, k]


def sub_texts(known: Sequence[int], number: Tensor, samples: int, seed: int) -> Tensor:
    """[samples, n] True at the rows of each sub-text: random halves of the words, and their complements."""
    generator = torch.Generator().manual_seed(seed)
    names = torch.tensor(known)  # [w]
    found = []
    for _ in range(samples // 2):
        half = names[torch.randperm(len(names), generator=generator)[: (len(names) + 1) // 2]]  # [w / 2]
        keep = torch.isin(number, half) | (number < 0)  # [n]
        found += [keep, ~keep | (number < 0)]
    return torch.stack(found)  # [samples, n]


def part_of(whole: Tokenized, rows: Rows, keep: Sequence[bool]) -> tuple[Tokenized, Rows]:
    """A text without some of its rows, in the same chunks; and the rows that its positions are."""
    columns: dict[str, list[Any]] = {name: [] for name in ("chunks", "keep", "special", "spans", "of")}
    for chunk, index in enumerate(rows.of):
        stays = [k for k, row in enumerate(index) if keep[row]]
        for name in ("chunks", "keep", "special", "spans"):
            columns[name].append([getattr(whole, name)[chunk][k] for k in stays])
        columns["of"].append([index[k] for k in stays])
    of = columns.pop("of")
    return Tokenized(whole.text, **columns), rows._replace(of=of)
