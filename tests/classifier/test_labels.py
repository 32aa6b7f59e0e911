"""Labels of every shape are checked before any work starts."""

import numpy as np
import pytest

import vecroute as vr
from vecroute.classifier.labels import check_label_sets, check_labels, class_weights
from vecroute.explain.classes import class_numbers
from vecroute.explain.samples import check_samples


def test_a_column_of_labels_is_a_list_of_labels():
    found = check_labels(np.array([["a"], ["b"], ["a"], ["b"]]), 4)
    assert found.classes.tolist() == ["a", "b"]
    assert found.targets.argmax(-1).tolist() == [0, 1, 0, 1]


def test_labels_of_a_generator():
    found = check_labels((label for label in "abab"), 4)
    assert found.classes.tolist() == ["a", "b"]
    assert found.targets.argmax(-1).tolist() == [0, 1, 0, 1]


def test_sets_of_labels():
    words = check_label_sets([["good", "dull"], [], ["good"]], 3)
    assert words.classes.tolist() == ["dull", "good"]
    assert words.classes.dtype.kind == "U"
    assert words.targets.tolist() == [[1, 1], [0, 0], [0, 1]]
    numbers = check_label_sets([{3, 1}, {1}, set()], 3)
    assert numbers.classes.tolist() == [1, 3]
    table = check_label_sets([[0, 1], [1, 1], [0, 0]], 3)
    assert table.targets.tolist() == [[0, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (["good", "dull"], "must be a collection of labels for each text if multi_label=True"),
        ([["good"], [None]], "row 1 has a missing label"),
        (np.array([[0, 2], [1, 0]]), "must be a table of zeros and ones"),
        ([[], []], "must have at least one label, got none"),
        ([["good"]], "2"),
    ],
    ids=["words", "missing", "two", "none", "too few"],
)
def test_sets_that_are_none_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        check_label_sets(y, 2)


def test_weights_of_several_labels_are_not_balanced():
    labels = check_label_sets([["good"], ["dull"]], 2)
    assert class_weights({"good": 2.0}, labels, True).tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="must be None or a dict if multi_label=True, got 'balanced'"):
        class_weights("balanced", labels, True)


def test_texts_without_labels_are_not_evaluated():
    with pytest.raises(TypeError, match="y must be a label for each text, got None"):
        vr.RoutingClassifier().evaluate(["a"])


def test_several_labels_are_not_evaluated_as_one():
    with pytest.raises(ValueError, match="got a classifier with multi_label=True"):
        vr.RoutingClassifier(multi_label=True).evaluate(["a"], [["good"]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3,), "samples must be an even number, 0 for none, got 3"),
        ((True,), "got True"),
        ((2, "states"), "samples must be 0 unless of='words', got 2 with of='states'"),
        ((2, "words", True), "samples must be 0 for images, got 2"),
        ((2, "words", False, True), "samples must be 0 with by_depth=True, got 2"),
    ],
    ids=str,
)
def test_samples_where_there_can_be_none(given, message):
    check_samples(0, *given[1:])
    with pytest.raises(ValueError, match=message):
        check_samples(*given)


def test_samples_may_be_a_numpy_number():
    check_samples(np.int64(4))


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        ("pos", TypeError, r"classes must be a list of some of \['neg', 'pos'\], got 'pos'"),
        (1, TypeError, "a list of some of .*, got 1"),
        (["pos", "other"], ValueError, r"classes must be some of \['neg', 'pos'\], got 'other'"),
        ([], ValueError, "classes must be at least one of .*, got none"),
        (["pos", "pos"], ValueError, r"classes must be different, got \['pos', 'pos'\]"),
        ([1, "pos"], ValueError, r"classes must be different, got \['pos', 'pos'\]"),
        ([True], ValueError, "got True"),
        ([2], ValueError, "got 2"),
        ([-1], ValueError, "got -1"),
    ],
    ids=str,
)
def test_classes_that_cannot_be_explained(classes, error, message):
    with pytest.raises(error, match=message):
        class_numbers(classes, ["neg", "pos"], by_number=True)


def test_classes_by_label_and_by_number():
    assert class_numbers(None, ["neg", "pos"]) is None
    assert class_numbers(np.array(["pos", "neg"]), ["neg", "pos"]) == [1, 0]
    assert class_numbers([np.int64(1), "neg"], ["neg", "pos"], by_number=True) == [1, 0]
    assert class_numbers([7, 3], [3, 7]) == [1, 0]  # labels of a classifier may be numbers
    with pytest.raises(ValueError, match="got 0"):
        class_numbers([0], [3, 7])
