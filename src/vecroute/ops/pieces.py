"""Divide long work into pieces. Between two pieces, the caller may stop the work or let others go first."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_of_this_thread = threading.local()


@contextmanager
def in_pieces(between: Callable[[], None]) -> Iterator[None]:
    """In this thread, call ``between`` before each piece of long work. If it raises, the work ends."""
    before = getattr(_of_this_thread, "between", None)
    _of_this_thread.between = between
    try:
        yield
    finally:
        _of_this_thread.between = before


def between_pieces() -> None:
    """Call this before each piece of a long loop. It does nothing outside of ``in_pieces``."""
    between = getattr(_of_this_thread, "between", None)
    if between is not None:
        between()
