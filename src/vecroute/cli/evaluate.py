"""``vecroute evaluate``."""

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vecroute.cli.common import (
    Delimiter,
    Device,
    Encoder,
    LabelColumn,
    Model,
    Strict,
    TextColumn,
    app,
    check_data,
    check_kind,
    check_output,
    column,
    load,
    read_texts,
    tell,
    told,
    wrote,
)


@app.command(
    short_help="Measure a classifier, and write a report.",
    epilog="Example: vecroute evaluate model/ test.csv --html report.html",
)
def evaluate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Table of texts and labels, or folder of images by class.")],
    text: TextColumn = None,
    label: LabelColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report with explanations to this file.")] = None,
    allow_unknown: Annotated[
        bool, typer.Option("--allow-unknown", help="Count labels that the model does not know as wrong.")
    ] = False,
    strict: Strict = False,
    delimiter: Delimiter = None,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Measure a classifier on texts or images whose labels are known."""
    from vecroute.explain.image_report import image_report
    from vecroute.explain.report import report
    from vecroute.storage import write_file
    from vecroute.training.evaluation import evaluate as measure
    from vecroute.training.evaluation import show

    check_data(data)
    check_output(html)
    classifier = load(model, encoder, device)
    if classifier.multi_label:
        raise ValueError(f"evaluate measures one label for each text, {model} gives any number of labels")
    check_kind(classifier, model, data)
    columns = (column(classifier, text, "text"), column(classifier, label, "label"))
    texts, labels, places, n_skipped = read_labelled(data, *columns, strict, delimiter)
    if not allow_unknown:
        advice = "correct it, name another --label, or count it as wrong with --allow-unknown"
        check_known(labels, places, classifier.classes_, "the model", advice)
    with told():
        probabilities = classifier.predict_proba(texts)
    result = measure(labels, classifier.classes_, probabilities) | {"skipped": n_skipped}
    if html is not None:
        if sys.stderr.isatty():
            tell(f"explaining for {html} ...")
        write = image_report if data.is_dir() else report
        page = write(classifier, texts, labels, probabilities, title=f"{model.name} on {data.name}")
        write_file(html, page.encode())
        wrote(html)
    if as_json:
        print(json.dumps(result))
        return
    show(result, "images" if data.is_dir() else "texts")


def read_labelled(
    data: Path, text: str, label: str, strict: bool, delimiter: str | None
) -> tuple[Any, list[Any], list[str], int]:
    """Read texts or images, their labels, the place of each label, and the number of skipped rows."""
    if data.is_dir():
        from vecroute.io.images import read_folder

        with told():
            folder = read_folder(data)
        return folder.paths, folder.labels, [f"the folder of {path}" for path in folder.paths], 0
    samples = read_texts(data, text, label, strict, delimiter)
    places = [f"line {line} of {data}" for line in samples.lines]
    return samples.texts, samples.labels, places, samples.n_rows - len(samples.texts)


def check_known(
    labels: Sequence[Any], places: Sequence[str], classes: Sequence[Any], knower: str, advice: str
) -> None:
    """Raise an error for a label that is not a class; name its place, the nearest class and what to do."""
    names = [str(name) for name in classes]
    known = set(names)
    unknown = [(str(label), k) for k, label in enumerate(labels) if str(label) not in known]
    if unknown:
        label, k = unknown[0]
        folded = {name.casefold(): name for name in reversed(names)}
        nearest = folded[difflib.get_close_matches(label.casefold(), folded, 1, 0.0)[0]]
        more = f" ({len(unknown) - 1:,} more labels are unknown)" if len(unknown) > 1 else ""
        raise ValueError(
            f"{places[k]} has the label {label!r}, which {knower} does not know; the nearest class is "
            f"{nearest!r}{more}; {advice}"
        )
