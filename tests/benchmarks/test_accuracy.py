"""The benchmark of accuracy: its texts, the equality of stacked and separate training, and the choice."""

import sys

import numpy as np
import pandas
import pytest
import torch

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import accuracy
import corpora
from corpora import Chunks, Packed
from stacked import Recipe, Stack, Training, as_vectors, batches, gather

OTHER = "routing, wide"


def test_phrases_of_a_tree_come_with_their_labels_and_the_sentence_last():
    found = corpora.phrases("(3 (2 The) (4 (3 gorgeous) (2 film)))")
    assert found == [("The", 2), ("gorgeous", 3), ("film", 2), ("gorgeous film", 4), ("The gorgeous film", 3)]
    assert corpora.phrases(r"(1 (2 -LRB-) (0 a\/b))")[-1] == ("( a/b", 1)


def test_training_takes_each_phrase_once_and_two_classes_leave_out_the_neutral(tmp_path):
    lines = "(3 (2 The) (4 (3 gorgeous) (2 film)))\n(1 (2 The) (0 bore))\n"
    for split in ("train", "dev"):
        (tmp_path / f"{split}.txt").write_text(lines)
    texts, labels = corpora.sst(tmp_path, "train", fine=True)
    assert len(texts) == len(set(texts)) == 7
    assert labels[texts.index("The bore")] == 1
    texts, labels = corpora.sst(tmp_path, "train", fine=False)
    assert dict(zip(texts, labels, strict=True))["bore"] == 0
    assert "film" not in texts
    assert corpora.sst(tmp_path, "dev", fine=False) == (["The gorgeous film", "The bore"], [1, 0])


def test_some_texts_are_whole():
    chunks = Chunks(torch.arange(10), torch.tensor([2, 3, 1, 4]), torch.tensor([0, 1, 1, 2]))
    few, labels = corpora.some(chunks, [7, 8, 9], 1)
    assert (few.ids.tolist(), few.lengths.tolist(), few.text.tolist(), labels) == ([0, 1], [2], [0], [7])


@pytest.fixture
def data():
    torch.manual_seed(0)
    length = torch.randint(2, 9, (60,))
    start = length.cumsum(0) - length
    label = torch.randint(0, 2, (60,))
    hidden = torch.randn(int(length.sum()), 3, 8)
    hidden += label.repeat_interleave(length)[:, None, None] * torch.randn(8)
    return Packed(hidden.half(), start, length, label)


def test_inputs_are_gathered_whole_or_in_part(data):
    which = torch.tensor([[4, 7]])
    hidden, mask = gather(data, which)
    for k, sample in enumerate([4, 7]):
        first, n = int(data.start[sample]), int(data.length[sample])
        assert torch.equal(hidden[0, k][mask[0, k]], data.hidden[first : first + n].float())
    vectors = as_vectors(data)
    hidden, mask = gather(vectors, which, Training(epochs=1, batch_size=2, drop=0.5))
    for k, sample in enumerate([4, 7]):
        first, n = int(data.start[sample]), int(data.length[sample])
        own = {tuple(v) for v in data.hidden[first : first + n].reshape(-1, 8).tolist()}
        found = {tuple(v) for v in hidden[0, k, mask[0, k]].reshape(-1, 8).tolist()}
        assert found < own
        assert len(found) == -(-3 * n // 2)
    _, mask = gather(vectors, which, Training(epochs=1, batch_size=2, most=2))
    assert mask.sum(-1).max() == 2


def test_batches_hold_every_sample_and_some_twice(data):
    found = torch.cat(list(batches(data, 16, [torch.Generator().manual_seed(0)])), 1)
    assert found.shape == (1, 64)
    assert found.unique().numel() == 60


@pytest.mark.parametrize("name", ["wide", "probe", "mean_all"])
def test_heads_of_a_stack_are_what_they_would_be_alone(data, name):
    depth = 3 if name == "mean_all" else 1
    data = data if name == "mean_all" else as_vectors(data)
    options = {"d_emb": 8, "depth": depth, "n_cls": 2} | (
        {"implementation": "reference"} if name == "wide" else {}
    )
    recipes = [Recipe(lr=1e-2, seed=3), Recipe(lr=1e-3, weight_decay=0.5, label_smoothing=0.1, seed=4)]
    training = Training(epochs=2, batch_size=16)
    together = Stack(name, options, recipes, "cpu", max_vectors=300)  # in several parts
    together.fit(data, training, own_order=True)
    found = together.predict(data)  # [m, n, n_cls]
    for k, recipe in enumerate(recipes):
        alone = Stack(name, options, [recipe], "cpu")
        alone.fit(data, training, own_order=True)
        if k == 0:  # the first head determines the order of batches
            torch.testing.assert_close(alone.predict(data)[0], found[k], rtol=1e-3, atol=1e-4)
    assert (found[0].argmax(-1) == data.label).float().mean() > 0.6
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_cls_sees_the_first_position_alone_where_others_are_drawn_at_random(data):
    training = Training(epochs=2, batch_size=16, most=2)
    job = accuracy.Job("sst2", "CLS", "cls", {}, [Recipe(lr=1e-2)], training)
    other = torch.randn_like(data.hidden)
    other[data.start] = data.hidden[data.start]
    changed = Packed(other, data.start, data.length, data.label)
    found = [accuracy.run_job(job, {"train": split, "dev": split}).dev for split in (data, changed)]
    assert np.array_equal(*found)
    assert np.ptp(found[0][0, :, 1]) > 0.1


def test_a_step_is_that_of_adamw(data):
    options = {"d_emb": 8, "depth": 3, "n_cls": 2}
    stack = Stack("mean_last", options, [Recipe(lr=0.01, weight_decay=0.1)], "cpu")
    head = accuracy.Stack("mean_last", options, [Recipe()], "cpu").head
    head.load_state_dict({name: p[0].detach() for name, p in stack.parameters.items()})
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1, (k + 1) / 0.4) * (1 + np.cos(np.pi * k / 4)) / 2
    )
    stack.fit(data, Training(epochs=4, batch_size=60))
    for _ in range(4):
        optimizer.zero_grad()
        hidden, mask = gather(data, torch.arange(60)[None])
        torch.nn.functional.cross_entropy(head(hidden[0], mask[0]), data.label).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        rates.step()
    for name, p in head.named_parameters():
        torch.testing.assert_close(stack.parameters[name][0], p, rtol=1e-4, atol=1e-5)


def test_the_best_on_the_dev_set_is_trained_with_every_seed():
    jobs = accuracy.search_jobs("sst2", ["probe"], accuracy.RECIPES, 2)
    for label in accuracy.SHAPES:
        every = accuracy.search_jobs("sst2", [label], accuracy.RECIPES, 2)
        assert sum(len(job.recipes) for job in every) == 20
    found = []
    for job in jobs:
        dev = np.full((10, 4, 2), 0.5)
        dev[:, :, 1] += 0.1 if job is jobs[1] else -0.1
        done = accuracy.Done(job, dev, None, 1, 1.0)
        label = torch.tensor([1, 1, 1, 0])
        splits = {"dev": Packed(label, label, label, label)}
        found += list(accuracy.rows_of(done, splits))
    (final,) = accuracy.final_jobs(found, jobs)
    assert final.options == jobs[1].options
    assert (final.training.epochs, final.training.drop) == (3, 0.6)
    assert [recipe.seed for recipe in final.recipes] == [100, 101, 102, 103, 104]
    assert final.test


def test_differences_are_those_of_the_same_texts():
    label = np.array([0, 1] * 50)
    right, wrong = np.eye(2)[label][None], np.eye(2)[np.where(np.arange(100) < 10, 1 - label, label)][None]
    finals = [
        accuracy.Done(accuracy.Job("sst2", name, "", {}, [], Training(1, 1)), p, p, 1, 1.0)
        for name, p in (("routing", right), ("probe", wrong))
    ]
    (row,) = accuracy.differences("sst2", finals, label)
    assert row["points"] == pytest.approx(10)
    assert 0 < row["low"] < 10 < row["high"] < 20


def test_the_summary_tells_means_and_by_how_much_routing_is_ahead(tmp_path):
    tests = {"probe": [0.80, 0.82, 0.84], "routing": [0.90, 0.91, 0.92], "routing, wide": [0.7, 0.7, 0.71]}
    rows = [{"task": "sst2", "head": head, "test": test} for head in tests for test in tests[head]]
    rows += [{"task": "cifar10", "head": head, "test": 0.5 + k / 10} for head in ("a", OTHER) for k in (0, 1)]
    pandas.DataFrame(rows).to_csv(tmp_path / "accuracy.csv", index=False)
    accuracy.main(["--plot", "--results", str(tmp_path)])
    found = pandas.read_csv(tmp_path / "accuracy_summary.csv").set_index(["task", "head"])
    assert [head for task, head in found.index if task == "sst2"] == ["routing", "probe", "routing, wide"]
    probe = found.loc["sst2", "probe"]
    assert (probe["mean"], probe.spread, probe.ahead) == pytest.approx((82, 2, 9))
    # Welch: an error of sqrt((1 + 4) / 3), 2.94 degrees of freedom, of whose t 3.219 is the 97.5 % point.
    assert (probe.low, probe.high) == pytest.approx((9 - 4.155, 9 + 4.155), abs=0.01)
    assert pandas.isna(found.loc["sst2", "routing"].ahead)
    assert found.loc["cifar10", "a"].routing == OTHER
    assert (tmp_path / "accuracy.png").exists()
