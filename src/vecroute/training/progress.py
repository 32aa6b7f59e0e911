"""Progress bars, for terminals only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MEMORY = 600.0  # seconds; the steps of this time give the estimate of the remaining time, since some are slow


@contextmanager
def progress_bar(show: bool, title: str, total: int | None) -> Iterator[Any]:
    """Show a bar on standard error if show=True.

    Yields a function ``update(done, **beside)``, which takes the number of finished steps and values to print
    beside the bar. Without a total, the bar only counts steps.
    """
    if not show:
        yield lambda done, **beside: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[beside]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, speed_estimate_period=MEMORY) as progress:
        task = progress.add_task(title, beside="", total=total)

        def update(done: int, **beside: str) -> None:
            told = "  ".join(f"{name.replace('_', ' ')} {value}" for name, value in beside.items())
            progress.update(task, completed=done, beside=told)

        yield update


def is_shown(verbose: bool | None) -> bool:
    """Return whether to show progress: as asked, or for None if standard error is a terminal."""
    at_terminal = sys.stderr is not None and sys.stderr.isatty()
    return at_terminal if verbose is None else verbose


@contextmanager
def counting_bar(show: bool, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar as ``progress_bar``, but yield ``step(more)``: the number of steps since the last call."""
    done = 0
    with progress_bar(show, title, total) as bar:

        def step(more: int) -> None:
            nonlocal done
            done += more
            bar(done)

        yield step
