"""Estimate the accuracy of a classifier, from samples that its head has not learned from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import binomtest  # type: ignore[import-untyped]
from torch import Tensor

from vecroute.training import Task
from vecroute.training.folds import N_FOLDS

HANDFUL = 10  # the advice names classes with fewer samples
N_NAMED = 5  # classes in one line
CONFIDENCE = 0.95  # confidence level of the interval
LEARNING = 0.25  # errors shrink with about this power of the number of samples to learn from


@dataclass(frozen=True)
class Estimate:
    """The expected accuracy of a classifier on new samples, and what it rests on.

    ``str(estimate)`` is a short report, and ``estimate.advice()`` a line on what to do next.

    Args:
        method: "validation" or "cross-validation".
        n: number of samples that were tested.
        accuracy: share of them with the right label, or with all labels right if multi_label=True.
        low, high: 95 % interval of the accuracy on new samples.
        majority, baseline: the most frequent label, and the accuracy of always predicting it.
        recall: share of the tested samples of each class that were recognised.
        counts: number of samples of each class that the classifier learned from.
        samples: "texts" or "images".

    Raises:
        ValueError: a value has the wrong type or is out of range. The message names it.
    """

    method: str
    n: int
    accuracy: float
    low: float
    high: float
    majority: str
    baseline: float
    recall: dict[str, float]
    counts: dict[str, int]
    samples: str = "texts"

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"method": str, "n": int, "majority": str, "samples": str}
        kinds |= dict.fromkeys(("recall", "counts"), dict)
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be {kind.__name__}, is {getattr(self, name)!r}")
        shares = {name: getattr(self, name) for name in ("accuracy", "low", "high", "baseline")}
        shares |= {f"recall of {name}": share for name, share in self.recall.items()}
        for name, share in shares.items():
            if not isinstance(share, float) or not 0 <= share <= 1:
                raise ValueError(f"{name} must be from 0 to 1, is {share!r}")
        for name, count in {"n": self.n, **self.counts}.items():
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"{name} must be a number of samples, is {count!r}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the accuracy with its interval and the baseline, then the recall of classes."""
        how = f"{self.method} on {self.n:,} {self.samples}"
        interval = f"{self.low:.2f} to {self.high:.2f}"
        always = f"always {self.majority!r}: {self.baseline:.2f}"
        yield f"accuracy about {self.accuracy:.2f} ({interval}), by {how}; {always}"
        some = sorted(self.recall.items(), key=lambda item: item[1])[: 2 * N_NAMED]
        worst = "" if len(some) == len(self.recall) else f", worst {len(some)} of {len(self.recall)} classes"
        yield f"recall{worst}: {', '.join(f'{name} {share:.2f}' for name, share in some)}"

    def advice(self, model: str = "MODEL") -> str:
        """Return one line: the greatest weakness, if there is one, and the next command to run.

        Args:
            model: the folder of the classifier, for the command.
        """
        few = {name: count for name, count in self.counts.items() if count < HANDFUL}
        worst = min(self.recall, key=self.recall.__getitem__, default=None)
        again = "then run `vecroute fit` again"
        if few:
            return f"too few {self.samples} of {listed(few)}: label more, {again}"
        if self.low <= self.baseline:
            return f"not clearly better than always {self.majority!r}: label more {self.samples}, {again}"
        if worst is not None and self.recall[worst] < self.accuracy / 2:
            return f"{worst!r} is seldom recognised: label more {self.samples} of it, {again}"
        data = "photos/" if self.samples == "images" else "test.csv"
        return f"measure it on {self.samples} that you kept apart: `vecroute evaluate {model} {data}`"


def make_estimate(
    scores: Tensor, task: Task, tested: Sequence[int], classes: Sequence[Any], method: str, samples: str
) -> Estimate:
    """Return the estimate from the scores [k, n_cls] of the tested samples of a task."""
    names = [str(label) for label in classes]
    targets = task.targets[list(tested)]  # [k, n_cls]
    right = int(task.right(scores, targets).sum())
    found = scores > 0 if task.multi_label else scores >= scores.amax(1, keepdim=True)  # [k, n_cls]
    n_found, n_there = (found & (targets > 0)).sum(0), targets.sum(0)  # [n_cls]
    most = most_frequent(task.targets[task.train])  # [n_cls]
    low, high = interval(right, len(targets), method)
    return Estimate(
        method=method,
        n=len(targets),
        accuracy=right / len(targets),
        low=low,
        high=high,
        majority=", ".join(name for name, one in zip(names, most.tolist(), strict=True) if one) or "no label",
        baseline=float((targets == most).all(1).double().mean()),
        recall={name: float(n_found[j] / n_there[j]) for j, name in enumerate(names) if n_there[j]},
        counts=dict(zip(names, task.targets[task.train].sum(0).int().tolist(), strict=True)),
        samples=samples,
    )


def interval(right: int, n: int, method: str) -> tuple[float, float]:
    """Return the Wilson interval of the accuracy on new samples, if ``right`` of n tested samples were right.

    In cross-validation, the tested heads learned from two thirds of the samples. They share samples, so their
    mistakes are not independent. Therefore the interval is as wide as for two thirds of the samples. The
    classifier itself learned from all samples, so it may be better. Therefore the upper end is raised.
    """
    if method == "validation":
        found = binomtest(right, n).proportion_ci(CONFIDENCE, method="wilson")
        return float(found.low), float(found.high)
    share = 1 - 1 / N_FOLDS
    found = binomtest(round(share * right), round(share * n)).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(1 - share**LEARNING * (1 - found.high))


def most_frequent(targets: Tensor) -> Tensor:
    """Return the most frequent row [n_cls] of targets [n, n_cls]. In a tie, the first class wins."""
    rows, counts = torch.unique(targets, dim=0, return_counts=True)  # [m, n_cls], [m] sorted
    return rows.flip(0)[counts.flip(0).argmax()]


def listed(counts: dict[str, int]) -> str:
    some = ", ".join(f"{name!r} ({count})" for name, count in list(counts.items())[:N_NAMED])
    return some + (f" and {len(counts) - N_NAMED} more classes" if len(counts) > N_NAMED else "")
