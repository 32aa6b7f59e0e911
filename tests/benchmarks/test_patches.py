"""The benchmarks of images at a tiny size: hidden states of CIFAR-10, linear probes, maps of patches."""

import csv
import dataclasses
import queue
import sys
import threading

import numpy as np
import pytest
import torch

from tests.helpers.paths import ROOT
from tests.scripts.test_pretraining import SIZES, write_sheets
from vecroute.encoders import VisionEncoder
from vecroute.heads import make_head
from vecroute.io.images import Picture

sys.path.insert(0, str(ROOT / "benchmarks"))
import accuracy
import corpora
import jobs
import patches
from scoring import top_5
from stacked import as_means
from vit_model import ViT, export


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a random encoder, and sheets of 50 training and 10 test images of three colours with noise."""
    folder = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    export(ViT(SIZES), folder / "encoder", "")
    labels = np.arange(60) // 2 % 3  # [60]
    colours = np.eye(3)[labels][..., None, None] * 120 + 40  # [60, 3, 1, 1]
    noise = np.random.default_rng(0).integers(0, 80, (60, 3, 32, 32))
    write_sheets(folder, (colours + noise).astype(np.uint8), labels)
    return folder


@pytest.fixture(scope="module")
def encoder(folder):
    return VisionEncoder(str(folder / "encoder"), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def viewer(encoder):
    head = make_head("wide", seed=0, d_emb=encoder.d_emb, depth=encoder.depth, n_cls=10)
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return patches.Viewer(encoder, head)


@pytest.fixture(scope="module")
def pixels(folder, encoder):
    return corpora.pixel_values(encoder, corpora.images("test", folder)[0])[:3]


def test_a_tenth_of_the_training_images_is_kept_to_choose_on(folder):
    found = {split: corpora.images(split, folder) for split in ("train", "dev", "test")}
    assert [len(labels) for _, labels in found.values()] == [45, 5, 10]
    every = torch.cat([images for images, _ in found.values()]).flatten(1)
    assert len(every.unique(dim=0)) == 60
    for images, labels in found.values():
        assert torch.equal(images.float().mean((2, 3)).argmax(1), labels)


def test_hidden_states_are_those_of_the_encoder(folder, encoder):
    images, labels = corpora.images("test", folder)
    arrays = [image.permute(1, 2, 0).numpy() for image in images]
    values = corpora.pixel_values(encoder, images)
    torch.testing.assert_close(values, encoder.pixels([Picture.of(array) for array in arrays]))
    packed = corpora.encode_images(encoder, images, labels, batch_size=4)
    assert (len(packed), packed.special, packed.hidden.dtype) == (10, 1, torch.float16)
    for k, expected in enumerate(encoder.encode(arrays)):
        own = packed.hidden[packed.start[k] : packed.start[k] + packed.length[k]].float()
        torch.testing.assert_close(own, expected, rtol=2e-3, atol=2e-3)


def test_images_of_another_size_are_refused(encoder):
    with pytest.raises(SystemExit, match=r"must take images \[16, 16\], not \(32, 32\)"):
        corpora.pixel_values(encoder, torch.zeros(1, 3, 16, 16))


def test_linear_probes_see_the_mean_patch_alone(folder, encoder):
    splits = {
        name: corpora.encode_images(encoder, *corpora.images(name, folder), 50) for name in ("train", "test")
    }
    found = as_means(splits)
    hidden = {name: data.hidden.float().view(len(data), 65, 3, 16) for name, data in splits.items()}
    means = {
        name: torch.nn.functional.layer_norm(x[:, 1:], (16,)).mean(1) for name, x in hidden.items()
    }  # [n, 3, 16] each
    for name, data in found.items():
        expected = (means[name] - means["train"].mean(0)) / means["train"].std(0)
        torch.testing.assert_close(data.hidden.float(), expected, rtol=1e-2, atol=1e-2)
        assert data.start.tolist() == list(range(len(data)))
        assert data.length.tolist() == [1] * len(data)
        assert torch.equal(data.label, splits[name].label)
    job = accuracy.search_jobs("cifar10", accuracy.LINEAR, 1)[0]
    training = dataclasses.replace(job.training, epochs=1)
    job = dataclasses.replace(job, recipes=job.recipes[:1], training=training)
    done = jobs.run_job(job, splits | {"dev": splits["test"]})
    assert done.parameters == 10 * (3 * 16 + 1)


def test_top_5_is_of_more_than_five_classes():
    p = np.array([[0.3, 0.25, 0.2, 0.15, 0.09, 0.01]] * 4)
    assert top_5(p, np.array([0, 4, 5, 5])) == 0.5
    assert top_5(p[:, :5], np.array([0, 0, 0, 0])) is None


def test_patches_are_painted_with_the_mean_colour(viewer, pixels):
    keep = torch.zeros(3, 64, dtype=torch.bool)
    keep[:, 13] = True  # the second row, the sixth column
    found = viewer.painted(pixels, keep)
    mean = pixels.mean((2, 3))
    torch.testing.assert_close(found[..., 4:8, 20:24], pixels[..., 4:8, 20:24])
    found[..., 4:8, 20:24] = mean[..., None, None]
    torch.testing.assert_close(found, mean[..., None, None].expand_as(found))
    assert torch.equal(viewer.painted(pixels, torch.ones_like(keep)), pixels)


def test_what_pixels_say_is_summed_over_their_patch(viewer, pixels):
    found = viewer.sums(pixels)
    assert found.shape == (3, 65)
    assert (found[:, 0] == 0).all()
    torch.testing.assert_close(found[:, 1 + 13], pixels[..., 4:8, 20:24].sum((1, 2, 3)))
    torch.testing.assert_close(found.sum(1), pixels.sum((1, 2, 3)))


class Knowing(patches.Viewer):
    """A head that gives class 1 to images whose patch 13 is not blank, and class 0 to others."""

    def scores(self, view):
        seen = view.pixels[..., 4:8, 20:24].std((1, 2, 3)) > view.pixels.std((1, 2, 3)).min() + 0.1  # [b]
        return torch.stack([torch.zeros(len(seen)), 40.0 * seen - 20], -1)


def test_areas_of_a_head_whose_truth_is_known(encoder, viewer):
    seer = Knowing(encoder, viewer.head)
    pixels = torch.zeros(2, 3, 32, 32)
    pixels[..., 4:8, 20:24:2], pixels[..., 4:8, 21:24:2] = 5.0, -5.0
    target = torch.ones(2, dtype=torch.long)
    said = torch.zeros(2, 64)
    said[0, 13], said[1, 13] = 1.0, -1.0  # right for the first image, wrong for the second
    for step in (1, 8, 60):
        deletion, insertion = patches.areas(seer, pixels, said, target, step)
        first, last = step / 64 / 2, (64 % step or step) / 64 / 2  # of a fall, or a rise, in one step
        assert deletion.tolist() == pytest.approx([first, 1 - last], abs=1e-4)
        assert insertion.tolist() == pytest.approx([1 - first, last], abs=1e-4)


@pytest.mark.parametrize("name", patches.methods())
def test_methods_say_the_same_of_images_alone_and_add_up_if_they_promise_to(viewer, pixels, name):
    method = patches.methods()[name]
    target, other = viewer.scores(viewer.view(pixels)).topk(2).indices.unbind(-1)
    values, error = method(viewer, viewer.view(pixels), target, other)
    assert values.shape == (3, 65)
    assert viewer.patches(values).shape == (3, 64)
    assert all(row.unique().numel() > 1 for row in viewer.patches(values))
    assert (error is not None) == name.startswith(("states", "integrated"))
    if error is not None:
        assert error.max() < (0.03 if name.startswith("integrated") else 1e-5)
    alone = method(viewer, viewer.view(pixels[1:2]), target[1:2], other[1:2]).values[0]
    torch.testing.assert_close(alone, values[1], rtol=1e-3, atol=1e-4)


def test_rollout_is_of_the_attention_of_the_encoder(viewer, pixels):
    found = patches.rollout(viewer.encoder.model, pixels)  # [b, n_pos, n_pos]
    torch.testing.assert_close(found.sum(-1), torch.ones(3, 65))
    view = viewer.view(pixels)
    assert torch.equal(patches.by_rollout("[CLS]")(viewer, view, None, None).values, found[:, 0])
    assert torch.equal(patches.by_rollout("mean")(viewer, view, None, None).values, found.mean(1))


class InThisProcess(accuracy.Workers):
    """A replacement for ``Workers`` that runs jobs in this process."""

    def __init__(self, splits, options, about):
        self.splits, self.jobs, self.results, self.processes = splits, self, queue.SimpleQueue(), []
        self.state, self.limit, self.about = options.state, options.limit, about
        self.waiting, self.lock = {}, threading.Lock()

    def put(self, job):
        with self.lock:
            self.results.put(None if job is None else jobs.run_job(job, self.splits))


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_from_images_to_rows_of_heads_and_of_maps(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "Workers", InThisProcess)
    shared = ["--device", "cpu", "--data", str(folder), "--encoder", str(folder / "encoder"), "--short"]
    shared += ["--results", str(tmp_path)]
    monkeypatch.setattr(accuracy, "LOWEST", 1e-3)  # the grid of learning rates does not grow
    monkeypatch.setattr(accuracy, "HIGHEST", 1e-3)
    raced = ["--tasks", "cifar10", "--heads", "routing", accuracy.LINEAR, "--state", str(tmp_path / "state")]
    accuracy.main([*shared, *raced, "--save", str(tmp_path / "heads")])
    rows = rows_of(tmp_path / "accuracy.csv")
    assert [row["head"] for row in rows] == ["routing", accuracy.LINEAR]
    for row in rows:
        assert 0 <= float(row["test"]) <= float(row["test_top5"]) <= 1
    patches.main([*shared, "--weights", str(tmp_path / "heads")])
    rows = rows_of(tmp_path / "patches_images.csv")
    assert len(rows) == 2 * len(patches.methods())
    assert {row["image"] for row in rows} <= set(map(str, range(10)))
    labels = corpora.images("test", folder)[1]
    for row in rows:
        assert int(row["label"]) == labels[int(row["image"])]
        assert float(row["difference_alone"]) < 1e-3
    check_summary(rows, tmp_path)


def check_summary(rows, results):
    patches.main(["--summarize", "--results", str(results)])
    assert (results / "patches.png").stat().st_size > 10_000
    summary = {
        (r["head"], r["method"], r["measure"]): float(r["mean"]) for r in rows_of(results / "patches.csv")
    }

    def mean(method, measure):
        own = [float(r[measure]) for r in rows if (r["head"], r["method"]) == ("routing", method)]
        return np.mean(own)

    for measure in ("deletion", "insertion", "seconds"):
        assert summary["routing", "random", measure] == pytest.approx(mean("random", measure), rel=1e-3)
    ahead = mean(patches.OURS, "insertion") - mean("random", "insertion")
    assert summary["routing", "random", "insertion_ahead"] == pytest.approx(ahead, abs=1e-3)
    ahead = mean("random", "deletion") - mean(patches.OURS, "deletion")
    assert summary["routing", "random", "deletion_ahead"] == pytest.approx(ahead, abs=1e-3)
