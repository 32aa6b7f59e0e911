"""The demo: film review sentences, a fitted classifier beside logistic regression, and a few explanations."""

import json
import logging
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]

from vecroute.classifier import RoutingClassifier
from vecroute.encoders.cache import Features
from vecroute.evaluation import evaluate

logger = logging.getLogger(__name__)

TEST_FRACTION, SEED, EXAMPLES, EPOCHS = 0.2, 0, 4, 6
ROUTING = "routing of every hidden state"
LAST, EVERY = "logistic regression, mean of the last layer", "logistic regression, means of every layer"


def sentence_polarity() -> pd.DataFrame:
    """10,662 sentences of film reviews, columns text and label; see NOTICE.md beside the file."""
    with (files("vecroute") / "data/sentence_polarity.csv.gz").open("rb") as file:
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
    classifier, results = fitted(out, train, test)
    show_results(console, results)
    test_texts = test["text"].tolist()
    chosen = np.random.default_rng(SEED).choice(len(test_texts), EXAMPLES, replace=False)
    explanations = classifier.explain([test_texts[k] for k in chosen])
    for why, truth in zip(explanations, test["label"].iloc[chosen], strict=True):
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


def fitted(out: Path, train: pd.DataFrame, test: pd.DataFrame) -> tuple[RoutingClassifier, dict[str, Any]]:
    """The classifier and what was measured, from an earlier run if it is there."""
    model, measured = out / "model", out / "results.json"
    if model.exists() and measured.exists():
        return RoutingClassifier.from_pretrained(model), json.loads(measured.read_text())
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    # The wide head: with as many texts as these it is better than the default one, for more work.
    classifier = RoutingClassifier(
        "minilm", head="wide", lr=1e-3, max_epochs=EPOCHS, checkpoint=out / "checkpoint"
    )
    classifier.fit(train["text"], train["label"])
    minutes = (time.monotonic() - start) / 60
    result = evaluate(test["label"], classifier.classes_, classifier.predict_proba(test["text"]))
    accuracies = {ROUTING: result["accuracy"]} | baselines(classifier, train, test)
    results = {"accuracies": accuracies, "minutes": minutes, "n_train": len(train), "measures": result}
    about = {"text column": "text", "label column": "label", "test accuracy": round(result["accuracy"], 4)}
    classifier.save_pretrained(model, overwrite=True, about=about)
    measured.write_text(json.dumps(results, indent=2))
    return classifier, results


def baselines(classifier: RoutingClassifier, train: pd.DataFrame, test: pd.DataFrame) -> dict[str, float]:
    """Accuracy of logistic regression on means over positions, same encoder, same split."""
    encoder = classifier.encoder_
    cache = classifier._open_cache(encoder)
    means = []
    for table in (train, test):
        features = Features(encoder, table["text"].tolist(), cache)
        features.prepare()
        rows = [features.batch([k])[0][0].mean(0) for k in range(len(features))]  # [depth, d_emb] each
        means.append(torch.stack(rows).numpy())  # [n, depth, d_emb]
    found = {}
    for name, levels in ((LAST, slice(-1, None)), (EVERY, slice(None))):
        x_train, x_test = (x[:, levels].reshape(len(x), -1) for x in means)  # [n, levels * d_emb]
        regression = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        found[name] = float(regression.fit(x_train, train["label"]).score(x_test, test["label"]))
    return found


def show_results(console: Console, results: dict[str, Any]) -> None:
    table = Table("same encoder, same sentences", "held-out accuracy", box=None)
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
