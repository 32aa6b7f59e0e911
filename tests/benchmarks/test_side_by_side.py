"""The comparison with other packages runs and writes complete rows. Tests do without SetFit itself."""

import csv
import sys

import pytest

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import side_by_side


def options(results, *parts: str) -> list[str]:
    return ["--short", "--texts", "12", "--device", "cpu", "--results", str(results), "--parts", *parts]


def rows(results) -> list[dict[str, str]]:
    with (results / "side_by_side.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_few_sentences_for_both(tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "by_setfit", lambda drawn, device, seed: (constant(drawn), 1.0))
    monkeypatch.setattr(side_by_side, "by_vecroute", lambda drawn, device, seed: (constant(drawn), 2.0))
    side_by_side.main(options(tmp_path, "few-shot"))
    found = rows(tmp_path)
    assert [(row["by"], row["unit"]) for row in found] == [
        (name, unit) for name in ("setfit", "vecroute") for unit in ("%", "s", "texts/s")
    ]
    assert [row["value"] for row in found if row["unit"] == "s"] == ["1", "2"]
    assert found[0]["value"] == found[3]["value"]


def constant(drawn):
    assert drawn["label"].value_counts().tolist() == [2, 2]
    return lambda texts: ["negative"] * len(texts)


def test_setfit_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "setfit", None)
    with pytest.raises(SystemExit, match="few-shot needs setfit"):
        side_by_side.main(options(tmp_path, "few-shot"))


@pytest.mark.slow
def test_throughput_and_explanations(tmp_path, monkeypatch):
    ours = {name: by for name, by in side_by_side.EXPLAINERS.items() if by.startswith("vecroute")}
    monkeypatch.setattr(side_by_side, "EXPLAINERS", ours)
    side_by_side.main(options(tmp_path, "throughput", "explain"))
    found = rows(tmp_path)
    assert [row["by"] for row in found[:4]] == ["plain PyTorch probe", "vecroute"] * 2
    assert [row["by"] for row in found[4:]] == list(side_by_side.EXPLAINERS.values())
    assert all(float(row["value"]) > 0 for row in found)
