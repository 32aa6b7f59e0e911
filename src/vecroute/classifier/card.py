"""The model card of a classifier, README.md, as the Hugging Face hub shows it."""

import html
import json
import re
from pathlib import Path
from typing import Any

from vecroute.classifier.estimate import Estimate
from vecroute.io.cells import visible

N_CLASSES = 50  # the card names at most this many
MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~>-])")
# Training options that the card lists.
OPTIONS = ("head", "max_epochs", "batch_size", "lr", "label_smoothing", "validation_fraction", "random_state")


def model_card(config: dict[str, Any], name: str = "path/to/this/folder") -> str:
    """Write README.md for the configuration of a classifier.

    Args:
        config: contents of config.json. Names of classes and data are escaped, because they may be any text.
        name: the name from which the example in the card loads the classifier.
    """
    task, example, position = (
        ("image", "some.jpg", "patch") if config["samples"] == "images" else ("text", "some text", "token")
    )
    return f"""---
{front_matter(config, task)}---

# {task.capitalize()} classifier

This classifier assigns {"several" if config["params"].get("multi_label") else "one"} of
{len(config["classes"])} labels to {"an image" if task == "image" else "a text"}. It routes the hidden states
of every {position} at every depth of a frozen Transformer to class scores, and says what each {position}
added to each score. The paper is
[An Algorithm for Routing Vectors in Sequences](https://arxiv.org/abs/2211.11754).

## Use

```python
import vecroute as vr  # pip install 'vecroute[hf,sklearn,data]'

classifier = vr.RoutingClassifier.from_pretrained({json.dumps(name)})
classifier.predict([{json.dumps(example)}])
classifier.explain({json.dumps(example)}).to_html("why.html")
```

The encoder is not part of this folder. It is loaded by its name, and its files are checked.

## Classes

{named(config["classes"])}

## Training and evaluation

{table(config)}
## Intended use and limits

- Use it for {task}s like those it learned from. It has no class for anything else: every input gets a label.
- It repeats biases of its training data and of its encoder. Test it on your own data first:
  `vecroute evaluate`.
- Probabilities may be too sure on other data. `vecroute evaluate` measures how well they are calibrated.
- An explanation tells what the classifier used, not what is true of the world.
"""


def front_matter(config: dict[str, Any], task: str) -> str:
    """Write the metadata for the hub as YAML. Strings are written as JSON, which is valid YAML."""
    lines = [
        "library_name: vecroute",
        f"pipeline_tag: {task}-classification",
        f"tags: [{task}-classification, vecroute, explainability]",
    ]
    encoder, accuracy = config["encoder"]["name"], config["validation_accuracy"]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", encoder):
        lines.append(f"base_model: {json.dumps(encoder)}")
    if accuracy is not None:
        data = json.dumps(visible(str(config["about"].get("data", "its own data"))))
        lines += [
            "metrics: [accuracy]",
            "model-index:",
            "- name: vecroute",
            "  results:",
            f"  - task: {{type: {task}-classification}}",
            f"    dataset: {{name: {data}, type: {data}, split: validation}}",
            f"    metrics: [{{type: accuracy, value: {accuracy:.4f}}}]",
        ]
    return "\n".join(lines) + "\n"


def table(config: dict[str, Any]) -> str:
    """Write a table of the training data, the options and the accuracy."""
    n, accuracy, encoder = config["n_texts"], config["validation_accuracy"], config["encoder"]
    samples = config["samples"]
    name = Path(encoder["name"]).name if Path(encoder["name"]).is_absolute() else encoder["name"]
    rows = {
        f"{samples} learned from": n["train"],
        "validation accuracy": "not validated"
        if accuracy is None
        else f"{accuracy:.3f} on {n['validation']} {samples}",
        **estimated(config["estimate"]),
        "temperature": f"{config['temperature']:.3g}",
        "encoder": name + (f", revision {encoder['revision']}" if encoder["revision"] else ""),
        "sha256 of the encoder's weights": encoder["weights"],
        **config["about"],
        **{option: config["params"][option] for option in OPTIONS if option in config["params"]},
        "epochs": len(config["history"]),
        "vecroute": config["vecroute"],
    }
    lines = [f"| {escaped(key)} | {escaped(value)} |\n" for key, value in rows.items() if value is not None]
    return "| | |\n|---|---|\n" + "".join(lines)


def estimated(found: dict[str, Any] | None) -> dict[str, str]:
    """Return the rows of an estimate: the expected accuracy, the recall of classes, and advice."""
    if found is None:
        return {}
    estimate = Estimate(**found)
    accuracy, recall = estimate.lines()
    return {
        "estimate": accuracy,
        "recall": recall.removeprefix("recall").lstrip(":, "),
        "advice": estimate.advice(),
    }


def named(classes: list[Any]) -> str:
    some = ", ".join(escaped(label) for label in classes[:N_CLASSES])
    return some + (f" and {len(classes) - N_CLASSES} more" if len(classes) > N_CLASSES else "")


def escaped(value: Any) -> str:
    """Escape a text so that Markdown and HTML show it literally, in one line."""
    return MARKDOWN.sub(r"\\\1", html.escape(visible(str(value)), quote=False))
