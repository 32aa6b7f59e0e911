"""What a training run is about: the recipe, how, and the task, what."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vecroute.ops.checks import check_size

# The default number of epochs: about 1000 steps, in 3 to 20 epochs. With little data up to 100 epochs, for at
# least 150 steps, or 50 per class, because with many classes a step teaches little about each.
STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 1000, 3, 20
FEWEST_STEPS, FEWEST_STEPS_OF_A_CLASS, MOST_EPOCHS_OF_FEW = 150, 50, 100

# Fewer samples are all needed to learn from, and seen so often that they want more weight decay.
FEW, WEIGHT_DECAY_OF_FEW = 1000, 2.0


@dataclass(frozen=True)
class Recipe:
    """How a head is trained.

    Args:
        max_epochs: None for as many as make about 1000 steps, from 3 to 20, or up to 100 for 150 steps, or
            for 50 steps for each class.
        batch_size: samples per step and process.
        lr, weight_decay: of AdamW.
        drop_inputs: share of the input vectors that each step leaves out, never all of a sample.
        drop_features: share of the features that are zero in all hidden states of a sample in a step.
        mixup: parameter of the beta distribution by which pairs of samples are mixed, 0 for none.
        label_smoothing: share of each target that is spread over all classes.
        patience: training stops after so many epochs in a row whose validation accuracy was worse than the
            best by more than its standard error, where 100 samples or more are validated on.
        mixed_precision: "auto" (bfloat16 on GPUs), "bf16" or "no".
        shard_inputs: whether the processes share the positions of each sample instead of the samples, for
            samples too long for one device.
        seed: of everything random.
    """

    max_epochs: int | None = None
    batch_size: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.5
    drop_inputs: float = 0.8
    drop_features: float = 0.3
    mixup: float = 0.0
    label_smoothing: float = 0.1
    patience: int = 5
    mixed_precision: str = "auto"
    shard_inputs: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_epochs is not None:
            check_size("max_epochs", self.max_epochs)
        check_size("batch_size", self.batch_size)
        for name in ("lr", "weight_decay", "mixup", "patience"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0) or (name == "lr" and not value):
                what = "more than 0" if name == "lr" else "at least 0"
                raise ValueError(f"{name} must be a finite number, {what}, got {value}")
        for name in ("drop_inputs", "drop_features", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to less than 1, got {getattr(self, name)}")


class Source(Protocol):
    """Where hidden states come from: ``encoders.cache.Features``."""

    lengths: list[int]
    position_bytes: int  # of the hidden states at one position

    def batch(self, which: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]: ...


class Task(NamedTuple):
    """What is to be learned."""

    features: Source
    targets: Tensor  # [n, n_cls], 1 at the classes of a sample
    train: list[int]  # samples to learn from
    valid: list[int]  # samples to validate on, maybe none
    class_weight: Tensor | None = None  # [n_cls]
    multi_label: bool = False
    key: str = ""  # changes with the hidden states

    def loss(self, scores: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Mean over the samples; scores and targets are [b, n_cls]."""
        weight = None if self.class_weight is None else self.class_weight.to(scores.device)
        if self.multi_label:
            targets = targets * (1 - smoothing) + smoothing / 2  # [b, n_cls]
            return nnf.binary_cross_entropy_with_logits(scores, targets, weight)
        return nnf.cross_entropy(scores, targets, weight, label_smoothing=smoothing)

    def right(self, scores: Tensor, targets: Tensor) -> Tensor:
        """[b] 1 where a sample is classified right: all of its labels if there may be several."""
        if self.multi_label:
            return ((scores > 0) == (targets > 0.5)).all(-1).float()
        return (scores.argmax(-1) == targets.argmax(-1)).float()


def epochs_for(steps: int, n_cls: int) -> int:
    """How many epochs of so many steps to train for."""
    usual = min(max(round(STEPS / steps), FEWEST_EPOCHS), MOST_EPOCHS)
    fewest = min(max(FEWEST_STEPS, FEWEST_STEPS_OF_A_CLASS * n_cls), STEPS)
    return max(usual, min(math.ceil(fewest / steps), MOST_EPOCHS_OF_FEW))
