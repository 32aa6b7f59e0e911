"""Compare heads on one's own texts: the same texts to learn from and to test on, several seeds."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vecroute.classifier import RoutingClassifier
from vecroute.heads import HEADS
from vecroute.labels import check_labels, check_texts, split
from vecroute.ops.checks import check_choice, check_size

FLIPS = 10_000  # of signs, for the paired test


def compare(
    texts: Any,
    labels: Any,
    heads: Sequence[str] = tuple(HEADS),
    *,
    seeds: int = 5,
    test: tuple[Any, Any] | None = None,
    test_fraction: float = 0.2,
    step: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Fit every head with every seed, and test all on the same texts.

    Args:
        texts, labels: to learn from, as in ``RoutingClassifier.fit``.
        heads: names out of ``vecroute.heads.HEADS``. The others are compared with the first.
        seeds: how many.
        test: texts and labels to test on, None to keep out a part of the others.
        test_fraction: that part.
        step: called with a row for each classifier that was fitted.
        options: of ``RoutingClassifier``.

    Returns:
        A row for each head: accuracy (mean over the seeds) and spread (their standard deviation), difference
        to the first head and the p-value of a paired test of it, seconds to fit, parameters.
    """
    check_size("seeds", seeds)
    for head in heads:
        check_choice("heads", head, tuple(HEADS))
    texts = check_texts(texts)
    y = list(labels)
    if test is None:
        train_on, test_on = split(check_labels(y, len(texts)), test_fraction, 0, False)
        test = [texts[k] for k in test_on], [y[k] for k in test_on]
        texts, y = [texts[k] for k in train_on], [y[k] for k in train_on]
    tested, truth = check_texts(test[0]), np.array([str(label) for label in test[1]])  # [n]
    right: dict[str, np.ndarray] = {}  # [seeds, n] each
    rows = []
    for head in heads:
        found, seconds = [], []
        for seed in range(seeds):
            classifier = RoutingClassifier(**options, head=head, random_state=seed)
            started = time.perf_counter()
            classifier.fit(texts, y)
            seconds.append(time.perf_counter() - started)
            found.append(classifier.predict(tested).astype(str) == truth)  # [n]
            if step:
                step({"head": head, "seed": seed, "accuracy": float(found[-1].mean())})
        right[head] = np.array(found)  # [seeds, n]
        accuracy = right[head].mean(1)  # [seeds]
        gain = right[head].mean(0) - right[heads[0]].mean(0)  # [n]
        rows.append(
            {
                "head": head,
                "accuracy": float(accuracy.mean()),
                "spread": float(accuracy.std(ddof=1)) if seeds > 1 else None,
                "difference": float(gain.mean()),
                "p": paired_test(gain),
                "seconds": float(np.mean(seconds)),
                "parameters": sum(p.numel() for p in classifier.head_.parameters()),
            }
        )
    return rows


def paired_test(gain: np.ndarray, seed: int = 0) -> float:
    """How likely a mean as far from 0 is if the sign of each gain [n] were a coin's: two-sided, by flips."""
    gain = gain[gain != 0]
    if not len(gain):
        return 1.0
    generator, found = np.random.default_rng(seed), 0
    for _ in range(FLIPS // 100):
        signs = generator.choice((-1.0, 1.0), (100, len(gain)))  # [100, n]
        found += int((np.abs(signs @ gain) >= abs(gain.sum()) - 1e-9).sum())
    return (found + 1) / (FLIPS + 1)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print what ``compare`` found as a table."""
    from rich.console import Console
    from rich.table import Table

    columns = ("head", "accuracy", "spread", f"minus {rows[0]['head']}", "p", "seconds", "parameters")
    table = Table(*columns, box=None)
    for row in rows:
        spread = "" if row["spread"] is None else f"{row['spread']:.4f}"
        first = row is rows[0]
        table.add_row(
            row["head"],
            f"{row['accuracy']:.4f}",
            spread,
            "" if first else f"{row['difference']:+.4f}",
            "" if first else f"{row['p']:.4f}",
            f"{row['seconds']:.1f}",
            f"{row['parameters']:,}",
        )
    Console().print(table)
