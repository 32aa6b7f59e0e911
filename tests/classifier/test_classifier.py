"""RoutingClassifier: a scikit-learn estimator that explains itself, saves itself, and survives kill -9."""

import contextlib
import errno
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer

import vecroute as vr
from tests.helpers.guides import run as run_guide
from tests.helpers.paths import ROOT
from tests.helpers.texts import BAD, GOOD, LABELS, LONG, SUBJECTS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.classifier import labels, saving
from vecroute.classifier.fitting import recipe_for
from vecroute.encoders import TextEncoder
from vecroute.training import loop

SOME = ["good", LONG, "a very dull, slow and cold movie", "it feels great!", "not bad film ."]


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    """Store the hidden states of the tests in their own folder."""
    before = os.environ.get("VECROUTE_CACHE")
    os.environ["VECROUTE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield Path(os.environ["VECROUTE_CACHE"])
    del os.environ["VECROUTE_CACHE"]
    if before is not None:
        os.environ["VECROUTE_CACHE"] = before


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


# There are few texts and 16 features, so training must not drop many.
SMALL = {"lr": 1e-2, "drop_inputs": 0.5, "drop_features": 0.0}


@pytest.fixture(scope="module")
def fitted(tiny):
    options = {"max_epochs": 8, "batch_size": 16, "validation_fraction": 0.1}
    return vr.RoutingClassifier(tiny, **options, **SMALL).fit(TEXTS, LABELS)


@pytest.fixture
def quick(tiny):
    """Return a classifier that is fitted quickly, and badly."""
    return vr.RoutingClassifier(tiny, max_epochs=1)


@pytest.fixture
def saved(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_learns(fitted):
    assert fitted.score(TEXTS, LABELS) > 0.9
    assert fitted.classes_.tolist() == ["neg", "pos"]
    assert set(fitted.predict(SOME)) <= {"neg", "pos"}
    assert fitted.n_texts_ == {"train": 108, "validation": 12}
    assert len(fitted.history_) <= 8


def test_probabilities_are_in_the_order_of_classes(fitted):
    probabilities = fitted.predict_proba(SOME)
    assert probabilities.shape == (5, 2)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-12)
    assert (fitted.classes_[probabilities.argmax(1)] == fitted.predict(SOME)).all()
    assert ((fitted.decision_function(SOME) > 0) == (fitted.predict(SOME) == "pos")).all()
    assert roc_auc_score(LABELS, fitted.predict_proba(TEXTS)[:, 1]) > 0.9


def test_predictions_and_explanations_are_the_same_alone_in_a_batch_and_in_any_order(fitted):
    together, backwards = fitted.predict_proba(SOME), fitted.predict_proba(SOME[::-1])[::-1]
    explained, explained_backwards = fitted.explain(SOME), fitted.explain(SOME[::-1])[::-1]
    for k, text in enumerate(SOME):
        alone, why = fitted.predict_proba([text])[0], fitted.explain(text)
        np.testing.assert_allclose(together[k], alone, atol=1e-5)
        np.testing.assert_allclose(backwards[k], alone, atol=1e-5)
        for other in (explained[k], explained_backwards[k]):
            np.testing.assert_allclose(other.values, why.values, atol=1e-5)
            assert (other.offsets == why.offsets).all()
        states = fitted.explain(SOME, of="states")[k]
        np.testing.assert_allclose(states.values, fitted.explain(text, of="states").values, atol=1e-5)
        np.testing.assert_allclose(states.phi, fitted.explain(text, of="states").phi, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"by_depth": True}, {"of": "states"}], ids=["words", "depths", "states"]
)
def test_explanations_add_up_to_the_scores(fitted, options):
    for text in SOME:
        why = fitted.explain(text, **options)
        assert why.of == options.get("of", "words")
        assert why.completeness_error < 1e-5
        assert why.output_names == ["neg", "pos"]
        np.testing.assert_allclose(why.values.sum((0, 1)) + why.base_values, why.scores, atol=1e-4)
        margin = fitted.decision_function([text])[0]
        assert why.scores[1] - why.scores[0] == pytest.approx(margin, abs=1e-4)
        assert why.depths == ([0, 1, 2] if options else ["all depths"])
        assert why.values.shape == (len(why.offsets), len(why.depths), 2)
        assert (why.phi is not None) == (why.of == "states")
        np.testing.assert_allclose(why.probabilities, fitted.predict_proba([text])[0], atol=1e-5)


def test_depths_split_what_words_add(fitted):
    for text in SOME:
        summed, split = fitted.explain(text), fitted.explain(text, by_depth=True)
        np.testing.assert_allclose(split.values.sum(1), summed.values[:, 0], atol=1e-5)
        np.testing.assert_allclose(split.base_values, summed.base_values, atol=1e-5)


def test_explanations_point_into_the_text(fitted):
    why = fitted.explain(LONG)
    assert max(why.chunk) > 2
    assert why.special.sum() == 2 * (max(why.chunk) + 1)
    assert {why.pieces[k] for k in np.flatnonzero(why.special)} == {"[CLS]", "[SEP]"}
    spans = why.offsets[~why.special]
    words = [why.text[start:end] for start, end in spans]
    assert words == LONG.split()


def test_only_the_classes_asked_for_are_explained(fitted):
    every, one = fitted.explain("a good film"), fitted.explain("a good film", classes=["pos"])
    assert one.output_names == ["pos"]
    np.testing.assert_allclose(one.values[..., 0], every.values[..., 1], atol=1e-6)
    every, one = (fitted.explain("a good film", c, of="states") for c in (None, ["pos"]))
    np.testing.assert_allclose(one.values[..., 0], every.values[..., 1], atol=1e-6)
    np.testing.assert_allclose(one.phi[..., 0], every.phi[..., 1], atol=1e-5)
    with pytest.raises(ValueError, match=r"classes must be some of \['neg', 'pos'\], got 'other'"):
        fitted.explain("a good film", classes=["other"])
    with pytest.raises(TypeError, match=r"classes must be a list of some of .*, got 'pos'"):
        fitted.explain("a good film", classes="pos")
    with pytest.raises(ValueError, match="classes must be different"):
        fitted.explain_iter(["a good film"], classes=["pos", "pos"])


def test_parameters_as_scikit_learn_wants_them(tiny):
    classifier = vr.RoutingClassifier(tiny, lr=0.1, head_options={"n_hid": 4})
    again = clone(classifier)
    assert again is not classifier
    assert again.get_params() == classifier.get_params()
    assert again.set_params(lr=0.2, stride=3).get_params()["stride"] == 3
    with pytest.raises(ValueError, match="Invalid parameter 'nonsense'"):
        again.set_params(nonsense=1)
    with pytest.raises(NotFittedError):
        again.predict(["good"])
    with pytest.raises(NotFittedError):
        again.explain("good")


def test_numpy_numbers_are_parameters_like_others(tiny, tmp_path):
    given = {"batch_size": 8, "max_epochs": 1, "random_state": 3, "stride": 1, "max_length": 20}
    as_numpy = {name: np.int64(value) for name, value in given.items()}
    as_numpy |= {"lr": np.float32(0.25), "depths": np.array([0, 2]), "head_options": {"n_hid": np.int64(2)}}
    given |= {"lr": 0.25, "depths": [0, 2], "head_options": {"n_hid": 2}}
    some = vr.RoutingClassifier(tiny, **as_numpy, estimate=False).fit(TEXTS, LABELS)
    same = vr.RoutingClassifier(tiny, **given, estimate=False).fit(TEXTS, LABELS)
    assert some.encoder_ is same.encoder_
    assert np.array_equal(some.predict_proba(SOME), same.predict_proba(SOME))
    some.save_pretrained(tmp_path / "model")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    assert np.array_equal(again.predict_proba(SOME), same.predict_proba(SOME))


@pytest.mark.parametrize(("seed", "error"), [(None, TypeError), (1.5, TypeError), (-1, ValueError)])
def test_the_seed_is_an_int(tiny, seed, error):
    with pytest.raises(error, match="random_state must be an int, at least 0, got"):
        vr.RoutingClassifier(tiny, random_state=seed).fit(TEXTS, LABELS)


def test_a_loaded_encoder_is_shared_by_clones(tiny):
    encoder = TextEncoder(tiny)
    classifier = vr.RoutingClassifier(encoder, max_epochs=1)
    assert clone(classifier).encoder is encoder
    assert classifier.fit(TEXTS, LABELS).encoder_ is encoder


def test_grid_search_cross_validation_and_pipelines(quick):
    search = GridSearchCV(quick, {"lr": [1e-5, 1e-2]}, cv=2, scoring="neg_log_loss").fit(TEXTS, LABELS)
    assert search.best_params_["lr"] in (1e-5, 1e-2)
    assert search.best_estimator_.predict(["good"]).shape == (1,)
    scores = cross_val_score(quick, np.array(TEXTS), np.array(LABELS), cv=2, scoring="roc_auc")
    assert scores.shape == (2,)
    lower = FunctionTransformer(lambda texts: [text.lower() for text in texts])
    pipeline = Pipeline([("lower", lower), ("classify", quick)])
    pipeline.set_params(classify__lr=1e-3).fit(TEXTS, LABELS)
    assert pipeline.score(TEXTS, LABELS) >= 0
    np.testing.assert_allclose(
        pipeline.predict_proba(["GOOD film"]), pipeline["classify"].predict_proba(["good film"])
    )


def numbered_otherwise(x):
    return pd.Series(x, index=range(7, 7 + len(x)))


@pytest.mark.parametrize(
    "convert", [tuple, np.array, lambda x: np.array(x, dtype=object), pd.Series, numbered_otherwise]
)
def test_texts_and_labels_of_many_kinds(quick, convert):
    classifier = quick.fit(convert(TEXTS), convert(LABELS))
    assert classifier.classes_.tolist() == ["neg", "pos"]
    assert classifier.predict(SOME).dtype.kind == "U"
    expected = clone(quick).fit(TEXTS, LABELS)
    assert (classifier.predict_proba(convert(SOME)) == expected.predict_proba(SOME)).all()


def test_labels_keep_their_type(quick):
    for values in ([0, 1], [-1, 1], [False, True], [0.5, 1.5], [7, 3]):
        y = [values[label == "pos"] for label in LABELS]
        classifier = clone(quick).fit(TEXTS, y)
        assert classifier.classes_.tolist() == sorted(values)
        assert set(classifier.predict(SOME).tolist()) <= set(values)
        assert type(classifier.predict(SOME).tolist()[0]) is type(values[0])


def test_many_classes(tiny):
    y = [text.split()[1] + text.split()[3][0] for text in TEXTS]
    classifier = vr.RoutingClassifier(tiny, max_epochs=1).fit(TEXTS, y)
    assert len(classifier.classes_) == len(set(y)) > 10
    assert classifier.predict_proba(SOME).shape == (5, len(set(y)))
    assert classifier.explain("good").values.shape == (3, 1, len(set(y)))


def test_any_number_of_labels(tiny):
    y = [{word for word in text.split() if word in GOOD + BAD + SUBJECTS} for text in TEXTS]
    classifier = vr.RoutingClassifier(tiny, max_epochs=30, multi_label=True, **SMALL).fit(TEXTS, y)
    assert classifier.classes_.tolist() == sorted(GOOD + BAD + SUBJECTS)
    table = classifier.predict(TEXTS)
    assert table.shape == (120, 14)
    assert set(table.flatten().tolist()) <= {0, 1}
    truth = np.array([[label in row for label in classifier.classes_] for row in y])
    assert (table == truth).mean() > 0.8
    probabilities = classifier.predict_proba(SOME)
    assert probabilities.sum(1).max() != pytest.approx(1)
    from_table = vr.RoutingClassifier(tiny, max_epochs=1, multi_label=True)
    assert from_table.fit(TEXTS, truth.astype(int)).classes_.tolist() == list(range(14))
    frame = pd.DataFrame(truth.astype(int), columns=classifier.classes_)
    assert from_table.fit(TEXTS, frame).classes_.tolist() == classifier.classes_.tolist()
    assert from_table.fit(TEXTS, truth.astype(int).tolist()).score(TEXTS, truth) >= 0


def test_the_same_seed_gives_the_same_weights(quick):
    def weights(before=0, **params):
        torch.manual_seed(before)  # other random numbers do not matter
        head = clone(quick).set_params(**params).fit(TEXTS, LABELS).head_
        return torch.cat([p.detach().flatten() for p in head.parameters()])

    assert torch.equal(weights(), weights(before=1))
    assert not torch.equal(weights(), weights(random_state=1))


def test_the_papers_head_and_options(tiny):
    classifier = vr.RoutingClassifier(tiny, head="paper", head_options={"n_hid": 5}, max_epochs=1)
    classifier.fit(TEXTS, LABELS)
    assert [m.n_out for m in classifier.head_.modules() if isinstance(m, vr.VectorRouting)] == [5, 5, 2]
    with pytest.raises(ValueError, match=r"head must be one of 'routing', 'wide', 'paper', .*got 'none'"):
        vr.RoutingClassifier(tiny, head="none").fit(TEXTS, LABELS)


@pytest.mark.parametrize("head", vr.heads.HEADS)
def test_training_drops_inputs_and_features_only_for_heads_that_choose(tiny, head, monkeypatch):
    """Heads of means or of one position drop nothing by default. Given options apply to any head."""
    shares, inputs, features = [], loop.drop_inputs, loop.drop_features
    monkeypatch.setattr(loop, "drop_inputs", lambda *given: shares.append(given[2]) or inputs(*given))
    monkeypatch.setattr(loop, "drop_features", lambda *given: shares.append(given[1]) or features(*given))
    usual = (0.0, 0.0) if head in ("mean_last", "mean_all", "scalar_mix", "cls") else (0.8, 0.3)
    for asked, expected in (((None, None), usual), ((0.1, None), (0.1, usual[1])), ((0.0, 0.2), (0.0, 0.2))):
        classifier = vr.RoutingClassifier(tiny, head=head, max_epochs=1, batch_size=64)
        classifier.set_params(calibrate=False, estimate=False)
        classifier.set_params(drop_inputs=asked[0], drop_features=asked[1])
        clone(classifier).fit(TEXTS[:30], LABELS[:30])
        assert tuple(shares) == expected
        shares.clear()


def test_hidden_states_are_computed_once_for_all_fits(tiny, tmp_path, monkeypatch):
    quick = vr.RoutingClassifier(tiny, max_epochs=1, cache=tmp_path / "here")
    first = quick.fit(TEXTS, LABELS)
    assert list((tmp_path / "here").glob("*/*.safetensors"))
    # From here on, any use of the encoder fails.
    monkeypatch.setattr(TextEncoder, "_run", None)
    second = clone(quick).set_params(random_state=1).fit(TEXTS, LABELS)
    monkeypatch.undo()
    assert second.predict(SOME).shape == first.predict(SOME).shape


def test_without_a_cache_or_where_it_cannot_be(tiny, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    kept = vr.RoutingClassifier(tiny, max_epochs=1, cache=False).fit(TEXTS, LABELS)
    vr.RoutingClassifier(tiny, max_epochs=1, cache=tmp_path / "file").fit(TEXTS, LABELS)
    assert "no cache of hidden states" in caplog.text
    assert kept.predict(SOME).shape == (5,)


def test_validation_of_ones_own(tiny):
    classifier = vr.RoutingClassifier(tiny, max_epochs=1)
    classifier.fit(TEXTS[:100], LABELS[:100], validation=(TEXTS[100:], LABELS[100:]))
    assert classifier.n_texts_ == {"train": 100, "validation": 20}


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_label_of_validation_alone_is_refused(tiny, multi_label):
    new = [*LABELS[100:118], "typo", "typo"]
    y, y_valid = ([[label] for label in y] if multi_label else y for y in (LABELS[:100], new))
    classifier = vr.RoutingClassifier(tiny, max_epochs=1, multi_label=multi_label)
    with pytest.raises(ValueError, match="validation must have labels of y alone, got 'typo'"):
        classifier.fit(TEXTS[:100], y, validation=(TEXTS[100:], y_valid))


def test_a_label_of_one_text_of_validation_alone_is_refused(tiny):
    with pytest.raises(ValueError, match="validation must have labels of y alone, got 'typo'"):
        vr.RoutingClassifier(tiny).fit(
            TEXTS[:10], ["pos", "neg"] * 5, validation=(["a", "b"], ["typo", "pos"])
        )


@pytest.mark.parametrize(
    ("n", "n_valid", "message"),
    [
        (9, 3, "y must be one label for each of the 10 texts in X, got 9"),
        (10, 3, "validation must have one label for each of its 2 texts, got 3"),
    ],
)
def test_labels_and_texts_of_validation_are_counted_on_their_own(tiny, n, n_valid, message):
    y = ["pos", "neg"] * 5
    with pytest.raises(ValueError, match=message):
        vr.RoutingClassifier(tiny).fit(TEXTS[:10], y[:n], validation=(["a", "b"], y[:n_valid]))


@pytest.mark.parametrize("kind", [list, np.array, lambda rows: pd.DataFrame(rows, columns=["good", "long"])])
def test_tables_of_labels_for_training_and_validation(kind):
    rows, valid = [[1, 0], [0, 1], [1, 1]], [[0, 0], [1, 0]]
    found = labels.check_label_sets(labels.joined(kind(rows), kind(valid), 3, 2), 5, n_train=3)
    assert found.targets.tolist() == [*rows, *valid]
    assert found.classes.tolist() == labels.check_label_sets(kind(rows), 3).classes.tolist()


def test_tables_of_labels_have_the_same_columns():
    y, other = pd.DataFrame([[1, 0]], columns=["a", "b"]), pd.DataFrame([[1, 0]], columns=["b", "a"])
    with pytest.raises(ValueError, match=r"the columns of labels of y, \['a', 'b'\], got \['b', 'a'\]"):
        labels.joined(y, other, 1, 1)


def test_the_split_keeps_the_share_of_every_class():
    found = labels.check_labels(["a"] * 80 + ["b"] * 20, 100)
    train, valid = labels.split(found, 0.1, 0, False)
    assert (len(train), len(valid)) == (90, 10)
    assert sorted(train + valid) == list(range(100))
    assert sum(k >= 80 for k in valid) == 2
    assert labels.split(found, 0.0, 0, False)[1] == []
    # Without a given fraction, few texts are all used for training, because validation would decide nothing.
    assert labels.split(found, None, 0, False)[1] == []
    assert labels.split(labels.check_labels(["a", "b", "b"] * 666, 1998), None, 0, False)[1] == []
    assert len(labels.split(labels.check_labels(["a", "b"] * 1000, 2000), None, 0, False)[1]) == 200
    assert labels.split(labels.check_labels(["a", "a", "b", "b"] * 5, 20), 0.1, 0, False)[1] == []


def test_few_texts_want_more_weight_decay():
    decays = [recipe_for(vr.RoutingClassifier(), n).weight_decay for n in (10, 250, 1000, 4000, 10**6)]
    assert decays == [8.0, 8.0, 2.0, 0.5, 0.5]
    # AdamW multiplies by lr: with a greater lr, the weights still shrink by the same share in each step.
    decays = [recipe_for(vr.RoutingClassifier(lr=lr), 10).weight_decay for lr in (1e-4, 4e-3, 1.0)]
    assert decays == [8.0, 2.0, 0.5]
    assert recipe_for(vr.RoutingClassifier(weight_decay=0.1), 10).weight_decay == 0.1


def test_few_texts_want_smoother_labels():
    smoothing = [recipe_for(vr.RoutingClassifier(), n).label_smoothing for n in (10, 200, 1000, 10**6)]
    assert smoothing == pytest.approx([0.1, 0.1, 0.02, 2e-5])
    assert recipe_for(vr.RoutingClassifier(label_smoothing=0.3), 10).label_smoothing == 0.3


def test_class_weights():
    found = labels.check_labels(["a"] * 6 + ["b"] * 2, 8)
    assert labels.class_weights(None, found, False) is None
    torch.testing.assert_close(labels.class_weights("balanced", found, False), torch.tensor([8 / 12, 8 / 4]))
    torch.testing.assert_close(labels.class_weights({"b": 3}, found, False), torch.tensor([1.0, 3.0]))
    with pytest.raises(ValueError, match=r"class_weight must have labels from \['a', 'b'\], got 'c'"):
        labels.class_weights({"c": 3}, found, False)
    with pytest.raises(ValueError, match="class_weight must be None, 'balanced' or a dict, got 'some'"):
        labels.class_weights("some", found, False)


@pytest.mark.parametrize(
    ("texts", "y", "error", "message"),
    [
        ([], [], ValueError, "X must be a list of texts, got none"),
        ("good", ["a"], TypeError, "X must be a list of texts, got one string: put it in a list"),
        (7, ["a"], TypeError, "X must be a list of texts, got int"),
        (["a", float("nan")], ["a", "b"], ValueError, r"row 1 is missing \(nan\)"),
        (["a", None], ["a", "b"], ValueError, r"row 1 is missing \(None\)"),
        (pd.Series(["a", None]), ["a", "b"], ValueError, "row 1 is missing"),
        (["a", " \n"], ["a", "b"], ValueError, "row 1 is empty"),
        (["a", 3], ["a", "b"], TypeError, r"row 1 is 3 \(int\)"),
        (["a", "b"], ["a"], ValueError, "y must be one label for each of the 2 texts in X, got 1"),
        (["a", "b"], ["x", "x"], ValueError, "y must have two classes or more, all have the label x"),
        (["a"] * 3, ["x", "x", "y"], ValueError, "two examples or more of each class, got one of: y"),
        (["a"] * 4, ["x", None, "x", "y"], ValueError, r"row 1 is missing \(None\)"),
        (["a"] * 4, [1.0, float("nan"), 1.0, 0.0], ValueError, r"row 1 is missing \(nan\)"),
        (["a"] * 4, ["x", 1, "x", 1], ValueError, "y must be labels of one type"),
        (["a"] * 2, [[0, 1], [1, 0]], ValueError, r"got an array \[2, 2\]; for several labels at once"),
        (np.array([["a", "b"], ["c", "d"]]), ["x", "y"], ValueError, r"got an array \[2, 2\]"),
    ],
)  # fmt: skip
def test_bad_input(quick, texts, y, error, message):
    if y == ["x", 1, "x", 1]:
        y = np.array(y, dtype=object)
    with pytest.raises(error, match=message):
        quick.fit(texts, y)
    assert not hasattr(quick, "classes_")


def test_bad_input_to_predict(fitted):
    with pytest.raises(ValueError, match="row 1 is empty"):
        fitted.predict(["good", ""])
    with pytest.raises(TypeError, match="got one string"):
        fitted.predict_proba("good")


def test_a_checkpoint_belongs_to_its_texts(quick, tmp_path, monkeypatch):
    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    quick.set_params(checkpoint=tmp_path / "checkpoint", max_epochs=2, validation_fraction=0.1)
    monkeypatch.setattr(loop.Trainer, "validate", stop)
    with pytest.raises(KeyboardInterrupt):
        quick.fit(TEXTS, LABELS)
    monkeypatch.undo()
    assert (tmp_path / "checkpoint").exists()
    with pytest.raises(ValueError, match="belongs to a run with other data or settings"):
        quick.fit([*TEXTS[:-1], "another text"], LABELS)
    assert quick.fit(TEXTS, LABELS).predict(["good"]).size == 1
    assert (tmp_path / "checkpoint").exists()  # until the classifier is saved
    quick.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "checkpoint").exists()


def test_no_state_of_the_cache_changes_the_weights(tiny, tmp_path):
    """The cache may be empty, full, missing, filled by another fit, or damaged. Only the seed matters."""

    def weights(cache):
        classifier = vr.RoutingClassifier(tiny, max_epochs=1, batch_size=16, cache=cache).fit(TEXTS, LABELS)
        return torch.cat([p.detach().flatten() for p in classifier.head_.parameters()])

    empty = weights(tmp_path / "cache")
    full = weights(tmp_path / "cache")
    (segment,) = (tmp_path / "cache").glob("*/*.safetensors")
    data = bytearray(segment.read_bytes())
    data[-3000] ^= 4
    segment.write_bytes(data)
    damaged = weights(tmp_path / "cache")
    vr.RoutingClassifier(tiny, max_epochs=1, cache=tmp_path / "other").fit(
        [f"{text} !" for text in TEXTS] + TEXTS[::3], LABELS + LABELS[::3]
    )
    for other in (full, damaged, weights(False), weights(tmp_path / "other")):
        assert torch.equal(other, empty)


def test_it_comes_back_from_a_folder(fitted, saved):
    assert sorted(path.name for path in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = vr.RoutingClassifier.from_pretrained(saved)
    assert (again.predict_proba(SOME) == fitted.predict_proba(SOME)).all()
    assert again.classes_.tolist() == fitted.classes_.tolist()
    assert (again.explain(LONG).values == fitted.explain(LONG).values).all()
    assert {name.split(".")[0] for name in load_file(saved / "model.safetensors")} == {"network"}
    card = (saved / "README.md").read_text()
    assert "108" in card
    assert f"{fitted.validation_accuracy_:.3f} on 12 texts" in card
    assert fitted.encoder_.weights_sha256 in card


def test_a_head_that_is_made_otherwise_now_is_told(saved, monkeypatch):
    monkeypatch.setitem(vr.heads.HEADS, "routing", lambda **options: vr.RoutingHead(**options, n_hid=3))
    with pytest.raises(ValueError, match=r"the head in .*model, saved by vecroute .*, is not the one that"):
        vr.RoutingClassifier.from_pretrained(saved)


def test_options_of_the_encoder_come_back_too(tiny, tmp_path):
    options = {"depths": [0, -1], "stride": 4, "max_length": 20, "special_tokens": False}
    first = vr.RoutingClassifier(tiny, max_epochs=1, head="paper", head_options={"n_hid": 4}, **options)
    first.fit(TEXTS, [int(label == "pos") for label in LABELS]).save_pretrained(tmp_path / "model")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    assert again.encoder_.key == first.encoder_.key
    assert (again.predict_proba(SOME) == first.predict_proba(SOME)).all()
    assert again.predict(SOME).dtype == np.int64


def test_a_folder_that_exists_stays_as_it_is(fitted, saved):
    before = (saved / "config.json").read_bytes()
    with pytest.raises(ValueError, match="model exists: choose another folder, or remove it first"):
        fitted.save_pretrained(saved)
    assert (saved / "config.json").read_bytes() == before
    fitted.save_pretrained(saved, overwrite=True)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["model"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_half_written_stays_behind(fitted, saved, monkeypatch, overwrite):
    write = saving.write_file

    def full(path, data):
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    monkeypatch.setattr(saving, "write_file", full)
    folder = saved if overwrite else saved.parent / "other"
    with pytest.raises(OSError, match="No space left on device"):
        fitted.save_pretrained(folder, overwrite=overwrite)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["model"]
    assert vr.RoutingClassifier.from_pretrained(saved).predict(["good"]).shape == (1,)


def rewrite(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no classifier: config.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (rewrite("config.json", lambda data: data[:-40]), "config.json in .* is damaged"),
        (rewrite("config.json", lambda data: b"{}"), "config.json in .* is damaged or not from vecroute"),
        (rewrite("config.json", lambda data: data.replace(b"neg", b"bad")), "config.json in .* was changed"),
        (rewrite("model.safetensors", lambda data: data[:-40]), "model.safetensors in .* is damaged"),
        (rewrite("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])), "or was changed"),
        (rewrite("model.safetensors", lambda data: b""), "model.safetensors in .* is damaged"),
    ],
)  # fmt: skip
def test_damage_is_noticed(saved, damage, message):
    damage(saved)
    with pytest.raises(ValueError, match=message):
        vr.RoutingClassifier.from_pretrained(saved)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(ValueError, match="is not a folder with a classifier"):
        vr.RoutingClassifier.from_pretrained(tmp_path / "nothing")


def test_another_encoder_is_noticed(tmp_path):
    folder = save_tiny(tmp_path / "tiny")
    vr.RoutingClassifier(folder, max_epochs=1).fit(TEXTS, LABELS).save_pretrained(tmp_path / "model")
    assert vr.RoutingClassifier.from_pretrained(tmp_path / "model").predict(["good"]).size == 1
    moved = save_tiny(tmp_path / "moved")
    assert vr.RoutingClassifier.from_pretrained(tmp_path / "model", encoder=moved).predict(["good"]).size == 1
    save_tiny(tmp_path / "tiny", seed=1)
    with pytest.raises(ValueError, match=r"is not the one that .*model was fitted with: its weights"):
        vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"encoder '.*nowhere' could not be loaded"):
        vr.RoutingClassifier.from_pretrained(tmp_path / "model", encoder=str(tmp_path / "nowhere"))


def test_pickled_it_finds_its_encoder_again(fitted):
    data = pickle.dumps(fitted)
    assert len(data) < 200_000
    assert (pickle.loads(data).predict_proba(SOME) == fitted.predict_proba(SOME)).all()


def test_pickled_it_can_be_saved(fitted, tmp_path):
    pickle.loads(pickle.dumps(fitted)).save_pretrained(tmp_path / "model")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    assert (again.predict_proba(SOME) == fitted.predict_proba(SOME)).all()


def test_a_document_of_100000_characters(fitted):
    text = (LONG * 101)[:100_000]
    others = fitted.predict_proba(["good", text, "bad"])
    np.testing.assert_allclose(others[1], fitted.predict_proba([text])[0], atol=1e-5)
    why = fitted.explain(text)
    assert why.completeness_error < 1e-4
    assert why.offsets.max() == len(text.rstrip())


def resident(key: str) -> float:
    """Return the resident memory of this process in MB, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak of memory")
def test_long_documents_take_bounded_memory(quick):
    """The hidden states of 26,000 positions take 5 MB. All pairs of positions would take 2700 MB."""
    texts = [(LONG * 101)[k : 100_000 + k] for k in range(8)]
    quick.fit([*TEXTS, *texts[:2]], [*LABELS, "pos", "neg"])
    peaks = []
    for use in (lambda: quick.predict_proba(texts[:1]), lambda: quick.explain(texts[0])):
        use()  # one-time setup
    for use in (lambda: quick.predict_proba(texts), lambda: quick.explain(texts[0])):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        use()
        peaks.append(resident("VmHWM") - before)
    assert max(peaks) < 300, peaks


# This program forks a process that fits for each name it reads, and prints when a fit begins and ends.
FIT = """
import json, os, sys, time
import torch
import vecroute as vr
from vecroute.classifier.parts import encoder_for
from vecroute.training import loop
loop.CHECKPOINT_SECONDS = 0.0
torch.set_num_threads(1)
encoder, data, folder = sys.argv[1:]
texts, labels = json.load(open(data))
encoder_for(vr.RoutingClassifier(encoder), torch.device("cpu"))  # once for all
for name in map(str.strip, sys.stdin):
    if pid := os.fork():
        os.waitpid(pid, 0)
        print("ended", flush=True)
        continue
    print("fitting", os.getpid(), flush=True)
    start, place = time.monotonic(), f"{folder}/{name}"
    options = {"max_epochs": 12, "batch_size": 8, "mixup": 0.2, "cache": f"{place}.cache"}
    fitted = vr.RoutingClassifier(encoder, checkpoint=f"{place}.checkpoint", **options).fit(texts, labels)
    fitted.save_pretrained(place)
    print("done", time.monotonic() - start, flush=True)
    os._exit(0)
"""


@pytest.fixture
def fits(tiny, tmp_path):
    """Return a function that starts a fit in a new process, and returns the process id when it has begun."""
    (tmp_path / "data.json").write_text(json.dumps([TEXTS, LABELS]))
    command = [sys.executable, "-c", FIT, tiny, str(tmp_path / "data.json"), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()


def start(fits, name):
    fits.stdin.write(f"{name}\n")
    word, pid = fits.stdout.readline().split()
    assert word == "fitting"
    return int(pid)


def end(fits):
    """Wait for the end of a process, and return how long the fit took, or None if it did not finish."""
    said = fits.stdout.readline().split()
    if said == ["ended"]:
        return None
    assert fits.stdout.readline() == "ended\n"
    return float(said[1])


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments_changes_nothing(fits, tmp_path, kills):
    start(fits, "undisturbed")
    seconds = end(fits)
    moments, names = random.Random(kills), ["killed 0"]
    for kill in range(kills):
        pid, checkpoint = start(fits, names[-1]), tmp_path / f"{names[-1]}.checkpoint"
        while kill == 0 and not checkpoint.exists():  # the first run leaves a checkpoint
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.7) * seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if end(fits) is not None:  # it finished before the kill
            names.append(f"killed {kill + 1}")
    start(fits, names[-1])
    assert end(fits) is not None
    expected = load_file(tmp_path / "undisturbed/model.safetensors")
    for name in names:
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert not (tmp_path / f"{name}.checkpoint").exists()


def test_minilm_learns_from_forty_sentences():
    """Use the real encoder, which comes with the extra ``demo``. The tests install it."""
    films = ["this film", "the story", "her acting", "the ending", "every scene"]
    praise = ["was wonderful", "moved me to tears of joy", "is a masterpiece", "shines with wit"]
    blame = ["was awful", "bored me to death", "is a disaster", "falls apart"]
    texts = [f"{film} {words} ." for film in films for words in praise + blame]
    y = ["good" if any(text.endswith(f"{words} .") for words in praise) else "bad" for text in texts]
    classifier = vr.RoutingClassifier().fit(texts, y)
    assert (classifier.predict(["an enchanting movie", "a terrible waste of time"]) == ["good", "bad"]).all()
    why = classifier.explain("an enchanting movie").aggregate("word")
    assert re.search("enchanting", why.top(3, "good")[0].piece + why.top(3, "good")[1].piece)


@pytest.mark.slow
def test_the_guide_prints_what_it_says(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed, expected = run_guide((ROOT / "docs/classifier.md").read_text(), capsys)
    assert len(expected) == 8
    assert printed == expected


def test_a_text_without_any_token(tiny):
    """Its only character is an accent, which the tokenizer drops."""
    texts, y = [*TEXTS[::5], "\u0301"], [*LABELS[::5], LABELS[0]]
    options = {"special_tokens": False, "batch_size": 1, "max_epochs": 1, "estimate": False}
    clf = vr.RoutingClassifier(tiny, calibrate=False, **options).fit(texts, y)
    (alone,), (_, together) = clf.predict_proba(["\u0301"]), clf.predict_proba(["good", "\u0301"])
    np.testing.assert_allclose(alone, together, rtol=1e-5)
    for kind in ({"of": "words"}, {"of": "states"}, {"samples": 2}):
        for why in (clf.explain("\u0301", **kind), clf.explain(["good", "\u0301"], **kind)[1]):
            np.testing.assert_allclose(why.probabilities, alone, rtol=1e-5)
            np.testing.assert_allclose(why.values.sum((0, 1)) + why.base_values, why.scores, atol=1e-5)
