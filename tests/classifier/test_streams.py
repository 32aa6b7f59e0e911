"""Any number of texts, from lists, generators, data frames and streams: in order, and some at a time."""

import itertools

import datasets
import numpy as np
import pandas as pd
import pytest

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.classifier import explaining, predicting


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    tiny = save_tiny(tmp_path_factory.mktemp("tiny"))
    return vr.RoutingClassifier(tiny, max_epochs=2, cache=False, estimate=False).fit(TEXTS, LABELS)


@pytest.fixture
def small_windows(monkeypatch):
    """About three texts at a time."""
    for module in (predicting, explaining):
        monkeypatch.setattr(module, "WINDOW_CHARACTERS", 60)


def rows():
    for text in TEXTS:
        yield {"text": text, "label": "pos"}


SOURCES = {
    "list": lambda: TEXTS,
    "array": lambda: np.array(TEXTS),
    "generator": lambda: (text for text in TEXTS),
    "frame": lambda: pd.DataFrame({"number": range(len(TEXTS)), "words": TEXTS}, index=range(7, 127)),
    "named frame": lambda: pd.DataFrame({"text": TEXTS, "label": LABELS}),
    "frame of one column": lambda: pd.DataFrame({0: TEXTS}),
    "dataset": lambda: datasets.Dataset.from_dict({"text": TEXTS}),
    "streamed dataset": lambda: datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset(),
    "streamed rows": lambda: datasets.IterableDataset.from_generator(rows),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_in_order(fitted, source, small_windows):
    expected = fitted.predict_proba(TEXTS)
    np.testing.assert_allclose(fitted.predict_proba(SOURCES[source]()), expected, atol=1e-6)
    assert fitted.predict(SOURCES[source]()).tolist() == fitted.predict(TEXTS).tolist()
    assert fitted.transform(SOURCES[source]()).shape[0] == len(TEXTS)
    assert [why.text for why in fitted.explain_iter(SOURCES[source]())] == TEXTS


@pytest.mark.parametrize("options", [{}, {"of": "states"}, {"samples": 2}, {"by_depth": True}], ids=str)
def test_windows_change_no_explanation(fitted, options, small_windows):
    for text, why in zip(TEXTS[:8], fitted.explain_iter(TEXTS[:8], **options), strict=True):
        alone = fitted.explain(text, **options)
        assert why.output_names == alone.output_names
        np.testing.assert_allclose(why.values, alone.values, atol=1e-5)
        np.testing.assert_allclose(why.probabilities, alone.probabilities, atol=1e-6)


def test_a_stream_is_read_some_at_a_time(fitted, small_windows):
    read = itertools.count()
    endless = (TEXTS[next(read) % len(TEXTS)] for _ in itertools.count())
    found = fitted.explain_iter(endless)
    assert [next(found).text for _ in range(10)] == TEXTS[:10]
    assert next(read) < 20


def test_arguments_are_checked_before_anything_is_read(fitted):
    for wrong in ({"classes": ["no such"]}, {"of": "letters"}, {"samples": 3}, {"classes": []}):
        with pytest.raises(ValueError, match="must be"):
            fitted.explain_iter(iter(()), **wrong)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: iter(()), ValueError, "X must have texts, got none"),
        (lambda: iter([*TEXTS, " "]), ValueError, "row 120 is empty"),
        (lambda: iter([*TEXTS, 3]), TypeError, r"row 120 is 3 \(int\)"),
        (lambda: datasets.IterableDataset.from_generator(lambda: iter(())), ValueError, "got none"),
        (lambda: pd.DataFrame({"a": ["x"], "b": ["y"]}), ValueError, r"one column of texts, got the columns"),
        (lambda: pd.DataFrame({"text": []}), ValueError, "got none"),
        (lambda: 3, TypeError, "got int"),
    ],
)  # fmt: skip
def test_bad_streams(fitted, make, error, message, small_windows):
    with pytest.raises(error, match=message):
        fitted.predict(make())
    with pytest.raises(error, match=message):
        list(fitted.explain_iter(make()))


def test_a_frame_has_labels_too(fitted):
    frame = pd.DataFrame({"text": TEXTS, "label": LABELS})
    assert fitted.score(frame) == fitted.score(TEXTS, LABELS)
    assert fitted.evaluate(frame) == fitted.evaluate(iter(TEXTS), LABELS)
    assert fitted.evaluate(frame)["n"] == 120
    assert fitted.evaluate(frame)["accuracy"] == fitted.score(frame)
    again = vr.RoutingClassifier(fitted.encoder, max_epochs=2, cache=False, estimate=False).fit(frame)
    np.testing.assert_array_equal(again.predict_proba(TEXTS), fitted.predict_proba(TEXTS))
    with pytest.raises(ValueError, match="one label for each of the 120 texts in X, got 119"):
        fitted.evaluate(TEXTS, LABELS[:-1])


def test_progress_is_shown_when_asked_for(fitted, capsys, monkeypatch):
    monkeypatch.setattr(fitted, "verbose", True)
    fitted.predict(iter(TEXTS))
    assert "classifying" in capsys.readouterr().err
    list(fitted.explain_iter(TEXTS))
    assert "120/120" in capsys.readouterr().err
    fitted.predict(TEXTS[:3])  # few texts need no bar
    assert capsys.readouterr().err == ""
