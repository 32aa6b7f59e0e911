"""Check any number of texts or images, and yield them some at a time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from vecroute.classifier.columns import samples_of
from vecroute.classifier.labels import check_texts
from vecroute.io.images import check_images, is_image
from vecroute.training.progress import counting_bar, is_shown

IMAGE_SIZE = 4_000  # an image counts as this many characters
FEW = 64  # up to this many samples, no progress bar is shown


def windows_of(X: Any, images: bool, limit: int) -> Iterator[list[Any]]:
    """Yield checked texts or ``Picture`` objects, in order, as many at a time as the limit allows.

    If X has a length, all of it is checked before anything is yielded. A stream, such as a generator, is
    checked as it is read, one window after the other.

    Args:
        X: a list, array, Series, data frame, dataset, generator or other iterable.
        images: True for images, False for texts.
        limit: greatest number of characters at a time. An image counts as 4,000. A longer text
            has a window of its own.

    Raises:
        TypeError, ValueError: see ``check_texts`` and ``check_images``. Rows count from the start of X.
    """
    rows = samples_of(X, images)
    whole = hasattr(rows, "__len__") or not isinstance(rows, Iterable) or isinstance(rows, str | bytes)
    if whole or (images and is_image(rows)):
        yield from (window for _, window in grouped((check_images if images else check_texts)(rows), limit))
        return
    n = 0
    for n, window in grouped(rows, limit):
        first = n - len(window)
        yield check_images(window, first=first) if images else check_texts(window, first=first)
    if not n:
        raise ValueError(f"X must have {'images' if images else 'texts'}, got none")


def grouped(rows: Iterable[Any], limit: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield groups of consecutive rows within the limit, each with the number of rows up to its end."""
    group: list[Any] = []
    total = n = 0
    for row in rows:
        size = len(row) if isinstance(row, str) else IMAGE_SIZE
        if group and total + size > limit:
            yield n, group
            group, total = [], 0
        group.append(row)
        total += size
        n += 1
    if group:
        yield n, group


def progress_over(X: Any, title: str, verbose: bool | None) -> AbstractContextManager[Callable[[int], None]]:
    """Return a bar that counts the finished samples of X. It stays hidden if there are few samples."""
    n = len(X) if hasattr(X, "__len__") else None
    return counting_bar(is_shown(verbose) and (n is None or n > FEW), title, n)
