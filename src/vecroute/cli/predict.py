"""``vecroute predict``."""

import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from vecroute.cli.common import (
    Delimiter,
    Device,
    Encoder,
    Model,
    OutFolder,
    TextColumn,
    app,
    check_data,
    check_kind,
    column,
    load,
    own_gpu,
    run_corpus,
    standard_input,
    tell,
    told,
)


class Output(enum.StrEnum):
    jsonl = "jsonl"
    csv = "csv"


class Input(enum.StrEnum):
    lines = "lines"
    csv = "csv"
    tsv = "tsv"
    jsonl = "jsonl"


@app.command(
    short_help="Classify a table, lines or images, row by row.",
    epilog="Example: cat reviews.txt | vecroute predict model/ > predictions.jsonl",
)
def predict(
    model: Model,
    data: Annotated[
        Path, typer.Argument(help="Table or .txt file of texts, folder of tables or images, or - for stdin.")
    ] = Path("-"),
    out: OutFolder = None,
    text: TextColumn = None,
    from_: Annotated[Input, typer.Option("--from", help="Format of standard input.")] = Input.lines,
    to: Annotated[Output, typer.Option(help="Format of the output.")] = Output.jsonl,
    rows: Annotated[int, typer.Option(min=1, help="Texts read, classified and written at a time.")] = 512,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse rows without text.")] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="In CSV, leave cells as they are, even if a spreadsheet would run them as formulas."
        ),
    ] = False,
    delimiter: Delimiter = None,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Classify texts or images, and write one row of output for each row of input.

    Each row keeps its columns and gets its label and the probability of each class. A row without text gets
    an empty label.

    With --out, a folder of .parquet, .jsonl and .csv files becomes a folder of the same files with these new
    columns. If the model classifies images, each folder of images becomes a table, predictions.jsonl or .csv.
    A stopped run resumes with the missing files. Under torchrun, processes share the files.
    """
    from vecroute.corpora.answers import class_names, predicting
    from vecroute.io.predictions import CsvWriter, JsonWriter, new_writer
    from vecroute.io.samples import listed, text_of

    check_data(data)
    if str(data) == "-":
        standard_input()  # raises if it is closed
    classifier = load(model, encoder, own_gpu(device), verbose=False)
    if out is not None:
        from vecroute.corpora import predict_folder

        own: dict[str, Any] = {"text": column(classifier, text, "text"), "delimiter": delimiter}
        if hasattr(classifier.encoder_, "grid"):
            check_kind(classifier, model, data)
            own = {"to": to.value}
        run_corpus(predict_folder, classifier, data, out, raw=raw, **own)
        return
    check_kind(classifier, model, data)
    names, answer = class_names(classifier), predicting(classifier)
    where = "standard input" if str(data) == "-" else str(data)
    writer: CsvWriter | JsonWriter | None = None
    empty: list[int] = []
    with told():
        for chosen, piece in read_rows(data, from_, column(classifier, text, "text"), rows, delimiter):
            texts = [
                text_of(row, chosen, where, line) for row, line in zip(piece.rows, piece.lines, strict=True)
            ]
            empty += [line for line, one in zip(piece.lines, texts, strict=True) if not one]
            if strict and empty:
                raise ValueError(f"{where}: {listed(empty[:1])} has no text")
            if writer is None:
                writer = new_writer(to.value, sys.stdout, names, piece.rows, raw=raw)
            for row, line, found in zip(piece.rows, piece.lines, answer(texts), strict=True):
                writer.write(row, found, f"line {line} of {where}")
            sys.stdout.flush()
    if empty:
        rows_have, their = ("row has", "its") if len(empty) == 1 else ("rows have", "their")
        tell(f"{where}: {len(empty):,} {rows_have} no text ({listed(empty)}): {their} label is empty")


def read_rows(
    data: Path, kind: Input, text: str, rows: int, delimiter: str | None
) -> Iterator[tuple[str, Any]]:
    """Yield pieces of a file, of standard input or of a folder of images, each with its text column."""
    from vecroute.io.images import image_files
    from vecroute.io.samples import column_of
    from vecroute.io.tables import LINE, Piece, pieces_of, read_pieces

    if data.is_dir():
        paths = [str(path) for path in image_files(data)]
        for start in range(0, len(paths), rows):
            some = paths[start : start + rows]
            yield LINE, Piece([{LINE: path} for path in some], list(range(start + 1, start + 1 + len(some))))
    elif str(data) != "-":
        text = column_of(data, text)
        for piece in read_pieces(data, text, rows=rows, delimiter=delimiter):
            yield text, piece
    else:
        given, text = ("txt", LINE) if kind is Input.lines else (kind.value, text)
        source = standard_input()
        for piece in pieces_of(source, given, "standard input", text, rows=rows, delimiter=delimiter):
            yield text, piece
