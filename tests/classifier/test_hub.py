"""Classifiers on the hub, with a replacement for its client that keeps repositories in a folder."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.classifier.card import model_card


class Hub:
    """The functions of ``huggingface_hub`` that we use, with the real signatures."""

    def __init__(self, folder: Path):
        self.folder, self.private = folder, {}

    def create_repo(self, repo_id, *, private=None, exist_ok=False):
        assert exist_ok
        self.private[repo_id] = private
        (self.folder / repo_id / "main").mkdir(parents=True, exist_ok=True)

    def create_branch(self, repo_id, *, branch, exist_ok=False):
        assert exist_ok
        (self.folder / repo_id / branch).mkdir(exist_ok=True)

    def upload_folder(self, *, repo_id, folder_path, revision=None, commit_message, allow_patterns):
        for name in allow_patterns:
            shutil.copy(Path(folder_path) / name, self.folder / repo_id / (revision or "main"))
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/{commit_message}")

    def snapshot_download(self, repo_id, *, revision=None, allow_patterns):
        place = self.folder / repo_id / (revision or "main")
        if not place.exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"404: no {repo_id}\nRequest ID: 1")
        return str(place)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    tiny = save_tiny(tmp_path_factory.mktemp("tiny"))
    return vr.RoutingClassifier(tiny, max_epochs=1, cache=False, validation_fraction=0.2).fit(TEXTS, LABELS)


def test_the_stand_in_is_like_the_client():
    import inspect

    api = huggingface_hub.HfApi
    for name in ("create_repo", "create_branch", "upload_folder", "snapshot_download"):
        real, own = (inspect.signature(getattr(kind, name)).parameters for kind in (api, Hub))
        assert set(own) <= set(real), name


def test_what_is_pushed_can_be_loaded_by_its_name(classifier, hub, caplog):
    with caplog.at_level(logging.WARNING, "vecroute"):
        address = classifier.push_to_hub("someone/films", private=True, about={"data": "films.csv"})
    assert address == "https://hub/someone/films/Upload a classifier"
    assert "is a folder on this machine" in caplog.text
    assert hub.private == {"someone/films": True}
    again = vr.RoutingClassifier.from_pretrained("someone/films")
    assert again.predict_proba(TEXTS[:3]).tolist() == classifier.predict_proba(TEXTS[:3]).tolist()
    card = (hub.folder / "someone/films/main/README.md").read_text()
    assert 'from_pretrained("someone/films")' in card
    classifier.push_to_hub("someone/films", revision="second")
    assert vr.RoutingClassifier.from_pretrained("someone/films", revision="second").about_ == {}
    assert again.about_ == {"data": "films.csv"}


def test_no_path_of_this_machine_is_uploaded_unless_it_was_given(classifier, hub, monkeypatch, tmp_path):
    folder = Path(classifier.encoder_.name)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(classifier.encoder_, "name", folder.name)
    classifier.push_to_hub("someone/relative")
    config = (hub.folder / "someone/relative/main/config.json").read_text()
    assert str(folder.parent) not in config


def test_an_upload_that_fails_is_told_in_one_line(classifier, hub, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("401: no login\nRequest ID: 1")

    monkeypatch.setattr(hub, "create_repo", refuse)
    with pytest.raises(OSError, match=r"^someone/films could not be uploaded to the hub: 401: no login$"):
        classifier.push_to_hub("someone/films")


def test_names_and_folders_that_are_not_there(classifier, hub, tmp_path):
    with pytest.raises(ValueError, match=r"^someone/none is not a folder, .* the hub: 404: no someone/none$"):
        vr.RoutingClassifier.from_pretrained("someone/none")
    for place in (tmp_path / "none", "./none", "none", "a/b/c"):
        with pytest.raises(ValueError, match="is not a folder with a classifier"):
            vr.RoutingClassifier.from_pretrained(place)
    for name in ("films", "a/b/c", "../films", "a/", Path("a/b")):
        with pytest.raises(ValueError, match="name must be 'owner/name' on the hub"):
            classifier.push_to_hub(name)
    with pytest.raises(ValueError, match="revision needs a name on the hub"):
        vr.RoutingClassifier.from_pretrained(tmp_path, revision="main")
    assert not hub.folder.exists()


def test_predict_takes_a_name_on_the_hub(classifier, hub, run):
    classifier.push_to_hub("someone/films")
    done = run("predict", "someone/films", stdin=TEXTS[0].encode())
    assert json.loads(done.out)["label"] == classifier.predict(TEXTS[:1])[0]


HOSTILE = [
    "a|b",
    "`code`",
    "<script>alert(1)</script>",
    "](javascript:x)",
    "**",
    "new\nline",
    "\x1b[2J",
    "---",
    "# x",
]


def test_the_card_shows_labels_as_they_are(classifier, tmp_path):
    classifier.save_pretrained(tmp_path / "model", about={"data": 'a"b\n---\nlicense: mit|<b>'})
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["classes"] = HOSTILE
    card = model_card(config)
    _, front, body = card.split("---\n", 2)
    front = yaml.safe_load(front)
    assert "license" not in front
    assert front["pipeline_tag"] == "text-classification"
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"] == [
        {"type": "accuracy", "value": pytest.approx(config["validation_accuracy"], abs=1e-4)}
    ]
    assert result["dataset"]["split"] == "validation"
    for text in ("<script", "<b>", "\x1b", "](j", "`code`", "\n---\n", "\nline"):
        assert text not in body
    assert r"a\|b, \`code\`, &lt;script&gt;" in body
    for section in ("## Use", "## Classes", "## Training and evaluation", "## Intended use and limits"):
        assert section in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert all(len(line.replace(r"\|", "").split("|")) == 4 for line in rows)
