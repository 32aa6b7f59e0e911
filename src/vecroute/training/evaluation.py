"""Measure predictions: accuracy, F1, confusion and calibration."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import (  # type: ignore[import-untyped]
    confusion_matrix,
    precision_recall_fscore_support,
)

from vecroute.io.cells import visible

BINS = 15  # bins of confidence, for the calibration error
TOP = 5  # k of top-k accuracy, which is measured if there are more than k classes


def evaluate(truth: Sequence[Any], classes: Sequence[Any], probabilities: np.ndarray) -> dict[str, Any]:
    """Measure predictions for samples whose labels are known. Returns JSON types.

    Args:
        truth: the label of each sample. Labels are compared as strings, because files hold strings.
        classes: the label of each column of the probabilities.
        probabilities: [n, n_cls].
    """
    truth, names = [str(label) for label in truth], [str(label) for label in classes]
    best = probabilities.argmax(1)  # [n]
    predicted = [names[k] for k in best]
    right = np.array([t == p for t, p in zip(truth, predicted, strict=True)])  # [n]
    # A label that the classifier does not know counts as wrong, and gets a row in the tables.
    every = names + sorted(set(truth) - set(names))
    scores = precision_recall_fscore_support(truth, predicted, labels=every, zero_division=0.0)
    columns = ("precision", "recall", "f1", "n")
    per_class = {
        name: dict(zip(columns, [*map(float, row[:3]), int(row[3])], strict=True))
        for name, row in zip(every, zip(*scores, strict=True), strict=True)
    }
    top = np.argsort(-probabilities, 1, kind="stable")[:, :TOP]  # [n, TOP]
    among = [label in {names[j] for j in row} for label, row in zip(truth, top, strict=True)]
    return {
        "accuracy": float(right.mean()),
        **({"top5_accuracy": float(np.mean(among))} if len(names) > TOP else {}),
        "macro_f1": float(np.mean([per_class[name]["f1"] for name in every])),
        "n": len(truth),
        "calibration_error": calibration_error(probabilities.max(1), right),
        "per_class": per_class,
        "labels": every,
        "confusion": confusion_matrix(truth, predicted, labels=every).tolist(),
    }


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the mean of |confidence - accuracy| over the bins, weighted by the samples in each bin."""
    gaps = [abs(mean - accuracy) * n for mean, accuracy, n in confidence_bins(confidence, right)]
    return sum(gaps) / len(right)


def confidence_bins(confidence: np.ndarray, right: np.ndarray) -> list[tuple[float, float, int]]:
    """Return mean confidence, accuracy and number of samples of each bin that is not empty."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)  # [n]
    members = [bins == k for k in np.unique(bins)]  # [n] each
    return [(float(confidence[m].mean()), float(right[m].mean()), int(m.sum())) for m in members]


def show(result: dict[str, Any], samples: str = "texts") -> None:
    """Print the result of ``evaluate`` as tables."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    names = [escape(visible(name)) for name in result["labels"]]  # without markup and control characters
    for key in ("accuracy", "top5_accuracy", "macro_f1", "calibration_error"):
        if key in result:
            name = {"top5_accuracy": "top-5 accuracy", "macro_f1": "macro F1"}.get(key, key.replace("_", " "))
            console.print(f"{name:18}{result[key]:.4f}", highlight=False)
    console.print(f"{samples:18}{result['n']}\n", highlight=False)
    table = Table("class", "precision", "recall", "F1", samples, box=None)
    for name, row in zip(names, result["per_class"].values(), strict=True):
        table.add_row(name, *(f"{row[key]:.4f}" for key in ("precision", "recall", "f1")), str(row["n"]))
    console.print(table)
    confusion = Table("label \\ predicted", *names, box=None)
    for name, row in zip(names, result["confusion"], strict=True):
        confusion.add_row(name, *map(str, row))
    console.print()
    console.print(confusion)
