"""The command line: one short function per command, no logic of its own."""

import contextlib
import csv
import enum
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Text classifiers on frozen Transformers, whose every prediction comes with an explanation.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Model = Annotated[Path, typer.Argument(help="Folder that `vecroute fit` wrote.")]
TextColumn = Annotated[str | None, typer.Option("--text", help="Column of texts; as in `fit` if left out.")]
LabelColumn = Annotated[
    str | None, typer.Option("--label", help="Column of labels, as in `fit` if left out.")
]
Encoder = Annotated[str | None, typer.Option(help="Where the encoder is now, if not where it was.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one.")]


class Output(enum.StrEnum):
    jsonl = "jsonl"
    csv = "csv"


class Input(enum.StrEnum):
    lines = "lines"
    csv = "csv"
    tsv = "tsv"
    jsonl = "jsonl"


class Unit(enum.StrEnum):
    token = "token"
    word = "word"
    sentence = "sentence"
    chunk = "chunk"
    depth = "depth"


# The error of a wrong command or option: click's, which typer may bring along under another name.
UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Run a command. Mistakes of the user end in one line and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except UsageError as error:
        fail(error.format_message())
    except (ValueError, TypeError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int = 2) -> None:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    print("vecroute:", " ".join(lines) or "failed", file=sys.stderr)
    sys.exit(code)


@app.command(epilog="Example: vecroute fit train.csv --text review --label stars --out model/")
def fit(
    data: Annotated[Path, typer.Argument(help="Table: .csv, .tsv, .jsonl or .parquet, maybe .gz.")],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    encoder: Annotated[str, typer.Option(help="minilm, a name on the hub, or a folder.")] = "minilm",
    head: Annotated[str, typer.Option(help="routing, or paper for the paper's own.")] = "routing",
    epochs: Annotated[int | None, typer.Option(help="At most; by the data if left out.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts per step.")] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="The same seed gives the same classifier.")] = 0,
    validation: Annotated[float, typer.Option(help="Fraction of the texts to validate on.")] = 0.1,
    balanced: Annotated[bool, typer.Option(help="Give every class the same weight.")] = False,
    max_length: Annotated[int | None, typer.Option(help="Tokens per chunk of a long text.")] = None,
    stride: Annotated[int, typer.Option(help="Tokens that neighbouring chunks share.")] = 0,
    cache: Annotated[bool, typer.Option(help="Keep hidden states for the next time.")] = True,
    device: Device = None,
) -> None:
    """Fit a classifier to a table of texts and labels. Interrupted, the same command goes on."""
    from vecroute.tables import read_table

    if out.exists():
        raise ValueError(f"{out} exists: choose another --out, or remove it first")
    table = read_table(data, text, label)
    texts = checked(table[text], text, data)
    from vecroute.classifier import RoutingClassifier

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    classifier = RoutingClassifier(
        encoder,
        head=head,
        max_epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        random_state=seed,
        validation_fraction=validation,
        class_weight="balanced" if balanced else None,
        max_length=max_length,
        stride=stride,
        cache=cache,
        checkpoint=partial,
        device=device,
    )
    try:
        with told():
            classifier.fit(texts, table[label])
    except KeyboardInterrupt:
        if not partial.exists():
            raise
        fail(f"interrupted: the same command goes on from where it was ({partial})", 130)
    if os.environ.get("RANK", "0") != "0":  # one of several processes is enough
        return
    classifier.save_pretrained(out, about={"text column": text, "label column": label, "data": data.name})
    accuracy = classifier.validation_accuracy_
    validated = "" if accuracy is None else f", validation accuracy {accuracy:.3f}"
    print(f"{out}: {len(classifier.classes_)} classes from {classifier.n_texts_['train']} texts{validated}")


@app.command(epilog="Example: cat reviews.txt | vecroute predict model/ > predictions.jsonl")
def predict(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Table of texts, or - for standard input.")] = Path("-"),
    text: TextColumn = None,
    from_: Annotated[Input, typer.Option("--from", help="What comes from standard input.")] = Input.lines,
    to: Annotated[Output, typer.Option(help="What to write.")] = Output.jsonl,
    rows: Annotated[int, typer.Option(help="Texts read, classified and written at a time.")] = 512,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Classify texts, and write label and probabilities of each to standard output as they come."""
    classifier = load(model, encoder, device)
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


@app.command(epilog="Example: vecroute evaluate model/ test.csv --json")
def evaluate(
    model: Model,
    data: Annotated[Path, typer.Argument(help="Table of texts and labels.")],
    text: TextColumn = None,
    label: LabelColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Measure a classifier on texts whose labels are known."""
    from vecroute.evaluation import evaluate as measure
    from vecroute.evaluation import show
    from vecroute.tables import read_table

    classifier = load(model, encoder, device)
    if classifier.multi_label:
        raise ValueError(f"{model} gives any number of labels, which evaluate does not know how to measure")
    text, label = column(classifier, text, "text"), column(classifier, label, "label")
    table = read_table(data, text, label)
    texts, labels = checked(table[text], text, data), table[label]
    if labels.isna().any():
        raise ValueError(f"column {label!r} of {data}: row {labels.isna().argmax()} is missing")
    result = measure(labels, classifier.classes_, classifier.predict_proba(texts))
    if as_json:
        print(json.dumps(result))
        return
    show(result)


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


@app.command(epilog="Example: vecroute demo --out demo/")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")] = Path("demo"),
) -> None:
    """Fit film review sentences, compare with logistic regression, and explain a few of them."""
    from vecroute.demo import run

    with told():
        run(out)


def load(model: Path, encoder: str | None, device: str | None) -> Any:
    from vecroute.classifier import RoutingClassifier

    return RoutingClassifier.from_pretrained(model, encoder=encoder, device=device)


def column(classifier: Any, given: str | None, kind: str) -> str:
    """The name of a column: as given, as it was in ``fit``, or what it is called by default."""
    return given or classifier.about_.get(f"{kind} column", kind)


def checked(texts: Any, name: str, where: Any) -> list[str]:
    from vecroute.labels import check_texts

    return check_texts(texts, f"column {name!r} of {where}")


def read_texts(data: Path, kind: Input, text: str, rows: int) -> Iterator[list[str]]:
    """Texts of a file, or of standard input, some at a time."""
    from vecroute.tables import checked_pieces, read_lines, read_pieces

    if str(data) == "-" and kind is Input.lines:
        yield from (checked(lines, "line", "standard input") for lines in read_lines(sys.stdin.buffer, rows))
        return
    if str(data) == "-":
        pieces = checked_pieces(sys.stdin.buffer, kind.value, "standard input", text, rows=rows)
    else:
        pieces = read_pieces(data, text, rows=rows)
    yield from (checked(piece[text], text, data) for piece in pieces)


def predicted(classifier: Any, names: list[str], p: list[float]) -> str | list[str]:
    """The predicted label, or all that are more likely than not."""
    if classifier.multi_label:
        return [name for name, share in zip(names, p, strict=True) if share > 0.5]
    return names[p.index(max(p))]


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


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Messages of the library on standard error: all on a terminal, else warnings."""
    logger, handler = logging.getLogger("vecroute"), logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)
    logging.getLogger("vecroute.training").setLevel(logging.WARNING)  # its progress bar says the same
    try:
        yield
    finally:
        logger.removeHandler(handler)
