"""Hugging Face datasets in fit, predict and score: the same as their columns."""

import datasets
import numpy as np
import pytest

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny

NAMES = ["pos", "neg"]  # not in alphabetical order


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def dataset(texts=TEXTS, labels=LABELS, text="text", label="label", **more):
    features = {text: datasets.Value("string"), label: datasets.ClassLabel(names=NAMES)}
    features |= dict.fromkeys(more, datasets.Value("string"))
    numbers = [NAMES.index(one) if one in NAMES else one for one in labels]
    return datasets.Dataset.from_dict({text: texts, label: numbers, **more}, datasets.Features(features))


def fit(tiny, *given, **more):
    return vr.RoutingClassifier(tiny, max_epochs=2, lr=0.01, cache=False).fit(*given, **more)


def test_a_dataset_is_its_columns(tiny):
    expected, found = fit(tiny, TEXTS, LABELS), fit(tiny, dataset())
    assert found.classes_.tolist() == ["neg", "pos"]
    np.testing.assert_array_equal(found.predict_proba(dataset()), expected.predict_proba(TEXTS))
    assert found.predict(dataset(text="words")).tolist() == expected.predict(TEXTS).tolist()
    assert found.score(dataset()) == expected.score(TEXTS, LABELS)
    assert fit(tiny, dataset(text="words", label="stars")).score(dataset()) == found.score(dataset())
    assert found.transform(dataset()).shape == (120, 192)


def test_splits_are_learned_from_validated_on_and_predicted(tiny):
    splits = datasets.DatasetDict(
        train=dataset(TEXTS[:100], LABELS[:100]),
        validation=dataset(TEXTS[100:], LABELS[100:]),
        test=dataset(),
    )
    expected = fit(tiny, TEXTS[:100], LABELS[:100], validation=(TEXTS[100:], LABELS[100:]))
    found = fit(tiny, splits)
    assert found.n_texts_ == {"train": 100, "validation": 20}
    assert found.history_ == expected.history_
    predicted = found.predict(splits)
    assert {name: len(labels) for name, labels in predicted.items()} == {
        "train": 100,
        "validation": 20,
        "test": 120,
    }
    assert predicted["test"].tolist() == expected.predict(TEXTS).tolist()
    assert found.predict_proba(splits)["validation"].shape == (20, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dataset(text="a", b=TEXTS), r"one column of texts, got the columns \['a', 'label', 'b'\]"),
        (lambda: dataset(labels=[-1] * 120), "must have a label for each text, row 0 has -1"),
        (lambda: datasets.DatasetDict(test=dataset()), r"X must have the split 'train', got \['test'\]"),
        (lambda: dataset().remove_columns("label"), "one column of labels"),
    ],
)  # fmt: skip
def test_datasets_that_cannot_be(tiny, make, message):
    with pytest.raises(ValueError, match=message):
        fit(tiny, make())


def test_labels_are_needed_without_a_dataset(tiny):
    with pytest.raises(TypeError, match="y must be a label for each text, got None"):
        fit(tiny, TEXTS)
