"""How faithful are explanations? ``python benchmarks/faithfulness.py --data DATA --weights HEADS``.

Explanations of the routing heads whose weights ``accuracy.py --save HEADS`` wrote, on test texts, by every
method of ``vecroute.explain.attribution``. Rows of every text are appended to faithfulness_texts.csv, and
``--summarize`` makes means with intervals of them, faithfulness.csv, and the figure. corpora.py says what is
in DATA.
"""

import random
from pathlib import Path
from typing import Any

import common
import corpora
import numpy as np
import pandas
import torch

import vecroute as vr
from vecroute.encoders import TextEncoder
from vecroute.explain.attribution import Reader
from vecroute.explain.faithfulness import agreement, measure, summarize
from vecroute.explain.rivals import METHODS

GROUP = 20  # texts that are measured before their rows are written
CHECKED = 50  # texts for agreement over seeds, randomisation and memory


def readers(task: str, weights: Path, device: str, encoder_name: str) -> list[Reader]:
    """The trained heads, one for each seed."""
    encoder = TextEncoder(encoder_name, device=device, dtype=torch.float32)
    stacked = np.load(weights / f"{task}.npz")
    found = []
    for seed in range(3):
        head = vr.RoutingHead(d_emb=encoder.d_emb, depth=encoder.depth, n_cls=corpora.TASKS[task])
        head.load_state_dict({name: torch.tensor(stacked[name][seed]).float() for name in stacked})
        found.append(Reader(encoder, head.to(device)))
    return found


def choose(task: str, reader: Reader, options: Any) -> list[str]:
    """Test texts, drawn at random from those that are not too long."""
    texts, _ = corpora.load(task, "test", options.data)
    random.Random(0).shuffle(texts)
    chosen: list[str] = []
    for text in texts:
        if len(chosen) < options.texts and 0 < len(reader.tokens([text])[0]) <= options.longest:
            chosen.append(text)
    return chosen


def check(task: str, trained: list[Reader], texts: list[str], method: str, device: str) -> dict[str, Any]:
    """Agreement of the seeds, agreement with a head that was never trained, memory of one explanation."""
    fresh = vr.RoutingHead(
        d_emb=trained[0].head.d_emb, depth=trained[0].head.depth, n_cls=corpora.TASKS[task]
    )
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


def make_summary(results: Path) -> None:
    """faithfulness.csv and faithfulness.png, of the rows of texts."""
    rows = pandas.read_csv(results / "faithfulness_texts.csv")
    summary = []
    for (task, device), own in rows.groupby(["task", "device"], sort=False):
        told = summarize(own.drop(columns="task").to_dict("records"))
        summary += [{"task": task, **row, "device": device} for row in told]
    path = results / "faithfulness.csv"
    path.unlink(missing_ok=True)
    common.append(path, summary)
    plot(pandas.DataFrame(summary), results)


def plot(summary: pandas.DataFrame, results: Path) -> None:
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
    figure.savefig(results / "faithfulness.png", dpi=150)


def one_of_each(own: pandas.DataFrame) -> pandas.DataFrame:
    """The row of each method with the most texts, where it ran on several devices, last method first."""
    most = own.sort_values("texts", ascending=False, kind="stable").drop_duplicates("method")
    return most.set_index("method").reindex([m for m in METHODS if m in set(own.method)][::-1]).reset_index()


def bars(axis: Any, own: pandas.DataFrame) -> None:
    """A bar for the mean of each method, with its interval."""
    colors = ["tab:red" if method.startswith("contributions") else "tab:blue" for method in own.method]
    axis.barh(own.method, own["mean"], color=colors, alpha=0.7)
    away = [own["mean"] - own.low, own.high - own["mean"]]
    axis.errorbar(own["mean"], own.method, xerr=away, fmt="none", color="black", capsize=2)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of the texts")
    parser.add_argument("--weights", type=Path, help="folder of the heads")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--tasks", nargs="+", choices=("sst2", "imdb"), default=["sst2", "imdb"])
    parser.add_argument("--texts", type=int, help="how many; 500 of SST-2 and 200 of IMDB")
    parser.add_argument("--start", type=int, default=0, help="leave out the first texts, to go on from there")
    parser.add_argument("--longest", type=int, default=100_000, help="only texts of at most so many tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--no-leave-one-out", action="store_true")
    parser.add_argument("--check", action="store_true", help="agreement over seeds, randomisation, memory")
    parser.add_argument("--summarize", action="store_true", help="only sum up the rows there are")
    options = parser.parse_args(arguments)
    if options.summarize:
        return make_summary(options.results)
    about = common.about(options.device)
    for task in options.tasks:
        trained = readers(task, options.weights, options.device, options.encoder)
        options.texts = 4 if options.short else options.texts or {"sst2": 500, "imdb": 200}[task]
        texts = choose(task, trained[0], options)
        if options.check:
            rows = [
                check(task, trained, texts[:CHECKED], method, options.device) for method in options.methods
            ]
            common.append(options.results / "faithfulness_checks.csv", [row | about for row in rows])
            continue
        for start in range(options.start, len(texts), GROUP):
            group = texts[start : start + GROUP]
            rows = measure(trained[0], group, options.methods, leave_one_out=not options.no_leave_one_out)
            rows = [{"task": task, **row, "text": start + row["text"]} | about for row in rows]
            common.append(options.results / "faithfulness_texts.csv", rows)
            print(f"{task}: {start + len(group)} of {len(texts)} texts", flush=True)


if __name__ == "__main__":
    main()
