"""A page about a classifier on a data set: how good it is, where it goes wrong and why, what it goes by."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vecroute.explain.html import LEVELS, STYLE, environment, excerpt, heat
from vecroute.explain.shown import account, caption, round_to_sum, shown
from vecroute.training.evaluation import confidence_bins, evaluate

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

N_WRONG = 50  # texts shown that were classified wrongly, the most confident first
N_WORDS = 15  # words shown for each class
FEWEST_USES = 3  # of a word, below which its mean says little
BUDGET = 2_000  # scores explained for words and depths, over texts and classes
FEWEST_EXPLAINED = 50  # texts, however many classes there are
MATRIX = 25  # most labels that a confusion matrix is drawn of
N_CONFUSED = 25  # pairs of labels shown instead
EXCERPT = 120  # words shown of a long text
PLOT = 220  # pixels of the calibration plot


class Word(NamedTuple):
    """A word over a corpus: what it adds to the score of a class beyond those of the other classes."""

    word: str
    uses: int
    mean: float  # for each use
    total: float


class Measured(NamedTuple):
    """What a page says of any classifier, and which samples it is about."""

    filled: dict[str, Any]  # for the template
    names: list[str]  # of the classes
    best: np.ndarray  # [n] the predicted class of each sample
    confidence: np.ndarray  # [n]
    wrong: list[int]  # samples, the most confident first
    explained: list[int]  # samples that words and depths are of


def report(
    classifier: Any, texts: Sequence[str], labels: Sequence[Any], probabilities: np.ndarray, title: str
) -> str:
    """The page, which needs nothing but itself.

    Args:
        classifier: a fitted ``RoutingClassifier``, for one label per text.
        texts, labels: what to measure it on.
        probabilities: [n, n_cls] that it predicts for the texts.
        title: of the page.
    """
    texts, truth = list(texts), [str(label) for label in labels]
    found = measured(classifier, truth, probabilities)
    names, wrong = found.names, found.wrong[:N_WRONG]
    chosen = sorted({*found.explained, *wrong})
    why = dict(zip(chosen, classifier.explain([texts[k] for k in chosen]), strict=True))
    explained = [why[k] for k in found.explained]
    states = explained
    if explained and explained[0].of == "words":  # which say nothing of depths
        states = classifier.explain([texts[k] for k in found.explained], of="states")
    filled = {
        "title": title,
        "samples": "texts",
        "wrong": [wrong_case(why[k], truth[k], names[found.best[k]], found.confidence[k]) for k in wrong],
        # Of two labels, what raises one lowers the other.
        "words": [word_lists(explained, name) for name in (names[1:] if len(names) == 2 else names)],
        "fewest_uses": FEWEST_USES,
        "depths": depth_shares(states),
    }
    return environment().get_template("report.html").render(found.filled | filled | STYLE)


def measured(classifier: Any, truth: Sequence[str], probabilities: np.ndarray) -> Measured:
    """How good a classifier is on samples of these labels, by the probabilities [n, n_cls] it predicts."""
    names = [str(name) for name in classifier.classes_]
    best, confidence = probabilities.argmax(1), probabilities.max(1)  # [n] each
    right = np.array([names[j] == label for j, label in zip(best, truth, strict=True)])  # [n]
    result = evaluate(truth, names, probabilities)
    wrong: list[int] = sorted(np.flatnonzero(~right).tolist(), key=lambda k: -confidence[k])
    explained = spread(len(truth), max(BUDGET // len(names), FEWEST_EXPLAINED))
    filled = {
        "result": result,
        "accuracy": percent(result["accuracy"]),
        "top5": percent(result["top5_accuracy"]) if "top5_accuracy" in result else None,
        "calibration_error": percent(result["calibration_error"]),
        "confusion": confusion(result),
        "confused": confused(result) if len(result["labels"]) > MATRIX else [],
        "calibration": calibration(confidence, right),
        "plot": PLOT,
        "n_wrong": len(wrong),
        "n_explained": len(explained),
    }
    return Measured(filled, names, best, confidence, wrong, explained)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def spread(n: int, most: int) -> list[int]:
    """At most so many of n rows, evenly apart, since tables are often sorted by label."""
    return sorted({int(k) for k in np.linspace(0, n - 1, min(n, most)).round()})


def wrong_case(why: "Explanation", truth: str, predicted: str, confidence: float) -> dict[str, Any]:
    """Why a text was classified wrongly: what decided for the predicted class and against the right one."""
    other = truth if truth in why.output_names else None  # a label that it was never taught
    margin = why.aggregate("word").margin(predicted, other)
    case = sample_case(margin, truth, predicted, confidence)
    return case | {"known": other is not None, "pieces": excerpt(heat(margin, shown(margin)), EXCERPT)}


def sample_case(margin: "Explanation", truth: str, predicted: str, confidence: float) -> dict[str, Any]:
    """What is said of a sample: labels, and the account of what decided."""
    numbers = shown(margin)
    lines = account(margin, numbers, 5)
    return {
        "truth": caption(truth),
        "predicted": caption(predicted),
        "confidence": percent(confidence),
        "name": caption(margin.output_names[0], 100),
        "lines": [(line.label, numbers.number(line.value, "+"), line.is_sum) for line in lines],
        "score": numbers.number(numbers.score),
    }


def corpus_words(explained: Sequence["Explanation"], name: str) -> list[Word]:
    """Every word of the texts, in lower case, and what it adds to the score of a class beyond the others."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for why in explained:
        rows = why.skip_special_tokens().aggregate("word")
        j, totals = rows.index(name), rows.values.sum(1, dtype=np.float64)  # [n, n_cls]
        others = np.delete(totals, j, 1).mean(1) if totals.shape[1] > 1 else 0.0  # [n]
        for i, value in enumerate(totals[:, j] - others):
            sums[rows.label(i).lower()][0] += 1
            sums[rows.label(i).lower()][1] += float(value)
    return [Word(word, int(uses), total / uses, total) for word, (uses, total) in sums.items()]


def word_lists(explained: Sequence["Explanation"], name: str) -> dict[str, Any]:
    """The words that raise the score of a class most and those that lower it most, by use and in all."""
    words = corpus_words(explained, name)
    often = [word for word in words if word.uses >= FEWEST_USES] or words
    lists = {
        "raise": sorted(often, key=lambda w: -w.mean)[:N_WORDS],
        "lower": sorted(often, key=lambda w: w.mean)[:N_WORDS],
        "total": sorted(words, key=lambda w: -abs(w.total))[:N_WORDS],
    }
    longest = max((abs(w.mean) for w in often), default=0) or 1
    largest = max((abs(w.total) for w in words), default=0) or 1
    rows = {
        key: [word_row(w, w.total / largest if key == "total" else w.mean / longest) for w in found]
        for key, found in lists.items()
    }
    reverse = [caption(other, 100) for other in explained[0].output_names if other != name]
    return {"name": caption(name, 100), "reverse": reverse[0] if len(reverse) == 1 else "", **rows}


def word_row(word: Word, share: float) -> dict[str, Any]:
    """A word with its bar."""
    return {
        "label": caption(word.word, 24),
        "uses": word.uses,
        "mean": f"{word.mean:+.3f}",
        "total": f"{word.total:+.2f}",
        "width": round(100 * abs(share), 1),
        "negative": share < 0,
    }


def depth_shares(explained: Sequence["Explanation"]) -> list[dict[str, Any]]:
    """The share of each depth in the sizes of contributions, and of credit if there is any, in per cent."""
    columns = []
    for field in ("values", "phi") if explained[0].phi is not None else ("values",):
        shares = [abs(getattr(why, field)).sum((0, 2), dtype=np.float64) for why in explained]  # [depth] each
        mean = np.mean([share / (share.sum() or 1) for share in shares], 0)  # [depth]
        columns.append(round_to_sum((1000 * mean).tolist(), round(1000 * mean.sum())))
    largest = max(map(max, columns)) or 1
    rows = zip(explained[0].depth_names, *columns, strict=True)
    return [
        {
            "label": name,
            "shares": [
                {"number": percent(part / 1000), "width": round(100 * part / largest, 1), "negative": False}
                for part in parts
            ],
        }
        for name, *parts in rows
    ]


def confusion(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the confusion matrix, each cell with the shade of its share of the row."""
    rows = []
    for k, (name, counts) in enumerate(zip(result["labels"], result["confusion"], strict=True)):
        n = sum(counts) or 1
        levels = [round(LEVELS * count / n) for count in counts]
        cells = [
            {"n": count, "level": level, "right": j == k}
            for j, (count, level) in enumerate(zip(counts, levels, strict=True))
        ]
        measures = [f"{result['per_class'][name][key]:.3f}" for key in ("precision", "recall", "f1")]
        rows.append(
            {"name": caption(name), "cells": cells, "measures": measures, "n": result["per_class"][name]["n"]}
        )
    return rows


def confused(result: dict[str, Any]) -> list[tuple[str, str, int]]:
    """The pairs of label and prediction that were confused most often."""
    labels = result["labels"]
    pairs = [
        (caption(labels[i]), caption(labels[j]), count)
        for i, row in enumerate(result["confusion"])
        for j, count in enumerate(row)
        if i != j and count
    ]
    return sorted(pairs, key=lambda pair: -pair[2])[:N_CONFUSED]


def calibration(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """For each bin of confidence its samples, mean confidence and accuracy, and a dot in the plot."""
    bins = confidence_bins(confidence, right)
    most = max(n for _, _, n in bins)
    return [
        {
            "confidence": percent(mean),
            "accuracy": percent(accuracy),
            "n": n,
            "x": round(PLOT * mean, 1),
            "y": round(PLOT * (1 - accuracy), 1),
            "r": round(2.5 + 6 * (n / most) ** 0.5, 1),  # an area that goes with the number of samples
        }
        for mean, accuracy, n in bins
    ]
