"""Write a report about a classifier on a data set: its measures, its mistakes, and the words it relies on."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import regex
from scipy.stats import binomtest  # type: ignore[import-untyped]

from vecroute.explain.html import LEVELS, STYLE, environment, excerpt, heat
from vecroute.explain.shown import account, caption, round_to_sum, shown
from vecroute.explain.told import Question, meaning
from vecroute.training.evaluation import confidence_bins, evaluate

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

N_WRONG = 50  # mistakes shown, the most confident first
N_WORDS = 10  # words shown for each class
FEWEST_USES = 3  # a word with fewer uses is not listed; the limit grows with the number of texts
TEXTS_PER_USE = 200
N_SUMMARY = 5  # words per label in the summary
N_DEPTHS = 100  # texts whose hidden states are explained
FEWEST_IN_BIN = 20  # a bin of confidence with fewer samples is joined with its neighbour
BUDGET = 2_000  # scores (texts x classes) explained for the lists of words and depths
FEWEST_EXPLAINED = 50  # least number of texts to explain, for any number of classes
MATRIX = 25  # with more labels, no confusion matrix is drawn
N_CONFUSED = 25  # pairs of labels listed instead of the matrix
EXCERPT = 120  # words shown of a long text
PLOT = 220  # width of the calibration plot in pixels
LETTER = regex.compile(r"[\p{L}\p{N}]")


class Word(NamedTuple):
    """A word in all texts: what it adds to the score of a class, minus the mean of the other classes."""

    word: str
    uses: int
    mean: float  # contribution per use
    total: float


class Measured(NamedTuple):
    """The part of a report that any classifier has, and the samples that it shows."""

    filled: dict[str, Any]  # values for the template
    names: list[str]  # names of the classes
    best: np.ndarray  # [n] the predicted class of each sample
    confidence: np.ndarray  # [n]
    wrong: list[int]  # misclassified samples, the most confident first
    explained: list[int]  # samples explained for the lists of words and depths


def report(
    classifier: Any, texts: Sequence[str], labels: Sequence[Any], probabilities: np.ndarray, title: str
) -> str:
    """Return the report as a self-contained page.

    Args:
        classifier: a fitted ``RoutingClassifier``, for one label per text.
        texts, labels: the samples to measure it on.
        probabilities: [n, n_cls] its predictions for the texts.
        title: title of the page.
    """
    texts, truth = list(texts), [str(label) for label in labels]
    found = measured(classifier, truth, probabilities)
    names, wrong = found.names, found.wrong[:N_WRONG]
    chosen = sorted({*found.explained, *wrong})
    why = dict(zip(chosen, classifier.explain([texts[k] for k in chosen]), strict=True))
    explained = [why[k] for k in found.explained]
    some = [texts[found.explained[k]] for k in spread(len(explained), N_DEPTHS)]
    fewest = max(FEWEST_USES, len(explained) // TEXTS_PER_USE)
    # With two labels, a word that raises one lowers the other.
    words = [word_lists(explained, name, fewest) for name in (names[1:] if len(names) == 2 else names)]
    filled = {
        "title": title,
        "samples": "texts",
        "summary": summary(found, title, "texts") + summary_of_words(words),
        "wrong": [wrong_case(why[k], truth[k], names[found.best[k]], found.confidence[k]) for k in wrong],
        "words": words,
        "meaning": meaning(explained[0], "word"),
        "fewest_uses": fewest,
        "n_depths": len(some),
        "depths": depth_shares(classifier.explain(some, of="states")),
    }
    return environment().get_template("report.html").render(found.filled | filled | STYLE)


def measured(classifier: Any, truth: Sequence[str], probabilities: np.ndarray) -> Measured:
    """Measure a classifier on samples with these labels, from its predictions [n, n_cls]."""
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
        "fewest_in_bin": FEWEST_IN_BIN,
        "n_wrong": len(wrong),
        "n_explained": len(explained),
    }
    return Measured(filled, names, best, confidence, wrong, explained)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval (Wilson) of a share measured on n samples."""
    found = binomtest(round(share * n), n).proportion_ci(method="wilson")
    return found.low, found.high


def summary(found: Measured, title: str, samples: str) -> list[str]:
    """Summarise the measures in sentences of plain text, which can be pasted into an e-mail."""
    result = found.filled["result"]
    low, high = interval(result["accuracy"], result["n"])
    told = [
        f"{title}: {found.filled['accuracy']} of {result['n']:,} {samples} are classified right "
        f"(95 % interval {percent(low)} to {percent(high)}), macro F1 {result['macro_f1']:.3f}."
    ]
    mistakes = confused(result)
    if mistakes:
        label, predicted, n = mistakes[0]
        told.append(f"The most frequent mistake: {label} taken for {predicted}, {n} times.")
    sure, right = float(found.confidence.mean()), result["accuracy"]
    told.append(f"On average it is {percent(sure)} sure and {percent(right)} right.")
    return told


def summary_of_words(words: Sequence[dict[str, Any]]) -> list[str]:
    """Name the words that speak most for each label, in sentences of plain text."""
    told = []
    for one in words:
        for name, key in ((one["name"], "raise"), (one["reverse"], "lower")):
            if name and one[key]:
                first = ", ".join(row["label"] for row in one[key][:N_SUMMARY])
                told.append(f"Words that speak most for {name}: {first}.")
    return told


def spread(n: int, most: int) -> list[int]:
    """Choose at most ``most`` of n rows, evenly spaced, because tables are often sorted by label."""
    return sorted({int(k) for k in np.linspace(0, n - 1, min(n, most)).round()})


def wrong_case(why: "Explanation", truth: str, predicted: str, confidence: float) -> dict[str, Any]:
    """Explain a mistake: what decided for the predicted class and against the right one."""
    known = truth in why.output_names  # False for a label that was not in the training data
    likely = [why.output_names[j] for j in np.argsort(-why.scores, kind="stable")]
    other = truth if known else next(name for name in likely if name != predicted)
    margin = why.aggregate("word").margin(predicted, other)
    case = sample_case(margin, truth, predicted, other, confidence)
    return case | {"known": known, "pieces": excerpt(heat(margin, shown(margin)), EXCERPT)}


def sample_case(
    margin: "Explanation", truth: str, predicted: str, other: str | None, confidence: float
) -> dict[str, Any]:
    """Return the values for a sample: its labels, and the account of what decided between two of them."""
    numbers = shown(margin)
    lines = account(margin, numbers, 5)
    return {
        "truth": caption(truth),
        "predicted": caption(predicted),
        "confidence": percent(confidence),
        "name": Question(predicted, other).title,
        "lines": [(line.label, numbers.number(line.value, "+"), line.is_sum) for line in lines],
        "score": numbers.number(numbers.score),
    }


def corpus_words(explained: Sequence["Explanation"], name: str) -> list[Word]:
    """Return every word of the texts in lower case, and what it adds to a class beyond the other classes.

    Punctuation marks are left out.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for why in explained:
        rows = why.skip_special_tokens().aggregate("word")
        j, totals = rows.index(name), rows.values.sum(1, dtype=np.float64)  # [n, n_cls]
        others = np.delete(totals, j, 1).mean(1) if totals.shape[1] > 1 else 0.0  # [n]
        for i, value in enumerate(totals[:, j] - others):
            word = rows.label(i).lower()
            if LETTER.search(word):
                sums[word][0] += 1
                sums[word][1] += float(value)
    return [Word(word, int(uses), total / uses, total) for word, (uses, total) in sums.items()]


def word_lists(explained: Sequence["Explanation"], name: str, fewest: int) -> dict[str, Any]:
    """Return the frequent words that raise the score of a class most, and those that lower it most."""
    words = corpus_words(explained, name)
    often = [word for word in words if word.uses >= fewest] or words
    lists = {
        "raise": [word for word in sorted(often, key=lambda w: -w.mean)[:N_WORDS] if word.mean > 0],
        "lower": [word for word in sorted(often, key=lambda w: w.mean)[:N_WORDS] if word.mean < 0],
        "total": sorted(often, key=lambda w: -weight(w))[:N_WORDS],
    }
    longest = max((abs(w.mean) for w in often), default=0) or 1
    rows = {key: [word_row(w, w.mean / longest) for w in found] for key, found in lists.items()}
    reverse = [caption(other, 100) for other in explained[0].output_names if other != name]
    return {"name": caption(name, 100), "reverse": reverse[0] if len(reverse) == 1 else "", **rows}


def weight(word: Word) -> float:
    """Return the rank of a word, |mean| sqrt(uses): frequent words do not win by frequency alone."""
    return abs(word.mean) * word.uses**0.5


def word_row(word: Word, share: float) -> dict[str, Any]:
    """Return the values for a word and its bar."""
    return {
        "label": caption(word.word, 24),
        "uses": word.uses,
        "mean": f"{word.mean:+.3f}",
        "width": round(100 * abs(share), 1),
        "negative": share < 0,
    }


def depth_shares(explained: Sequence["Explanation"]) -> list[dict[str, Any]]:
    """Return the share of each depth in absolute contributions, and in credit if there is any, in percent."""
    columns = []
    for field in explained[0].by_row:
        shares = [abs(why.by_row[field]).sum((0, 2), dtype=np.float64) for why in explained]  # [depth] each
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
    """Return the rows of the confusion matrix, each cell with the shade of its share of the row."""
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
    """Return the pairs of label and prediction that were confused most often."""
    labels = result["labels"]
    pairs = [
        (caption(labels[i]), caption(labels[j]), count)
        for i, row in enumerate(result["confusion"])
        for j, count in enumerate(row)
        if i != j and count
    ]
    return sorted(pairs, key=lambda pair: -pair[2])[:N_CONFUSED]


def calibration(confidence: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Return for each bin of confidence its size, mean confidence, accuracy, and place in the plot."""
    rows = []
    for mean, accuracy, n in joined(confidence_bins(confidence, right)):
        low, high = interval(accuracy, n)
        rows.append(
            {
                "confidence": percent(mean),
                "accuracy": percent(accuracy),
                "interval": f"{100 * low:.0f} to {100 * high:.0f} %",
                "n": n,
                "x": round(PLOT * mean, 1),
                "y": round(PLOT * (1 - accuracy), 1),
                "low": round(PLOT * (1 - low), 1),
                "high": round(PLOT * (1 - high), 1),
            }
        )
    return rows


def joined(bins: Sequence[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Join small bins (mean confidence, accuracy, number of samples) with a neighbour."""
    found: list[tuple[float, float, int]] = []
    for one in bins:
        if found and found[-1][2] < FEWEST_IN_BIN:
            found[-1] = together(found[-1], one)
        else:
            found.append(one)
    if len(found) > 1 and found[-1][2] < FEWEST_IN_BIN:
        last = found.pop()
        found[-1] = together(found[-1], last)
    return found


def together(a: tuple[float, float, int], b: tuple[float, float, int]) -> tuple[float, float, int]:
    """Join two bins."""
    n = a[2] + b[2]
    return (a[0] * a[2] + b[0] * b[2]) / n, (a[1] * a[2] + b[1] * b[2]) / n, n
