"""The demo: film review sentences, a fitted classifier beside logistic regression, and a few explanations."""

import json
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import (  # type: ignore[import-untyped]
    GridSearchCV,
    StratifiedShuffleSplit,
    train_test_split,
)
from sklearn.pipeline import Pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from vecroute.classifier import RoutingClassifier
from vecroute.encoders.cache import Features
from vecroute.storage import write_file
from vecroute.training.evaluation import evaluate

TEST_FRACTION, SEED, EXAMPLES = 0.2, 0, 4
ROUTING = "routing of every hidden state"


class Samples(NamedTuple):
    """Texts or images, and the label of each."""

    items: list[Any]
    labels: list[str]


def sentence_polarity() -> pd.DataFrame:
    """10,662 sentences of film reviews, columns text and label; see NOTICE.md beside the file."""
    with (files("vecroute") / "assets/sentence_polarity.csv.gz").open("rb") as file:
        return pd.read_csv(file, compression="gzip", dtype=str, keep_default_na=False)


def run(out: Path) -> None:
    """Fit on four fifths of the sentences, measure on the rest, show and write it all.

    Args:
        out: folder for ``model/``, ``report.md``, ``results.json`` and a page for each explanation. What is
            there from an earlier run is used again.
    """
    console, table = Console(), sentence_polarity()
    train, test = train_test_split(table, test_size=TEST_FRACTION, random_state=SEED, stratify=table["label"])
    console.print(f"{len(train)} sentences of film reviews to learn from, {len(test)} held out.")
    train, test = (Samples(part["text"].tolist(), part["label"].tolist()) for part in (train, test))
    new = RoutingClassifier("minilm")
    about = {"text column": "text", "label column": "label"}
    classifier, results = fitted(out, new, train, test, about=about)
    show_results(console, results, "sentences")
    chosen = np.random.default_rng(SEED).choice(len(test.items), EXAMPLES, replace=False)
    explanations = classifier.explain([test.items[k] for k in chosen])
    for why, truth in zip(explanations, [test.labels[k] for k in chosen], strict=True):
        console.print()
        console.print(f"[bold]{truth}[/bold] review:", highlight=False)
        console.print(why.margin())
    for number, why in enumerate(explanations, 1):
        why.to_html(out / f"why-{number}.html")
    (out / "report.md").write_text(report(results, explanations))
    console.print(
        f"\nThe model is in {out / 'model'}, a report in {out / 'report.md'}, with pages to look at."
    )
    console.print(f'Try: vecroute explain {out / "model"} "a gorgeous, witty, seductive movie"', markup=False)


def fitted(
    out: Path,
    new: RoutingClassifier,
    train: Samples,
    test: Samples,
    *,
    strengths: Sequence[float] = (0.01,),
    about: dict[str, Any] | None = None,
) -> tuple[RoutingClassifier, dict[str, Any]]:
    """The classifier, fitted, and what was measured; both from an earlier run if they are there.

    Args:
        out: folder for both.
        new: the classifier to fit.
        train, test: what to fit and to measure it on.
        strengths: see ``baselines``.
        about: to remember with the classifier.
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
    """Accuracy of logistic regression on means over tokens or patches, same encoder, same split.

    Of several strengths C that is used which is best on a tenth of the training samples.
    """
    encoder = classifier.encoder_
    cache, n_special = classifier._open_cache(encoder), getattr(encoder, "n_special", 0)  # [CLS] is no patch
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


def report(results: dict[str, Any], explanations: list) -> str:
    """The results and explanations as Markdown."""
    rows = "\n".join(f"| {name} | {accuracy:.1%} |" for name, accuracy in results["accuracies"].items())
    examples = []
    for number, why in enumerate(explanations, 1):
        margin = why.aggregate("word").margin()
        words = ", ".join(f"{part.piece} {part.value:+.2f}" for part in margin.top(5))
        name, page = margin.output_names[0], f"[page](why-{number}.html)"
        examples.append(f"{number}. *{why.text}*\n   {name}: {words} ({page})")
    return f"""# Demo

Learned from {results["n_train"]} sentences of film reviews with a frozen MiniLM encoder, in
{results["minutes"]:.1f} minutes; measured on {results["measures"]["n"]} held-out sentences.

| same encoder, same sentences | held-out accuracy |
|---|---|
{rows}

What the words of a few held-out sentences added to the score of the predicted class less that of the other:

{chr(10).join(examples)}

The sentences are from the sentence polarity dataset v1.0 by Bo Pang and Lillian Lee, CC BY 4.0.
"""
