"""The recipe of a training run, which says how to train, and its task, which says what to learn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as nnf
from torch import Tensor

from vecroute.ops.checks import check_choice, check_number, check_size

# The default number of epochs: about 1000 steps, in 3 to 20 epochs. With little data, up to 100 epochs, to
# reach 150 steps, or 15 steps per class: with many classes, a step teaches little about each of them.
STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 1000, 3, 20
FEWEST_STEPS, FEWEST_STEPS_OF_A_CLASS, MOST_EPOCHS_OF_FEW = 150, 15, 100

# With fewer samples than FEW, all are used for training. A tenth of them would say too little about a head.
FEW = 2000

# The fewer the samples, the more often each is seen, and the more weight decay helps: DECAY / n, at most 8.
DECAY, MOST_DECAY = 2000, 8.0

# Label smoothing helps up to a few hundred samples. With more, it only hides how sure a head is, and no
# temperature can restore that (docs/experiments.md, ninth round): SMOOTHING / n, at most 0.1.
SMOOTHING, MOST_SMOOTHING = 20, 0.1


@dataclass(frozen=True)
class Recipe:
    """How a head is trained.

    Args:
        max_epochs: greatest number of epochs. None means about 1000 steps, in 3 to 20 epochs. With little
            data, it means up to 100 epochs, to reach 150 steps, or 15 steps per class.
        batch_size: samples per step and process.
        lr, weight_decay: options of AdamW.
        drop_inputs: share of the input vectors that each step drops, but never all vectors of a sample. Each
            member of a head drops its own.
        drop_features: share of the features that each step sets to zero in all hidden states of a sample.
        mixup: parameter of the beta distribution by which pairs of samples are mixed, 0 for no mixup.
        label_smoothing: share of each target that is spread over all classes.
        patience: training stops after this many consecutive epochs whose validation accuracy was worse than
            the best by more than its standard error, if there are 100 validation samples or more.
        mixed_precision: "auto" (bfloat16 on GPUs), "bf16" or "no".
        shard_inputs: True to divide the positions of each sample among the processes, instead of the samples.
            Use it for samples too long for one device.
        seed: seed of all random numbers.
    """

    max_epochs: int | None = None
    batch_size: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.5
    drop_inputs: float = 0.8
    drop_features: float = 0.3
    mixup: float = 0.0
    label_smoothing: float = 0.0
    patience: int = 5
    mixed_precision: str = "auto"
    shard_inputs: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_epochs is not None:
            check_size("max_epochs", self.max_epochs)
        check_size("batch_size", self.batch_size)
        check_size("patience", self.patience)
        check_choice("mixed_precision", self.mixed_precision, ("auto", "bf16", "no"))
        for name in ("lr", "weight_decay", "mixup"):
            value = getattr(self, name)
            check_number(name, value)
            if not (math.isfinite(value) and value >= 0) or (name == "lr" and not value):
                what = "more than 0" if name == "lr" else "at least 0"
                raise ValueError(f"{name} must be a finite number, {what}, got {value}")
        for name in ("drop_inputs", "drop_features", "label_smoothing"):
            check_number(name, getattr(self, name))
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to less than 1, got {getattr(self, name)}")


class Source(Protocol):
    """The source of hidden states: ``encoders.features.Features``."""

    lengths: list[int]
    position_bytes: int  # bytes of the hidden states at one position

    def batch(self, which: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]: ...


class Task(NamedTuple):
    """The samples and targets to learn."""

    features: Source
    targets: Tensor  # [n, n_cls], 1 at the classes of a sample
    train: list[int]  # samples to learn from
    valid: list[int]  # samples for validation, may be empty
    class_weight: Tensor | None = None  # [n_cls]
    multi_label: bool = False
    key: str = ""  # changes with the hidden states

    def loss(self, scores: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the mean loss over the samples, for scores and targets [b, n_cls]."""
        return self.losses(scores, targets, smoothing).mean()

    def losses(self, scores: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss of each sample [...], for scores and targets [..., n_cls]."""
        weight = None if self.class_weight is None else self.class_weight.to(scores.device)
        if self.multi_label:
            targets = targets * (1 - smoothing) + smoothing / 2  # [..., n_cls]
            each = nnf.binary_cross_entropy_with_logits(scores, targets, weight, reduction="none")
            return each.mean(-1)  # [...]
        flat = scores.flatten(0, -2), targets.flatten(0, -2)  # [n, n_cls] each
        losses = nnf.cross_entropy(*flat, weight, label_smoothing=smoothing, reduction="none")  # [n]
        return losses.view(scores.shape[:-1])  # [...]

    def right(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each sample [b] that is classified correctly, with all of its labels."""
        if self.multi_label:
            return ((scores > 0) == (targets > 0.5)).all(-1).float()
        return (scores.argmax(-1) == targets.argmax(-1)).float()


def epochs_for(steps: int, n_cls: int) -> int:
    """Return the number of epochs to train, given the steps of an epoch."""
    usual = min(max(round(STEPS / steps), FEWEST_EPOCHS), MOST_EPOCHS)
    fewest = min(max(FEWEST_STEPS, FEWEST_STEPS_OF_A_CLASS * n_cls), STEPS)
    return max(usual, min(math.ceil(fewest / steps), MOST_EPOCHS_OF_FEW))


def weight_decay_for(n: int, lr: float) -> float:
    """Return the weight decay for n samples: max(0.5, min(2000 / n, 8) min(1e-3 / lr, 1)).

    AdamW multiplies weight decay by lr. So a greater lr means less weight decay, and the weights shrink by
    the same share in each step.
    """
    return max(Recipe.weight_decay, min(DECAY / n, MOST_DECAY) * min(Recipe.lr / lr, 1.0))


def label_smoothing_for(n: int) -> float:
    """Return the label smoothing for n samples: min(20 / n, 0.1)."""
    return min(SMOOTHING / n, MOST_SMOOTHING)
