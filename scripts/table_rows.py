"""Read the rows of benchmarks, record the commits of those that a table shows, and write Markdown."""

import csv
import functools
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TASKS = {"sst2": "SST-2", "sst5": "SST-5", "imdb": "IMDB"}
GPU, CPU = "NVIDIA H200", "1 threads of AMD EPYC"

Row = dict[str, str]

# Summaries have no commits. These are the files that they were made from.
MADE_FROM = {
    "accuracy_summary": "accuracy",
    "faithfulness": "faithfulness_texts",
    "patches": "patches_images",
    "words": "words_texts",
}
# The commits of the rows in the current table, for each file.
commits: dict[str, set[str]] = {}


def rows(name: str, **wanted: str) -> list[Row]:
    """Return the rows of a file in which every named column has the wanted value."""
    found = read(name, wanted)
    record(name, found)
    return found


def row(name: str, **wanted: str) -> Row:
    """Return the last such row, which is the newest. A file keeps all measurements of a case."""
    found = read(name, wanted)
    if not found:
        raise ValueError(f"{name}.csv has no row with {wanted}")
    record(name, found[-1:])
    return found[-1]


def read(name: str, wanted: dict[str, str]) -> list[Row]:
    """Return such rows without recording their commits, for tables that show only some of them."""
    return [row for row in read_file(name) if wanted.items() <= row.items()]


@functools.cache
def read_file(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def record(name: str, shown: list[Row]) -> None:
    """Record the commits of the rows that a table shows."""
    source = MADE_FROM.get(name, name)
    columns = [c for c in ("task", "head", "method", "device") if c in read_file(source)[0]]
    for each in shown:
        same = {c: each[c] for c in columns if each.get(c)}
        found = [each] if source == name else read(source, same)
        commits.setdefault(source, set()).update(one.get("commit") or "unknown" for one in found)


def commits_line() -> str:
    """Write which commits the rows of a table come from, and which of them had uncommitted changes."""
    parts = []
    for name, found in commits.items():
        words = [c.removesuffix("+") + " with uncommitted changes" * c.endswith("+") for c in sorted(found)]
        parts.append(f"`{name}.csv`, commit {', '.join(words)}")
    return f"\nRows: {'; '.join(parts)}.\n"


def table(head: str, lines: Iterable[Iterable[str]]) -> str:
    """Write a Markdown table. ``head`` has the names of the columns, separated by |."""
    names = [name.strip() for name in head.split("|")]
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *lines]) + "\n"


def short(value: str | float, digits: int = 3) -> str:
    """Write a number with three digits, or with all digits before the point."""
    number = float(value)
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:#.{digits}g}"


def size(case: Row) -> str:
    """Write the sizes of a routing: batch x n_inp x d_inp -> n_out x d_out."""
    batch = f"{case['batch']} x " if int(case["batch"]) else ""
    return f"{batch}{int(case['n_inp']):,} x {case['d_inp']} -> {case['n_out']} x {case['d_out']}"
