"""Hostile or damaged folders of encoders: no code in them runs, and one line says why."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_vision import save_tiny_vision
from vecroute.encoders import TextEncoder, VisionEncoder, finding
from vecroute.encoders.loading import load_config

CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
import transformers
class Config(transformers.{kind}Config):
    model_type = "evil"
class Model(transformers.{kind}Model):
    config_class = Config
class Processor(transformers.ViTImageProcessorPil):
    pass
class Tokens(transformers.PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True, scope="module")
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VECROUTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return Path(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.csv"
    pd.DataFrame({"text": TEXTS, "label": LABELS}).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fitted") / "model"
    vr.RoutingClassifier(str(tiny), max_epochs=1).fit(TEXTS, LABELS).save_pretrained(folder)
    return folder


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "ran"


def edit(file: Path, **entries) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def with_code(folder: Path, marker: Path, kind: str) -> str:
    """Return an encoder with its own code, named in every file that can name code."""
    (save_tiny if kind == "Bert" else save_tiny_vision)(folder)
    (folder / "evil.py").write_text(CODE.format(marker=str(marker), kind=kind))
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoImageProcessor": "evil.Processor"}
    edit(folder / "config.json", model_type="evil", auto_map={**code, "AutoTokenizer": ["evil.Tokens", None]})
    if kind == "Bert":
        edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokens", None]})
    else:
        edit(folder / "preprocessor_config.json", image_processor_type="Processor", auto_map=code)
    return str(folder)


DOORS = {
    "fit": lambda evil, model, data, out: ["fit", data, "--out", out, "--encoder", evil],
    "predict": lambda evil, model, data, out: ["predict", model, "--encoder", evil],
    "evaluate": lambda evil, model, data, out: ["evaluate", model, data, "--encoder", evil],
    "explain": lambda evil, model, data, out: ["explain", model, "a good film", "--encoder", evil],
    "compare": lambda evil, model, data, out: ["compare", data, "--encoder", evil],
    "faithfulness": lambda evil, model, data, out: ["faithfulness", model, data, "--encoder", evil],
    "serve": lambda evil, model, data, out: ["serve", model, "--port", "0", "--encoder", evil],
}


@pytest.mark.parametrize("door", DOORS)
def test_no_command_runs_code_of_a_folder(door, run, model, data, tmp_path, marker):
    """Standard input is data, even "y". It never answers a question about trust."""
    evil = with_code(tmp_path / "evil", marker, "Bert")
    done = run(*DOORS[door](evil, model, data, tmp_path / "out"), stdin=b"y\n" * 20)
    assert not marker.exists()
    assert (done.code, done.err.count("\n")) == (2, 1), done
    assert "needs its own code (auto_map in config.json), which is never run" in done.err


CALLS = {
    "TextEncoder": lambda evil, model: TextEncoder(evil),
    "VisionEncoder": lambda evil, model: VisionEncoder(evil),
    "fit": lambda evil, model: vr.RoutingClassifier(evil).fit(TEXTS, LABELS),
    "from_pretrained": lambda evil, model: vr.RoutingClassifier.from_pretrained(model, encoder=evil),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_runs_code_of_a_folder(call, model, tmp_path, marker, monkeypatch):
    evil = with_code(tmp_path / "evil", marker, "ViT" if call == "VisionEncoder" else "Bert")
    stdin = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(ValueError, match="needs its own code"):
        CALLS[call](evil, model)
    assert not marker.exists()
    assert stdin.tell() == 0  # no question was asked


def test_code_named_inside_a_configuration_never_runs(tmp_path, marker, monkeypatch):
    """A model builds its backbone from a nested configuration, and does not pass trust_remote_code on."""
    evil = tmp_path / "evil"
    save_tiny_vision(evil)
    (evil / "evil.py").write_text(CODE.format(marker=str(marker), kind="Bert"))
    backbone = {"model_type": "bert", "auto_map": {"AutoBackbone": f"{evil}--evil.Model"}}
    (evil / "config.json").write_text(
        json.dumps({"model_type": "detr", "use_timm_backbone": False, "backbone_config": backbone})
    )
    stdin = io.StringIO("y\n" * 20)
    monkeypatch.setattr(sys, "stdin", stdin)
    for kind in (TextEncoder, VisionEncoder):
        with pytest.raises(ValueError, match="could not be loaded"):
            kind(str(evil))
    assert not marker.exists()
    assert stdin.tell() == 0  # no question was asked
    assert transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE > 0  # others may still be asked


def test_code_beside_an_encoder_that_does_not_need_it_stays_unused(tmp_path, marker, monkeypatch):
    evil = with_code(tmp_path / "evil", marker, "ViT")
    edit(tmp_path / "evil/config.json", model_type="vit")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    with pytest.raises(ValueError, match=r"image processor of .* could not be loaded"):
        VisionEncoder(evil)
    assert not marker.exists()
    evil = with_code(tmp_path / "text", marker, "Bert")
    edit(tmp_path / "text/config.json", model_type="bert")
    assert TextEncoder(evil).encode(["good"])[0].shape == (3, 3, 16)
    assert not marker.exists()


def test_kernels_that_a_folder_names_are_not_fetched(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "kernels")
    edit(folder / "config.json", attn_implementation="evil/kernel", experts_implementation="evil/kernel")
    config = load_config(folder)
    assert (config._attn_implementation, config._experts_implementation) == (None, None)
    assert torch.equal(
        TextEncoder(str(folder)).encode(["good"])[0], TextEncoder(str(tiny)).encode(["good"])[0]
    )


class Harm:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("way", ["alone", "in the index", "in the index, elsewhere"])
def test_pickled_weights_are_not_read(way, tiny, tmp_path, marker):
    folder = shutil.copytree(tiny, tmp_path / "pickled")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(marker)))
    if way == "alone":
        (folder / "model.safetensors").unlink()
        message = r"no \.safetensors file; pickled weights \(\.bin\) can run code and are not read"
    else:
        name = "pytorch_model.bin" if way == "in the index" else "../tiny/model.safetensors"
        index = {"metadata": {}, "weight_map": {"embeddings.LayerNorm.weight": name}}
        (folder / finding.INDEX).write_text(json.dumps(index))
        message = r"names '.*', not a \.safetensors file in the same folder"
    with pytest.raises(ValueError, match=message):
        TextEncoder(str(folder))
    assert not marker.exists()


def test_pickled_weights_can_be_given_as_a_model(tiny):
    """A user who trusts a pickle can load it and pass the model."""
    model = transformers.AutoModel.from_pretrained(tiny)
    assert TextEncoder(model).encode(["good"])[0].shape == (3, 3, 16)


def deep(file: Path) -> None:
    file.write_text("[" * 200_000)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def not_finite(file: Path) -> None:
    weights = load_file(file)
    weights["encoder.layer.1.output.dense.weight"][0, 0] = float("inf")
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config.json", Path.unlink, "has no config.json"),
        ("config.json", deep, "config.json cannot be read or is damaged"),
        ("config.json", truncate, "config.json cannot be read or is damaged"),
        ("config.json", lambda file: file.write_text("[]"), "must hold a JSON object, holds list"),
        ("config.json", lambda file: edit(file, hidden_size="16"), "could not be loaded"),
        ("config.json", lambda file: edit(file, num_attention_heads=3), "could not be loaded"),
        ("config.json", lambda file: edit(file, model_type=None), "could not be loaded"),
        ("config.json", lambda file: edit(file, model_type=["bert"]), "could not be loaded"),
        ("config.json", lambda file: edit(file, hidden_act="exec"), "could not be loaded"),
        ("model.safetensors", truncate, "could not be loaded"),
        ("model.safetensors", lambda file: file.write_bytes(b""), "could not be loaded"),
        ("model.safetensors", not_finite, "has weights that are NaN or infinite: encoder.layer.1.output"),
        ("tokenizer.json", truncate, "could not be loaded"),
        ("tokenizer.json", deep, "could not be loaded"),
        ("tokenizer_config.json", deep, "tokenizer_config.json cannot be read or is damaged"),
        ("adapter_config.json", lambda file: file.write_text("{}"), "is an adapter"),
    ],
)  # fmt: skip
def test_damaged_folders(tiny, tmp_path, name, damage, message):
    folder = shutil.copytree(tiny, tmp_path / "damaged")
    damage(folder / name)
    with pytest.raises(ValueError, match=message) as raised:
        vr.RoutingClassifier(str(folder)).fit(TEXTS, LABELS)
    assert "\n" not in str(raised.value)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "pipe")
    os.mkfifo(folder / "tokenizer.model")
    assert TextEncoder(str(folder)).identity.files == TextEncoder(str(tiny)).identity.files
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        TextEncoder(str(folder))


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./encoder", "../encoder", "~/no-such-encoder", "a/b/c", "models/"]
)
def test_a_path_is_no_name_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(finding.huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ValueError, match="could not be loaded: this folder does not exist"):
        vr.RoutingClassifier(name).fit(TEXTS, LABELS)


def test_a_file_is_no_encoder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="could not be loaded: it is a file, not a folder"):
        TextEncoder(str(tmp_path / "file"))


def test_a_name_on_the_hub_becomes_a_folder_without_code(tiny, tmp_path, monkeypatch):
    asked = {}

    def download(name, **options):
        asked[name] = options
        return str(shutil.copytree(tiny, tmp_path / "snapshots/0123abc"))

    monkeypatch.setattr(finding.huggingface_hub, "snapshot_download", download)
    encoder = TextEncoder("someone/some-model", revision="main")
    assert (encoder.name, encoder.revision) == ("someone/some-model", "0123abc")
    assert asked["someone/some-model"]["revision"] == "main"
    assert not any("py" in pattern or "bin" in pattern for pattern in finding.WANTED)


def test_a_hub_that_nobody_answers_for_is_told_in_one_line(tmp_path):
    code = "from vecroute.encoders import TextEncoder; TextEncoder('someone/some-model')"
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | nobody, capture_output=True, text=True, timeout=300
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: encoder 'someone/some-model' could not be loaded: there is no such")
    assert "Connection refused" in last
