"""``vecroute predict``."""

import csv
import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from vecroute.cli.common import Device, Encoder, Model, TextColumn, app, check_kind, checked, column, load


class Output(enum.StrEnum):
    jsonl = "jsonl"
    csv = "csv"


class Input(enum.StrEnum):
    lines = "lines"
    csv = "csv"
    tsv = "tsv"
    jsonl = "jsonl"


@app.command(epilog="Example: cat reviews.txt | vecroute predict model/ > predictions.jsonl")
def predict(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Table of texts, folder of images, or - for stdin.")] = Path(
        "-"
    ),
    text: TextColumn = None,
    from_: Annotated[Input, typer.Option("--from", help="What comes from standard input.")] = Input.lines,
    to: Annotated[Output, typer.Option(help="What to write.")] = Output.jsonl,
    rows: Annotated[int, typer.Option(help="Texts read, classified and written at a time.")] = 512,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Classify texts or images, and write label and probabilities of each to standard output as they come."""
    classifier = load(model, encoder, device)
    check_kind(classifier, model, data)
    names = [str(label) for label in classifier.classes_]
    table = csv.writer(sys.stdout)
    if to is Output.csv:
        table.writerow(["text", "label", *names])
    for texts in read_texts(data, from_, column(classifier, text, "text"), rows):
        for one, p in zip(texts, classifier.predict_proba(texts).tolist(), strict=True):
            labels = predicted(classifier, names, p)
            if to is Output.csv:
                table.writerow([one, labels if isinstance(labels, str) else " ".join(labels), *p])
            else:
                row = {"text": one, "label": labels, "probabilities": dict(zip(names, p, strict=True))}
                print(json.dumps(row, ensure_ascii=False))
        sys.stdout.flush()


def read_texts(data: Path, kind: Input, text: str, rows: int) -> Iterator[list[str]]:
    """Texts of a file, or of standard input, some at a time."""
    from vecroute.io.images import image_files
    from vecroute.io.tables import checked_pieces, read_lines, read_pieces

    pieces: Iterator[Any]
    where = "standard input" if str(data) == "-" else str(data)
    if data.is_dir():
        paths = [str(path) for path in image_files(data)]
        yield from (paths[k : k + rows] for k in range(0, len(paths), rows))
        return
    if str(data) != "-":
        pieces = (piece[text] for piece in read_pieces(data, text, rows=rows))
    elif kind is Input.lines:
        pieces, text = read_lines(sys.stdin.buffer, rows), "line"
    else:
        tables = checked_pieces(sys.stdin.buffer, kind.value, where, text, rows=rows)
        pieces = (piece[text] for piece in tables)
    done = 0
    for piece in pieces:
        yield checked(piece, text, where, done)
        done += len(piece)


def predicted(classifier: Any, names: list[str], p: list[float]) -> str | list[str]:
    """The predicted label, or all that are more likely than not."""
    if classifier.multi_label:
        return [name for name, share in zip(names, p, strict=True) if share > 0.5]
    return names[p.index(max(p))]
