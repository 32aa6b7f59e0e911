"""Compare heads on your own texts: the same training and test texts, several seeds."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vecroute.classifier.estimator import RoutingClassifier
from vecroute.classifier.fitting import features_of
from vecroute.classifier.labels import check_labels, check_texts, split
from vecroute.classifier.predicting import scores_of_batches
from vecroute.encoders.features import Features
from vecroute.encoders.text import Batch, length_batches
from vecroute.heads import HEADS
from vecroute.ops.checks import check_choice, check_size
from vecroute.training.loop import BATCH_BYTES, make_accelerator

WIDTH = 100  # width of the table in characters
NEITHER = {"calibrate": False, "estimate": False}  # not needed: the test texts measure the accuracy
FLIPS = 10_000  # random sign flips in the paired test


class Result(NamedTuple):
    """The test result of one fitted classifier."""

    right: np.ndarray  # [n] True where a test text is classified correctly
    seconds: float  # time to fit
    parameters: int


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

    All heads have the same recipe, by default the recipe of ``RoutingClassifier``. It may not be the best
    recipe for each head. There is one difference. For heads that weight each hidden state, each step drops
    0.8 of the hidden states and 0.3 of the features. For heads that take means or one position, it drops
    nothing.

    Args:
        texts, labels: training data, as in ``RoutingClassifier.fit``.
        heads: names from ``vecroute.heads.HEADS``. The others are compared with the first.
        seeds: number of seeds.
        test: texts and labels for the test, None to take a part of the training data.
        test_fraction: share of the training data to take if test is None.
        step: called with a row for each fitted classifier.
        options: options of ``RoutingClassifier``.

    Returns:
        A row for each head: accuracy (mean over the seeds) and spread (standard deviation), the difference to
        the first head and its p-value in a paired test, seconds to fit (without the hidden states, which are
        computed once for all), and parameters.
    """
    check_size("seeds", seeds)
    for head in heads:
        check_choice("heads", head, tuple(HEADS))
    texts = check_texts(texts)
    y = list(labels)
    known = check_labels(y, len(texts))
    if test is None:
        train_on, test_on = split(known, test_fraction, 0, False)
        if not test_on:
            n, n_cls = len(texts), len(known.classes)
            raise ValueError(
                f"test must be texts and labels, because {n} texts of {n_cls} classes are too few to take "
                f"{test_fraction:g} of them for the test, got None"
            )
        test = [texts[k] for k in test_on], [y[k] for k in test_on]
        texts, y = [texts[k] for k in train_on], [y[k] for k in train_on]
    tested, truth = check_texts(test[0]), np.array([str(label) for label in test[1]])  # [n]
    if len(truth) != len(tested):
        raise ValueError(f"test must have a label for each text, got {len(truth)} for {len(tested)} texts")
    accelerator = make_accelerator(options.get("device"))
    prepared = features_of(RoutingClassifier(**options), [*texts, *tested], accelerator)
    features = Features(prepared.encoder, tested, prepared.cache)
    results: list[list[Result]] = []  # for each head, one per seed
    for head in heads:
        results.append([])
        for seed in range(seeds):
            classifier = RoutingClassifier(**{**NEITHER, **options}, head=head, random_state=seed)
            result = fit_and_test(classifier, texts, y, features, truth)
            results[-1].append(result)
            if step:
                step({"head": head, "seed": seed, "accuracy": float(result.right.mean())})
    return [summary(head, own, results[0]) for head, own in zip(heads, results, strict=True)]


def fit_and_test(
    classifier: RoutingClassifier, texts: list[str], y: list[Any], features: Features, truth: np.ndarray
) -> Result:
    """Fit to texts and labels, and test on other hidden states with the true labels [n]."""
    started = time.perf_counter()
    classifier.fit(texts, y)
    seconds = time.perf_counter() - started
    scores = scores_of_batches(classifier.head_, batches(features))  # [n, n_cls]
    predicted = classifier.classes_[scores.argmax(-1).numpy()]  # [n]
    parameters = sum(p.numel() for p in classifier.head_.parameters())
    return Result(predicted.astype(str) == truth, seconds, parameters)


def batches(features: Features) -> Iterator[Batch]:
    """Return all hidden states in batches of similar length."""
    for which in length_batches(features.lengths, max(BATCH_BYTES // features.position_bytes, 1)):
        yield Batch(which, *features.batch(which))


def summary(head: str, own: list[Result], first: list[Result]) -> dict[str, Any]:
    """Return the row of a head, from its results and the results of the first head with every seed."""
    right, others = (np.array([result.right for result in some]) for some in (own, first))  # [seeds, n]
    accuracy, gain = right.mean(1), right.mean(0) - others.mean(0)  # [seeds], [n]
    return {
        "head": head,
        "accuracy": float(accuracy.mean()),
        "spread": float(accuracy.std(ddof=1)) if len(own) > 1 else None,
        "difference": float(gain.mean()),
        "p": paired_test(gain),
        "seconds": float(np.mean([result.seconds for result in own])),
        "parameters": own[0].parameters,
    }


def paired_test(gain: np.ndarray, seed: int = 0) -> float:
    """Return the p-value of the mean gain [n] in a two-sided test with random signs."""
    gain = gain[gain != 0]
    if not len(gain):
        return 1.0
    generator, found = np.random.default_rng(seed), 0
    for _ in range(FLIPS // 100):
        signs = generator.choice((-1.0, 1.0), (100, len(gain)))  # [100, n]
        found += int((np.abs(signs @ gain) >= abs(gain.sum()) - 1e-9).sum())
    return (found + 1) / (FLIPS + 1)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the result of ``compare`` as a table, with the best value of each column in bold."""
    from rich.console import Console
    from rich.table import Table

    first = rows[0]["head"]
    columns = ("head", "accuracy", "spread", f"minus {first}", "p", "seconds", "parameters", "")
    table = Table(*columns, box=None)
    best = {"accuracy": max(row["accuracy"] for row in rows)}
    best |= {name: min(row[name] for row in rows) for name in ("seconds", "parameters")}

    def cell(row: dict[str, Any], name: str, form: str) -> str:
        text = format(row[name], form)
        return f"[bold]{text}[/bold]" if len(rows) > 1 and row[name] == best[name] else text

    for row in rows:
        others = ("", "") if row is rows[0] else (f"{row['difference']:+.4f}", f"{row['p']:.4f}")
        table.add_row(
            row["head"],
            cell(row, "accuracy", ".4f"),
            "" if row["spread"] is None else f"{row['spread']:.4f}",
            *others,
            cell(row, "seconds", ".1f"),
            cell(row, "parameters", ","),
            "best" if len(rows) > 1 and row["accuracy"] == best["accuracy"] else "",
        )
    console = Console()
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(table)
    told = (
        "Higher accuracy, fewer seconds and fewer parameters are better. spread: standard deviation over the "
        f"seeds. p: the probability that chance alone makes such a large difference to {first}."
    )
    console.print(told, highlight=False, markup=False)
