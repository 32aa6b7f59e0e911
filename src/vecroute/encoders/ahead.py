"""Prepare the next items in threads, while the caller works on the current one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")


def ahead(
    prepare: Callable[[Item], Prepared], items: Iterable[Item], n: int = 1, threads: int = 1
) -> Iterator[Prepared]:
    """Yield prepare(item) for each item, in order. Threads prepare n items before they are asked for.

    The items themselves are read in the thread of the caller.
    """
    coming = iter(items)
    first = list(islice(coming, n + 1))
    if len(first) < 2:  # there is nothing to prepare meanwhile
        yield from map(prepare, first)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque(pool.submit(prepare, item) for item in first)
        while waiting:
            prepared = waiting.popleft().result()
            yield prepared
            waiting.extend(pool.submit(prepare, item) for item in islice(coming, 1))
