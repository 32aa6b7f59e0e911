"""Training a head on the hidden states of a frozen encoder, and measuring its predictions."""

from vecroute.training.checkpoint import Progress, remove_finished
from vecroute.training.loop import Trained, Trainer, make_accelerator, train
from vecroute.training.recipe import Recipe, Source, Task, epochs_for

__all__ = [
    "Progress",
    "Recipe",
    "Source",
    "Task",
    "Trained",
    "Trainer",
    "epochs_for",
    "make_accelerator",
    "remove_finished",
    "train",
]
