"""Merge rows that several processes wrote: ``python benchmarks/merge.py little_data.csv PARTS/*/``.

Each process writes to a folder of its own (``--results``). The rows that ``benchmarks/results`` does not have
yet are appended to the file of that name there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rows import RESULTS, append, read, results_folder


def merge(name: str, folders: Sequence[Path], results: Path) -> int:
    """Append the new rows of a file in some folders, and return their number.

    Raises:
        ValueError: rows come from code that was not committed.
    """
    target = results / name
    known = read(target) if target.exists() else []
    found = [row for folder in sorted(folders) if (folder / name).exists() for row in read(folder / name)]
    new = [row for row in found if row not in known]
    for row in new:
        if row["commit"].endswith("+") or row["commit"] == "unknown":
            raise ValueError(f"rows must come from a commit, but one is of {row['commit']!r}")
    if new:
        append(target, list(new))
    return len(new)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="name of the CSV file")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of the processes")
    parser.add_argument("--results", type=results_folder, default=str(RESULTS), help="folder to write to")
    options = parser.parse_args(arguments)
    print(f"{merge(options.name, options.folders, options.results)} new rows in {options.name}")


if __name__ == "__main__":
    main()
