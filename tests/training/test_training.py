"""The training loop: it learns, is repeatable, resumes after a stop, and fits in memory."""

import math
import os
import subprocess
import sys

import pytest
import torch

import vecroute as vr
from tests.heads.test_members import alone
from tests.helpers.paths import ROOT
from vecroute.training import Recipe, Task, Trainer, epochs_for, loop, make_accelerator, train
from vecroute.training.sampling import compact, drop_features, drop_inputs, mix, seeded, shuffled_batches

DEPTH, D_EMB = 2, 8


class Memory:
    """A source of hidden states that are in memory."""

    position_bytes = DEPTH * D_EMB * 4

    def __init__(self, states):
        self.states, self.lengths = states, [len(s) for s in states]

    def batch(self, which, device):
        padded = torch.nn.utils.rnn.pad_sequence([self.states[k] for k in which], batch_first=True)
        lengths = torch.tensor([self.lengths[k] for k in which])
        return padded.to(device), (torch.arange(padded.shape[1]) < lengths[:, None]).to(device)


def make_task(n=60, n_cls=3, n_valid=15, **options):
    """Return samples whose class determines one coordinate of their vectors."""
    generator = torch.Generator().manual_seed(5)
    states, classes = [], torch.arange(n) % n_cls
    for k in range(n):
        x = torch.randn(3 + k % 5, DEPTH, D_EMB, generator=generator)
        x[..., classes[k]] += 1
        states.append(x)
    targets = torch.nn.functional.one_hot(classes, n_cls).float()
    every = list(range(n))
    return Task(Memory(states), targets, every[n_valid:], every[:n_valid], **options)


def make_head(n_cls=3, **options):
    torch.manual_seed(3)
    return vr.RoutingHead(d_emb=D_EMB, depth=DEPTH, n_cls=n_cls, n_hid=4, **options)


def weights_after(recipe, task=None, before=0, **options):
    head = make_head()
    torch.manual_seed(before)
    history = train(head, task or make_task(), recipe, **options).history
    return history, torch.cat([p.detach().flatten() for p in head.parameters()])


def test_it_learns():
    task = make_task(n=300, n_valid=60)
    head = make_head()
    # The class is in a single feature, which must not be dropped.
    recipe = Recipe(max_epochs=8, lr=1e-2, batch_size=16, drop_inputs=0.5, drop_features=0.0)
    history, kept, _ = train(head, task, recipe)
    assert len(history) <= 8
    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    hidden, mask = task.features.batch(task.valid, torch.device("cpu"))
    right = task.right(head(hidden, mask), task.targets[task.valid]).mean().item()
    assert right > 0.8
    # At the end, the head holds the running means of the weights, which were validated.
    assert right == pytest.approx(history[kept]["valid_accuracy"])


def test_the_seed_decides_everything():
    recipe = Recipe(max_epochs=2, batch_size=8, drop_inputs=0.3, mixup=0.4)
    _, first = weights_after(recipe)
    _, again = weights_after(recipe, before=99)  # other random numbers do not matter
    _, other = weights_after(Recipe(max_epochs=2, batch_size=8, drop_inputs=0.3, mixup=0.4, seed=1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_it_leaves_the_random_numbers_of_others_alone():
    head, task = make_head(), make_task()
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    train(head, task, Recipe(max_epochs=1, mixup=0.3))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("stop_at", [0, 1, 5, 6, 7, 13, 17])
def test_it_goes_on_after_a_stop_to_the_same_weights(stop_at, tmp_path, monkeypatch):
    recipe = Recipe(max_epochs=3, batch_size=8, mixup=0.2)  # 3 epochs of 6 steps
    undisturbed = weights_after(recipe)
    checkpoint, step, done = tmp_path / "checkpoint", Trainer.train_step, []

    def stopping(self, which):
        if len(done) == stop_at:
            raise KeyboardInterrupt
        done.append(which)
        return step(self, which)

    monkeypatch.setattr(Trainer, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        weights_after(recipe, checkpoint=checkpoint, checkpoint_seconds=0)
    assert checkpoint.exists() == (stop_at > 0)
    resumed = []
    monkeypatch.setattr(Trainer, "train_step", lambda self, which: resumed.append(which) or step(self, which))
    history, weights = weights_after(recipe, checkpoint=checkpoint, checkpoint_seconds=0)
    assert len(done) + len(resumed) == 18
    assert torch.equal(weights, undisturbed[1])
    assert history == undisturbed[0]
    # Run again, with nothing left to do.
    assert torch.equal(weights_after(recipe, checkpoint=checkpoint)[1], weights)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    weights_after(Recipe(max_epochs=1), checkpoint=checkpoint, checkpoint_seconds=0)
    for recipe, task in (
        (Recipe(max_epochs=1, lr=1e-4), None),
        (Recipe(max_epochs=1), make_task(key="other")),
        (Recipe(max_epochs=1), make_task(class_weight=torch.tensor([1.0, 2.0, 1.0]))),
        (Recipe(max_epochs=1), make_task(multi_label=True)),
    ):
        with pytest.raises(ValueError, match="belongs to a run with other data or settings: delete it"):
            weights_after(recipe, task, checkpoint=checkpoint)


def test_long_samples_go_through_the_head_in_parts(monkeypatch):
    recipe = Recipe(max_epochs=2, batch_size=16, drop_inputs=0.0, drop_features=0.0)
    history, whole = weights_after(recipe)
    monkeypatch.setattr(loop, "BATCH_BYTES", 10 * Memory.position_bytes)
    seen, batch = [], Memory.batch

    def watched(self, which, device):
        hidden, mask = batch(self, which, device)
        seen.append(hidden.shape[0] * hidden.shape[1])
        return hidden, mask

    monkeypatch.setattr(Memory, "batch", watched)
    history_in_parts, in_parts = weights_after(recipe)
    assert max(seen) <= 10
    torch.testing.assert_close(in_parts, whole, rtol=1e-3, atol=1e-4)
    assert history_in_parts[0]["loss"] == pytest.approx(history[0]["loss"], rel=1e-4)


def test_it_stops_when_validation_gets_worse_and_keeps_the_last_good_weights(monkeypatch):
    accuracies = iter([0.5, 0.8, 0.75, 0.6, 0.72, 0.69, 0.3, 0.2])
    # With 15 samples the standard error of 0.8 is 0.103.
    monkeypatch.setattr(loop, "FEWEST_TO_JUDGE_BY", 15)
    monkeypatch.setattr(Trainer, "validate", lambda self: (next(accuracies), 1.0))
    recipe = Recipe(max_epochs=50, patience=3, batch_size=8)
    trainer = Trainer(make_head(), make_task(), recipe, make_accelerator(), None, 0)
    history, kept, _ = trainer.run(show=False)
    assert [row["valid_accuracy"] for row in history] == [0.5, 0.8, 0.75, 0.6, 0.72, 0.69, 0.3, 0.2]
    assert kept == 4
    average = {name: p.clone() for name, p in trainer.kept.items()}
    assert all(torch.equal(p, average[name]) for name, p in trainer.head.named_parameters())
    assert not torch.equal(trainer.average["network.1.W_F2"], trainer.kept["network.1.W_F2"])


def test_few_validation_samples_decide_nothing(monkeypatch):
    accuracies = iter([0.8, 0.3, 0.2, 0.1])
    monkeypatch.setattr(Trainer, "validate", lambda self: (next(accuracies), 1.0))
    history, kept, _ = train(make_head(), make_task(), Recipe(max_epochs=4, patience=1, batch_size=8))
    assert (len(history), kept) == (4, 3)


def test_without_validation_the_last_weights_stay():
    task = make_task()
    task = task._replace(train=task.train + task.valid, valid=[])
    history, _ = weights_after(Recipe(max_epochs=3, patience=1), task)
    assert [sorted(row) for row in history] == [["loss"]] * 3


def test_the_number_of_epochs_follows_the_data():
    epochs = [epochs_for(steps, 2) for steps in (1, 2, 3, 7, 9, 100, 1000)]
    assert epochs == [100, 75, 50, 22, 20, 10, 3]
    # With many classes there are at least 15 steps per class, up to the 1000 steps of more data.
    assert [epochs_for(19, n_cls) for n_cls in (3, 20, 30, 40, 100)] == [20, 20, 24, 32, 53]
    assert [epochs_for(100, n_cls) for n_cls in (2, 20, 100)] == [10, 10, 10]
    assert len(weights_after(Recipe(batch_size=64, patience=100, lr=1e-9))[0]) == 100


def test_a_loss_that_is_not_finite_is_told():
    task = make_task()
    task.features.states[20][0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"training diverged: the loss is nan; try a lower lr than 0\.001"):
        weights_after(Recipe(max_epochs=1, drop_inputs=0.0), task)


def test_class_weights_count():
    task = make_task(class_weight=torch.tensor([1.0, 0.0, 0.0]))
    scores = torch.randn(6, 3)
    targets = torch.nn.functional.one_hot(torch.tensor([0, 1, 2, 0, 1, 2]), 3).float()
    expected = -(scores.log_softmax(-1)[[0, 3], 0]).sum() / 6
    torch.testing.assert_close(task.loss(scores, targets), expected)


def test_several_labels_at_once():
    task = make_task(multi_label=True)
    scores, targets = (
        torch.tensor([[3.0, -3.0, 2.0], [1.0, 1.0, -1.0]]),
        torch.tensor([[1.0, 0, 1], [1, 0, 0]]),
    )
    assert task.right(scores, targets).tolist() == [1.0, 0.0]
    expected = torch.nn.BCEWithLogitsLoss()(scores, targets)
    torch.testing.assert_close(task.loss(scores, targets), expected)
    assert task.loss(scores, targets, 0.1) != expected


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_inputs_are_dropped_but_never_all(share):
    mask = torch.arange(40) < torch.randint(1, 41, (200, 1))
    keep = drop_inputs(mask, 3, share, seeded(0))
    assert not (keep & ~mask[..., None]).any()
    n_used, n_kept = 3 * mask.sum(1), keep.sum((1, 2))
    assert n_kept.tolist() == [max(1, round((1 - share) * n)) for n in n_used.tolist()]
    if share:  # another call drops other inputs
        assert not torch.equal(keep, drop_inputs(mask, 3, share, seeded(1)))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.8])
def test_as_many_inputs_stay_of_samples_of_about_the_same_length(share):
    lengths = torch.tensor([38, 39, 40, 40, 41, 43])
    keep = drop_inputs(torch.arange(43) < lengths[:, None], 3, share, seeded(0))
    expected = round((1 - share) * 3 * lengths.float().mean().item())
    assert keep.sum((1, 2)).tolist() == [min(expected, 3 * n) for n in lengths.tolist()]


@pytest.mark.parametrize("lengths", [[5, 2, 3], [4, 4, 4], [1, 0, 2], [0, 0, 0]])
def test_inputs_that_are_left_out_cost_nothing(lengths):
    x, mask = torch.randn(3, 9, 4), torch.zeros(3, 9, dtype=torch.bool)
    for row, n in enumerate(lengths):
        mask[row, torch.randperm(9)[:n]] = True
    fewer, used = compact(x, mask)
    assert fewer.shape == (3, max(*lengths, 1), 4)
    assert (used is None) == (min(lengths) == max(*lengths, 1))
    used = torch.ones(fewer.shape[:2], dtype=torch.bool) if used is None else used
    assert torch.equal(fewer[used], x[mask])


class Scored(torch.nn.Module):
    """A head that training does not treat as a routing head: it gets all hidden states and a mask."""

    def __init__(self):
        super().__init__()
        self.head = make_head()

    def forward(self, hidden, mask):
        return self.head(hidden, mask)


@pytest.mark.parametrize("mixup", [0.0, 0.3])
def test_a_routing_head_learns_the_same_from_the_inputs_that_stay_alone(mixup):
    recipe = Recipe(max_epochs=1, batch_size=8, mixup=mixup)
    _, weights = weights_after(recipe)
    other = Scored()
    train(other, make_task(), recipe)
    masked = torch.cat([p.detach().flatten() for p in other.parameters()])
    torch.testing.assert_close(weights, masked, rtol=1e-4, atol=1e-5)


def test_features_are_dropped_from_all_hidden_states_of_a_sample():
    hidden = torch.rand(50, 4, 2, 100) + 1
    found = drop_features(hidden, 0.3, seeded(0))
    dropped = found[:, 0, 0] == 0
    assert dropped.float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert not (dropped[0] == dropped[1]).all()
    assert torch.equal(found, hidden * ~dropped[:, None, None])
    assert drop_features(hidden, 0.0, seeded(0)) is hidden


def test_samples_are_mixed_where_both_have_inputs():
    hidden, targets = torch.randn(4, 5, 2, 3), torch.eye(4)
    keep = (torch.arange(5) < torch.tensor([[5], [2], [3], [1]]))[..., None].expand(4, 5, 2)
    mixed, kept, mixed_targets = mix(hidden, keep, targets[None], 0.5, seeded(1))
    mixed_targets = mixed_targets[0]
    other = mixed_targets.clone().fill_diagonal_(0).argmax(-1)
    share = mixed_targets.diagonal()
    assert (other != torch.arange(4)).any()
    for k, o in enumerate(other.tolist()):
        if share[k] == 1:  # mixed with itself
            continue
        assert mixed_targets[k].sum().item() == pytest.approx(1)
        for position in range(5):
            first, second = keep[k, position, 0], keep[o, position, 0]
            assert kept[k, position, 0] == first | second
            both = share[k] * hidden[k, position] + (1 - share[k]) * hidden[o, position]
            expected = both if first and second else hidden[k, position] if first else hidden[o, position]
            if first or second:
                torch.testing.assert_close(mixed[k, position], expected)


@pytest.mark.parametrize("mixup", [0.0, 0.3])
def test_every_member_drops_inputs_of_its_own(mixup):
    trainer = Trainer(
        make_head(n_members=3),
        make_task(),
        Recipe(mixup=mixup, drop_features=0.0),
        make_accelerator("cpu"),
        None,
        5,
    )
    x, used, targets = trainer.inputs([20, 21, 22, 23], seeded(0))
    assert (x.shape[:2], targets.shape) == ((3, 4), (3, 4, 3))
    kept = x if used is None else x * used[..., None]
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])


def test_members_learn_side_by_side_what_they_learn_alone(monkeypatch):
    """Test without dropped inputs, and without clipping, because clipping uses all members together."""
    monkeypatch.setattr(loop, "CLIP_NORM", 1e9)
    recipe = Recipe(max_epochs=1, batch_size=8, drop_inputs=0.0, drop_features=0.0)
    head = make_head(n_members=2)
    single = alone(head)
    for trained in (head, *single):
        train(trained, make_task(), recipe)
    hidden, mask = make_task().features.batch([0, 1, 2, 3], torch.device("cpu"))
    scores = head.member_scores(hidden, mask)
    torch.testing.assert_close(scores[0], single[0](hidden, mask), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores[1], single[1](hidden, mask), rtol=1e-4, atol=1e-5)
    assert (scores[0] - scores[1]).abs().max() > 1e-3


def test_batches_hold_every_sample_once_and_similar_lengths():
    lengths = [(7 * k) % 50 + 1 for k in range(1000)]
    batches = shuffled_batches(lengths, 16, seeded(0))
    assert sorted(k for batch in batches for k in batch) == list(range(1000))
    spread = [max(lengths[k] for k in batch) - min(lengths[k] for k in batch) for batch in batches]
    assert sum(spread) / len(spread) < 5
    assert batches != shuffled_batches(lengths, 16, seeded(1))
    firsts = [lengths[batch[0]] for batch in batches]
    assert firsts != sorted(firsts)


def test_it_is_quiet_unless_asked(capfd):
    weights_after(Recipe(max_epochs=1))
    assert capfd.readouterr() == ("", "")
    weights_after(Recipe(max_epochs=1), show=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "training" in shown.err
    assert "loss" in shown.err


TWO_PROCESSES = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from tests.training.test_training import SHARED, make_head, make_task
from vecroute.training import Recipe, Trainer, make_accelerator, train
accelerator, head = make_accelerator(), make_head()
trainer = Trainer(head, make_task(), Recipe(batch_size=8), accelerator, None, 0)
taken = accelerator.gather(torch.tensor([batch[:5] for batch in trainer.batches()])[None])
assert not set(taken[0].flatten().tolist()) & set(taken[1].flatten().tolist())
history, *_ = train(head, make_task(), Recipe(max_epochs=2, batch_size=8, lr=1e-2), accelerator=accelerator)
weights = torch.cat([p.detach().flatten() for p in head.parameters()])
every = accelerator.gather(weights[None])
assert every.shape[0] == 2 and torch.equal(every[0], every[1])
if accelerator.is_main_process:
    print(len(history), history[-1]["valid_loss"] < history[0]["valid_loss"] + 0.1)
sharded = make_head()
train(sharded, make_task(), Recipe(**SHARED, shard_inputs=True), accelerator=accelerator)
torch.save([p.detach() for p in sharded.parameters()], f"{sys.argv[2]}/{accelerator.process_index}.pt")
torch.distributed.destroy_process_group()
"""
# Processes that share the inputs of each sample draw what one process draws.
SHARED = {"max_epochs": 2, "batch_size": 8, "drop_inputs": 0.3, "mixup": 0.2, "seed": 4}


def test_two_processes_train_one_head(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += [str(script), str(ROOT), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "True"]
    _, weights = weights_after(Recipe(**SHARED))
    for rank in range(2):
        found = torch.cat([p.flatten() for p in torch.load(tmp_path / f"{rank}.pt")])
        assert (found - weights).abs().max() < 1e-4


def test_the_inputs_of_a_sample_need_several_processes_to_be_shared():
    with pytest.raises(ValueError, match="shard_inputs needs several processes, started with torchrun"):
        train(make_head(), make_task(), Recipe(shard_inputs=True))
