"""Texts and labels of a table, without the rows that lack one of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vecroute.io.cells import is_blank
from vecroute.io.tables import LINE, file_format, read_pieces

N_NAMED = 5  # lines named in a message


class Samples(NamedTuple):
    """Texts, the label of each, and where they stand."""

    texts: list[str]
    labels: list[Any]  # empty if no column of labels was asked for
    lines: list[int]  # of the file
    skipped: dict[str, list[int]]  # "text", "label": lines of the rows without it
    n_rows: int  # of the file


def read_samples(
    path: str | Path,
    text: str,
    label: str | None = None,
    *,
    strict: bool = False,
    delimiter: str | None = None,
) -> Samples:
    """All rows of a table that have a text, and a label if that is asked for.

    Args:
        path, delimiter: see ``vecroute.io.tables.read_pieces``.
        text, label: names of columns.
        strict: raise for a row without text or label instead of leaving it out.

    Raises:
        ValueError: as ``read_pieces``; no row is left; a row lacks text or label and strict=True.
        TypeError: a text is no string.
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
    """The column of texts of a file: a .txt file has one alone, whatever it is called elsewhere."""
    return LINE if file_format(Path(path)) == "txt" else text


def text_of(row: dict[str, Any], column: str, where: Any, line: int) -> str:
    """The text of a row, empty if it has none.

    Raises:
        TypeError: it is something else than a string.
    """
    cell = row.get(column)
    if is_blank(cell):
        return ""
    if not isinstance(cell, str):
        kind = type(cell).__name__
        raise TypeError(f"column {column!r} of {where} must have texts, line {line} has {cell!r} ({kind})")
    return cell


def lacking(samples: Samples, path: str | Path) -> str:
    """How many rows have no text or no label, and which ones."""
    unit = "row" if file_format(Path(path)) == "parquet" else "line"
    return ", ".join(
        f"{len(lines)} of {samples.n_rows:,} rows have no {what} ({listed(lines, unit)})"
        for what, lines in samples.skipped.items()
        if lines
    )


def listed(lines: Sequence[int], unit: str = "line") -> str:
    """The first lines, and how many more there are."""
    first = ", ".join(map(str, lines[:N_NAMED]))
    more = f" and {len(lines) - N_NAMED:,} more" if len(lines) > N_NAMED else ""
    return f"{unit}{'s' if len(lines) > 1 else ''} {first}{more}"
