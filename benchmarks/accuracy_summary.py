"""Summarise accuracy.csv as a table and a figure: ``python benchmarks/accuracy.py --plot``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import corpora
import pandas

OURS = "routing"  # compared with the other heads


def summarize(rows: pandas.DataFrame, differences: pandas.DataFrame) -> list[dict[str, Any]]:
    """Return a row for each task and head: its test accuracy in %, and the lead of routing over it.

    ``mean`` and ``spread`` (standard deviation) are over the seeds. ``ahead`` is the mean of routing minus
    the mean of the head, ``low`` and ``high`` are its 95 % interval by a paired bootstrap over texts and
    seeds, from the differences of single heads. The best head comes first.
    """
    single = differences[differences.members == 1].set_index(["task", "head"])
    summary = []
    for task, own in rows.groupby("task", sort=False):
        tests = {head: 100 * found.test for head, found in own.groupby("head")}
        for head in sorted(tests, key=lambda head: -tests[head].mean()):
            test = tests[head]
            row = {"task": task, "head": head, "seeds": len(test), "mean": test.mean(), "spread": test.std()}
            row |= {"routing": OURS, "ahead": None, "low": None, "high": None}
            if (task, head) in single.index:
                found = single.loc[(task, head)]
                row |= {"ahead": found.points, "low": found.low, "high": found.high}
            summary.append(row)
    return summary


def make_summary(results: Path, order: Sequence[str]) -> None:
    """Write accuracy_summary.csv and accuracy.png from the rows of all seeds."""
    rows = pandas.read_csv(results / "accuracy.csv")
    path = results / "accuracy_summary.csv"
    path.unlink(missing_ok=True)
    common.append(path, summarize(rows, pandas.read_csv(results / "accuracy_differences.csv")))
    plot(rows, [label for label in reversed(order) if label in set(rows["head"])], results)


def plot(rows: pandas.DataFrame, order: Sequence[str], results: Path) -> None:
    """Write accuracy.png: the test accuracy of every head on every task, with a dot for each seed."""
    import matplotlib.pyplot as plt

    tasks = [task for task in corpora.TASKS if task in set(rows.task)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 4), sharey=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for k, label in enumerate(order):
            test = 100 * rows[(rows.task == task) & (rows["head"] == label)].test
            color = "tab:red" if label.startswith(("routing", "paper")) else "tab:blue"
            axis.plot(test, [k] * len(test), "o", color=color, alpha=0.4, markersize=4)
            axis.plot([test.mean()], [k], "|", color="black", markersize=14)
        axis.set(yticks=range(len(order)), yticklabels=order, xlabel="test accuracy, %", title=task)
        axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(results / "accuracy.png", dpi=150)
