"""Check texts and labels in every form that ``fit`` accepts, and convert them for training."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from sklearn.preprocessing import MultiLabelBinarizer  # type: ignore[import-untyped]
from sklearn.utils.class_weight import compute_class_weight  # type: ignore[import-untyped]
from torch import Tensor

from vecroute.io.cells import is_missing, is_whole, shortened
from vecroute.ops.checks import check_number
from vecroute.training.recipe import FEW

N_EXAMPLES = 3  # a classifier stores at most this many texts
FEWEST_VALIDATED = 10  # with fewer validation samples, the accuracy is only noise


class Labels(NamedTuple):
    """All classes, and the classes of each sample."""

    classes: np.ndarray  # [n_cls]
    targets: Tensor  # [n, n_cls], 1 at the classes of a sample


def check_texts(X: Any, name: str = "X", first: int = 0) -> list[str]:
    """Convert texts to a list of strings. Errors use the given name and count rows from ``first``.

    Raises:
        TypeError: X is a single string, or a row is not a string.
        ValueError: X is empty, or a text is missing, empty or has half of a surrogate pair.
    """
    if isinstance(X, str):
        raise TypeError(f"{name} must be a list of texts, got one string: put it in a list")
    if not isinstance(X, Iterable) or isinstance(X, dict | set):
        raise TypeError(f"{name} must be a list of texts, got {type(X).__name__}")
    rows = np.asarray(X, dtype=object) if hasattr(X, "__array__") else list(X)
    if isinstance(rows, np.ndarray):
        if rows.ndim != 1 and rows.size != len(rows):
            raise ValueError(f"{name} must be a list of texts, got an array {list(rows.shape)}")
        rows = rows.reshape(-1).tolist()
    if not rows:
        raise ValueError(f"{name} must be a list of texts, got none")
    for k, text in enumerate(rows, first):
        if is_missing(text):
            raise ValueError(f"{name} must be a list of texts, row {k} is missing ({text})")
        if not isinstance(text, str):
            raise TypeError(f"{name} must be a list of texts, row {k} is {text!r} ({type(text).__name__})")
        if not text.strip():
            raise ValueError(f"{name} must be a list of texts, row {k} is empty")
        if not is_whole(text):
            raise ValueError(f"{name} must be a list of texts, row {k} has half of a surrogate pair")
    return [str(text) for text in rows]


def check_labels(y: Any, n: int, name: str = "y", n_train: int | None = None) -> Labels:
    """Check labels, one for each of n texts. Errors use the given name.

    Args:
        n_train: number of texts for training. The others, which come after them, are for validation and must
            have no other labels. None if all are for training.

    Raises:
        ValueError: the number of labels differs, a label is missing, there is only one class, or a class has
            only one example.
    """
    y = list(y) if isinstance(y, Iterator) else y
    labels = np.asarray(y)
    if labels.dtype.kind in "US" and not hasattr(y, "dtype"):
        labels = np.asarray(y, dtype=object)  # as strings, a missing label would become the class "nan"
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(
            f"{name} must be one label for each text, got an array {list(labels.shape)}; "
            "for several labels at once use multi_label=True"
        )
    check_count(len(labels), n)
    for k, label in enumerate(labels.tolist()):
        if is_missing(label):
            raise ValueError(f"{name} must be one label for each text, row {k} is missing ({label})")
    if labels.dtype == object and all(isinstance(label, str) for label in labels):
        labels = labels.astype(str)
    try:
        classes, index, counts = np.unique(labels, return_inverse=True, return_counts=True)
    except TypeError as error:
        raise ValueError(f"{name} must be labels of one type, got a mixture: {error}") from error
    if len(classes) < 2:
        raise ValueError(f"{name} must have two classes or more, all have the label {classes[0]!s}")
    found = Labels(classes, torch.from_numpy(np.eye(len(classes), dtype=np.float32)[index]))
    check_validation_labels(found, n_train)
    if counts.min() < 2:
        few = ", ".join(shortened(str(label)) for label in classes[counts < 2][:5])
        raise ValueError(f"{name} must have two examples or more of each class, got one of: {few}")
    return found


def check_label_sets(y: Any, n: int, n_train: int | None = None) -> Labels:
    """Check any number of labels for each of n texts: collections of labels, or a table of zeros and ones.

    ``n_train`` is the same as in ``check_labels``.
    """
    if hasattr(y, "columns"):
        classes, table = np.asarray(y.columns), np.asarray(y)
    else:
        rows = y if isinstance(y, np.ndarray) and y.ndim == 2 else list(y)
        if not isinstance(rows, np.ndarray) and is_table(rows):
            rows = np.asarray(rows)
        if isinstance(rows, np.ndarray):
            classes, table = np.arange(rows.shape[1]), rows
        else:
            if any(isinstance(row, str) or not isinstance(row, Iterable) for row in rows):
                raise ValueError("y must be a collection of labels for each text if multi_label=True")
            for k, row in enumerate(rows):
                if any(is_missing(label) for label in row):
                    raise ValueError(
                        f"y must be a collection of labels for each text, row {k} has a missing label"
                    )
            binarizer = MultiLabelBinarizer()
            table = binarizer.fit_transform(rows)
            classes = binarizer.classes_
            if all(isinstance(label, str) for label in classes):
                classes = classes.astype(str)
    check_count(len(table), n)
    if not np.isin(table, (0, 1)).all():
        raise ValueError("y must be a table of zeros and ones if multi_label=True")
    if len(classes) < 1:
        raise ValueError("y must have at least one label, got none")
    found = Labels(classes, torch.from_numpy(table.astype(np.float32)))
    check_validation_labels(found, n_train)
    return found


def joined(y: Any, y_valid: Any, n: int, n_valid: int) -> Any:
    """Return the labels of n texts for training, followed by the labels of n_valid texts for validation.

    Raises:
        ValueError: the number of labels differs from the number of texts, or tables have different columns.
    """
    y, y_valid = (list(part) if isinstance(part, Iterator) else part for part in (y, y_valid))
    check_count(len(y), n)
    if len(y_valid) != n_valid:
        raise ValueError(
            f"validation must have one label for each of its {n_valid} texts, got {len(y_valid)}"
        )
    if getattr(y, "ndim", 1) == 1 and getattr(y_valid, "ndim", 1) == 1:
        return [*y, *y_valid]
    known, other = (list(getattr(part, "columns", range(np.shape(part)[-1]))) for part in (y, y_valid))
    if known != other:
        raise ValueError(f"validation must have the columns of labels of y, {known}, got {other}")
    if hasattr(y, "vstack"):  # polars
        return y.vstack(y_valid)
    table = np.concatenate([np.asarray(y), np.asarray(y_valid)])  # [n + n_valid, n_cls]
    return type(y)(table, columns=y.columns) if hasattr(y, "columns") else table


def check_validation_labels(labels: Labels, n: int | None) -> None:
    """Raise ValueError if a class has no sample among the first n, which are for training."""
    if n is None:
        return
    new = labels.classes[(labels.targets[:n].sum(0) == 0) & (labels.targets[n:].sum(0) > 0)].tolist()
    if new:
        named = ", ".join(repr(shortened(label) if isinstance(label, str) else label) for label in new[:5])
        raise ValueError(f"validation must have labels of y alone, got {named}, which y does not have")


def check_count(n_labels: int, n_texts: int) -> None:
    if n_labels != n_texts:
        raise ValueError(f"y must be one label for each of the {n_texts} texts in X, got {n_labels}")


def is_table(rows: list) -> bool:
    """Return whether all rows have the same length and hold only zeros and ones."""
    return (
        len({len(row) if isinstance(row, list | tuple) else -1 for row in rows}) == 1
        and isinstance(rows[0], list | tuple)
        and len(rows[0]) > 0
        and all(cell in (0, 1) and not isinstance(cell, str) for row in rows for cell in row)
    )


def split(
    labels: Labels, fraction: float | None, seed: int, multi_label: bool
) -> tuple[list[int], list[int]]:
    """Split samples into those for training and a stratified fraction for validation.

    A fraction of None means a tenth, or none at all if there are few samples. If the fraction has too few
    samples to measure an accuracy, all samples are used for training.
    """
    if fraction is not None:
        check_number("validation_fraction", fraction)
    if fraction is not None and not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction must be from 0 to less than 1, got {fraction}")
    n, n_cls = labels.targets.shape
    if fraction is None:
        fraction = 0.1 if n >= FEW else 0.0
    n_valid = max(round(fraction * n), n_cls)
    if not fraction or n_valid < FEWEST_VALIDATED or n < 4 * n_cls:
        return list(range(n)), []
    strata = None if multi_label else labels.targets.argmax(1).numpy()
    train, valid = train_test_split(np.arange(n), test_size=n_valid, random_state=seed, stratify=strata)
    return sorted(train.tolist()), sorted(valid.tolist())


def examples(samples: list[Any], labels: Labels) -> list[str]:
    """Return up to three texts: the first of each class, then the second of each. Images give none."""
    rank = (labels.targets.cumsum(0) * labels.targets).amax(1)  # [n] samples of its class so far
    order = rank.argsort(stable=True).tolist()
    return list(dict.fromkeys(samples[k] for k in order if isinstance(samples[k], str)))[:N_EXAMPLES]


def class_weights(wanted: Any, labels: Labels, multi_label: bool) -> Tensor | None:
    """Return the factors [n_cls] for the loss of each class, from None, "balanced" or a dict by label."""
    if wanted is None:
        return None
    if multi_label and wanted == "balanced":
        raise ValueError("class_weight must be None or a dict if multi_label=True, got 'balanced'")
    classes = labels.classes
    if isinstance(wanted, dict):
        unknown = [label for label in wanted if label not in classes.tolist()]
        if unknown:
            raise ValueError(f"class_weight must have labels from {classes.tolist()}, got {unknown[0]!r}")
        return torch.tensor([float(wanted.get(label, 1.0)) for label in classes.tolist()])
    if wanted != "balanced":
        raise ValueError(f"class_weight must be None, 'balanced' or a dict, got {wanted!r}")
    index = classes[labels.targets.argmax(1).numpy()]
    return torch.from_numpy(compute_class_weight("balanced", classes=classes, y=index)).float()
