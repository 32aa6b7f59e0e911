"""Benchmarks of faithfulness: rows that resume, paired differences, bounds over all orders, planted words."""

import itertools
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from tests.helpers.paths import ROOT
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny

sys.path.insert(0, str(ROOT / "benchmarks"))

import faithfulness
import normalized
import planted

METHODS = ("words", "states", "random")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A few sentences as trees of SST, each a single node."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "sst").mkdir()
    scores = dict(zip(sorted(set(LABELS)), (0, 4), strict=True))
    trees = [f"({scores[label]} {text})" for text, label in zip(TEXTS, LABELS, strict=True)]
    for split in ("train", "dev", "test"):
        (folder / "sst" / f"{split}.txt").write_text("\n".join(trees))
    return folder


def test_rows_resume_and_differences_are_paired(data, tmp_path):
    command = ["--data", data, "--weights", tmp_path / "weights", "--fit", len(TEXTS), "--short"]
    command += ["--encoder", save_tiny(tmp_path), "--tasks", "sst2", "--seeds", 0, 1, "--device", "cpu"]
    command += ["--normalized", 6, "--results", tmp_path, "--methods", *METHODS]
    faithfulness.main([str(word) for word in command[: -len(METHODS) + 2]])
    first = pd.read_csv(tmp_path / "words_texts.csv")
    assert len(first) == 2 * 4 * 2  # seeds, texts, methods
    faithfulness.main(list(map(str, command)))
    rows = pd.read_csv(tmp_path / "words_texts.csv")
    assert len(rows) == 2 * 4 * 3
    pd.testing.assert_frame_equal(rows[: len(first)], first)
    assert not rows.duplicated(["task", "seed", "text", "method"]).any()
    other = tmp_path / "other"
    for _ in range(2):  # rows that are there already are not added again
        faithfulness.main(["--merge", str(tmp_path / "words_texts.csv"), "--results", str(other)])
    pd.testing.assert_frame_equal(pd.read_csv(other / "words_texts.csv"), rows)
    faithfulness.main(["--summarize", "--results", str(tmp_path)])
    summary = pd.read_csv(tmp_path / "words.csv")
    ahead = summary[(summary.of == "words less this") & (summary.method == "random")]
    means = rows.groupby("method").comprehensiveness.mean()
    told = ahead[ahead.measure == "comprehensiveness"]["mean"].item()
    assert told == pytest.approx(means["words"] - means["random"], rel=1e-3)
    assert summary.texts.max() == 4  # a text that two seeds explain counts once
    assert (tmp_path / "words.png").stat().st_size > 0


class Known:
    """A judge of four tokens whose probabilities are drawn at random for each set of them."""

    tokens = (5, 6, 7, 8)

    def __init__(self):
        rng = np.random.default_rng(0)
        sets = [s for n in range(5) for s in itertools.combinations(self.tokens, n)]
        self.p = dict(zip(sets, rng.random(len(sets)), strict=True))
        self.known = self.p

    def some(self, keep):
        return tuple(t for t, stays in zip(self.tokens, keep.tolist(), strict=True) if stays)

    def ask(self, texts):
        return [(self.p[text], 0.0) for text in texts]


def test_bounds_are_those_of_all_orders():
    judge = Known()
    every = [normalized.aopc(judge, torch.tensor(order)) for order in itertools.permutations(range(4))]
    [(low, high)] = normalized.bounds([judge], width=24)
    assert (low, high) == (pytest.approx(min(every)), pytest.approx(max(every)))
    best = torch.tensor(list(itertools.permutations(range(4)))[int(np.argmax(every))])
    assert normalized.normalized(judge, best, (low, high))["comprehensiveness_normalized"] == pytest.approx(1)


def test_planted_words_are_known(data):
    for task, n_words in (("word", 1), ("topics", 2)):
        for text in planted.make(task, TEXTS, seed=0):
            assert len(text.words) == n_words
            assert set(text.words) <= set(text.text.split())
    assert planted.sentences("test", data, seed=0) != planted.sentences("test", data, seed=1)


def test_rows_of_planted_words(data, tmp_path):
    command = ["--data", data, "--encoder", save_tiny(tmp_path), "--results", tmp_path, "--device", "cpu"]
    planted.main([*map(str, command), "--short", "--tasks", "word"])
    rows = pd.read_csv(tmp_path / "planted.csv")
    assert rows.method.tolist() == ["words", "states"]
    assert rows[["accuracy", "all_first", "share"]].stack().between(0, 1).all()
