"""A rehearsal of the paper's training on tiny models of the same families, with a few made-up samples."""

import csv
import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_vision import save_tiny_vision

sys.path.insert(0, str(ROOT / "benchmarks"))
import paper

WORDS = {"pos": "a warm and witty film, never dull.", "neg": "a dull and slow film, never warm."}


@pytest.fixture
def data(tmp_path) -> Path:
    """Reviews, trees and images in the formats that the real data have."""
    folder = tmp_path / "data"
    (folder / "imdb").mkdir(parents=True)
    for split, n in (("train", 8), ("test", 6)):
        with gzip.open(folder / "imdb" / f"{split}.csv.gz", "wt", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            # The longest text has several chunks.
            writer.writerows([[WORDS[label] * (1 + k % 3), label] for k in range(n) for label in WORDS])
    (folder / "sst").mkdir()
    for split in ("train", "dev", "test"):
        (folder / "sst" / f"{split}.txt").write_text(
            "(3 (2 The) (4 (3 gorgeous) (2 film)))\n(1 (2 The) (0 bore))\n"
        )
    for split in ("train", "test"):
        for label, shade in (("dark", 40), ("light", 210)):
            (folder / "cifar100" / split / label).mkdir(parents=True)
            for k in range(4):
                pixels = np.full((16, 16, 3), shade + k, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "cifar100" / split / label / f"{k}.png")
    return folder


def run(task: str, encoder: str, data: Path, results: Path, *more: str) -> list[dict[str, str]]:
    common = ["--short", "--device", "cpu", "--data", str(data), "--results", str(results)]
    paper.main(["--task", task, "--encoder", encoder, *common, *more])
    with (results / "paper.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rehearsal_on_texts(data, tmp_path):
    encoder = save_tiny(tmp_path / "roberta", "roberta")
    (row,) = run("imdb", encoder, data, tmp_path)
    assert (row["task"], row["encoder"], row["mixup"], row["train"], row["test"]) == (
        "imdb",
        "roberta",
        "0.65",
        "16",
        "12",
    )
    assert 0 <= float(row["accuracy"]) <= float(row["top5"]) == 100
    assert row["theirs"] == "96.2"


def test_rehearsal_on_images(data, tmp_path):
    encoder = save_tiny_vision(tmp_path / "beit", "beit")
    (row,) = run("cifar100", encoder, data, tmp_path, "--no-augment")
    assert (row["encoder"], row["mixup"], row["augmented"], row["train"]) == ("beit", "0.2", "False", "8")


def test_sst2_continues_from_the_head_of_sst5(data, tmp_path):
    encoder, saved = save_tiny(tmp_path / "roberta", "roberta"), tmp_path / "saved"
    run("sst5", encoder, data, tmp_path, "--save", str(saved))
    rows = run("sst2", encoder, data, tmp_path, "--save", str(saved), "--start", str(saved / "sst5.pt"))
    assert rows[-1]["start"] == "sst5"
    before, after = (torch.load(saved / f"{task}.pt", weights_only=True)["head"] for task in ("sst5", "sst2"))
    for name in before:
        if not name.startswith("network.2."):
            assert torch.equal(before[name], after[name]), name
    assert after["network.2.W_S"].shape[-1] == 2


def test_an_interrupted_run_resumes_to_the_same_head(data, tmp_path, monkeypatch):
    encoder = save_tiny(tmp_path / "roberta", "roberta")
    more = ("--epochs", "2", "--steps", "2", "--save")
    run("imdb", encoder, data, tmp_path, *more, str(tmp_path / "whole"))
    save = paper.save

    def save_and_stop(parts, done, file):
        save(parts, done, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(paper, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run("imdb", encoder, data, tmp_path, *more, str(tmp_path / "parts"))
    monkeypatch.setattr(paper, "save", save)
    run("imdb", encoder, data, tmp_path, *more, str(tmp_path / "parts"))
    whole, parts = (torch.load(tmp_path / name / "imdb.pt", weights_only=True) for name in ("whole", "parts"))
    assert whole["done"] == parts["done"] == 4
    for name, weight in whole["head"].items():
        torch.testing.assert_close(parts["head"][name], weight)


def test_every_sample_comes_once_before_any_comes_again():
    draws = paper.drawn(5, 0, 15, seed=0)
    assert [sorted(draws[k : k + 5]) for k in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert draws[:5] != draws[5:10]
    assert paper.drawn(5, 3, 4, seed=0) == draws[3:7]


def test_punctuation_joins_the_word_before():
    assert paper.tidy("it 's a film , not a bore .") == "it's a film, not a bore."
    assert paper.tidy("no . 1 , at last") == "no. 1, at last"
