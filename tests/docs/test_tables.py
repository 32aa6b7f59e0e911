"""The tables of the documents equal the output of scripts/tables.py for the rows of benchmarks."""

import re
import sys

import pytest

from tests.helpers.paths import ROOT

sys.path.append(str(ROOT / "scripts"))
import table_rows
import tables
import tables_accuracy


@pytest.mark.parametrize("page", tables.documents(), ids=lambda page: page.name)
def test_tables_are_what_the_rows_say(page):
    with_commits = page.name != "README.md"
    assert page.read_text() == tables.filled(page.read_text(), with_commits=with_commits), (
        "run python scripts/tables.py"
    )


def test_commits_of_the_rows_are_below_a_table(tmp_path, monkeypatch):
    texts = "task,method,device,commit\nsst2,phi,d,abc+\nsst2,words,d,def\nimdb,phi,d,123\n"
    (tmp_path / "words_texts.csv").write_text(texts)
    (tmp_path / "words.csv").write_text("task,method,mean\nsst2,phi,1\nsst2,words,2\n")
    (tmp_path / "old.csv").write_text("value\n1\n")
    monkeypatch.setattr(table_rows, "RESULTS", tmp_path)
    table_rows.read_file.cache_clear()
    table_rows.commits.clear()
    try:
        table_rows.row("words", method="phi")
        line = table_rows.commits_line()
        assert line == "\nRows: `words_texts.csv`, commit abc with uncommitted changes.\n"
        table_rows.rows("words")
        table_rows.row("old")
        line = table_rows.commits_line()
        assert line.startswith("\nRows: `words_texts.csv`, commit abc with uncommitted changes, def;")
        assert line.endswith("`old.csv`, commit unknown.\n")
    finally:
        table_rows.read_file.cache_clear()
        table_rows.commits.clear()


def test_every_table_is_in_a_document():
    shown = {name for page in tables.documents() for _, name, _ in tables.MARKED.findall(page.read_text())}
    assert shown == set(tables.TABLES)


def test_a_table_that_was_edited_by_hand_shows(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: shap -->\n<!-- end of table -->\nafter\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    assert tables.main() == 0
    written = page.read_text()
    assert "SHAP, 500 evaluations" in written
    assert written.startswith("before\n")
    assert written.endswith("<!-- end of table -->\nafter\n")
    page.write_text(written.replace("0.563", "0.663"))
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    assert tables.main() == 1
    assert "page.md: differs from its rows" in capsys.readouterr().out


def test_rows_that_are_missing_are_told():
    with pytest.raises(ValueError, match=r"heads.csv has no row with"):
        table_rows.row("heads", case="none")


FIGURE = re.compile(r"\d\.\d|\d %|\d (?:ms|s|MB|GB)\b")


def unmarked_tables(text: str) -> list[str]:
    """Return the first lines of tables with three figures or more that no marker precedes."""
    text = re.sub(r"^```.*?^```$", "", tables.MARKED.sub("", text), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"(<!-- by hand: .+ -->\n)?((?:^\|.*\n)+)", text, flags=re.MULTILINE)
    return [
        table.splitlines()[0]
        for marker, table in found
        if not marker and sum(bool(FIGURE.search(cell)) for cell in table.split("|")) > 2
    ]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], ids=lambda page: page.name
)
def test_every_table_of_figures_is_written_from_rows_or_says_why_not(page):
    assert unmarked_tables(page.read_text()) == []


def test_a_table_without_a_marker_is_found():
    table = "| size | time |\n|---|---|\n| 1 | 2.5 ms |\n| 2 | 3.5 ms |\n| 3 | 4.5 ms |\n"
    assert unmarked_tables(f"text\n\n{table}") == ["| size | time |"]
    assert unmarked_tables(f"text\n\n<!-- by hand: a profile -->\n{table}") == []
    assert unmarked_tables(f"<!-- table: shap -->\n{table}<!-- end of table -->\n") == []


def test_few_texts_are_means_over_draws():
    names = (
        "accuracy",
        "logistic",
        "confidence",
        "calibration_error",
        "calibration_error_at_1",
        "low",
        "high",
    )
    draws = [(0.6, 0.5, 0.7, 0.02, 0.2, 0.5, 0.65), (0.7, 0.7, 0.7, 0.04, 0.3, 0.71, 0.8)]
    found = tables_accuracy.few_texts([dict(zip(names, map(str, draw), strict=True)) for draw in draws])
    assert found == ["65.0", "60.0", "+5.0 (5.0)", "+0.050", "0.030", "0.250", "1 of 2"]
