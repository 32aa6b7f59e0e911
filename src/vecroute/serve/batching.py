"""Queue jobs in two lanes: short jobs are answered in batches, long jobs in pieces between those batches."""

import asyncio
import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from vecroute.ops.pieces import between_pieces, in_pieces

logger = logging.getLogger(__name__)

LONG = 10_000  # characters to classify; a job that costs this much goes to the long lane
TRIM_SECONDS = 5.0  # short jobs return freed memory to the system this often
M_ARENA_MAX = -8  # an option of mallopt in glibc


class Job(Protocol):
    @property
    def cost(self) -> int:
        """The amount of work, in any unit."""


class Waiting(NamedTuple):
    job: Job
    answer: asyncio.Future
    deadline: float  # in the clock of time.monotonic()

    @property
    def given_up(self) -> bool:
        """Whether the client has gone or its time is up."""
        return self.answer.done() or time.monotonic() > self.deadline


class QueueFull(Exception):
    """The queue already has max_waiting jobs."""


class GivenUp(Exception):
    """Every client of this batch has gone, or its time is up."""


class Turn:
    """A fair lock for two threads: a thread that releases it and takes it again lets the other go first."""

    def __init__(self) -> None:
        self.gate, self.lock = threading.Lock(), threading.Lock()

    def take(self) -> None:
        with self.gate:  # the next thread in line holds the gate, so none overtakes it
            self.lock.acquire()

    def give(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: Any) -> None:
        self.give()


class Batcher:
    """Answer jobs: all waiting short jobs as one batch, long jobs one by one in pieces.

    A job never waits for a batch to fill up: a lone job starts at once, and batches grow with the load.
    One thread computes at a time. Between two pieces, a long job lets a batch of short jobs run. It stops
    there if its client has gone or its time is up.

    Args:
        work: takes a list of jobs and returns their answers in order; called by one thread at a time.
        max_jobs: largest number of jobs in a batch.
        max_cost: largest cost of a batch, all its jobs together.
        max_waiting: largest number of waiting jobs, without those being worked on.
        long: a job of this cost or more is long.
    """

    def __init__(
        self,
        work: Callable[[list[Any]], Sequence[Any]],
        *,
        max_jobs: int = 64,
        max_cost: int = 100_000,
        max_waiting: int = 256,
        long: int = LONG,
    ):
        self.work, self.max_waiting, self.long = work, max_waiting, long
        self.turn, self.trimmed = Turn(), 0.0
        self.lanes = [Lane("short", max_jobs, max_cost), Lane("long", 1, 0)]

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return sum(len(lane) for lane in self.lanes)

    def start(self) -> None:
        """Start to work, in the running event loop."""
        self.tasks = [asyncio.create_task(self._run(lane)) for lane in self.lanes]

    async def stop(self) -> None:
        """Finish the jobs being worked on, then stop."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for lane in self.lanes:
            lane.thread.shutdown()

    async def ask(self, job: Job, seconds: float) -> Any:
        """Queue a job and return its answer.

        Raises:
            QueueFull: too many jobs wait already.
            TimeoutError: there was no answer within the given seconds. A waiting job is dropped; a running
                job stops at its next piece.
        """
        if self.waiting >= self.max_waiting:
            raise QueueFull
        answer = asyncio.get_running_loop().create_future()
        lane = self.lanes[job.cost >= self.long]
        lane.queue.put_nowait(Waiting(job, answer, time.monotonic() + seconds))
        return await asyncio.wait_for(answer, seconds)

    async def _run(self, lane: "Lane") -> None:
        while True:
            batch = await lane.batch()
            if not batch:
                continue
            loop = asyncio.get_running_loop()
            answers = await loop.run_in_executor(lane.thread, self._answers, batch, lane is self.lanes[1])
            for waiting, answer in zip(batch, answers, strict=True):
                if waiting.answer.done():
                    continue  # its client has gone or its time is up
                if isinstance(answer, Exception):
                    waiting.answer.set_exception(answer)
                else:
                    waiting.answer.set_result(answer)

    def _answers(self, batch: list[Waiting], long: bool) -> list[Any]:
        """Return the answers or errors of a batch. Runs in the thread of its lane."""
        with self.turn, in_pieces(partial(self._between, batch, long)):
            answers = answers_or_errors(self.work, [waiting.job for waiting in batch])
        if long or time.monotonic() > self.trimmed + TRIM_SECONDS:
            give_back_memory()
            self.trimmed = time.monotonic()
        return answers

    def _between(self, batch: list[Waiting], long: bool) -> None:
        """Let short jobs run between two pieces of work, and stop if every client has gone."""
        if long:
            self.turn.give()
            self.turn.take()
        if all(waiting.given_up for waiting in batch):
            raise GivenUp


class Lane:
    """A queue of jobs for one thread."""

    def __init__(self, name: str, max_jobs: int, max_cost: int):
        self.max_jobs, self.max_cost = max_jobs, max_cost
        self.queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1, f"vecroute-{name}")
        self.next: Waiting | None = None  # the job that did not fit into the last batch

    def __len__(self) -> int:
        return self.queue.qsize() + (self.next is not None)

    async def batch(self) -> list[Waiting]:
        """Return the next batch: as many waiting jobs as fit, without the abandoned ones."""
        first, self.next = self.next or await self.queue.get(), None
        batch, cost = [first], first.job.cost
        while len(batch) < self.max_jobs and not self.queue.empty():
            waiting = self.queue.get_nowait()
            if cost + waiting.job.cost > self.max_cost:
                self.next = waiting
                break
            batch.append(waiting)
            cost += waiting.job.cost
        return [waiting for waiting in batch if not waiting.given_up]


def answers_or_errors(work: Callable[[list[Any]], Sequence[Any]], jobs: list[Any]) -> list[Any]:
    """Return the answers. If a batch fails, work on each job alone, so that only a bad one gets an error."""
    try:
        return list(work(jobs))
    except GivenUp as error:
        return [error.with_traceback(None)] * len(jobs)  # a traceback keeps its tensors in memory
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        logger.warning("a batch of %d failed and is repeated one by one: %s", len(jobs), type(error).__name__)
        return [answer for job in jobs for answer in answers_or_errors(work, [job])]


def give_back_memory() -> None:
    """Return freed memory to the system. Only glibc can do so."""
    c_library("malloc_trim", 0)


def share_memory() -> None:
    """Let all threads that start later allocate from one arena.

    By default, glibc gives each thread an arena. A thread does not reuse the memory that another has freed,
    so a server with many threads grows.
    """
    c_library("mallopt", M_ARENA_MAX, 1)


def c_library(function: str, *arguments: int) -> None:
    """Call a function of the C library, if it has one of this name."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*arguments)


def cut_into_pieces(model: nn.Module) -> None:
    """Make every module of an encoder a piece of work, forward and backward."""

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        between_pieces()
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda gradient: between_pieces())

    for module in model.modules():
        module.register_forward_hook(after)
