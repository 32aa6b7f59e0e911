"""``vecroute fit``."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from vecroute.cli.common import Delimiter, Device, Strict, app, check_data, fail, finite, read_texts, told
from vecroute.cli.threads import limit_threads
from vecroute.io.cells import visible


@app.command(
    short_help="Fit a classifier to a table of texts or a folder of images.",
    epilog="Example: vecroute fit train.csv --text review --label stars --out model/, "
    "or vecroute fit photos/ --encoder vit-cifar10 --out model/",
)
def fit(
    data: Annotated[
        Path,
        typer.Argument(
            help="Table: .csv, .tsv, .jsonl or .parquet, maybe .gz; or a folder of images by class."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist, unless --force.")],
    text: Annotated[str, typer.Option(help="Column of texts.")] = "text",
    label: Annotated[str, typer.Option(help="Column of labels.")] = "label",
    encoder: Annotated[
        str, typer.Option(help="minilm, vit-cifar10 (for images), a name on the hub, or a folder.")
    ] = "minilm",
    head: Annotated[
        str, typer.Option(help="routing, wide (MLPs twice as wide), paper (the paper's own), ...")
    ] = "routing",
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Most epochs; chosen by the amount of data if left out.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Texts per step.")] = None,
    lr: Annotated[float | None, typer.Option(callback=finite, help="Learning rate.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="The same seed gives the same classifier.")
    ] = 0,
    validation: Annotated[
        float | None,
        typer.Option(help="Fraction of the texts to validate on; chosen by the amount of data if left out."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Fit a temperature, so that probabilities agree with the accuracy.")
    ] = True,
    estimate: Annotated[
        bool, typer.Option(help="Estimate the accuracy on new texts; with few texts, by cross-validation.")
    ] = True,
    balanced: Annotated[bool, typer.Option(help="Give every class the same weight.")] = False,
    max_length: Annotated[int | None, typer.Option(min=1, help="Tokens per chunk of a long text.")] = None,
    stride: Annotated[int, typer.Option(min=0, help="Tokens that neighbouring chunks share.")] = 0,
    cache: Annotated[bool, typer.Option(help="Store hidden states on disk for later fits.")] = True,
    shard_inputs: Annotated[
        bool, typer.Option(help="With torchrun: split each text over the processes, not the set of texts.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model that `vecroute fit` wrote to --out before.")
    ] = False,
    keep_examples: Annotated[
        bool, typer.Option("--keep-examples", help="Store three of the texts in the model, for its web page.")
    ] = False,
    strict: Strict = False,
    delimiter: Delimiter = None,
    device: Device = None,
) -> None:
    """Fit a classifier to texts and labels, or to images. After an interruption, the same command resumes."""
    from vecroute.classifier import RoutingClassifier
    from vecroute.encoders.either import is_of_images

    limit_threads()
    check_data(data)
    check_place(out, force)
    with told():
        samples, labels, about = read_data(data, text, label, strict, delimiter)
    partial = out.with_name(f".{out.name}.partial")
    given: dict[str, Any] = {"batch_size": batch_size, "lr": lr}
    classifier = RoutingClassifier(
        encoder,
        head=head,
        max_epochs=epochs,
        random_state=seed,
        validation_fraction=validation,
        class_weight="balanced" if balanced else None,
        max_length=max_length,
        stride=stride,
        calibrate=calibrate,
        estimate=estimate,
        cache=cache,
        checkpoint=partial,
        shard_inputs=shard_inputs,
        keep_examples=keep_examples,
        device=device,
        **{name: value for name, value in given.items() if value is not None},
    )
    if data.is_dir() and not is_of_images(classifier.encoder, classifier.revision):
        raise ValueError(
            f"{data} has images: name a vision Transformer with --encoder, {encoder} takes texts"
        )
    try:
        with told():
            classifier.fit(samples, labels)
    except KeyboardInterrupt:
        if not partial.exists():
            raise
        fail(f"interrupted: the same command resumes from {partial}", 130)
    if os.environ.get("RANK", "0") != "0":  # only the first of several processes writes
        return
    classifier.save_pretrained(out, overwrite=force, about={**about, "data": data.name})
    tell_result(classifier, out)


def tell_result(classifier: Any, out: Path) -> None:
    """Print what was fitted, how good it is, and what to do next."""
    accuracy, estimate = classifier.validation_accuracy_, classifier.estimate_
    validated = "" if accuracy is None or estimate else f", validation accuracy {accuracy:.3f}"
    samples = "images" if hasattr(classifier.encoder_, "grid") else "texts"
    print(
        f"{out}: {len(classifier.classes_)} classes from {classifier.n_texts_['train']} {samples}{validated}"
    )
    if estimate is not None:
        for line in (*estimate.lines(), f"next: {estimate.advice(str(out))}"):
            print(visible(line))


def read_data(
    data: Path, text: str, label: str, strict: bool, delimiter: str | None
) -> tuple[Any, Any, dict[str, str]]:
    """Read texts or images and their labels, and the names of the columns, which the model remembers."""
    from vecroute.classifier.labels import check_labels
    from vecroute.io.images import read_folder

    if data.is_dir():
        folder = read_folder(data)
        check_labels(folder.labels, len(folder.paths), f"labels of {data}")
        return folder.paths, folder.labels, {}
    samples = read_texts(data, text, label, strict, delimiter)
    check_labels(samples.labels, len(samples.texts), f"column {label!r} of {data}")
    return samples.texts, samples.labels, {"text column": text, "label column": label}


def check_place(out: Path, force: bool) -> None:
    """Raise an error before the fit if the output folder cannot be written."""
    from vecroute.classifier.saving import check_place as check_replaced

    if out.exists() and not force:
        raise ValueError(f"{out} exists: choose another --out, or replace a model with --force")
    check_replaced(out, force)
    place = next(parent for parent in out.absolute().parents if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ValueError(f"{out} cannot be written: {place} is not a folder to write to")
