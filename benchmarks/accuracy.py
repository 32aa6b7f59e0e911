"""How accurate are the heads on frozen encoders? ``python benchmarks/accuracy.py --data DATA --device cuda``.

The hidden states of all depths are computed once for each task. Every family of heads has the same budget:

1. search: twelve configurations, trained once for a short time and scored on the dev set. If the best
   learning rate is the lowest or the highest of the grid, the grid grows by one;
2. full: the best two configurations at full length, scored on the dev set;
3. final: the best configuration with 5 seeds;
4. test: when all tasks have all finals, all are scored on the test set at once, and the rows are written.

Families run side by side. Each trained stack of heads is a file in ``--state``, so a run that stopped, after
``--minutes`` or for any other reason, resumes. Several commands may train different tasks or ``--heads`` and
share the folder; afterwards ``--score`` trains nothing and writes the rows of all, without a GPU.

Rows are in accuracy_search.csv, accuracy.csv and accuracy_differences.csv. ``--plot`` makes a table and a
figure from them. corpora.py describes the files in DATA. ``--time`` only measures the steps of each family.
"""

import json
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import common
import corpora
import numpy as np
import step_times
import torch
from corpora import Packed
from families import (
    DROPS,
    FAMILIES,
    FULL,
    HIGHEST,
    LINEAR,
    LINEAR_EPOCHS,
    LOWEST,
    SEARCH,
    STEP,
    TOGETHER,
    recipes_of,
)
from jobs import Done, Finished, Job, Unfinished, Workers
from scoring import rank, replace_rows, rows_of, scored
from stacked import Training

from vecroute.encoders import TextEncoder, VisionEncoder

SEEDS = 5
BEST = 2  # configurations of each family that are trained at full length
CIFAR_OF_A_FILE = 4000  # training images of each of the five files of CIFAR-10
CIFAR_TEST = 5000


def search_jobs(task: str, label: str, n_shapes: int | None = None) -> list[Job]:
    """Return the configurations of a family. Each has its own seed. All families use the same seeds."""
    name, shapes = FAMILIES[label]
    return [
        Job(
            "search", task, label, name, options, recipes_of(label, k), training_of(SEARCH, task, label, drop)
        )
        for k, (options, drop) in enumerate(shapes[:n_shapes])
    ]


def training_of(table: dict[str, Training], task: str, label: str, drop: int) -> Training:
    """Adapt an entry of SEARCH or FULL to one family. drop is an index of DROPS."""
    if label == LINEAR:
        return replace(table[task], epochs=table[task].epochs * LINEAR_EPOCHS)
    return replace(table[task], drop=DROPS[task][drop])


def growing_jobs(searched: list[Done], labels: np.ndarray) -> list[Job]:
    """Return a job with the next learning rate, in the best shape, if the best is at the edge of the grid."""
    lrs = [recipe.lr for done in searched for recipe in done.job.recipes]
    done, k = rank(searched, labels)[0]
    best = done.job.recipes[k].lr
    if best == min(lrs) and best / STEP > LOWEST:
        lr = best / STEP
    elif best == max(lrs) and best * STEP < HIGHEST:
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
        length = FULL[job.task].epochs * job.training.epochs / SEARCH[job.task].epochs
        training = replace(job.training, epochs=length)
        key = json.dumps([job.options, asdict(training)])
        known = jobs.get(key, replace(job, stage="full", recipes=[], training=training))
        jobs[key] = replace(known, recipes=[*known.recipes, replace(job.recipes[k], seed=50)])
    return list(jobs.values())


def final_jobs(full: list[Done], labels: np.ndarray, seeds: int) -> list[Job]:
    """Return the jobs that train the best configuration with several seeds."""
    done, k = rank(full, labels)[0]
    recipes = [replace(done.job.recipes[k], seed=100 + seed) for seed in range(seeds)]
    size = TOGETHER[done.job.task]
    parts = [recipes[start : start + size] for start in range(0, seeds, size)]
    return [replace(done.job, stage="final", recipes=part) for part in parts]


def joined(finals: list[Done]) -> Done:
    """Return the results of all seeds as one."""
    recipes = [recipe for done in finals for recipe in done.job.recipes]
    found = {name: np.concatenate([getattr(done, name) for done in finals]) for name in ("dev", "test")}
    weights = [done.weights for done in finals if done.weights]
    found |= {
        "weights": {n: np.concatenate([w[n] for w in weights]) for n in weights[0]} if weights else None
    }
    seconds = sum(done.seconds for done in finals)
    return replace(finals[0], job=replace(finals[0].job, recipes=recipes), seconds=seconds, **found)


def race(
    workers: Workers | Finished, task: str, label: str, labels: np.ndarray, options: Any
) -> tuple[list[Done], Done]:
    """Search, choose on the dev set and train with several seeds: one family on one task.

    Returns:
        The results of the search and of full length, and the final one.
    """
    searched = workers.run(search_jobs(task, label, options.shapes))
    while more := growing_jobs(searched, labels):
        searched += workers.run(more)
    full = workers.run(full_jobs(searched, labels))
    return [*searched, *full], joined(workers.run(final_jobs(full, labels, options.seeds)))


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
        pixels, labels = images(name, options)
        if options.limit:
            pixels, labels = pixels[: options.limit], labels[: options.limit]
        splits[name] = corpora.encode_images(encoder, pixels, labels, 1000 if on_gpu else 50)
    return splits


def images(split: str, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images of a split of the race and their labels."""
    most = CIFAR_TEST if split == "test" else CIFAR_OF_A_FILE
    return corpora.images(split, options.data, most)


def labels_of(task: str, split: str, options: Any) -> np.ndarray:
    if task in corpora.IMAGES:
        found = images(split, options)[1].tolist()
    else:
        found = corpora.labels(task, split, options.data, options.tokens)
        step = max(len(found) // options.limit, 1) if options.limit else 1  # as corpora.some
        found = found[::step]
    return np.array(found[: options.limit])


def save(done: Done, folder: Path) -> None:
    """Save the weights of three seeds of the routing head, and its options, as TASK.npz."""
    if done.job.label == "routing" and done.weights:
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p[:3] for name, p in done.weights.items()}  # [3, ...] each
        np.savez(folder / f"{done.job.task}.npz", options=json.dumps(done.job.options), **weights)


def race_of_all(
    workers: Workers | Finished, task: str, labels: np.ndarray, options: Any
) -> tuple[list[Done], list[Done]]:
    """Run the race of all families on one task, side by side.

    Returns:
        The stacks that were tried, and the final stacks.

    Raises:
        Unfinished: a family has jobs that are not done.
    """
    heads = options.heads or list(FAMILIES)
    with ThreadPoolExecutor(len(heads)) as pool:
        futures: dict[str, Future] = {
            head: pool.submit(race, workers, task, head, labels, options) for head in heads
        }
    tried, finals, unfinished = [], [], []
    for head, future in futures.items():
        try:
            own, final = future.result()
        except Unfinished as error:
            unfinished.append(f"{head}: {error}")
            continue
        tried += own
        finals.append(final)
        if options.save:
            save(final, options.save)
    if unfinished:
        raise Unfinished(f"{task}: {'; '.join(unfinished)}")
    return tried, finals


def run_task(task: str, options: Any) -> tuple[list[Done], list[Done]]:
    """Train all families on one task. Returns and raises as ``race_of_all``."""
    labels = labels_of(task, "dev", options)
    if options.score:
        return race_of_all(Finished(options), task, labels, options)
    started = time.perf_counter()
    splits = load_splits(task, ["train", "dev", "test"], options)
    print(f"{time.perf_counter() - started:6.1f} s  {task}: {len(splits['train'])} samples", flush=True)
    if options.time:
        step_times.measure(task, splits, options)
        raise Unfinished(f"{task}: only timed")
    if options.implementation == "fastest":
        options.implementation = step_times.fastest(task, splits)
    with Workers(splits, options, common.about(options.device)) as workers:
        return race_of_all(workers, task, labels, options)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the texts and images")
    parser.add_argument("--tokens", type=Path, help="folder that stores token ids, for one encoder only")
    parser.add_argument("--encoder", help="default: minilm for texts, vit-cifar10 for images")
    parser.add_argument("--tasks", nargs="+", choices=corpora.TASKS, default=list(corpora.TASKS))
    parser.add_argument("--heads", nargs="+", choices=FAMILIES, help="default: all families")
    parser.add_argument("--shapes", type=int, help="number of shapes of each family to search, default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds of the final heads")
    parser.add_argument("--workers", type=int, default=6, help="number of processes that train")
    parser.add_argument("--limit", type=int, help="number of samples of each split to use")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no job after this time")
    parser.add_argument("--state", type=Path, default=Path("build/accuracy"), help="folder of finished jobs")
    parser.add_argument("--save", type=Path, help="folder for the weights of the routing heads, three seeds")
    kinds = ("fastest", *step_times.IMPLEMENTATIONS)
    parser.add_argument("--implementation", choices=kinds, default="fastest", help="of routing, on a GPU")
    parser.add_argument("--time", action="store_true", help="only measure the training steps of each family")
    parser.add_argument("--only-train", action="store_true", help="test nothing yet")
    parser.add_argument("--score", action="store_true", help="train nothing, write the rows of finished jobs")
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
        options.seeds = 1
    if not common.is_cuda(options.device):
        options.implementation = "reference"
    done, unfinished = {}, []
    for task in options.tasks:
        try:
            done[task] = run_task(task, options)
        except Unfinished as error:
            unfinished.append(str(error))
    if unfinished:
        raise SystemExit("not finished, so nothing is tested:\n" + "\n".join(unfinished))
    if not options.only_train:
        write_rows(done, options)


def write_rows(done: dict[str, tuple[list[Done], list[Done]]], options: Any) -> None:
    """Test the final heads of all tasks, and replace the rows of all stages."""
    truth = {task: [labels_of(task, split, options) for split in ("dev", "test")] for task in done}
    searched = [
        row for task, (tried, _) in done.items() for stack in tried for row in rows_of(stack, truth[task][0])
    ]
    tested, differences = scored({task: (finals, *truth[task]) for task, (_, finals) in done.items()})
    about = next(iter(done.values()))[1][0].about
    differences = [row | about for row in differences]
    for name, rows in (("_search", searched), ("", tested), ("_differences", differences)):
        replace_rows(options.results / f"accuracy{name}.csv", rows)


if __name__ == "__main__":
    main()
