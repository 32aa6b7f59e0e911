"""Measure how faithful explanations are: delete the tokens that they name, and compute the scores again."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vecroute.encoders.text import length_batches
from vecroute.explain.attribution import Method, Reader, batch_positions
from vecroute.explain.judge import CURVE, FRACTIONS, Curve, Judge, ask_all, ask_masked
from vecroute.explain.rivals import METHODS
from vecroute.ops.checks import check_choice

WIDTH = 100  # width of the table in characters
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
    for group in length_batches(list(map(len, tokens)), batch_positions(reader.device)):
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
    pairs = scores.topk(2).indices  # [b, 2]
    judges = [Judge(reader, ids, *pair) for ids, pair in zip(tokens, pairs.tolist(), strict=True)]
    asked: list[list[tuple[int, ...]]] = [judge.one_less() if leave_one_out else [] for judge in judges]
    rows, orders = [], []
    for name, method in methods.items():
        started = time.perf_counter()
        values, error = method(reader, layout, *pairs.unbind(-1))  # [b, n_pos], [b]
        values = values.cpu()  # waits for the GPU
        seconds = (time.perf_counter() - started) / len(tokens)
        said = [row[content] for row, content in zip(values, layout.content.cpu(), strict=True)]  # [n] each
        own = [each.argsort(descending=True, stable=True) for each in said]  # [n] each
        orders.append(own)
        for k, judge in enumerate(judges):
            asked[k] += judge.parts(own[k])
            row = {"text": which[k], "n_tokens": len(tokens[k]), "method": name, "seconds": seconds}
            row["completeness_error"] = None if error is None else float(error[k])
            rows.append((k, said[k], row))
    ask_all(judges, asked)
    p = scores.softmax(-1).gather(-1, pairs[:, :1])[:, 0].tolist()
    masked = [at for own in orders for at in ask_masked(judges, layout, own)]
    return [
        _row(judges[k], p[k], values, row, at, leave_one_out)
        for (k, values, row), at in zip(rows, masked, strict=True)
    ]


def _row(
    judge: Judge,
    p: float,
    values: Tensor,
    row: dict[str, Any],
    masked: tuple[Curve, Curve],
    leave_one_out: bool,
) -> dict[str, Any]:
    """Return the row of one text and method, from the values [n] of its tokens."""
    order = values.argsort(descending=True, stable=True)  # [n]
    found: dict[str, Any] = dict(curves(p, judge.deleted(order), judge.kept(order)))
    found |= {f"{name}_masked": value for name, value in curves(p, *masked).items()}
    found["leave_one_out"] = spearman(values, judge.drops()) if leave_one_out else None
    error = row.pop("completeness_error")
    return row | found | {"completeness_error": error}


def curves(p: float, deleted: Curve, kept: Curve) -> dict[str, float]:
    """Return the measures of one text, from its probabilities with shares of its tokens deleted or kept."""
    return {
        "comprehensiveness": float(np.mean([p - deleted[share] for share in FRACTIONS])),
        "sufficiency": float(np.mean([p - kept[share] for share in FRACTIONS])),
        "deletion": area(p, deleted),
        "insertion": area(p, {1 - share: value for share, value in kept.items()}),
    }


def area(p: float, at: Curve) -> float:
    """Return the area under the curve through p at share 0 and ``at`` the shares of ``CURVE``."""
    shares = sorted(share for share in at if any(abs(share - c) < 1e-9 for c in CURVE))
    return float(np.trapezoid([p, *(at[share] for share in shares)], [0.0, *shares]) / shares[-1])


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
