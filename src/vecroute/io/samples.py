"""Read the texts and labels of a table, and leave out rows that lack one of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vecroute.io.cells import is_blank, is_whole
from vecroute.io.tables import LINE, file_format, read_pieces

N_NAMED = 5  # lines named in a message


class Samples(NamedTuple):
    """Texts, their labels, and the line of the file that each came from."""

    texts: list[str]
    labels: list[Any]  # empty if no label column was asked for
    lines: list[int]  # line number of each text in the file
    skipped: dict[str, list[int]]  # keys "text" and "label": lines of the rows that lack it
    n_rows: int  # rows in the file, skipped ones included


def read_samples(
    path: str | Path,
    text: str,
    label: str | None = None,
    *,
    strict: bool = False,
    delimiter: str | None = None,
) -> Samples:
    """Read all rows of a table that have a text, and a label if a label column is named.

    Args:
        path, delimiter: see ``vecroute.io.tables.read_pieces``.
        text, label: names of the columns.
        strict: raise an error for a row without text or label instead of skipping it.

    Raises:
        ValueError: ``read_pieces`` cannot read the file, every row was skipped, or strict=True and a row
            lacks its text or label.
        TypeError: a text is not a string.
    """
    found, n_rows = Samples([], [], [], {"text": [], "label": []}, 0), 0
    text = column_of(path, text)
    for piece in read_pieces(path, text, *([label] if label else []), delimiter=delimiter):
        n_rows += len(piece.rows)
        for line, row in zip(piece.lines, piece.rows, strict=True):
            one = text_of(row, text, path, line)
            if not one or (label and is_blank(row.get(label))):
                found.skipped["text" if not one else "label"].append(line)
                continue
            found.texts.append(one)
            found.lines.append(line)
            if label:
                found.labels.append(row[label])
    found = found._replace(n_rows=n_rows)
    if strict and len(found.texts) < n_rows:
        raise ValueError(f"{path}: {lacking(found, path)}; without --strict these rows are skipped")
    if not n_rows:
        raise ValueError(f"{path} is empty: it has no rows")
    if not found.texts:
        raise ValueError(f"{path}: no row is left, {lacking(found, path)}")
    return found


def column_of(path: str | Path, text: str) -> str:
    """Return the name of the text column. A .txt file has only one column, so its name is fixed."""
    return LINE if file_format(Path(path)) == "txt" else text


def text_of(row: dict[str, Any], column: str, where: Any, line: int) -> str:
    """Return the text of a row, or an empty string if it has none.

    Raises:
        TypeError: the cell is not a string.
        ValueError: the text has half of a surrogate pair.
    """
    cell = row.get(column)
    if is_blank(cell):
        return ""
    if not isinstance(cell, str):
        kind = type(cell).__name__
        raise TypeError(f"column {column!r} of {where} must have texts, line {line} has {cell!r} ({kind})")
    if not is_whole(cell):
        raise ValueError(f"line {line} of {where} has half of a surrogate pair in column {column!r}")
    return cell


def lacking(samples: Samples, path: str | Path) -> str:
    """Say how many rows lack a text or a label, and name the first of them."""
    unit = "row" if file_format(Path(path)) == "parquet" else "line"
    return ", ".join(
        f"{len(lines)} of {samples.n_rows:,} rows have no {what} ({listed(lines, unit)})"
        for what, lines in samples.skipped.items()
        if lines
    )


def listed(lines: Sequence[int], unit: str = "line") -> str:
    """Name the first lines, and say how many more there are."""
    first = ", ".join(map(str, lines[:N_NAMED]))
    more = f" and {len(lines) - N_NAMED:,} more" if len(lines) > N_NAMED else ""
    return f"{unit}{'s' if len(lines) > 1 else ''} {first}{more}"
