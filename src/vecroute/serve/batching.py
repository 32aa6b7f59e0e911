"""Jobs wait in two lanes: short ones are answered together, long ones in pieces between the short ones."""

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

LONG = 10_000  # the cost of a job that goes to the long lane, in characters to classify


class Job(Protocol):
    @property
    def cost(self) -> int:
        """How much work it is, in any unit."""


class Waiting(NamedTuple):
    job: Job
    answer: asyncio.Future
    deadline: float  # by time.monotonic()

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.answer.done() or time.monotonic() > self.deadline


class QueueFull(Exception):
    """As many requests wait as may."""


class GivenUp(Exception):
    """Nobody waits for this work any more."""


class Turn:
    """A lock that two threads take in turns: who gives it back and takes it again lets the other go first."""

    def __init__(self) -> None:
        self.gate, self.lock = threading.Lock(), threading.Lock()

    def take(self) -> None:
        with self.gate:  # held by who comes next, so that nobody overtakes
            self.lock.acquire()

    def give(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: Any) -> None:
        self.give()


class Batcher:
    """Works on jobs: short ones together, as many as wait; long ones alone, in pieces.

    Nothing waits for others to come: a lone job is worked on at once, and batches grow with the load. One
    thread computes at a time. Between two pieces, a long job gives way to a batch of short jobs, and stops
    where nobody waits for its answer any more, because time is up or the client has gone.

    Args:
        work: gives the answers to some jobs, in order; called by one thread at a time.
        max_jobs: of a batch.
        max_cost: of a batch, all jobs together.
        max_waiting: jobs that wait, beyond those at work.
        long: the cost from which a job is long.
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
        self.turn = Turn()
        self.lanes = [Lane("short", max_jobs, max_cost), Lane("long", 1, 0)]

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return sum(len(lane) for lane in self.lanes)

    def start(self) -> None:
        """Begin to work, in the event loop that is running."""
        self.tasks = [asyncio.create_task(self._run(lane)) for lane in self.lanes]

    async def stop(self) -> None:
        """Stop, once the jobs at work are done."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for lane in self.lanes:
            lane.thread.shutdown()

    async def ask(self, job: Job, seconds: float) -> Any:
        """The answer to a job.

        Raises:
            QueueFull: too many jobs wait already.
            TimeoutError: no answer in so many seconds. A job that still waits is dropped, a job at work stops
                at its next piece.
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
                    continue  # nobody waits for it any more
                if isinstance(answer, Exception):
                    waiting.answer.set_exception(answer)
                else:
                    waiting.answer.set_result(answer)

    def _answers(self, batch: list[Waiting], long: bool) -> list[Any]:
        """The answers or errors of a batch, in the thread of its lane."""
        with self.turn, in_pieces(partial(self._between, batch, long)):
            answers = answers_or_errors(self.work, [waiting.job for waiting in batch])
        if long:
            give_back_memory()
        return answers

    def _between(self, batch: list[Waiting], long: bool) -> None:
        """Between two pieces of work: give way to short jobs, and stop if nobody waits any more."""
        if long:
            self.turn.give()
            self.turn.take()
        if all(waiting.given_up for waiting in batch):
            raise GivenUp


class Lane:
    """Jobs that wait for one thread."""

    def __init__(self, name: str, max_jobs: int, max_cost: int):
        self.max_jobs, self.max_cost = max_jobs, max_cost
        self.queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self.thread = ThreadPoolExecutor(1, f"vecroute-{name}")
        self.next: Waiting | None = None  # what did not fit into the last batch

    def __len__(self) -> int:
        return self.queue.qsize() + (self.next is not None)

    async def batch(self) -> list[Waiting]:
        """The next job and those that wait behind it, as many as fit, less those that were given up."""
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
    """The answers; where one job spoils a batch, each is worked on alone, and that one gets its error."""
    try:
        return list(work(jobs))
    except GivenUp as error:
        return [error.with_traceback(None)] * len(jobs)  # a traceback would keep tensors alive
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        logger.warning("a batch of %d failed, one by one now: %s", len(jobs), type(error).__name__)
        return [answer for job in jobs for answer in answers_or_errors(work, [job])]


def give_back_memory() -> None:
    """Return memory that a long job has freed to the system, where its C library can (glibc)."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def cut_into_pieces(model: nn.Module) -> None:
    """Let every module of an encoder be a piece of work, forward and backward."""

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        between_pieces()
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda gradient: between_pieces())

    for module in model.modules():
        module.register_forward_hook(after)
