"""Turn predictions and explanations of texts into new cells for the rows of a table."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vecroute.explain.plain import plain
from vecroute.io.predictions import Answer

# Maps texts to one answer for each. The text is empty if a row has none.
Answering = Callable[[Sequence[str]], list[Answer]]


def predicting(classifier: Any) -> Answering:
    """Return a function that gives labels and probabilities."""
    names = class_names(classifier)

    def answer(texts: Sequence[str]) -> list[Answer]:
        given = [text for text in texts if text]
        found = iter(classifier.predict_proba(given).tolist() if given else [])
        rows = [next(found) if text else [] for text in texts]  # [n_cls] each
        return [Answer(predicted(names, p, classifier.multi_label), p) for p in rows]

    return answer


def explaining(classifier: Any, of: str = "words", unit: str = "word") -> Answering:
    """Return a function that gives labels, probabilities and explanations."""
    names = class_names(classifier)

    def answer(texts: Sequence[str]) -> list[Answer]:
        given = [text for text in texts if text]
        found: Iterator[Any] = classifier.explain_iter(given, of=of) if given else iter(())
        answers = []
        for text in texts:
            if not text:
                answers.append(Answer(predicted(names, [], classifier.multi_label), []))
                continue
            why = next(found)
            p = why.probabilities.tolist()  # [n_cls]
            told = plain(why, unit)
            kept = {name: told[name] for name in EXPLAINED}
            answers.append(Answer(predicted(names, p, classifier.multi_label), p, kept))
        return answers

    return answer


EXPLAINED = ("of", "unit", "scores", "base_values", "not_explained", "parts")


def class_names(classifier: Any) -> list[str]:
    return [str(label) for label in classifier.classes_]


def predicted(names: Sequence[str], p: Sequence[float], multi_label: bool) -> str | list[str]:
    """Return the predicted label, or all labels above one half. Without probabilities it is empty."""
    if multi_label:
        return [name for name, share in zip(names, p, strict=False) if share > 0.5]
    return names[p.index(max(p))] if p else ""
