"""``vecroute evaluate``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vecroute.cli.common import (
    Device,
    Encoder,
    LabelColumn,
    Model,
    TextColumn,
    app,
    check_kind,
    checked,
    column,
    load,
)


@app.command(epilog="Example: vecroute evaluate model/ test.csv --html report.html")
def evaluate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Table of texts and labels, or folder of images by class.")],
    text: TextColumn = None,
    label: LabelColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with explanations to this file.")] = None,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Measure a classifier on texts or images whose labels are known."""
    from vecroute.explain.image_report import image_report
    from vecroute.explain.report import report
    from vecroute.io.images import read_folder
    from vecroute.io.tables import read_table
    from vecroute.storage import write_file
    from vecroute.training.evaluation import evaluate as measure
    from vecroute.training.evaluation import show

    texts: Any
    labels: Any
    classifier = load(model, encoder, device)
    if classifier.multi_label:
        raise ValueError(f"{model} gives any number of labels, which evaluate does not know how to measure")
    check_kind(classifier, model, data)
    if data.is_dir():
        folder = read_folder(data)
        texts, labels = folder.paths, folder.labels
    else:
        text, label = column(classifier, text, "text"), column(classifier, label, "label")
        table = read_table(data, text, label)
        texts, labels = checked(table[text], text, data), table[label]
        if labels.isna().any():
            raise ValueError(f"column {label!r} of {data}: row {labels.isna().argmax()} is missing")
    probabilities = classifier.predict_proba(texts)
    result = measure(labels, classifier.classes_, probabilities)
    if html is not None:
        write = image_report if data.is_dir() else report
        page = write(classifier, texts, labels, probabilities, title=f"{model.name} on {data.name}")
        write_file(html, page.encode())
    if as_json:
        print(json.dumps(result))
        return
    show(result, "images" if data.is_dir() else "texts")
