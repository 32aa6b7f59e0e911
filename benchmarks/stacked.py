"""Train many heads of one shape at once. Their parameters are stacked, and each head has its own recipe.

A step of one small head has many short kernels, so several heads at once use a GPU better. On a GPU the step
is also captured in a CUDA graph for each length of the batches.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from corpora import Packed
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from vecroute.heads import make_head
from vecroute.heads.pooling import masked_mean

CAPTURE = True  # capture steps on a GPU
BETAS, EPS, CLIP_NORM, WARM_UP = (0.9, 0.999), 1e-8, 1.0, 0.1
# Batches are padded to these lengths.
LENGTHS = [8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560]
LENGTHS += [3072, 3584, *(2**k for k in range(12, 16))]


@dataclass(frozen=True)
class Recipe:
    """How to train one head: AdamW, a learning rate that rises and falls, a running mean of the weights.

    Args:
        lr, weight_decay: options of AdamW.
        label_smoothing: share of each target that is spread over all classes.
        average: the final weights are a running mean over about this share of all steps.
        seed: seed of the initial weights and of the order of the samples.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.0
    average: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Training:
    """Settings that the heads of a stack share.

    Args:
        epochs: number of passes over the data.
        batch_size: samples per step.
        drop: share of the inputs of a sample that are dropped at random in each step.
    """

    epochs: float
    batch_size: int
    drop: float = 0.0


class Stack:
    """Heads of one shape with one recipe each. In shapes, m is the number of heads.

    Args:
        name, options: arguments of ``vecroute.heads.make_head``.
        recipes: one for each head.
        device: where to train.
        max_vectors: greatest number of vectors, over all heads, that one call processes.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        recipes: list[Recipe],
        device: str,
        max_vectors: int = 100_000,
    ):
        heads = [make_head(name, seed=r.seed, **options).to(device) for r in recipes]
        self.head = heads[0]
        self.n_parameters = sum(p.numel() for p in self.head.parameters())
        stacked, _ = stack_module_state(heads)
        self.parameters = {name: p.detach().requires_grad_() for name, p in stacked.items()}  # [m, ...] each
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}  # [m, ...] each
        self.recipes, self.device, self.max_vectors = recipes, device, max_vectors
        self.depth, self.n_cls = options["depth"], options["n_cls"]
        # vmap cannot transform the backward pass of a streamed routing: such heads run one after the other.
        self.loops = options.get("implementation", "reference") != "reference"

    def column(self, name: str) -> Tensor:
        """Return one attribute of all recipes, [m]."""
        return torch.tensor([float(getattr(recipe, name)) for recipe in self.recipes], device=self.device)

    def scores(self, parameters: dict[str, Tensor], hidden: Tensor, mask: Tensor) -> Tensor:
        """Return scores [m, b, n_cls].

        Args:
            hidden: [1 or m, b, n_pos, depth, d] hidden states, common to all heads or one set per head.
            mask: [1 or m, b, n_pos].
        """
        if self.loops:
            return self.scores_one_by_one(parameters, hidden, mask)
        own = 0 if len(hidden) == len(self.recipes) else None
        one = vmap(
            lambda p, x, keep: functional_call(self.head, p, (x, keep)),
            in_dims=(0, own, own),
            randomness="different",
        )
        return one(parameters, *((hidden, mask) if own == 0 else (hidden[0], mask[0])))

    def scores_one_by_one(self, parameters: dict[str, Tensor], hidden: Tensor, mask: Tensor) -> Tensor:
        m = len(self.recipes)
        of_head = zip(*(p.unbind() for p in parameters.values()), strict=True)
        inputs = zip(hidden.expand(m, *hidden.shape[1:]), mask.expand(m, *mask.shape[1:]), strict=True)
        return torch.stack(
            [
                functional_call(self.head, dict(zip(parameters, own, strict=True)), one)
                for own, one in zip(of_head, inputs, strict=True)
            ]
        )  # [m, b, n_cls]

    def fit(self, data: Packed, training: Training, *, own_order: bool = False) -> None:
        """Train all heads. If own_order, each head has its own order of samples, else all have the same."""
        self.head.train()
        torch.manual_seed(self.recipes[0].seed)  # some heads use random numbers, too
        seeds = [recipe.seed for recipe in self.recipes] if own_order else [self.recipes[0].seed]
        orders = [torch.Generator(self.device).manual_seed(1000 + seed) for seed in seeds]
        per_epoch = math.ceil(len(data) / training.batch_size)
        steps = Steps(self, max(round(training.epochs * per_epoch), 1))
        while steps.done < steps.total:
            for which in batches(data, training.batch_size, orders):  # [1 or m, b]
                if steps.done < steps.total:
                    steps(*gather(data, which, training), data.label[which])

    @torch.no_grad()
    def predict(self, data: Packed, batch_inputs: int = 100_000) -> Tensor:
        """Return the probabilities [m, n, n_cls] with the averaged weights."""
        self.head.eval()
        found = torch.empty(len(self.recipes), len(data), self.n_cls, device=self.device)  # [m, n, n_cls]
        batch_inputs = min(batch_inputs, self.max_vectors * 2 // len(self.recipes))
        order = data.length.argsort()  # [n]
        lengths, start = data.length[order].tolist(), 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * lengths[end] * self.depth <= batch_inputs:
                end += 1
            which = order[None, start:end]  # [1, b]
            found[:, which[0]] = self.scores(self.average, *gather(data, which)).softmax(-1)
            start = end
        return found


class Steps:
    """The training steps of a stack: AdamW with a recipe per head, and the running mean of the weights."""

    def __init__(self, stack: Stack, total: int):
        self.stack, self.total, self.done = stack, total, 0
        self.p, self.average = list(stack.parameters.values()), list(stack.average.values())
        self.first, self.second = ([torch.zeros_like(p) for p in self.p] for _ in range(2))
        self.lr, self.decay = stack.column("lr"), stack.column("weight_decay")  # [m] each
        self.smoothing = stack.column("label_smoothing")[:, None]  # [m, 1]
        self.window = (stack.column("average") * total).clamp(min=1)  # [m]
        # Numbers that change with each step: the learning-rate factor, the two bias corrections of Adam, and
        # the greatest weight of the old mean. A CUDA graph reads them from this tensor.
        self.now = torch.zeros(4, device=stack.device)
        self.graphs: dict[Any, Any] = {}

    def __call__(self, hidden: Tensor, mask: Tensor, label: Tensor) -> None:
        """Take a step on hidden states [1 or m, b, n, depth, d], mask [1 or m, b, n], labels [1 or m, b]."""
        done, total = self.done, self.total
        rate = min(1.0, (done + 1) / (WARM_UP * total)) * (1 + math.cos(math.pi * done / total)) / 2
        now = [rate, 1 - BETAS[0] ** (done + 1), 1 - BETAS[1] ** (done + 1), (1 + done) / (10 + done)]
        for slot, value in zip(self.now, now, strict=True):
            slot.fill_(value)
        if hidden.is_cuda and CAPTURE:
            self.replay(hidden, mask, label)
        else:
            self.step(hidden, mask, label)
        self.done += 1

    def replay(self, *inputs: Tensor) -> None:
        """Replay the step as a CUDA graph. The first call with each shape captures it."""
        key = tuple(inputs[0].shape)
        if key not in self.graphs:
            copies = [t.clone() for t in inputs]
            state = [t.detach().clone() for t in self.state()]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(*copies)  # one-time setup
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self.step(*copies)
            with torch.no_grad():
                for tensor, before in zip(self.state(), state, strict=True):
                    tensor.copy_(before)
            self.graphs[key] = graph, copies
        graph, copies = self.graphs[key]
        for copy, tensor in zip(copies, inputs, strict=True):
            copy.copy_(tensor)
        graph.replay()

    def state(self) -> list[Tensor]:
        return [*self.p, *self.average, *self.first, *self.second]

    def step(self, hidden: Tensor, mask: Tensor, label: Tensor) -> None:
        self.update(self.gradients(hidden, mask, label))

    def gradients(self, hidden: Tensor, mask: Tensor, label: Tensor) -> list[Tensor]:
        """Return the gradients of the mean loss. The batch is split so that max_vectors is not exceeded."""
        m, (b, n, depth) = len(self.lr), hidden.shape[1:4]
        size = max(1, self.stack.max_vectors // (n * depth * m))
        gradients: list[Tensor] = []
        parts = zip(*(t.split(size, dim=1) for t in (hidden, mask, label)), strict=True)
        for x, keep, y in parts:
            log_p = self.stack.scores(self.stack.parameters, x, keep).log_softmax(-1)  # [m, b, n_cls]
            right = log_p.gather(-1, y.expand(m, -1)[..., None])[..., 0]  # [m, b]
            loss = -((1 - self.smoothing) * right + self.smoothing * log_p.mean(-1))  # [m, b]
            found = torch.autograd.grad(loss.sum() / b, self.p, materialize_grads=True)
            gradients = [a + c for a, c in zip(gradients, found, strict=True)] if gradients else list(found)
        return gradients

    def like(self, values: Tensor) -> list[Tensor]:
        """Reshape values [m] so that they broadcast with each parameter."""
        return [values.reshape(-1, *[1] * (p.dim() - 1)) for p in self.p]

    @torch.no_grad()
    def update(self, gradients: list[Tensor]) -> None:
        rate, first_sum, second_sum, keeps = self.now
        squares = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients])  # [parameters, m]
        clip = (CLIP_NORM / squares.sum(0).sqrt().clamp(min=1e-12)).clamp(max=1.0)  # [m]
        gradients = torch._foreach_mul(gradients, self.like(clip))
        torch._foreach_lerp_(self.first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self.second, BETAS[1])
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - BETAS[1])
        denominator = torch._foreach_sqrt(self.second)
        torch._foreach_add_(denominator, EPS)
        torch._foreach_mul_(self.p, self.like(1 - rate * self.lr * self.decay))
        update = torch._foreach_div(self.first, denominator)
        torch._foreach_mul_(update, self.like(-rate * self.lr * second_sum.sqrt() / first_sum))
        torch._foreach_add_(self.p, update)
        kept = torch.minimum(1 - 1 / self.window, keeps)  # [m]
        difference = torch._foreach_sub(self.p, self.average)
        torch._foreach_mul_(difference, self.like(1 - kept))
        torch._foreach_add_(self.average, difference)


def batches(data: Packed, batch_size: int, generators: list[torch.Generator]) -> Iterator[Tensor]:
    """Yield batches [len(generators), b] of samples of similar length, in random order.

    Some samples come twice, so that all batches have the same size.
    """
    device = data.start.device
    n = min(batch_size, len(data))
    missing = -len(data) % n
    orders = []
    for generator in generators:
        order = torch.randperm(len(data), device=device, generator=generator)
        order = torch.cat([order, order[:missing]])  # [n]
        noise = torch.rand(len(order), device=device, generator=generator)  # [n]
        orders.append(order[(data.length[order] * (1 + 0.2 * noise) + 2 * noise).argsort()])
    parts = torch.stack(orders).split(n, dim=1)  # [m, b] each
    # All heads take the batches in the same order, so that the lengths of a batch agree.
    for k in torch.randperm(len(parts), device=device, generator=generators[0]).tolist():
        yield parts[k]


def gather(data: Packed, which: Tensor, training: Training | None = None) -> tuple[Tensor, Tensor]:
    """Return hidden states [m, b, n, depth, d] of samples [m, b], and their mask [m, b, n].

    In training, positions are dropped at random, and n is one of LENGTHS.
    """
    length = data.length[which][..., None]  # [m, b, 1]
    longest = int(length.max())
    column = torch.arange(longest, device=which.device)  # [n]
    if training is not None:
        if training.drop:
            drawn = torch.rand(*which.shape, longest, device=which.device)  # [m, b, n]
            column = drawn.masked_fill(column >= length, 2.0).argsort(-1)  # [m, b, n]
            length = (length * (1 - training.drop)).ceil().long().clamp(min=1)  # [m, b, 1]
            longest = int(length.max())
        n = next(n for n in LENGTHS if n >= longest)
        column = torch.nn.functional.pad(column, (0, n))[..., :n]  # [m, b, n]
        longest = n
    mask = torch.arange(longest, device=which.device) < length  # [m, b, n]
    rows = torch.where(mask, data.start[which][..., None] + column, 0)  # [m, b, n]
    return data.hidden[rows].float(), mask


def as_vectors(data: Packed) -> Packed:
    """Return the hidden states as positions of depth 1, for heads that treat all depths the same."""
    depth = data.hidden.shape[1]
    hidden = data.hidden.flatten(0, 1)[:, None]  # [total depth, 1, d_emb]
    return Packed(hidden, data.start * depth, data.length * depth, data.label)


def as_means(splits: dict[str, Packed]) -> dict[str, Packed]:
    """Replace the positions of each sample by their mean (for images, the mean over patches).

    Linear probes use this. Hidden states are normalised first, and each feature of the means is scaled to
    mean 0 and variance 1 on the training set.
    """
    found = {name: torch.cat(list(means(data))) for name, data in splits.items()}  # [n, depth, d_emb] each
    mean, std = found["train"].mean(0), found["train"].std(0) + 1e-6  # [depth, d_emb] each
    scaled = {}
    for name, x in found.items():
        one = torch.ones_like(splits[name].start)  # [n]
        scaled[name] = Packed(((x - mean) / std).half(), one.cumsum(0) - 1, one, splits[name].label)
    return scaled


def means(data: Packed, batch_size: int = 500) -> Iterator[Tensor]:
    """Yield the means over positions for batches of samples, [b, depth, d_emb] each."""
    for which in torch.arange(len(data), device=data.start.device).split(batch_size):
        hidden, mask = (t[0] for t in gather(data, which[None]))  # [b, n, depth, d_emb], [b, n]
        mask[:, : data.special] = False
        normalized = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])  # [b, n, depth, d_emb]
        yield masked_mean(normalized, mask[..., None].expand(hidden.shape[:-1]))
