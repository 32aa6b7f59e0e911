"""Predict or explain whole folders of tables or images, each shard once, with any number of processes."""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from vecroute.classifier.parts import ready
from vecroute.corpora.answers import Answering, class_names, explaining, predicting
from vecroute.corpora.pictures import copy_images, find_images
from vecroute.corpora.shards import Columns, check_shards, copy_shard, find_shards
from vecroute.ops.checks import check_choice
from vecroute.storage import seal_of, write_file

logger = logging.getLogger(__name__)

RECORD = "_vecroute.json"  # in the folder of results: which run they belong to
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")


class Report(NamedTuple):
    """What a run did, all processes together."""

    done: int  # shards written by this run
    there: int  # shards that an earlier run has written
    rows: int  # written by this run
    failed: dict[str, str]  # the shards that could not be done, and why


def predict_folder(classifier: Any, data: str | Path, out: str | Path, **options: Any) -> Report:
    """Predict every text or image of a corpus: a label and the probability of each class for each.

    Args:
        classifier: a fitted ``RoutingClassifier``.
        data: for texts a folder of .parquet, .jsonl and .csv files, the last two maybe with .gz, or one such
            file. For images a folder, whose subfolders count too.
        out: the folder of results. It gets a file of the same name for each file of the corpus, with all its
            columns, and new ones after them. Each folder of images becomes a file ``predictions.jsonl``, with
            a row for each image. A run that was stopped resumes with the missing files.
        options: of ``run_folder`` for texts, of ``run_images`` for images.

    Returns:
        What was done.

    Raises:
        ValueError: before anything is written: no such corpus, no column of texts, files with different
            columns, no images, or a folder with other results. A file that cannot be read is named in the
            report.
    """
    encoder, _ = ready(classifier)
    if hasattr(encoder, "grid"):
        return run_images(classifier, data, out, **options)
    return run_folder(classifier, data, out, predicting(classifier), {"what": "predict"}, **options)


def explain_folder(
    classifier: Any,
    data: str | Path,
    out: str | Path,
    *,
    of: str = "words",
    unit: str = "word",
    **options: Any,
) -> Report:
    """Explain every text of a corpus; see ``predict_folder``. The column ``explanation`` comes last.

    Args:
        classifier, data, out, options: as in ``predict_folder``, for texts.
        of: "words" or "states", as in ``RoutingClassifier.explain``.
        unit: "token", "word", "sentence" or "chunk": what contributions are summed over.
    """
    encoder, _ = ready(classifier)
    check_choice("of", of, ("words", "states"))
    check_choice("unit", unit, ("token", "word", "sentence", "chunk"))
    if hasattr(encoder, "grid"):
        raise ValueError(f"classifier must be of texts to explain {data}, it is of images")
    about = {"what": "explain", "of": of, "unit": unit}
    return run_folder(classifier, data, out, explaining(classifier, of, unit), about, **options)


def run_folder(
    classifier: Any,
    data: str | Path,
    out: str | Path,
    answer: Answering,
    about: dict[str, str],
    *,
    text: str = "text",
    raw: bool = False,
    delimiter: str | None = None,
    step: Callable[[int, int], None] | None = None,
) -> Report:
    """Give each row of a corpus new cells.

    Args:
        answer: gives the new cells.
        about: what the run does.
        text: the column of texts.
        raw: True to leave CSV cells as they are, even if a spreadsheet would read them as formulas.
        delimiter: delimiter of CSV files, None to detect it.
        step: called with the number of finished shards of this process, and of all its shards.
    """
    root, shards = find_shards(Path(data))
    out = Path(out)
    check_places(Path(data), root, out)
    explained = about["what"] == "explain"
    columns = Columns(text, class_names(classifier), classifier.multi_label, explained, raw, delimiter)
    check_shards(root, shards, columns)
    record = {**about, "text": text, "raw": raw, "model": model_key(classifier)}
    sources = {shard: [root / shard] for shard in shards}

    def copy(shard: Path) -> int:
        return copy_shard(root / shard, out / shard, columns, answer)

    return run_shards(sources, out, record, copy, step)


def run_images(
    classifier: Any,
    data: str | Path,
    out: str | Path,
    *,
    to: str = "jsonl",
    raw: bool = False,
    step: Callable[[int, int], None] | None = None,
) -> Report:
    """Predict every image of a folder. Each folder of images becomes one table of the same path.

    Args:
        to: the format of the tables, "jsonl" or "csv".
        raw, step: as in ``run_folder``.
    """
    if to not in ("jsonl", "csv"):
        raise ValueError(f"to must be jsonl or csv, got {to!r}")
    root, out = Path(data), Path(out)
    sources = find_images(root, f"predictions.{to}")
    check_places(root, root, out)
    record = {"what": "predict", "to": to, "raw": raw, "model": model_key(classifier)}
    classes, answer = class_names(classifier), predicting(classifier)

    def copy(shard: Path) -> int:
        _, *images = sources[shard]
        return copy_images(images, out / shard, classes, answer, raw)

    return run_shards(sources, out, record, copy, step)


def run_shards(
    sources: Mapping[Path, Sequence[Path]],
    out: Path,
    record: dict[str, Any],
    copy: Callable[[Path], int],
    step: Callable[[int, int], None] | None,
) -> Report:
    """Make the missing shards of a folder of results. Under torchrun, each process takes its share.

    Args:
        sources: the shards, relative to the folder, and the files or folders that each is made from.
        out: the folder of results.
        record: what the run does.
        copy: makes a shard and returns its number of rows.
        step: called with the number of finished shards of this process, and of all its shards.
    """
    check_record(out, record)
    with Processes() as processes:
        missing = processes.first([shard for shard in sources if not is_done(sources[shard], out / shard)])
        out.mkdir(parents=True, exist_ok=True)
        write_file(out / RECORD, json.dumps(record, indent=1).encode())
        own = missing[processes.rank :: processes.world]
        rows, failed = 0, {}
        for k, shard in enumerate(own, 1):
            try:
                rows += copy(shard)
            except (ValueError, TypeError, OSError) as error:
                failed[str(shard)] = " ".join(str(error).split())
                logger.warning("%s is left out: %s", sources[shard][0], failed[str(shard)])
            if step:
                step(k, len(own))
        every = processes.gathered((rows, failed))
    if processes.rank == 0:
        remove_left(out, missing)
    failures = {name: why for _, some in every for name, why in some.items()}
    there = len(sources) - len(missing)
    return Report(len(missing) - len(failures), there, sum(n for n, _ in every), failures)


class Processes:
    """The processes that torchrun started, or this one alone."""

    def __init__(self) -> None:
        self.rank, self.world = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))

    def __enter__(self) -> "Processes":
        self.started = self.world > 1 and not dist.is_initialized()
        if self.started:
            # A process with few or small shards waits for the others, however long they work.
            dist.init_process_group("gloo", timeout=timedelta(days=365))
        return self

    def __exit__(self, *error: object) -> None:
        if self.started:
            dist.destroy_process_group()

    def first(self, value: Any) -> Any:
        """Return the value of the first process, since others may see other files by now."""
        given = [value]
        if self.world > 1:
            dist.broadcast_object_list(given)
        return given[0]

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all processes. All wait here: torchrun ends all when one exits with 1."""
        found = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found


def check_places(data: Path, root: Path, out: Path) -> None:
    """Raise if results would be written among the files of the corpus, or where no folder can be."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} must be a folder, it is a file")
    place, corpus = out.resolve(), root.resolve()
    within = place.is_relative_to(corpus) or corpus.is_relative_to(place)
    if place == corpus or (data.is_dir() and within):
        raise ValueError(f"{out} must lie outside of the folder of the corpus, {root}")


def check_record(out: Path, record: dict[str, Any]) -> None:
    """Raise for a folder with other files than results of this very run."""
    path = out / RECORD
    files = [file.name for file in out.iterdir()] if out.is_dir() else []
    if all(name == RECORD or TEMPORARY.fullmatch(name) for name in files):
        return
    if not path.is_file():
        raise ValueError(f"{out} has files that are not results of vecroute: name another folder")
    try:
        found = json.loads(path.read_bytes())
        differs = [name for name in record if found.get(name) != record[name]]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: name another folder") from error
    if differs:
        raise ValueError(
            f"{out} has results of another run ({', '.join(differs)} differs): name another folder"
        )


def model_key(classifier: Any) -> str:
    """A key that changes with everything that changes predictions."""
    encoder, head = ready(classifier)
    of_texts = ("max_length", "stride", "special_tokens")
    options = [encoder.depths, *(getattr(encoder, name) for name in of_texts if hasattr(encoder, name))]
    temperature = float(getattr(classifier, "temperature_", 1.0))
    about = [*encoder.identity, options, classifier.classes_.tolist(), temperature]
    described = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    return seal_of({name: weight.cpu() for name, weight in head.state_dict().items()}, described)


def is_done(sources: Sequence[Path], target: Path) -> bool:
    """Return whether the result exists and is not older than its sources."""
    return target.is_file() and target.stat().st_mtime >= max(path.stat().st_mtime for path in sources)


def remove_left(out: Path, shards: Sequence[Path]) -> None:
    """Remove temporary files that killed processes left beside the shards. No process writes there now."""
    for folder in {out, *((out / shard).parent for shard in shards)}:
        for left in folder.glob(".*") if folder.is_dir() else ():
            if TEMPORARY.fullmatch(left.name) and left.is_file():
                left.unlink(missing_ok=True)
