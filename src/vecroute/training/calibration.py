"""The temperature of a classifier: one number that calibrates its probabilities."""

import math

import torch.nn.functional as nnf
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]
from torch import Tensor

LOWEST, HIGHEST = 0.05, 50.0  # range of temperatures
# Few samples say little about T. So log T has a normal prior with this standard deviation. The constants
# follow the best T of heads that learned from 16 to 7,000 texts (docs/experiments.md, rounds eight and nine).
DEVIATION = 0.3
ENOUGH, POWER = 15_000, 0.22  # samples from which a head is usually not overconfident; see usual_temperature


def usual_temperature(n: int) -> float:
    """Return the usual T of a head that learned from n samples. Few samples make a head overconfident."""
    return max(ENOUGH / n, 1.0) ** POWER


def fit_temperature(scores: Tensor, targets: Tensor, n: int, multi_label: bool = False) -> float:
    """Return the T under which it is most likely which samples are classified correctly, and which are not.

        argmin_T  -sum_k log P_k(T) + log(T / usual_temperature(n))^2 / (2 DEVIATION^2)

    P_k is the probability of the predicted class where it is correct, otherwise 1 minus it. So T makes the
    confidence right. The T of the most likely labels is the same with two classes. With more classes it
    depends on all of them, and leaves the confidence too high if errors are mostly between neighbours.

    Args:
        scores: [k, n_cls] of samples that the head has not learned from.
        targets: [k, n_cls], 1 at the classes of a sample.
        n: number of samples that the head has learned from.
        multi_label: True to use the likelihood of all labels under sigmoid(scores / T).
    """
    scores, targets = scores.double(), targets.double()  # [k, n_cls]
    loss_of = loss_of_labels if multi_label else loss_of_confidence
    mean = math.log(usual_temperature(n))

    def loss(log_T: float) -> float:
        return loss_of(scores / math.exp(log_T), targets) + ((log_T - mean) / DEVIATION) ** 2 / 2

    bounds = math.log(LOWEST), math.log(HIGHEST)
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


def loss_of_labels(scores: Tensor, targets: Tensor) -> float:
    """Return -log of the likelihood of all labels."""
    return nnf.binary_cross_entropy_with_logits(scores, targets, reduction="sum").item()


def loss_of_confidence(scores: Tensor, targets: Tensor) -> float:
    """Return -log of the likelihood that these predictions are correct and these are not."""
    log_p, order = scores.log_softmax(-1).sort(descending=True)  # [k, n_cls]
    correct = targets.gather(-1, order[:, :1])[:, 0]  # [k] 1 if the predicted class is the label, else 0
    each = correct * log_p[:, 0] + (1 - correct) * log_p[:, 1:].logsumexp(-1)  # [k]
    return -each.sum().item()


def probabilities(scores: Tensor, T: float, multi_label: bool = False) -> Tensor:
    """Return softmax(scores / T), or sigmoid(scores / T) if multi_label, [..., n_cls] in double precision."""
    scores = scores.double() / T  # [..., n_cls]
    return scores.sigmoid() if multi_label else scores.softmax(-1)  # [..., n_cls]
