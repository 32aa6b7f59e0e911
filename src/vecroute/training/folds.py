"""Scores for samples by heads that have not learned from them: one head for each fold."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor, nn

from vecroute.training.loop import train
from vecroute.training.recipe import Recipe, Task

N_FOLDS = 3  # three heads, each on two thirds of the samples, take twice the time of one head on all samples
# T of these heads, divided by T of a head that learned from all samples (docs/experiments.md, ninth round).
FOLD_TEMPERATURE = 1.1


def make_folds(targets: Tensor, samples: Sequence[Hashable], seed: int) -> np.ndarray:
    """Return the fold [n] of each sample, such that all folds have similar shares of each class.

    Equal samples are in one fold, so that no head is tested with a sample that it has learned from.

    Args:
        targets: [n, n_cls], 1 at the classes of a sample.
        samples: n samples, used only to find equal ones.
        seed: seed of the random order.
    """
    first: dict[Hashable, int] = {}
    same = np.array([first.setdefault(sample, k) for k, sample in enumerate(samples)])  # [n]
    distinct = np.random.default_rng(seed).permutation(np.unique(same))  # [m]
    classes = targets.numpy()[distinct]  # [m, n_cls]
    order = distinct[np.lexsort(classes.T)]  # [m] samples of one class are neighbours
    fold = np.empty(len(same), dtype=int)  # [n]
    fold[order] = np.arange(len(order)) % N_FOLDS
    return fold[same]  # [n]


def out_of_fold(
    new_head: Callable[[], nn.Module],
    task: Task,
    recipe: Recipe,
    fold: np.ndarray,
    *,
    accelerator: Accelerator | None = None,
    show: bool = False,
) -> Tensor:
    """Return the scores [n, n_cls] of all samples of a task, each by a head trained on the other folds.

    Args:
        new_head: makes an untrained head.
        task: what to learn, without validation.
        recipe: how to train each head.
        fold: [n] the fold of each sample.
        accelerator, show: see ``train``.
    """
    found = torch.zeros_like(task.targets, dtype=torch.double)  # [n, n_cls]
    every = np.unique(fold).tolist()
    for k in every:
        others, own = np.flatnonzero(fold != k).tolist(), np.flatnonzero(fold == k).tolist()
        title = f"checking {k + 1} of {len(every)}"
        fold_task = task._replace(train=others)
        trained = train(
            new_head(), fold_task, recipe, accelerator=accelerator, score=own, show=show, title=title
        )
        found[own] = trained.scores
    return found
