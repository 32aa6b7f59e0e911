"""Checkpoints of training: written with a checksum, checked when read, and renamed if they are damaged."""

import logging
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vecroute.storage import load_tensors, remove_abandoned, save_tensors

logger = logging.getLogger(__name__)

KIND = "checkpoint"


@dataclass
class Progress:
    """The progress of training. Together with the tensors of a checkpoint, it is enough to resume."""

    epoch: int = 0
    step: int = 0  # step within the epoch
    loss: float = 0.0  # sum over the steps of the epoch
    best: float = 0.0  # greatest validation accuracy so far
    kept: int = -1  # epoch whose weights are kept
    history: list[dict[str, float]] = field(default_factory=list)
    finished: bool = False

    def check(self, epochs: int, steps: int) -> None:
        """Check that a run with these numbers of epochs and steps per epoch can have this progress.

        Raises:
            ValueError: a field has an impossible value. The message names it.
        """
        kinds: dict[str, Any] = {"epoch": int, "step": int, "kept": int}
        kinds |= {"loss": float, "best": float, "finished": bool}
        for name, kind in kinds.items():
            value: Any = getattr(self, name)
            if type(value) is not kind or not math.isfinite(value):
                raise ValueError(f"{name} is {value!r}")
        limits = {"epoch": (0, epochs), "step": (0, steps), "kept": (-1, self.epoch), "best": (0, 1)}
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}, from {least} to {most} is possible")
        if not isinstance(self.history, list) or len(self.history) != self.epoch:
            raise ValueError(f"history must have a row for each of {self.epoch} epochs")
        for row in self.history:
            if not isinstance(row, dict) or not all(isinstance(value, float) for value in row.values()):
                raise ValueError(f"history has {row!r}")


def save_checkpoint(path: Path, run: str, progress: Progress, tensors: dict[str, Tensor]) -> None:
    """Write a checkpoint completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_tensors(path, tensors, {"kind": KIND, "run": run, "progress": asdict(progress)})


def read_checkpoint(path: Path) -> tuple[str, Progress, dict[str, Tensor]]:
    """Read the key of the run, the progress and the tensors from a checkpoint.

    Raises:
        ValueError: the file is damaged or not a checkpoint.
        OSError: the file cannot be read.
    """
    tensors, about = load_tensors(path, KIND)
    try:
        return str(about["run"]), Progress(**about["progress"]), tensors
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks what a checkpoint has: {error}") from error


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that every expected tensor is there, with its shape and dtype, and holds finite numbers."""
    if found.keys() != expected.keys():
        raise ValueError(f"tensor {min(found.keys() ^ expected.keys())!r} is missing or too many")
    for name, tensor in found.items():
        if (tensor.shape, tensor.dtype) != (expected[name].shape, expected[name].dtype):
            raise ValueError(f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}")
        if not tensor.isfinite().all():
            raise ValueError(f"tensor {name!r} has numbers that are NaN or infinite")


def set_aside(path: Path, why: Any) -> None:
    """Rename a damaged checkpoint, and log a warning."""
    aside = path.with_name(f"{path.name}.damaged")
    logger.warning("checkpoint %s is damaged (%s): it is now %s, training starts again", path, why, aside)
    os.replace(path, aside)


def remove_finished(path: Path) -> None:
    """Delete the checkpoint of a finished run."""
    remove_abandoned(path)
    try:
        finished = read_checkpoint(path)[1].finished
    except (OSError, ValueError):
        return
    if finished:
        path.unlink(missing_ok=True)
