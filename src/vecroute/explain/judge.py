"""Ask a reader for the probabilities of a text with some of its tokens deleted, many texts at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vecroute.encoders.text import length_batches
from vecroute.explain.attribution import Layout, Reader, batch_positions, margins

# Shares of the tokens. Comprehensiveness and sufficiency are means over FRACTIONS, insertion and deletion are
# curves over CURVE.
FRACTIONS = (0.05, 0.1, 0.2, 0.3, 0.5)
CURVE = (0.1, 0.3, 0.5, 0.7, 0.9)
SHARES = tuple(sorted({*FRACTIONS, *CURVE}))

Curve = dict[float, float]  # share of the tokens -> probability


class Judge:
    """Compute probabilities of one text with some tokens deleted, and remember earlier results.

    Args:
        reader: encoder and head.
        tokens: the text, as token ids.
        target, other: the explained class, and the class of the margin.
    """

    def __init__(self, reader: Reader, tokens: list[int], target: int, other: int):
        self.reader, self.tokens, self.target, self.other = reader, tokens, target, other
        self.known: dict[tuple[int, ...], tuple[float, float]] = {}  # tokens -> p and margin

    def ask(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
        """Return the probability and the margin of texts made of some of the tokens."""
        ask_all([self], [texts])
        return [self.known[text] for text in texts]

    def some(self, keep: Tensor) -> tuple[int, ...]:
        """Return the tokens at which keep [n] is True."""
        return tuple(t for t, stays in zip(self.tokens, keep.tolist(), strict=True) if stays)

    def shares(self, order: Tensor) -> Tensor:
        """Return a mask [shares, n] of the first tokens, at least one, for every share."""
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))  # [n]
        return torch.stack([rank < max(1, round(share * len(order))) for share in SHARES])

    def parts(self, order: Tensor) -> list[tuple[int, ...]]:
        """Return the texts that ``deleted`` and ``kept`` ask for."""
        first = self.shares(order)  # [shares, n]
        return [self.some(keep) for keep in (*~first, *first)]

    def deleted(self, order: Tensor) -> Curve:
        """Return the probability without the first tokens of an order [n], for every share."""
        return self._curve(~self.shares(order))

    def kept(self, order: Tensor) -> Curve:
        """Return the probability of the first tokens of an order [n] alone, for every share."""
        return self._curve(self.shares(order))

    def _curve(self, masks: Tensor) -> Curve:
        found = self.ask([self.some(keep) for keep in masks])
        return {share: p for share, (p, _) in zip(SHARES, found, strict=True)}

    def one_less(self) -> list[tuple[int, ...]]:
        """Return the text, and the text without each of its tokens."""
        text = tuple(self.tokens)
        return [text, *(text[:k] + text[k + 1 :] for k in range(len(text)))]

    def drops(self) -> Tensor:
        """Return how much the margin falls when each token is deleted alone, [n]."""
        (_, whole), *rest = self.ask(self.one_less())
        return torch.tensor([whole - margin for _, margin in rest])  # [n]


def ask_all(judges: Sequence[Judge], texts: Sequence[Sequence[tuple[int, ...]]]) -> None:
    """Let judges of one reader learn the answers on texts of each of them, in batches over all judges."""
    new = [
        (judge, text)
        for judge, own in zip(judges, texts, strict=True)
        for text in dict.fromkeys(own)
        if text not in judge.known
    ]
    if not new:
        return
    reader = judges[0].reader
    for group in length_batches([len(t) + 2 for _, t in new], batch_positions(reader.device)):
        asked = [new[k] for k in group]
        scores = reader.scores(reader.layout([text for _, text in asked])).cpu()  # [b, n_cls]
        pairs = torch.tensor([(judge.target, judge.other) for judge, _ in asked])  # [b, 2]
        target, other = pairs.unbind(1)  # [b] each
        p = scores.softmax(-1).gather(-1, target[:, None])[:, 0].tolist()
        margin = margins(scores, target, other).tolist()
        for (judge, text), *pair in zip(asked, p, margin, strict=True):
            judge.known[text] = (pair[0], pair[1])


@torch.no_grad()
def ask_masked(
    judges: Sequence[Judge], layout: Layout, orders: Sequence[Tensor]
) -> list[tuple[Curve, Curve]]:
    """Do the same as ``deleted`` and ``kept``, but keep the hidden states and mask tokens at the head.

    Args:
        judges: judges of one reader.
        layout: the texts of the judges.
        orders: the order [n] of the tokens of each text.
    """
    reader, size = judges[0].reader, 2 * len(SHARES)
    masks = (~layout.content & layout.mask).cpu().repeat_interleave(size, 0)  # [b size, n_pos]
    for k, (judge, order, content) in enumerate(zip(judges, orders, layout.content.cpu(), strict=True)):
        first = judge.shares(order)  # [shares, n]
        masks[k * size : (k + 1) * size, content] = torch.cat([~first, first])
    hidden, masks = reader.hidden(layout), masks.to(reader.device)  # [b, n_pos, depth, d_emb]
    rows = torch.arange(len(judges), device=reader.device).repeat_interleave(size)  # [b size]
    at_once = max(1, batch_positions(reader.device) // masks.shape[1])
    pairs = zip(rows.split(at_once), masks.split(at_once), strict=True)
    scores = torch.cat([reader.head(hidden[row], mask) for row, mask in pairs]).cpu()  # [b size, n_cls]
    targets = torch.tensor([judge.target for judge in judges]).repeat_interleave(size)  # [b size]
    found = scores.softmax(-1).gather(-1, targets[:, None]).view(-1, 2, len(SHARES)).tolist()
    return [(dict(zip(SHARES, a, strict=True)), dict(zip(SHARES, b, strict=True))) for a, b in found]
