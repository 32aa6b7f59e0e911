"""Checkpoints: damaged ones are renamed with a warning, and trained weights survive a full disk."""

import errno
import json
import logging

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.training.test_training import make_head, make_task
from vecroute import storage
from vecroute.training import Recipe, Trainer, make_accelerator, train

RECIPE = Recipe(max_epochs=2, batch_size=8)  # 2 epochs of 6 steps


def trained(checkpoint=None, seconds=0):
    head = make_head()
    train(head, make_task(), RECIPE, checkpoint=checkpoint, checkpoint_seconds=seconds)
    return torch.cat([p.detach().flatten() for p in head.parameters()])


@pytest.fixture(scope="module")
def undisturbed():
    return trained()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the checkpoint of a run that was stopped after 8 steps."""
    checkpoint, step, done = tmp_path_factory.mktemp("stopped") / "checkpoint", Trainer.train_step, []

    def stopping(self, which):
        if len(done) == 8:
            raise KeyboardInterrupt
        done.append(which)
        return step(self, which)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            trained(checkpoint)
    return checkpoint.read_bytes()


@pytest.fixture
def stopped(written, tmp_path):
    (tmp_path / "checkpoint").write_bytes(written)
    return tmp_path / "checkpoint"


def flip(place):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[place(len(data))] ^= 1
        path.write_bytes(data)

    return damage


def resealed(change):
    """An attacker who changes a checkpoint may also correct its checksum."""

    def damage(path):
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["vecroute"])
        change(tensors, about["progress"])
        storage.save_tensors(path, tensors, about)

    return damage


def without(name):
    return resealed(lambda tensors, progress: tensors.pop(name))


def progress(**entries):
    return resealed(lambda tensors, progress: progress.update(entries))


def tensor(change):
    return resealed(lambda tensors, progress: tensors.update({NAME: change(tensors[NAME])}))


NAME = "head.network.1.W_F2"
DAMAGES = {
    "a bit of the weights": flip(lambda n: n - 1000),
    "the last bit": flip(lambda n: n - 1),
    "a bit of the header": flip(lambda n: 200),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: save_file({"x": torch.zeros(2)}, path),
    "no tensor of weights": without(NAME),
    "no tensor of the optimizer": without("exp_avg.network.1.W_F2"),
    "one more tensor": resealed(lambda tensors, progress: tensors.update(more=torch.zeros(1))),
    "another shape": tensor(lambda t: t[:1].clone()),
    "another dtype": tensor(lambda t: t.double()),
    "not finite": tensor(lambda t: t * float("nan")),
    "a million epochs": progress(epoch=10**6),
    "epochs that were never": progress(epoch=-1),
    "a step too many": progress(step=7),
    "a step that is no number": progress(step="1"),
    "a loss that is no number": progress(loss=float("nan")),
    "too good": progress(best=2.0),
    "weights of an epoch to come": progress(kept=9),
    "no history": progress(history=[]),
    "no progress": resealed(lambda tensors, progress: progress.update(evil=1)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_training_starts_again(damage, stopped, undisturbed, caplog):
    DAMAGES[damage](stopped)
    damaged = stopped.read_bytes()
    assert torch.equal(trained(stopped, seconds=1e9), undisturbed)
    (message,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"{stopped} is damaged" in message
    assert "training starts again" in message
    assert stopped.with_name("checkpoint.damaged").read_bytes() == damaged


def test_an_undamaged_one_is_gone_on_from(stopped, undisturbed, monkeypatch, caplog):
    steps, step = [], Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self, which: steps.append(which) or step(self, which))
    assert torch.equal(trained(stopped), undisturbed)
    assert len(steps) == 4
    assert not caplog.records


def test_a_finished_run_is_not_trained_again(tmp_path, undisturbed, monkeypatch):
    """A checkpoint is always written at the end."""
    checkpoint = tmp_path / "checkpoint"
    trained(checkpoint, seconds=1e9)
    monkeypatch.setattr(Trainer, "train_step", lambda *_: pytest.fail("trained again"))
    assert torch.equal(trained(checkpoint), undisturbed)


def test_a_disk_that_fills_up_stops_nothing_and_is_told_once(tmp_path, undisturbed, monkeypatch, caplog):
    write, written = storage.write_file, []

    def full(path, data):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        write(path, data)

    monkeypatch.setattr(storage, "write_file", full)
    checkpoint = tmp_path / "checkpoint"
    assert torch.equal(trained(checkpoint), undisturbed)
    assert [r.message.split("checkpoint")[-1] for r in caplog.records] == [
        " cannot be written ([Errno 28] No space left on device): training continues without"
    ]
    monkeypatch.undo()
    task, accelerator = make_task(), make_accelerator()
    trainer = Trainer(make_head(), task, RECIPE, accelerator, checkpoint, 0)
    assert trainer.progress.step == 3  # the last step whose checkpoint could be written
    assert torch.equal(trained(checkpoint), undisturbed)
