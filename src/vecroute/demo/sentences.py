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
from vecroute.explain.told import decided
from vecroute.storage import write_file

TEST_FRACTION = 0.2
N_RIGHT, N_WRONG, LOOKED_AT = 2, 1, 64  # sentences to explain, and how many to choose them from
WORDS = 5  # words listed for each explained sentence


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
    console.print(
        "MiniLM, the encoder, stays as it is. A small head learns to route all of its hidden states."
    )
    train, test = (Samples(part["text"].tolist(), part["label"].tolist()) for part in (train, test))
    new = RoutingClassifier("minilm", keep_examples=True)  # the sentences are public
    about = {"text column": "text", "label column": "label"}
    classifier, results = fitted(out, new, train, test, about=about)
    show_results(console, results, "sentences")
    chosen = choose(classifier, test)
    explanations = classifier.explain([test.items[k] for k in chosen])
    console.print(
        f"\n{len(chosen)} held-out sentences: words in blue (+) speak for the predicted class, in orange (-) "
        "against it.",
        highlight=False,
    )
    for why, truth in zip(explanations, [test.labels[k] for k in chosen], strict=True):
        verdict = "classified right" if why.output_names[why.index(None)] == truth else "classified wrong"
        console.print(f"\n[bold]A {truth} review, {verdict}[/bold]", highlight=False)
        console.print(why.to_rich(k=WORDS))
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


def choose(classifier: RoutingClassifier, test: Samples) -> list[int]:
    """Choose sentences at random: some that the classifier gets right, and some that it gets wrong."""
    order = np.random.default_rng(SEED).permutation(len(test.items))[:LOOKED_AT].tolist()
    found = classifier.predict([test.items[k] for k in order])
    is_right = {k: label == test.labels[k] for k, label in zip(order, found.tolist(), strict=True)}
    right, wrong = ([k for k in order if is_right[k] is right] for right in (True, False))
    return right[:N_RIGHT] + wrong[:N_WRONG]


def report(results: dict[str, Any], explanations: list) -> str:
    """Write the results and explanations as Markdown."""
    rows = "\n".join(f"| {name} | {accuracy:.1%} |" for name, accuracy in results["accuracies"].items())
    examples = []
    for number, why in enumerate(explanations, 1):
        margin = why.aggregate("word").margin()
        words = ", ".join(f"{part.piece} {part.value:+.2f}" for part in margin.top(5))
        examples.append(
            f"{number}. *{why.text}*\n   {decided(why).title} {words} ([page](why-{number}.html))"
        )
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
