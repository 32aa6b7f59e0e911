"""Read Parquet files in batches of bounded memory.

A file of a few kilobytes can repeat one long text in every row. So columns of texts stay dictionaries, which
hold such a text once. If the texts of a batch are too long, its rows are unpacked one by one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as parquet  # type: ignore[import-untyped]


class TooLong(ValueError):
    """A row has too many bytes of texts."""


def open_parquet(file: Any) -> parquet.ParquetFile:
    """Open a path or a seekable file. Its columns of texts are read as dictionaries."""
    found = parquet.ParquetFile(file)
    texts = [field.name for field in found.schema_arrow if is_text(field.type)]
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
        n_bytes = sum((text_bytes(column) for column in batch.columns), np.zeros(len(batch), np.int64))  # [i]
        if n_bytes.sum() <= most:
            yield batch
        else:
            for k, n in enumerate(n_bytes):
                if n > most:
                    raise TooLong(f"row {done + k + 1} has more than {most:,} bytes of texts")
                yield batch.slice(k, 1)
        done += len(batch)


def text_bytes(column: pa.Array) -> np.ndarray:
    """Return the bytes of each text of a column [i], from its dictionary; zeros for another column."""
    if not (pa.types.is_dictionary(column.type) and is_text(column.type.value_type)):
        return np.zeros(len(column), np.int64)  # [i]
    lengths = pc.fill_null(pc.binary_length(column.dictionary), 0)  # [n_distinct]
    return pc.fill_null(lengths.take(column.indices), 0).to_numpy(zero_copy_only=False)  # [i]
