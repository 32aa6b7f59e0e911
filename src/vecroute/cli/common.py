"""What the commands share: the app, options, and how they read and tell."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    help="Classifiers of texts and images on frozen Transformers, whose predictions come with explanations.",
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


def fail(message: str, code: int = 2) -> NoReturn:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    print("vecroute:", " ".join(lines) or "failed", file=sys.stderr)
    sys.exit(code)


def load(model: Path, encoder: str | None, device: str | None) -> Any:
    from vecroute.classifier import RoutingClassifier

    return RoutingClassifier.from_pretrained(model, encoder=encoder, device=device)


def check_kind(classifier: Any, model: Path, data: Path) -> None:
    """Raise for a folder of images given to a classifier of texts, or for a table given to one of images."""
    images = hasattr(classifier.encoder_, "grid")
    if str(data) != "-" and images != data.is_dir():
        kind = "images: give a folder of them" if images else "texts: give a table of them"
        raise ValueError(f"{model} classifies {kind}, got {data}")


def column(classifier: Any, given: str | None, kind: str) -> str:
    """The name of a column: as given, as it was in ``fit``, or what it is called by default."""
    return given or classifier.about_.get(f"{kind} column", kind)


def checked(texts: Any, name: str, where: Any, first: int = 0) -> list[str]:
    from vecroute.classifier.labels import check_texts

    return check_texts(texts, f"column {name!r} of {where}", first)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Messages of the library on standard error: all on a terminal, else warnings."""
    logger, handler = logging.getLogger("vecroute"), logging.StreamHandler()
    training = logging.getLogger("vecroute.training")
    levels = logger.level, training.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)
    training.setLevel(logging.WARNING)  # its progress bar says the same
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(levels[0])
        training.setLevel(levels[1])
