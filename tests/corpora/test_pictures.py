"""Folders of images: a table for each, whole or not at all, resumed after a stop, errors in one line."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vecroute as vr
from tests.helpers.tiny_vision import save_tiny_vision
from vecroute.corpora import explain_folder, predict_folder

OPTIONS = {"max_epochs": 1, "batch_size": 8, "cache": False, "estimate": False, "verbose": False}


def photo(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (24, 32, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    classifier = vr.RoutingClassifier(save_tiny_vision(folder / "vit"), **OPTIONS)
    classifier.fit([photo(k) for k in range(8)], ["red", "blue"] * 4).save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def classifier(model):
    return vr.RoutingClassifier.from_pretrained(model, verbose=False)


@pytest.fixture
def photos(tmp_path):
    """Five photos: one in the folder itself, two in each of its subfolders."""
    folder = tmp_path / "photos"
    for k, name in enumerate(["top.png", "a/0.png", "a/1.png", "b/0.png", "b/1.png"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        photo(k).save(folder / name)
    (folder / "a" / "notes.txt").write_text("no image")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_each_folder_becomes_a_table(model, classifier, photos, tmp_path, run):
    out = tmp_path / "out"
    done = run("predict", model, photos, "--out", out)
    assert (done.code, done.out) == (0, "")
    assert "3 of 3 shards written, 0 were there, 5 rows" in done.err
    tables = ["a/predictions.jsonl", "b/predictions.jsonl", "predictions.jsonl"]
    assert names(out) == ["_vecroute.json", *tables]
    rows = [json.loads(line) for line in (out / "b" / "predictions.jsonl").read_text().splitlines()]
    images = [str(photos / "b" / "0.png"), str(photos / "b" / "1.png")]
    assert [row["text"] for row in rows] == images
    assert [row["label"] for row in rows] == classifier.predict(images).tolist()
    p = [row["probabilities"]["red"] for row in rows]
    assert p == pytest.approx(classifier.predict_proba(images)[:, 1], abs=1e-6)
    # The same rows as without --out.
    assert (out / "b" / "predictions.jsonl").read_text() == run("predict", model, photos / "b").out


def test_tables_of_csv(model, classifier, photos, tmp_path, run):
    assert run("predict", model, photos / "a", "--out", tmp_path / "out", "--to", "csv").code == 0
    with (tmp_path / "out" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [["text", "label", "blue", "red"]] * 2
    assert rows[1]["text"] == str(photos / "a" / "1.png")
    again = run("predict", model, photos / "a", "--out", tmp_path / "out")
    assert (again.code, "results of another run (to differs)" in again.err) == (2, True)
    with pytest.raises(ValueError, match="to must be jsonl or csv, got 'xlsx'"):
        predict_folder(classifier, photos, tmp_path / "other", to="xlsx")


def test_folders_with_new_changed_or_removed_images_are_done_again(classifier, photos, tmp_path):
    out = tmp_path / "out"
    assert predict_folder(classifier, photos, out) == (3, 0, 5, {})
    assert predict_folder(classifier, photos, out) == (0, 3, 0, {})
    later = (out / "predictions.jsonl").stat().st_mtime + 10
    os.utime(photos / "a" / "0.png", (later, later))
    assert predict_folder(classifier, photos, out) == (1, 2, 2, {})
    (photos / "b" / "0.png").unlink()
    os.utime(photos / "b", (later, later))
    os.utime(photos / "a" / "0.png", (0, 0))
    assert predict_folder(classifier, photos, out) == (1, 2, 1, {})


def test_a_damaged_image_is_named_and_other_folders_are_done(model, photos, tmp_path, run):
    path = photos / "a" / "1.png"
    path.write_bytes(path.read_bytes()[:-200])
    done = run("predict", model, photos, "--out", tmp_path / "out")
    assert done.code == 1
    told = done.err.splitlines()[-1]
    assert told.startswith(f"vecroute: a/predictions.jsonl could not be done: {path}")
    assert names(tmp_path / "out") == ["_vecroute.json", "b/predictions.jsonl", "predictions.jsonl"]
    photo(2).save(path)
    assert run("predict", model, photos, "--out", tmp_path / "out").code == 0


MISTAKES = {
    "empty": (["predict", "MODEL", "EMPTY"], "has no images"),
    "a file": (["predict", "MODEL", "PHOTOS/top.png"], "classifies images: give a folder of them"),
    "nowhere": (["predict", "MODEL", "PHOTOS/none"], "none"),
    "inside": (["predict", "MODEL", "PHOTOS", "--out", "PHOTOS/out"], "must lie outside of the folder"),
    "gpu": (["predict", "MODEL", "PHOTOS", "--device", "cuda"], "device is cuda, but there is no GPU"),
    "explain": (["explain", "MODEL", "--data", "PHOTOS"], "classifier must be of texts"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_before_work_write_nothing(model, photos, tmp_path, run, mistake):
    if mistake == "gpu" and vr.encoders.loading.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "empty").mkdir()
    command, message = MISTAKES[mistake]
    for name, path in (("MODEL", model), ("EMPTY", tmp_path / "empty"), ("PHOTOS", photos)):
        command = [word.replace(name, str(path)) for word in command]
    out = [] if "--out" in command else ["--out", str(tmp_path / "out")]
    done = run(*command, *out)
    assert done.code == 2
    assert message in done.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert not (photos / "out").exists()


def test_tables_are_no_images(classifier, tmp_path):
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "a.jsonl").write_text('{"text": "good"}\n')
    with pytest.raises(ValueError, match="tables has no images"):
        predict_folder(classifier, tables, tmp_path / "out")
    with pytest.raises(ValueError, match=r"must be of texts to explain .*tables, it is of images"):
        explain_folder(classifier, tables, tmp_path / "out")
    assert not (tmp_path / "out").exists()
