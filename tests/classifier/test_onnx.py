"""ONNX graphs of whole classifiers and of heads give the probabilities of the classifier."""

import numpy as np
import onnxruntime
import pytest
import torch

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.classifier import onnx

LONG = [" ".join(TEXTS[k : k + 1 + k % 6])[: 3 * (k + 1)].strip() for k in range(100)]


def fit(folder, kind="bert", **options):
    options = {"max_epochs": 1, "cache": False, "estimate": False} | options
    return vr.RoutingClassifier(save_tiny(folder, kind), **options).fit(TEXTS, LABELS)


def probabilities(classifier, path, texts):
    """Run the graph as a user does: the tokenizer, then onnxruntime."""
    session, found = onnxruntime.InferenceSession(path), []
    for start in range(0, len(texts), 7):
        tokens = classifier.encoder_.tokenizer(
            texts[start : start + 7],
            padding=True,
            truncation=True,
            max_length=classifier.encoder_.max_length,
            return_tensors="np",
            return_special_tokens_mask=True,
        )
        given = {one.name: tokens[one.name].astype(np.int64) for one in session.get_inputs()}
        found.append(session.run(["probabilities"], given)[0])
    return np.concatenate(found)  # [n, n_cls]


def short_enough(classifier, texts):
    return [text for text in texts if len(classifier.encoder_.tokenize([text])[0].chunks) == 1]


def test_a_whole_classifier_with_a_temperature(tmp_path):
    classifier = fit(tmp_path / "encoder")
    classifier.temperature_ = 1.7
    classifier.to_onnx(tmp_path / "all.onnx")
    texts = short_enough(classifier, LONG)
    expected = classifier.predict_proba(texts)
    np.testing.assert_allclose(
        probabilities(classifier, tmp_path / "all.onnx", texts), expected, atol=1e-5, rtol=0
    )
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["all.onnx"]


@pytest.mark.slow
def test_the_head_alone(tmp_path):
    classifier = fit(tmp_path / "encoder")
    classifier.to_onnx(tmp_path / "head.onnx", part="head")
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    for hidden, text in zip(classifier.encoder_.encode(LONG[:5]), LONG[:5], strict=True):
        given = {"hidden_states": hidden[None].numpy(), "input_mask": np.ones((1, len(hidden)), bool)}
        found = session.run(["probabilities"], given)[0]  # [1, n_cls]
        np.testing.assert_allclose(found, classifier.predict_proba([text]), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("roberta", {}),
        ("distilbert", {"head": "mean_last"}),
        ("modernbert", {}),
        ("bert", {"special_tokens": False, "depths": [0, -1]}),
        ("bert", {"head_options": {"n_members": 2}}),
    ],
    ids=str,
)
def test_other_encoders_and_heads(tmp_path, kind, options):
    classifier = fit(tmp_path / "encoder", kind, **options)
    classifier.to_onnx(tmp_path / "all.onnx")
    texts = short_enough(classifier, LONG)
    found = probabilities(classifier, tmp_path / "all.onnx", texts)
    np.testing.assert_allclose(found, classifier.predict_proba(texts), atol=1e-5, rtol=0)


class Spectrum(torch.nn.Module):
    """A head with an operation that ONNX does not have."""

    def forward(self, hidden_states, input_mask):
        x = hidden_states[:, 0, 0, :2]  # [b, 2]
        return torch.linalg.eigvalsh(x[:, :, None] * x[:, None, :])  # [b, 2]


def test_what_cannot_be_exported_says_so(tmp_path, monkeypatch):
    classifier = fit(tmp_path / "encoder")
    with pytest.raises(ValueError, match="part must be one of 'all', 'head', got 'tail'"):
        classifier.to_onnx(tmp_path / "x.onnx", part="tail")
    with pytest.raises(ValueError, match="path must be a file in a folder that exists"):
        classifier.to_onnx(tmp_path / "nowhere" / "x.onnx")
    head, broken = classifier.head_, Spectrum()
    broken.weight = torch.nn.Parameter(torch.zeros(1))
    classifier.head_ = broken
    with pytest.raises(ValueError, match="cannot be exported as ONNX"):
        classifier.to_onnx(tmp_path / "x.onnx", part="head")
    classifier.head_ = head
    monkeypatch.setattr(onnx, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="the exported graph gives other probabilities"):
        classifier.to_onnx(tmp_path / "x.onnx", part="head")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
