"""Options and helpers that the commands share."""

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn

import typer

from vecroute.cli.threads import limit_threads
from vecroute.io.cells import visible

app = typer.Typer(
    help="Classify texts and images with frozen Transformers, and explain every prediction.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def one_character(value: str | None) -> str | None:
    """Check that a delimiter is one character. A tab may be written as \\t or tab."""
    found = "\t" if value in ("\\t", "tab") else value
    if found is not None and (len(found) != 1 or found in '"\r\n'):
        raise typer.BadParameter(f"{value!r} is not one character, such as ; or tab.")
    return found


def finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Model = Annotated[
    Path, typer.Argument(help="Folder that `vecroute fit` wrote, or its name on the Hugging Face hub.")
]
TextColumn = Annotated[str | None, typer.Option("--text", help="Column of texts; as in `fit` if left out.")]
LabelColumn = Annotated[
    str | None, typer.Option("--label", help="Column of labels; as in `fit` if left out.")
]
Encoder = Annotated[
    str | None, typer.Option(help="Folder or hub name of the encoder, if it has moved since `fit`.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one and this is left out.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse rows without text or label.")]
OutFolder = Annotated[
    Path | None, typer.Option("--out", help="Write a shard for each shard of a corpus to this folder.")
]
Delimiter = Annotated[
    str | None,
    typer.Option(
        callback=one_character,
        help="Character between cells of .csv files, such as ; or tab; detected if left out.",
    ),
]


def fail(message: str, code: int = 2) -> NoReturn:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    print("vecroute:", visible(" ".join(lines)) or "failed", file=sys.stderr)
    sys.exit(code)


def load(model: Path, encoder: str | None, device: str | None, verbose: bool | None = None) -> Any:
    from vecroute.classifier import RoutingClassifier

    limit_threads()
    return RoutingClassifier.from_pretrained(model, encoder=encoder, device=device, verbose=verbose)


def check_data(data: Path) -> None:
    """Raise an error for missing data before the model is loaded."""
    if str(data) != "-" and not data.exists():
        raise ValueError(f"{data} does not exist")


def check_output(path: Path | None) -> None:
    """Raise an error for a file that cannot be written, before the work begins."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "it is a folder" if path.is_dir() else f"{path.absolute().parent} is not a folder"
        raise ValueError(f"{path} cannot be written: {what}")


def own_gpu(device: str | None) -> str | None:
    """Return the device as given, else under torchrun the GPU of this process, if there are GPUs."""
    import torch

    rank = os.environ.get("LOCAL_RANK")
    if device is None and rank is not None and torch.cuda.is_available():
        return f"cuda:{int(rank) % torch.cuda.device_count()}"
    return device


def run_corpus(run: Any, classifier: Any, data: Path, out: Path, **options: Any) -> None:
    """Predict or explain a corpus, with a progress bar; failed shards end in exit code 1."""
    from vecroute.training.progress import progress_bar

    first = os.environ.get("RANK", "0") == "0"  # only one process shows messages
    show = first and sys.stderr.isatty()
    with told(), progress_bar(show, "shards", None) as bar:
        report = run(classifier, data, out, step=lambda done, n: bar(done, of=str(n)), **options)
    if first:
        n = report.done + report.there + len(report.failed)
        tell(f"{out}: {report.done} of {n} shards written, {report.there} were there, {report.rows:,} rows")
    if report.failed and not first:
        sys.exit(1)
    if report.failed:
        name, why = next(iter(report.failed.items()))
        more = f" (and {len(report.failed) - 1} more shards)" if len(report.failed) > 1 else ""
        fail(f"{name} could not be done{more}: {why}", 1)


def check_kind(classifier: Any, model: Path, data: Path) -> None:
    """Raise an error if a text classifier is given a folder, or an image classifier a table."""
    images = hasattr(classifier.encoder_, "grid")
    if str(data) != "-" and images != data.is_dir():
        kind = "images: give a folder of them" if images else "texts: give a table, or a folder and --out"
        raise ValueError(f"{model} classifies {kind}, got {data}")


def column(classifier: Any, given: str | None, kind: str) -> str:
    """Return the name of a column: the given one, else the one used in ``fit``, else the default."""
    return given or classifier.about_.get(f"{kind} column", kind)


def read_texts(data: Path, text: str, label: str | None, strict: bool, delimiter: str | None) -> Any:
    """Read the texts of a table and their labels. Report and skip rows without them, or refuse if strict."""
    from vecroute.io.samples import lacking, read_samples

    samples = read_samples(data, text, label, strict=strict, delimiter=delimiter)
    if len(samples.texts) < samples.n_rows:
        tell(f"{data}: {lacking(samples, data)}: skipped")
    return samples


def standard_input() -> IO[bytes]:
    if sys.stdin is None:
        raise ValueError("standard input is closed: name a file to read")
    return sys.stdin.buffer


def lines_of_input() -> list[str]:
    """Return the lines of standard input that are not blank."""
    from vecroute.io.tables import LINE, pieces_of

    pieces = pieces_of(standard_input(), "txt", "standard input")
    return [row[LINE] for piece in pieces for row in piece.rows if row[LINE].strip()]


def tell(message: str) -> None:
    """Write a line for people to standard error, whether it is a terminal or a log."""
    print("vecroute:", visible(message), file=sys.stderr)


def wrote(path: Path) -> None:
    """Name the written file if standard error is a terminal."""
    if sys.stderr.isatty():
        tell(f"wrote {path}")


class Visible(logging.Formatter):
    """Format messages without characters that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keep="\n")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Show messages of the library on standard error: all of them on a terminal, else warnings only."""
    logger, handler = logging.getLogger("vecroute"), logging.StreamHandler()
    handler.setFormatter(Visible())
    training = logging.getLogger("vecroute.training")
    levels = logger.level, training.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)
    training.setLevel(logging.WARNING)  # the progress bar shows its messages
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(levels[0])
        training.setLevel(levels[1])
