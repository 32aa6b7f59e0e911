"""Classifiers as folders: what is replaced, what is refused, and which encoder belongs to them."""

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

import vecroute as vr
from tests.helpers.sealed import reseal
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_vision import save_tiny_vision
from vecroute import storage
from vecroute.classifier import saving
from vecroute.encoders import TextEncoder, VisionEncoder, identity


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Path(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def fitted(tiny):
    return vr.RoutingClassifier(str(tiny), max_epochs=1, cache=False).fit(TEXTS, LABELS)


@pytest.fixture
def saved(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def edit(file: Path, **entries) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


# Folders that are replaced


def other_folder(place):
    place.mkdir()
    (place / "thesis.txt").write_text("three years of work")


def with_a_note(place):
    (place.parent / "model").rename(place)
    (place / "thesis.txt").write_text("three years of work")


def with_a_folder_of_its_name(place):
    (place.parent / "model").rename(place)
    (place / "README.md").unlink()
    other_folder(place / "README.md")


def of_something_else(place):
    place.mkdir()
    (place / "config.json").write_text('{"model_type": "bert"}')


def damaged(place):
    (place.parent / "model").rename(place)
    (place / "config.json").write_text("{")


def link_to_a_model(place):
    place.symlink_to(place.parent / "model")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_folder, "it has 'thesis.txt', not a file of a classifier"),
        (with_a_note, "it has 'thesis.txt', not a file of a classifier"),
        (with_a_folder_of_its_name, "it has 'README.md', not a file of a classifier"),
        (of_something_else, "it is not the folder of a classifier"),
        (damaged, "it is not the folder of a classifier"),
        (link_to_a_model, "is a link: choose another folder"),
        (lambda place: place.symlink_to("nowhere"), "is a link: choose another folder"),
        (lambda place: place.write_text("a file"), "is a file: choose another folder"),
    ],
)
def test_only_a_folder_of_a_classifier_is_replaced(fitted, saved, make, message):
    place = saved.parent / "place"
    make(place)
    before = [(path, path.lstat().st_mtime_ns) for path in sorted(saved.parent.rglob("*"))]
    with pytest.raises(ValueError, match=message):
        fitted.save_pretrained(place, overwrite=True)
    assert [(path, path.lstat().st_mtime_ns) for path in sorted(saved.parent.rglob("*"))] == before


@pytest.mark.parametrize("exchange", [True, False])
def test_a_second_time(fitted, saved, exchange, monkeypatch):
    """This works even if the system cannot exchange two names in one step."""
    if not exchange:
        monkeypatch.setattr(storage, "exchanged", lambda one, other: False)
    with pytest.raises(ValueError, match=r"model exists: choose another folder, or remove it first"):
        fitted.save_pretrained(saved)
    fitted.save_pretrained(saved, overwrite=True, about={"time": "second"})
    assert vr.RoutingClassifier.from_pretrained(saved).about_ == {"time": "second"}
    assert names(saved.parent) == ["model"]
    assert names(saved) == ["README.md", "config.json", "model.safetensors"]
    fitted.save_pretrained(str(saved) + "/", overwrite=True)
    empty = saved.parent / "empty"
    empty.mkdir()
    fitted.save_pretrained(empty, overwrite=True)
    assert names(saved.parent) == ["empty", "model"]


def test_a_rename_that_fails_leaves_the_old(fitted, saved, monkeypatch):
    rename = Path.rename

    def failing(self, target):
        if Path(target).name == "model" and not self.name.endswith(".old"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(storage, "exchanged", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        fitted.save_pretrained(saved, overwrite=True, about={"time": "second"})
    assert vr.RoutingClassifier.from_pretrained(saved).about_ == {}
    assert names(saved.parent) == ["model"]


def test_what_killed_processes_left_is_removed_and_nothing_else(fitted, saved):
    left, alive = (saved.with_name(f".model.{digit * 32}") for digit in "ab")
    mine = saved.with_name(".model.notes")
    for folder in (left, alive, mine):
        folder.mkdir()
    for folder in (left, mine):
        os.utime(folder, (1, 1))
    fitted.save_pretrained(saved, overwrite=True)
    assert names(saved.parent) == [alive.name, mine.name, "model"]


# Folders that are refused


def nan(weights):
    weights[min(weights)].view(-1)[0] = float("nan")


def infinite(weights):
    weights[max(weights)].view(-1)[0] = float("inf")


@pytest.mark.parametrize("change", [nan, infinite])
def test_weights_that_are_not_finite(saved, change):
    with pytest.raises(ValueError, match=r"model\.safetensors in .* has weights that are NaN or infinite"):
        vr.RoutingClassifier.from_pretrained(reseal(saved, change_weights=change))


def test_weights_so_large_that_scores_are_not_finite(saved):
    def enlarge(weights):
        for weight in weights.values():
            weight *= 1e30

    classifier = vr.RoutingClassifier.from_pretrained(reseal(saved, change_weights=enlarge))
    with pytest.raises(ValueError, match="scores are NaN or infinite: the weights of the head"):
        classifier.predict(TEXTS[:2])


KEYS = (
    "classes",
    "params",
    "encoder",
    "samples",
    "vecroute",
    "n_texts",
    "validation_accuracy",
    "history",
    "about",
    "temperature",
    "estimate",
)
OF_ENCODER = ("name", "revision", "weights", "preparation", "configuration", "files", "depths", "d_emb")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((lambda config, key=key: config.pop(key), f"'{key}' is missing") for key in KEYS),
        *((lambda config, key=key: config["encoder"].pop(key), f"'{key}' is missing") for key in OF_ENCODER),
        (lambda config: config["params"].pop("multi_label"), "params: 'multi_label' is missing"),
        (lambda config: config["params"].update(evil=1), "params: 'evil' is unknown to vecroute"),
        (lambda config: config["params"].update(device="cuda"), "params: 'device' is unknown to vecroute"),
        (lambda config: config["params"].update(head="none"), "the head in"),
        (lambda config: config["params"].update(head_options={"n_hid": 10**9}), "the head in"),
        (lambda config: config["params"].update(head_options={"n_iters": 10**9}), "n_iters must be"),
        (lambda config: config["params"].update(head_options={"evil": 1}), "the head in"),
        (lambda config: config["params"].update(head_options={"n_members": 10**9}), "the head in"),
        (lambda config: config["params"].update(head_options={"n_routings": 10**9}), "the head in"),
        (lambda config: config.update(classes="neg"), "'classes' must be list, is str"),
        (lambda config: config.update(classes=[]), "classes must be names or numbers"),
        (lambda config: config.update(classes=[["neg"], ["pos"]]), "classes must be names or numbers"),
        (lambda config: config.update(classes=["neg", "neg"]), "the class 'neg' is listed twice"),
        (lambda config: config.update(classes=["a", "b", "c"]), "the head in"),
        *(
            (lambda config, T=T: config.update(temperature=T), "temperature must be a positive number, is")
            for T in (0.0, -1.0, float("nan"), float("inf"))
        ),
        (lambda config: config.update(temperature="1"), "'temperature' must be float, is str"),
        (lambda config: config["estimate"].update(accuracy=1.5), "estimate: accuracy must be from 0 to 1"),
        (lambda config: config["estimate"].update(n="many"), "estimate: n must be int, is 'many'"),
        (lambda config: config["estimate"].update(counts={"neg": -1}), "estimate: neg must be a number of"),
        (lambda config: config["estimate"].pop("recall"), "estimate: .*recall"),
        (lambda config: config["encoder"].update(name="./../tiny"), "is not inside the folder"),
        (lambda config: config["encoder"].update(depths=[99]), "depths must be"),
    ],
)  # fmt: skip
def test_configurations_that_are_sealed_but_wrong(saved, change, message):
    with pytest.raises(ValueError, match=message):
        vr.RoutingClassifier.from_pretrained(reseal(saved, change))


def test_options_are_saved_resolved(tiny, tmp_path):
    options = {"n_members": 2, "n_hid": 3}
    fitted = vr.RoutingClassifier(str(tiny), max_epochs=1, cache=False, head_options=options)
    fitted.fit(TEXTS, LABELS).save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text())["params"]["head_options"]
    assert saved == fitted.head_.options
    assert (saved["n_members"], saved["n_hid"], saved["d_hid"]) == (2, 3, 16)
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    assert (again.predict_proba(TEXTS[:5]) == fitted.predict_proba(TEXTS[:5])).all()
    assert fitted.head_options == options


def test_a_folder_of_an_earlier_format_is_refused_and_may_be_replaced(saved, fitted):
    reseal(saved, lambda config: config.pop("format_version"))
    with pytest.raises(ValueError, match=r"has format version None, and vecroute .* reads 1: fit it again"):
        vr.RoutingClassifier.from_pretrained(saved)
    fitted.save_pretrained(saved, overwrite=True)
    vr.RoutingClassifier.from_pretrained(saved)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"[" * 200_000, "is damaged"), (b" " * (64 * 1024**2 + 1), "more than 67,108,864 bytes")],
    ids=["deep", "long"],
)
def test_configurations_that_are_no_json(saved, data, message):
    (saved / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        vr.RoutingClassifier.from_pretrained(saved)


# Where the encoder is


def test_an_encoder_inside_the_folder_moves_with_it(tiny, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny, bundle / "encoder")
    classifier = vr.RoutingClassifier(str(bundle / "encoder"), max_epochs=1, cache=False).fit(TEXTS, LABELS)
    classifier.save_pretrained(bundle)  # the folder holds only the encoder
    assert json.loads((bundle / "config.json").read_text())["encoder"]["name"] == "./encoder"
    expected = classifier.predict_proba(["good"])
    bundle.rename(tmp_path / "moved")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "moved")
    assert (again.predict_proba(["good"]) == expected).all()
    again.save_pretrained(tmp_path / "moved", overwrite=True)
    assert names(tmp_path / "moved") == ["README.md", "config.json", "encoder", "model.safetensors"]
    last = vr.RoutingClassifier.from_pretrained(tmp_path / "moved")
    assert (last.predict_proba(["good"]) == expected).all()
    assert names(tmp_path) == ["moved"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_beside_an_encoder_inside_the_folder_stay(overwrite, tiny, tmp_path):
    bundle = tmp_path / "bundle"
    encoder = shutil.copytree(tiny, bundle / "work/encoder")
    (bundle / "work/thesis.txt").write_text("three years of work")
    classifier = vr.RoutingClassifier(str(encoder), max_epochs=1, cache=False).fit(TEXTS, LABELS)
    with pytest.raises(ValueError, match=r"it has 'work/thesis.txt', not a file of a classifier"):
        classifier.save_pretrained(bundle, overwrite=overwrite)
    assert (names(bundle), names(bundle / "work")) == (["work"], ["encoder", "thesis.txt"])
    (bundle / "work/thesis.txt").unlink()
    classifier.save_pretrained(bundle, overwrite=overwrite)
    assert vr.RoutingClassifier.from_pretrained(bundle).predict(["good"]).size == 1


def test_an_encoder_is_found_from_any_folder(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny, tmp_path / "encoder")
    monkeypatch.chdir(tmp_path)
    vr.RoutingClassifier("encoder", max_epochs=1, cache=False).fit(TEXTS, LABELS).save_pretrained("model")
    assert json.loads(Path("model/config.json").read_text())["encoder"]["name"] == str(tmp_path / "encoder")
    assert str(tmp_path) not in Path("model/README.md").read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert vr.RoutingClassifier.from_pretrained("../model").predict(["good"]).size == 1
    # The names of the encoders of packages stay names.
    (tmp_path / "elsewhere/minilm").mkdir()
    assert saving.from_anywhere("minilm") == "minilm"


def test_an_encoder_that_is_gone_is_named_at_once(tiny, tmp_path):
    place = shutil.copytree(tiny, tmp_path / "encoder")
    vr.RoutingClassifier(str(place), max_epochs=1, cache=False).fit(TEXTS, LABELS).save_pretrained(
        tmp_path / "model"
    )
    place.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=rf"'{place}' could not be .* say where it is with --encoder or encoder="
    ):
        vr.RoutingClassifier.from_pretrained(tmp_path / "model")
    again = vr.RoutingClassifier.from_pretrained(tmp_path / "model", encoder=tmp_path / "moved")
    assert again.predict(["good"]).size == 1


# Which encoder it is


CHANGES = {
    "heads": (
        "config.json",
        {"num_attention_heads": 4},
        r"\(config.json\): num_attention_heads is 4, expected 2",
    ),
    "activation": ("config.json", {"hidden_act": "relu"}, r"\(config.json\): hidden_act is 'relu'"),
    "epsilon": ("config.json", {"layer_norm_eps": 1e-3}, r"\(config.json\): layer_norm_eps is 0.001"),
    "tokenizer": ("tokenizer.json", {"normalizer": None}, r"its tokens or pixels differ \(tokenizer.json\)"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_encoder_is_refused_naming_the_file(change, tiny, saved, tmp_path):
    file, entries, message = CHANGES[change]
    other = shutil.copytree(tiny, tmp_path / "other")
    edit(other / file, **entries)
    with pytest.raises(ValueError, match=f"is not the one that .* was fitted with: .*{message}"):
        vr.RoutingClassifier.from_pretrained(saved, encoder=other)
    assert TextEncoder(str(other)).key != TextEncoder(str(tiny)).key  # so the cache differs too


def test_other_weights_are_refused_naming_the_file(saved, tmp_path):
    other = save_tiny(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"its weights differ \(model.safetensors\)"):
        vr.RoutingClassifier.from_pretrained(saved, encoder=other)


def test_another_image_processor_is_another_encoder(tmp_path):
    one, same = (VisionEncoder(save_tiny_vision(tmp_path / name)) for name in ("one", "same"))
    other = VisionEncoder(save_tiny_vision(tmp_path / "other", image_mean=[0.4, 0.5, 0.5]))
    assert identity.difference(one.identity, same.identity) is None
    told = identity.difference(one.identity, other.identity)
    assert told == "its tokens or pixels differ (preprocessor_config.json)"


def test_what_changes_no_hidden_state_is_no_difference(tiny, saved, tmp_path):
    other = shutil.copytree(tiny, tmp_path / "other")
    entries = {"transformers_version": "4.0.0", "hidden_dropout_prob": 0.5, "id2label": {"0": "x"}}
    edit(other / "config.json", **entries, architectures=["BertForMaskedLM"], layer_norm_eps=1e-12)
    assert vr.RoutingClassifier.from_pretrained(saved, encoder=other).predict(["good"]).size == 1
    assert TextEncoder(str(other)).key == TextEncoder(str(tiny)).key


def test_the_same_files_are_the_same_encoder_whatever_an_upgrade_makes_of_them(tiny, saved, monkeypatch):
    """Another version of a library may rename weights and files of tokenizers."""
    monkeypatch.setattr("vecroute.encoders.text.tokenizer_sha256", lambda tokenizer: "another version")
    monkeypatch.setattr(identity, "weights_sha256", lambda model: "another version")
    monkeypatch.setattr(identity, "resolved", lambda configuration: {**configuration, "new": time.time_ns()})
    moved = shutil.copytree(tiny, saved.parent / "moved")
    again = vr.RoutingClassifier.from_pretrained(saved, encoder=str(moved))
    assert again.predict(["good"]).size == 1


def test_precision_and_device_make_no_other_encoder(tiny):
    one, other = TextEncoder(str(tiny)), TextEncoder(str(tiny), dtype=torch.bfloat16)
    assert one.identity == other.identity
    assert one.key != other.key


@pytest.mark.parametrize("package", ["torch", "transformers", "tokenizers"])
def test_hidden_states_of_another_version_are_computed_again(tiny, package, monkeypatch):
    encoder = TextEncoder(str(tiny))
    before, found = encoder.key, identity.installed
    monkeypatch.setattr(identity, "installed", lambda name: "99" if name == package else found(name))
    assert encoder.key != before
