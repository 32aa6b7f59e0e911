"""The benchmark of few texts writes complete rows, and does not measure a draw twice."""

import csv
import sys

from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import save_tiny

sys.path.insert(0, str(ROOT / "benchmarks"))

import little_data


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
