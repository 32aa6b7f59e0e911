"""Read columns of data frames and datasets, without importing their packages: duck typing recognises them."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

TEXTS, IMAGES, LABELS = ("text", "sentence"), ("image", "img"), ("label", "labels")


def is_dataset(X: Any) -> bool:
    """Return whether X is a ``datasets.Dataset``, streamed or not, or a data frame."""
    return (hasattr(X, "features") and hasattr(X, "column_names")) or is_frame(X)


def is_frame(X: Any) -> bool:
    """Return whether X is a data frame of pandas or polars."""
    return hasattr(X, "columns") and hasattr(X, "dtypes") and hasattr(X, "__getitem__")


def is_splits(X: Any) -> bool:
    """Return whether X is a ``datasets.DatasetDict``: a dict of datasets by split name."""
    return isinstance(X, dict) and bool(X) and all(is_dataset(part) for part in X.values())


def samples_of(X: Any, images: bool) -> Any:
    """Return the column of texts or images of a dataset, and anything else unchanged.

    A streamed dataset gives an iterator, any other dataset a list.

    Raises:
        ValueError: no column fits, several fit, or X has splits and the caller must choose one.
    """
    if is_splits(X):
        raise ValueError(f"X must be one split of the dataset, such as X[{min(X)!r}], got {sorted(X)}")
    if not is_dataset(X):
        return X
    if not hasattr(X, "__len__"):
        return streamed(X, images)
    return list(X[sample_column(X, images)])


def sample_column(X: Any, images: bool, row: dict[str, Any] | None = None) -> str:
    """Return the name of the column of texts or images.

    Args:
        X: a dataset or data frame.
        row: the first row, where the dataset does not know its columns.
    """
    known, kind = (IMAGES, "images") if images else (TEXTS, "texts")
    if row is not None:
        typed = [name for name, cell in row.items() if isinstance(cell, str) and not images]
    elif is_frame(X):
        cells = {name: next(iter(X[name]), None) for name in X.columns}
        typed = [name for name, cell in cells.items() if isinstance(cell, str) and not images]
        typed = list(X.columns) if len(X.columns) == 1 else typed
    else:
        typed = [name for name, feature in X.features.items() if is_of(feature, images)]
    return choose(names_of(X, row), known, typed, kind)


def names_of(X: Any, row: dict[str, Any] | None = None) -> list[str]:
    return list(row if row is not None else X.columns if is_frame(X) else X.column_names)


def streamed(X: Any, images: bool) -> Iterator[Any]:
    """Yield the cells of the column of texts or images of a streamed dataset."""
    rows = iter(X)
    first = next(rows, None)
    if first is not None:
        column = sample_column(X, images, first if X.features is None else None)
        yield from (row[column] for row in itertools.chain([first], rows))


def labels_of(X: Any) -> np.ndarray:
    """Return the labels of a dataset, as class names if the dataset has names for its classes.

    Raises:
        ValueError: no column fits, several fit, or a label is missing (-1 in datasets).
    """
    features = getattr(X, "features", None) or {}
    typed = [name for name, feature in features.items() if hasattr(feature, "int2str")]
    first: Any = None if is_frame(X) or X.features else next(iter(X), {})
    column = choose(names_of(X, first), LABELS, typed, "labels")
    labels, names = list(X[column]), getattr(features.get(column), "names", None)
    if not names:
        return np.array(labels, dtype=object)
    for k, label in enumerate(labels):
        if label is None or label < 0:
            raise ValueError(f"column {column!r} of X must have a label for each text, row {k} has {label}")
    return np.array([names[label] for label in labels], dtype=object)


def samples_and_labels(X: Any, y: Any, validation: Any, images: bool) -> tuple[Any, Any, Any]:
    """Return X, y and validation of ``fit``, where X may be a dataset or a dict of splits such as "train"."""
    if is_splits(X):
        if "train" not in X:
            raise ValueError(f"X must have the split 'train', got {sorted(X)}")
        if validation is None and "validation" in X:
            validation = X["validation"]
        X = X["train"]
    if validation is not None and is_dataset(validation):
        validation = samples_of(validation, images), labels_of(validation)
    if is_dataset(X):
        X, y = samples_of(X, images), labels_of(X) if y is None else y
    if y is None:
        raise TypeError("y must be a label for each text, got None")
    return X, y, validation


def is_of(feature: Any, images: bool) -> bool:
    return type(feature).__name__ == "Image" if images else getattr(feature, "dtype", None) == "string"


def choose(names: list[str], known: tuple[str, ...], typed: list[str], kind: str) -> str:
    """Return the column with one of the known names, else the only column of the right type."""
    found = [name for name in known if name in names] or typed
    if len(found) != 1 and not (found and found[0] in known):
        raise ValueError(
            f"X must have one column of {kind}, got the columns {names}: rename one of them to {known[0]!r}"
        )
    return found[0]
