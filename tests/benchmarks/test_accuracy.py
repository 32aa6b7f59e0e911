"""The benchmark of accuracy: its texts, the equality of stacked and separate training, and the choice."""

import queue
import sys
import threading
import time
from itertools import groupby
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import accuracy
import corpora
import families
import jobs
import scoring
import step_times
from corpora import Chunks, Packed
from stacked import Recipe, Stack, Training, as_vectors, batches, gather


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


def test_heads_that_run_one_after_the_other_are_those_that_run_side_by_side(data):
    data, found = as_vectors(data), []
    for implementation in ("reference", "chunked"):
        options = {"d_emb": 8, "depth": 1, "n_cls": 2, "d_mlp": 4, "implementation": implementation}
        stack = Stack("routing", options, [Recipe(seed=3), Recipe(lr=1e-2, seed=4)], "cpu")
        assert stack.loops == (implementation == "chunked")
        stack.fit(data, Training(epochs=1, batch_size=16, drop=0.3), own_order=True)
        found.append(stack.predict(data))  # [m, n, n_cls]
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_a_step_is_that_of_adamw(data):
    options = {"d_emb": 8, "depth": 3, "n_cls": 2}
    stack = Stack("mean_last", options, [Recipe(lr=0.01, weight_decay=0.1)], "cpu")
    head = Stack("mean_last", options, [Recipe()], "cpu").head
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


LABELS = np.array([1, 1, 1, 0] * 25)


def done(job, right, test=None):
    """A finished job whose heads are right on the given shares of the samples."""
    dev = np.stack([probabilities(share) for share in right])  # [m, n, n_cls]
    return jobs.Done(job, dev, test, 1, 1.0)


def probabilities(share, labels=LABELS):
    wrong = np.arange(len(labels)) >= share * len(labels)
    return np.eye(2)[np.where(wrong, 1 - labels, labels)]


def test_every_family_has_the_same_budget():
    for label in families.FAMILIES:
        every = accuracy.search_jobs("imdb", label)
        recipes = [recipe for job in every for recipe in job.recipes]
        assert len(recipes) == 12
        assert [recipe.seed for recipe in recipes] == list(range(12))
        assert len({recipe.lr for recipe in recipes}) == 3
        assert len({jobs.job_key(job, None) for job in every}) == len(every)
        drops = {job.training.drop for job in every}
        assert drops == ({0.0} if label == families.LINEAR else {0.6, 0.8})


def test_every_head_that_can_have_mlps_is_offered_the_same_widths():
    for label, (name, shapes) in families.FAMILIES.items():
        if label not in ("paper", families.LINEAR):
            assert [options["d_mlp"] for options, _ in shapes] == [0, 256, 512, 256]
            own = [options.get("d_inp_mlp", options["d_mlp"]) for options, _ in shapes]
            assert own == [0, 256, 512, 256], name


def test_the_grid_grows_until_the_best_learning_rate_is_inside():
    (job,) = accuracy.search_jobs("sst2", "probe", 1)
    shares = [0.9, 0.8, 0.7]
    assert [recipe.lr for recipe in job.recipes] == pytest.approx([1e-3 / 10**0.5, 1e-3, 1e-3 * 10**0.5])
    found = [done(job, shares)]
    grown = []
    while more := accuracy.growing_jobs(found, LABELS):
        grown.append(more[0].recipes[0].lr)
        found.append(done(more[0], [1.0 - 0.01 * len(grown)] * len(more[0].recipes)))
    assert grown == pytest.approx([1e-4, 1e-4 / 10**0.5])  # the first is better, the second is not
    always = [done(job, shares)]
    while more := accuracy.growing_jobs(always, LABELS):  # up to the end of what makes sense
        always.append(done(more[0], [0.95 + 0.01 * len(always)] * len(more[0].recipes)))
    assert always[-1].job.recipes[0].lr == pytest.approx(1e-5 * 10**0.5)
    assert not accuracy.growing_jobs([done(job, [0.0, 1.0, 0.0])], LABELS)


def test_the_best_two_are_trained_at_full_length_and_the_best_of_them_with_every_seed():
    every = accuracy.search_jobs("imdb", "probe", 2)
    full = accuracy.full_jobs(
        [done(*pair) for pair in zip(every, [[0.5, 0.7, 0.5], [0.5, 0.9, 0.8]], strict=True)], LABELS
    )
    assert [len(job.recipes) for job in full] == [2]
    full = accuracy.full_jobs(
        [done(*pair) for pair in zip(every, [[0.5, 0.7, 0.5], [0.5, 0.9, 0.6]], strict=True)], LABELS
    )
    assert sorted(len(job.recipes) for job in full) == [1, 1]
    assert {job.training.epochs for job in full} == {families.FULL["imdb"].epochs}
    best = [done(job, [0.5 + 0.1 * (job.options == every[1].options)]) for job in full]
    finals = accuracy.final_jobs(best, LABELS, 5)
    assert {(final.options["d_mlp"], final.recipes[0].lr) for final in finals} == {(256, 1e-3)}
    assert [recipe.seed for final in finals for recipe in final.recipes] == [100, 101, 102, 103, 104]
    assert len(finals) == 5  # reviews: one job for each seed
    assert all(final.test for final in finals)
    assert not any(job.test for job in [*every, *full])


def test_finals_of_several_jobs_are_one_result(data):
    jobs_of_seeds = accuracy.final_jobs(
        [done(accuracy.search_jobs("imdb", "probe", 1)[0], [0.5, 0.6, 0.4])], LABELS, 3
    )
    parts = [done(job, [0.1 * k], test=probabilities(0.1 * k)[None]) for k, job in enumerate(jobs_of_seeds)]
    found = accuracy.joined(parts)
    assert [recipe.seed for recipe in found.job.recipes] == [100, 101, 102]
    assert found.dev.shape == found.test.shape == (3, 100, 2)
    assert scoring.accuracy(found.test[2], LABELS) == pytest.approx(0.2)


def test_images_of_the_race_are_the_first_of_each_file(monkeypatch):
    pixels = torch.arange(50)[:, None, None, None]
    monkeypatch.setattr(corpora.cifar10, "read", lambda data, train: (pixels, torch.arange(50)))
    labels = [set(corpora.images(split, None, 4)[1].tolist()) for split in ("train", "dev", "test")]
    assert labels[0] | labels[1] == {10 * file + k for file in range(5) for k in range(4)}
    assert not labels[0] & labels[1]
    assert labels[2] == {0, 1, 2, 3}


def test_first_chunks():
    chunks = Chunks(torch.arange(10), torch.tensor([2, 3, 1, 4]), torch.tensor([0, 1, 1, 2]))
    ids, lengths, text = corpora.first_chunks(chunks)
    assert (ids.tolist(), lengths.tolist(), text.tolist()) == (
        [0, 1, 2, 3, 4, 6, 7, 8, 9],
        [2, 3, 4],
        [0, 1, 2],
    )


def test_differences_are_those_of_the_same_texts_and_seeds():
    right, wrong = np.ones((5, 100)), np.ones((5, 100))
    wrong[:, :10] = 0
    found = scoring.difference(right, wrong)
    assert found["points"] == pytest.approx(10)
    assert 3 < found["low"] < 10 < found["high"] < 17
    generator = np.random.default_rng(0)  # paired: the same errors cancel
    errors = generator.random((5, 100)) < 0.5
    assert scoring.difference(errors, errors) == {"points": 0, "low": 0, "high": 0}
    one_seed = np.ones((5, 100))
    one_seed[0] = 0  # seeds differ, texts do not
    found = scoring.difference(right, one_seed)
    assert found["low"] < 5 < 20 < found["high"]


def test_members_are_means_of_scores_of_three_seeds():
    p = np.random.default_rng(0).dirichlet([1, 1, 1], (5, 4))  # [seeds, n_texts, n_cls]
    found = scoring.members(p)
    assert found.shape == (10, 4, 3)
    np.testing.assert_allclose(found[0], np.log(p[:3]).mean(0), rtol=1e-5)


HEADS = ("routing", "paper", "efficient probing", "mean of all", "logistic regression")


def tiny(monkeypatch, tmp_path, data, *more):
    """Run the whole race on made-up hidden states, in this process, and return the jobs that ran."""
    splits, ran = {"train": data, "dev": data, "test": data}, []

    class Here(jobs.Workers):
        def __init__(self, splits, options, about):
            self.jobs, self.results, self.processes = self, queue.SimpleQueue(), []
            self.state, self.limit, self.until = options.state, options.limit, options.until
            self.waiting, self.about, self.lock = {}, about, threading.Lock()

        def put(self, job):
            if time.time() > self.until:
                return self.results.put((job, "no time left"))
            with self.lock:
                ran.append(job)
                return self.results.put(jobs.run_job(job, splits))

    def none_may_load(*_):
        raise AssertionError

    monkeypatch.setattr(accuracy, "load_splits", none_may_load if "--score" in more else lambda *_: splits)
    monkeypatch.setattr(accuracy, "labels_of", lambda *_: data.label.numpy())
    monkeypatch.setattr(accuracy, "Workers", Here)
    arguments = ["--short", "--tasks", "sst2", "--heads", *HEADS, "--device", "cpu", *more]
    accuracy.main([*arguments, "--results", str(tmp_path), "--state", str(tmp_path / "state")])
    return ran


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(accuracy, "LOWEST", 1e-3)
    monkeypatch.setattr(accuracy, "HIGHEST", 1e-3)
    monkeypatch.setitem(families.FAMILIES, "paper", ("paper", [({"n_hid": 3}, families.USUAL)]))


def test_the_race_resumes_and_tests_once_at_the_end(monkeypatch, tmp_path, data, small):
    with pytest.raises(SystemExit, match=r"not finished, so nothing is tested:\nsst2: routing: 1 of 1 jobs"):
        tiny(monkeypatch, tmp_path, data, "--minutes", "-1")
    with pytest.raises(SystemExit, match=r"routing: 1 of 1 jobs have no file"):
        tiny(monkeypatch, tmp_path, data, "--score")
    assert not (tmp_path / "accuracy.csv").exists()
    ran = tiny(monkeypatch, tmp_path, data)
    for label in HEADS:
        stages = [stage for stage, _ in groupby(job.stage for job in ran if job.label == label)]
        assert stages == ["search", "full", "final"]
    rows = pandas.read_csv(tmp_path / "accuracy.csv")
    assert len(rows) == 5
    assert rows.test.between(0.2, 1).all()
    searched = pandas.read_csv(tmp_path / "accuracy_search.csv")
    assert (searched[searched.stage == "full"].groupby("head").size() == 2).all()
    assert "test" not in searched
    differences = pandas.read_csv(tmp_path / "accuracy_differences.csv")
    assert len(differences) == 4
    assert (differences.members == 1).all()  # one seed has no mean of three
    assert not tiny(monkeypatch, tmp_path, data)  # all results exist
    assert not tiny(monkeypatch, tmp_path, data, "--score")
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "accuracy.csv"), rows)


def test_steps_of_every_family_are_timed(data, capsys):
    options = SimpleNamespace(heads=["paper", "logistic regression"])
    step_times.measure("sst2", {"train": data}, options)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "sst2 paper auto",
        "sst2 paper reference",
        "sst2 logistic regression ",
    ]
    assert all("ms a step" in line for line in lines)


def test_the_fastest_implementation_is_one_that_works(monkeypatch, data, capsys):
    times = {"auto": (1.0, 0.1), "reference": (2.0, 0.1)}
    monkeypatch.setattr(step_times, "time_of", lambda task, data, label, kind: times[kind])
    assert step_times.fastest("sst2", {"train": data}) == "auto"
    times["auto"] = "RuntimeError: no kernel"
    assert step_times.fastest("sst2", {"train": data}) == "reference"
    assert "auto: RuntimeError: no kernel" in capsys.readouterr().out


def test_the_summary_tells_means_and_by_how_much_routing_is_ahead(tmp_path):
    tests = {"probe": [0.80, 0.82, 0.84], "routing": [0.90, 0.91, 0.92]}
    rows = [{"task": "sst2", "head": head, "test": test} for head in tests for test in tests[head]]
    pandas.DataFrame(rows).to_csv(tmp_path / "accuracy.csv", index=False)
    told = [
        {"task": "sst2", "head": "probe", "members": n, "points": 9, "low": 8, "high": 10} for n in (1, 3)
    ]
    pandas.DataFrame(told).to_csv(tmp_path / "accuracy_differences.csv", index=False)
    accuracy.main(["--plot", "--results", str(tmp_path)])
    found = pandas.read_csv(tmp_path / "accuracy_summary.csv").set_index(["task", "head"])
    assert [head for _, head in found.index] == ["routing", "probe"]
    probe = found.loc["sst2", "probe"]
    assert (probe["mean"], probe.spread, probe.ahead, probe.low, probe.high) == pytest.approx(
        (82, 2, 9, 8, 10)
    )
    assert pandas.isna(found.loc["sst2", "routing"].ahead)
    assert (tmp_path / "accuracy.png").exists()
