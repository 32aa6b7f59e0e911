"""Heads compared on the same texts: a row for each, a paired test, one command."""

import json
import sys

import numpy as np
import pandas as pd
import pytest

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.classifier.compare import compare, paired_test
from vecroute.cli import main
from vecroute.encoders import TextEncoder
from vecroute.heads import HEADS


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """Store the hidden states of the tests in their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECROUTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


# There are few texts and 16 features, so training must not drop any.
WHOLE = {"drop_inputs": 0.0, "drop_features": 0.0, "weight_decay": 0.0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def test_each_head_has_a_row_and_is_compared_with_the_first(tiny):
    steps = []
    options = {"encoder": tiny, "max_epochs": 6, "batch_size": 16, "lr": 0.03} | WHOLE
    heads = ["mean_all", "cls"]
    rows = compare(TEXTS, LABELS, heads, seeds=2, step=steps.append, **options)
    assert [row["head"] for row in rows] == heads
    assert rows[0]["difference"] == 0
    assert rows[0]["p"] == 1
    for row in rows:
        own = [step["accuracy"] for step in steps if step["head"] == row["head"]]
        assert len(own) == 2
        assert row["accuracy"] == pytest.approx(np.mean(own))
        assert row["spread"] == pytest.approx(np.std(own, ddof=1))
        assert row["seconds"] > 0
    assert rows[1]["difference"] == pytest.approx(rows[1]["accuracy"] - rows[0]["accuracy"])
    assert [row["parameters"] for row in rows] == [3 * 16 * 2 + 2, 16 * 2 + 2]


def test_every_head_can_be_fitted_saved_and_read(tiny, tmp_path):
    for head in HEADS:
        classifier = vr.RoutingClassifier(tiny, head=head, max_epochs=1, cache=False).fit(TEXTS, LABELS)
        classifier.save_pretrained(tmp_path / head)
        again = vr.RoutingClassifier.from_pretrained(tmp_path / head)
        np.testing.assert_allclose(again.predict_proba(TEXTS[:3]), classifier.predict_proba(TEXTS[:3]))
        assert again.get_params()["drop_inputs"] is again.get_params()["drop_features"] is None
        for of in ("words", "states"):
            why = again.explain("good", of=of)
            assert why.completeness_error < 1e-5
            assert (why.phi is not None) == (of == "states" and head in ("routing", "wide", "paper"))


@pytest.mark.parametrize("share", ["kept out", "given"])
def test_each_text_is_encoded_once_for_all_heads_and_seeds(tiny, tmp_path, monkeypatch, share):
    encoded, encode = [], TextEncoder._run

    def run(self, chunks, keep):
        # A batch may repeat texts to fill its shape.
        encoded.extend(dict.fromkeys(self.tokenizer.decode(c, skip_special_tokens=True) for c in chunks))
        return encode(self, chunks, keep)

    monkeypatch.setattr(TextEncoder, "_run", run)
    others = ["a good film", "a dull movie", TEXTS[0]]
    test = None if share == "kept out" else (others, ["pos", "neg", LABELS[0]])
    options = {"seeds": 2, "encoder": tiny, "max_epochs": 1, "cache": tmp_path}
    compare(TEXTS, LABELS, ["mean_last", "cls"], test=test, **options)
    assert sorted(encoded) == sorted({*TEXTS, *(others if test else [])})


def test_what_is_tested_are_the_labels_predicted(tiny, monkeypatch):
    fitted, fit, rows = [], vr.RoutingClassifier.fit, []
    monkeypatch.setattr(vr.RoutingClassifier, "fit", lambda self, *given: fitted.append(fit(self, *given)))
    numbers = [7 if label == "pos" else 3 for label in LABELS]
    texts = [*TEXTS[::7], "the film is good " * 20]
    truth = [*numbers[::7], 7]
    # Without the cache there is no rounding to half precision.
    options = {"encoder": tiny, "max_epochs": 3, "lr": 0.03, "cache": False, "step": rows.append} | WHOLE
    compare(TEXTS, numbers, ["routing", "mean_all"], seeds=2, test=(texts, truth), **options)
    accuracies = [np.mean(classifier.predict(texts) == truth) for classifier in fitted]
    assert [row["accuracy"] for row in rows] == accuracies
    assert len(set(accuracies)) > 1


def test_texts_to_test_on_can_be_given(tiny):
    wrong = ["neg" if label == "pos" else "pos" for label in LABELS]
    options = {
        "encoder": tiny,
        "max_epochs": 6,
        "batch_size": 16,
        "lr": 0.01,
        "heads": ["mean_all"],
        "seeds": 1,
    }
    right, flipped = (compare(TEXTS, LABELS, test=(TEXTS, y), **options)[0] for y in (LABELS, wrong))
    assert right["accuracy"] == pytest.approx(1 - flipped["accuracy"])
    assert right["spread"] is None


def test_the_paired_test_knows_gains_from_chance():
    assert paired_test(np.zeros(50)) == 1
    assert paired_test(np.array([0.2] * 40 + [0.0] * 60)) < 0.001
    assert paired_test(np.array([0.2, -0.2] * 20)) > 0.9
    # Three equal gains have 8 outcomes of signs, and 2 of them are equally far from 0.
    assert paired_test(np.array([1.0, 1.0, 1.0])) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds must be a positive int, got 0"),
        ({"heads": ["x"]}, "heads must be one of 'routing'"),
        ({"test": (["a", "b"], [1])}, "test must have a label for each text, got 1 for 2 texts"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        compare(TEXTS, LABELS, **options)


def test_few_texts_need_others_to_test_on():
    message = "test must be texts and labels, because 16 texts of 2 classes are too few to take 0.2"
    with pytest.raises(ValueError, match=message):
        compare(["good", "bad"] * 8, ["pos", "neg"] * 8)


def test_the_command(tiny, tmp_path, monkeypatch, capfd):
    data = tmp_path / "data.csv"
    pd.DataFrame({"text": TEXTS, "label": LABELS}).to_csv(data, index=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vecroute", "compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    common = ("--encoder", tiny, "--epochs", 1, "--seeds", 2, "--test", data)
    code, out, _ = run(data, "--heads", "mean_last,cls", *common)
    assert code == 0
    assert "minus mean_last" in out
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["head", "mean_last", "cls"]
    code, out, _ = run(data, "--heads", "mean_last,cls", *common, "--json")
    assert [json.loads(line)["head"] for line in out.splitlines()] == ["mean_last", "cls"]
    code, _, err = run(data, "--heads", "mean_last,nothing", *common)
    assert code == 2
    assert "heads must be one of 'routing'" in err
