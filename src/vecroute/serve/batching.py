"""Requests that come while the classifier is at work wait in a queue, and are then answered together."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)


class Job(Protocol):
    @property
    def cost(self) -> int:
        """How much work it is, in any unit."""


class Waiting(NamedTuple):
    job: Job
    answer: asyncio.Future


class QueueFull(Exception):
    """As many requests wait as may."""


class Batcher:
    """One thread that works on jobs, as many at a time as wait when it is free.

    Nothing waits for others to come: a lone job is worked on at once, and batches grow with the load.

    Args:
        work: gives the answers to some jobs, in order; in a thread of its own.
        max_jobs: of a batch.
        max_cost: of a batch, all jobs together; one that costs more comes alone.
        max_waiting: jobs in the queue, beyond those at work.
    """

    def __init__(
        self,
        work: Callable[[list[Any]], Sequence[Any]],
        *,
        max_jobs: int = 64,
        max_cost: int = 100_000,
        max_waiting: int = 256,
    ):
        self.work, self.max_jobs, self.max_cost = work, max_jobs, max_cost
        self.queue: asyncio.Queue[Waiting] = asyncio.Queue(max_waiting)
        self.thread = ThreadPoolExecutor(1, "vecroute-batch")
        self.next: Waiting | None = None  # what did not fit into the last batch

    def start(self) -> None:
        """Begin to work, in the event loop that is running."""
        self.task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop, once the jobs at work are done."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.thread.shutdown()

    async def ask(self, job: Job, seconds: float) -> Any:
        """The answer to a job.

        Raises:
            QueueFull: too many jobs wait already.
            TimeoutError: no answer in so many seconds; a job that still waits is dropped.
        """
        waiting = Waiting(job, asyncio.get_running_loop().create_future())
        try:
            self.queue.put_nowait(waiting)
        except asyncio.QueueFull:
            raise QueueFull from None
        return await asyncio.wait_for(waiting.answer, seconds)

    async def _run(self) -> None:
        while True:
            batch = await self._batch()
            if not batch:
                continue
            jobs = [waiting.job for waiting in batch]
            loop = asyncio.get_running_loop()
            answers = await loop.run_in_executor(self.thread, answers_or_errors, self.work, jobs)
            for waiting, answer in zip(batch, answers, strict=True):
                if waiting.answer.done():
                    continue  # nobody waits for it any more
                if isinstance(answer, Exception):
                    waiting.answer.set_exception(answer)
                else:
                    waiting.answer.set_result(answer)

    async def _batch(self) -> list[Waiting]:
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
        return [waiting for waiting in batch if not waiting.answer.done()]


def answers_or_errors(work: Callable[[list[Any]], Sequence[Any]], jobs: list[Any]) -> list[Any]:
    """The answers; where one job spoils a batch, each is worked on alone, and that one gets its error."""
    try:
        return list(work(jobs))
    except Exception as error:
        if len(jobs) == 1:
            return [error]
        logger.warning("a batch of %d failed, one by one now: %s", len(jobs), type(error).__name__)
        return [answer for job in jobs for answer in answers_or_errors(work, [job])]
