"""How accurate are the heads on frozen encoders? ``python benchmarks/accuracy.py --data DATA --device cuda``.

The hidden states of all depths are computed once for each task. Every family of heads has the same budget:

1. search: five shapes of ten recipes each, trained once for a short time and scored on the dev set. If the
   best learning rate is the lowest or the highest of the grid, the grid grows, at most twice on each side;
2. full: the best three configurations at full length, scored on the dev set;
3. final: the best configuration with 5 seeds;
4. test: when all tasks have all finals, all are scored on the test set at once, and the rows are written.

Each trained stack of heads is a file in ``--state``, so a run that stopped, after ``--minutes`` or for any
other reason, resumes. Rows are in accuracy_search.csv, accuracy.csv and accuracy_differences.csv. ``--plot``
makes a table and a figure from them. corpora.py describes the files in DATA.
"""

import hashlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common
import corpora
import numpy as np
import torch
import torch.multiprocessing as mp
from corpora import Packed
from families import (
    BY_DEPTH,
    FAMILIES,
    FULL,
    GROWTH,
    LINEAR,
    LINEAR_EPOCHS,
    LINEAR_RECIPES,
    LRS,
    RECIPES,
    SEARCH,
    STEP,
)
from scoring import rank, replace_rows, rows_of, scored
from stacked import Recipe, Stack, Training, as_means, as_vectors

from vecroute.encoders import TextEncoder, VisionEncoder

SEEDS = 5
BEST = 3  # configurations of each family that are trained at full length


@dataclass(frozen=True)
class Job:
    """A stack of heads to train: one shape, several recipes."""

    stage: str  # "search", "full" or "final"
    task: str
    label: str  # a key of FAMILIES
    name: str
    options: dict[str, Any]
    recipes: list[Recipe]
    training: Training

    @property
    def test(self) -> bool:
        """Whether the job predicts the test set too."""
        return self.stage == "final"

    def __str__(self) -> str:
        return f"{self.task} {self.stage} {self.label} {json.dumps(self.options)} x {len(self.recipes)}"


@dataclass
class Done:
    job: Job
    dev: np.ndarray  # [m, n, n_cls] probabilities
    test: np.ndarray | None
    parameters: int
    seconds: float
    weights: dict[str, np.ndarray] | None = None  # [m, ...] each, only for jobs with test=True


def run_job(job: Job, splits: dict[str, Packed]) -> Done:
    if job.label == LINEAR:
        splits = as_means(splits)
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


def work(splits: dict[str, Packed], jobs: Any, results: Any, share: float, until: float) -> None:
    """Run jobs until None arrives. Runs in a separate process with a share of the GPU memory."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    while (job := jobs.get()) is not None:
        if time.time() > until:
            results.put((job, "no time left, run again to resume"))
            continue
        try:
            results.put(run_job(job, splits))
        except Exception as error:  # one failed job must not stop the others
            results.put((job, f"{type(error).__name__}: {error}"))


class Workers:
    """Processes that train stacks of heads and save each: ``with Workers(splits, options) as workers``."""

    def __init__(self, splits: dict[str, Packed], options: Any):
        context = mp.get_context("spawn")
        self.jobs, self.results = context.Queue(), context.Queue()
        self.state, self.limit = options.state, options.limit
        share, n = 0.0, options.workers
        if splits["train"].hidden.is_cuda:
            free, total = torch.cuda.mem_get_info()
            share = 0.9 * free / total / n
        arguments = (splits, self.jobs, self.results, share, options.until)
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

    def run(self, jobs: list[Job]) -> list[Done]:
        """Return the results of all jobs. Only jobs without a file in the state folder are run.

        Raises:
            Unfinished: a job failed, or there is no time left.
        """
        files = {job_key(job, self.limit): job for job in jobs}
        missing = {key: job for key, job in files.items() if not (self.state / f"{key}.npz").exists()}
        for job in missing.values():
            self.jobs.put(job)
        failed = []
        for _ in missing:
            done = self.results.get()
            if isinstance(done, Done):
                print(f"{done.seconds:6.1f} s  {done.job}", flush=True)
                save_done(done, self.state / f"{job_key(done.job, self.limit)}.npz")
            else:
                failed.append(f"{done[0]}: {done[1]}")
        if failed:
            raise Unfinished(f"{len(failed)} of {len(jobs)} jobs are not done, among them {failed[0]}")
        return [load_done(job, self.state / f"{key}.npz") for key, job in files.items()]


class Unfinished(Exception):
    """A step of the race has jobs that are not done."""


def job_key(job: Job, limit: int | None) -> str:
    """Return a name for the file of a job that changes with everything that its result depends on."""
    about = json.dumps([asdict(job), limit], sort_keys=True)
    return f"{job.task}-{job.stage}-{hashlib.sha256(about.encode()).hexdigest()[:16]}"


def save_done(done: Done, path: Path) -> None:
    """Write the result of a job, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"dev": done.dev, "parameters": done.parameters, "seconds": done.seconds}
    arrays |= {} if done.test is None else {"test": done.test}
    arrays |= {f"weight.{name}": p for name, p in (done.weights or {}).items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(temporary, path)


def load_done(job: Job, path: Path) -> Done:
    with np.load(path) as found:
        weights = {name.removeprefix("weight."): found[name] for name in found if name.startswith("weight.")}
        test = found.get("test")
        return Done(job, found["dev"], test, int(found["parameters"]), float(found["seconds"]), weights)


def search_jobs(task: str, label: str, recipes: list[Recipe], n_shapes: int) -> list[Job]:
    """Return the configurations of a family. Each has its own seed. All families use the same seeds."""
    name, shapes = FAMILIES[label]
    jobs = []
    for k, (options, drop) in enumerate(shapes[:n_shapes]):
        seeded = [replace(recipe, seed=k * len(recipes) + n) for n, recipe in enumerate(recipes)]
        jobs.append(Job("search", task, label, name, options, seeded, training_of(SEARCH[task], label, drop)))
    return jobs


def training_of(training: Training, label: str, drop: float) -> Training:
    """Adapt an entry of SEARCH or FULL to one family."""
    return replace(training, epochs=training.epochs * (LINEAR_EPOCHS if label == LINEAR else 1), drop=drop)


def growing_jobs(searched: list[Done], labels: np.ndarray) -> list[Job]:
    """Return a job with the next learning rate, in the best shape, if the best is at the edge of the grid."""
    lrs = [recipe.lr for done in searched for recipe in done.job.recipes]
    done, k = rank(searched, labels)[0]
    best = done.job.recipes[k].lr
    below, above = min(LRS) / STEP ** (GROWTH + 0.5), max(LRS) * STEP ** (GROWTH + 0.5)
    if best == min(lrs) and best / STEP > below:
        lr = best / STEP
    elif best == max(lrs) and best * STEP < above:
        lr = best * STEP
    else:
        return []
    recipes = [replace(r, lr=lr) for r in done.job.recipes if r.lr == best]
    return [replace(done.job, recipes=recipes)]


def full_jobs(searched: list[Done], labels: np.ndarray) -> list[Job]:
    """Return jobs that train the best configurations at full length, one for each shape among them."""
    jobs: dict[str, Job] = {}
    for done, k in rank(searched, labels)[:BEST]:
        job = done.job
        training = training_of(FULL[job.task], job.label, job.training.drop)
        key = json.dumps([job.options, asdict(training)])
        known = jobs.get(key, replace(job, stage="full", recipes=[], training=training))
        jobs[key] = replace(known, recipes=[*known.recipes, replace(job.recipes[k], seed=50)])
    return list(jobs.values())


def final_job(full: list[Done], labels: np.ndarray, seeds: int) -> Job:
    """Return the job that trains the best configuration with several seeds."""
    done, k = rank(full, labels)[0]
    recipes = [replace(done.job.recipes[k], seed=100 + seed) for seed in range(seeds)]
    return replace(done.job, stage="final", recipes=recipes)


def race(
    workers: Workers, task: str, label: str, labels: np.ndarray, options: Any
) -> tuple[list[Done], Done]:
    """Search, choose on the dev set and train with several seeds: one family on one task.

    Returns:
        The results of the search and of full length, and the final one.
    """
    recipes = LINEAR_RECIPES if label == LINEAR else RECIPES
    searched = workers.run(search_jobs(task, label, recipes[: options.recipes], options.shapes))
    while more := growing_jobs(searched, labels):
        searched += workers.run(more)
    full = workers.run(full_jobs(searched, labels))
    (final,) = workers.run([final_job(full, labels, options.seeds)])
    return [*searched, *full], final


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
    """Save the weights of three seeds of the routing head, and its options, as TASK.npz."""
    if done.job.label == "routing" and done.weights:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p[:3] for name, p in done.weights.items()}  # [3, ...] each
        np.savez(folder / f"{done.job.task}.npz", options=json.dumps(done.job.options), **weights)


def run_task(task: str, options: Any) -> tuple[list[Done], list[Done], np.ndarray, np.ndarray]:
    """Run the race of all families on one task.

    Returns:
        The stacks that were tried, the final stacks, and the labels of the dev and the test set.

    Raises:
        Unfinished: a family has jobs that are not done.
    """
    started = time.perf_counter()
    splits = load_splits(task, ["train", "dev", "test"], options)
    print(f"{time.perf_counter() - started:6.1f} s  {task}: {len(splits['train'])} samples", flush=True)
    dev, test = (np.array(splits[name].label.tolist()) for name in ("dev", "test"))
    tried, finals, unfinished = [], [], []
    with Workers(splits, options) as workers:
        for label in options.heads or FAMILIES:
            try:
                own, final = race(workers, task, label, dev, options)
            except Unfinished as error:
                unfinished.append(f"{label}: {error}")
                continue
            tried += own
            finals.append(final)
            if options.save:
                save(final, options.save)
    if unfinished:
        raise Unfinished(f"{task}: {'; '.join(unfinished)}")
    return tried, finals, dev, test


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the texts and images")
    parser.add_argument("--tokens", type=Path, help="folder that stores token ids, for one encoder only")
    parser.add_argument("--encoder", help="default: minilm for texts, vit-cifar10 for images")
    parser.add_argument("--tasks", nargs="+", choices=corpora.TASKS, default=list(corpora.TASKS))
    parser.add_argument("--heads", nargs="+", choices=FAMILIES, help="default: all families")
    parser.add_argument("--shapes", type=int, default=5, help="number of shapes of each family to search")
    parser.add_argument("--recipes", type=int, help="number of recipes of each shape, default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds of the final heads")
    parser.add_argument("--workers", type=int, default=3, help="number of processes that train")
    parser.add_argument("--limit", type=int, help="number of samples of each split to use")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no job after this time")
    parser.add_argument("--state", type=Path, default=Path("build/accuracy"), help="folder of finished jobs")
    parser.add_argument("--save", type=Path, help="folder for the weights of the routing heads, three seeds")
    parser.add_argument(
        "--plot", action="store_true", help="train nothing, make the table and the figure from the rows"
    )
    options = parser.parse_args(arguments)
    if options.plot:
        from accuracy_summary import make_summary

        return make_summary(options.results, list(FAMILIES))
    options.until = time.time() + 60 * options.minutes
    if options.short:
        options.limit, options.workers, options.shapes = options.limit or 100, 1, 1
        options.recipes, options.seeds = 2, 1
    done, unfinished = {}, []
    for task in options.tasks:
        try:
            done[task] = run_task(task, options)
        except Unfinished as error:
            unfinished.append(str(error))
    if unfinished:
        raise SystemExit("not finished, so nothing is tested:\n" + "\n".join(unfinished))
    about = common.about(options.device)
    searched = [row for tried, _, dev, _ in done.values() for stack in tried for row in rows_of(stack, dev)]
    tested, differences = scored({task: found[1:] for task, found in done.items()})
    for name, rows in (("_search", searched), ("", tested), ("_differences", differences)):
        replace_rows(options.results / f"accuracy{name}.csv", [row | about for row in rows])


if __name__ == "__main__":
    main()
