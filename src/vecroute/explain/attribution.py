"""Ways to say which tokens a score came from, on equal terms: contributions, phi, and what others do.

Each method is ``method(reader, layout, target, other) -> Attribution``: how much each position speaks for
class ``target``, and for some of them against class ``other``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vecroute.compose.contribution import completeness_error, contributions
from vecroute.encoders.text import TextEncoder
from vecroute.heads import RoutingHead
from vecroute.storage import require


class Layout(NamedTuple):
    """Texts as their encoder takes them: token ids in chunks, and where the positions of each text are."""

    ids: Tensor  # [c, n] token ids of all chunks
    attended: Tensor  # [c, n] True but at padding
    rows: Tensor  # [b, n_pos] which of the c n positions each routed position of a text is
    mask: Tensor  # [b, n_pos] True but at padding
    content: Tensor  # [b, n_pos] True at tokens of the text, False at special ones


class Reader:
    """A frozen encoder and a head as one function of token ids.

    Args:
        encoder: with stride=0.
        head: hidden states -> scores, a ``RoutingHead`` where contributions or phi are asked for.
    """

    def __init__(self, encoder: TextEncoder, head: nn.Module):
        if encoder.stride:
            raise ValueError(f"faithfulness needs an encoder with stride=0, got stride={encoder.stride}")
        self.encoder = encoder
        self.head: Any = head.eval()
        self.device = next(head.parameters()).device
        special = encoder.tokenizer("a", return_special_tokens_mask=True)
        ids, is_special = special["input_ids"], special["special_tokens_mask"]
        inner = is_special.index(0)
        self.before, self.after = ids[:inner], [t for t, s in zip(ids, is_special, strict=True) if s][inner:]

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, without special tokens."""
        encoded = self.encoder.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return list(encoded["input_ids"])

    def layout(self, texts: Sequence[Sequence[int]]) -> Layout:
        """Token ids in chunks with special tokens, as ``TextEncoder`` makes them."""
        size = self.encoder.max_length - len(self.before) - len(self.after)
        chunks: list[list[int]] = []
        places, contents = [], []
        for text in texts:
            place, inner = [], []
            for start in range(0, max(len(text), 1), size):
                chunk = [*self.before, *text[start : start + size], *self.after]
                inside = range(len(self.before), len(chunk) - len(self.after))
                for k in range(len(chunk)):
                    if k in inside or self.encoder.special_tokens:
                        place.append((len(chunks), k))
                        inner.append(k in inside)
                chunks.append(chunk)
            places.append(place)
            contents.append(inner)
        longest, n_pos = max(map(len, chunks)), max(1, *map(len, places))
        pad = self.encoder.tokenizer.pad_token_id or 0
        ids = torch.tensor([chunk + [pad] * (longest - len(chunk)) for chunk in chunks])  # [c, n]
        lengths = torch.tensor([len(chunk) for chunk in chunks])[:, None]  # [c, 1]
        rows = torch.tensor(
            [[c * longest + k for c, k in place] + [0] * (n_pos - len(place)) for place in places]
        )  # [b, n_pos]
        used = torch.arange(n_pos) < torch.tensor([len(place) for place in places])[:, None]  # [b, n_pos]
        content = torch.tensor([row + [False] * (n_pos - len(row)) for row in contents])  # [b, n_pos]
        attended = torch.arange(longest) < lengths  # [c, n]
        return Layout(*(t.to(self.device) for t in (ids, attended, rows, used, content)))

    def hidden(self, layout: Layout, embeddings: Tensor | None = None) -> Tensor:
        """Hidden states [b, n_pos, depth, d_emb], of the token ids or of embeddings [c, n, d_emb] of them."""
        given = {"input_ids": layout.ids} if embeddings is None else {"inputs_embeds": embeddings}
        mask = layout.attended.long()  # [c, n]
        states = self.encoder.model(**given, attention_mask=mask, output_hidden_states=True).hidden_states
        every = torch.stack([states[k] for k in self.encoder.depths], 2)  # [c, n, depth, d_emb]
        return every.flatten(0, 1)[layout.rows].float()  # [b, n_pos, depth, d_emb]

    def embeddings(self, layout: Layout) -> Tensor:
        """The embeddings of the token ids, [c, n, d_emb]."""
        return self.encoder.model.get_input_embeddings()(layout.ids)

    def routing_head(self) -> RoutingHead:
        """The head, if contributions and credit pass through it."""
        if not isinstance(self.head, RoutingHead):
            raise ValueError(
                f"contributions and phi need a RoutingHead, got {type(self.head).__name__}: "
                "choose other methods, or head='routing', 'wide' or 'paper'"
            )
        return self.head

    def scores(self, layout: Layout) -> Tensor:
        """[b, n_cls]."""
        with torch.no_grad():
            return self.head(self.hidden(layout), layout.mask)


class Attribution(NamedTuple):
    """What a method says."""

    values: Tensor  # [b, n_pos]
    # [b] |sum of values + base - output| / (sum of |values| + |base|), None where no such sum is promised
    completeness_error: Tensor | None = None


Method = Callable[[Reader, Layout, Tensor, Tensor], Attribution]


def per_position(values: Tensor, depth: int) -> Tensor:
    """[b, i] summed over the depths of each position, [b, n_pos]."""
    return values.unflatten(-1, (-1, depth)).sum(-1)


def by_contributions(*, margin: bool, bias: str) -> Method:
    """Exact contributions to the score of the class, or to its margin over the other."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        head = reader.routing_head()
        with torch.no_grad():
            x_inp, mask = head.flatten(reader.hidden(layout), layout.mask)  # [b, i, d], [b, i]
        options: dict[str, Any] = {"bias": bias, "input_mask": mask}
        found = contributions(head.network, x_inp, target, other if margin else None, **options)
        values = per_position(found.values, head.depth)  # [b, n_pos]
        return Attribution(values, completeness_error(values, found.base, found.output))

    return method


def by_phi(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """End-to-end credit, as in the paper."""
    head = reader.routing_head()
    with torch.no_grad():
        credit = head.route(reader.hidden(layout), layout.mask).phi.unit_variance()
        phi = credit.dense().gather(-1, target[:, None, None].expand(-1, credit.dense().shape[-2], 1))[..., 0]
    return Attribution(per_position(phi, head.depth))


def by_gradient(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Gradient times input of the margin, through the encoder to the embeddings of the tokens."""
    with torch.enable_grad():
        embeddings = reader.embeddings(layout).detach().requires_grad_()  # [c, n, d_emb]
        total = margins(reader.head(reader.hidden(layout, embeddings), layout.mask), target, other).sum()
        (gradient,) = torch.autograd.grad(total, embeddings)  # [c, n, d_emb]
    return Attribution((gradient * embeddings).detach().sum(-1).flatten()[layout.rows])


def by_integrated_gradients(n_steps: int = 50, margin: bool = True, steps_at_once: int = 10) -> Method:
    """Integrated gradients through the encoder, by captum; the tokens of the text grow from zero."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        captum = require("captum.attr", "eval")
        content = torch.zeros_like(layout.attended).flatten()  # [c n]
        content[layout.rows[layout.content]] = True
        content = content.view_as(layout.attended)[..., None]  # [c, n, 1]
        with torch.no_grad():
            embeddings = reader.embeddings(layout)  # [c, n, d_emb]
        against = other if margin else None

        def outputs(embeddings: Tensor) -> Tensor:
            """Return the outputs [steps, b] of embeddings [steps, c, n, d_emb], for each text and step."""
            steps = len(embeddings)
            copies = repeated(layout, steps)
            hidden = reader.hidden(copies, embeddings.flatten(0, 1))  # [steps b, n_pos, depth, d_emb]
            scores = reader.head(hidden, copies.mask)  # [steps b, n_cls]
            wanted = (target.repeat(steps), None if against is None else against.repeat(steps))
            return margins(scores, *wanted).unflatten(0, (steps, -1))  # [steps, b]

        without = embeddings * ~content  # [c, n, d_emb]
        found = captum.IntegratedGradients(lambda x: outputs(x).sum(-1)).attribute(
            embeddings[None], baselines=without[None], n_steps=n_steps, internal_batch_size=steps_at_once
        )[0]  # [c, n, d_emb]
        values = found.detach().sum(-1).flatten()[layout.rows].where(layout.mask, 0.0).float()  # [b, n_pos]
        with torch.no_grad():
            base, output = outputs(torch.stack([without, embeddings]))  # [b] each
        return Attribution(values, completeness_error(values, base, output))

    return method


def repeated(layout: Layout, n: int) -> Layout:
    """The same texts n times over."""
    shift = torch.arange(n, device=layout.rows.device)[:, None, None] * layout.ids.numel()  # [n, 1, 1]
    rows = (layout.rows + shift).flatten(0, 1)  # [n b, n_pos]
    many = {name: getattr(layout, name).repeat(n, 1) for name in ("ids", "attended", "mask", "content")}
    return Layout(rows=rows, **many)


def by_rollout(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Attention rollout: the mean over the rows of (attention + identity) / 2 through all layers."""
    rolled = rollout(reader.encoder.model, layout.ids, layout.attended.long())  # [c, n, n]
    weight = layout.attended[..., None].float() / layout.attended.sum(-1)[:, None, None]  # [c, n, 1]
    return Attribution((rolled * weight).sum(1).flatten()[layout.rows])


@torch.no_grad()
def rollout(model: Any, *inputs: Tensor) -> Tensor:
    """The product over all layers of (attention + identity) / 2 for some inputs of a model, [c, n, n]."""
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


def by_shap(max_evals: int = 500) -> Method:
    """SHAP values of the margin by the partition explainer of the package shap, text by text."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        shap = require("shap", "eval")
        found = torch.zeros_like(layout.mask, dtype=torch.float32)  # [b, n_pos]
        base, output = torch.zeros_like(found[:, 0]), torch.zeros_like(found[:, 0])  # [b] each
        for k in range(len(layout.rows)):
            ids = layout.ids.flatten()[layout.rows[k]][layout.content[k]].tolist()

            def margin_of(kept: np.ndarray, k: int = k, ids: list[int] = ids) -> np.ndarray:
                texts = [[t for t, keep in zip(ids, row, strict=True) if keep] for row in kept]
                return scores_of(reader, texts, target[k], other[k])  # [n]

            masker = TokenMasker(len(ids))
            explainer = shap.explainers.Partition(margin_of, masker)
            everything = np.ones((1, len(ids)), dtype=bool)  # [1, n]
            values = explainer(everything, max_evals=max_evals, silent=True).values  # [1, n]
            found[k, layout.content[k]] = torch.tensor(values[0], dtype=torch.float32, device=found.device)
            base[k], output[k] = margin_of(np.stack([~everything[0], everything[0]])).tolist()
        return Attribution(found, completeness_error(found, base, output))

    return method


class TokenMasker:
    """For the partition explainer: tokens are deleted, neighbours are explained together first."""

    def __init__(self, n: int):
        self.shape = (1, n)
        self.n = n
        self.clustering = neighbour_tree(n)  # [n - 1, 4]

    def __call__(self, mask: np.ndarray, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(mask, dtype=bool)[None],)


def neighbour_tree(n: int) -> np.ndarray:
    """A balanced tree over n neighbours as a linkage matrix [n - 1, 4]: two nodes, distance, leaves."""
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


def by_chance(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Random numbers."""
    generator = torch.Generator().manual_seed(int(layout.ids.sum()))
    return Attribution(torch.rand(layout.mask.shape, generator=generator).to(layout.mask.device))


def margins(scores: Tensor, target: Tensor, other: Tensor | None) -> Tensor:
    """Return the score of the target [b], minus the score of the other if given, from scores [b, n_cls]."""
    chosen = scores.gather(-1, target[:, None])[:, 0]  # [b]
    return chosen if other is None else chosen - scores.gather(-1, other[:, None])[:, 0]  # [b]


def scores_of(reader: Reader, texts: Sequence[Sequence[int]], target: Tensor, other: Tensor) -> np.ndarray:
    """The margin of one pair of classes for many texts, [n]."""
    n, found = len(texts), []
    longest = max(1, *map(len, texts))
    size = max(1, (65_536 if reader.device.type == "cuda" else 2_048) // (longest + 2))
    for start in range(0, n, size):
        scores = reader.scores(reader.layout(texts[start : start + size]))  # [b, n_cls]
        found.append(margins(scores, target.expand(len(scores)), other.expand(len(scores))))
    return torch.cat(found).cpu().numpy()


METHODS: dict[str, Method] = {
    "contributions, margin": by_contributions(margin=True, bias="base"),
    "contributions, class": by_contributions(margin=False, bias="base"),
    "contributions, margin, bias in votes": by_contributions(margin=True, bias="votes"),
    "contributions, class, bias in votes": by_contributions(margin=False, bias="votes"),
    "phi": by_phi,
    "gradient x input": by_gradient,
    "integrated gradients, margin": by_integrated_gradients(),
    "integrated gradients, class": by_integrated_gradients(margin=False),
    "attention rollout": by_rollout,
    "SHAP, 500 evaluations": by_shap(500),
    "SHAP, 50 evaluations": by_shap(50),
    "SHAP, 4 evaluations": by_shap(4),
    "random": by_chance,
}
