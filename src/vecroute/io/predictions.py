"""Write rows with their predictions as JSON lines or CSV. All columns stay, and new ones come after them."""

import csv
import json
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple

from vecroute.io.cells import inert, is_missing, visible

NOTE, EXPLANATION = "no text", "explanation"
# JSON allows these characters unescaped, but a terminal may obey them: controls, separators of lines, and
# marks of the direction of writing. Halves of surrogate pairs cannot be encoded at all.
CODES = (*range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
ESCAPED = {code: f"\\u{code:04x}" for code in (*CODES, *range(0xD800, 0xE000))}


def json_line(value: Any) -> str:
    """Write a value as one line of JSON, readable, but without characters that a terminal may obey."""
    return json.dumps(value, ensure_ascii=False, default=str).translate(ESCAPED)


class Answer(NamedTuple):
    """The new cells of a row. A row without text has an empty label and nothing else."""

    label: str | list[str]
    p: Sequence[float]  # [n_cls], empty without text
    explanation: dict[str, Any] | None = None


class JsonWriter:
    """Write one JSON object per row: its cells, label and probabilities, and a note if it has no text.

    With explained=True, an explanation comes after the probabilities.
    """

    def __init__(
        self, file: IO[str], classes: Sequence[str], columns: Iterable[str], explained: bool = False
    ):
        self.file, self.classes, self.columns, self.explained = file, classes, list(columns), explained

    def write(self, row: dict[str, Any], answer: Answer, where: str) -> None:
        """Write a row and its new cells."""
        cells: dict[str, Any] = {"label": answer.label}
        cells["probabilities"] = dict(zip(self.classes, answer.p, strict=False))
        if self.explained:
            cells[EXPLANATION] = answer.explanation
        if not answer.p:
            cells["note"] = NOTE
        names = fresh(list(cells), [*self.columns, *row])
        whole = row | dict(zip(names, cells.values(), strict=True))
        print(json_line(whole), file=self.file)


class CsvWriter:
    """Write a table with a header: the columns of the rows, ``label``, and one column per class probability.

    With explained=True, a column of explanations comes last. A cell that a spreadsheet would read as a
    formula gets an apostrophe, unless raw=True. On a terminal, control characters are shown as escapes.
    """

    def __init__(
        self,
        file: IO[str],
        classes: Sequence[str],
        columns: Iterable[str],
        raw: bool = False,
        explained: bool = False,
    ):
        self.columns, self.n_cls, self.explained = list(columns), len(classes), explained
        self.raw, self.terminal = raw, file.isatty()
        self.table = csv.writer(file, lineterminator="\n")
        more = [EXPLANATION] if explained else []
        self.put([*self.columns, *fresh(["label", *classes, *more], self.columns)])

    def write(self, row: dict[str, Any], answer: Answer, where: str) -> None:
        """Write a row and its new cells. An error begins with ``where``, the place of the row."""
        if new := [name for name in row if name not in self.columns]:
            raise ValueError(
                f"{where} has the column {new[0]!r}, which the header above lacks: use --to jsonl"
            )
        joined = answer.label if isinstance(answer.label, str) else " ".join(answer.label)
        shares = list[Any](answer.p) or [""] * self.n_cls
        more = [answer.explanation] if self.explained else []
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


def new_writer(
    kind: str,
    file: IO[str],
    classes: Sequence[str],
    rows: Iterable[dict[str, Any]],
    *,
    raw: bool = False,
    explained: bool = False,
) -> CsvWriter | JsonWriter:
    """Return a writer of CSV if the kind is "csv", else of JSON lines. The first rows define the columns."""
    columns = dict.fromkeys(name for row in rows for name in row)
    if kind == "csv":
        return CsvWriter(file, classes, columns, raw, explained)
    return JsonWriter(file, classes, columns, explained)


def fresh(names: Sequence[str], taken: Iterable[str]) -> list[str]:
    """Append ``_predicted`` to each name until no other column has that name."""
    used, found = set(taken), []
    for name in names:
        while name in used:
            name += "_predicted"
        used.add(name)
        found.append(name)
    return found
