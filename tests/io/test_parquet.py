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


NESTED = {
    "bytes": pa.array([LONG.encode()] * 600),
    "list": pa.array([[LONG, None], None] * 300),
    "lists": pa.array([[["short"], [LONG]], []] * 300),
    "fixed list": pa.array([[LONG, "b"]] * 600, pa.list_(pa.string(), 2)),
    "struct": pa.array([{"a": 1, "b": [{"c": LONG}]}, None] * 300),
    "map": pa.array([[("a", LONG)], [("b", None)]] * 300, pa.map_(pa.string(), pa.large_string())),
}


@pytest.mark.parametrize("kind", NESTED)
def test_bytes_and_nested_texts_are_limited_too(kind, tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a"] * 600, "more": NESTED[kind]}), path)
    monkeypatch.setattr(tables, "MAX_ROW", 10_000)
    pieces = list(read_pieces(path, "text"))
    assert [row for piece in pieces for row in piece.rows] == parquet.read_table(path).to_pylist()
    assert max(len(piece.rows) for piece in pieces) < 30
    with open_parquet(path) as table, pytest.raises(TooLong, match="row 1 has more than 999 bytes of texts"):
        list(batches_of(table, 100, 999))
    monkeypatch.setattr(tables, "MAX_UNPACKED", 100_000)
    monkeypatch.setattr(tables, "MAX_RATIO", 20)
    with pytest.raises(ValueError, match=r"a.parquet unpacks to more than [\d,]+ characters"):
        list(read_pieces(path, "text"))


def test_many_texts_in_a_list_of_one_row_are_counted(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a", "b"], "more": [["c"], [LONG] * 1000]}), path)
    with open_parquet(path) as table, pytest.raises(TooLong, match="row 2 has more than 900,000 bytes"):
        list(batches_of(table, 100, 900_000))


def test_long_types_of_fixed_length_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a"], "more": pa.array([b"b" * 5000], pa.binary(5000))}), path)
    with pytest.raises(ValueError, match="column 'more' has 5,000 bytes in each cell"):
        list(read_pieces(path, "text"))
