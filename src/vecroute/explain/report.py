"""A page about a classifier on a data set: how good it is, where it goes wrong and why, what it goes by."""

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

N_WRONG = 50  # texts shown that were classified wrongly, the most confident first
N_WORDS = 10  # words shown for each class
FEWEST_USES = 3  # of a word, below which its mean says little; more where there are many texts
TEXTS_PER_USE = 200
N_SUMMARY = 5  # words of a label in the summary
N_DEPTHS = 100  # texts whose hidden states are explained
FEWEST_IN_BIN = 20  # samples, below which a bin of confidence is joined with its neighbour
BUDGET = 2_000  # scores explained for words and depths, over texts and classes
FEWEST_EXPLAINED = 50  # texts, however many classes there are
MATRIX = 25  # most labels that a confusion matrix is drawn of
N_CONFUSED = 25  # pairs of labels shown instead
EXCERPT = 120  # words shown of a long text
PLOT = 220  # pixels of the calibration plot
LETTER = regex.compile(r"[\p{L}\p{N}]")


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
    """Return the page, which needs nothing but itself.

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
        "fewest_in_bin": FEWEST_IN_BIN,
        "n_wrong": len(wrong),
        "n_explained": len(explained),
    }
    return Measured(filled, names, best, confidence, wrong, explained)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval (Wilson) of a share that was seen in n samples."""
    found = binomtest(round(share * n), n).proportion_ci(method="wilson")
    return found.low, found.high


def summary(found: Measured, title: str, samples: str) -> list[str]:
    """What to say of the classifier in an e-mail, in sentences of plain text."""
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
    """Return the words that speak for each label most, in sentences of plain text."""
    told = []
    for one in words:
        for name, key in ((one["name"], "raise"), (one["reverse"], "lower")):
            if name and one[key]:
                first = ", ".join(row["label"] for row in one[key][:N_SUMMARY])
                told.append(f"Words that speak most for {name}: {first}.")
    return told


def spread(n: int, most: int) -> list[int]:
    """At most so many of n rows, evenly apart, since tables are often sorted by label."""
    return sorted({int(k) for k in np.linspace(0, n - 1, min(n, most)).round()})


def wrong_case(why: "Explanation", truth: str, predicted: str, confidence: float) -> dict[str, Any]:
    """Why a text was classified wrongly: what decided for the predicted class and against the right one."""
    known = truth in why.output_names  # else a label that it was never taught
    likely = [why.output_names[j] for j in np.argsort(-why.scores, kind="stable")]
    other = truth if known else next(name for name in likely if name != predicted)
    margin = why.aggregate("word").margin(predicted, other)
    case = sample_case(margin, truth, predicted, other, confidence)
    return case | {"known": known, "pieces": excerpt(heat(margin, shown(margin)), EXCERPT)}


def sample_case(
    margin: "Explanation", truth: str, predicted: str, other: str | None, confidence: float
) -> dict[str, Any]:
    """What is said of a sample: labels, and the account of what decided for one label rather than another."""
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
    """Every word of the texts, in lower case, and what it adds to the score of a class beyond the others.

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
    """The words that raise the score of a class most and those that lower it most, used often enough."""
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
    """How strong a word is and how often it is used: |mean| sqrt(uses), so that "the" does not lead."""
    return abs(word.mean) * word.uses**0.5


def word_row(word: Word, share: float) -> dict[str, Any]:
    """Return a word with its bar."""
    return {
        "label": caption(word.word, 24),
        "uses": word.uses,
        "mean": f"{word.mean:+.3f}",
        "width": round(100 * abs(share), 1),
        "negative": share < 0,
    }


def depth_shares(explained: Sequence["Explanation"]) -> list[dict[str, Any]]:
    """The share of each depth in the sizes of contributions, and of credit if there is any, in per cent."""
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
    """For each bin of confidence its samples, mean confidence and accuracy, and their places in the plot."""
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
    """Bins of mean confidence, accuracy and number; small ones are joined with a neighbour."""
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
    """Return two bins as one."""
    n = a[2] + b[2]
    return (a[0] * a[2] + b[0] * b[2]) / n, (a[1] * a[2] + b[1] * b[2]) / n, n
