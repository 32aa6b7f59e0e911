"""The fit recovers a known temperature, and stays sensible with few samples."""

import math

import pytest
import torch

from tests.training.test_training import make_head, make_task
from vecroute.training import Recipe
from vecroute.training.calibration import fit_temperature, probabilities, usual_temperature
from vecroute.training.folds import N_FOLDS, make_folds, out_of_fold


def drawn(T, n=4000, n_cls=3, multi_label=False):
    """Return scores, and labels drawn from their probabilities at a given temperature."""
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(n, n_cls, generator=generator, dtype=torch.double)  # [n, n_cls]
    p = probabilities(scores, T, multi_label)  # [n, n_cls]
    if multi_label:
        return scores, (torch.rand(p.shape, generator=generator) < p).float()
    return scores, torch.eye(n_cls)[torch.multinomial(p, 1, generator=generator)[:, 0]]


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("T", [0.5, 1.0, 4.0])
def test_it_recovers_a_known_temperature(T, multi_label):
    for n_cls in (2, 5):
        scores, targets = drawn(T, n_cls=n_cls, multi_label=multi_label)
        assert fit_temperature(scores, targets, 4000, multi_label) == pytest.approx(T, rel=0.12)
        # A constant added to the scores changes only the sigmoids.
        if not multi_label:
            assert fit_temperature(scores + 7, targets, 4000) == pytest.approx(T, rel=0.12)


def test_confidence_is_right_though_errors_are_neighbours():
    """The T of the most likely labels is 1 here. It leaves 0.06 too much confidence."""
    scores = torch.tensor([[-1.5, 1.5, 2.5, 1.5, -1.5]] * 2000)  # [n, n_cls]
    targets = torch.eye(5)[torch.tensor([1, 2, 2, 3] * 500)]  # [n, n_cls]
    T = fit_temperature(scores, targets, 4000)
    assert probabilities(scores, T).amax(1).mean().item() == pytest.approx(0.5, abs=0.01)


def test_probabilities_are_of_divided_scores():
    scores = torch.tensor([[1.0, 3.0]])
    assert probabilities(scores, 2.0)[0, 1].item() == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert probabilities(scores, 2.0, True)[0].tolist() == pytest.approx(
        [1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-1.5))]
    )


@pytest.mark.parametrize("right", [True, False])
def test_few_samples_do_not_make_it_extreme(right):
    """Without a prior, T would be 0 if all labels are right, and infinite if all are wrong."""
    scores, targets = torch.tensor([[2.0, -2.0]] * 8), torch.tensor([[1.0, 0.0]] * 8)
    T = fit_temperature(scores, targets if right else 1 - targets, 8)
    assert (1 < T < usual_temperature(8)) if right else (usual_temperature(8) < T < 20)


def test_heads_that_learned_from_less_are_less_sure():
    scores, targets = drawn(1.0, n=10)
    assert fit_temperature(scores, targets, 10) > 1.2 * fit_temperature(scores, targets, 300)
    assert usual_temperature(15_000) == usual_temperature(10**6) == 1


def test_folds_have_all_classes_and_keep_equal_samples_together():
    targets = torch.eye(3)[[0] * 10 + [1] * 4 + [2] * 2]  # [n, n_cls]
    samples = [f"text {k}" for k in range(16)]
    fold = make_folds(targets, samples, seed=0)
    for j in range(3):
        counts = [int(targets[fold == k, j].sum()) for k in range(N_FOLDS)]
        assert max(counts) - min(counts) <= 1
    assert (make_folds(targets, samples, seed=1) != fold).any()
    again = make_folds(torch.cat([targets] * 3), samples * 3, seed=0)  # [3 n]
    assert (again == fold.tolist() * 3).all()


def test_scores_out_of_fold_are_of_heads_that_have_not_seen_the_sample():
    task = make_task(n=36, n_valid=0)
    fold = make_folds(task.targets, range(36), seed=0)
    recipe = Recipe(max_epochs=30, lr=1e-2, batch_size=12, drop_inputs=0.0, drop_features=0.0)
    scores = out_of_fold(make_head, task, recipe, fold)  # [n, n_cls]
    assert scores.shape == task.targets.shape
    # A wrong label cannot change the score of its own sample, only the scores of other folds.
    changed = task._replace(targets=task.targets.clone())
    changed.targets[0] = changed.targets[0].roll(1)
    moved = (out_of_fold(make_head, changed, recipe, fold) != scores).any(1)  # [n]
    assert moved.tolist() == (fold != fold[0]).tolist()
