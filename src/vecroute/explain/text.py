"""Explanations of texts: what each word, or each hidden state, adds to the scores of a head."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecroute.encoders.text import TextEncoder, Tokenized, strip_span
from vecroute.explain.hidden import explain_states_of
from vecroute.explain.words import split_words, text_readings

ALL_DEPTHS = "all depths"


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


def rows_of(encoder: TextEncoder, text: Tokenized) -> Rows:
    """A token that several chunks have read has one row, in the chunk from which it goes to the head."""
    # How many tokens the next chunk starts after the last, where chunks overlap.
    step = encoder.max_length - encoder.tokenizer.num_special_tokens_to_add(pair=False) - encoder.stride
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


def split_texts(
    encoder: TextEncoder,
    head: nn.Module,
    texts: Sequence[Tokenized],
    outputs: Sequence[Sequence[int]],
    *,
    rows: Sequence[Rows],
    by_depth: bool = False,
    margin: bool = False,
) -> list[TextSplit]:
    """Split scores of texts into what their words add, in batches of similar length.

    Args:
        outputs: the classes to explain of each text, by number, as many for each.
        rows: of each text.
        by_depth, margin: see ``split_words``.
    """
    found: list[Any] = [None] * len(texts)
    for which, reading in text_readings(encoder, texts):
        chosen = torch.tensor([list(outputs[k]) for k in which])  # [b, k]
        split = split_words(reading, head, chosen, by_depth=by_depth, margin=margin)
        chunks = [values for run in split.values for values in run]  # [n, depth or 1, k] each
        at = 0
        for b, k in enumerate(which):
            own = chunks[at : at + len(texts[k].chunks)]
            at += len(own)
            values = own[0].new_zeros(len(rows[k].start), *own[0].shape[1:])  # [n_rows, depth or 1, k]
            for index, part in zip(rows[k].of, own, strict=True):
                values.index_add_(0, torch.tensor(index, device=values.device), part[: len(index)])
            found[k] = TextSplit(values, split.base[b], split.scores[b], split.all_scores[b])
    return found


def explain_words(
    encoder: TextEncoder,
    head: nn.Module,
    texts: Sequence[str],
    outputs: Sequence[Sequence[int]],
    *,
    by_depth: bool = False,
) -> list[tuple[dict[str, Any], Tensor]]:
    """What each word of each text adds to some outputs of a head: fields of explanations, and all scores.

    Args:
        encoder, head: a frozen encoder, and a head on its hidden states.
        outputs: the classes to explain of each text, by number, as many for each.
        by_depth: whether to say by way of the hidden states of which depth.
    """
    tokenized = encoder.tokenize(texts)
    rows = [rows_of(encoder, text) for text in tokenized]
    splits = split_texts(encoder, head, tokenized, outputs, rows=rows, by_depth=by_depth)
    depths = encoder.depths if by_depth else [ALL_DEPTHS]
    return [
        (fields_of(encoder, *columns, depths), columns[-1].all_scores)
        for columns in zip(texts, rows, splits, strict=True)
    ]


def fields_of(
    encoder: TextEncoder, text: str, rows: Rows, split: TextSplit, depths: Sequence[Any]
) -> dict[str, Any]:
    return {
        "of": "words",
        "values": split.values,
        "base_values": split.base,
        "scores": split.scores,
        "depths": depths,
        **_tokens(encoder, text, rows),
    }


def explain_states(
    encoder: TextEncoder, head: nn.Module, texts: Sequence[str], outputs: Sequence[Sequence[int]]
) -> list[tuple[dict[str, Any], Tensor]]:
    """What each hidden state, of each token at each depth, adds to some outputs: fields, and all scores."""
    tokenized = encoder.tokenize(texts)
    found: list[Any] = [None] * len(texts)
    for batch in encoder.batches(tokenized):
        chosen = torch.tensor([list(outputs[k]) for k in batch.which])  # [b, k]
        explained = explain_states_of(head, batch.hidden, batch.mask, chosen)
        for k, (fields, scores) in zip(batch.which, explained, strict=True):
            tokens = _tokens(encoder, texts[k], tokenized[k].tokens())
            found[k] = {"of": "states", **fields, **tokens, "depths": encoder.depths}, scores
    return found


def _tokens(encoder: TextEncoder, text: str, rows: Any) -> dict[str, Any]:
    """The fields that say what the rows are."""
    spans = list(zip(rows.start, rows.end, strict=True))
    names = encoder.tokenizer.convert_ids_to_tokens(rows.ids)
    pieces = [
        name if special else text[start:end]
        for name, special, (start, end) in zip(names, rows.special, spans, strict=True)
    ]
    return {"text": text, "offsets": spans, "pieces": pieces, "special": rows.special, "chunk": rows.chunk}
