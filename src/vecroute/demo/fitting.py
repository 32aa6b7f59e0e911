"""Shared by both demos: fit a classifier, or load it from an earlier run, and compare it with baselines."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import GridSearchCV, StratifiedShuffleSplit  # type: ignore[import-untyped]
from sklearn.pipeline import Pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from vecroute.classifier import RoutingClassifier
from vecroute.classifier.parts import cache_for
from vecroute.encoders.features import Features
from vecroute.storage import write_file
from vecroute.training.evaluation import evaluate

SEED = 0
ROUTING = "routing of every hidden state"


class Samples(NamedTuple):
    """Texts or images, and the label of each."""

    items: list[Any]
    labels: list[str]


def fitted(
    out: Path,
    new: RoutingClassifier,
    train: Samples,
    test: Samples,
    *,
    strengths: Sequence[float] = (0.01,),
    about: dict[str, Any] | None = None,
) -> tuple[RoutingClassifier, dict[str, Any]]:
    """Return a fitted classifier and its measures, both from an earlier run if the folder has them.

    Args:
        out: the folder for both.
        new: the classifier to fit.
        train, test: samples for fitting and for measuring.
        strengths: see ``baselines``.
        about: information to save with the classifier.
    """
    model, measured = out / "model", out / "results.json"
    if model.exists() and measured.exists():
        return RoutingClassifier.from_pretrained(model), json.loads(measured.read_text())
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    classifier = new.set_params(checkpoint=out / "checkpoint").fit(*train)
    minutes = (time.monotonic() - start) / 60
    result = evaluate(test.labels, classifier.classes_, classifier.predict_proba(test.items))
    accuracies = {ROUTING: result["accuracy"]} | baselines(classifier, train, test, strengths)
    results = {"accuracies": accuracies, "minutes": minutes, "n_train": len(train.items), "measures": result}
    about = {**(about or {}), "test accuracy": round(result["accuracy"], 4)}
    classifier.save_pretrained(model, overwrite=True, about=about)
    write_file(measured, json.dumps(results, indent=2).encode())
    return classifier, results


def baselines(
    classifier: RoutingClassifier, train: Samples, test: Samples, strengths: Sequence[float]
) -> dict[str, float]:
    """Measure logistic regression on means over tokens or patches, with the same encoder and split.

    The regularisation strength C is chosen on a tenth of the training samples.
    """
    encoder = classifier.encoder_
    cache = cache_for(classifier, encoder)
    n_special = getattr(encoder, "n_special", 0)  # [CLS] is not a patch
    means = []
    for samples in (train, test):
        features = Features(encoder, samples.items, cache)
        features.prepare()
        rows = [
            features.batch([k])[0][0, n_special:].float().mean(0) for k in range(len(features))
        ]  # [depth, d_emb]
        means.append(torch.stack(rows).numpy())  # [n, depth, d_emb]
    found, mean = {}, "mean patch" if n_special else "mean"
    for name, levels in (("the last layer", slice(-1, None)), ("every layer", slice(None))):
        x_train, x_test = (x[:, levels].reshape(len(x), -1) for x in means)  # [n, levels * d_emb]
        steps = [("scale", StandardScaler()), ("regress", LogisticRegression(C=strengths[0], max_iter=1000))]
        regression = Pipeline(steps)
        if len(strengths) > 1:
            tenth = StratifiedShuffleSplit(1, test_size=0.1, random_state=SEED)
            regression = GridSearchCV(regression, {"regress__C": list(strengths)}, cv=tenth)
        accuracy = regression.fit(x_train, train.labels).score(x_test, test.labels)
        found[f"logistic regression, {mean} of {name}"] = float(accuracy)
    return found


def show_results(console: Console, results: dict[str, Any], samples: str) -> None:
    table = Table(f"same encoder, same {samples}", "held-out accuracy", box=None)
    for name, accuracy in results["accuracies"].items():
        table.add_row(name, f"{accuracy:.1%}", style="bold" if name == ROUTING else "")
    console.print(table)


def next_steps(console: Console, commands: dict[str, Sequence[Any]]) -> None:
    """Print commands to try next, as they can be typed where the demo was started."""
    console.print("\nTry next:")
    for why, arguments in commands.items():
        line = f"  {program()} {shlex.join(map(str, arguments))}"
        console.print(f"{why}\n{line}", markup=False, highlight=False, soft_wrap=True)


def program() -> str:
    """Return the command that starts ``vecroute`` again: its name if the shell finds it, else its path."""
    started = Path(sys.argv[0])
    if started.name != "vecroute":  # python -m vecroute
        return f"{shlex.quote(sys.executable)} -m vecroute"
    found = shutil.which("vecroute")
    same = found is not None and Path(found).resolve() == started.resolve()
    return "vecroute" if same else shlex.quote(str(started))
