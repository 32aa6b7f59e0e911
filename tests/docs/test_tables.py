"""The tables of the documents are what scripts/tables.py makes of the rows of benchmarks."""

import sys

import pytest

from tests.helpers.paths import ROOT

sys.path.append(str(ROOT / "scripts"))
import tables


@pytest.mark.parametrize("page", tables.documents(), ids=lambda page: page.name)
def test_tables_are_what_the_rows_say(page):
    assert page.read_text() == tables.filled(page.read_text()), "run python scripts/tables.py"


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
        tables.row("heads", case="none")
