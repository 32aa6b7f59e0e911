"""The temperature of a classifier: one number that makes its probabilities as sure as they should be."""

import math

import torch.nn.functional as nnf
from scipy.optimize import minimize_scalar  # type: ignore[import-untyped]
from torch import Tensor

LOWEST, HIGHEST = 0.05, 50.0  # temperatures that are tried
# Few texts say little about T. So log T has a prior, a normal distribution with this mean and deviation.
MEAN, DEVIATION = 0.0, 1.0


def fit_temperature(scores: Tensor, targets: Tensor, multi_label: bool = False) -> float:
    """Return the T that makes the labels of samples, which the head has not learned from, most likely.

        argmin_T  sum_n loss(scores_n / T, targets_n) + (log T - MEAN)^2 / (2 DEVIATION^2)

    Args:
        scores: [n, n_cls], targets: [n, n_cls], 1 at the classes of a sample.
        multi_label: whether the loss is that of sigmoid(scores / T), not of softmax(scores / T).
    """
    scores, targets = scores.double(), targets.double()  # [n, n_cls]
    measure = nnf.binary_cross_entropy_with_logits if multi_label else nnf.cross_entropy

    def loss(log_T: float) -> float:
        likelihood = measure(scores / math.exp(log_T), targets, reduction="sum").item()
        return likelihood + ((log_T - MEAN) / DEVIATION) ** 2 / 2

    bounds = math.log(LOWEST), math.log(HIGHEST)
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x)


def probabilities(scores: Tensor, T: float, multi_label: bool = False) -> Tensor:
    """Return softmax(scores / T), or sigmoid(scores / T) if multi_label, [..., n_cls] in double precision."""
    scores = scores.double() / T  # [..., n_cls]
    return scores.sigmoid() if multi_label else scores.softmax(-1)  # [..., n_cls]
