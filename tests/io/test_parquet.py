"""Small Parquet files that repeat long texts many times."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from vecroute.io import tables
from vecroute.io.parquet import TooLong, batches_of, open_parquet
from vecroute.io.tables import read_pieces

LONG = "a" * 1000


@pytest.fixture
def path(tmp_path):
    """Write a file of 600 rows: 300 short texts and 300 copies of a long one, with some empty cells."""
    texts = ["short", LONG] * 299 + [None, LONG]
    table = pa.table({"text": texts, "more": pa.array(texts, pa.large_string()), "id": list(range(600))})
    parquet.write_table(table, tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("most", [10**9, 250_000, 3000])
def test_every_row_comes_once_in_order(path, most):
    with open_parquet(path) as table:
        batches = list(batches_of(table, 100, most))
    assert [row for batch in batches for row in batch.to_pylist()] == parquet.read_table(path).to_pylist()
    n_rows = {len(batch) for batch in batches}
    assert n_rows == {100} if most > 100_000 else n_rows == {1}


def test_texts_are_unpacked_only_in_part(path):
    """The texts of the file take 600,000 bytes as plain strings, and 2,000 bytes as a dictionary."""
    with open_parquet(path) as table:
        for batch in batches_of(table, 600, 10**9):
            assert sum(column.dictionary.nbytes for column in batch.columns[:2]) < 3000


def test_a_row_that_is_too_long_is_named(path):
    with (
        open_parquet(path) as table,
        pytest.raises(TooLong, match="row 2 has more than 1,999 bytes of texts"),
    ):
        list(batches_of(table, 100, 1999))


def test_pieces_of_long_texts_have_fewer_rows(path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW", 10_000)
    pieces = list(read_pieces(path, "text"))
    assert sum(len(piece.rows) for piece in pieces) == 600
    assert max(len(piece.rows) for piece in pieces) < 20
    assert [line for piece in pieces for line in piece.lines] == list(range(1, 601))


def test_a_file_that_unpacks_without_end_is_refused(path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_UNPACKED", 10_000)
    monkeypatch.setattr(tables, "MAX_RATIO", 20)
    with pytest.raises(ValueError, match=r"a.parquet unpacks to more than [\d,]+ characters"):
        list(read_pieces(path, "text"))
