"""Read Parquet files in batches of bounded memory.

A file of a few kilobytes can repeat one long text in every row, or many times in a list of one row. So texts
and bytes stay dictionaries, which hold such a text once. If the texts of a batch are too long, its rows are
unpacked one by one.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]

MAX_WIDTH = 4096  # bytes of a type of fixed length, such as a decimal or a hash; it has no dictionary


class TooLong(ValueError):
    """A row has too many bytes of texts."""


def open_parquet(file: Any) -> parquet.ParquetFile:
    """Open a path or a seekable file. Texts and bytes, also nested ones, are read as dictionaries.

    Raises:
        TooLong: a type of fixed length is too long.
    """
    found = parquet.ParquetFile(file)
    leaves = [found.schema.column(k) for k in range(len(found.schema))]
    for leaf in leaves:
        if leaf.length > MAX_WIDTH:
            raise TooLong(f"column {leaf.path!r} has {leaf.length:,} bytes in each cell")
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    return parquet.ParquetFile(file, metadata=found.metadata, read_dictionary=texts)


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def batches_of(table: parquet.ParquetFile, rows: int, most: int) -> Iterator[pa.RecordBatch]:
    """Yield batches of ``rows`` rows, or of one row each if their texts have more than ``most`` bytes.

    Raises:
        TooLong: a single row has more bytes of texts.
    """
    done = 0
    for batch in table.iter_batches(rows):
        if text_bytes(batch) <= most:
            yield batch
        else:
            for k in range(len(batch)):
                row = batch.slice(k, 1)
                if text_bytes(row) > most:
                    raise TooLong(f"row {done + k + 1} has more than {most:,} bytes of texts")
                yield row
        done += len(batch)


def text_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of all texts of a batch, counted by their dictionaries."""
    n_bytes, columns = 0, list(batch.columns)
    while columns:
        column = columns.pop()
        kind = column.type
        if pa.types.is_dictionary(kind):
            lengths = pc.binary_length(column.dictionary)  # [n_distinct]
            n_bytes += pc.sum(lengths.take(column.indices).cast(pa.int64())).as_py() or 0
        elif pa.types.is_map(kind):
            first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
            columns += [part.slice(first, last - first) for part in (column.keys, column.items)]
        elif pa.types.is_struct(kind):
            columns += column.flatten()
        elif pa.types.is_nested(kind):  # lists
            columns.append(column.flatten())
    return n_bytes
