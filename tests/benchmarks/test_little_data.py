"""The benchmark of few texts writes complete rows, and does not measure a draw twice."""

import csv
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import save_tiny

sys.path.insert(0, str(ROOT / "benchmarks"))

import little_data
import merge


def test_each_draw_is_one_row(tmp_path, monkeypatch, capsys):
    named = dict(list(little_data.TOPICS.items())[:3])
    monkeypatch.setattr(little_data, "TOPICS", named)
    monkeypatch.setitem(little_data.N_HELD_OUT, "topics", 40)
    arguments = ["--data", tmp_path, "--cache", tmp_path / "cache", "--encoder", save_tiny(tmp_path / "tiny")]
    arguments += ["--results", tmp_path, "--corpora", "topics", "--sizes", 8, 30, "--draws", 1]
    for _ in range(2):
        little_data.main([str(argument) for argument in arguments])
    with (tmp_path / "little_data.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["corpus"], row["classes"], row["n"], row["draw"]) == ("topics", "3", "30", "0")
    assert all(row.values())
    shares = ("accuracy", "logistic", "confidence", "calibration_error", "estimate", "low", "high")
    assert all(0 <= float(row[name]) <= 1 for name in shares)
    assert float(row["low"]) <= float(row["estimate"]) <= float(row["high"])
    assert float(row["fit_s"]) > float(row["head_s"])
    assert capsys.readouterr().out.count("corpus topics") == 1


def test_processes_divide_the_draws_and_their_rows_are_merged(tmp_path, monkeypatch, capsys):
    named = dict(list(little_data.TOPICS.items())[:2])
    monkeypatch.setattr(little_data, "TOPICS", named)
    monkeypatch.setitem(little_data.N_HELD_OUT, "topics", 30)
    monkeypatch.setattr(
        little_data.Corpus, "measure", lambda corpus, n, draw, time_alone: {"n": n, "draw": draw}
    )
    monkeypatch.setenv("COMMIT", "abc")
    common = ["--data", tmp_path, "--cache", tmp_path / "cache", "--encoder", save_tiny(tmp_path / "tiny")]
    common += ["--corpora", "topics", "--sizes", 20, 30, "--claims", tmp_path / "claims"]
    parts = [tmp_path / name for name in ("one", "two", "three")]
    for folder, more in zip(parts, (("--minutes", -1), ("--draws", 1), ("--draws", 2)), strict=True):
        little_data.main([str(argument) for argument in [*common, "--results", folder, *more]])
    files = [folder / "little_data.csv" for folder in parts]
    assert not files[0].exists()
    draws = [[(row["n"], row["draw"]) for row in merge.read(file)] for file in files[1:]]
    assert draws == [[("20", "0"), ("30", "0")], [("20", "1"), ("30", "1")]]
    assert merge.merge("little_data.csv", parts, tmp_path) == 4
    assert merge.merge("little_data.csv", parts, tmp_path) == 0
    assert len(merge.read(tmp_path / "little_data.csv")) == 4


def test_rows_of_a_changed_tree_are_not_merged(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.csv").write_text("n,commit\n1,abc+\n")
    with pytest.raises(ValueError, match=r"must come from a commit, but one is of 'abc\+'"):
        merge.merge("a.csv", [tmp_path / "part"], tmp_path)
