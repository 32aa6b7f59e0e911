"""Train many heads of one shape at once: their parameters are stacked, and each has a recipe of its own.

What a step costs on a GPU is mostly to launch it, so twenty small heads take hardly longer than one.
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

BETAS, EPS, CLIP_NORM, WARM_UP = (0.9, 0.999), 1e-8, 1.0, 0.1


@dataclass(frozen=True)
class Recipe:
    """How one head is trained: AdamW, a learning rate that rises and falls, a running mean of the weights.

    Args:
        lr, weight_decay: of AdamW.
        drop_inputs: share of the input vectors left out at each step, never all of a sample.
        label_smoothing: share of each target that is spread over all classes.
        average: the weights that are kept are a running mean over about this share of all steps.
        seed: of the initial weights, of the order of the samples, and of the inputs left out.
    """

    lr: float = 3e-3
    weight_decay: float = 0.05
    drop_inputs: float = 0.1
    label_smoothing: float = 0.0
    average: float = 0.05
    seed: int = 0


class Stack:
    """Heads of one shape with one recipe each; m counts the heads.

    Args:
        name, options: of the heads, see ``vecroute.heads.make_head``.
        recipes: one for each head.
        device: where to train.
        max_vectors: at most so many vectors, those of all heads together, go through them at once.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        recipes: list[Recipe],
        device: str,
        max_vectors: int = 500_000,
    ):
        heads = [make_head(name, seed=r.seed, **options).to(device) for r in recipes]
        self.head = heads[0]
        self.head.compacts = False  # how many inputs are left would differ from head to head
        self.n_parameters = sum(p.numel() for p in self.head.parameters())
        stacked, _ = stack_module_state(heads)
        self.parameters = {name: p.detach().requires_grad_() for name, p in stacked.items()}  # [m, ...] each
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}  # [m, ...] each
        self.recipes, self.device, self.max_vectors = recipes, device, max_vectors
        self.depth, self.n_cls = options["depth"], options["n_cls"]

    def column(self, name: str) -> Tensor:
        """A number of each recipe, [m]."""
        return torch.tensor([float(getattr(recipe, name)) for recipe in self.recipes], device=self.device)

    def scores(self, parameters: dict[str, Tensor], hidden: Tensor, mask: Tensor) -> Tensor:
        """[m, b, n_cls] of hidden states [(m,) b, n_pos, depth, d] and masks [(m,) b, n_pos, depth]."""
        one = vmap(
            lambda p, x, keep: functional_call(self.head, p, (x, keep)),
            in_dims=(0, 0 if hidden.dim() == 5 else None, 0 if mask.dim() == 4 else None),
            randomness="different",
        )
        return one(parameters, hidden, mask)

    def fit(
        self,
        data: Packed,
        *,
        epochs: float,
        batch_size: int,
        n_pos: int | None = None,
        own_order: bool = False,
    ) -> None:
        """Train all heads.

        Args:
            data: what they learn from.
            epochs: how often they see it.
            batch_size: samples per step.
            n_pos: at most so many positions of a sample, drawn at random, are used in a step.
            own_order: whether each head sees the samples in an order of its own, or all in that of the first.
        """
        self.head.train()
        torch.manual_seed(self.recipes[0].seed)  # for what is random inside of heads
        generator = torch.Generator(self.device).manual_seed(self.recipes[0].seed)
        seeds = [recipe.seed for recipe in self.recipes] if own_order else [self.recipes[0].seed]
        orders = [torch.Generator(self.device).manual_seed(1000 + seed) for seed in seeds]
        optimizer = Optimizer(self)
        per_epoch = math.ceil(len(data) / batch_size)
        total, done = max(round(epochs * per_epoch), 1), 0
        while done < total:
            for which in batches(data, batch_size, orders):  # [1 or m, b]
                if done == total:
                    break
                self._step(data, which, n_pos, generator)
                optimizer.step(done, total)
                done += 1

    def _step(self, data: Packed, which: Tensor, n_pos: int | None, generator: torch.Generator) -> None:
        """Gradients of the mean loss over some samples, as many at a time as memory is meant for."""
        longest = int(data.length[which].max())
        longest = min(longest, n_pos or longest)
        size = max(1, self.max_vectors // (longest * self.depth * len(self.recipes)))
        drop, smoothing = self.column("drop_inputs"), self.column("label_smoothing")[:, None]  # [m], [m, 1]
        for part in which.split(size, dim=1):
            hidden, mask = gather(data, part, longest, generator)  # [(m,) b, n, depth, d], [1 or m, b, n]
            used = mask[..., None].expand(-1, -1, -1, self.depth)  # [1 or m, b, n, depth]
            shape = (len(drop), *used.shape[1:])
            drawn = torch.rand(shape, device=self.device, generator=generator)  # [m, b, n, depth]
            keep = used & (drawn >= drop[:, None, None, None])  # [m, b, n, depth]
            keep = torch.where(keep.any((2, 3), keepdim=True), keep, used)  # [m, b, n, depth]
            log_p = self.scores(self.parameters, hidden, keep).log_softmax(-1)  # [m, b, n_cls]
            label = data.label[part].expand(len(drop), -1)  # [m, b]
            right = log_p.gather(-1, label[..., None])[..., 0]  # [m, b]
            loss = -((1 - smoothing) * right + smoothing * log_p.mean(-1))  # [m, b]
            (loss.sum() / which.shape[1]).backward()

    @torch.no_grad()
    def predict(self, data: Packed, batch_positions: int = 20_000) -> Tensor:
        """The probabilities [m, n, n_cls] by the averaged weights."""
        self.head.eval()
        found = torch.empty(len(self.recipes), len(data), self.n_cls, device=self.device)  # [m, n, n_cls]
        batch_positions = min(batch_positions, self.max_vectors * 4 // (self.depth * len(self.recipes)))
        order = data.length.argsort()  # [n]
        lengths, start = data.length[order].tolist(), 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * lengths[end] <= batch_positions:
                end += 1
            which = order[None, start:end]  # [1, b]
            hidden, mask = gather(data, which, lengths[end - 1])  # [b, n, depth, d], [1, b, n]
            mask = mask[0, ..., None].expand(-1, -1, self.depth)  # [b, n, depth]
            found[:, which[0]] = self.scores(self.average, hidden, mask).softmax(-1)
            start = end
        return found


class Optimizer:
    """AdamW with the learning rate, weight decay and gradient norm of each head, and the running mean."""

    def __init__(self, stack: Stack):
        self.stack, self.p = stack, list(stack.parameters.values())
        self.first, self.second = ([torch.zeros_like(p) for p in self.p] for _ in range(2))
        self.average = list(stack.average.values())
        self.lr, self.decay = stack.column("lr"), stack.column("weight_decay")  # [m] each
        self.share = stack.column("average")  # [m]

    def like(self, values: Tensor) -> list[Tensor]:
        """values [m], in the shape that multiplies each parameter."""
        return [values.reshape(-1, *[1] * (p.dim() - 1)) for p in self.p]

    @torch.no_grad()
    def step(self, done: int, total: int) -> None:
        gradients: list[Any] = [p.grad for p in self.p]
        squares = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients])  # [parameters, m]
        clip = (CLIP_NORM / squares.sum(0).sqrt().clamp(min=1e-12)).clamp(max=1.0)  # [m]
        torch._foreach_mul_(gradients, self.like(clip))
        rate = min(1.0, (done + 1) / (WARM_UP * total)) * (1 + math.cos(math.pi * done / total)) / 2
        torch._foreach_lerp_(self.first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self.second, BETAS[1])
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - BETAS[1])
        denominator = torch._foreach_div(self.second, 1 - BETAS[1] ** (done + 1))
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, EPS)
        torch._foreach_mul_(self.p, self.like(1 - rate * self.lr * self.decay))
        update = torch._foreach_div(self.first, denominator)
        torch._foreach_mul_(update, self.like(-rate * self.lr / (1 - BETAS[0] ** (done + 1))))
        torch._foreach_add_(self.p, update)
        keep = (1 - 1 / (self.share * total).clamp(min=1)).clamp(max=(1 + done) / (10 + done))  # [m]
        difference = torch._foreach_sub(self.p, self.average)
        torch._foreach_mul_(difference, self.like(1 - keep))
        torch._foreach_add_(self.average, difference)
        for p in self.p:
            p.grad = None


def batches(data: Packed, batch_size: int, generators: list[torch.Generator]) -> Iterator[Tensor]:
    """All samples in batches [len(generators), b] of about one length, in random order."""
    noise = torch.stack(
        [torch.rand(len(data), device=data.start.device, generator=g) for g in generators]
    )  # [m, n]
    order = (data.length * (1 + 0.2 * noise) + 2 * noise).argsort(-1)  # [m, n]
    parts = order.split(batch_size, dim=1)
    for k in torch.randperm(
        len(parts), generator=generators[0], device=data.start.device
    ).tolist():  # the same for all, so that lengths agree
        yield parts[k]


def gather(
    data: Packed, which: Tensor, n_pos: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Hidden states [b, n, depth, d], or [m, b, n, depth, d], of samples [m, b], and their mask [m, b, n].

    Samples that are longer than n_pos give so many positions, drawn at random.
    """
    length = data.length[which][..., None]  # [m, b, 1]
    column = torch.arange(n_pos, device=which.device)  # [n]
    mask = column < length  # [m, b, n]
    longest = int(length.max())
    if longest > n_pos:
        drawn = torch.rand(*which.shape, longest, device=which.device, generator=generator)  # [m, b, longest]
        drawn = drawn.masked_fill(torch.arange(longest, device=which.device) >= length, 2.0)
        column = drawn.argsort(-1)[..., :n_pos]  # [m, b, n]
    rows = data.start[which][..., None] + column  # [m, b, n]
    hidden = data.hidden[torch.where(mask, rows, 0)].float()  # [m, b, n, depth, d]
    return hidden[0] if len(which) == 1 else hidden, mask
