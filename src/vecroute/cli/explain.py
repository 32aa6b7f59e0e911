"""``vecroute explain``."""

import enum
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vecroute.cli.common import Device, Encoder, Model, app, checked, load


class Unit(enum.StrEnum):
    token = "token"
    word = "word"
    sentence = "sentence"
    chunk = "chunk"
    depth = "depth"


@app.command(epilog='Example: vecroute explain model/ "a gorgeous, witty movie" --html why.html')
def explain(
    model: Model,
    text: Annotated[list[str] | None, typer.Argument(help="Texts, else lines of standard input.")] = None,
    class_: Annotated[str | None, typer.Option("--class", help="Else the predicted one.")] = None,
    by: Annotated[Unit, typer.Option(help="What to sum contributions over.")] = Unit.word,
    top: Annotated[int, typer.Option(help="How many of the strongest to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each text.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page for one text to this file.")] = None,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Show what each word of a text added to the score of a class."""
    classifier = load(model, encoder, device)
    texts = checked(text or [line.rstrip("\n") for line in sys.stdin], "TEXT", "the command line")
    if html is not None and len(texts) > 1:
        raise ValueError(f"--html takes one text, got {len(texts)}")
    for one in texts:
        why = classifier.explain(one)
        why.index(class_)  # raises if there is no such class
        if html is not None:
            why.to_html(html, unit=by.value, outputs=None if class_ is None else [class_])
        if as_json:
            print(json.dumps(explained(why, by.value), ensure_ascii=False))
        elif html is None:
            show_explanation(why, class_, by.value, top)


def explained(why: Any, unit: str) -> dict[str, Any]:
    """An explanation in JSON types."""
    rows, names = why.aggregate(unit), why.output_names

    def by_class(values: Any) -> dict[str, float]:
        return dict(zip(names, map(float, values), strict=True))

    return {
        "text": why.text,
        "scores": by_class(why.scores),
        "base_values": by_class(why.base_values),
        "unit": unit,
        "parts": [
            {"piece": rows.label(k), "start": start, "end": end, "values": by_class(values)}
            for k, ((start, end), values) in enumerate(
                zip(rows.offsets.tolist(), rows.values.sum(1), strict=True)
            )
        ],
    }


def show_explanation(why: Any, class_: str | None, unit: str, top: int) -> None:
    from rich.console import Console

    from vecroute.explain.terminal import renderable

    Console().print(renderable(why, class_, top, unit))
