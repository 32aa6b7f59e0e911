"""Find and check the shards of a corpus, and copy each with new columns, whole or not at all."""

import gzip
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

from vecroute.corpora.answers import EXPLAINED, Answering
from vecroute.io.images import files_in
from vecroute.io.parquet import TooLong, batches_of, is_text, open_parquet
from vecroute.io.predictions import EXPLANATION, Answer, CsvWriter, JsonWriter, fresh, new_writer
from vecroute.io.samples import text_of
from vecroute.io.tables import MAX_ROW, check_file, check_width, find_delimiter, read_pieces
from vecroute.storage import temporary_place

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
ROWS = 2048  # in memory at a time


class Columns(NamedTuple):
    """The columns of a shard, and what is new in its copy."""

    text: str  # the column of texts
    classes: Sequence[str]
    multi_label: bool
    explained: bool  # whether there is a column of explanations
    raw: bool = False  # whether cells of CSV that a spreadsheet takes for formulas stay as they are
    delimiter: str | None = None  # of CSV, None to find it


def find_shards(data: Path) -> tuple[Path, list[Path]]:
    """Return the folder of a corpus and its shards, relative to the folder, in order of names.

    Args:
        data: a folder, whose subfolders count too, or one file. Names that begin with . or _ are left out.

    Raises:
        ValueError: there are none.
    """
    if not data.exists():
        raise ValueError(f"{data} does not exist")
    kinds = ", ".join(SUFFIXES)
    if data.is_file():
        if not is_shard(data):
            raise ValueError(f"{data} must end with {kinds}")
        return data.parent, [Path(data.name)]
    inside = (path.relative_to(data) for path in files_in(data))
    shards = [path for path in inside if is_shard(path) and not any(p[0] in "._" for p in path.parts)]
    if not shards:
        raise ValueError(f"{data} is not a corpus: it has no file that ends with {kinds}")
    return data, shards


def is_shard(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def check_shards(root: Path, shards: Sequence[Path], columns: Columns) -> None:
    """Raise for a shard without the column of texts, or with other columns than the first shard.

    Parquet files are known by their schema, CSV files by their first line. JSON lines may have any columns
    beside the texts. A shard that cannot be read is left to the run, which names it and goes on.

    Raises:
        ValueError: a shard has no such column, its column has no texts, or its columns differ.
    """
    first: dict[str, tuple[Path, Any]] = {}  # by format: a shard, and its columns
    for shard in shards:
        kind = kind_of(shard)
        try:
            found = columns_of(root / shard, kind, columns)
        except Unreadable:
            continue
        names = list(found)
        if columns.text not in names:
            known = ", ".join(map(repr, names))
            raise ValueError(f"{root / shard} has no column {columns.text!r}, it has {known}")
        if kind == "parquet" and not holds_texts(found[columns.text]):
            what = found[columns.text]
            raise ValueError(f"column {columns.text!r} of {root / shard} must have texts, it has {what}")
        other, known = first.setdefault(kind, (shard, found))
        if kind != "jsonl" and found != known:
            differs = next(name for name in [*known, *found] if known.get(name) != found.get(name))
            what = f"its column {differs!r} is {found.get(differs)}, not {known.get(differs)}"
            if differs not in found or differs not in known:
                what = f"it {'has' if differs in found else 'lacks'} the column {differs!r}"
            raise ValueError(f"{root / shard} has another schema than {root / other}: {what}")


class Unreadable(ValueError):
    """A shard that cannot be read; the run says why."""


def columns_of(path: Path, kind: str, columns: Columns) -> dict[str, Any]:
    """Return the columns of a shard by name, with their types if it is a Parquet file."""
    try:
        check_file(path)  # nobody may write to a pipe
        if kind == "parquet":
            schema = parquet.read_schema(path)
            check_width(len(schema), "its schema")
            return {field.name: field.type for field in schema}
        piece = next(read_pieces(path, delimiter=delimiter_of(path, columns)))
    except Exception as error:  # a damaged file can raise errors of any type
        raise Unreadable(str(error)) from error
    return {name: "text" for row in piece.rows for name in row}


def delimiter_of(path: Path, columns: Columns) -> str | None:
    """Return the delimiter of a CSV file: as given, else the one that finds the column of texts."""
    if columns.delimiter or kind_of(path) != "csv":
        return columns.delimiter
    unpacked: Any = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
    with io.TextIOWrapper(unpacked, "utf-8-sig", newline="") as lines:
        return find_delimiter(lines.readline(MAX_ROW), [columns.text])


def holds_texts(kind: Any) -> bool:
    return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


def kind_of(path: Path) -> str:
    return path.name.lower().removesuffix(".gz").rpartition(".")[2]


def copy_shard(source: Path, target: Path, columns: Columns, answer: Answering) -> int:
    """Copy a shard with new columns, whole or not at all, and return its number of rows.

    Args:
        source: a Parquet, JSON lines or CSV file.
        target: of the same format.
        columns: what is read and what is new.
        answer: gives the new cells of some texts.

    Raises:
        ValueError, TypeError, OSError: the source is damaged, or a cell has no text; the message names it.
    """
    check_file(source)
    with whole(target) as temporary:
        copy = copy_parquet if kind_of(source) == "parquet" else copy_rows
        return copy(source, temporary, columns, answer)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which gets the name of the file in the end, or is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_place(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def copy_parquet(source: Path, target: Path, columns: Columns, answer: Answering) -> int:
    """Copy a Parquet file batch by batch: old columns as they are, with their types, then the new ones."""
    n = 0
    try:
        own = parquet.read_schema(source)
        with open_parquet(source) as table:
            added, schema = new_fields(own.names, columns), own
            for field in added:
                schema = schema.append(field)
            with parquet.ParquetWriter(target, schema) as writer:
                for batch in batches_of(table, ROWS, MAX_ROW):
                    cells = batch.column(columns.text).to_pylist()
                    rows = ({columns.text: cell} for cell in cells)
                    texts = [text_of(row, columns.text, source, n + k) for k, row in enumerate(rows, 1)]
                    arrays = new_arrays(answer(texts), [field.type for field in added], columns)
                    writer.write_batch(pa.record_batch([*batch.cast(own).columns, *arrays], schema=schema))
                    n += len(texts)
    except (pa.ArrowException, TooLong, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{source} could not be read: {reason}") from error
    return n


def new_fields(names: Sequence[str], columns: Columns) -> list[Any]:
    """Return the new columns: the label, a probability for each class, and maybe an explanation."""
    label = pa.list_(pa.string()) if columns.multi_label else pa.string()
    kinds = [label, *[pa.float64()] * len(columns.classes)]
    new = ["label", *columns.classes]
    if columns.explained:
        by_class = pa.struct([(name, pa.float64()) for name in columns.classes])
        part = pa.struct(
            [("piece", pa.string()), ("start", pa.int64()), ("end", pa.int64()), ("values", by_class)]
        )
        parts = dict.fromkeys(EXPLAINED, by_class) | {"of": pa.string(), "unit": pa.string()}
        kinds.append(pa.struct(list((parts | {"parts": pa.list_(part)}).items())))
        new.append(EXPLANATION)
    return [pa.field(name, kind) for name, kind in zip(fresh(new, names), kinds, strict=True)]


def new_arrays(answers: Sequence[Answer], kinds: Sequence[Any], columns: Columns) -> list[Any]:
    """Return the cells of the new columns of some rows."""
    cells: list[list[Any]] = [[found.label for found in answers]]
    cells += [[found.p[j] if found.p else None for found in answers] for j in range(len(columns.classes))]
    if columns.explained:
        cells.append([found.explanation for found in answers])
    return [pa.array(one, kind) for one, kind in zip(cells, kinds, strict=True)]


def copy_rows(source: Path, target: Path, columns: Columns, answer: Answering) -> int:
    """Copy a file of JSON lines or CSV row by row, its cells as they are, then the new ones."""
    writer: CsvWriter | JsonWriter | None = None
    n = 0
    with opened(target, source.suffix == ".gz") as file:
        for piece in read_pieces(source, columns.text, rows=ROWS, delimiter=columns.delimiter):
            if writer is None:
                options = {"raw": columns.raw, "explained": columns.explained}
                writer = new_writer(kind_of(source), file, columns.classes, piece.rows, **options)
            lines = list(zip(piece.rows, piece.lines, strict=True))
            texts = [text_of(row, columns.text, source, line) for row, line in lines]
            for (row, line), found in zip(lines, answer(texts), strict=True):
                writer.write(row, found, f"line {line} of {source}")
            n += len(lines)
    return n


@contextmanager
def opened(path: Path, packed: bool) -> Iterator[IO[str]]:
    """Open a new file for text, packed by gzip if asked for."""
    with open(path, "xb") as file:
        raw: Any = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if packed else file
        with io.TextIOWrapper(raw, "utf-8", newline="") as text:
            yield text
