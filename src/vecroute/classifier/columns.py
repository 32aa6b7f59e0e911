"""Read columns of Hugging Face datasets, without importing their package: duck typing recognises them."""

from typing import Any

import numpy as np

TEXTS, IMAGES, LABELS = ("text", "sentence"), ("image", "img"), ("label", "labels")


def is_dataset(X: Any) -> bool:
    """Return whether X is a ``datasets.Dataset``."""
    return hasattr(X, "features") and hasattr(X, "column_names") and hasattr(X, "__getitem__")


def is_splits(X: Any) -> bool:
    """Return whether X is a ``datasets.DatasetDict``: a dict of datasets by split name."""
    return isinstance(X, dict) and bool(X) and all(is_dataset(part) for part in X.values())


def samples_of(X: Any, images: bool) -> Any:
    """Return the column of texts or images of a dataset, and anything else unchanged.

    Raises:
        ValueError: no column fits, several fit, or X has splits and the caller must choose one.
    """
    if is_splits(X):
        raise ValueError(f"X must be one split of the dataset, such as X[{min(X)!r}], got {sorted(X)}")
    if not is_dataset(X):
        return X
    kind = "images" if images else "texts"
    known = IMAGES if images else TEXTS
    typed = [name for name, feature in X.features.items() if is_of(feature, images)]
    return list(X[choose(X, known, typed, kind)])


def labels_of(X: Any) -> np.ndarray:
    """Return the labels of a dataset, as class names if the dataset has names for its classes.

    Raises:
        ValueError: no column fits, several fit, or a label is missing (-1 in datasets).
    """
    typed = [name for name, feature in X.features.items() if hasattr(feature, "int2str")]
    column = choose(X, LABELS, typed, "labels")
    labels, names = list(X[column]), getattr(X.features[column], "names", None)
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


def choose(X: Any, known: tuple[str, ...], typed: list[str], kind: str) -> str:
    """Return the column with one of the known names, else the only column of the right type."""
    found = [name for name in known if name in X.column_names] or typed
    if len(found) != 1 and not (found and found[0] in known):
        hint = f"name one of them {known[0]!r} by rename_column"
        raise ValueError(f"X must have one column of {kind}, got the columns {X.column_names}: {hint}")
    return found[0]
