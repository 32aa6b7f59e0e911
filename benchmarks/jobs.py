"""Jobs of the race in accuracy.py: what to train, the processes that train, and the files of results."""

import hashlib
import json
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import corpora
import numpy as np
import torch
import torch.multiprocessing as mp
from corpora import Packed
from families import BY_DEPTH, LINEAR, ROUTINGS
from stacked import Recipe, Stack, Training, as_means, as_vectors


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
    weights: dict[str, np.ndarray] | None = None  # [m, ...] each, only for jobs whose weights are kept
    about: dict[str, str] = field(default_factory=dict)  # device, versions and code


class Unfinished(Exception):
    """A step of the race has jobs that are not done."""


def run_job(
    job: Job, splits: dict[str, Packed], implementation: str = "reference", keep_weights: bool = True
) -> Done:
    if job.label == LINEAR:
        splits = as_means(splits)
    elif job.label not in BY_DEPTH:
        splits = {name: as_vectors(data) for name, data in splits.items()}
    train = splits["train"]
    depth, d_emb = train.hidden.shape[1:]
    sizes = {"d_emb": d_emb, "depth": depth, "n_cls": corpora.TASKS[job.task]}
    started = time.perf_counter()
    if job.label in ROUTINGS:
        sizes["implementation"] = implementation
    stack = Stack(job.name, sizes | job.options, job.recipes, str(train.hidden.device))
    stack.fit(train, job.training, own_order=job.test)
    dev = stack.predict(splits["dev"]).half().cpu().numpy()  # [m, n, n_cls]
    seconds = time.perf_counter() - started
    test, weights = None, None
    if job.test:
        test = stack.predict(splits["test"]).half().cpu().numpy()  # [m, n, n_cls]
        if keep_weights and job.label == "routing":
            weights = {name: p.half().cpu().numpy() for name, p in stack.average.items()}  # [m, ...] each
    return Done(job, dev, test, stack.n_parameters, seconds, weights)


def work(splits: dict[str, Packed], jobs: Any, results: Any, share: float, until: float, *how: Any) -> None:
    """Run jobs until None arrives. Runs in a separate process with a share of the GPU memory.

    ``how`` are the last arguments of ``run_job``.
    """
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    while (job := jobs.get()) is not None:
        if time.time() > until:
            results.put((job, "no time left, run again to resume"))
            continue
        try:
            results.put(run_job(job, splits, *how))
        except Exception as error:  # one failed job must not stop the others
            results.put((job, f"{type(error).__name__}: {error}"))


class Workers:
    """Processes that train stacks of heads and save each: ``with Workers(splits, options) as workers``.

    Several threads may call ``run`` at the same time.
    """

    def __init__(self, splits: dict[str, Packed], options: Any, about: dict[str, str]):
        context = mp.get_context("spawn")
        self.jobs, self.results = context.Queue(), context.Queue()
        self.state, self.limit, self.about = options.state, options.limit, about
        self.waiting: dict[str, Future] = {}
        share, n = 0.0, options.workers
        if splits["train"].hidden.is_cuda:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            share = 0.9 * free / total / n
        how = (options.implementation, options.save is not None)
        arguments = (splits, self.jobs, self.results, share, options.until, *how)
        self.processes = [context.Process(target=work, args=arguments) for _ in range(n)]

    def __enter__(self) -> "Workers":
        for process in self.processes:
            process.start()
        self.collector = threading.Thread(target=self.collect, daemon=True)
        self.collector.start()
        return self

    def __exit__(self, *error) -> None:
        for _ in self.processes:
            self.jobs.put(None)
        for process in self.processes:
            process.join()
        self.results.put(None)
        self.collector.join()

    def collect(self) -> None:
        """Save results as they come, and tell the threads that wait for them."""
        while (done := self.results.get()) is not None:
            job = done.job if isinstance(done, Done) else done[0]
            key = job_key(job, self.limit)
            if isinstance(done, Done):
                done.about = self.about
                print(f"{done.seconds:6.1f} s  {job}", flush=True)
                save_done(done, self.state / f"{key}.npz")
                self.waiting.pop(key).set_result(None)
            else:
                self.waiting.pop(key).set_result(f"{job}: {done[1]}")

    def run(self, jobs: list[Job]) -> list[Done]:
        """Return the results of all jobs. Only jobs without a file in the state folder are run.

        Raises:
            Unfinished: a job failed, or there is no time left.
        """
        files = {job_key(job, self.limit): job for job in jobs}
        missing = {key: job for key, job in files.items() if not (self.state / f"{key}.npz").exists()}
        futures: list[Future] = []
        for key, job in missing.items():
            self.waiting[key] = Future()
            futures.append(self.waiting[key])
            self.jobs.put(job)
        failed = [message for future in futures if (message := future.result())]
        if failed:
            raise Unfinished(f"{len(failed)} of {len(jobs)} jobs are not done, among them {failed[0]}")
        return [load_done(job, self.state / f"{key}.npz") for key, job in files.items()]


class Finished:
    """Stands in for ``Workers`` where nothing may be trained any more: it only reads the state folder."""

    def __init__(self, options: Any):
        self.state, self.limit = options.state, options.limit

    def run(self, jobs: list[Job]) -> list[Done]:
        files = {self.state / f"{job_key(job, self.limit)}.npz": job for job in jobs}
        missing = [job for path, job in files.items() if not path.exists()]
        if missing:
            raise Unfinished(f"{len(missing)} of {len(jobs)} jobs have no file, among them {missing[0]}")
        return [load_done(job, path) for path, job in files.items()]


def job_key(job: Job, limit: int | None) -> str:
    """Return a name for the file of a job that changes with everything that its result depends on."""
    about = json.dumps([asdict(job), limit], sort_keys=True)
    return f"{job.task}-{job.stage}-{hashlib.sha256(about.encode()).hexdigest()[:16]}"


def save_done(done: Done, path: Path) -> None:
    """Write the result of a job, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {"dev": done.dev, "parameters": done.parameters, "seconds": done.seconds}
    arrays |= {"about": json.dumps(done.about)}
    arrays |= {} if done.test is None else {"test": done.test}
    arrays |= {f"weight.{name}": p for name, p in (done.weights or {}).items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(temporary, path)


def load_done(job: Job, path: Path) -> Done:
    with np.load(path) as found:
        weights = {name.removeprefix("weight."): found[name] for name in found if name.startswith("weight.")}
        numbers = int(found["parameters"]), float(found["seconds"])
        about = json.loads(str(found["about"]))
        return Done(job, found["dev"], found.get("test"), *numbers, weights, about)
