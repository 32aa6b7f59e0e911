"""Rows say which code, device and command they come from, and only committed code writes results."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import common
import rows

PAGE = "Before.\n<!-- table: heads -->\n{table}<!-- end of table -->\nAfter.\n"


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A committed repository with the folders that matter, in place of this one."""
    texts = {
        "src/vecroute/layer.py": "one = 1\n",
        "src/vecroute/ops/plan.py": "two = 2\n",
        "src/vecroute.cu": "// sorts before the folder vecroute\n",
        "benchmarks/heads.py": "three = 3\n",
        "benchmarks/results/heads.csv": "what,value\n",
        "docs/page.md": PAGE.format(table=""),
        ".gitignore": "build/\n__pycache__/\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "src/vecroute/layer.py").chmod(0o755)
    run_git(tmp_path, "init", "--quiet")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message=all")
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(rows, "ROOT", tmp_path)
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "benchmarks" / "results")
    rows.changes.cache_clear()
    yield tmp_path
    rows.changes.cache_clear()


def run_git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


# Where a row comes from


def test_every_row_names_device_versions_code_and_command():
    about = rows.about("cpu")
    expected = ["device", "torch", "triton", "vecroute", "commit", "date", "src", "command"]
    assert list(about) == expected
    assert all(about[name] for name in expected if name != "triton")


def test_the_hash_of_src_is_the_hash_of_git(repository):
    assert rows.tree_hash(repository / "src") == run_git(repository, "rev-parse", "HEAD:src")
    (repository / "src/vecroute/__pycache__").mkdir()
    (repository / "src/vecroute/__pycache__/layer.pyc").write_bytes(b"compiled")
    assert rows.tree_hash(repository / "src") == run_git(repository, "rev-parse", "HEAD:src")
    (repository / "src/vecroute/layer.py").write_text("one = 2\n")
    assert rows.tree_hash(repository / "src") != run_git(repository, "rev-parse", "HEAD:src")


def test_the_command_names_no_folder_of_the_machine(monkeypatch, tmp_path):
    script = str(ROOT / "benchmarks" / "scaling.py")
    monkeypatch.chdir(tmp_path)
    argv = [script, "--against", "/home/me/heinsen routing.py", "--results=/tmp/x", "--modes", "fp32"]
    told = "python benchmarks/scaling.py --against 'heinsen routing.py' --results=x --modes fp32"
    assert rows.command(argv) == told
    assert rows.command(["/usr/bin/pytest", "-q"]) == "python pytest -q"


def test_commit_is_given_or_found(repository, monkeypatch):
    assert rows.commit() == run_git(repository, "rev-parse", "--short", "HEAD")
    (repository / "src/new.py").write_text("")
    rows.changes.cache_clear()
    assert rows.commit().endswith("+")
    monkeypatch.setenv("COMMIT", "abc")
    assert rows.commit() == common.commit() == "abc"
    monkeypatch.delenv("COMMIT")
    monkeypatch.setattr(rows, "ROOT", repository.parent / "none")
    assert rows.commit() == "unknown"


# Which trees may write results


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("benchmarks/results/heads.csv", "what,value\n1,2\n"),
        ("benchmarks/results/heads.png", "a new figure"),
        ("docs/page.md", PAGE.format(table="| a |\n")),
        ("build/note", "ignored by git"),
    ],
)
def test_results_and_tables_may_have_changes(repository, name, text):
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text)
    assert rows.changes() == []
    rows.append(repository / "benchmarks" / "results" / "rows.csv", [{"what": 1}])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("src/vecroute/ops/plan.py", "two = 3\n"),
        ("src/vecroute/ops/plan.py", None),
        ("src/new.py", ""),
        ("benchmarks/heads.py", "three = 4\n"),
        ("docs/page.md", PAGE.format(table="") + "Words that nobody generated.\n"),
        ("docs/new.md", PAGE.format(table="")),
    ],
)
def test_other_changes_are_refused_before_anything_is_measured(repository, capsys, name, text):
    (repository / name).unlink(missing_ok=True)
    if text is not None:
        (repository / name).write_text(text)
    results = repository / "benchmarks" / "results"
    with pytest.raises(ValueError, match=f"clean tree, but {name} changed: commit first"):
        rows.append(results / "rows.csv", [{"what": 1}])
    parser = common.parser("A benchmark.")
    parser.set_defaults(results=str(results))
    with pytest.raises(SystemExit):
        parser.parse_args([])
    *_, line = capsys.readouterr().err.splitlines()
    assert f"argument --results: rows must come from a clean tree, but {name} changed" in line
    assert not (results / "rows.csv").exists()
    # A trial writes elsewhere.
    elsewhere = repository.parent / "trial"
    assert parser.parse_args(["--results", str(elsewhere)]).results == elsewhere
    rows.append(elsewhere / "rows.csv", [{"what": 1}])


def test_results_need_a_repository(repository, monkeypatch):
    monkeypatch.setattr(rows, "git", lambda *arguments: (_ for _ in ()).throw(OSError("no git here")))
    with pytest.raises(ValueError, match=r"need a git repository \(no git here\)"):
        rows.append(rows.RESULTS / "rows.csv", [{"what": 1}])


# The file


def test_rows_are_appended_or_refused(tmp_path):
    path = tmp_path / "results" / "rows.csv"
    rows.append(path, [{"what": "a, b", "value": 1234.5678}])
    rows.append(path, [{"what": None, "value": math.nan}])
    assert path.read_text() == 'what,value\n"a, b",1235\n,\n'
    with pytest.raises(ValueError, match=r"must have the columns \['what'\], but has others"):
        rows.append(path, [{"what": 1}])
    with pytest.raises(ValueError, match="but has others"):
        rows.append(path, [{"what": 1, "value": 2, "another": 3}])
    assert os.listdir(path.parent) == ["rows.csv"]


def test_rows_without_the_later_columns_stay(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('what,commit,date\n"a, b",abc+,2026-11-01\n')
    rows.append(
        path, [{"what": "c", "commit": "def", "date": "2026-11-18", "src": "012", "command": "python x"}]
    )
    assert path.read_text() == (
        'what,commit,date,src,command\n"a, b",abc+,2026-11-01,,\nc,def,2026-11-18,012,python x\n'
    )
