"""How faithful are explanations? ``python benchmarks/faithfulness.py --data DATA --weights FOLDER --fit N``.

``--fit`` fits three classifiers for each task, which differ in their seed, and keeps them in FOLDER. Their
predictions on test texts are explained by every method of ``vecroute.explain.rivals``. Rows of every text,
seed and method are appended to words_texts.csv; rows that are there already are not measured again.
``--summarize`` makes words.csv from them: means, and how far each method is from "words", with intervals that
are paired by text and seed. corpora.py says what is in DATA. Several processes may share a device, each with
its own ``--weights`` and ``--results``; ``--merge`` joins their rows.
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import common
import corpora
import normalized
import numpy as np
import torch
from torch import Tensor

import vecroute as vr
from vecroute.classifier.parts import ready
from vecroute.explain.attribution import Attribution, Layout, Reader
from vecroute.explain.faithfulness import agreement, measure, summarize
from vecroute.explain.judge import Judge, ask_all
from vecroute.explain.rivals import METHODS

GROUP = {"cuda": 100, "cpu": 20}  # number of texts that are measured before their rows are written
CHECKED = 50  # number of texts for the checks of agreement, randomisation and memory
EXACT = ("words", "states")  # methods whose values add up to the score
SEEDS = (0, 1, 2)
TEXTS = {"sst2": 500, "imdb": 200}  # how many test texts, unless --texts says otherwise
OURS = "words"
COMPARED = ("seconds", "comprehensiveness", "sufficiency", "leave_one_out", "comprehensiveness_normalized")


def fit(task: str, seed: int, options: Any) -> None:
    """Fit a classifier on some training texts, unless the folder has it."""
    folder = options.weights / f"{task}-{seed}"
    if not folder.exists():
        texts, labels = corpora.load(task, "train", options.data, whole=True)
        chosen = random.Random(0).sample(range(len(texts)), min(options.fit, len(texts)))
        classifier = vr.RoutingClassifier(
            options.encoder,
            random_state=seed,
            device=options.device,
            cache=options.weights / "cache",
            calibrate=False,  # scores are compared at temperature 1
            estimate=False,
        )
        classifier.fit([texts[k] for k in chosen], [labels[k] for k in chosen])
        classifier.save_pretrained(folder)


def readers(task: str, options: Any) -> list[Reader]:
    """Return the fitted classifiers, one for each seed."""
    found = []
    for seed in options.seeds:
        if options.fit:
            fit(task, seed, options)
        classifier = vr.RoutingClassifier.from_pretrained(
            options.weights / f"{task}-{seed}", device=options.device
        )
        encoder, head = ready(classifier)
        encoder.model.float()  # explanations are compared in float32 on every device
        found.append(Reader(encoder, head))
    return found


def choose(task: str, reader: Reader, options: Any) -> list[str]:
    """Return test texts, drawn at random from those that are not too long."""
    texts, _ = corpora.load(task, "test", options.data)
    random.Random(0).shuffle(texts)
    chosen: list[str] = []
    for text in texts:
        if len(chosen) < options.texts and 0 < len(reader.tokens([text])[0]) <= options.longest:
            chosen.append(text)
    return chosen


def check(task: str, trained: list[Reader], texts: list[str], method: str, device: str) -> dict[str, Any]:
    """Measure how seeds agree, how they agree with an untrained head, and the memory of an explanation."""
    head = trained[0].head
    fresh = vr.RoutingHead(d_emb=head.d_emb, depth=head.depth, n_cls=corpora.TASKS[task], **head.options)
    fresh.load_state_dict(
        {name: torch.randn_like(p) * p.std(correction=0) for name, p in trained[0].head.state_dict().items()}
    )
    random_reader = Reader(trained[0].encoder, fresh.to(device))
    layout = trained[0].layout(trained[0].tokens(texts[:1]))
    target, other = trained[0].scores(layout).topk(2).indices.unbind(-1)
    with common.Peak(device) as peak:
        METHODS[method](trained[0], layout, target, other)
    return {
        "task": task,
        "method": method,
        "texts": len(texts),
        "agreement_over_seeds": float(np.nanmean(agreement(trained, texts, METHODS[method]))),
        "agreement_with_random_weights": float(
            np.nanmean(agreement([trained[0], random_reader], texts, METHODS[method]))
        ),
        "memory_mb": peak.mb,
    }


class Recorded:
    """A method that keeps its values of each text, and that computes in IEEE float32 if its values add up."""

    def __init__(self, name: str):
        self.method, self.exact = METHODS[name], name.startswith(EXACT)
        self.values: dict[tuple[int, ...], Tensor] = {}  # token ids -> [n]

    def __call__(self, reader: Reader, layout: Layout, target: Tensor, other: Tensor) -> Attribution:
        with common.product_precision("fp32") if self.exact else nullcontext():
            found = self.method(reader, layout, target, other)
        for text, values, content in zip(layout.texts(), found.values, layout.content, strict=True):
            self.values[tuple(text)] = values[content].cpu()
        return found


def add_normalized(
    reader: Reader, tokens: list[list[int]], rows: list[dict[str, Any]], methods: dict[str, Recorded]
) -> None:
    """Add the normalised measures to the rows of texts, given as token ids."""
    own = [row for row in rows if row["text"] in {k for k, ids in enumerate(tokens) if ids}]
    if not own:
        return
    which = sorted({row["text"] for row in own})
    pairs = reader.scores(reader.layout([tokens[k] for k in which])).topk(2).indices.tolist()
    judges = {k: Judge(reader, tokens[k], *pair) for k, pair in zip(which, pairs, strict=True)}
    limits = dict(zip(which, normalized.bounds(list(judges.values())), strict=True))
    orders = [
        methods[row["method"]].values[tuple(tokens[row["text"]])].argsort(descending=True, stable=True)
        for row in own
    ]  # [n] each
    asked = [judges[row["text"]] for row in own]
    for one_way in (orders, [order.flip(0) for order in orders]):
        texts = [normalized.shortened(judge, order) for judge, order in zip(asked, one_way, strict=True)]
        ask_all(asked, texts)
    for row, judge, order in zip(own, asked, orders, strict=True):
        row |= normalized.normalized(judge, order, limits[row["text"]])


def make_summary(results: Path) -> None:
    """Write words.csv and words.png: the mean of each measure, and its difference from ``OURS``.

    Heads of several seeds explain the same texts. So each text counts once, with its mean over the seeds.
    """
    import pandas

    rows = pandas.read_csv(results / "words_texts.csv")
    summary = []
    for (task, device), own in rows.groupby(["task", "device"], sort=False):
        told = summarize(over_seeds(own, measures(own)), measures=measures(own))
        summary += [{"task": task, "of": "mean", **row, "device": device} for row in told]
        ours = own[own.method == OURS].set_index(["seed", "text"])
        for method, other in own[own.method != OURS].groupby("method", sort=False):
            both = other.set_index(["seed", "text"])[list(COMPARED)]
            ahead = (ours[list(COMPARED)] - both).dropna(how="all").reset_index().assign(method=method)
            told = summarize(over_seeds(ahead, COMPARED), measures=COMPARED)
            summary += [{"task": task, "of": f"{OURS} less this", **row, "device": device} for row in told]
    path = results / "words.csv"
    path.unlink(missing_ok=True)
    common.append(path, summary)
    plot(pandas.DataFrame([row for row in summary if row["of"] == "mean"]), results)


def over_seeds(rows: Any, measures: Sequence[str]) -> list[dict[str, Any]]:
    """Return the mean of each measure over the seeds, a row for each method and text."""
    means = rows.groupby(["method", "text"], sort=False)[list(measures)].mean()
    return means.reset_index().to_dict("records")


def measures(rows: Any) -> list[str]:
    """Return the columns of numbers that are measured."""
    first, last = rows.columns.get_loc("seconds"), rows.columns.get_loc("device")
    return list(rows.columns[first:last])


def plot(summary: Any, results: Path) -> None:
    import matplotlib.pyplot as plt

    tasks, shown = list(dict.fromkeys(summary.task)), ("comprehensiveness", "sufficiency")
    figure, axes = plt.subplots(len(tasks), 2, figsize=(10, 3.4 * len(tasks)), squeeze=False)
    for line, task in zip(axes, tasks, strict=True):
        for axis, name in zip(line, shown, strict=True):
            bars(axis, one_of_each(summary[(summary.task == task) & (summary.measure == name)]))
            axis.set_xlabel(f"{name}, {'more' if name == shown[0] else 'less'} is better")
            axis.set_title(task)
            axis.tick_params(axis="y", labelleft=axis is line[0])
    figure.tight_layout()
    figure.savefig(results / "words.png", dpi=150)


def one_of_each(own: Any) -> Any:
    """Return the row with the most texts for each method, from any device, the last method first."""
    most = own.sort_values("texts", ascending=False, kind="stable").drop_duplicates("method")
    return most.set_index("method").reindex([m for m in METHODS if m in set(own.method)][::-1]).reset_index()


def bars(axis: Any, own: Any) -> None:
    """Draw a bar for the mean of each method, with its interval."""
    colors = ["tab:red" if method.startswith(OURS) else "tab:blue" for method in own.method]
    axis.barh(own.method, own["mean"], color=colors, alpha=0.7)
    away = [own["mean"] - own.low, own.high - own["mean"]]
    axis.errorbar(own["mean"], own.method, xerr=away, fmt="none", color="black", capsize=2)


def measured(results: Path, about: dict[str, Any]) -> set[tuple]:
    """Return the task, seed, text and method of all existing rows of this device."""
    path = results / "words_texts.csv"
    rows = common.read(path) if path.exists() else []
    return {
        (row["task"], int(row["seed"]), int(row["text"]), row["method"])
        for row in rows
        if row["device"] == about["device"]
    }


def merge(files: list[Path], results: Path) -> None:
    """Append the rows of other files to words_texts.csv, except those that it has."""
    key = itemgetter("task", "seed", "text", "method", "device")
    path = results / "words_texts.csv"
    known = {key(row) for row in common.read(path)} if path.exists() else set()
    for file in files:
        rows = [row for row in common.read(file) if key(row) not in known]
        known |= {key(row) for row in rows}
        if rows:
            common.append(path, rows)


def rows_of(reader: Reader, texts: list[str], names: list[str], options: Any) -> list[dict[str, Any]]:
    """Return the rows of some texts, with the normalised measures of those that are short enough for them."""
    methods = {name: Recorded(name) for name in names}
    with common.product_precision("tf32" if options.tf32 else "fp32"):
        rows = measure(reader, texts, methods, leave_one_out=not options.no_leave_one_out)
        empty = {"comprehensiveness_normalized": None, "sufficiency_normalized": None}
        rows = [row | empty for row in rows]
        tokens = [ids if 1 < len(ids) <= options.normalized else [] for ids in reader.tokens(texts)]
        add_normalized(reader, tokens, rows, methods)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of the texts")
    parser.add_argument("--weights", type=Path, help="folder of the fitted classifiers")
    parser.add_argument("--fit", type=int, default=0, help="number of training texts to fit them on")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--tasks", nargs="+", choices=tuple(TEXTS), default=list(TEXTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--texts", type=int, help="how many; 500 of SST-2 and 200 of IMDB")
    parser.add_argument("--longest", type=int, default=100_000, help="longest text to use, in tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--normalized", type=int, default=0, help="longest text to normalise, in tokens")
    parser.add_argument("--no-leave-one-out", action="store_true")
    parser.add_argument("--check", action="store_true", help="agreement over seeds, randomisation, memory")
    parser.add_argument("--tf32", action="store_true", help="tf32 products, except in methods that add up")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="only join rows of other files")
    parser.add_argument("--summarize", action="store_true", help="only sum up the rows there are")
    options = parser.parse_args(arguments)
    if options.merge:
        return merge(options.merge, options.results)
    if options.summarize:
        return make_summary(options.results)
    about, step = common.about(options.device), GROUP[torch.device(options.device).type]
    for task in options.tasks:
        trained = readers(task, options)
        options.texts = 4 if options.short else options.texts or TEXTS[task]
        texts = choose(task, trained[0], options)
        if options.check:
            rows = [
                check(task, trained, texts[:CHECKED], method, options.device) for method in options.methods
            ]
            common.append(options.results / "faithfulness_checks.csv", [row | about for row in rows])
            continue
        done = measured(options.results, about)
        for seed, reader in zip(options.seeds, trained, strict=True):
            for start in range(0, len(texts), step):
                group = texts[start : start + step]
                places = range(start, start + len(group))
                left = [m for m in options.methods if any((task, seed, k, m) not in done for k in places)]
                if not left:
                    continue
                rows = rows_of(reader, group, left, options)
                rows = [{"task": task, "seed": seed, **row, "text": start + row["text"]} for row in rows]
                common.append(options.results / "words_texts.csv", [row | about for row in rows])
                print(f"{task}, seed {seed}: {start + len(group)} of {len(texts)} texts", flush=True)


if __name__ == "__main__":
    main()
