"""The demo: classify film review sentences, compare with logistic regression, and explain a few sentences."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from rich.console import Console
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

from vecroute.classifier import RoutingClassifier
from vecroute.demo.fitting import SEED, Samples, fitted, next_steps, show_results
from vecroute.storage import write_file

TEST_FRACTION, EXAMPLES = 0.2, 4


def sentence_polarity() -> pd.DataFrame:
    """Load 10,662 sentences of film reviews, columns text and label; NOTICE.md beside the file cites them."""
    with (files("vecroute") / "assets/sentence_polarity.csv.gz").open("rb") as file:
        return pd.read_csv(file, compression="gzip", dtype=str, keep_default_na=False)


def run(out: Path) -> None:
    """Fit four fifths of the sentences, measure on the rest, print the results and write them to files.

    Args:
        out: folder for ``model/``, ``report.md``, ``results.json``, ``test.csv`` with the held-out sentences
            and a page for each explanation. Files of an earlier run are used again.
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
    held_out = pd.DataFrame({"text": test.items, "label": test.labels}).to_csv(index=False)
    write_file(out / "test.csv", held_out.encode())
    console.print(
        f"\nThe model is in {out / 'model'}, a report in {out / 'report.md'}, with pages to look at.",
        soft_wrap=True,
    )
    next_steps(
        console,
        {
            "Explain a sentence of your own:": [
                "explain", out / "model", "a gorgeous, witty, seductive movie", "--html", out / "why.html"
            ],
            "See where it errs on the held-out sentences, and why:": [
                "evaluate", out / "model", out / "test.csv", "--html", out / "evaluation.html"
            ],
            "Type and watch, in a browser:": ["serve", out / "model"],
        },
    )  # fmt: skip


def report(results: dict[str, Any], explanations: list) -> str:
    """Write the results and explanations as Markdown."""
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

The contributions of words to the score of the predicted class minus the score of the other class, for a few
held-out sentences:

{chr(10).join(examples)}

The sentences are from the sentence polarity dataset v1.0 by Bo Pang and Lillian Lee, CC BY 4.0.
"""
