"""Pretraining of the small vision Transformer at a tiny size: data, views, losses, runs, and output files."""

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.paths import ROOT
from vecroute.encoders import VisionEncoder

sys.path.insert(0, str(ROOT / "scripts"))

import cifar10
import pretrain_vit
import vit_probe
from vit_model import Sizes, ViT, export

TINY = [
    "--batch",
    "16",
    "--width",
    "16",
    "--layers",
    "2",
    "--heads",
    "2",
    "--projection",
    "24",
    "--log",
    "2",
    "--probe-steps",
    "20",
]
SIZES = Sizes(d=16, layers=2, heads=2)


@pytest.fixture(scope="module")
def arrays():
    """Return ten images for each file. Images of one label have one colour, with noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3  # [60]
    colours = np.eye(3)[labels][..., None, None] * 160 + 40  # [60, 3, 1, 1]
    noise = rng.integers(0, 40, (60, 3, 32, 32))
    return (colours + noise).astype(np.uint8), labels


def write_sheets(folder: Path, pixels, labels) -> None:
    names = [*cifar10.TRAIN, "test_batch"]
    for name, part in zip(names, np.split(pixels, 6), strict=True):
        Image.fromarray(part.transpose(0, 2, 3, 1).reshape(10, 1024, 3)).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(labels[:50].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(labels[50:].tolist()))


def write_binary(folder: Path, pixels, labels) -> None:
    rows = np.concatenate([labels[:, None].astype(np.uint8), pixels.reshape(60, -1)], 1)
    for name, part in zip([*cifar10.TRAIN, "test_batch"], np.split(rows, 6), strict=True):
        (folder / f"{name}.bin").write_bytes(part.tobytes())


def write_pickled(folder: Path, pixels, labels) -> None:
    for k, name in enumerate([*cifar10.TRAIN, "test_batch"]):
        part = slice(10 * k, 10 * k + 10)
        content = {b"data": pixels[part].reshape(10, -1), b"labels": labels[part].tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture(scope="module")
def sheets(tmp_path_factory, arrays):
    folder = tmp_path_factory.mktemp("sheets")
    write_sheets(folder, *arrays)
    return folder


@pytest.mark.parametrize("write", [write_sheets, write_binary, write_pickled])
def test_every_kind_of_file_gives_the_same(tmp_path, arrays, write):
    (tmp_path / "deeper").mkdir()
    write(tmp_path / "deeper", *arrays)
    train, test = cifar10.read(tmp_path, train=True), cifar10.read(tmp_path, train=False)
    np.testing.assert_array_equal(train.pixels, arrays[0][:50])
    np.testing.assert_array_equal(test.pixels, arrays[0][50:])
    assert train.labels.tolist() == arrays[1][:50].tolist()
    assert test.labels.tolist() == arrays[1][50:].tolist()


def test_missing_files_are_named_and_pickles_run_nothing(tmp_path, arrays):
    with pytest.raises(ValueError, match=r"must contain CIFAR-10, but data_batch_1, .* is missing"):
        cifar10.read(tmp_path, train=True)
    write_sheets(tmp_path, *arrays)
    (tmp_path / "data_batch_4.png").unlink()
    with pytest.raises(ValueError, match="CIFAR-10, but data_batch_4 is missing"):
        cifar10.read(tmp_path, train=True)
    (tmp_path / "test_lables.json").unlink()
    assert cifar10.read(tmp_path, train=False).labels is None

    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "test_batch").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"must contain arrays only, got posix.mkdir"):
        cifar10.read(tmp_path / "bad", train=False)
    assert not (tmp_path / "made").exists()


class TestViews:
    def test_they_are_images_and_differ(self, arrays):
        pixels = torch.from_numpy(arrays[0])
        first, second = cifar10.views(pixels), cifar10.views(pixels)
        assert first.shape == (60, 3, 32, 32)
        assert first.min() >= -1
        assert first.max() <= 1
        assert (first - second).abs().mean((1, 2, 3)).min() > 0.01

    def test_crops_keep_one_colour_and_show_parts(self):
        images = torch.rand(50, 3, 1, 1).expand(-1, -1, 32, 32)
        torch.testing.assert_close(cifar10.random_crop(images), images, rtol=1e-4, atol=1e-4)
        ramp = torch.linspace(0, 1, 32).expand(200, 3, 32, 32)  # from left to right
        rows = cifar10.random_crop(ramp)[:, 0, 16]  # [200, 32]
        spread = rows.amax(1) - rows.amin(1)  # [200]
        assert spread.min() > 0.3
        assert spread.max() > 0.95
        assert spread.mean() < 0.9
        assert 0.3 < (rows[:, 0] > rows[:, -1]).float().mean() < 0.7  # about half are flipped

    def test_hues_turn_and_brightness_stays(self):
        images = torch.full((300, 3, 2, 2), 0.4)
        images[:, 0] = 0.6
        turned = cifar10.change_colours(images)
        spread = turned.amax(1) - turned.amin(1)  # spread of the colours
        assert spread.std() > 0.01
        assert turned[:, 0].std() > 0.05
        assert (turned[:, 1] - turned[:, 2]).abs().max() > 0.03  # the colours were the same before
        assert abs(float(cifar10.luminance(turned).mean() - cifar10.luminance(images).mean())) < 0.02


class TestLosses:
    def test_info_nce_by_hand(self):
        queries, keys = torch.randn(6, 5), torch.randn(6, 5)
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (queries, keys))
        total = torch.tensor(0.0)
        for i in range(6):
            other = range(3, 6) if i < 3 else range(3)
            likes = torch.stack([q[i] @ k[j] / 0.2 for j in other])
            total = total - likes.log_softmax(0)[i % 3]
        torch.testing.assert_close(pretrain_vit.info_nce(queries, keys, 0.2), 0.2 * total / 3)

    def test_the_student_sees_nothing_of_the_other_patches(self):
        encoder = ViT(SIZES)
        images = torch.randn(1, 3, 32, 32)
        keep = torch.tensor([[0, 9, 63]])
        changed = torch.randn(1, 3, 32, 32)
        for place in keep[0]:
            y, x = 4 * int(place) // 32 * 4, 4 * (int(place) % 8)
            changed[:, :, y : y + 4, x : x + 4] = images[:, :, y : y + 4, x : x + 4]
        for a, b in zip(encoder(images, keep), encoder(changed, keep), strict=True):
            assert a.shape == (1, 4, 16)
            torch.testing.assert_close(a, b)
        assert not torch.allclose(encoder(images)[-1], encoder(changed)[-1])

    def test_the_teacher_follows_and_learns_nothing_by_itself(self):
        model = pretrain_vit.Pretraining(SIZES, width=24)
        model(torch.randn(8, 3, 32, 32))["loss"].backward()
        assert all(p.grad is None for p in model.teacher.parameters())
        assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("teacher"))
        with torch.no_grad():
            for parameter in model.student.parameters():
                parameter.add_(1.0)
        before = [p.clone() for p in model.teacher.parameters()]
        model.follow(0.9)
        for old, new, student in zip(
            before, model.teacher.parameters(), model.student.parameters(), strict=True
        ):
            torch.testing.assert_close(new, 0.9 * old + 0.1 * student)

    def test_rates(self):
        rates = [pretrain_vit.learning_rate(k / 100, 2.0) for k in range(101)]
        assert rates[0] == 0
        assert rates.index(max(rates)) == 4
        assert max(rates) == 2
        assert rates[-1] == pytest.approx(0, abs=1e-9)


def test_the_encoder_is_what_hugging_face_reads(tmp_path):
    encoder = ViT(SIZES).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_((parameter + torch.randn_like(parameter) / 10).half())
    export(encoder, tmp_path, "about")
    loaded = VisionEncoder(str(tmp_path), dtype=torch.float32)
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        states = torch.stack(encoder(cifar10.normalize(pixels.float() / 255)), 2)  # [3, 65, depth, d]
    assert loaded.grid == (8, 8)
    torch.testing.assert_close(torch.stack(loaded.encode(list(pixels))), states, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "README.md").read_text() == "about"


def test_the_size_that_is_shipped_fits():
    n_parameters = sum(parameter.numel() for parameter in ViT(Sizes()).parameters())
    assert 2e6 < n_parameters < 6e6
    assert 2 * n_parameters < 12e6  # bytes


class TestRuns:
    def run(self, sheets, out, *more):
        return pretrain_vit.main(["--data", str(sheets), "--out", str(out), *TINY, *more])

    def test_a_run_learns_and_writes_an_encoder_that_loads(self, sheets, tmp_path):
        result = self.run(sheets, tmp_path, "--steps", "24", "--lr", "0.01")
        losses = [line["loss"] for line in result["history"]]
        assert len(losses) == 12
        assert losses[-1] < 0.9 * losses[0]
        assert all(0 <= share <= 1 for share in result["accuracy"].values())
        assert json.loads((tmp_path / "result.json").read_text()) == result
        encoder = VisionEncoder(str(tmp_path / "encoder"))
        assert (encoder.depth, encoder.d_emb, encoder.n_pos) == (3, 16, 65)
        card = (tmp_path / "encoder" / "README.md").read_text()
        assert "24 steps" in card
        for name, share in result["accuracy"].items():
            assert f"| {name} | {share:.4f} |" in card

    def test_a_stopped_run_goes_on(self, sheets, tmp_path, capsys):
        first = self.run(sheets, tmp_path, "--stop-after", "0", "--seconds", "600")
        assert (first["steps"], first["accuracy"]) == (0, {})
        self.run(sheets, tmp_path, "--steps", "3")
        second = self.run(sheets, tmp_path, "--steps", "6")
        assert second["steps"] == 6
        assert "resumes at step 3" in capsys.readouterr().out
        assert second["accuracy"]

    def test_a_failed_save_leaves_the_last_checkpoint(self, sheets, tmp_path, monkeypatch):
        self.run(sheets, tmp_path, "--steps", "2", "--probe-steps", "0")
        before = (tmp_path / "checkpoint.pt").read_bytes()

        def fail(state, path):
            Path(path).write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            self.run(sheets, tmp_path, "--steps", "4")
        assert (tmp_path / "checkpoint.pt").read_bytes() == before

    def test_a_loss_that_is_no_number_is_told(self, sheets, tmp_path, monkeypatch):
        monkeypatch.setattr(pretrain_vit, "info_nce", lambda *_: torch.tensor(torch.nan, requires_grad=True))
        with pytest.raises(ValueError, match="the loss is nan at step 2: try a lower --lr"):
            self.run(sheets, tmp_path, "--steps", "4")
        assert not (tmp_path / "checkpoint.pt").exists()


def test_probes_find_what_is_there():
    torch.manual_seed(0)
    labels = torch.arange(300) % 3
    vectors = torch.eye(3)[labels] * 2 + torch.randn(300, 3) * 0.3
    known, asked = slice(0, 200), slice(200, 300)
    for probe in (vit_probe.neighbours, lambda *given: vit_probe.linear(*given, steps=600)):
        right = probe(vectors[known], labels[known], vectors[asked]) == labels[asked]
        assert right.float().mean() > 0.97
        shuffled = probe(vectors[known], labels[known][torch.randperm(200)], vectors[asked]) == labels[asked]
        assert shuffled.float().mean() < 0.6
