"""How accurate are the heads on frozen encoders? ``python benchmarks/accuracy.py --data DATA --device cuda``.

The hidden states of all depths are computed once. Every head has the same budget on every task. The search
trains 20 configurations once each, for a short time, and scores them on the dev set. Then the best
configuration is trained with 5 seeds, and only these 5 heads are scored on the test set. Rows are appended to
accuracy_search.csv, accuracy.csv and accuracy_differences.csv. ``--plot`` makes a table and a figure from
them. corpora.py describes the files in DATA.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import corpora
import numpy as np
import torch
import torch.multiprocessing as mp
from corpora import Packed
from stacked import Recipe, Stack, Training, as_means, as_vectors, first_positions

from vecroute.encoders import TextEncoder, VisionEncoder

SEEDS = 5
ROUTING = {"implementation": "reference"}  # stacked.py uses vmap, which only the reference supports
# Two shapes of each head, each with the share of inputs to drop in training. Each shape has ten recipes.
SHAPES: dict[str, tuple[str, list[tuple[dict[str, Any], float]]]] = {
    "routing": ("routing", [(ROUTING, drop) for drop in (0.3, 0.6)]),
    "routing, wide": ("wide", [(ROUTING, drop) for drop in (0.3, 0.6)]),
    "paper": ("paper", [(ROUTING, drop) for drop in (0.3, 0.6)]),
    "probe": ("probe", [({}, 0.3), ({"d_mlp": 768}, 0.6)]),
    "probe, MLPs": ("probe", [({"d_inp_mlp": 512, "gated": True}, drop) for drop in (0.3, 0.6)]),
    "probe, 4 queries": ("probe_4", [({}, 0.3), ({"d_mlp": 768}, 0.6)]),
    "PMA": ("pma", [({}, 0.3), ({"n_seeds": 4}, 0.6)]),
    "Hopfield": ("hopfield", [({"d_mlp": 384}, 0.3), ({"n_states": 4, "d_mlp": 384}, 0.6)]),
    "scalar mix": ("scalar_mix", [({}, 0.0), ({"d_mlp": 384}, 0.3)]),
    "mean of all": ("mean_all", [({}, 0.0), ({"d_mlp": 384}, 0.3)]),
    "mean of last": ("mean_last", [({}, 0.0), ({"d_mlp": 384}, 0.3)]),
    "CLS": ("cls", [({}, 0.0), ({"d_mlp": 384}, 0.0)]),
    "linear, mean of all": ("mean_all", [({}, 0.0)]),
    "linear, mean of last": ("mean_last", [({}, 0.0)]),
}
LINEAR = ("linear, mean of all", "linear, mean of last")  # one shape each, with twenty recipes
ON_IMAGES = ("routing", "routing, wide", "probe", "probe, MLPs", *LINEAR)
BY_DEPTH = ("scalar mix", "mean of all", "mean of last", "CLS")  # heads that treat each depth differently
RECIPES = [
    Recipe(lr=lr, weight_decay=decay, label_smoothing=smoothing)
    for lr in (5e-4, 1e-3, 2e-3)
    for decay, smoothing in ((0.05, 0.0), (0.05, 0.1), (0.5, 0.1))
] + [Recipe(lr=3e-3, weight_decay=0.5, label_smoothing=0.1)]
# Linear probes also try ten times higher learning rates, and train four times as long.
LINEAR_RECIPES = [replace(recipe, lr=10 * recipe.lr) for recipe in RECIPES]
LINEAR_EPOCHS = 4
# The search trains for fewer epochs than the final runs.
SEARCH = {
    "sst2": Training(epochs=2, batch_size=256),
    "sst5": Training(epochs=1, batch_size=256),
    "imdb": Training(epochs=1, batch_size=128, most=192),
    "cifar10": Training(epochs=2, batch_size=256, most=192),
}
FINAL = {
    "sst2": Training(epochs=3, batch_size=256),
    "sst5": Training(epochs=2, batch_size=256),
    "imdb": Training(epochs=3, batch_size=128, most=192),
    "cifar10": Training(epochs=5, batch_size=256, most=192),
}


@dataclass(frozen=True)
class Job:
    """A stack of heads to train: one shape, several recipes."""

    task: str
    label: str  # the head, a key of SHAPES
    name: str
    options: dict[str, Any]
    recipes: list[Recipe]
    training: Training
    test: bool = False  # True to predict the test set too

    def __str__(self) -> str:
        return f"{self.task} {self.label} {json.dumps(self.options)} x {len(self.recipes)}"


@dataclass
class Done:
    job: Job
    dev: np.ndarray  # [m, n, n_cls] probabilities
    test: np.ndarray | None
    parameters: int
    seconds: float
    weights: dict[str, np.ndarray] | None = None  # [m, ...] each, only for jobs with test=True


def run_job(job: Job, splits: dict[str, Packed]) -> Done:
    if job.label in LINEAR:
        splits = as_means(splits)
    elif job.label == "CLS":
        splits = {name: first_positions(data) for name, data in splits.items()}
    elif job.label not in BY_DEPTH:
        splits = {name: as_vectors(data) for name, data in splits.items()}
    train = splits["train"]
    depth, d_emb = train.hidden.shape[1:]
    sizes = {"d_emb": d_emb, "depth": depth, "n_cls": corpora.TASKS[job.task]}
    started = time.perf_counter()
    stack = Stack(job.name, sizes | job.options, job.recipes, str(train.hidden.device))
    stack.fit(train, job.training, own_order=job.test)
    dev = stack.predict(splits["dev"]).half().cpu().numpy()  # [m, n, n_cls]
    seconds = time.perf_counter() - started
    test, weights = None, None
    if job.test:
        test = stack.predict(splits["test"]).half().cpu().numpy()  # [m, n, n_cls]
        weights = {name: p.half().cpu().numpy() for name, p in stack.average.items()}  # [m, ...] each
    return Done(job, dev, test, stack.n_parameters, seconds, weights)


def work(splits: dict[str, Packed], jobs: Any, results: Any, share: float) -> None:
    """Run jobs until None arrives. Runs in a separate process with a share of the GPU memory."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    while (job := jobs.get()) is not None:
        try:
            results.put(run_job(job, splits))
        except Exception as error:  # one failed job must not stop the others
            results.put((job, f"{type(error).__name__}: {error}"))


class Workers:
    """Processes that train stacks of heads: ``with Workers(splits, 3) as workers``."""

    def __init__(self, splits: dict[str, Packed], n: int):
        context = mp.get_context("spawn")
        self.jobs, self.results = context.Queue(), context.Queue()
        share = 0.0
        if splits["train"].hidden.is_cuda:
            free, total = torch.cuda.mem_get_info()
            share = 0.9 * free / total / n
        arguments = (splits, self.jobs, self.results, share)
        self.processes = [context.Process(target=work, args=arguments) for _ in range(n)]

    def __enter__(self) -> "Workers":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *error) -> None:
        for _ in self.processes:
            self.jobs.put(None)
        for process in self.processes:
            process.join()

    def run(self, jobs: list[Job]) -> Iterator[Done]:
        """Yield the results in the order in which jobs end. Failed jobs are printed and left out."""
        for job in jobs:
            self.jobs.put(job)
        for _ in jobs:
            done = self.results.get()
            if isinstance(done, Done):
                print(f"{done.seconds:6.1f} s  {done.job}", flush=True)
                yield done
            else:
                print(f"FAILED {done[0]}: {done[1]}", flush=True)


def search_jobs(task: str, labels: list[str], recipes: list[Recipe], n_shapes: int) -> list[Job]:
    """Return the configurations of some heads. Each has its own seed. All heads use the same seeds."""
    jobs = []
    for label in labels:
        name, shapes = SHAPES[label]
        own = recipes + LINEAR_RECIPES[: len(recipes)] if label in LINEAR else recipes
        for k, (options, drop) in enumerate(shapes[:n_shapes]):
            seeded = [replace(recipe, seed=k * len(own) + n) for n, recipe in enumerate(own)]
            jobs.append(Job(task, label, name, options, seeded, training_of(SEARCH[task], label, drop)))
    return jobs


def training_of(training: Training, label: str, drop: float) -> Training:
    """Adapt an entry of SEARCH or FINAL to one head."""
    epochs = training.epochs * (LINEAR_EPOCHS if label in LINEAR else 1)
    return replace(training, epochs=epochs, drop=drop)


def final_jobs(found: list[dict[str, Any]], jobs: list[Job], seeds: int = SEEDS) -> list[Job]:
    """Return jobs that train the best configuration of every head on the dev set with several seeds."""
    finals = []
    for label in dict.fromkeys(row["head"] for row in found):
        best = max(
            (row for row in found if row["head"] == label), key=lambda row: (row["dev"], -row["dev_nll"])
        )
        job = next(j for j in jobs if j.label == label and all(best[k] == v for k, v in described(j).items()))
        recipes = [Recipe(**json.loads(best["recipe"]), seed=100 + seed) for seed in range(seeds)]
        training = training_of(FINAL[job.task], label, job.training.drop)
        finals.append(Job(job.task, label, job.name, job.options, recipes, training, test=True))
    return finals


def described(job: Job) -> dict[str, str]:
    """Return the columns that identify a stack among the stacks of the same head."""
    return {"options": json.dumps(job.options), "training": json.dumps(asdict(job.training))}


def rows_of(done: Done, splits: dict[str, Packed]) -> Iterator[dict[str, Any]]:
    """Yield a row for each head of a stack."""
    for k, recipe in enumerate(done.job.recipes):
        row = {
            "task": done.job.task,
            "head": done.job.label,
            **described(done.job),
            "recipe": json.dumps({name: value for name, value in asdict(recipe).items() if name != "seed"}),
            "seed": recipe.seed,
            "parameters": done.parameters,
            "seconds": done.seconds / len(done.job.recipes),
        }
        for split, p in (("dev", done.dev), ("test", done.test)):
            if p is not None:
                label = np.array(splits[split].label.tolist())  # [n]
                row[split] = float((p[k].argmax(-1) == label).mean())
                row[f"{split}_nll"] = float(-np.log(p[k][range(len(label)), label].clip(1e-4)).mean())
                if split == "test":
                    row["test_top5"] = top_5(p[k], label)
        yield row


def top_5(p: np.ndarray, label: np.ndarray) -> float | None:
    """Return how often the label [n] is among the five most probable classes of p [n, n_cls].

    None if there are at most five classes.
    """
    if p.shape[-1] <= 5:
        return None
    return float((p.argsort(-1)[:, -5:] == label[:, None]).any(-1).mean())


def differences(task: str, finals: list[Done], label: np.ndarray, n: int = 2000) -> list[dict[str, Any]]:
    """Compare routing with each other head: the difference in test accuracy, with a bootstrap over texts.

    The accuracy of a head on a text is the mean over the seeds.
    """
    right = {done.job.label: (done.test.argmax(-1) == label).mean(0) for done in finals}  # [n_texts] each
    drawn = np.random.default_rng(0).integers(0, len(label), (n, len(label)))  # [n, n_texts]
    rows = []
    for other in right:
        if "routing" not in right or other == "routing":
            continue
        gain = 100 * (right["routing"] - right[other])  # [n_texts]
        low, high = np.percentile(gain[drawn].mean(1), [2.5, 97.5])
        told = {"points": gain.mean(), "low": low, "high": high}
        rows.append({"task": task, "routing": "routing", "head": other} | told)
    return rows


def load_splits(task: str, names: list[str], options: Any) -> dict[str, Packed]:
    """Return the hidden states of a task. Token ids come from the folder --tokens if it has them."""
    if task in corpora.IMAGES:
        return load_images(names, options)
    encoder = TextEncoder(
        options.encoder or "minilm",
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


def load_images(names: list[str], options: Any) -> dict[str, Packed]:
    """Return the hidden states of CIFAR-10."""
    if options.data is None:
        raise SystemExit("--data must name the folder of the images")
    on_gpu = common.is_cuda(options.device)
    dtype = torch.float16 if on_gpu else torch.float32
    encoder = VisionEncoder(options.encoder or "vit-cifar10", device=options.device, dtype=dtype)
    splits = {}
    for name in names:
        pixels, labels = corpora.images(name, options.data)
        if options.limit:
            pixels, labels = pixels[: options.limit], labels[: options.limit]
        splits[name] = corpora.encode_images(encoder, pixels, labels, 1000 if on_gpu else 50)
    return splits


def save(done: Done, folder: Path) -> None:
    """Save the weights of three seeds of a routing head: TASK.npz (default head) or TASK-wide.npz."""
    name = {"routing": done.job.task, "routing, wide": f"{done.job.task}-wide"}
    if done.job.label in name:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{name[done.job.label]}.npz", **{k: p[:3] for k, p in done.weights.items()})


def run_task(task: str, options: Any, recipes: list[Recipe], seeds: int) -> None:
    """Search, choose on the dev set, train with several seeds, and test."""
    about, started = common.about(options.device), time.perf_counter()
    splits = load_splits(task, ["train", "dev", "test"], options)
    print(f"{time.perf_counter() - started:6.1f} s  {task}: {len(splits['train'])} samples", flush=True)
    found, finals = [], []
    labels = options.heads or (
        ON_IMAGES if task in corpora.IMAGES else [k for k in SHAPES if k not in LINEAR]
    )
    with Workers(splits, options.workers) as workers:
        jobs = search_jobs(task, labels, recipes, options.shapes)
        for done in workers.run(jobs):
            rows = [row | about for row in rows_of(done, splits)]
            common.append(options.results / "accuracy_search.csv", rows)
            found += rows
        for done in workers.run(final_jobs(found, jobs, seeds)):
            rows = [row | about for row in rows_of(done, splits)]
            common.append(options.results / "accuracy.csv", rows)
            finals.append(done)
            test = [100 * row["test"] for row in rows]
            print(f"{task} {done.job.label}: test {np.mean(test):.2f} ({np.std(test):.2f})", flush=True)
            if options.save:
                save(done, options.save)
    if told := differences(task, finals, np.array(splits["test"].label.tolist())):
        common.append(options.results / "accuracy_differences.csv", [row | about for row in told])
    print(f"{time.perf_counter() - started:6.1f} s  {task}: done", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the texts and images")
    parser.add_argument("--tokens", type=Path, help="folder that stores token ids, for one encoder only")
    parser.add_argument("--encoder", help="default: minilm for texts, vit-cifar10 for images")
    parser.add_argument("--tasks", nargs="+", choices=corpora.TASKS, default=list(corpora.TASKS))
    parser.add_argument("--heads", nargs="+", choices=SHAPES, help="default: all heads that suit the task")
    parser.add_argument("--shapes", type=int, default=2, help="number of shapes of each head to search")
    parser.add_argument("--workers", type=int, default=3, help="number of processes that train")
    parser.add_argument("--limit", type=int, help="number of samples of each split to use")
    parser.add_argument("--save", type=Path, help="folder for the weights of the routing heads, three seeds")
    parser.add_argument(
        "--plot", action="store_true", help="train nothing, make the table and the figure from the rows"
    )
    options = parser.parse_args(arguments)
    if options.plot:
        from accuracy_summary import make_summary

        return make_summary(options.results, list(SHAPES))
    recipes, seeds = RECIPES, SEEDS
    if options.short:
        options.limit, options.workers, options.shapes = options.limit or 100, 1, 1
        recipes, seeds = RECIPES[:2], 1
    for task in options.tasks:
        run_task(task, options, recipes, seeds)


if __name__ == "__main__":
    main()
