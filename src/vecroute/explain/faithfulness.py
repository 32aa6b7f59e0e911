"""Measure how faithful explanations are: delete the tokens that they name, and compute the scores again."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecroute.encoders.text import length_batches
from vecroute.explain.attribution import Layout, Method, Reader, margins
from vecroute.explain.rivals import METHODS
from vecroute.ops.checks import check_choice

FRACTIONS = (
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
)  # shares of the tokens; comprehensiveness and sufficiency are means over them
CURVE = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of the tokens; insertion and deletion are curves over them
WIDTH = 100  # width of the table in characters
BATCH_POSITIONS = {"cuda": 32_768, "cpu": 2_048}
# The measures, and whether more is better.
MEASURES = {
    "comprehensiveness": True,
    "sufficiency": False,
    "deletion": False,
    "insertion": True,
    "leave_one_out": True,
    "completeness_error": False,
}
LEGEND = {
    "comprehensiveness": "drop of the probability when the strongest tokens are deleted",
    "sufficiency": "drop of the probability when only the strongest tokens are kept",
    "deletion": "mean probability while tokens are deleted one share after another, strongest first",
    "insertion": "mean probability while tokens are inserted one share after another, strongest first",
    "leave_one_out": "rank correlation with the drop of the score when each token is deleted alone",
    "completeness_error": "relative difference between the sum of the numbers and the score",
    "_masked": "the same, with tokens masked at the head instead of deleted from the text",
    "seconds": "time of an explanation, including the encoder",
}


def measure(
    reader: Reader,
    texts: Sequence[str],
    methods: Sequence[str] | dict[str, Method] = tuple(METHODS),
    *,
    leave_one_out: bool = True,
    step: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure explanations of the predicted class of each text.

    Let p be the probability of that class. A method orders the tokens by how much they speak for it. Then:

    - comprehensiveness: p minus p without the first tokens, mean over ``FRACTIONS``; more is better;
    - sufficiency: p minus p of the first tokens alone, mean over ``FRACTIONS``; less is better;
    - deletion, insertion: area under the curve of p while the first tokens are deleted, or inserted;
    - leave_one_out: rank correlation with the fall of the margin when each token is deleted alone;
    - completeness_error: relative error of the sum, for methods whose values should add up;
    - seconds: time per explanation, including the encoder.

    Tokens are deleted from the text, and the rest is encoded again. Measures that end in ``_masked`` keep the
    hidden states and mask the tokens at the head.

    Args:
        reader: encoder and head.
        texts: texts with at least one token each.
        methods: names from ``METHODS``, or a dict of methods by name.
        leave_one_out: True to measure leave_one_out, which encodes one more text for every token.
        step: called with the number of finished texts after each batch.

    Returns:
        A row for each text and method.
    """
    if not isinstance(methods, dict):
        for name in methods:
            check_choice("methods", name, tuple(METHODS))
        methods = {name: METHODS[name] for name in methods}
    tokens = reader.tokens(texts)
    if not all(tokens):
        empty = next(k for k, ids in enumerate(tokens) if not ids)
        raise ValueError(f"texts must have at least one token each, text {empty} is {texts[empty]!r}")
    rows: list[dict[str, Any]] = []
    for group in length_batches(list(map(len, tokens)), BATCH_POSITIONS[reader.device.type]):
        rows += measure_batch(reader, group, [tokens[k] for k in group], methods, leave_one_out)
        if step:
            step(len(group))
    return rows


def measure_batch(
    reader: Reader,
    which: Sequence[int],
    tokens: Sequence[list[int]],
    methods: dict[str, Method],
    leave_one_out: bool,
) -> list[dict[str, Any]]:
    """Return the rows of some texts, given as token ids."""
    layout = reader.layout(tokens)
    scores = reader.scores(layout)  # [b, n_cls]
    target, other = scores.topk(2).indices.unbind(-1)  # [b] each
    p = scores.softmax(-1).gather(-1, target[:, None])[:, 0].tolist()
    judges = [Judge(reader, *columns) for columns in zip(tokens, target, other, strict=True)]
    drops = [judge.drops() for judge in judges] if leave_one_out else []  # [n] each
    rows = []
    for name, method in methods.items():
        started = time.perf_counter()
        values, error = method(reader, layout, target, other)  # [b, n_pos], [b]
        if values.is_cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - started) / len(tokens)
        for k, judge in enumerate(judges):
            said = values[k][layout.content[k]]  # [n]
            order = said.argsort(descending=True, stable=True)  # [n]
            row = {"text": which[k], "n_tokens": len(tokens[k]), "method": name, "seconds": seconds}
            row |= curves(p[k], judge.deleted(order), judge.kept(order))
            masked = curves(p[k], *judge.masked(order, layout, k))
            row |= {f"{measure}_masked": value for measure, value in masked.items()}
            row["leave_one_out"] = spearman(said, drops[k]) if drops else None
            row["completeness_error"] = None if error is None else float(error[k])
            rows.append(row)
    return rows


def curves(p: float, deleted: dict[float, float], kept: dict[float, float]) -> dict[str, float]:
    """Return the measures of one text, from its probabilities with shares of its tokens deleted or kept."""
    return {
        "comprehensiveness": float(np.mean([p - deleted[share] for share in FRACTIONS])),
        "sufficiency": float(np.mean([p - kept[share] for share in FRACTIONS])),
        "deletion": area(p, deleted),
        "insertion": area(p, {1 - share: value for share, value in kept.items()}),
    }


def area(p: float, at: dict[float, float]) -> float:
    """Return the area under the curve through p at share 0 and ``at`` the shares of ``CURVE``."""
    shares = sorted(share for share in at if any(abs(share - c) < 1e-9 for c in CURVE))
    return float(np.trapezoid([p, *(at[share] for share in shares)], [0.0, *shares]) / shares[-1])


class Judge:
    """Compute probabilities of one text with some tokens deleted, and remember earlier results."""

    def __init__(self, reader: Reader, tokens: list[int], target: Tensor, other: Tensor):
        self.reader, self.tokens, self.target, self.other = reader, tokens, target, other
        self.known: dict[tuple[int, ...], tuple[float, float]] = {}  # tokens -> p and margin

    def ask(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, float]]:
        """Return the probability and the margin of texts made of some of the tokens."""
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        for group in length_batches([len(t) + 2 for t in new], BATCH_POSITIONS[self.reader.device.type]):
            scores = self.reader.scores(self.reader.layout([new[k] for k in group]))  # [b, n_cls]
            p = scores.softmax(-1)[:, self.target].tolist()
            margin = margins(scores, self.target.expand(len(p)), self.other.expand(len(p))).tolist()
            for k, *pair in zip(group, p, margin, strict=True):
                self.known[new[k]] = (pair[0], pair[1])
        return [self.known[text] for text in texts]

    def some(self, keep: Tensor) -> tuple[int, ...]:
        """Return the tokens at which keep [n] is True."""
        return tuple(t for t, stays in zip(self.tokens, keep.tolist(), strict=True) if stays)

    def shares(self, order: Tensor) -> dict[float, Tensor]:
        """Return for every measured share a mask [n] of the first tokens, at least one."""
        rank = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )  # [n]
        return {
            share: rank < max(1, round(share * len(order))) for share in sorted({*FRACTIONS, *CURVE})
        }  # [n] each

    def deleted(self, order: Tensor) -> dict[float, float]:
        shares = self.shares(order)
        found = self.ask([self.some(~first) for first in shares.values()])
        return {share: p for share, (p, _) in zip(shares, found, strict=True)}

    def kept(self, order: Tensor) -> dict[float, float]:
        shares = self.shares(order)
        found = self.ask([self.some(first) for first in shares.values()])
        return {share: p for share, (p, _) in zip(shares, found, strict=True)}

    def masked(self, order: Tensor, layout: Layout, k: int) -> tuple[dict[float, float], dict[float, float]]:
        """Do the same as ``deleted`` and ``kept``, but keep the hidden states and mask tokens at the head."""
        if not hasattr(self, "hidden"):
            with torch.no_grad():
                alone = self.reader.layout([self.tokens])
                self.hidden, self.content = (
                    self.reader.hidden(alone),
                    alone.content[0],
                )  # [1, n_pos, ...], [n_pos]
        shares = self.shares(order)
        first = torch.stack(list(shares.values()))  # [k, n]
        masks = (~self.content).expand(2 * len(first), -1).clone()  # [2 k, n_pos], True at special tokens
        masks[:, self.content] = torch.cat([~first, first])
        size = max(1, BATCH_POSITIONS[self.reader.device.type] // masks.shape[1])
        with torch.no_grad():
            p = torch.cat(
                [
                    self.reader.head(self.hidden.expand(len(part), -1, -1, -1), part).softmax(-1)[
                        :, self.target
                    ]
                    for part in masks.split(size)
                ]
            ).tolist()
        return dict(zip(shares, p[: len(first)], strict=True)), dict(
            zip(shares, p[len(first) :], strict=True)
        )

    def drops(self) -> Tensor:
        """Return how much the margin falls when each token is deleted alone, [n]."""
        everything = torch.ones(len(self.tokens), dtype=torch.bool)  # [n]
        texts = [tuple(self.tokens)]
        for k in range(len(everything)):
            keep = everything.clone()
            keep[k] = False
            texts.append(self.some(keep))
        (_, whole), *rest = self.ask(texts)
        return torch.tensor([whole - margin for _, margin in rest])  # [n]


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the rank correlation of a [n] and b [n]. Equal values share a rank; NaN if one is constant."""
    ranks = []
    for values in (a, b):
        _, index, counts = torch.unique(values.double().cpu(), return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum(0) - (counts + 1) / 2)[index])  # [n]
    x, y = (rank - rank.mean() for rank in ranks)  # [n] each
    scale = (x.square().sum() * y.square().sum()).sqrt()
    return float((x * y).sum() / scale) if scale > 0 else float("nan")


def agreement(readers: Sequence[Reader], texts: Sequence[str], method: Method) -> list[float]:
    """Return for each text the mean rank correlation of a method's values between pairs of heads.

    The explained class is the prediction of the first head. With a trained head and a randomly initialised
    one, this is the randomisation check: explanations that stay the same do not explain the weights.
    """
    found = []
    for ids in readers[0].tokens(texts):
        layout = readers[0].layout([ids])
        target, other = readers[0].scores(layout).topk(2).indices.unbind(-1)  # [1] each
        said = [
            method(reader, layout, target, other).values[layout.content] for reader in readers
        ]  # [n] each
        pairs = [spearman(a, b) for k, a in enumerate(said) for b in said[:k]]
        found.append(float(np.mean(pairs)))
    return found


def summarize(
    rows: Sequence[dict[str, Any]], n: int = 2000, seed: int = 0, measures: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Return mean and 95 % interval of every measure for each method, by bootstrap over the texts.

    Args:
        rows: the result of ``measure``.
        n: number of bootstrap samples.
        seed: seed of the bootstrap.
        measures: names of columns, None for all measures of ``measure``.
    """
    summary = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        for name in measures or filter(is_measure, own[0]):
            values = np.array([row[name] for row in own], dtype=float)  # [n_texts], NaN for None
            values = values[~np.isnan(values)]
            if not len(values):
                continue
            drawn = np.random.default_rng(seed).integers(0, len(values), (n, len(values)))  # [n, n_texts]
            low, high = np.percentile(values[drawn].mean(1), [2.5, 97.5])
            told = {"mean": float(values.mean()), "low": float(low), "high": float(high)}
            summary.append({"method": method, "measure": name, **told, "texts": len(values)})
    return summary


def is_measure(name: str) -> bool:
    return name == "seconds" or name.removesuffix("_masked") in MEASURES


def show(summary: Sequence[dict[str, Any]]) -> None:
    """Print the result of ``summarize`` as a table: a block for each measure, its best method in bold."""
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "mean", "95 % interval", "", box=None)
    measures = dict.fromkeys(row["measure"] for row in summary)
    for measure in sorted(measures, key=lambda name: name == "seconds"):  # the cost comes last
        rows = [row for row in summary if row["measure"] == measure]
        more = MEASURES.get(measure.removesuffix("_masked"), False)  # seconds: less is better
        best = (max if more else min)(row["mean"] for row in rows)
        table.add_row(f"{measure}: {'higher' if more else 'lower'} is better, {rows[0]['texts']} texts")
        for row in rows:
            is_best = row["mean"] == best and len(rows) > 1
            interval = f"{row['low']:.3g} to {row['high']:.3g}"
            cells = (f"  {row['method']}", f"{row['mean']:.3g}", interval, "best" if is_best else "")
            table.add_row(*cells, style="bold" if is_best else "")
    console = Console()
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(table)
    for name, told in LEGEND.items():
        if any(name in measure for measure in measures):
            console.print(f"{name}: {told}.", style="dim", highlight=False)
