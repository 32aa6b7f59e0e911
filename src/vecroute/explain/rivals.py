"""Attribution methods from the literature, for comparison, and all methods by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecroute.compose.contribution import completeness_error
from vecroute.explain.attribution import (
    Attribution,
    Layout,
    Method,
    Reader,
    by_chance,
    by_phi,
    by_samples,
    by_states,
    by_votes,
    by_words,
    margins,
    scores_of,
)
from vecroute.explain.judge import Judge, ask_all
from vecroute.storage import require

GRADIENT_POSITIONS = 16_384  # positions that go through the encoder together with their graph; twice on a GPU


def by_gradient(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Compute gradient times input of the margin, through the encoder to the embeddings of the tokens."""
    with torch.enable_grad():
        embeddings = reader.embeddings(layout).detach().requires_grad_()  # [c, n, d_emb]
        total = margins(reader.head(reader.hidden(layout, embeddings), layout.mask), target, other).sum()
        (gradient,) = torch.autograd.grad(total, embeddings)  # [c, n, d_emb]
    return Attribution((gradient * embeddings).detach().sum(-1).flatten()[layout.rows])


def by_gradient_at_states(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Compute gradient times input of the margin, at the hidden states."""
    with torch.no_grad():
        hidden = reader.hidden(layout)  # [b, n_pos, depth, d_emb]
    with torch.enable_grad():
        hidden = hidden.clone().requires_grad_()
        total = margins(reader.head(hidden, layout.mask), target, other).sum()
        (gradient,) = torch.autograd.grad(total, hidden)  # [b, n_pos, depth, d_emb]
    return Attribution((gradient * hidden).detach().sum((-2, -1)))


def by_integrated_gradients(n_steps: int = 50, *, margin: bool = True, baseline: str = "zero") -> Method:
    """Make the method of integrated gradients from a baseline to the embeddings of the tokens.

    Args:
        n_steps: steps of the integral. ``completeness_error`` tells whether they were enough.
        margin: True to explain the margin over the other class, False for the score of the class.
        baseline: "zero", or "mask" or "pad" for the embedding of that token.
    """

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        content = torch.zeros_like(layout.attended).flatten()  # [c n]
        content[layout.rows[layout.content]] = True
        content = content.view_as(layout.attended)[..., None]  # [c, n, 1]
        with torch.no_grad():
            embeddings = reader.embeddings(layout)  # [c, n, d_emb]
            start = torch.zeros_like(embeddings)  # [c, n, d_emb]
            if baseline != "zero":
                token = getattr(reader.encoder.tokenizer, f"{baseline}_token_id")
                if token is None:
                    name = reader.encoder.name
                    raise ValueError(f"this baseline needs a {baseline} token, which {name} lacks")
                start = reader.embeddings(layout._replace(ids=torch.full_like(layout.ids, token)))
        without = torch.where(content, start, embeddings)  # [c, n, d_emb]

        def outputs(embeddings: Tensor) -> Tensor:
            """Return the output [steps, b] of each text and step, from embeddings [steps, c, n, d_emb]."""
            steps = len(embeddings)
            copies = repeated(layout, steps)
            hidden = reader.hidden(copies, embeddings.flatten(0, 1))  # [steps b, n_pos, depth, d_emb]
            scores = reader.head(hidden, copies.mask)  # [steps b, n_cls]
            wanted = (target.repeat(steps), other.repeat(steps) if margin else None)
            return margins(scores, *wanted).unflatten(0, (steps, -1))  # [steps, b]

        found = integrated(outputs, embeddings, without, n_steps)  # [c, n, d_emb]
        values = found.sum(-1).flatten()[layout.rows].where(layout.mask, 0.0).float()  # [b, n_pos]
        with torch.no_grad():
            base, output = outputs(torch.stack([without, embeddings]))  # [b] each
        return Attribution(values, completeness_error(values, base, output))

    return method


def by_integrated_gradients_at_states(n_steps: int = 50) -> Method:
    """Make the method of integrated gradients of the margin, from zero to the hidden states."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        with torch.no_grad():
            hidden = reader.hidden(layout)  # [b, n_pos, depth, d_emb]

        def outputs(hidden: Tensor) -> Tensor:
            """Return the margin [steps, b] of each text and step, from [steps, b, n_pos, depth, d_emb]."""
            steps = len(hidden)
            scores = reader.head(hidden.flatten(0, 1), layout.mask.repeat(steps, 1))  # [steps b, n_cls]
            return margins(scores, target.repeat(steps), other.repeat(steps)).unflatten(0, (steps, -1))

        without = torch.zeros_like(hidden)  # [b, n_pos, depth, d_emb]
        found = integrated(outputs, hidden, without, n_steps)  # [b, n_pos, depth, d_emb]
        values = found.sum((-2, -1)).where(layout.mask, 0.0)  # [b, n_pos]
        with torch.no_grad():
            base, output = outputs(torch.stack([without, hidden]))  # [b] each
        return Attribution(values, completeness_error(values, base, output))

    return method


def integrated(outputs: Callable[[Tensor], Tensor], x: Tensor, without: Tensor, n_steps: int) -> Tensor:
    """Integrate the gradients of outputs [steps, b] from ``without`` to x. The result has the shape of x.

    The steps are the nodes of Gauss and Legendre, as in captum.
    """
    nodes, weights = (
        torch.from_numpy(part).to(x) for part in np.polynomial.legendre.leggauss(n_steps)
    )  # [n_steps] each, on the interval from -1 to 1
    positions = GRADIENT_POSITIONS * (2 if x.is_cuda else 1)
    at_once = max(1, positions // (x.shape[0] * x.shape[1]))
    total = torch.zeros_like(x)
    for node, weight in zip(nodes.split(at_once), weights.split(at_once), strict=True):
        wide = [1] * x.dim()
        with torch.enable_grad():
            share = (node.view(-1, *wide) + 1) / 2  # [steps, 1, ...]
            point = (without + (x - without) * share).requires_grad_()  # [steps, ...]
            (gradient,) = torch.autograd.grad(outputs(point).sum(), point)
        total += (gradient * weight.view(-1, *wide)).sum(0)
    return total * (x - without) / 2


def repeated(layout: Layout, n: int) -> Layout:
    """Repeat the texts n times."""
    shift = torch.arange(n, device=layout.rows.device)[:, None, None] * layout.ids.numel()  # [n, 1, 1]
    rows = (layout.rows + shift).flatten(0, 1)  # [n b, n_pos]
    many = {name: getattr(layout, name).repeat(n, 1) for name in ("ids", "attended", "mask", "content")}
    return Layout(rows=rows, **many)


def by_rollout(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Compute attention rollout: the mean over the rows of (attention + identity) / 2 through all layers."""
    rolled = rollout(reader.encoder.model, layout.ids, layout.attended.long())  # [c, n, n]
    weight = layout.attended[..., None].float() / layout.attended.sum(-1)[:, None, None]  # [c, n, 1]
    return Attribution((rolled * weight).sum(1).flatten()[layout.rows])


@torch.no_grad()
def rollout(model: Any, *inputs: Tensor) -> Tensor:
    """Multiply (attention + identity) / 2 over all layers of a model, [c, n, n]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        found = model(*inputs, output_attentions=True).attentions  # [c, heads, n, n] each
    finally:
        model.set_attn_implementation(before)
    rolled = torch.eye(found[0].shape[-1], device=found[0].device)  # [n, n]
    for attention in found:
        rolled = (attention.float().mean(1) @ rolled + rolled) / 2  # [c, n, n]
    return rolled


def by_leave_one_out(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Compute how much the margin falls when each token is deleted alone."""
    pairs = zip(layout.texts(), target.tolist(), other.tolist(), strict=True)
    judges = [Judge(reader, *columns) for columns in pairs]
    ask_all(judges, [judge.one_less() for judge in judges])
    found = torch.zeros_like(layout.mask, dtype=torch.float32)  # [b, n_pos]
    found[layout.content] = torch.cat([judge.drops() for judge in judges]).to(found)
    return Attribution(found)


def by_samples_and_leave_one_out(samples: int = 12) -> Method:
    """Make the mean of two methods: ``by_samples``, and the fall of the margin without each token."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        ways = by_samples(samples), by_leave_one_out
        values = [way(reader, layout, target, other).values for way in ways]  # [b, n_pos] each
        return Attribution((values[0] + values[1]) / 2)

    return method


def by_lime(n_samples: int = 500) -> Method:
    """Make the method LIME (captum) of the margin: a weighted linear fit to texts with deleted tokens."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        captum, texts = require("captum.attr", "eval"), layout.texts()
        found = torch.zeros_like(layout.mask, dtype=torch.float32)  # [b, n_pos]
        for k in range(len(layout.rows)):
            ids = texts[k]

            def margin_of(kept: Tensor, k: int = k, ids: list[int] = ids) -> Tensor:
                left = [[t for t, keep in zip(ids, row, strict=True) if keep] for row in kept.bool().tolist()]
                return torch.from_numpy(scores_of(reader, left, target[k], other[k]))  # [m]

            with torch.random.fork_rng([]):
                torch.manual_seed(0)
                everything = torch.ones(1, len(ids))  # [1, n]
                values = captum.Lime(margin_of).attribute(
                    everything, n_samples=n_samples, perturbations_per_eval=64
                )  # [1, n]
            found[k, layout.content[k]] = values[0].to(found)
        return Attribution(found)

    return method


def by_shap(max_evals: int = 500) -> Method:
    """Make the method SHAP of the margin, with the partition explainer of the package shap, text by text."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        shap, texts = require("shap", "eval"), layout.texts()
        found = torch.zeros_like(layout.mask, dtype=torch.float32)  # [b, n_pos]
        base, output = torch.zeros_like(found[:, 0]), torch.zeros_like(found[:, 0])  # [b] each
        for k in range(len(layout.rows)):
            ids = texts[k]

            def margin_of(kept: np.ndarray, k: int = k, ids: list[int] = ids) -> np.ndarray:
                left = [[t for t, keep in zip(ids, row, strict=True) if keep] for row in kept]
                return scores_of(reader, left, target[k], other[k])  # [n]

            masker = TokenMasker(len(ids))
            explainer = shap.explainers.Partition(margin_of, masker)
            everything = np.ones((1, len(ids)), dtype=bool)  # [1, n]
            values = explainer(everything, max_evals=max_evals, silent=True).values  # [1, n]
            found[k, layout.content[k]] = torch.tensor(values[0], dtype=torch.float32, device=found.device)
            base[k], output[k] = margin_of(np.stack([~everything[0], everything[0]])).tolist()
        return Attribution(found, completeness_error(found, base, output))

    return method


class TokenMasker:
    """Masker for the partition explainer: it deletes tokens, and groups neighbours first."""

    def __init__(self, n: int):
        self.shape = (1, n)
        self.n = n
        self.clustering = neighbour_tree(n)  # [n - 1, 4]

    def __call__(self, mask: np.ndarray, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(mask, dtype=bool)[None],)


def neighbour_tree(n: int) -> np.ndarray:
    """Build a balanced tree over n neighbours as a linkage matrix [n - 1, 4]: two nodes, distance, leaves."""
    rows: list[list[float]] = []

    def join(start: int, end: int) -> int:
        if end - start == 1:
            return start
        middle = (start + end) // 2
        left, right = join(start, middle), join(middle, end)
        rows.append([left, right, end - start, end - start])
        return n + len(rows) - 1

    join(0, n)
    return np.array(rows, dtype=float).reshape(-1, 4)


METHODS: dict[str, Method] = {
    "words": by_words,
    "words, 24 samples": by_samples(24),
    "words, 12 samples and leave one out": by_samples_and_leave_one_out(12),
    "states": by_states(margin=True),
    "states, class": by_states(margin=False),
    "states, bias in votes": by_votes(margin=True),
    "states, class, bias in votes": by_votes(margin=False),
    "phi": by_phi,
    "gradient x input": by_gradient,
    "gradient x input at states": by_gradient_at_states,
    "integrated gradients, margin": by_integrated_gradients(),
    "integrated gradients, class": by_integrated_gradients(margin=False),
    "integrated gradients from [MASK]": by_integrated_gradients(baseline="mask"),
    "integrated gradients from [PAD]": by_integrated_gradients(baseline="pad"),
    "integrated gradients at states": by_integrated_gradients_at_states(),
    "attention rollout": by_rollout,
    "leave one out": by_leave_one_out,
    "SHAP, 500 evaluations": by_shap(500),
    "SHAP, 50 evaluations": by_shap(50),
    "SHAP, 4 evaluations": by_shap(4),
    "LIME, 500 samples": by_lime(500),
    "random": by_chance,
}
