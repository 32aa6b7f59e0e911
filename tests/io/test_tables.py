"""Tables: no row is lost or moved, each keeps its line number, and bad tables are refused."""

import csv
import gzip
import io
import json
import time

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from vecroute.classifier.labels import check_texts
from vecroute.io import tables
from vecroute.io.cells import inert, visible
from vecroute.io.predictions import Answer, CsvWriter, JsonWriter
from vecroute.io.samples import read_samples
from vecroute.io.tables import MAX_COLUMNS, pieces_of, read_pieces


def write(path, content):
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows_of(path, *columns, **options):
    pieces = list(read_pieces(path, *columns, **options))
    return [row for piece in pieces for row in piece.rows], [line for piece in pieces for line in piece.lines]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "txt", "csv.gz"])
def test_tables_of_excel_are_read_in_their_encoding(tmp_path, encoding, ending):
    text = "caf\u00e9 \u2014 \u201cfine\u201d \U0001f600"
    content = {"jsonl": json.dumps({"text": text}, ensure_ascii=False), "txt": text}.get(ending[:5])
    content = f"{content or f'text{chr(10)}{text}'}\r\n"
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""  # the codec writes no byte order mark
    path = write(tmp_path / f"a.{ending}", mark + content.encode(encoding))
    found, _ = rows_of(path, "text")
    assert [row["text"] for row in found] == [text]


def test_a_first_line_may_tell_the_delimiter(tmp_path):
    path = write(tmp_path / "a.csv", "sep=;\r\ntext;label\r\none, two;a\r\n;;\r\n")
    with pytest.raises(ValueError, match="line 4 has 3 cells, the header has 2"):
        rows_of(path, "text")
    path = write(tmp_path / "a.csv", "sep=;\r\ntext;label\r\none, two;a\r\n")
    assert rows_of(path, "text") == ([{"text": "one, two", "label": "a"}], [3])


def test_long_headers_are_shortened_in_messages(tmp_path):
    path = write(tmp_path / "a.csv", ",".join(["a" * 100, *map(str, range(30))]) + "\n1\n")
    with pytest.raises(ValueError, match=f"it has '{'a' * 40}...', '0', .*'18' and 11 more$"):
        rows_of(path, "text")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("rows", [1, 2, 512])
def test_every_row_of_a_csv_file_comes_with_the_line_it_begins_on(tmp_path, end, rows):
    lines = ["id,text", "1,one", "", "2,", '3,"a', 'b""c"', "  ", "4", "5,\x00é", "", ""]
    path = write(tmp_path / "a.csv", end.join(lines))
    found, numbers = rows_of(path, "text", rows=rows)
    texts = ["one", "", "", f'a{end}b"c', "", "", "\x00é", ""]
    assert [row["text"] for row in found] == texts
    assert [row["id"] for row in found] == ["1", "", "2", "3", "  ", "4", "5", ""]
    assert numbers == [2, 3, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_the_delimiter_is_found_by_the_columns(tmp_path, delimiter, name):
    content = "\ufeff" + "".join(
        f"{delimiter.join(row)}\n" for row in (["a.b", "text"], ["x", "good: really"])
    )
    found, _ = rows_of(write(tmp_path / name, content), "text")
    assert found == [{"a.b": "x", "text": "good: really"}]


def test_a_delimiter_is_taken_as_given(tmp_path):
    path = write(tmp_path / "a.csv", "text:x\na:b\n")
    assert rows_of(path, "text", delimiter=":")[0] == [{"text": "a", "x": "b"}]
    with pytest.raises(ValueError, match="has no column 'text', it has 'text:x'"):
        rows_of(path, "text")


def test_names_that_come_twice_are_told_apart(tmp_path):
    found, _ = rows_of(write(tmp_path / "a.csv", "text,x,x,x_2,\na,1,2,3,4\n"), "text")
    assert found == [{"text": "a", "x": "1", "x_2": "2", "x_2_2": "3", "": "4"}]


def test_other_formats_keep_what_they_have(tmp_path):
    content = '{"text": "a", "n": 1}\n\n{"text": "b", "x": [1, {"y": null}]}\n'
    expected = [{"text": "a", "n": 1}, {"text": "b", "x": [1, {"y": None}]}]
    assert rows_of(write(tmp_path / "a.jsonl", content), "text") == (expected, [1, 3])
    pd.DataFrame({"text": ["a", None], "n": pd.array([1, None], "Int64")}).to_parquet(tmp_path / "a.parquet")
    expected = [{"text": "a", "n": 1}, {"text": None, "n": None}]
    assert rows_of(tmp_path / "a.parquet", "text") == (expected, [1, 2])
    path = write(tmp_path / "a.txt.gz", "\ufeffone, two\r\n\n three \u2028four\n")
    assert rows_of(path)[0] == [{"text": "one, two"}, {"text": ""}, {"text": " three \u2028four"}]


def test_cells_may_be_long_and_the_limit_of_others_stays(tmp_path):
    before = csv.field_size_limit()
    text = "word " * 100_000
    assert rows_of(write(tmp_path / "a.csv", f"text\n{text}\n"), "text")[0] == [{"text": text}]
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("header.csv", lambda n: ",".join(f"c{k}" for k in range(n)) + "\n" + "1," * n),
        ("first.csv", lambda n: "text,label\n" + "1," * n + "\n"),
        ("later.csv", lambda n: "text,label\na,b\n" + "1," * n + "\n"),
        ("quoted.csv", lambda n: "text,label\n" + '"1",' * n + "\n"),
        ("tabs.tsv", lambda n: "text\tlabel\n" + "\t" * n + "\n"),
        ("keys.jsonl", lambda n: '{"text": "a"' + "".join(f', "{k}": 1' for k in range(n)) + "}\n"),
    ],
)
def test_a_million_columns_are_refused(tmp_path, name, content):
    path = write(tmp_path / name, content(10**6))
    with pytest.raises(ValueError, match=r"has too many columns: line [123] has 1,000,00\d"):
        rows_of(path, "text")


def test_a_wide_parquet_file_is_refused(tmp_path):
    wide = pa.table({f"c{k}": [1] for k in range(MAX_COLUMNS + 1)})
    parquet.write_table(wide, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="its schema has 10,001, at most 10,000 are read"):
        rows_of(tmp_path / "a.parquet", "text")


SOME = "text,label\ngood,pos\n,pos\n  ,neg\nbad,\nbad,neg\n\n"


def test_samples_are_rows_with_text_and_label(tmp_path):
    path = write(tmp_path / "a.csv", SOME)
    found = read_samples(path, "text", "label")
    assert (found.texts, found.labels, found.lines) == (["good", "bad"], ["pos", "neg"], [2, 6])
    assert found.skipped == {"text": [3, 4, 7], "label": [5]}
    assert found.n_rows == 6
    assert read_samples(path, "text").texts == ["good", "bad", "bad"]
    message = (
        r"3 of 6 rows have no text \(lines 3, 4, 7\), 1 of 6 rows have no label \(line 5\); without --strict"
    )
    with pytest.raises(ValueError, match=message):
        read_samples(path, "text", "label", strict=True)


def test_halves_of_characters_are_named_with_their_line(tmp_path):
    """Tokenizers refuse them, without saying which text it was."""
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "b \\ud800"}\n')
    with pytest.raises(
        ValueError, match=r"line 2 of .*a\.jsonl has half of a surrogate pair in column 'text'"
    ):
        read_samples(path, "text")
    with pytest.raises(ValueError, match="row 1 has half of a surrogate pair"):
        check_texts(["a", "b \ud800"])


def test_a_label_may_be_called_nan_in_a_file(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\na,NA\nb,nan\nc,null\nd,None\n")
    assert read_samples(path, "text", "label").labels == ["NA", "nan", "null", "None"]


# Written tables


@pytest.mark.parametrize(
    "cell", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "-inf", "+-1"]
)
def test_formulas_get_an_apostrophe(cell):
    assert inert(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-5", "+3.25", "-.5e-3", "- no", "a=b", "", 'say "=x"', -5, None, "'=1"])
def test_other_cells_stay(cell):
    assert inert(cell) == (f"'{cell}" if cell == "- no" else cell)


@pytest.mark.parametrize("cell", [f"-{'1' * 30_000}x", f"+1.{'1' * 30_000}x", f"-1e{'1' * 30_000}x"])
def test_long_cells_that_are_almost_numbers_take_no_time(cell):
    """A pattern that can split the digits in many ways needs a time that grows with their square."""
    started = time.process_time()
    assert inert(cell) == f"'{cell}"
    assert time.process_time() - started < 2


def written(writer_class, rows, **options):
    file = io.StringIO()
    writer = writer_class(file, ["neg", "=pos"], list(rows[0]), **options)
    for number, row in enumerate(rows):
        writer.write(row, Answer("", []) if number else Answer("=pos", [0.25, 0.75]), "line 2")
    return file.getvalue()


def test_csv_is_safe_for_spreadsheets_and_raw_on_demand():
    rows = [{"=x": "=1", "label": "-3"}, {"=x": "+a", "label": None}]
    assert written(CsvWriter, rows) == (
        "'=x,label,label_predicted,neg,'=pos\n'=1,-3,'=pos,0.25,0.75\n'+a,,,,\n"
    )
    assert written(CsvWriter, rows, raw=True) == (
        "=x,label,label_predicted,neg,=pos\n=1,-3,=pos,0.25,0.75\n+a,,,,\n"
    )


def test_json_lines_are_untouched_and_names_that_clash_get_a_suffix():
    rows = [{"text": "=1\x1b\x9b2J", "label": 7, "label_predicted": [1]}, {"text": "", "note": "mine"}]
    out = written(JsonWriter, rows)
    first, second = map(json.loads, out.splitlines())
    added = {"label_predicted_predicted": "=pos", "probabilities": {"neg": 0.25, "=pos": 0.75}}
    assert first == rows[0] | added
    assert second == rows[1] | {
        "label_predicted_predicted": "", "probabilities": {}, "note_predicted": "no text"
    }  # fmt: skip
    assert "\x1b" not in out
    assert "\x9b" not in out


def test_a_new_column_after_the_header_is_refused():
    with pytest.raises(ValueError, match="line 2 has the column 'new', which the header above lacks"):
        written(CsvWriter, [{"text": "a"}, {"text": "b", "new": 1}])


def test_on_a_terminal_control_characters_are_shown():
    file = io.StringIO()
    file.isatty = lambda: True
    writer = CsvWriter(file, ["\x1b[31m"], ["text"])
    writer.write({"text": "\x1b]0;title\x07\u202e"}, Answer("a\x9b2J", [1.0]), "line 2")
    assert file.getvalue() == "text,label,\\x1b[31m\n\\x1b]0;title\\x07\\u202e,a\\x9b2J,1.0\n"


def test_visible_leaves_words_of_every_language():
    text = "naïve 日本語 עברית मराठी 👩‍👩‍👧 a\nb"
    assert visible(text, keep="\n") == text
    assert visible("a\nb\x7f\u2066") == "a\\nb\\x7f\\u2066"


def test_a_stream_that_cannot_be_wound_back_stays_open(tmp_path):
    stream = io.BufferedReader(io.BytesIO(b"text\na\n"))
    assert [piece.rows for piece in pieces_of(stream, "csv", "it", "text")] == [[{"text": "a"}]]
    assert not stream.closed


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", b'{"text": "' + b"a" * 10**6),
        ("a.txt.gz", b"a good film\n" + b"\0" * 10**6),
        ("a.csv.gz", b"text,label\n" + b"a" * 10**6),
        ("a.tsv.gz", b"a" * 10**6),
        ("quoted.csv.gz", b'text,label\n"' + b"a\n" * 10**6),
        ("cells.csv.gz", b"text,label\n" + b'"a\n",' * 10**6),
    ],
)
def test_rows_without_end_are_refused_early(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(tables, "MAX_ROW", 1000)
    path = tmp_path / name
    path.write_bytes(gzip.compress(content))
    assert len(path.read_bytes()) < 20_000  # in memory it would take a hundred times as much
    with pytest.raises(
        ValueError, match=r"could not be read: the row that ends with line \d+ has more than 1,000"
    ):
        rows_of(path, "text")


@pytest.mark.parametrize("name", ["a.csv.gz", "a.tsv.gz", "a.jsonl.gz", "a.txt.gz"])
def test_rows_repeated_without_end_are_refused(tmp_path, monkeypatch, name):
    """A megabyte of .gz holds a gigabyte of short rows, which ``fit`` would keep in memory."""
    monkeypatch.setattr(tables, "MAX_UNPACKED", 100_000)
    path, rows = tmp_path / name, {"a.jsonl.gz": b'{"text": "good", "label": "a"}\n'}
    path.write_bytes(
        gzip.compress(b"text\n" * ("json" not in name) + rows.get(name, b"good film\n") * 30_000)
    )
    pieces = read_pieces(path, "text")
    assert len(next(pieces).rows) == 512
    with pytest.raises(ValueError, match=r"unpacks to more than [\d,]+ characters: it repeats itself"):
        list(pieces)


def test_pieces_of_long_rows_have_fewer_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "a" * 400}) + "\n" for _ in range(10)))
    pieces = list(read_pieces(path, "text"))
    assert [len(piece.rows) for piece in pieces] == [3, 3, 3, 1]
    assert [line for piece in pieces for line in piece.lines] == list(range(1, 11))


def test_pieces_of_long_nested_cells_have_fewer_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"text": "b", "more": [{"c": ["a" * 400]}]}) + "\n") * 10)
    assert [len(piece.rows) for piece in read_pieces(path, "text")] == [3, 3, 3, 1]


def test_many_rows_are_together_longer_than_the_limit_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW", 1000)
    path = write(tmp_path / "a.csv", "text,label\n" + '"one\ntwo",x\n' * 500)
    assert len(rows_of(path, "text")[0]) == 500


def test_names_of_columns_and_labels_are_no_formulas():
    file = io.StringIO()
    writer = CsvWriter(file, ["@SUM(A1)", "-1+2"], ["=HYPERLINK(1)", "text"])
    writer.write({"=HYPERLINK(1)": "a", "text": "b"}, Answer("@SUM(A1)", [0.5, 0.5]), "line 1")
    header, row = csv.reader(io.StringIO(file.getvalue()))
    assert header == ["'=HYPERLINK(1)", "text", "label", "'@SUM(A1)", "'-1+2"]
    assert row == ["a", "b", "'@SUM(A1)", "0.5", "0.5"]


@pytest.mark.parametrize("mark", ["\u202e", "\u2066", "\u200f", "\u061c", "\x9b", "\u2028", "\ud83d"])
def test_json_lines_hold_marks_of_direction_and_halves_of_characters_as_escapes(mark):
    file = io.TextIOWrapper(io.BytesIO(), "utf-8")
    row = {"text": f"a{mark}b", f"c{mark}": 1}
    JsonWriter(file, [f"good{mark}", "bad"], row).write(row, Answer(f"good{mark}", [0.9, 0.1]), "line 1")
    file.seek(0)
    line = file.read()
    assert line.isascii()
    found = json.loads(line)
    assert (found["text"], found["label"]) == (f"a{mark}b", f"good{mark}")
    assert f"c{mark}" in found
