"""Attribution methods with one signature, so that they can be compared: words, hidden states, phi.

Each method is ``method(reader, layout, target, other) -> Attribution``. It returns how much each position
speaks for class ``target``. Some methods explain the margin over class ``other``.
"""

from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vecroute.compose.contribution import completeness_error, contributions
from vecroute.encoders.text import TextEncoder, length_batches
from vecroute.explain.samples import sub_texts
from vecroute.explain.through import word_table
from vecroute.explain.words import HeldHead, Reading, Run, split_words
from vecroute.heads import RoutingHead


def batch_positions(device: torch.device) -> int:
    """Return how many positions are encoded at once."""
    return 32_768 if device.type == "cuda" else 2_048


class Layout(NamedTuple):
    """Texts in the form the encoder needs: token ids in chunks, and the positions of each text."""

    ids: Tensor  # [c, n] token ids of all chunks
    attended: Tensor  # [c, n] False at padding
    rows: Tensor  # [b, n_pos] index of each routed position among the c n positions
    mask: Tensor  # [b, n_pos] False at padding
    content: Tensor  # [b, n_pos] True at tokens of the text, False at special tokens

    def texts(self) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        ids, content = self.ids.flatten()[self.rows].cpu(), self.content.cpu()  # [b, n_pos] each
        return [row[own].tolist() for row, own in zip(ids, content, strict=True)]


class Reader:
    """A frozen encoder and a head as one function of token ids.

    Args:
        encoder: an encoder with stride=0.
        head: hidden states -> scores. Methods by votes or phi need a ``RoutingHead``.
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
        """Return the token ids of each text, without special tokens."""
        encoded = self.encoder.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return list(encoded["input_ids"])

    def words(self, ids: Sequence[int]) -> list[int]:
        """Return the index of the word of each token. A WordPiece "##..." continues a word."""
        pieces = self.encoder.tokenizer.convert_ids_to_tokens(list(ids))
        return np.cumsum([not piece.startswith("##") for piece in pieces]).tolist()

    def layout(self, texts: Sequence[Sequence[int]]) -> Layout:
        """Arrange token ids in chunks with special tokens, in the same way as ``TextEncoder``."""
        size = self.encoder.max_length - len(self.before) - len(self.after)
        parts = [
            (b, text[start : start + size])
            for b, text in enumerate(texts)
            for start in range(0, max(len(text), 1), size)
        ]
        chunks = [[*self.before, *part, *self.after] for _, part in parts]
        lengths = torch.tensor([len(chunk) for chunk in chunks])[:, None]  # [c, 1]
        column = torch.arange(max(1, int(lengths.max())))  # [n]
        attended = column < lengths  # [c, n]
        ids = torch.full(attended.shape, self.encoder.tokenizer.pad_token_id or 0)  # [c, n]
        ids[attended] = torch.tensor(list(chain.from_iterable(chunks)), dtype=torch.long)
        inner = (column >= len(self.before)) & (column < lengths - len(self.after))  # [c, n]
        used = attended if self.encoder.special_tokens else inner  # [c, n]
        of = torch.tensor([b for b, _ in parts])  # [c] the text of each chunk
        n_used = torch.zeros(len(texts), dtype=torch.long).index_add_(0, of, used.sum(-1))  # [b]
        mask = torch.arange(max(1, int(n_used.max()))) < n_used[:, None]  # [b, n_pos]
        rows, content = torch.zeros(mask.shape, dtype=torch.long), torch.zeros_like(mask)  # [b, n_pos] each
        rows[mask] = used.flatten().nonzero()[:, 0]  # chunks are in the order of their texts
        content[mask] = inner[used]
        return Layout(*(t.to(self.device) for t in (ids, attended, rows, mask, content)))

    def hidden(self, layout: Layout, embeddings: Tensor | None = None) -> Tensor:
        """Return hidden states [b, n_pos, depth, d_emb] of the token ids, or of embeddings [c, n, d_emb]."""
        given = {"input_ids": layout.ids} if embeddings is None else {"inputs_embeds": embeddings}
        mask = layout.attended.long()  # [c, n]
        states = self.encoder.model(**given, attention_mask=mask, output_hidden_states=True).hidden_states
        every = torch.stack([states[k] for k in self.encoder.depths], 2)  # [c, n, depth, d_emb]
        return every.flatten(0, 1)[layout.rows].float()  # [b, n_pos, depth, d_emb]

    def embeddings(self, layout: Layout) -> Tensor:
        """Return the embeddings of the token ids, [c, n, d_emb]."""
        return self.encoder.model.get_input_embeddings()(layout.ids)

    def routing_head(self) -> RoutingHead:
        """Return the head, or raise if it is not a network of routings, which has votes and phi."""
        if not isinstance(self.head, RoutingHead):
            raise ValueError(
                f"phi and votes need a RoutingHead, got {type(self.head).__name__}: "
                "choose other methods, or head='routing', 'wide' or 'paper'"
            )
        return self.head

    def scores(self, layout: Layout) -> Tensor:
        """Return the scores, [b, n_cls]."""
        with torch.no_grad():
            return self.head(self.hidden(layout), layout.mask)


class Attribution(NamedTuple):
    """The result of a method."""

    values: Tensor  # [b, n_pos]
    # [b] |sum of values + base - output| / (sum of |values| + |base|), None if the method promises no sum
    completeness_error: Tensor | None = None


Method = Callable[[Reader, Layout, Tensor, Tensor], Attribution]


def per_position(values: Tensor, depth: int) -> Tensor:
    """Sum values [b, i] over the depths of each position, [b, n_pos]."""
    return values.unflatten(-1, (-1, depth)).sum(-1)


def by_words(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Compute exact contributions of the tokens to the margin, through the encoder."""
    if len(layout.ids) == len(layout.rows):
        return _words_of_chunks(reader, layout, target, other)
    # The encoder reads the chunks of a long text separately, and the head reads them together. So each long
    # text is explained alone.
    texts = layout.texts()
    long = max(len(layout.ids[0]) - len(reader.before) - len(reader.after), 1)  # tokens of the longest chunk
    short = [k for k, text in enumerate(texts) if len(text) <= long]
    values = torch.zeros_like(layout.mask, dtype=torch.float32)  # [b, n_pos]
    errors: Any = torch.zeros_like(values[:, 0])  # [b]
    for which in [short, *([k] for k in range(len(texts)) if k not in short)]:
        if which:
            part = reader.layout([texts[k] for k in which])
            found = _words_of_chunks(reader, part, target[which], other[which])
            for row, k in enumerate(which):
                values[k, layout.mask[k]] = found.values[row][part.mask[row]]
            errors[which] = found.completeness_error
    return Attribution(values, errors)


def _words_of_chunks(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Do the same as ``by_words`` for texts that have one chunk each, or for a single text."""
    used = torch.zeros_like(layout.attended).flatten()  # [c n]
    used[layout.rows[layout.mask]] = True

    def call() -> list[Tensor]:
        mask = layout.attended.long()  # [c, n]
        found = reader.encoder.model(layout.ids, attention_mask=mask, output_hidden_states=True)
        return [found.hidden_states[k] for k in reader.encoder.depths]

    run, name = Run(call, used.view_as(layout.attended)), reader.encoder.name
    reading = Reading([run], word_table(reader.encoder.model, name), name, layout.mask)
    split = split_words(reading, reader.head, torch.stack([target, other], 1), margin=True)
    values = split.values[0][..., 0, 0].flatten()[layout.rows].where(layout.mask, 0.0)  # [b, n_pos]
    return Attribution(values, completeness_error(values, split.base[:, 0], split.scores[:, 0]))


def by_samples(samples: int = 24) -> Method:
    """Make the method of mean contributions over random sub-texts; see ``vecroute.explain.samples``."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        found = by_words(reader, layout, target, other).values  # [b, n_pos]
        texts = layout.texts()
        drawn = [
            (k, [bool(stays) for stays in keep])
            for k, ids in enumerate(texts)
            for keep in sub_texts(reader.words(ids), samples, seed=0)
        ]
        total, count = torch.zeros(found.shape), torch.zeros(found.shape)  # [b, n_pos] each
        content = layout.content.cpu()  # [b, n_pos]
        for which in length_batches([sum(keep) + 2 for _, keep in drawn], batch_positions(reader.device)):
            parts = [drawn[m] for m in which]
            kept = reader.layout([list(compress(texts[k], keep)) for k, keep in parts])
            rows = torch.tensor([k for k, _ in parts], device=target.device)  # [m]
            values = by_words(reader, kept, target[rows], other[rows]).values.cpu()  # [m, n_pos]
            for (k, keep), own, inner in zip(parts, values, kept.content.cpu(), strict=True):
                places = content[k].nonzero()[:, 0][torch.tensor(keep)]  # positions of the kept tokens
                total[k, places] += own[inner]
                count[k, places] += 1
        return Attribution(torch.where(count.to(found) > 0, (total / count).to(found), found))

    return method


def by_states(*, margin: bool) -> Method:
    """Make the method of exact contributions of hidden states, to the score or to the margin."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        with torch.no_grad():
            hidden = reader.hidden(layout)  # [b, n_pos, depth, d_emb]
        outputs = torch.stack([target, other] if margin else [target], 1)  # [b, 2] or [b, 1]
        held = HeldHead(reader.head, hidden, layout.mask, outputs, margin)
        values = (held.gradients[0] * held.hidden).sum((-2, -1)).where(layout.mask, 0.0)  # [b, n_pos]
        return Attribution(values, completeness_error(values, held.base()[:, 0], held.scores[:, 0]))

    return method


def by_votes(*, margin: bool) -> Method:
    """Make the method of contributions of hidden states to a ``RoutingHead``, with the biases of votes."""

    def method(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        head = reader.routing_head()
        with torch.no_grad():
            x_inp, mask = head.flatten(reader.hidden(layout), layout.mask)  # [b, i, d], [b, i]
        against = other if margin else None
        found = contributions(head.network, x_inp, target, against, bias="votes", input_mask=mask)
        values = per_position(found.values, head.depth)  # [b, n_pos]
        return Attribution(values, completeness_error(values, found.base, found.output))

    return method


def by_phi(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Return the end-to-end credit, as in the paper."""
    head = reader.routing_head()
    with torch.no_grad():
        credit = head.route(reader.hidden(layout), layout.mask).phi.unit_variance()
        phi = credit.dense().gather(-1, target[:, None, None].expand(-1, credit.dense().shape[-2], 1))[..., 0]
    return Attribution(per_position(phi, head.depth))


def by_chance(reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
    """Return random numbers."""
    generator = torch.Generator().manual_seed(int(layout.ids.sum()))
    return Attribution(torch.rand(layout.mask.shape, generator=generator).to(layout.mask.device))


def margins(scores: Tensor, target: Tensor, other: Tensor | None) -> Tensor:
    """Return the score of the target [b], minus the score of the other if given, from scores [b, n_cls]."""
    chosen = scores.gather(-1, target[:, None])[:, 0]  # [b]
    return chosen if other is None else chosen - scores.gather(-1, other[:, None])[:, 0]  # [b]


def scores_of(reader: Reader, texts: Sequence[Sequence[int]], target: Tensor, other: Tensor) -> np.ndarray:
    """Return the margin of one pair of classes for many texts, [n]."""
    n, found = len(texts), []
    longest = max(1, *map(len, texts))
    size = max(1, batch_positions(reader.device) // (longest + 2))
    for start in range(0, n, size):
        scores = reader.scores(reader.layout(texts[start : start + size]))  # [b, n_cls]
        found.append(margins(scores, target.expand(len(scores)), other.expand(len(scores))))
    return torch.cat(found).cpu().numpy()
