"""Faithfulness between the worst and the best order of tokens: scores that can be compared across heads.

How far a probability can fall depends on the head: a confident head falls further. Normalised measures divide
by the range that is possible for this head and this text, after Edin et al. (2024), "Normalized AOPC":

    normalised = (aopc - lowest aopc) / (highest aopc - lowest aopc)
"""

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from vecroute.explain.judge import Judge, ask_all

WIDTH = 5  # number of orders that the beam search follows at once
Texts = list[tuple[int, ...]]


def shortened(judge: Judge, order: Tensor) -> Texts:
    """Return the text without the first 0, 1, ..., n - 1 tokens of an order [n]."""
    keep = torch.ones(len(order), dtype=torch.bool)  # [n]
    texts = [judge.some(keep)]
    for k in order.tolist()[:-1]:
        keep[k] = False
        texts.append(judge.some(keep))
    return texts


def aopc(judge: Judge, order: Tensor) -> float:
    """Return the mean fall of the probability when the first 1, ..., n - 1 tokens of an order go, [n]."""
    (whole, _), *rest = judge.ask(shortened(judge, order))
    return float(np.mean([whole - p for p, _ in rest])) if rest else 0.0


def bounds(judges: Sequence[Judge], width: int = WIDTH) -> list[tuple[float, float]]:
    """Return the lowest and the highest ``aopc`` of any order, as far as beam search finds them."""
    searches = [(judge, _search(judge, width, best)) for judge in judges for best in (False, True)]
    found: dict[int, float] = {}
    while len(found) < len(searches):
        asking, texts = [], []
        for k, (judge, search) in enumerate(searches):
            if k not in found:
                try:
                    texts.append(next(search))
                    asking.append(judge)
                except StopIteration as end:
                    found[k] = end.value
        if asking:
            ask_all(asking, texts)
    return [(found[2 * k], found[2 * k + 1]) for k in range(len(judges))]


def _search(judge: Judge, width: int, best: bool) -> Generator[Texts, None, float]:
    """Yield the texts of each step before the judge is asked about them, and return the bound."""
    n = len(judge.tokens)
    everything = torch.ones(n, dtype=torch.bool)  # [n]
    ((whole, _),) = judge.ask([judge.some(everything)])
    sign = 1 if best else -1
    beams: dict[tuple[bool, ...], float] = {tuple(everything.tolist()): 0.0}  # tokens left -> sum of falls
    for _ in range(n - 1):
        nexts = {kept: [(*kept[:k], False, *kept[k + 1 :]) for k in range(n) if kept[k]] for kept in beams}
        texts = {kept: [judge.some(torch.tensor(left)) for left in each] for kept, each in nexts.items()}
        yield [text for each in texts.values() for text in each]
        found: dict[tuple[bool, ...], float] = {}
        for kept, total in beams.items():
            for left, (p, _) in zip(nexts[kept], judge.ask(texts[kept]), strict=True):
                value = total + whole - p
                if left not in found or sign * value > sign * found[left]:
                    found[left] = value
        ranked = sorted(found.items(), key=lambda item: -sign * item[1])
        beams = dict(ranked[:width])
    return sign * max(sign * total for total in beams.values()) / max(n - 1, 1)


def normalized(judge: Judge, order: Tensor, limits: tuple[float, float]) -> dict[str, float]:
    """Return comprehensiveness (more is better) and sufficiency (less is better) of an order [n], 0 to 1.

    Keeping the first k tokens is deleting the last n - k, so both have the same limits.
    """
    low, high = limits
    if not high > low:
        return {"comprehensiveness_normalized": float("nan"), "sufficiency_normalized": float("nan")}
    return {
        "comprehensiveness_normalized": (aopc(judge, order) - low) / (high - low),
        "sufficiency_normalized": (aopc(judge, order.flip(0)) - low) / (high - low),
    }
