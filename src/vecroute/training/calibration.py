"""The temperature of a classifier: one number that calibrates its probabilities."""

import math

import torch.nn.functional as nnf
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]
from torch import Tensor

from vecroute.training.recipe import FEW

LOWEST, HIGHEST = 0.05, 50.0  # range of temperatures
# Few samples say little about T. So log T has a normal prior with this standard deviation.
DEVIATION = 0.5


def usual_temperature(n: int) -> float:
    """Return the usual T of a head that learned from n samples. Few samples make a head overconfident."""
    return max(FEW / n, 1.0) ** (1 / 3)


def fit_temperature(scores: Tensor, targets: Tensor, n: int, multi_label: bool = False) -> float:
    """Return the T under which the labels of samples are most likely. The head has not learned from these.

        argmin_T  sum_k loss(scores_k / T, targets_k) + log(T / usual_temperature(n))^2 / (2 DEVIATION^2)

    Args:
        scores: [k, n_cls], targets: [k, n_cls], 1 at the classes of a sample.
        n: number of samples that the head has learned from.
        multi_label: True to use sigmoid(scores / T), False to use softmax(scores / T).
    """
    scores, targets = scores.double(), targets.double()  # [k, n_cls]
    measure = nnf.binary_cross_entropy_with_logits if multi_label else nnf.cross_entropy
    mean = math.log(usual_temperature(n))

    def loss(log_T: float) -> float:
        likelihood = measure(scores / math.exp(log_T), targets, reduction="sum").item()
        return likelihood + ((log_T - mean) / DEVIATION) ** 2 / 2

    bounds = math.log(LOWEST), math.log(HIGHEST)
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


def probabilities(scores: Tensor, T: float, multi_label: bool = False) -> Tensor:
    """Return softmax(scores / T), or sigmoid(scores / T) if multi_label, [..., n_cls] in double precision."""
    scores = scores.double() / T  # [..., n_cls]
    return scores.sigmoid() if multi_label else scores.softmax(-1)  # [..., n_cls]
