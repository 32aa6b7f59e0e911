"""The demo on images: the same drawings each time, a small run, and a second run that reuses the first."""

import json

import numpy as np
import pytest
from PIL import Image
from sklearn.linear_model import LogisticRegression

from tests.helpers.tiny_vision import save_tiny_vision
from vecroute.classifier import RoutingClassifier
from vecroute.demo import Samples, baselines, fitting, shapes
from vecroute.training import Trainer


def test_drawings_are_the_same_each_time_and_know_their_shape():
    for number in range(10):
        first, again = shapes.drawing(number), shapes.drawing(number)
        assert first.label == shapes.SHAPES[number % 5]
        assert first.image.tobytes() == again.image.tobytes()
        inside = np.asarray(first.image)[first.mask == 1]  # [n, 3]
        assert len(inside) > 100
        assert (inside == inside[0]).all()  # one colour
        assert 0.02 < first.mask.mean() < 0.55
    assert shapes.drawing(0).image.tobytes() != shapes.drawing(5).image.tobytes()


class Weak(LogisticRegression):
    """A classifier that always returns one label, unless C is 1 or more."""

    def predict(self, X):
        return super().predict(X) if self.C >= 1 else np.full(len(X), "bright")


def test_logistic_regression_is_given_the_strength_that_suits_it(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "LogisticRegression", Weak)
    rng = np.random.default_rng(0)
    labels = ["bright", "dark"] * 20
    images = [rng.integers(0, 100, (32, 32, 3), np.uint8) + 120 * (label == "bright") for label in labels]
    train, test = Samples(images[:30], labels[:30]), Samples(images[30:], labels[30:])
    train, test = (
        Samples([shapes.check_images([image])[0] for image in part.items], part.labels)
        for part in (train, test)
    )
    encoder = save_tiny_vision(tmp_path / "vit")
    classifier = RoutingClassifier(encoder, max_epochs=1, validation_fraction=0, cache=tmp_path / "cache")
    classifier.fit(*train)
    both = baselines(classifier, train, test, (0.1, 1.0))
    assert list(both) == [
        f"logistic regression, mean patch of {x}" for x in ("the last layer", "every layer")
    ]
    assert both == baselines(classifier, train, test, (1.0,))
    assert min(both.values()) == 1.0


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Use a tiny encoder and little data."""
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shapes, "ENCODER", save_tiny_vision(tmp_path / "vit"))
    for name, value in {"N_TRAIN": 20, "N_TEST": 10, "N_POINTED": 5, "EPOCHS": 1}.items():
        monkeypatch.setattr(shapes, name, value)
    monkeypatch.setattr(shapes, "STRENGTHS", (0.01,))


def test_the_demo_runs_and_the_second_run_uses_the_first(run, small, tmp_path, monkeypatch):
    out = tmp_path / "demo"
    first = run("demo", "--images", "--out", out)
    assert first.code == 0, first.err
    assert "20 images of 5 kinds of shapes" in first.out
    found = {path.name for path in out.iterdir()}
    assert {"images", "model", "results.json", "report.html", "maps.png", "why-star.html"} <= found
    assert len(list((out / "images" / "test").glob("*/*.png"))) == 10
    results = json.loads((out / "results.json").read_text())
    assert [name.partition(",")[0] for name in results["accuracies"]] == [
        "routing of every hidden state",
        "logistic regression",
        "logistic regression",
    ]
    for accuracy in results["accuracies"].values():
        assert f"{accuracy:.1%}" in first.out
    assert f"{results['pointing']['on_shape']:.0%} of the contributions" in first.out
    assert "shapes, held out" in (out / "report.html").read_text()
    with Image.open(out / "maps.png") as sheet:
        assert min(sheet.size) > 500
    monkeypatch.setattr(Trainer, "train_step", None)  # training again would fail
    monkeypatch.setattr(shapes, "drawing", None)  # drawing again would fail
    monkeypatch.setattr(shapes, "pointing", None)
    assert run("demo", "--images", "--out", out).out == first.out


def test_pointing_tells_a_map_on_the_shape_from_one_beside_it(monkeypatch):
    class Known:
        """Explanations in which only patches with the shape count, or only the others."""

        def __init__(self, on_shape):
            self.on_shape = on_shape

        def explain(self, picture):
            mask = shapes.drawing(int(picture.name.partition(".")[0])).mask
            touched = mask.reshape(8, 12, 8, 12).max((1, 3)) > 0
            return FakeMap(np.where(touched == self.on_shape, 1.0, -1.0))

    class FakeMap:
        cells = np.zeros((8, 8))

        def __init__(self, grid):
            self.values = grid

        def margin(self):
            return self

        def grid(self):
            return self.values

    pictures = [shapes.check_images([shapes.drawing(k).image])[0] for k in range(5)]
    pictures = [type(p)(p.key, f"{k}.png", p.source) for k, p in enumerate(pictures)]
    samples = Samples(pictures, [*shapes.SHAPES])
    assert shapes.pointing(Known(True), samples)["on_shape"] == 1.0
    beside = shapes.pointing(Known(False), samples)
    assert beside["on_shape"] == 0.0
    assert 0.1 < beside["covered"] < 0.6
    assert beside["n"] == 5
