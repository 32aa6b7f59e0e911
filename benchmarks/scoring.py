"""Scores of the finished jobs of accuracy.py: which configuration is best, and how far heads are apart."""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
import numpy as np

OURS = "routing"
MEMBERS = 3  # number of seeds whose scores are averaged
DRAWS = 2000  # number of bootstrap samples


def rank(results: Sequence[Any], labels: np.ndarray) -> list[tuple[Any, int]]:
    """Return all heads of some stacks, (stack, number in it), the most accurate on the dev set first."""
    heads = [(done, k) for done in results for k in range(len(done.job.recipes))]
    return sorted(heads, key=lambda head: order(head[0].dev[head[1]], labels), reverse=True)


def order(p: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return accuracy and, to break ties, the mean log probability of the labels [n] for p [n, n_cls]."""
    return accuracy(p, labels), -nll(p, labels)


def accuracy(p: np.ndarray, labels: np.ndarray) -> float:
    return float((p.argmax(-1) == labels).mean())


def nll(p: np.ndarray, labels: np.ndarray) -> float:
    return float(-np.log(p[range(len(labels)), labels].clip(1e-4)).mean())


def rows_of(done: Any, dev: np.ndarray, test: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each head of a stack, with its test accuracy if the test labels are given."""
    for k, recipe in enumerate(done.job.recipes):
        row = {
            "stage": done.job.stage,
            "task": done.job.task,
            "head": done.job.label,
            "options": json.dumps(done.job.options),
            "training": json.dumps(asdict(done.job.training)),
            "recipe": json.dumps({name: value for name, value in asdict(recipe).items() if name != "seed"}),
            "seed": recipe.seed,
            "parameters": done.parameters,
            "seconds": done.seconds / len(done.job.recipes),
            "dev": accuracy(done.dev[k], dev),
            "dev_nll": nll(done.dev[k], dev),
        }
        if test is not None:
            p = done.test[k]
            row |= {"test": accuracy(p, test), "test_nll": nll(p, test), "test_top5": top_5(p, test)}
        yield row | done.about


def top_5(p: np.ndarray, labels: np.ndarray) -> float | None:
    """Return how often the label [n] is among the five most probable classes of p [n, n_cls].

    None if there are at most five classes.
    """
    if p.shape[-1] <= 5:
        return None
    return float((p.argsort(-1)[:, -5:] == labels[:, None]).any(-1).mean())


def members(p: np.ndarray, n: int = MEMBERS) -> np.ndarray:
    """Return the mean log probabilities of every n of the seeds, for p [seeds, n_texts, n_cls].

    The mean of log probabilities has the order of the mean of scores, which differs by one number per text.
    """
    logs = np.log(p.astype(np.float32).clip(1e-6))  # [seeds, n_texts, n_cls]
    return np.stack([logs[list(some)].mean(0) for some in itertools.combinations(range(len(p)), n)])


def difference(ours: np.ndarray, other: np.ndarray, draws: int = DRAWS) -> dict[str, float]:
    """Return the lead of one head in points, with a 95 % interval by a paired bootstrap over texts and seeds.

    Args:
        ours, other: [seeds, n_texts] True where a head is right. Seeds and texts are drawn for both at once.
    """
    gain = 100 * (ours.astype(np.float32) - other)  # [seeds, n_texts]
    generator, found = np.random.default_rng(0), []
    for _ in range(draws):
        seeds = generator.integers(0, len(gain), len(gain))
        texts = generator.integers(0, gain.shape[1], gain.shape[1])
        found.append(gain[seeds].mean(0)[texts].mean())
    low, high = np.percentile(found, [2.5, 97.5])
    return {"points": float(gain.mean()), "low": float(low), "high": float(high)}


def scored(
    done: dict[str, tuple[list[Any], np.ndarray, np.ndarray]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Score the final heads of all tasks on the test set.

    Args:
        done: for each task the final stacks, and the labels of the dev and the test set.

    Returns:
        A row for each head and seed, and a row for each comparison with routing: one head with one
        (members = 1), and the mean of three seeds with the mean of three (members = 3).
    """
    rows, differences = [], []
    for task, (finals, dev, labels) in done.items():
        for final in finals:
            found = rows_of(final, dev, labels)
            rows += [{name: value for name, value in row.items() if name != "stage"} for row in found]
        tests = {final.job.label: final.test for final in finals}  # [seeds, n_texts, n_cls] each
        for n in (1, MEMBERS):
            if OURS not in tests or len(tests[OURS]) < n:
                continue
            right = {head: members(p, n).argmax(-1) == labels for head, p in tests.items()}
            for head in right:
                if head != OURS:
                    row = {"task": task, "routing": OURS, "head": head, "members": n}
                    row |= {"test": 100 * right[head].mean(), "routing_test": 100 * right[OURS].mean()}
                    differences.append(row | difference(right[OURS], right[head]))
    return rows, differences


def replace_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file anew with these rows, whole or not at all."""
    if rows:
        new = path.with_name(f"{path.stem}.new.csv")
        new.unlink(missing_ok=True)
        common.append(new, rows)
        os.replace(new, path)
