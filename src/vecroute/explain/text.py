"""Explain texts: what each word, or each hidden state, adds to the scores of a head."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.encoders.text import TextEncoder, Tokenized
from vecroute.explain.captured import split_reading
from vecroute.explain.hidden import explain_states_of
from vecroute.explain.rows import Rows, TextSplit, chunk_step, rows_of
from vecroute.explain.samples import split_samples
from vecroute.explain.words import text_readings

ALL_DEPTHS = "all depths"


def split_texts(
    encoder: TextEncoder,
    head: nn.Module,
    texts: Sequence[Tokenized],
    outputs: Sequence[Sequence[int]],
    rows: Sequence[Rows],
    *,
    by_depth: bool = False,
    margin: bool = False,
) -> list[TextSplit]:
    """Split scores of texts into contributions of their words, in batches of similar length.

    Args:
        outputs: for each text, the indices of the classes to explain, the same number for all texts.
        rows: the rows of each text.
        by_depth, margin: see ``split_words``.
    """
    found: list[Any] = [None] * len(texts)
    for which, reading in text_readings(encoder, texts):
        chosen = torch.tensor([list(outputs[k]) for k in which])  # [b, k]
        split = split_reading(encoder, head, reading, chosen, by_depth=by_depth, margin=margin)
        # One copy from the device for the whole batch: the sums over the rows of a text are small.
        base, scores, all_scores = split.base.cpu(), split.scores.cpu(), split.all_scores.cpu()  # [b, k], ...
        chunks = [values for run in split.values for values in run.cpu()]  # [n, depth or 1, k] each
        at = 0
        for b, k in enumerate(which):
            own = chunks[at : at + len(texts[k].keep)]
            at += len(own)
            found[k] = TextSplit(_rows_from(own, rows[k]), base[b], scores[b], all_scores[b])
    return found


def _rows_from(chunks: Sequence[Tensor], rows: Rows) -> Tensor:
    """Return the values of the rows of a text, [n_rows, depth or 1, k], from those of its chunks."""
    n = len(rows.start)
    if len(chunks) == 1 and len(rows.of[0]) == n:  # each position is a row
        return chunks[0][:n]
    values = chunks[0].new_zeros(n, *chunks[0].shape[1:])  # [n_rows, depth or 1, k]
    for index, part in zip(rows.of, chunks, strict=True):
        values.index_add_(0, torch.tensor(index, dtype=torch.long), part[: len(index)])
    return values


def explain_words(
    encoder: TextEncoder,
    head: nn.Module,
    texts: Sequence[str],
    outputs: Sequence[Sequence[int]],
    *,
    by_depth: bool = False,
    samples: int = 0,
) -> list[tuple[dict[str, Any], Tensor]]:
    """Return what each word of each text adds to some outputs: fields of explanations, and all scores.

    Args:
        encoder, head: a frozen encoder, and a head on its hidden states.
        outputs: for each text, the indices of the classes to explain, the same number for all texts.
        by_depth: True to split values by the depth of the hidden states they go through.
        samples: number of sub-texts to average over; see ``split_samples``. 0 explains the text itself.
    """
    tokenized = encoder.tokenize(texts)
    rows = [rows_of(text, chunk_step(encoder)) for text in tokenized]
    split = partial(split_texts, encoder, head, by_depth=by_depth)
    if samples:
        splits = split_samples(split, tokenized, outputs, rows, samples)
    else:
        splits = [(one, torch.zeros_like(one.scores)) for one in split(tokenized, outputs, rows)]
    depths = encoder.depths if by_depth else [ALL_DEPTHS]
    found = []
    for text, own, (one, missing) in zip(texts, rows, splits, strict=True):
        fields = fields_of(encoder.tokenizer, text, own, one, depths)
        found.append(({**fields, "not_explained": missing}, one.all_scores))
    return found


def fields_of(
    tokenizer: Any, text: str, rows: Rows, split: TextSplit, depths: Sequence[Any]
) -> dict[str, Any]:
    """Return the fields of an explanation of words."""
    return {
        "of": "words",
        "values": split.values,
        "base_values": split.base,
        "scores": split.scores,
        "depths": depths,
        **_tokens(tokenizer, text, rows),
    }


def explain_states(
    encoder: TextEncoder, head: nn.Module, texts: Sequence[str], outputs: Sequence[Sequence[int]]
) -> list[tuple[dict[str, Any], Tensor]]:
    """Return what each hidden state (token and depth) adds to some outputs: fields, and all scores."""
    tokenized = encoder.tokenize(texts)
    found: list[Any] = [None] * len(texts)
    for batch in encoder.batches(tokenized):
        chosen = torch.tensor([list(outputs[k]) for k in batch.which])  # [b, k]
        explained = explain_states_of(head, batch.hidden, batch.mask, chosen)
        for k, (fields, scores) in zip(batch.which, explained, strict=True):
            tokens = _tokens(encoder.tokenizer, texts[k], tokenized[k].tokens())
            found[k] = {"of": "states", **fields, **tokens, "depths": encoder.depths}, scores
    return found


def _tokens(tokenizer: Any, text: str, rows: Any) -> dict[str, Any]:
    """Return the fields of an explanation that describe its rows."""
    spans = list(zip(rows.start, rows.end, strict=True))
    pieces = [
        tokenizer.convert_ids_to_tokens(token) if special else text[start:end]
        for token, special, (start, end) in zip(rows.ids, rows.special, spans, strict=True)
    ]
    return {"text": text, "offsets": spans, "pieces": pieces, "special": rows.special, "chunk": rows.chunk}
