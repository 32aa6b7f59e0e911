"""Progress bars, for terminals only."""

from collections.abc import Iterator
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
