"""``vecroute compare``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vecroute.cli.common import Delimiter, Device, Strict, app, check_data, finite, read_texts, told
from vecroute.cli.evaluate import check_known
from vecroute.cli.threads import limit_threads


@app.command(
    short_help="Compare heads on your own table.",
    epilog="Example: vecroute compare data.csv --heads all --seeds 5",
)
def compare(
    data: Annotated[Path, typer.Argument(help="Table: .csv, .tsv, .jsonl or .parquet, maybe .gz.")],
    heads: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of fits of each head, each with its own seed.")
    ] = 5,
    test: Annotated[Path | None, typer.Option(help="Table to test on; a part of DATA if left out.")] = None,
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    encoder: Annotated[str, typer.Option(help="minilm, a name on the hub, or a folder.")] = "minilm",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Most epochs; chosen by the amount of data if left out.")
    ] = None,
    lr: Annotated[float | None, typer.Option(callback=finite, help="Learning rate.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per head, no table.")] = False,
    strict: Strict = False,
    delimiter: Delimiter = None,
    device: Device = None,
) -> None:
    """Compare heads on a table of texts and labels: accuracy, spread, paired test, time, parameters.

    All heads are trained in the same way, with one exception. Dropout of hidden states and features applies
    only to heads that weight each hidden state, and not to mean_last, mean_all, scalar_mix and cls.
    """
    from vecroute.classifier.compare import compare as run
    from vecroute.classifier.compare import show
    from vecroute.heads import HEADS

    limit_threads()
    check_data(data)
    names = list(HEADS) if heads == "all" else [name.strip() for name in heads.split(",")]
    samples = read_texts(data, text, label, strict, delimiter)
    tested = None
    if test is not None:
        check_data(test)
        other = read_texts(test, text, label, strict, delimiter)
        places = [f"line {line} of {test}" for line in other.lines]
        classes = sorted(set(map(str, samples.labels)))
        check_known(other.labels, places, classes, str(data), "correct it, or leave the row out")
        tested = (other.texts, other.labels)
    given: dict[str, Any] = {"max_epochs": epochs} | ({} if lr is None else {"lr": lr})
    with told():
        rows = run(
            samples.texts,
            samples.labels,
            names,
            seeds=seeds,
            test=tested,
            encoder=encoder,
            device=device,
            **given,
        )
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    show(rows)
