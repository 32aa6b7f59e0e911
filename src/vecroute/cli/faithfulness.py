"""``vecroute faithfulness``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from vecroute.cli.common import Device, Encoder, Model, TextColumn, app, checked, column, load


@app.command(epilog="Example: vecroute faithfulness model/ test.csv --texts 200")
def faithfulness(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Table of texts.")],
    methods: Annotated[
        str, typer.Option(help="Names with ; between, or all.")
    ] = "contributions, margin;phi;random",
    texts: Annotated[int, typer.Option(help="Measure at most so many texts, the first ones.")] = 100,
    text: TextColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per measure, no table.")] = False,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Measure how faithful explanations are: delete what they name, and look at the prediction again."""
    from vecroute.explain.attribution import METHODS, Reader
    from vecroute.explain.faithfulness import measure, show, summarize
    from vecroute.io.tables import read_table

    classifier = load(model, encoder, device)
    text = column(classifier, text, "text")
    table = read_table(data, text)[:texts]
    names = list(METHODS) if methods == "all" else [name.strip() for name in methods.split(";")]
    rows = measure(Reader(*classifier._ready()), checked(table[text], text, data), names)
    summary = summarize(rows)
    if as_json:
        for row in summary:
            print(json.dumps(row))
        return
    show(summary)
