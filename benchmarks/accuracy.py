"""How accurate are the heads on frozen MiniLM? ``python benchmarks/accuracy.py --data DATA --device cuda``.

The hidden states of all depths are computed once. For every task and every head the same budget: 20
configurations, each trained once and judged on the dev set; then the best one is trained with 5 seeds, and
only these see the test set. Rows are appended to accuracy_search.csv, accuracy.csv and
accuracy_differences.csv; ``--plot`` makes the figure from them. corpora.py says what is in DATA.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import corpora
import numpy as np
import torch
import torch.multiprocessing as mp
from corpora import Packed
from stacked import Recipe, Stack

from vecroute.encoders import TextEncoder

SEEDS = 5
ROUTING = {"implementation": "reference"}  # which can be stacked
# Two shapes of each head, and ten recipes for each of them.
SHAPES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "routing": ("routing", [ROUTING, ROUTING | {"n_hid": 16}]),
    "paper": ("paper", [ROUTING, ROUTING | {"score_scale": 0.1}]),
    "probe": ("probe", [{}, {"d_mlp": 768}]),
    "probe, MLPs": ("probe", [{"d_inp_mlp": 384}, {"d_inp_mlp": 768}]),
    "probe, 4 queries": ("probe_4", [{}, {"d_mlp": 768}]),
    "PMA": ("pma", [{}, {"n_seeds": 4}]),
    "Hopfield": ("hopfield", [{"d_mlp": 384}, {"n_states": 4, "d_mlp": 384}]),
    "scalar mix": ("scalar_mix", [{}, {"d_mlp": 384}]),
    "mean of all": ("mean_all", [{}, {"d_mlp": 384}]),
    "mean of last": ("mean_last", [{}, {"d_mlp": 384}]),
    "CLS": ("cls", [{}, {"d_mlp": 384}]),
}
RECIPES = [
    Recipe(lr=lr, weight_decay=decay, drop_inputs=drop, label_smoothing=smoothing)
    for lr in (1e-3, 3e-3)
    for decay, drop, smoothing in (
        (0.05, 0.0, 0.0),
        (0.05, 0.1, 0.0),
        (0.05, 0.5, 0.0),
        (0.05, 0.5, 0.1),
        (0.5, 0.3, 0.1),
    )
]
TRAINING: dict[str, dict[str, Any]] = {
    "sst2": {"epochs": 3, "batch_size": 256},
    "sst5": {"epochs": 3, "batch_size": 256},
    "imdb": {"epochs": 5, "batch_size": 128, "n_pos": 64},
}


@dataclass(frozen=True)
class Job:
    """A stack of heads to train: one shape, several recipes."""

    task: str
    label: str  # of the head, as in SHAPES
    name: str
    options: dict[str, Any]
    recipes: list[Recipe]
    training: dict[str, Any]
    test: bool = False  # whether to predict the test set too

    def __str__(self) -> str:
        return f"{self.task} {self.label} {json.dumps(self.options)} x {len(self.recipes)}"


@dataclass
class Done:
    job: Job
    dev: np.ndarray  # [m, n, n_cls] probabilities
    test: np.ndarray | None
    parameters: int
    seconds: float


def run_job(job: Job, splits: dict[str, Packed]) -> Done:
    train = splits["train"]
    device = str(train.hidden.device)
    n_cls = corpora.TASKS[job.task]
    sizes = {"d_emb": train.hidden.shape[-1], "depth": train.hidden.shape[-2], "n_cls": n_cls}
    started = time.perf_counter()
    stack = Stack(job.name, sizes | job.options, job.recipes, device)
    stack.fit(train, **job.training, own_order=job.test)
    dev = stack.predict(splits["dev"]).half().cpu().numpy()  # [m, n, n_cls]
    seconds = time.perf_counter() - started
    test = stack.predict(splits["test"]).half().cpu().numpy() if job.test else None
    return Done(job, dev, test, stack.n_parameters, seconds)


def work(splits: dict[str, Packed], jobs: Any, results: Any) -> None:
    """Take jobs until there are none, in a process of its own."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    while (job := jobs.get()) is not None:
        try:
            results.put(run_job(job, splits))
        except Exception as error:  # the others go on
            results.put((job, f"{type(error).__name__}: {error}"))
            torch.cuda.empty_cache() if torch.cuda.is_available() else None


def run_jobs(todo: list[Job], splits: dict[str, Packed], workers: int) -> Iterator[Done]:
    """Train stacks, several at a time, each in a process of its own; a failed one is told and left out."""
    context = mp.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    for job in [*todo, *[None] * workers]:
        jobs.put(job)
    processes = [context.Process(target=work, args=(splits, jobs, results)) for _ in range(workers)]
    for process in processes:
        process.start()
    for _ in todo:
        done = results.get()
        if isinstance(done, Done):
            print(f"{done.seconds:6.1f} s  {done.job}", flush=True)
            yield done
        else:
            print(f"FAILED {done[0]}: {done[1]}", flush=True)
    for process in processes:
        process.join()


def search_jobs(task: str, labels: list[str], recipes: list[Recipe]) -> list[Job]:
    """The configurations of some heads. Each has a seed of its own, the same for every head."""
    jobs = []
    for label in labels:
        name, shapes = SHAPES[label]
        for k, options in enumerate(shapes):
            seeded = [
                Recipe(**asdict(recipe) | {"seed": k * len(recipes) + n}) for n, recipe in enumerate(recipes)
            ]
            jobs.append(Job(task, label, name, options, seeded, TRAINING[task]))
    return jobs


def final_jobs(found: list[dict[str, Any]], jobs: list[Job]) -> list[Job]:
    """The best configuration of every head on the dev set, with as many seeds as there are."""
    finals = []
    for label in dict.fromkeys(row["head"] for row in found):
        best = max(
            (row for row in found if row["head"] == label), key=lambda row: (row["dev"], -row["dev_nll"])
        )
        job = next(j for j in jobs if j.label == label and json.dumps(j.options) == best["options"])
        recipe = json.loads(best["recipe"])
        recipes = [Recipe(**recipe | {"seed": 100 + seed}) for seed in range(SEEDS)]
        finals.append(Job(job.task, label, job.name, job.options, recipes, job.training, test=True))
    return finals


def rows_of(done: Done, splits: dict[str, Packed]) -> Iterator[dict[str, Any]]:
    """A row for each head of a stack."""
    for k, recipe in enumerate(done.job.recipes):
        row = {
            "task": done.job.task,
            "head": done.job.label,
            "options": json.dumps(done.job.options),
            "recipe": json.dumps({name: value for name, value in asdict(recipe).items() if name != "seed"}),
            "training": json.dumps(done.job.training),
            "seed": recipe.seed,
            "parameters": done.parameters,
            "seconds": done.seconds / len(done.job.recipes),
        }
        for split, p in (("dev", done.dev), ("test", done.test)):
            if p is not None:
                label = np.array(splits[split].label.tolist())  # [n]
                row[split] = float((p[k].argmax(-1) == label).mean())
                row[f"{split}_nll"] = float(-np.log(p[k][range(len(label)), label].clip(1e-4)).mean())
        yield row


def differences(task: str, finals: list[Done], label: np.ndarray, n: int = 2000) -> list[dict[str, Any]]:
    """By how much routing is more accurate than each other head on the test set: bootstrap over the texts.

    Each head counts with its mean over the seeds.
    """
    right = {done.job.label: (done.test.argmax(-1) == label).mean(0) for done in finals}  # [n_texts] each
    drawn = np.random.default_rng(0).integers(0, len(label), (n, len(label)))  # [n, n_texts]
    rows = []
    for other in right:
        if "routing" not in right or other == "routing":
            continue
        gain = 100 * (right["routing"] - right[other])  # [n_texts]
        low, high = np.percentile(gain[drawn].mean(1), [2.5, 97.5])
        rows.append({"task": task, "head": other, "points": gain.mean(), "low": low, "high": high})
    return rows


def load_splits(task: str, names: list[str], options: Any) -> dict[str, Packed]:
    """The hidden states of a task, of token ids that an earlier run left in --tokens if they are there."""
    encoder = TextEncoder(
        options.encoder,
        device=options.device,
        dtype=torch.float16 if common.is_cuda(options.device) else None,
    )
    splits = {}
    for name in names:
        chunks, labels = corpora.tokens(encoder, task, name, options.data, options.tokens)
        if options.limit:
            chunks, labels = corpora.some(chunks, labels, options.limit)
        splits[name] = corpora.encode(
            encoder, chunks, labels, 65_536 if common.is_cuda(options.device) else 4096
        )
    return splits


def plot(results: Path) -> None:
    """accuracy.png: the test accuracy of every head on every task, a dot for each seed."""
    import matplotlib.pyplot as plt
    import pandas

    rows = pandas.read_csv(results / "accuracy.csv")
    tasks = [task for task in corpora.TASKS if task in set(rows.task)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 4), sharey=True, squeeze=False)
    order = [label for label in reversed(SHAPES) if label in set(rows["head"])]
    for axis, task in zip(axes[0], tasks, strict=True):
        for k, label in enumerate(order):
            test = 100 * rows[(rows.task == task) & (rows["head"] == label)].test
            color = "tab:red" if label in ("routing", "paper") else "tab:blue"
            axis.plot(test, [k] * len(test), "o", color=color, alpha=0.4, markersize=4)
            axis.plot([test.mean()], [k], "|", color="black", markersize=14)
        axis.set(yticks=range(len(order)), yticklabels=order, xlabel="test accuracy, %", title=task)
        axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(results / "accuracy.png", dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of the texts")
    parser.add_argument("--tokens", type=Path, help="folder to keep token ids in")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--tasks", nargs="+", choices=corpora.TASKS, default=list(corpora.TASKS))
    parser.add_argument("--heads", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--workers", type=int, default=8, help="processes that train at a time")
    parser.add_argument("--limit", type=int, help="use so many texts of each split only")
    parser.add_argument("--plot", action="store_true", help="only make the figure from the rows")
    options = parser.parse_args(arguments)
    if options.plot:
        return plot(options.results)
    recipes = RECIPES
    if options.short:
        options.limit, options.workers, recipes = options.limit or 100, 1, RECIPES[:2]
    about = common.about(options.device)
    for task in options.tasks:
        started = time.perf_counter()
        splits = load_splits(task, ["train", "dev", "test"], options)
        print(f"{time.perf_counter() - started:6.1f} s  {task}: {len(splits['train'])} texts", flush=True)
        jobs = search_jobs(task, options.heads, recipes)
        found = []
        for done in run_jobs(jobs, splits, options.workers):
            rows = [row | about for row in rows_of(done, splits)]
            common.append(options.results / "accuracy_search.csv", rows)
            found += rows
        finals = []
        for done in run_jobs(final_jobs(found, jobs), splits, options.workers):
            rows = [row | about for row in rows_of(done, splits)]
            common.append(options.results / "accuracy.csv", rows)
            finals.append(done)
            print(
                f"{task} {done.job.label}: test {100 * np.mean([row['test'] for row in rows]):.2f}",
                flush=True,
            )
        if told := differences(task, finals, np.array(splits["test"].label.tolist())):
            common.append(options.results / "accuracy_differences.csv", [row | about for row in told])
        print(f"{time.perf_counter() - started:6.1f} s  {task}: done", flush=True)


if __name__ == "__main__":
    main()
