"""Vectors of texts in pipelines of scikit-learn: ``transform`` of a fitted classifier."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

import vecroute as vr
from tests.helpers.texts import LABELS, LONG, TEXTS
from tests.helpers.tiny_models import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def fitted(tiny, **options):
    return vr.RoutingClassifier(tiny, max_epochs=1, cache=False, **options).fit(TEXTS, LABELS)


@pytest.mark.parametrize(
    ("head", "options", "k"),
    [
        ("routing", {"n_hid": 3, "d_hid": 5, "n_members": 1}, 15),
        ("routing", {}, 192),
        ("routing", {"n_members": 2}, 128),
        ("mean_all", {}, 48),
        ("probe_4", {}, 64),
    ],
)
def test_the_last_layer_of_the_head_reads_the_vectors(tiny, head, options, k):
    classifier = fitted(tiny, head=head, head_options=options)
    texts = ["good", LONG, *TEXTS[:3]]
    vectors = classifier.transform(texts)
    assert vectors.shape == (5, k)
    assert vectors.dtype == np.float32
    assert classifier.get_feature_names_out().tolist() == [f"routingclassifier{j}" for j in range(k)]
    with torch.no_grad():
        if head == "routing":
            last = classifier.head_.network[-1]
            if (m := classifier.head_.n_members) > 1:
                hidden = torch.from_numpy(vectors).unflatten(1, (m, 4, 16)).movedim(1, 0)  # [m, 5, 4, 16]
                scores = last[-1](hidden)[..., 0].mean(0)  # [5, 2]
            else:
                hidden = torch.from_numpy(vectors).unflatten(1, (last.n_inp, last.d_inp))  # [5, n_hid, d_hid]
                scores = last(hidden)[..., 0]  # [5, 2]
        else:
            scores = classifier.head_.classify(torch.from_numpy(vectors))  # [5, 2]
    margin = (scores[:, 1] - scores[:, 0]).numpy()
    np.testing.assert_allclose(margin, classifier.decision_function(texts), atol=1e-5)


def test_a_classifier_stands_in_a_pipeline(tiny, tmp_path):
    first = vr.RoutingClassifier(tiny, max_epochs=6, lr=0.01, batch_size=16, cache=False)
    pipeline = make_pipeline(first, LogisticRegression())
    assert clone(pipeline).fit(TEXTS, LABELS).score(TEXTS, LABELS) > 0.9
    classifier = pipeline.fit(TEXTS, LABELS)[0]
    assert pipeline[:-1].get_feature_names_out()[-1] == "routingclassifier191"
    framed = classifier.set_output(transform="pandas").transform(TEXTS[:2])
    assert framed.columns.tolist() == classifier.get_feature_names_out().tolist()
    classifier.save_pretrained(tmp_path / "model")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    np.testing.assert_array_equal(again.transform(TEXTS[:2]), framed.to_numpy())
