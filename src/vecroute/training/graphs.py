"""Training steps as CUDA graphs: the host starts a whole step by one call.

A step drops inputs, runs the head forward and backward, clips the gradients, updates the weights and their
running mean, and adds its loss to a sum on the device. A CUDA graph repeats the same kernels on the same
memory. So the inputs of a step are in buffers of fixed size: samples are padded to one of a few lengths, and
each of these lengths, a bucket, has its own graph.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

from vecroute.training.sampling import kept_inputs, seed_of
from vecroute.training.states import OnDevice, read_ahead

if TYPE_CHECKING:
    from vecroute.training.loop import Trainer

logger = logging.getLogger(__name__)

DEVICES = ("cuda",)  # tests add "cpu", where steps run without a graph
BATCH_BYTES = 512 * 1024**2  # size of the inputs that go through the head at once
SHORTEST = 16  # positions of the shortest bucket, and the step between two buckets of up to 64 positions
NOT_CAPTURED = "training steps cannot be CUDA graphs (%s): training continues eagerly"
WARM_UPS = 2  # steps before a capture, in which kernels are compiled and libraries allocate memory


@dataclass
class Bucket:
    """The buffers of the steps whose longest sample has about n_pos positions."""

    n_pos: int
    n_inp: int  # inputs of a sample that reach the head
    draws: Tensor  # random numbers that choose inputs, [k b, n_pos * depth], and features, [k b, d_emb]
    rows: Tensor  # [r, d_emb] the hidden states
    replay: Callable[[], object] | None = None


class CapturedSteps:
    """The training steps of a trainer, as CUDA graphs.

    Attributes:
        total: sum of the losses in this epoch, on the device. Reading it would wait for the device.
    """

    def __init__(self, trainer: "Trainer"):
        self.trainer, self.device = trainer, trainer.accelerator.device
        task, recipe = trainer.task, trainer.recipe
        self.source, self.resident = task.features, isinstance(task.features, OnDevice)
        some, _ = self.source.batch(task.train[:1], self.device)  # [1, n_pos, depth, d_emb]
        self.depth, self.d_emb = some.shape[2:]
        weight = task.class_weight
        # A graph cannot read the memory of the host.
        self.task = task._replace(class_weight=None if weight is None else weight.to(self.device))
        self.targets = task.targets.to(self.device)  # [n, n_cls]
        self.lengths = torch.tensor(self.source.lengths)  # [n]
        self.generator = torch.Generator(self.device)
        # Rows: index of the sample, 1 (0 for padding), first position, length, number of inputs to keep.
        self.batch = torch.zeros(5, recipe.batch_size, dtype=torch.long, device=self.device)  # [5, b]
        self.mean_share = torch.zeros((), device=self.device)  # share of the new weights in the running mean
        self.total = torch.zeros((), dtype=torch.double, device=self.device)
        self.buckets: dict[int, Bucket] = {}
        self.failed = False  # a capture has failed
        self.rows = self.source.rows if isinstance(self.source, OnDevice) else self.new_rows()  # [r, d_emb]
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        # Warm-up steps and steps that are too large for a graph run without one, which is no mistake.
        trainer.optimizer._warned_capturable_if_run_uncaptured = True
        for parameter in trainer.parameters.values():  # a graph changes this state in place
            trainer.optimizer.state.setdefault(parameter, new_moments(parameter))

    def begin(self, batches: list[list[int]]) -> None:
        """Prepare the remaining steps of an epoch, given the samples of all its steps."""
        progress, b = self.trainer.progress, self.trainer.recipe.batch_size
        samples = torch.tensor([which + which[:1] * (b - len(which)) for which in batches])  # [steps, b]
        real = torch.tensor([[1] * len(which) + [0] * (b - len(which)) for which in batches])  # [steps, b]
        length = self.lengths[samples]  # [steps, b]
        self.n_pos = [padded(n) for n in length.amax(1).tolist()]
        if isinstance(self.source, OnDevice):
            first = self.source.first[samples]  # [steps, b]
        else:
            first = torch.tensor(self.n_pos)[:, None] * torch.arange(b)  # [steps, b]
            later = range(progress.step, len(batches))
            some = [batches[step] for step in later if self.fits(self.n_pos[step])]
            self.coming: Iterator[Tensor] = read_ahead(self.source, some, self.device)
        n_used = length * self.depth  # [steps, b]
        n_kept = kept_inputs(n_used, self.trainer.recipe.drop_inputs).minimum(n_used)  # [steps, b]
        self.table = torch.stack([samples, real, first, length, n_kept], 1).to(self.device)  # [steps, 5, b]
        self.total.fill_(progress.loss)

    def take(self, step: int) -> bool:
        """Take a step of the epoch. Returns False, and does nothing, if the step cannot be a graph."""
        n_pos, trainer = self.n_pos[step], self.trainer
        if not self.fits(n_pos):
            return False
        if n_pos not in self.buckets:
            self.buckets[n_pos] = self.new_bucket(n_pos)
        bucket = self.buckets[n_pos]
        self.batch.copy_(self.table[step])
        if not self.resident:
            hidden = next(self.coming)  # [b', n, depth, d_emb]
            shape = (trainer.recipe.batch_size, n_pos, self.depth, self.d_emb)
            bucket.rows.view(shape)[: len(hidden), : hidden.shape[1]].copy_(hidden)
        trainer.set_rate()
        self.mean_share.fill_(trainer.mean_share())
        self.generator.manual_seed(seed_of(trainer.recipe.seed, "graph", trainer.progress.epoch, step))
        bucket.draws.uniform_(generator=self.generator)
        if bucket.replay is None:
            bucket.replay = self.capture(bucket)
        if bucket.replay is not None:
            bucket.replay()
        return bucket.replay is not None

    def loss(self) -> float:
        """Wait for the device and return the sum of the losses in this epoch.

        Raises:
            ValueError: the loss was NaN or infinite in a step.
        """
        total = self.total.item()
        if not math.isfinite(total):
            raise self.trainer.diverged(total)
        return total

    def kept_per_sample(self, n_pos: int) -> int:
        """Return how many inputs of a sample reach the head.

        The number is a multiple of 16 where possible, so that all buckets use the same compiled kernels.
        """
        every = n_pos * self.depth
        if not self.trainer.routes:
            return every
        n_kept = kept_inputs(torch.tensor([every]), self.trainer.recipe.drop_inputs)  # [1]
        return min(-(-int(n_kept) // 16) * 16, every)

    def fits(self, n_pos: int) -> bool:
        """Return whether the inputs of a step go through the head at once."""
        trainer = self.trainer
        inputs = trainer.n_members * trainer.recipe.batch_size * self.kept_per_sample(n_pos)
        return not self.failed and inputs * self.d_emb * 4 <= BATCH_BYTES

    def new_bucket(self, n_pos: int) -> Bucket:
        b, n_inp = self.trainer.recipe.batch_size, n_pos * self.depth
        size = self.trainer.n_members * b * (n_inp + self.d_emb)
        draws = torch.empty(size, device=self.device)  # [k b (n_inp + d_emb)]
        rows = self.rows if self.resident else self.rows[: b * n_inp]  # [r, d_emb]
        return Bucket(n_pos, self.kept_per_sample(n_pos), draws, rows)

    def new_rows(self) -> Tensor:
        """Return memory for the hidden states of a step, [r, d_emb], which all buckets share."""
        lengths = {padded(self.source.lengths[k]) for k in self.trainer.task.train}
        longest = max(filter(self.fits, lengths), default=0)
        n = self.trainer.recipe.batch_size * longest * self.depth
        # float32, since some texts may be stored as bfloat16, others as float16.
        return torch.zeros(n, self.d_emb, device=self.device)

    def capture(self, bucket: Bucket) -> Callable[[], object] | None:
        """Return a function that takes a step with the buffers of a bucket, None if the head forbids it."""
        if self.device.type != "cuda":
            return partial(self.step, bucket)
        state = self.state()
        before = [tensor.clone() for tensor in state]
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    self.step(bucket)
            current.wait_stream(side)
            # The outer context restores the stream after a failed capture. The mode is thread_local, because
            # another thread may copy hidden states meanwhile.
            with torch.cuda.stream(current), torch.cuda.graph(graph, self.pool, None, "thread_local"):
                self.step(bucket)
        except RuntimeError as error:  # a step needs values on the host, or memory runs out
            logger.warning(NOT_CAPTURED, error)
            self.failed = True
        with torch.no_grad():
            torch._foreach_copy_(state, before)
        return None if self.failed else graph.replay

    def state(self) -> list[Tensor]:
        """Return all tensors that a step changes."""
        trainer = self.trainer
        parameters = list(trainer.parameters.values())
        moments = [t for parameter in parameters for t in trainer.optimizer.state[parameter].values()]
        return [*parameters, *trainer.average.values(), *moments, self.total]

    def step(self, bucket: Bucket) -> None:
        """Take one step, with the contents of all buffers, without a value that the host must know."""
        trainer, task = self.trainer, self.task
        x, mask, targets = self.inputs(bucket)
        parameters, average = list(trainer.parameters.values()), list(trainer.average.values())
        # Parameters remember the stream of an earlier step, which a graph must not use. So use new leaves.
        leaves = {p: p.detach().requires_grad_(p.requires_grad) for p in parameters}
        named = {name: leaves[parameter] for name, parameter in trainer.model.named_parameters()}
        with trainer.autocast():
            scores = functional_call(trainer.model, named, (x, mask)).reshape(targets.shape)  # [k, b, n_cls]
        losses = task.losses(scores.float(), targets, trainer.recipe.label_smoothing)  # [k, b]
        real = self.batch[1]  # [b]
        loss = (losses * real).sum() / real.sum()
        learning = [parameter for parameter in parameters if parameter.requires_grad]
        grads = torch.autograd.grad(loss, [leaves[parameter] for parameter in learning], allow_unused=True)
        for parameter, grad in zip(learning, grads, strict=True):
            if grad is not None and grad.stride() != parameter.stride():  # AdamW reads both in one order
                grad = torch.empty_like(parameter).copy_(grad)
            parameter.grad = grad
        trainer.clip(clip_grad_norm_)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        with torch.no_grad():
            change = torch._foreach_sub(parameters, average)
            torch._foreach_mul_(change, self.mean_share)
            torch._foreach_add_(average, change)
            self.total += loss / trainer.n_members

    def inputs(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``Trainer.inputs`` returns, for the samples in the buffers, with padding."""
        trainer, n_inp = self.trainer, bucket.n_pos * self.depth
        k, share = trainer.n_members, trainer.recipe.drop_features
        sample, _, first, length, n_kept = self.batch  # [b] each
        targets = self.targets[sample].expand(k, -1, -1)  # [k, b, n_cls]
        drawn, by_feature = bucket.draws.view(k * len(sample), -1).split([n_inp, self.d_emb], 1)
        start, n_used, n_kept = (
            t.repeat(k)[:, None] for t in (first * self.depth, length * self.depth, n_kept)
        )
        used = torch.arange(n_inp, device=self.device) < n_used  # [k b, n_inp]
        # The inputs with the smallest numbers stay. Their order does not matter to a routing.
        chosen = drawn.masked_fill(~used, 2.0).sort(dim=1, stable=True).indices[:, : bucket.n_inp]  # [k b, i]
        mask = torch.arange(bucket.n_inp, device=self.device) < n_kept  # [k b, i]
        if trainer.routes:
            x = bucket.rows[(start + chosen).masked_fill(~mask, 0)].float()  # [k b, i, d_emb]
        else:
            every = start + torch.arange(n_inp, device=self.device)  # [b, n_inp]
            x = bucket.rows[every.masked_fill(~used, 0)].float()  # [b, n_inp, d_emb]
            mask = torch.zeros_like(used).scatter_(1, chosen, mask)  # [b, n_inp]
        if share:
            x = x * (by_feature >= share)[:, None]  # [k b, i, d_emb]
        if trainer.routes:
            return x.unflatten(0, (k, -1)), mask.unflatten(0, (k, -1)), targets
        by_depth = (bucket.n_pos, self.depth)
        return x.unflatten(1, by_depth), mask.unflatten(1, by_depth), targets


def captured_steps(trainer: "Trainer") -> CapturedSteps | None:
    """Return the steps of a trainer as CUDA graphs, None if it takes all steps eagerly."""
    if not (trainer.capturable and trainer.task.train):
        return None
    try:
        return CapturedSteps(trainer)
    except torch.cuda.OutOfMemoryError as error:
        logger.warning(NOT_CAPTURED, error)
        return None


def padded(n: int) -> int:
    """Return the number of positions of the bucket for samples of length n.

    Buckets are 16, 32, 48, 64, 80, 96, 112, 128, 160, ... : from 64 on, four for each doubling. So a bucket
    is at most a quarter or 15 positions longer than its samples, and a few buckets cover all lengths.
    """
    n = max(n, 1)  # samples without positions
    step = max(SHORTEST, 2 ** ((n - 1).bit_length() - 3))
    return -(-n // step) * step


def new_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return the state of AdamW for a parameter before its first step."""
    step = torch.zeros((), device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
