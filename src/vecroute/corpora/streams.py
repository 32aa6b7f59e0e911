"""Predict rows of any source, one after the other."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from vecroute.classifier.columns import is_dataset, sample_column
from vecroute.corpora.answers import class_names, predicting
from vecroute.corpora.shards import ROWS
from vecroute.io.predictions import fresh
from vecroute.io.samples import text_of


def predict_rows(
    classifier: Any, rows: Iterable[dict[str, Any]], *, text: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield each row with its label and its probabilities after its own cells, in order.

    Only some rows are in memory at a time, so a streamed ``datasets.IterableDataset`` may be larger than the
    disk. A row without text gets an empty label and no probabilities.

    Args:
        classifier: a fitted ``RoutingClassifier`` of texts.
        rows: a ``datasets.Dataset``, streamed or not, or any iterable of dicts.
        text: the column of texts. None for "text", or for the only column of strings.

    Raises:
        ValueError, TypeError: a row is no dict, there is no such column, or a cell is no text.
    """
    if not isinstance(rows, Iterable):
        raise TypeError(f"rows must be an iterable of dicts, got {type(rows).__name__}")
    names, answer = class_names(classifier), predicting(classifier)
    stream, n = iter(rows), 0
    while some := list(itertools.islice(stream, ROWS)):
        for k, row in enumerate(some, n + 1):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {k} of rows must be a dict, got {type(row).__name__}")
        if text is None:
            known = is_dataset(rows) and getattr(rows, "features", None) is not None
            text = sample_column(rows, False, None if known else some[0])
        for k, row in enumerate(some, n + 1):
            if text not in row:
                raise ValueError(f"row {k} of rows must have the column {text!r}, it has {sorted(row)}")
        texts = [text_of(row, text, "rows", k) for k, row in enumerate(some, n + 1)]
        for row, found in zip(some, answer(texts), strict=True):
            label, probabilities = fresh(["label", "probabilities"], row)
            yield row | {label: found.label, probabilities: dict(zip(names, found.p, strict=False))}
        n += len(some)
