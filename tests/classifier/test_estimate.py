"""The temperature and the estimate of the accuracy that ``fit`` computes."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_vision import save_tiny_vision
from vecroute.classifier import fitting
from vecroute.classifier.estimate import Estimate, interval, make_estimate
from vecroute.classifier.predicting import scores_of
from vecroute.explain.report import report
from vecroute.serve.answers import Answers, Explain, Predict
from vecroute.training import Task
from vecroute.training.folds import FOLD_TEMPERATURE

SMALL = {"lr": 1e-2, "drop_inputs": 0.5, "drop_features": 0.0, "max_epochs": 12, "cache": False}
SOME = ["good", "a very dull movie", "not bad film ."]
T = 2.5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fitted(tiny):
    return vr.RoutingClassifier(tiny, **SMALL).fit(TEXTS, LABELS)


@pytest.fixture
def warm(fitted, monkeypatch):
    """Return the classifier with a temperature that has a visible effect."""
    monkeypatch.setattr(fitted, "temperature_", T)
    return fitted


def test_fit_makes_a_temperature_and_an_estimate(fitted):
    estimate = fitted.estimate_
    assert 0.05 < fitted.temperature_ < 5
    assert fitted.temperature_ != 1
    assert (estimate.method, estimate.n, estimate.samples) == ("cross-validation", 120, "texts")
    assert estimate.low < estimate.accuracy < estimate.high
    assert estimate.accuracy > 0.7
    assert (estimate.majority, estimate.baseline) == ("neg", 0.5)
    assert estimate.counts == {"neg": 60, "pos": 60}
    assert np.mean(list(estimate.recall.values())) == pytest.approx(estimate.accuracy)


def test_neither_changes_the_head(tiny, fitted):
    plain = vr.RoutingClassifier(tiny, **SMALL, calibrate=False, estimate=False).fit(TEXTS, LABELS)
    assert (plain.temperature_, plain.estimate_) == (1.0, None)
    for name, weight in plain.head_.state_dict().items():
        assert torch.equal(weight, fitted.head_.state_dict()[name])
    assert (plain.decision_function(SOME) == fitted.decision_function(SOME)).all()
    scores = scores_of(plain, SOME).numpy()  # [n, n_cls]
    assert plain.predict_proba(SOME) == pytest.approx(softmax(scores, 1))
    assert fitted.predict_proba(SOME) == pytest.approx(softmax(scores / fitted.temperature_, 1))


def test_validation_serves_for_both(tiny):
    classifier = vr.RoutingClassifier(tiny, **SMALL, validation_fraction=0.2).fit(TEXTS, LABELS)
    estimate = classifier.estimate_
    assert (estimate.method, estimate.n) == ("validation", 24)
    assert estimate.accuracy == pytest.approx(classifier.validation_accuracy_)
    assert estimate.counts == {"neg": 48, "pos": 48}
    assert classifier.temperature_ != 1


def test_scores_of_folds_count_as_less_sure(tiny, monkeypatch):
    """The heads of the folds learn from two thirds of the texts, so the classifier is less overconfident."""
    found, given = [], []
    out_of_fold, fit_temperature = fitting.out_of_fold, fitting.fit_temperature
    monkeypatch.setattr(
        fitting, "out_of_fold", lambda *args, **kw: found.append(out_of_fold(*args, **kw)) or found[-1]
    )
    monkeypatch.setattr(
        fitting, "fit_temperature", lambda *args: given.append(args[0]) or fit_temperature(*args)
    )
    vr.RoutingClassifier(tiny, **SMALL | {"max_epochs": 1}).fit(TEXTS, LABELS)
    assert torch.allclose(given[0] * FOLD_TEMPERATURE, found[0])
    vr.RoutingClassifier(tiny, **SMALL | {"max_epochs": 1}, validation_fraction=0.2).fit(TEXTS, LABELS)
    assert len(found) == 1  # validation needs no folds


def test_probabilities_agree_everywhere(warm, tmp_path):
    margin = warm.decision_function(SOME)  # [n]
    expected = expit(margin / T)  # [n] of "pos"
    found = warm.predict_proba(SOME)[:, 1]  # [n]
    assert found == pytest.approx(expected)
    answers = Answers(warm)
    for k, text in enumerate(SOME):
        explanation = warm.explain(text)
        assert explanation.temperature == T
        assert explanation.probabilities[1] == pytest.approx(expected[k])
        # Contributions and the displayed margin belong to scores that are not divided by T.
        shown = explanation.margin("pos", "neg")
        assert shown.scores[0] == pytest.approx(margin[k], abs=1e-5)
        assert shown.probabilities[0] == pytest.approx(expected[k])
        page = explanation.to_html()
        most = max(expected[k], 1 - expected[k])
        assert f"{100 * most:.1f}\N{NO-BREAK SPACE}%" in page
        assert "1 / (1 + e^(-score / T))" in page
        assert f" = {T}" in page
        predicted, explained = answers.answer([Predict(text), Explain(text, output="pos", against="neg")])
        assert predicted["probabilities"]["pos"] == pytest.approx(expected[k])
        assert explained["told"]["chance"]["temperature"] == str(T)
        assert explained["told"]["chance"]["percent"] == f"{100 * expected[k]:.1f}\N{NO-BREAK SPACE}%"
    page = report(warm, SOME, ["pos", "neg", "pos"], warm.predict_proba(SOME), "report")
    sure = np.maximum(expected, 1 - expected).mean()
    assert f"On average it is {100 * sure:.1f} % sure" in page
    warm.save_pretrained(tmp_path / "model")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    assert again.temperature_ == T
    assert again.estimate_ == warm.estimate_
    assert (again.predict_proba(SOME) == warm.predict_proba(SOME)).all()


def test_the_card_tells_both(warm, tmp_path):
    warm.save_pretrained(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text().replace("\\", "")
    accuracy, recall = warm.estimate_.lines()
    assert f"| estimate | {accuracy} |" in card
    assert f"| recall | {recall.removeprefix('recall: ')} |" in card
    assert "| temperature | 2.5 |" in card
    assert "| advice | measure it on texts that you kept apart" in card
    warm.estimate_, before = None, warm.estimate_
    warm.save_pretrained(tmp_path / "other")
    warm.estimate_ = before
    assert vr.RoutingClassifier.from_pretrained(tmp_path / "other").estimate_ is None


def test_any_number_of_labels(tiny):
    sets = [[name for name in ("good", "slow", "film") if name in text] for text in TEXTS]
    classifier = vr.RoutingClassifier(tiny, **SMALL, multi_label=True).fit(TEXTS, sets)
    estimate = classifier.estimate_
    assert classifier.classes_.tolist() == ["film", "good", "slow"]
    assert estimate.counts == {name: sum(name in s for s in sets) for name in ("film", "good", "slow")}
    assert estimate.majority == "no label"
    assert estimate.baseline == pytest.approx(sum(not s for s in sets) / 120)
    scores = scores_of(classifier, SOME).numpy()  # [n, n_cls]
    assert classifier.predict_proba(SOME) == pytest.approx(expit(scores / classifier.temperature_))


def test_images_have_both(tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 120, (20, 20, 3), dtype=np.uint8) + 100 * (k % 2) for k in range(24)]
    images = [image.astype(np.uint8) for image in images]
    encoder = save_tiny_vision(tmp_path / "vit")
    classifier = vr.RoutingClassifier(str(encoder), **SMALL).fit(images, ["dark", "light"] * 12)
    assert classifier.estimate_.samples == "images"
    assert "by cross-validation on 24 images" in str(classifier.estimate_)
    assert classifier.estimate_.advice("m/").endswith("`vecroute evaluate m/ photos/`")


def test_texts_that_are_all_equal_have_no_estimate(tiny):
    classifier = vr.RoutingClassifier(tiny, **SMALL).fit(["one text"] * 8, ["a", "b"] * 4)
    assert (classifier.temperature_, classifier.estimate_) == (1.0, None)


def estimated(targets, scores, train=None, **options):
    every = list(range(len(targets)))
    task = Task(None, torch.tensor(targets).float(), every if train is None else train, [], **options)
    return make_estimate(torch.tensor(scores), task, every, ["a", "b"], "validation", "texts")


def test_the_numbers_of_an_estimate():
    targets = [[1, 0]] * 12 + [[0, 1]] * 18
    found = estimated(targets, [[1.0, 0.0]] * 14 + [[0.0, 1.0]] * 16)
    assert found.accuracy == pytest.approx(28 / 30)
    assert found.recall == {"a": 1.0, "b": pytest.approx(16 / 18)}
    assert (found.majority, found.baseline) == ("b", pytest.approx(0.6))
    assert found.low < 0.82 < 0.98 < found.high
    assert json.loads(json.dumps(found.recall)) == found.recall


def test_the_interval_of_cross_validation_is_wider_and_reaches_further_up():
    (low, high), (wider_low, wider_high) = (
        interval(210, 300, method) for method in ("validation", "cross-validation")
    )
    assert (low, high) == pytest.approx((0.646, 0.749), abs=1e-3)
    assert wider_low == pytest.approx(0.633, abs=1e-3)  # the interval of 140 out of 200
    assert wider_high == pytest.approx(1 - 0.9036 * (1 - 0.7594), abs=1e-3)
    for right in (0, 300):  # at the ends it stays between 0 and 1
        low, high = interval(right, 300, "cross-validation")
        assert 0 <= low < high <= 1


GOOD = Estimate(
    method="validation",
    n=100,
    accuracy=0.9,
    low=0.83,
    high=0.94,
    majority="a",
    baseline=0.5,
    recall={"a": 0.9, "b": 0.9},
    counts={"a": 450, "b": 450},
)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "measure it on texts that you kept apart: `vecroute evaluate model/ test.csv`"),
        (
            {"counts": {"a": 450, "b": 4}},
            "too few texts of 'b' (4): label more, then run",
        ),
        (
            {"counts": {f"c{k}": 3 for k in range(7)}},
            "too few texts of 'c0' (3), 'c1' (3), 'c2' (3), 'c3' (3), 'c4' (3) and 2 more classes: label",
        ),
        ({"baseline": 0.85}, "not clearly better than always 'a': label more texts"),
        ({"recall": {"a": 1.0, "b": 0.3}}, "'b' is seldom recognised: label more texts of it"),
    ],
)
def test_advice_names_the_greatest_weakness(changes, advice):
    assert replace(GOOD, **changes).advice("model/").startswith(advice)


def test_with_many_classes_the_worst_are_named():
    recall = {f"class {k}": k / 40 for k in range(40)}
    lines = list(replace(GOOD, recall=recall).lines())
    assert lines[1].startswith("recall, worst 10 of 40 classes: class 0 0.00, class 1 0.03, ")
    assert "class 10" not in lines[1]


@pytest.mark.parametrize("change", [{"low": math.nan}, {"low": -0.1}, {"n": 1.5}, {"recall": {"a": 2.0}}])
def test_impossible_numbers_are_refused(change):
    with pytest.raises(ValueError, match="must be"):
        replace(GOOD, **change)
