"""Write rows with their predictions as JSON lines or CSV. All columns stay, and new ones come after them."""

import csv
import json
from collections.abc import Iterable, Sequence
from typing import IO, Any

from vecroute.io.cells import inert, is_missing, visible

NOTE = "no text"
# JSON allows these characters unescaped, but a terminal may obey them: controls, separators of lines, and
# marks of the direction of writing. Halves of surrogate pairs cannot be encoded at all.
CODES = (*range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
ESCAPED = {code: f"\\u{code:04x}" for code in (*CODES, *range(0xD800, 0xE000))}


class JsonWriter:
    """Write one JSON object per row: its cells, label and probabilities, and a note if it has no text."""

    def __init__(
        self, file: IO[str], classes: Sequence[str], columns: Iterable[str], more: Sequence[str] = ()
    ):
        self.file, self.classes, self.columns = file, classes, list(columns)
        self.more = list(more)  # names of further new columns

    def write(
        self,
        row: dict[str, Any],
        label: str | list[str],
        p: Sequence[float],
        where: str,
        more: Sequence[Any] = (),
    ) -> None:
        """Write a row, its label and the probabilities p [n_cls], none where it has no text."""
        names = fresh(["label", "probabilities", *self.more, "note"], [*self.columns, *row])
        added = [label, dict(zip(self.classes, p, strict=False)), *more, *([] if p else [NOTE])]
        line = json.dumps(row | dict(zip(names, added, strict=False)), ensure_ascii=False, default=str)
        print(line.translate(ESCAPED), file=self.file)


class CsvWriter:
    """Write a table with a header: the columns of the rows, ``label``, and one column per class probability.

    A cell that a spreadsheet would read as a formula gets an apostrophe, unless raw=True. On a terminal,
    control characters are shown as escapes.
    """

    def __init__(
        self,
        file: IO[str],
        classes: Sequence[str],
        columns: Iterable[str],
        raw: bool = False,
        more: Sequence[str] = (),
    ):
        self.columns, self.n_cls = list(columns), len(classes)
        self.raw, self.terminal = raw, file.isatty()
        self.table = csv.writer(file, lineterminator="\n")
        self.put([*self.columns, *fresh(["label", *classes, *more], self.columns)])

    def write(
        self,
        row: dict[str, Any],
        label: str | list[str],
        p: Sequence[float],
        where: str,
        more: Sequence[Any] = (),
    ) -> None:
        """Write a row, its label and the probabilities p [n_cls], none where it has no text."""
        if new := [name for name in row if name not in self.columns]:
            raise ValueError(
                f"{where} has the column {new[0]!r}, which the header above lacks: use --to jsonl"
            )
        joined = label if isinstance(label, str) else " ".join(label)
        shares = list[Any](p) or [""] * self.n_cls
        self.put([*(row.get(name) for name in self.columns), joined, *shares, *more])

    def put(self, cells: Iterable[Any]) -> None:
        self.table.writerow([self.cell(one) for one in cells])

    def cell(self, value: Any) -> Any:
        if isinstance(value, list | dict):
            value = json.dumps(value, ensure_ascii=False, default=str)
        if is_missing(value):
            return ""
        if not isinstance(value, str):
            return value
        value = value if self.raw else inert(value)
        return visible(value) if self.terminal else value


def fresh(names: Sequence[str], taken: Iterable[str]) -> list[str]:
    """Append ``_predicted`` to each name until no other column has that name."""
    used, found = set(taken), []
    for name in names:
        while name in used:
            name += "_predicted"
        used.add(name)
        found.append(name)
    return found
