"""On a GPU, training steps are CUDA graphs: they learn what eager steps learn, and resume exactly."""

import pytest
import torch

import vecroute as vr
from tests.training.test_training import Memory
from vecroute.training import Recipe, Task, Trainer, loop, make_accelerator, states, train
from vecroute.training.checkpoint import read_checkpoint

pytestmark = pytest.mark.gpu
DEPTH, D_EMB, N = 3, 64, 300


class Smaller(Memory):
    position_bytes = DEPTH * D_EMB * 4


def make_task(**options):
    """Return 300 samples of 3 to 60 positions, so that a few buckets are needed."""
    generator = torch.Generator().manual_seed(5)
    classes = torch.arange(N) % 3
    hidden = [torch.randn(3 + 7 * k % 58, DEPTH, D_EMB, generator=generator).half() for k in range(N)]
    for k, x in enumerate(hidden):
        x[..., classes[k]] += 1
    targets = torch.nn.functional.one_hot(classes, 3).float()
    return Task(Smaller(hidden), targets, list(range(60, N)), list(range(60)), **options)


def make_head(**options):
    torch.manual_seed(3)
    return vr.RoutingHead(d_emb=D_EMB, depth=DEPTH, n_cls=3, **options)


def weights_after(recipe, task=None, head=None, **options):
    head = make_head() if head is None else head
    history = train(
        head, task or make_task(), recipe, accelerator=make_accelerator("cuda"), **options
    ).history
    return history, torch.cat([p.detach().flatten() for p in head.parameters()])


@pytest.mark.parametrize("n_members", [1, 3])
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_graphs_learn_what_eager_steps_learn(n_members, mixed_precision, monkeypatch):
    recipe = Recipe(
        max_epochs=3, batch_size=32, drop_inputs=0.0, drop_features=0.0, mixed_precision=mixed_precision
    )
    found = weights_after(recipe, head=make_head(n_members=n_members))
    monkeypatch.setattr(loop, "DEVICES", ())
    expected = weights_after(recipe, head=make_head(n_members=n_members))
    digits = 1e-3 if mixed_precision == "no" else 2e-2
    for row, other in zip(found[0], expected[0], strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=digits)
        assert row["valid_loss"] == pytest.approx(other["valid_loss"], rel=digits)
    # AdamW moves a weight whose gradient is almost zero by rounding errors, so compare the mean.
    first = torch.cat([p.detach().flatten() for p in make_head(n_members=n_members).parameters()]).cuda()
    assert (found[1] - expected[1]).abs().mean() < 10 * digits * (expected[1] - first).abs().mean()


def test_every_step_is_a_graph_of_one_of_a_few_buckets(monkeypatch, caplog):
    monkeypatch.setattr(Trainer, "train_step", lambda *_: pytest.fail("an eager step"))
    trainer = Trainer(make_head(), make_task(), Recipe(max_epochs=2), make_accelerator("cuda"), None, 5.0)
    captured = trainer.captured
    trainer.run()
    assert sorted(captured.buckets) == [16, 32, 48, 64]
    assert not captured.failed
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("stop_at", [1, 7, 8, 13])
@pytest.mark.parametrize("n_members", [1, 3])
def test_it_goes_on_after_a_stop_to_the_same_weights(n_members, stop_at, tmp_path, monkeypatch):
    recipe = Recipe(max_epochs=2, batch_size=32)  # 2 epochs of 8 steps
    history, undisturbed = weights_after(recipe, head=make_head(n_members=n_members))
    checkpoint, advance, done = tmp_path / "checkpoint", Trainer.advance, []

    def stopping(self, which):
        if len(done) == stop_at:
            raise KeyboardInterrupt
        done.append(which)
        advance(self, which)

    monkeypatch.setattr(Trainer, "advance", stopping)
    options = {"checkpoint": checkpoint, "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        weights_after(recipe, head=make_head(n_members=n_members), **options)
    monkeypatch.setattr(Trainer, "advance", advance)
    resumed = weights_after(recipe, head=make_head(n_members=n_members), **options)
    assert torch.equal(resumed[1], undisturbed)
    assert resumed[0] == history


def test_states_that_do_not_fit_are_copied_ahead(monkeypatch):
    recipe = Recipe(max_epochs=2)
    _, resident = weights_after(recipe)
    monkeypatch.setattr(states, "MEMORY_SHARE", 0.0)
    # Validation reads padded batches of other shapes, but steps see the same numbers.
    _, ahead = weights_after(recipe)
    assert torch.equal(ahead, resident)


def test_a_divergence_is_told(tmp_path):
    task, checkpoint = make_task(), tmp_path / "checkpoint"
    task.features.states[100][:] = torch.nan  # all of it, because most inputs are dropped
    with pytest.raises(ValueError, match="training diverged: the loss is nan; try a lower lr"):
        weights_after(Recipe(max_epochs=2), task, checkpoint=checkpoint, checkpoint_seconds=0)
    _, _, tensors = read_checkpoint(checkpoint)  # of a step before the sample was met
    assert all(tensor.isfinite().all() for tensor in tensors.values())


class Asks(torch.nn.Module):
    """A head that needs a value on the host, which a CUDA graph cannot give."""

    def __init__(self):
        super().__init__()
        self.head = make_head()

    def forward(self, hidden, mask):
        assert mask.any().item()
        return self.head(hidden, mask)


def test_a_head_that_cannot_be_captured_learns_eagerly(caplog, monkeypatch):
    recipe = Recipe(max_epochs=1)
    history, weights = weights_after(recipe, head=Asks())
    assert "training steps cannot be CUDA graphs" in caplog.text
    assert caplog.text.count("training continues eagerly") == 1
    monkeypatch.setattr(loop, "DEVICES", ())
    expected = weights_after(recipe, head=Asks())
    torch.testing.assert_close(weights, expected[1], rtol=1e-3, atol=1e-4)
    assert history[0]["loss"] == pytest.approx(expected[0][0]["loss"], rel=1e-3)
