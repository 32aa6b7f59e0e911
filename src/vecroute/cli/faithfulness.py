"""``vecroute faithfulness``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vecroute.cli.common import (
    Delimiter,
    Device,
    Encoder,
    Model,
    Strict,
    TextColumn,
    app,
    check_data,
    check_kind,
    column,
    load,
    read_texts,
)


@app.command(
    short_help="Measure how faithful explanations are.",
    epilog="Example: vecroute faithfulness model/ test.csv --texts 200",
)
def faithfulness(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Table of texts.")],
    methods: Annotated[str, typer.Option(help="Names separated by ; or all.")] = "words;states;phi;random",
    texts: Annotated[int, typer.Option(min=1, help="Measure only this many texts, the first ones.")] = 100,
    text: TextColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per measure, no table.")] = False,
    strict: Strict = False,
    delimiter: Delimiter = None,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Measure how faithful explanations are: delete the words they name, and predict again."""
    from vecroute.classifier.parts import ready
    from vecroute.explain.attribution import Reader
    from vecroute.explain.faithfulness import measure, show, summarize
    from vecroute.explain.rivals import METHODS
    from vecroute.training.progress import counting_bar

    check_data(data)
    classifier = load(model, encoder, device)
    check_kind(classifier, model, data)
    samples = read_texts(data, column(classifier, text, "text"), None, strict, delimiter)
    chosen = samples.texts[:texts]
    names = list(METHODS) if methods == "all" else [name.strip() for name in methods.split(";")]
    if unknown := [name for name in names if name not in METHODS]:
        known = "; ".join(METHODS)
        raise ValueError(f"--methods must be some of these, with ; between: {known}; got {unknown[0]!r}")
    with counting_bar(sys.stderr.isatty(), "measuring", len(chosen)) as step:
        rows = measure(Reader(*ready(classifier)), chosen, names, step=step)
    summary = summarize(rows)
    if as_json:
        for row in summary:
            print(json.dumps(row))
        return
    show(summary)
