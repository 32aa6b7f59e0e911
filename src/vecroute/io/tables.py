"""Tables of texts and labels in files: CSV, TSV, JSON lines and Parquet, whole or in pieces."""

import gzip
import io
import itertools
import json
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

FORMATS = ("csv", "tsv", "jsonl", "parquet")
ROWS = 512  # in a piece


def read_table(path: str | Path, text: str, *others: str) -> pd.DataFrame:
    """The whole table.

    Args:
        path: ends with .csv, .tsv, .jsonl or .parquet, and maybe .gz after that.
        text: the column of texts.
        others: more columns that must be there. Cells of .csv and .tsv are strings, whatever they look like.

    Raises:
        ValueError: a file that is missing, empty, damaged, not UTF-8, or without the columns.
    """
    return pd.concat(list(read_pieces(path, text, *others, rows=2**31 - 1)), ignore_index=True)


def read_pieces(path: str | Path, text: str, *others: str, rows: int = ROWS) -> Iterator[pd.DataFrame]:
    """The table in pieces of so many rows, each with its columns checked; see ``read_table``."""
    path = Path(path)
    kind = file_format(path)
    if not path.is_file():
        raise ValueError(f"{path} is not there" if not path.exists() else f"{path} is no file")
    opened: Any = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
    with opened as file:
        yield from checked_pieces(file, kind, str(path), text, *others, rows=rows)


def checked_pieces(
    file: IO[bytes], kind: str, name: str, text: str, *others: str, rows: int = ROWS
) -> Iterator[pd.DataFrame]:
    """Pieces of an open file, with errors in one line that begins with its name."""
    found = False
    with closing(raw_pieces(file, kind, rows)) as pieces:
        while (piece := next_piece(pieces, name)) is not None:
            for column in (text, *others):
                if column not in piece.columns:
                    known = ", ".join(repr(str(there)) for there in piece.columns)
                    raise ValueError(f"{name} has no column {column!r}, it has {known}")
            found = found or len(piece) > 0
            yield piece
    if not found:
        raise ValueError(f"{name} is empty: it has no rows")


def next_piece(pieces: Iterator[pd.DataFrame], name: str) -> pd.DataFrame | None:
    """The next piece, None at the end; whatever a reader raises becomes one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return next(pieces, None)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"{name} is not UTF-8 text: it has the byte 0x{byte:02x}") from error
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{name} is empty") from error
    except Exception as error:  # each format has its own
        raise ValueError(f"{name} could not be read: {str(error).strip().splitlines()[0]}") from error


def raw_pieces(file: IO[bytes], kind: str, rows: int) -> Generator[pd.DataFrame]:
    """Pieces as the format's own reader gives them. Only an empty cell is missing, the word NA is not."""
    if kind == "parquet":
        # Parquet is read from its end, so a stream that cannot be wound back is read as a whole.
        source = file if file.seekable() else io.BytesIO(file.read())
        for batch in parquet.ParquetFile(source).iter_batches(rows):
            yield batch.to_pandas()
        return
    if kind == "jsonl":
        lines = (line for line in file if line.strip())
        while some := list(itertools.islice(lines, rows)):
            yield pd.DataFrame([json.loads(line) for line in some])
        return
    options = {"dtype": str, "keep_default_na": False, "na_values": [""], "index_col": False}
    with pd.read_csv(
        file, sep="," if kind == "csv" else "\t", chunksize=rows, encoding="utf-8-sig", **options
    ) as reader:
        yield from reader


def file_format(path: Path) -> str:
    """What a file is by its name."""
    suffixes = [suffix.lstrip(".").lower() for suffix in path.suffixes]
    suffixes = suffixes[:-1] if suffixes[-1:] == ["gz"] else suffixes
    if not suffixes or suffixes[-1] not in FORMATS:
        raise ValueError(f"{path} must end with .csv, .tsv, .jsonl or .parquet, and maybe .gz")
    return suffixes[-1]


def read_lines(file: IO[bytes], rows: int) -> Iterator[list[str]]:
    """The lines of a file as texts, so many at a time."""
    while some := list(itertools.islice(file, rows)):
        try:
            yield [line.decode().rstrip("\r\n") for line in some]
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(f"standard input is not UTF-8 text: it has the byte 0x{byte:02x}") from error
