"""The training loop: a head on the hidden states of a frozen encoder, on any number of processes."""

import copy
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import functional_call

from vecroute.distributed import own_rows, shard_inputs
from vecroute.encoders.loading import pick_device
from vecroute.encoders.text import length_batches
from vecroute.heads import RoutingHead
from vecroute.storage import remove_abandoned
from vecroute.training.checkpoint import Progress, check_tensors, read_checkpoint, save_checkpoint, set_aside
from vecroute.training.graphs import DEVICES, captured_steps, new_moments
from vecroute.training.progress import progress_bar
from vecroute.training.recipe import Recipe, Task, epochs_for
from vecroute.training.sampling import compact, drop_features, drop_inputs, mix, seeded, shuffled_batches
from vecroute.training.states import on_device

logger = logging.getLogger(__name__)

WARM_UP = 0.1  # share of the steps in which the learning rate rises from 0; then it falls to 0 along a cosine
AVERAGED_STEPS = 100  # validation and the final weights use a running mean over about this many steps
CLIP_NORM = 1.0
FEWEST_TO_JUDGE_BY = 100  # with fewer validation samples, training ignores the validation accuracy
BATCH_BYTES = 128 * 1024**2  # size of the padded hidden states that go through the head at once
CHECKPOINT_SECONDS = 5.0
LOOK_EVERY = 50  # steps between two looks at the loss of captured steps; a look waits for the device
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # the state of AdamW


class Trained(NamedTuple):
    """How training went."""

    history: list[dict[str, float]]  # loss, validation loss and validation accuracy of every epoch
    kept: int  # epoch whose weights are kept
    scores: Tensor  # [k, n_cls] of the samples to score, by the final weights, in double precision on the CPU


def train(
    head: nn.Module,
    task: Task,
    recipe: Recipe,
    *,
    checkpoint: Path | None = None,
    checkpoint_seconds: float | None = None,
    accelerator: Accelerator | None = None,
    score: Sequence[int] = (),
    show: bool = False,
    title: str = "training",
) -> Trained:
    """Train a head in place. Its final weights are the running mean at the last good validation.

    Args:
        head: hidden states [b, n_pos, depth, d_emb] and mask [b, n_pos, depth] -> scores [b, n_cls].
        task: what to learn.
        recipe: how to train.
        checkpoint: a file from which the run resumes if it exists, and to which it writes regularly. A
            resumed run ends with the same weights as an undisturbed run. A damaged file is renamed to
            ``<checkpoint>.damaged``, and training starts again.
        checkpoint_seconds: seconds between two checkpoints, None for 5.
        accelerator: the processes to use, None to detect them.
        score: samples to score with the final weights.
        show, title: True to show a progress bar, and its title.

    Raises:
        ValueError: the checkpoint belongs to another run.
    """
    accelerator = accelerator or make_accelerator()
    seconds = CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
    trainer = Trainer(head, task, recipe, accelerator, checkpoint, seconds)
    return trainer.run(score, show, title)


class Trainer:
    """The state of a training run. Only ``train`` uses it."""

    def __init__(self, head, task, recipe, accelerator, checkpoint, checkpoint_seconds):
        self.recipe, self.accelerator = recipe, accelerator
        self.task = task
        if self.capturable:
            self.task = task._replace(features=on_device(task.features, accelerator.device))
        self.checkpoint, self.checkpoint_seconds = checkpoint, checkpoint_seconds
        self.given = self.head = head.to(accelerator.device)
        self.rank, self.world = (
            accelerator.process_index,
            accelerator.num_processes,
        )  # the processes that share the samples
        self.mesh: DeviceMesh | None = None  # the processes that share the positions of each sample
        if recipe.shard_inputs:
            if self.world == 1:
                raise ValueError("shard_inputs needs several processes, started with torchrun, got one")
            self.mesh = init_device_mesh(accelerator.device.type, (self.world,))
            self.head = shard_inputs(copy.deepcopy(self.head), self.mesh)
            self.rank, self.world = 0, 1
        self.parameters = dict(self.head.named_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            # A CUDA graph reads the learning rate from the device.
            lr=torch.tensor(recipe.lr, device=accelerator.device) if self.capturable else recipe.lr,
            weight_decay=recipe.weight_decay,
            fused=True,
            capturable=self.capturable,
        )
        self.prepared = accelerator.prepare(self.optimizer)
        # The order of inputs does not matter to a routing, so a step passes only the inputs that stay.
        self.routes = isinstance(self.head, RoutingHead)
        self.n_members: int = self.head.n_members if self.routes else 1
        model = self.head.side_by_side() if self.routes else self.head
        self.model = accelerator.prepare(model) if self.mesh is None else model
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.kept = {name: p.clone() for name, p in self.average.items()}
        self.progress = Progress()
        batches = math.ceil(len(task.train) / recipe.batch_size)
        self.steps = math.ceil(batches / self.world)  # steps per epoch
        self.epochs = recipe.max_epochs or epochs_for(self.steps, task.targets.shape[1])
        self.saved_at, self.writable = time.monotonic(), True
        if checkpoint is not None:
            remove_abandoned(checkpoint)
            self.load()
        self.captured = captured_steps(self)

    @property
    def capturable(self) -> bool:
        """Return whether steps may be CUDA graphs: one process on a GPU, no mixup, no scaled gradients."""
        accelerator = self.accelerator
        possible = accelerator.device.type in DEVICES and accelerator.num_processes == 1
        return possible and not self.recipe.mixup and accelerator.mixed_precision in ("no", "bf16")

    def run(self, score: Sequence[int] = (), show: bool = False, title: str = "training") -> Trained:
        progress, patience = self.progress, self.recipe.patience
        show = show and self.accelerator.is_main_process
        with progress_bar(show, title, self.epochs * self.steps) as bar:
            while progress.epoch < self.epochs and progress.epoch - progress.kept <= patience:
                batches = self.batches()
                if self.captured is not None:
                    self.captured.begin(batches)
                while progress.step < self.steps:
                    self.advance(batches[progress.step])
                    progress.step += 1
                    if (
                        self.captured is None
                        or progress.step % LOOK_EVERY == 0
                        or progress.step == self.steps
                    ):
                        self.look()
                        bar(progress.epoch * self.steps + progress.step, **self.shown())
                    self.save()
                self.end_epoch()
        if not progress.finished:
            progress.finished = True
            self.save(due=True)
        with torch.no_grad():
            for name, parameter in self.given.named_parameters():
                parameter.copy_(self.kept[name])
        scores = self.scores(score, self.kept).double().cpu()  # [k, n_cls]
        self.captured = None  # it refers to this trainer, so its memory would stay until a garbage collection
        return Trained(progress.history, progress.kept, scores)

    def batches(self) -> list[list[int]]:
        """Return the samples of each step of this epoch on this process."""
        generator = seeded(self.recipe.seed, "order", self.progress.epoch)
        lengths = [self.task.features.lengths[k] for k in self.task.train]
        every = [
            [self.task.train[k] for k in batch]
            for batch in shuffled_batches(lengths, self.recipe.batch_size, generator)
        ]
        # Every process takes the same number of steps. If there are too few batches, the first ones repeat.
        return [every[(step * self.world + self.rank) % len(every)] for step in range(self.steps)]

    def advance(self, which: list[int]) -> None:
        """Take the next step of the epoch, with these samples: by a CUDA graph if possible, else eagerly."""
        if self.captured is None:
            self.progress.loss += self.train_step(which)
        elif not self.captured.take(self.progress.step):
            self.captured.total += self.train_step(which)

    def look(self) -> None:
        """Fetch the loss from the device, if it is there."""
        if self.captured is not None:
            self.progress.loss = self.captured.loss()

    def train_step(self, which: list[int]) -> float:
        """Take one step of the optimizer. The samples are split so that they fit BATCH_BYTES."""
        recipe, progress = self.recipe, self.progress
        self.set_rate()
        self.prepared.zero_grad()
        generator = seeded(recipe.seed, "step", progress.epoch, progress.step, self.rank)
        parts, total = self.groups(which), 0.0
        for position, part in enumerate(parts):
            x, keep, targets = self.inputs(part, generator)
            last = position == len(parts) - 1
            with self.accelerator.no_sync(self.model) if not last else nullcontext():
                with self.autocast():
                    scores = self.model(x, keep).reshape(targets.shape)  # [k, b, n_cls]
                losses = self.task.losses(scores.float(), targets, recipe.label_smoothing)  # [k, b]
                # Sum over members, so that each member gets the gradient that it would get alone.
                loss = losses.sum() / len(which)
                self.accelerator.backward(loss)
            total += loss.item() / self.n_members
        if not math.isfinite(total):
            raise self.diverged(total)
        self.clip(self.accelerator.clip_grad_norm_)
        self.prepared.step()
        with torch.no_grad():
            means, weights = list(self.average.values()), list(self.parameters.values())
            torch._foreach_lerp_(means, weights, self.mean_share())
        return total

    def clip(self, clip_grad_norm: Callable[..., object]) -> None:
        clip_grad_norm(self.parameters.values(), CLIP_NORM * math.sqrt(self.n_members))

    def diverged(self, loss: float) -> ValueError:
        return ValueError(f"training diverged: the loss is {loss}; try a lower lr than {self.recipe.lr}")

    def set_rate(self) -> None:
        """Set the learning rate of this step."""
        for group in self.optimizer.param_groups:
            if self.capturable:
                group["lr"].fill_(self.recipe.lr * self.rate())
            else:
                group["lr"] = self.recipe.lr * self.rate()

    def mean_share(self) -> float:
        """Return the share of the new weights in the running mean after this step."""
        done = self.progress.epoch * self.steps + self.progress.step
        return 1 - min(1 - 1 / AVERAGED_STEPS, (1 + done) / (10 + done))

    def inputs(self, which: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the inputs, their mask and the targets of some samples in a step.

        A routing head takes only the inputs that are not dropped, [k, b, i, d_emb], and their mask [k, b, i].
        Each member has its own inputs. Other heads take all hidden states, [b, n_pos, depth, d_emb], and a
        mask of those that are not dropped. Targets are [k, b, n_cls].
        """
        recipe, k = self.recipe, self.n_members
        x, mask, targets = self.load_batch(which)  # [b, n_pos, depth, d_emb]
        targets = targets.expand(k, *targets.shape)  # [k, b, n_cls]
        keep = drop_inputs(mask.repeat(k, 1), x.shape[2], recipe.drop_inputs, generator)
        keep = self.own_positions(keep)  # [k b, n_pos, depth]
        if recipe.mixup:
            x = x.float().repeat(k, 1, 1, 1)  # [k b, n_pos, depth, d_emb]
            x, keep, targets = mix(x, keep, targets, recipe.mixup, generator)
        x, used = compact(x.flatten(1, 2), keep.flatten(1)) if self.routes else (x, keep)  # [k b, i, d_emb]
        x = drop_features(x.float(), recipe.drop_features, generator)  # [k b, i, d_emb]
        if self.routes:
            x = x.unflatten(0, (k, -1))  # [k, b, i, d_emb]
            used = None if used is None else used.unflatten(0, (k, -1))  # [k, b, i]
        return x, used, targets

    def rate(self) -> float:
        """Return the learning rate of this step as a share of the greatest."""
        done, total = self.progress.epoch * self.steps + self.progress.step, self.epochs * self.steps
        return min(1.0, (done + 1) / (WARM_UP * total)) * (1 + math.cos(math.pi * done / total)) / 2

    def end_epoch(self) -> None:
        progress, row = self.progress, {"loss": self.progress.loss / self.steps}
        accuracy, error = 1.0, 0.0
        if self.task.valid:
            accuracy, loss = self.validate()
            error = math.sqrt(max(progress.best * (1 - progress.best), 0.0) / len(self.task.valid))
            row |= {"valid_loss": loss, "valid_accuracy": accuracy}
        progress.history.append(row)
        # Differences within the standard error are not significant, so later weights are preferred.
        if accuracy >= progress.best - error or len(self.task.valid) < FEWEST_TO_JUDGE_BY:
            progress.kept = progress.epoch
            self.kept = {name: p.clone() for name, p in self.average.items()}
        progress.best = max(progress.best, accuracy)
        progress.epoch, progress.step, progress.loss = progress.epoch + 1, 0, 0.0
        told = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in row.items())
        logger.info("epoch %d of %d: %s", progress.epoch, self.epochs, told)
        self.save()

    def validate(self) -> tuple[float, float]:
        """Return accuracy and loss of the averaged weights."""
        scores = self.scores(self.task.valid, self.average)  # [n, n_cls]
        targets = self.task.targets[self.task.valid].to(scores.device)  # [n, n_cls]
        return self.task.right(scores, targets).mean().item(), self.task.loss(scores, targets).item()

    @torch.no_grad()
    def scores(self, which: Sequence[int], weights: dict[str, Tensor]) -> Tensor:
        """Return the scores [k, n_cls] of samples with given weights. Each process computes some of them."""
        row_of = {sample: row for row, sample in enumerate(which)}
        found = torch.zeros(len(which), self.task.targets.shape[1], device=self.accelerator.device)
        own = sorted(which[self.rank :: self.world], key=self.task.features.lengths.__getitem__)
        # On a GPU, a batch may be as large as fits.
        size = max(len(own), 1) if self.captured is not None else 2 * self.recipe.batch_size
        for start in range(0, len(own), size):
            for part in self.groups(own[start : start + size]):
                hidden, mask, _ = self.load_batch(part)
                mask = self.own_positions(mask)  # [b, n_pos]
                with self.autocast():
                    scores = functional_call(self.head, weights, (hidden.float(), mask))  # [b, n_cls]
                found[[row_of[k] for k in part]] = scores.float()
        return found if self.mesh is not None else self.accelerator.reduce(found)  # [k, n_cls]

    def groups(self, which: list[int]) -> list[list[int]]:
        """Split a batch so that the padded inputs of all members stay within a fixed size."""
        features = self.task.features
        lengths = [features.lengths[k] for k in which]
        limit = max(BATCH_BYTES // (features.position_bytes * self.n_members), 1)
        return [[which[k] for k in group] for group in length_batches(lengths, limit)]

    def load_batch(self, which: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states [b, n_pos, depth, d_emb] of own positions, mask [b, n_pos], targets."""
        device = self.accelerator.device
        hidden, mask = self.task.features.batch(which, device if self.mesh is None else torch.device("cpu"))
        hidden = self.own_positions(hidden).to(device)  # [b, n_pos, depth, d_emb]
        return hidden, mask.to(device), self.task.targets[which].to(device)

    def own_positions(self, t: Tensor) -> Tensor:
        """Return the positions [b, n_pos, ...] of this process: all, unless inputs are sharded."""
        return t if self.mesh is None else t[:, own_rows(t.shape[1], self.mesh)]

    def autocast(self) -> Any:
        if self.accelerator.mixed_precision != "no":  # `accelerate launch --mixed_precision ...`
            return self.accelerator.autocast()
        kind, wanted = self.accelerator.device.type, self.recipe.mixed_precision
        enabled = wanted == "bf16" or (wanted == "auto" and kind == "cuda")
        return torch.autocast(kind, torch.bfloat16, enabled=enabled)

    def shown(self) -> dict[str, str]:
        """Return the text beside the progress bar."""
        progress = self.progress
        shown = {
            "epoch": f"{progress.epoch + 1}/{self.epochs}",
            "loss": f"{progress.loss / progress.step:.3f}",
        }
        if self.task.valid and progress.history:
            shown["validation accuracy"] = f"{progress.history[-1]['valid_accuracy']:.3f}"
        return shown

    def key(self) -> str:
        """Return a key of the run. Two runs with the same key take the same steps."""
        task = self.task
        weight = None if task.class_weight is None else task.class_weight.tolist()
        about = [asdict(self.recipe), self.epochs, self.world, str(self.head)]
        about += [task.key, task.train, task.valid, task.targets.tolist(), weight, task.multi_label]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def save(self, due: bool = False) -> None:
        """Write a checkpoint if it is time for one."""
        due = due or time.monotonic() - self.saved_at >= self.checkpoint_seconds
        if self.checkpoint is None or not due or not self.accelerator.is_main_process:
            return
        if self.progress.step:  # else the loss of the epoch is in the history already
            self.look()
        try:
            save_checkpoint(self.checkpoint, self.key(), self.progress, self.state())
        except OSError as error:  # training continues on a full disk, with one warning
            if self.writable:
                logger.warning(
                    "checkpoint %s cannot be written (%s): training continues without", self.checkpoint, error
                )
            self.writable = False
        self.saved_at = time.monotonic()

    def state(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.head.named_parameters():
            tensors |= {f"head.{name}": parameter, f"average.{name}": self.average[name]}
            tensors |= {f"kept.{name}": self.kept[name]}
            moments = self.optimizer.state.get(parameter) or new_moments(parameter)
            tensors |= {f"{moment}.{name}": moments[moment] for moment in MOMENTS}
        return tensors

    def load(self) -> None:
        """Resume from the checkpoint, if there is a complete one.

        Raises:
            ValueError: the checkpoint belongs to another run.
        """
        path: Path = self.checkpoint
        if not path.exists():
            return
        damage: Exception | None = None
        try:
            run, progress, tensors = read_checkpoint(path)
            if run == self.key():
                progress.check(self.epochs, self.steps)
                check_tensors(tensors, self.state())
        except (ValueError, OSError) as error:
            damage = error
        else:
            if run != self.key():
                raise ValueError(
                    f"checkpoint {path} belongs to a run with other data or settings: "
                    "delete it, or choose another place"
                )
        damaged = torch.tensor(float(damage is not None), device=self.accelerator.device)
        if self.accelerator.reduce(damaged):  # all processes resume from it, or none
            if self.accelerator.is_main_process:
                set_aside(path, damage)
            return
        self.restore(progress, tensors)
        logger.info("resuming from %s: epoch %d, step %d", path, progress.epoch + 1, progress.step)

    def restore(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        self.progress = progress
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(tensors[f"head.{name}"])
                self.average[name].copy_(tensors[f"average.{name}"])
                self.kept[name].copy_(tensors[f"kept.{name}"])
                self.optimizer.state[parameter] = {
                    moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS
                }


def make_accelerator(device: str | torch.device | None = None) -> Accelerator:
    """Return an accelerator of the processes that ``torchrun`` or ``accelerate launch`` started, if any."""
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True)
    return Accelerator(cpu=pick_device(device).type == "cpu", kwargs_handlers=[kwargs])
