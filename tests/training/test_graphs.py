"""The steps that become CUDA graphs on a GPU, run here without graphs: same learning, padding, resuming."""

import pytest
import torch

from tests.training.test_training import D_EMB, DEPTH, Memory, Scored, make_head, make_task
from vecroute.training import Recipe, Trainer, graphs, loop, make_accelerator, states, train
from vecroute.training.graphs import CapturedSteps, padded
from vecroute.training.sampling import kept_inputs
from vecroute.training.states import OnDevice, on_device, read_ahead

CPU = torch.device("cpu")
PLAIN = {"drop_inputs": 0.0, "drop_features": 0.0}


@pytest.fixture
def graphed(monkeypatch):
    """Take steps as on a GPU, but without graphs."""
    monkeypatch.setattr(loop, "DEVICES", ("cpu",))


def resident(task):
    return task._replace(features=OnDevice(task.features, CPU))


def weights_after(recipe, task=None, head=None, **options):
    head = head or make_head()
    history = train(head, task or make_task(), recipe, **options).history
    return history, torch.cat([p.detach().flatten() for p in head.parameters()])


TASKS = {
    "resident": lambda: resident(make_task()),
    "read ahead": make_task,
    "class weights": lambda: resident(make_task(class_weight=torch.tensor([1.0, 2.0, 0.5]))),
    "several labels": lambda: make_task(multi_label=True),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("n_members", [1, 2])
def test_it_learns_what_eager_steps_learn(name, n_members, monkeypatch):
    recipe = Recipe(max_epochs=3, batch_size=8, **PLAIN)
    task = TASKS[name]()
    expected = weights_after(recipe, task, make_head(n_members=n_members))
    monkeypatch.setattr(loop, "DEVICES", ("cpu",))
    found = weights_after(recipe, task, make_head(n_members=n_members))
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    for row, other in zip(found[0], expected[0], strict=True):
        assert row == pytest.approx(other, rel=1e-4)


def test_texts_are_stored_in_different_dtypes(graphed):
    """One text has numbers beyond float16, so it is bfloat16, and a batch with it is float32."""
    task, large = make_task(), 20
    states = [hidden.half() for hidden in task.features.states]
    states[large] = (1e5 * task.features.states[large]).bfloat16()

    class Mixed(Memory):
        def batch(self, which, device):
            if large in which:
                return Memory([state.float() for state in self.states]).batch(which, device)
            return super().batch(which, device)

    task = task._replace(features=Mixed(states))
    _, weights = weights_after(Recipe(max_epochs=1, batch_size=8), task)
    assert weights.isfinite().all()


def test_a_finished_run_keeps_no_captured_steps(graphed):
    trainer = Trainer(
        make_head(), resident(make_task()), Recipe(max_epochs=1), make_accelerator("cpu"), None, 5.0
    )
    trainer.run()
    assert trainer.captured is None


def test_heads_that_take_all_hidden_states(monkeypatch):
    recipe, task = Recipe(max_epochs=2, batch_size=8, **PLAIN), resident(make_task())
    expected = weights_after(recipe, task, Scored())
    monkeypatch.setattr(loop, "DEVICES", ("cpu",))
    torch.testing.assert_close(weights_after(recipe, task, Scored())[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stop_at", [0, 1, 5, 6, 7, 13, 17])
@pytest.mark.parametrize("name", ["resident", "read ahead"])
def test_it_goes_on_after_a_stop_to_the_same_weights(name, stop_at, graphed, tmp_path, monkeypatch):
    recipe, task = Recipe(max_epochs=3, batch_size=8), TASKS[name]()  # 3 epochs of 6 steps
    history, undisturbed = weights_after(recipe, task)
    checkpoint, advance, done = tmp_path / "checkpoint", Trainer.advance, []

    def stopping(self, which):
        if len(done) == stop_at:
            raise KeyboardInterrupt
        done.append(which)
        advance(self, which)

    monkeypatch.setattr(Trainer, "advance", stopping)
    with pytest.raises(KeyboardInterrupt):
        weights_after(recipe, task, checkpoint=checkpoint, checkpoint_seconds=0)
    assert checkpoint.exists() == (stop_at > 0)
    monkeypatch.setattr(Trainer, "advance", advance)
    resumed = weights_after(recipe, task, checkpoint=checkpoint, checkpoint_seconds=0)
    assert torch.equal(resumed[1], undisturbed)
    assert resumed[0] == history


def test_steps_that_are_too_large_are_eager(graphed, monkeypatch):
    eager, step = [], Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self, which: eager.append(which) or step(self, which))
    task = make_task()
    task = task._replace(
        features=Memory([s.repeat(8, 1, 1) for s in task.features.states])
    )  # 24 to 56 positions
    recipe = Recipe(max_epochs=1, batch_size=8, **PLAIN)
    _, graphs_only = weights_after(recipe, task)
    assert not eager
    monkeypatch.setattr(graphs, "BATCH_BYTES", 8 * 48 * DEPTH * D_EMB * 4)
    _, mixed = weights_after(recipe, task)
    assert 0 < len(eager) < 6
    assert min(max(task.features.lengths[k] for k in which) for which in eager) > 48
    torch.testing.assert_close(mixed, graphs_only, rtol=1e-4, atol=1e-5)


def test_the_buffers_of_all_lengths_share_memory(graphed):
    """Together they could be larger than the memory of a GPU."""
    task = make_task()
    task = task._replace(features=Memory([s.repeat(8, 1, 1) for s in task.features.states]))
    trainer = Trainer(make_head(), task, Recipe(batch_size=8), make_accelerator("cpu"), None, 5.0)
    buckets = [trainer.captured.new_bucket(padded(n)) for n in {*task.features.lengths}]
    assert len({bucket.rows.data_ptr() for bucket in buckets}) == 1
    assert max(len(bucket.rows) for bucket in buckets) == len(trainer.captured.rows) == 8 * 64 * DEPTH


def test_without_memory_for_the_buffers_steps_are_eager(graphed, monkeypatch, caplog):
    def none_left(*_):
        raise torch.cuda.OutOfMemoryError("out of memory")

    monkeypatch.setattr(CapturedSteps, "new_rows", none_left)
    found = weights_after(Recipe(max_epochs=1, batch_size=8))
    assert "training steps cannot be CUDA graphs (out of memory): training continues eagerly" in caplog.text
    monkeypatch.setattr(loop, "DEVICES", ())
    expected = weights_after(Recipe(max_epochs=1, batch_size=8))
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_the_loss_is_looked_at_once_in_a_while_and_a_divergence_is_told(graphed, monkeypatch, tmp_path):
    looks, loss = [], CapturedSteps.loss
    monkeypatch.setattr(CapturedSteps, "loss", lambda self: looks.append(1) or loss(self))
    monkeypatch.setattr(loop, "LOOK_EVERY", 4)
    weights_after(Recipe(max_epochs=2, batch_size=8))
    assert len(looks) == 2 * 2  # of six steps, after the fourth and at the end
    task = make_task()
    task.features.states[20][0, 0, 0] = torch.nan
    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(ValueError, match="training diverged: the loss is nan; try a lower lr"):
        weights_after(Recipe(max_epochs=2), task, checkpoint=checkpoint, checkpoint_seconds=0)
    assert not checkpoint.exists()  # a checkpoint never holds weights that diverged


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_the_inputs_of_a_step(share, graphed):
    """Each member keeps as many inputs of each sample as an eager step, and only inputs of that sample."""
    task = resident(make_task())
    for k, states_of in enumerate(torch.split(task.features.rows, 1)):
        states_of.fill_(k + 1)  # each hidden state holds its own number
    recipe = Recipe(max_epochs=1, batch_size=8, drop_inputs=share, drop_features=0.0)
    trainer = Trainer(make_head(n_members=2), task, recipe, make_accelerator("cpu"), None, 5.0)
    batches = [*trainer.batches()[:-1], task.train[:5]]  # the last batch is padded
    trainer.captured.begin(batches)
    for step, which in enumerate(batches):
        n_pos = trainer.captured.n_pos[step]
        bucket = trainer.captured.new_bucket(n_pos)
        trainer.captured.batch.copy_(trainer.captured.table[step])
        bucket.draws.uniform_(generator=torch.Generator().manual_seed(step))
        x, mask, targets = trainer.captured.inputs(bucket)
        assert trainer.captured.batch[1].tolist() == [1] * len(which) + [0] * (8 - len(which))
        lengths = torch.tensor([task.features.lengths[k] for k in (which + which[:1] * 8)[:8]])
        n_kept = kept_inputs(lengths * DEPTH, share).minimum(lengths * DEPTH)
        assert mask.sum(-1).tolist() == [n_kept.tolist()] * 2
        chosen = []
        for member in range(2):
            for row, k in enumerate(which):
                numbers = x[member, row, mask[member, row], 0].tolist()
                start = int(task.features.first[k]) * DEPTH
                every = range(start + 1, start + 1 + task.features.lengths[k] * DEPTH)
                assert len({*numbers}) == len(numbers)
                assert {*numbers} <= {*every}
                chosen.append(numbers)
                assert torch.equal(targets[member, row], task.targets[k])
        if share == 0.3:
            assert chosen[: len(which)] != chosen[len(which) :]  # each member drops its own


def test_features_are_dropped_from_all_hidden_states_of_a_sample(graphed):
    recipe = Recipe(max_epochs=1, batch_size=8, drop_inputs=0.0, drop_features=0.5)
    task = resident(make_task())
    task.features.rows.fill_(1.0)
    trainer = Trainer(make_head(), task, recipe, make_accelerator("cpu"), None, 5.0)
    trainer.captured.begin(trainer.batches())
    trainer.captured.take(0)
    (bucket,) = trainer.captured.buckets.values()
    x, _, _ = trainer.captured.inputs(bucket)  # [1, b, i, d]
    assert torch.equal(x, x[:, :, :1].expand_as(x))
    assert 0.3 < x.mean() < 0.7
    assert len({tuple(row.tolist()) for row in x[0, :, 0]}) == 8  # other features in each sample


def test_samples_without_positions(monkeypatch):
    task = make_task()
    task = resident(task._replace(features=Memory([s[: k % 5] for k, s in enumerate(task.features.states)])))
    recipe = Recipe(max_epochs=1, batch_size=1, **PLAIN)
    expected = weights_after(recipe, task)
    monkeypatch.setattr(loop, "DEVICES", ("cpu",))
    torch.testing.assert_close(weights_after(recipe, task)[1], expected[1], rtol=1e-4, atol=1e-5)


def test_buckets_are_few_and_waste_little():
    lengths = range(1, 2049)
    assert all(n <= padded(n) < n + max(16, n / 4) for n in lengths)
    assert [padded(n) for n in (1, 16, 17, 64, 65, 129, 257, 513)] == [16, 16, 32, 64, 80, 160, 320, 640]
    assert len({padded(n) for n in lengths}) == 24


@pytest.mark.parametrize("part_bytes", [1, 10_000])
def test_hidden_states_on_the_device(part_bytes, monkeypatch):
    monkeypatch.setattr(states, "PART_BYTES", part_bytes)
    source = make_task().features
    held = OnDevice(source, CPU)
    for which in ([0], [3, 1, 59], list(range(60))):
        for found, expected in zip(held.batch(which, CPU), source.batch(which, CPU), strict=True):
            assert torch.equal(found, expected)
    assert on_device(source, CPU) is source
    assert on_device(held, torch.device("cuda")) is held


def test_batches_are_read_ahead():
    source, batches, read = make_task().features, [[k, k + 1] for k in range(0, 12, 2)], []
    batch = source.batch

    def watched(which, device):
        read.append(which)
        return batch(which, device)

    source.batch = watched
    for k, hidden in enumerate(read_ahead(source, batches, CPU)):
        assert torch.equal(hidden, batch(batches[k], CPU)[0])
    assert read == batches


def test_what_cannot_be_captured_is_eager(graphed):
    accelerator = make_accelerator("cpu")
    for recipe, expected in ((Recipe(), True), (Recipe(mixup=0.2), False)):
        trainer = Trainer(make_head(), make_task(), recipe, accelerator, None, 5.0)
        assert (trainer.captured is not None) == expected
