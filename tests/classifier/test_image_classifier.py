"""RoutingClassifier on images, and the command line with folders of them."""

import json
import logging
import re

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import vecroute as vr
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_vision import save_tiny_vision
from vecroute.encoders import TextEncoder, VisionEncoder
from vecroute.encoders.either import is_of_images
from vecroute.explain.image import ImageExplanation
from vecroute.io.images import image_files

OPTIONS = {"max_epochs": 15, "batch_size": 8, "drop_inputs": 0.2, "drop_features": 0.0, "verbose": False}


def photo(label: str, seed: int) -> Image.Image:
    """Return noise with a red square for "red" and a blue one for "blue", at a random place."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(60, 140, (24, 32, 3), dtype=np.uint8)
    x, y = rng.integers(0, 16), rng.integers(0, 8)
    pixels[y : y + 16, x : x + 16] = (230, 20, 20) if label == "red" else (20, 20, 230)
    return Image.fromarray(pixels)


LABELS = ["red", "blue"] * 20
PHOTOS = [photo(label, seed) for seed, label in enumerate(LABELS)]
TEST = [photo(label, 100 + seed) for seed, label in enumerate(LABELS[:10])]


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    return save_tiny_vision(tmp_path_factory.mktemp("encoders") / "vit")


@pytest.fixture(scope="module")
def fitted(vit, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return vr.RoutingClassifier(vit, cache=cache, **OPTIONS).fit(PHOTOS, LABELS)


def test_it_learns_from_images(fitted):
    assert fitted.classes_.tolist() == ["blue", "red"]
    assert isinstance(fitted.encoder_, VisionEncoder)
    assert fitted.score(TEST, LABELS[:10]) == 1.0
    assert fitted.predict_proba(TEST).shape == (10, 2)


def test_paths_images_and_arrays_give_the_same_alone_and_together(fitted, tmp_path):
    together = fitted.predict_proba(TEST)
    for k, image in enumerate(TEST[:3]):
        path = tmp_path / f"{k}.png"
        image.save(path)
        for source in (
            path,
            str(path),
            np.asarray(image),
            torch.from_numpy(np.array(image)).permute(2, 0, 1),
        ):
            np.testing.assert_allclose(fitted.predict_proba([source])[0], together[k], rtol=1e-4, atol=1e-6)


def test_hidden_states_come_from_the_cache(vit, tmp_path, monkeypatch):
    options = OPTIONS | {"max_epochs": 1, "cache": tmp_path}
    first = vr.RoutingClassifier(vit, **options).fit(PHOTOS, LABELS)
    monkeypatch.setattr(VisionEncoder, "_run", None)
    again = vr.RoutingClassifier(vit, **options).fit(PHOTOS, LABELS)
    assert again.history_ == first.history_


def test_saved_and_loaded_it_gives_the_same(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "model")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(again.predict_proba(TEST), fitted.predict_proba(TEST), rtol=1e-6)
    card = (tmp_path / "model" / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card
    assert "# Image classifier" in card
    assert "every patch at every depth" in card
    assert "images learned from | 40" in card
    other = save_tiny_vision(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match="is not the one that"):
        vr.RoutingClassifier.from_pretrained(tmp_path / "model", encoder=other)


@pytest.mark.parametrize("form", ["path", "image", "array"])
def test_explanations_add_up_to_scores(fitted, tmp_path, form):
    TEST[0].save(tmp_path / "a.png")
    source = {"path": tmp_path / "a.png", "image": TEST[0], "array": np.asarray(TEST[0])}[form]
    why = fitted.explain(source)
    assert isinstance(why, ImageExplanation)
    assert why.completeness_error < 1e-5
    assert why.output_names == ["blue", "red"]
    assert why.text == (str(source) if form == "path" else "image")
    np.testing.assert_allclose(
        why.scores[1] - why.scores[0], fitted.decision_function([source])[0], rtol=1e-4
    )
    several = fitted.explain([source, TEST[1]], classes=["red"])
    assert [one.output_names for one in several] == [["red"], ["red"]]
    np.testing.assert_allclose(several[0].values, why["red"].values, rtol=1e-5, atol=1e-6)


def test_of_many_classes_those_with_the_highest_scores_are_explained(vit):
    labels = [f"class {k % 12}" for k in range(36)]
    classifier = vr.RoutingClassifier(vit, cache=False, **OPTIONS | {"max_epochs": 1})
    classifier.fit(PHOTOS[:36], labels)
    why = classifier.explain(TEST[0])
    scores = classifier.decision_function([TEST[0]])[0]
    expected = classifier.classes_[np.argsort(-scores)[:10]]
    assert why.output_names == expected.tolist()
    assert classifier.explain(TEST[0], classes=["class 7"]).output_names == ["class 7"]


def test_the_kind_is_that_of_the_encoder(vit, tmp_path):
    bert = save_tiny(tmp_path / "bert")
    assert is_of_images(vit, None)
    assert is_of_images(transformers.AutoModel.from_pretrained(vit), None)
    assert is_of_images(VisionEncoder(vit), None)
    assert not is_of_images(bert, None)
    assert not is_of_images(TextEncoder(bert), None)
    assert not is_of_images("minilm", None)
    assert is_of_images("vit-cifar10", None)
    with pytest.raises(ValueError, match="X must be a list of images, got none"):
        vr.RoutingClassifier(vit).fit([], [])
    with pytest.raises(TypeError, match="X must be a list of texts, row 0 is"):
        vr.RoutingClassifier(bert).fit(PHOTOS, LABELS)
    with pytest.raises(ValueError, match="max_length and stride are for texts"):
        vr.RoutingClassifier(vit, max_length=9).fit(PHOTOS, LABELS)
    with pytest.raises(ValueError, match="two classes or more"):
        vr.RoutingClassifier(vit).fit(PHOTOS[:4], ["red"] * 4)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "photos"
    for k, (label, image) in enumerate(zip(LABELS, PHOTOS, strict=True)):
        (folder / label).mkdir(parents=True, exist_ok=True)
        image.save(folder / label / f"{k}.png")
    (folder / "red" / "notes.txt").write_text("none")
    return folder


def test_the_command_line_fits_a_folder(run, photos, vit, tmp_path, monkeypatch):
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    done = run("fit", photos, "--encoder", vit, "--out", model, "--epochs", 2, "--batch-size", 8)
    assert done.code == 0, done.err
    told = done.out.splitlines()
    assert told[0] == f"{model}: 2 classes from 40 images"
    assert "by cross-validation on 40 images; always 'blue': 0.50" in told[1]
    assert told[2].startswith("recall: ")
    assert told[3].startswith("next: ")
    assert f"1 files of {photos} are left out: {photos}/red/notes.txt" in done.err
    assert vr.RoutingClassifier.from_pretrained(model).classes_.tolist() == ["blue", "red"]


@pytest.fixture(scope="module")
def model(fitted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "model"
    fitted.save_pretrained(folder)
    return folder


def test_the_command_line_measures_and_predicts(run, model, photos, tmp_path):
    assert json.loads(run("evaluate", model, photos, "--json").out)["accuracy"] == 1.0
    done = run("evaluate", model, photos, "--html", tmp_path / "report.html")
    assert done.code == 0, done.err
    assert re.search(r"^images +40$", done.out, re.MULTILINE)
    assert "<h1><bdi>model on photos</bdi></h1>" in (tmp_path / "report.html").read_text()
    rows = [json.loads(line) for line in run("predict", model, photos / "blue", "--rows", 7).out.splitlines()]
    assert len(rows) == 20
    assert all(row["label"] == "blue" and row["text"].endswith(".png") for row in rows)
    image = photos / "red" / "0.png"
    done = run("predict", model, stdin=f"{image}\n".encode())
    assert json.loads(done.out)["label"] == "red"


def test_the_command_line_explains_an_image(run, model, photos, tmp_path):
    image = photos / "red" / "0.png"
    why = json.loads(run("explain", model, image, "--json", "--by", "patch").out)
    assert why["text"] == str(image)
    total = why["base_values"]["red"] + sum(part["values"]["red"] for part in why["parts"])
    assert total == pytest.approx(why["scores"]["red"], rel=1e-3)
    assert why["parts"][0]["piece"] == "[CLS]"
    assert why["parts"][1]["box"] == [0, 0, 8, 6]
    assert run("explain", model, image, "--html", tmp_path / "why.html").code == 0
    assert "data:image/png" in (tmp_path / "why.html").read_text()
    shown = run("explain", model, image).out
    assert "Why red rather than" in shown
    assert "region 0" in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("explain MODEL none.png", "none.png cannot be read: No such file"),
        ("explain MODEL PHOTOS/red/0.png --by word", "unit must be one of"),
        ("predict MODEL VIT/config.json", "classifies images: give a folder of them, got"),
        ("fit PHOTOS --out m", "name a vision Transformer with --encoder, minilm takes texts"),
        ("fit PHOTOS/red --encoder VIT --out m", "two classes or more, got no images in them"),
    ],
)
def test_mistakes_take_one_line(run, model, photos, vit, tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    for name, path in (("MODEL", model), ("PHOTOS", photos), ("VIT", vit)):
        command = command.replace(name, str(path))
    done = run(*command.split())
    assert (done.code, done.out) == (2, "")
    assert message in done.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_image_files(photos, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(image_files(photos)) == 40
    assert "notes.txt" in caplog.text
    with pytest.raises(ValueError, match="has no images"):
        image_files(photos.parent / "nowhere")
