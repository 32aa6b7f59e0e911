"""Read tables a few rows at a time: CSV, TSV, JSON lines, Parquet and lines of text."""

import csv
import gzip
import io
import itertools
import json
import math
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from vecroute.io.cells import shortened
from vecroute.io.parquet import batches_of, open_parquet

FORMATS = ("csv", "tsv", "jsonl", "parquet", "txt")
DELIMITERS = (",", ";", "\t", "|")  # tried in this order
ROWS = 512  # rows in a piece
MAX_COLUMNS = 10_000
MAX_KEYS = 100_000  # in a JSON line, nested keys included
MAX_ROW = 100_000_000  # characters of a row; a small .gz file can hold a line of any length
MAX_RATIO = 50  # characters for each byte of a packed file; texts have about 5, one row repeated about 1,000
MAX_UNPACKED = 1_000_000_000  # a packed file may have this many characters in any case
ROW_COST = 100  # characters added to the count of a row, since each row of a list takes memory
LINE = "text"  # name of the only column of a .txt file
MARKS_OF_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # first bytes of what Excel calls Unicode text
SEPARATOR = re.compile(r'"?sep=([^"\r\n])"?\r?\n?')  # first line that tells Excel the delimiter
N_NAMED = 20  # columns in a message
CONTEXT = 20  # bytes shown before one that cannot be read


class Piece(NamedTuple):
    """A few consecutive rows of a table."""

    rows: list[dict[str, Any]]  # cells by column name; CSV and TSV cells are strings
    lines: list[int]  # the line where each row begins, from 1; for Parquet the number of the row


def read_pieces(
    path: str | Path, *columns: str, rows: int = ROWS, delimiter: str | None = None
) -> Iterator[Piece]:
    """Yield the rows of a table, a few at a time. No row is left out: an empty CSV line is an empty row.

    Args:
        path: ends with .csv, .tsv, .jsonl, .parquet or .txt, optionally followed by .gz.
        columns: names that the table must have. A .txt file has only the column "text".
        rows: number of rows in a piece.
        delimiter: character between the cells of .csv and .tsv files. None finds it in the first line.

    Raises:
        ValueError: the file is missing, empty, damaged, not UTF-8, lacks a column, has more than 10,000
            columns, or unpacks to more than a billion characters and more than 50 for each of its bytes.
    """
    path = Path(path)
    kind = file_format(path)
    check_file(path)
    opened: Any = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
    n_rows, n_characters, most = 0, 0, limit_of(path, kind)
    with opened as file:
        for piece in pieces_of(file, kind, str(path), *columns, rows=rows, delimiter=delimiter):
            n_rows += len(piece.rows)
            n_characters += sum(map(characters_of, piece.rows))
            if max(n_characters, file.tell()) + ROW_COST * n_rows > most:
                raise ValueError(
                    f"{path} unpacks to more than {most:,} characters: it repeats itself too often"
                )
            yield piece


def limit_of(path: Path, kind: str) -> float:
    """Return how many characters a file may have: any number unless it is packed."""
    packed = path.suffix == ".gz" or kind == "parquet"
    return max(MAX_UNPACKED, MAX_RATIO * path.stat().st_size) if packed else math.inf


def check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")


def pieces_of(
    file: IO[bytes], kind: str, name: str, *columns: str, rows: int = ROWS, delimiter: str | None = None
) -> Iterator[Piece]:
    """Yield the pieces of an open file. Every error is one line that begins with its name."""
    found: set[str] = set()
    with closing(numbered_rows(file, kind, columns, delimiter)) as numbered:
        while some := next_rows(numbered, rows, name):
            piece = Piece([row for _, row in some], [line for line, _ in some])
            found.update(*piece.rows)
            for column in columns:
                if column not in found:
                    raise ValueError(f"{name} has no column {column!r}, it has {named(piece.rows[0])}")
            yield piece
    if not found and kind != "txt":  # an empty .txt file is valid: it has no texts
        raise ValueError(f"{name} is empty: it has no rows")


def next_rows(
    numbered: Iterator[tuple[int, dict[str, Any]]], rows: int, name: str
) -> list[tuple[int, dict[str, Any]]]:
    """Return the next rows, or none at the end of the file. Turn each error of a reader into one line."""
    try:
        with long_cells():
            some, n_characters = [], 0
            for row in itertools.islice(numbered, rows):
                some.append(row)
                n_characters += characters_of(row[1])
                if n_characters > MAX_ROW:
                    break
            return some
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} {not_decoded(error)}") from error
    except Refused as error:
        raise ValueError(f"{name} {error}") from error
    except Exception as error:  # each format raises errors of its own
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} could not be read: {message}") from error


def characters_of(row: dict[str, Any]) -> int:
    """Count the characters and bytes in the cells of a row, also in nested ones."""
    n, cells = 0, list(row.values())
    while cells:
        cell = cells.pop()
        if isinstance(cell, str | bytes):
            n += len(cell)
        elif isinstance(cell, dict):
            cells += (*cell, *cell.values())
        elif isinstance(cell, list | tuple):
            cells += cell
    return n


class Refused(ValueError):
    """An error in a table. Its message continues a sentence that begins with the file's name."""


@contextmanager
def long_cells() -> Iterator[None]:
    """Allow very long CSV cells. The limit holds for the whole process, so restore it afterwards."""
    before = csv.field_size_limit(MAX_ROW)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def numbered_rows(
    file: IO[bytes], kind: str, columns: Sequence[str], delimiter: str | None
) -> Generator[tuple[int, dict[str, Any]]]:
    """Yield the line where each row begins, and the row."""
    if kind == "parquet":
        yield from parquet_rows(file)
        return
    ends = "\n" if kind in ("jsonl", "txt") else ""  # the reader of CSV finds the ends of lines itself
    text = io.TextIOWrapper(file, "utf-16" if is_utf_16(file) else "utf-8-sig", newline=ends)
    lines = Lines(text)
    try:
        if kind == "jsonl":
            yield from json_rows(lines)
        elif kind == "txt":
            yield from ((number, {LINE: line.rstrip("\r\n")}) for number, line in enumerate(lines, 1))
        else:
            yield from csv_rows(lines, kind, columns, delimiter)
    finally:
        text.detach()  # leaves standard input open, which the caller owns


class Lines:
    """Iterate over lines. A row of several lines sets ``row`` to 0 at its end.

    Raises:
        Refused: a line, or all lines of a row together, are longer than MAX_ROW.
    """

    def __init__(self, text: io.TextIOWrapper):
        self.text, self.several = text, False
        self.number, self.row = 0, 0  # lines read; characters of the row so far

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        line = self.text.readline(MAX_ROW + 1)
        if not line:
            raise StopIteration
        self.number, self.row = self.number + 1, len(line) + (self.row if self.several else 0)
        if self.row > MAX_ROW:
            also = ": maybe a quote is not closed" if self.several else ""
            told = f"the row that ends with line {self.number} has more than {MAX_ROW:,} characters"
            raise Refused(f"could not be read: {told}{also}")
        return line


def is_utf_16(file: Any) -> bool:
    """Return whether a file begins with the mark of UTF-16. The position in the file does not change."""
    if hasattr(file, "peek"):
        return file.peek(2)[:2] in MARKS_OF_UTF_16
    first = file.read(2)
    file.seek(0)
    return first in MARKS_OF_UTF_16


def not_decoded(error: UnicodeDecodeError) -> str:
    """Say which byte cannot be read, what stands before it, and what to do."""
    before = error.object[max(0, error.start - CONTEXT) : error.start].decode(error.encoding, "ignore")
    byte = f"byte 0x{error.object[error.start]:02x}" + (f" after {before!r}" if before else "")
    encoding = error.encoding[:6].upper()
    return f"is not {encoding} text: it has the {byte}; save it as UTF-8 (in Excel: CSV UTF-8)"


def named(columns: Iterable[str]) -> str:
    """Return the first names of columns, shortened, and how many more there are."""
    names = list(map(shortened, columns))
    more = f" and {len(names) - N_NAMED:,} more" if len(names) > N_NAMED else ""
    return ", ".join(map(repr, names[:N_NAMED])) + more


def parquet_rows(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    # Parquet is read from its end, so a stream that cannot seek is read as a whole.
    with open_parquet(file if file.seekable() else io.BytesIO(file.read())) as table:
        check_width(table.metadata.num_columns, "its schema")
        number = itertools.count(1)
        for batch in batches_of(table, ROWS, MAX_ROW):
            yield from ((next(number), row) for row in batch.to_pylist())


def json_rows(text: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue  # files often end with an empty line; an empty row would be {}
        n_keys = line.count('":') - line.count('\\":')  # count before parsing, which is slow
        if n_keys > MAX_KEYS:
            raise Refused(f"has too many columns: line {number} has {n_keys:,} keys, including nested ones")
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise Refused(f"could not be read: line {number} is nested too deep") from error
        except json.JSONDecodeError as error:
            raise Refused(f"could not be read: line {number} is not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise Refused(f"could not be read: line {number} is not a JSON object, but {type(row).__name__}")
        check_width(len(row), f"line {number}")
        yield number, row


def csv_rows(
    lines: Lines, kind: str, columns: Sequence[str], delimiter: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows with the names of the first line as keys. A short row is filled up with empty cells."""
    lines.several = True  # a cell in quotes may have line breaks
    first, begin = next(lines, ""), 1
    if told := SEPARATOR.fullmatch(first):
        first, begin, delimiter = next(lines, ""), 2, delimiter or told[1]
    if not first.strip():
        raise Refused("is empty" if not first else "has no column names: its first line is empty")
    n_delimiters = max(first.count(one) for one in (delimiter or DELIMITERS))
    check_width(n_delimiters + 1, f"line {begin}")  # count before parsing, which is slow
    if delimiter is None:
        delimiter = "\t" if kind == "tsv" else find_delimiter(first, columns)
    reader = csv.reader(itertools.chain([first], lines), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    n_before = begin - 1  # lines before the first line that the reader counts
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise Refused(f"could not be read: {explained(error, begin)}") from error
        if cells is None:
            return
        lines.row = 0
        check_width(len(cells), f"line {begin}")
        if names is None:
            names = distinct(cells)
        elif len(cells) > len(names):
            raise Refused(
                f"could not be read: line {begin} has {len(cells)} cells, the header has {len(names)}; "
                "a cell that contains the delimiter must be in quotes"
            )
        else:
            cells += [""] * (len(names) - len(cells))
            yield begin, dict(zip(names, cells, strict=True))
        begin = n_before + reader.line_num + 1


def find_delimiter(first: str, columns: Sequence[str]) -> str:
    """Choose the delimiter that yields all wanted columns in the first line, or else the most names."""
    names = {one: next(csv.reader([first], delimiter=one), []) for one in DELIMITERS}
    for one in DELIMITERS:
        if set(columns) <= set(names[one]):
            return one
    return max(DELIMITERS, key=lambda one: len(names[one]))


def explained(error: csv.Error, begin: int) -> str:
    if "unexpected end" in str(error):
        return f"the row of line {begin} has a quote that is not closed"
    return f"line {begin}: {error}; a quote inside a quoted cell must be doubled"


def distinct(names: list[str]) -> list[str]:
    """Append a number to each name that occurred before."""
    found: dict[str, None] = {}
    for name in names:
        number = itertools.count(2)
        new = name
        while new in found:
            new = f"{name}_{next(number)}"
        found[new] = None
    return list(found)


def check_width(n: int, where: str) -> None:
    if n > MAX_COLUMNS:
        raise Refused(f"has too many columns: {where} has {n:,}, at most {MAX_COLUMNS:,} are read")


def file_format(path: Path) -> str:
    """Return the format of a file, from the ending of its name."""
    suffixes = [suffix.lstrip(".").lower() for suffix in path.suffixes]
    suffixes = suffixes[:-1] if suffixes[-1:] == ["gz"] else suffixes
    if not suffixes or suffixes[-1] not in FORMATS:
        raise ValueError(f"{path} must end with .csv, .tsv, .jsonl, .parquet or .txt, maybe with .gz")
    return suffixes[-1]
