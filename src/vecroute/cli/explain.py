"""``vecroute explain``."""

import enum
import shlex
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
    check_output,
    column,
    lines_of_input,
    load,
    own_gpu,
    run_corpus,
    tell,
    wrote,
)
from vecroute.ops.checks import check_choice

MAX_NAME = 255  # characters of a file name; longer ones are an error on some systems


class Unit(enum.StrEnum):
    token = "token"
    word = "word"
    sentence = "sentence"
    chunk = "chunk"
    patch = "patch"
    region = "region"
    depth = "depth"


class Of(enum.StrEnum):
    words = "words"
    states = "states"


@app.command(
    short_help="Show what each word or image region added to a score.",
    epilog='Example: vecroute explain model/ "a gorgeous, witty movie" --html why.html',
)
def explain(
    model: Model,
    text: Annotated[
        list[str] | None, typer.Argument(help="Texts or images; lines of standard input if left out.")
    ] = None,
    class_: Annotated[
        str | None,
        typer.Option(
            "--class", help="Class to explain; if left out, the predicted class against the runner-up."
        ),
    ] = None,
    of: Annotated[
        Of, typer.Option(help="Explain words through the whole model, or hidden states at their positions.")
    ] = Of.words,
    by: Annotated[
        Unit | None, typer.Option(help="What to sum contributions over; words or regions if left out.")
    ] = None,
    samples: Annotated[
        int,
        typer.Option(help="Average over this many random sub-texts, an even number; slower."),
    ] = 0,
    top: Annotated[int, typer.Option(min=1, help="Number of contributions to list, strongest first.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each text.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page for one text to this file.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Explain a table, or a folder of tables, to --out.")
    ] = None,
    out: OutFolder = None,
    column_: TextColumn = None,
    delimiter: Delimiter = None,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Show what each word of a text, or each region of an image, added to the score of a class."""
    from vecroute.explain.plain import plain
    from vecroute.io.predictions import json_line

    if data is not None or out is not None:
        others = {"TEXT": text, "--class": class_, "--samples": samples, "--json": as_json, "--html": html}
        check_corpus(data, out, others)
        explain_corpus(model, data, out, of, by, column_, delimiter, encoder, device)
        return
    check_samples_option(samples, of, by)
    check_output(html)
    classifier = load(model, encoder, device)
    texts = given_texts(text)
    if not hasattr(classifier.encoder_, "grid"):
        note_files(texts, model)
    if class_ is not None:
        check_choice("--class", class_, tuple(map(str, classifier.classes_)))
    if html is not None and len(texts) > 1:
        raise ValueError(f"--html takes one text, got {len(texts)}")
    for one in texts:
        options = {"by_depth": True} if of == "words" and by == "depth" else {}
        why = classifier.explain(one, of=of.value, samples=samples, **options)
        why = why._replace(about=why.about | {"model": model.resolve().name})
        unit = by.value if by else "region" if "region" in why.units else "word"
        if html is not None:
            states = classifier.explain(one, of="states") if of == "words" else None
            why.to_html(html, unit=unit, outputs=None if class_ is None else [class_], states=states)
            wrote(html)
        if as_json:
            print(json_line(plain(why, unit)))
        elif html is None:
            show_explanation(why, class_, unit, top)


def given_texts(texts: list[str] | None) -> list[str]:
    """Return the texts of the command line, or the lines of standard input.

    Raises:
        ValueError: there are none, or one is empty.
    """
    found = texts or lines_of_input()
    if not found:
        raise ValueError("there is no text: give one, or lines on standard input")
    for number, one in enumerate(found, 1):
        if not one.strip():
            raise ValueError(f"text {number} is empty")
    return found


def check_samples_option(samples: int, of: Of, by: Unit | None) -> None:
    """Raise unless samples is an even number, and 0 where there are no words to leave out."""
    if samples < 0 or samples % 2:
        raise ValueError(f"--samples must be an even number, 0 for none, got {samples}")
    if samples and of != Of.words:
        raise ValueError(f"--samples must be 0 unless --of words, got {samples} with --of {of.value}")
    if samples and by == Unit.depth:
        raise ValueError(f"--samples must be 0 with --by depth, got {samples}")


def note_files(texts: list[str], model: Path) -> None:
    """Say that a text is not read from the file that has its name."""
    for one in texts:
        if len(one) <= MAX_NAME and Path(one).is_file():
            command = f"vecroute explain {shlex.quote(str(model))} < {shlex.quote(one)}"
            tell(f"{one} is explained as a text, not as a file; for its lines: {command}")


def check_corpus(data: Path | None, out: Path | None, others: dict[str, Any]) -> None:
    """Raise unless there is a corpus, a folder for the results, and no option for single texts."""
    if data is None or out is None:
        raise ValueError(f"--data and --out go together, got {'--data' if out is None else '--out'} alone")
    if unused := [name for name, value in others.items() if value]:
        raise ValueError(f"{unused[0]} is for single texts, it cannot be used with --data")
    check_data(data)


def explain_corpus(
    model: Path,
    data: Any,
    out: Any,
    of: Of,
    by: Unit | None,
    text: str | None,
    delimiter: str | None,
    encoder: str | None,
    device: str | None,
) -> None:
    from vecroute.corpora import explain_folder

    unit = by.value if by else "word"
    if unit not in ("token", "word", "sentence", "chunk"):
        raise ValueError(f"--by must be token, word, sentence or chunk with --data, got {unit}")
    classifier = load(model, encoder, own_gpu(device), verbose=False)
    options = {"text": column(classifier, text, "text"), "delimiter": delimiter, "of": of.value, "unit": unit}
    run_corpus(explain_folder, classifier, data, out, **options)


def show_explanation(why: Any, class_: str | None, unit: str, top: int) -> None:
    from rich.console import Console

    Console().print(why.to_rich(output=class_, k=top, unit=unit))
