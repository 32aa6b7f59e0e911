"""Predict corpora on a cluster, with Ray Data."""

from collections.abc import Sequence
from math import floor
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from vecroute.corpora.answers import class_names, predicting
from vecroute.corpora.shards import ROWS, Columns, holds_texts, new_arrays, new_fields
from vecroute.io.samples import text_of
from vecroute.storage import require


def ray_predict(
    model: Any,
    dataset: Any,
    *,
    text: str = "text",
    workers: int | None = None,
    batch_size: int = ROWS,
    encoder: str | None = None,
) -> Any:
    """Predict every text of a Ray dataset. Work begins when the result is read or written.

    Args:
        model: the folder or hub name of a classifier, which every node can read, or a ``RoutingClassifier``.
        dataset: a ``ray.data.Dataset``.
        text: the column of texts.
        workers: number of processes. Each loads the model. None for one process per GPU of the cluster, or
            one per two CPUs if there are no GPUs.
        batch_size: rows that a worker takes at a time.
        encoder: the name or folder of the encoder, None if it has not moved since the fit.

    Returns:
        A ``ray.data.Dataset`` with all columns of the dataset, ``label`` and a probability for each class. If
        a worker dies, Ray starts another one and repeats its rows.

    Raises:
        ValueError: the column of texts is missing or has no texts, or workers is less than 1.
        ImportError: Ray is not installed.
    """
    ray = require("ray", "ray")
    require("ray.data", "ray")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    schema = dataset.schema()
    kinds = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))
    if text not in kinds:
        raise ValueError(f"dataset must have the column {text!r}, it has {', '.join(kinds) or 'no rows'}")
    if isinstance(kinds[text], pa.DataType) and not holds_texts(kinds[text]):
        raise ValueError(f"column {text!r} of the dataset must have texts, it has {kinds[text]}")
    there = ray.cluster_resources()
    gpus = int(there.get("GPU", 0))
    workers = workers or gpus or max(1, int(there.get("CPU", 1)) // 2)
    return dataset.map_batches(
        Worker,
        fn_constructor_args=(str(model) if isinstance(model, str | Path) else model, text, encoder),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_gpus=min(1.0, gpus / workers) if gpus else None,
        num_cpus=None if gpus else cpus_of_a_worker(ray.nodes(), workers),
    )


def cpus_of_a_worker(nodes: Sequence[dict[str, Any]], workers: int) -> float:
    """Return the CPUs that Ray sets aside for a worker, at most 1.

    Tasks that read the dataset need a whole CPU, and workers keep their CPUs until the end: without a free
    CPU, both wait for ever. Workers therefore leave as many CPUs as there are nodes with CPUs. Then some node
    has a free one, however Ray spreads the workers.
    """
    cpus = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    share = (sum(cpus) - sum(n > 0 for n in cpus)) / workers
    return min(1.0, floor(1e4 * share) / 1e4)  # Ray rounds to 4 digits; up would be too much


class Worker:
    """Load a model once in a process of Ray, and give tables their new columns."""

    def __init__(self, model: Any, text: str, encoder: str | None = None):
        from vecroute.classifier import RoutingClassifier

        loaded = isinstance(model, RoutingClassifier)
        self.classifier = model if loaded else RoutingClassifier.from_pretrained(model, encoder=encoder)
        self.classifier.verbose = False
        self.answer = predicting(self.classifier)
        self.columns = Columns(text, class_names(self.classifier), self.classifier.multi_label, False)

    def __call__(self, table: pa.Table) -> pa.Table:
        name = self.columns.text
        rows = ({name: cell} for cell in table.column(name).to_pylist())
        texts = [text_of(row, name, "the dataset", k) for k, row in enumerate(rows, 1)]
        fields = new_fields(table.column_names, self.columns)
        arrays = new_arrays(self.answer(texts), [field.type for field in fields], self.columns)
        for field, array in zip(fields, arrays, strict=True):
            table = table.append_column(field, array)
        return table
