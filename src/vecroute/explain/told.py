"""Sentences about an explanation: what its numbers mean, and how score and probability are related."""

import math
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vecroute.explain.shown import caption, plural

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

MEANING = {
    "words": "Each number says what that {unit} added to the score, followed through the whole model.",
    "states": "Each number says what the model's inner state at that {unit} added to the score. "
    "An inner state has read the whole {whole}, so it can carry what other {units} say.",
}
# Definitions of terms on the pages, by the CSS class of their elements.
TERMS = {
    "base": "Base: the score before anything is read.",
    "depth": "Depth: how many layers of the encoder a state went through. The embeddings come first.",
    "credit": "Credit: how much of the routing went to a state. It has neither size nor sign.",
    "temperature": "T, the temperature: one number that makes the probabilities as sure as they should be.",
    "special": "Special tokens: marks such as [CLS] that the model itself puts around the text.",
    "rest": "Not explained: the score minus the sum of the other lines.",
}
TERM_OF = {"base": "base", "special tokens": "special", "not explained": "rest"}  # lines of an account


class Question(NamedTuple):
    """The question that an explanation answers: why one class, or why one class rather than another."""

    output: str
    against: str | None = None

    @property
    def title(self) -> str:
        rather = f" rather than {named(self.against)}" if self.against is not None else ""
        return f"Why {named(self.output)}{rather}?"


def decided(explanation: "Explanation") -> Question:
    """Return the first question: why the highest score, rather than the next one unless multi_label=True."""
    if (margin := margin_of(explanation)) is not None:
        return margin
    first, *others = (explanation.output_names[j] for j in np.argsort(-explanation.scores, kind="stable"))
    return Question(first, others[0] if others and not explanation.multi_label else None)


def margin_of(explanation: "Explanation") -> Question | None:
    """Return the question that a margin answers, None for any other explanation."""
    pair = explanation.about.get("margin")
    if len(explanation.output_names) > 1 or not isinstance(pair, list) or len(pair) != 2:
        return None
    return Question(str(pair[0]), str(pair[1]))


def asked(explanation: Any, question: Question) -> Any:
    """Return the explanation of one output that answers the question."""
    if question == margin_of(explanation):
        return explanation
    if question.against is None:
        return explanation[question.output]
    return explanation.margin(question.output, question.against)


def named(name: str) -> str:
    """Write a class name inside a sentence. A name written right to left does not reorder the rest."""
    told = caption(name, 100)
    runs_left = any(unicodedata.bidirectional(char) in ("R", "AL") for char in told)
    return f"\N{FIRST STRONG ISOLATE}{told}\N{POP DIRECTIONAL ISOLATE}" if runs_left else told


def percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def chance(explanation: "Explanation", question: Question) -> dict[str, str]:
    """Return the probability that belongs to a score, and its formula; empty if it is unknown."""
    found = asked(explanation, question).probabilities[0]
    is_margin = question == margin_of(explanation)
    alone = found if is_margin else explanation.probabilities[explanation.index(question.output)]
    if not math.isfinite(alone):
        return {}
    T = f"{explanation.temperature:.3g}"
    if question.against is None and not explanation.multi_label:
        formula = "e^(score / T) / sum of e^(score / T) over all classes"
    else:
        formula = "1 / (1 + e^(-score / T))"
    name = named(question.output)
    what = f"Probability of {name}"
    if question.against is not None and percent(alone) != percent(found):
        what = f"Probability of {name} if it is one of these two"
    return {"what": what, "percent": percent(found), "formula": formula, "temperature": T}


def predicted(explanation: "Explanation") -> str:
    """Say what the classifier predicted, as far as the explanation knows."""
    shares = explanation.probabilities.astype(np.float64)  # [n_cls]
    if (margin := margin_of(explanation)) is not None:
        first, second = named(margin.output), named(margin.against or "")
        return f"Explained: {first} rather than {second}, {percent(shares[0])}"
    names = [named(name) for name in explanation.output_names]
    best = int(explanation.scores.argmax())
    if not np.isfinite(shares).all():
        return f"Highest score: {names[best]}"
    if explanation.multi_label:
        likely = [
            f"{name}, {percent(share)}" for name, share in zip(names, shares, strict=True) if share > 0.5
        ]
        return f"Predicted: {'; '.join(likely)}" if likely else "Predicted: none of these labels"
    # A class outside of the explanation may be more likely.
    sure = shares[best] >= 1 - shares.sum()
    return f"{'Predicted' if sure else 'Explained'}: {names[best]}, {percent(shares[best])}"


def meaning(explanation: "Explanation", unit: str) -> str:
    """Say in one or two sentences what the numbers mean."""
    if unit == "depth":
        return "Each number says what the inner states of one depth added to the score."
    whole = "image" if unit in ("patch", "region") else "text"
    return MEANING[explanation.of].format(unit=unit, units=plural(unit, 2), whole=whole)
