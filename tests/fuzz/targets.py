"""The targets of fuzzing. Each takes bytes, and may refuse them with an error that its reader documents."""

import contextlib
import functools
import hashlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from safetensors.torch import load, save
from starlette.testclient import TestClient

from tests.helpers.packing import pack
from tests.helpers.served import photo, tiny_classifier
from vecroute import RoutingClassifier, serve
from vecroute.classifier.saving import config_sha256
from vecroute.distributed.vectors import open_vectors
from vecroute.encoders.cache import FeatureCache
from vecroute.explain import Explanation
from vecroute.io.images import Picture
from vecroute.io.tables import read_pieces

FOLDER = Path(
    tempfile.mkdtemp(prefix="fuzz")
)  # one folder for this process, whose small files are overwritten repeatedly
REFUSED = (ValueError, TypeError)


class Target(NamedTuple):
    """A reader: a function of bytes, and a function that returns valid bytes."""

    read: Callable[[bytes], Any]
    valid: Callable[[], list[bytes]]


def written(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


def table(suffix: str, data: bytes) -> None:
    for piece in read_pieces(written(f"table.{suffix}", data), "text"):
        assert len(piece.rows) == len(piece.lines)


def tables_of(suffix: str) -> list[bytes]:
    if suffix == "parquet":
        return [parquet_of(pa.table({"text": ["a", "b", None], "label": ["x", "y", "x"]}))]
    if suffix == "jsonl":
        return [b'{"text": "a", "label": 1}\n{"text": "\\ud83d\\ude00", "label": [1, {"a": null}]}\n']
    comma = b"\t" if suffix == "tsv" else b","
    lines = b'text,label\n"a ""b""\nc",1\n\nd,2\n', b"\xef\xbb\xbftext,label\r\na,b\r\n"
    return [table.replace(b",", comma) for table in lines]


def parquet_of(rows: pa.Table) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(rows, buffer)
    return buffer.getvalue()


def vectors(suffix: str, data: bytes) -> None:
    source = open_vectors(written(f"vectors.{suffix}", data))
    seen = 0
    for chunk in source.chunks(64):
        seen += len(chunk)
        if seen > 10_000:
            return
    assert seen == source.n_inp


def vectors_of(suffix: str) -> list[bytes]:
    if suffix == "npy":
        buffer = io.BytesIO()
        np.save(buffer, np.arange(12, dtype=np.float32).reshape(4, 3))
        return [buffer.getvalue()]
    if suffix == "safetensors":
        return [
            save({"x": torch.arange(12.0).reshape(4, 3)}),
            save({"x": torch.zeros(2, 3, dtype=torch.bfloat16)}),
        ]
    return [parquet_of(pa.table({"x": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))}))]


def cache(data: bytes) -> None:
    """A changed segment is never used."""
    folder = FOLDER / "cache"
    keeper = FeatureCache(folder, "k" * 64)
    for old in keeper.own.glob("*"):
        old.unlink()
    (keeper.own / "segment.safetensors").write_bytes(data)
    found = FeatureCache(folder, "k" * 64).get("a text")
    assert found is None or torch.equal(found.float(), torch.arange(6.0).reshape(1, 2, 3))


def segments() -> list[bytes]:
    keeper = FeatureCache(FOLDER / "made", "k" * 64)
    keeper.put(pack({"a text": torch.arange(6.0).reshape(1, 2, 3).half()}))
    keeper.flush()
    return [path.read_bytes() for path in keeper.own.glob("*.safetensors")][:1]


@functools.cache
def classifier() -> RoutingClassifier:
    return tiny_classifier(FOLDER / "encoder")


@functools.cache
def model() -> Path:
    classifier().save_pretrained(FOLDER / "model")
    return FOLDER / "model"


def model_config(data: bytes) -> None:
    """Write a model folder with a forged configuration and a new, valid seal."""
    config = parsed(data)
    if isinstance(config, dict):
        weights = load((model() / "model.safetensors").read_bytes())
        weights_file = save(weights, {"config_sha256": config_sha256(config)})
        load_model(json.dumps(config | {"model_sha256": sha256(weights_file)}).encode(), weights_file)
    load_model(data, (model() / "model.safetensors").read_bytes())


def model_weights(data: bytes) -> None:
    """Write a model folder with forged weights and a new, valid seal."""
    config = json.loads((model() / "config.json").read_bytes())
    load_model(json.dumps(config | {"model_sha256": sha256(data)}).encode(), data)


def parsed(data: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):  # the reader must refuse bytes that are not JSON
        return json.loads(data)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load_model(config: bytes, weights: bytes) -> None:
    folder = FOLDER / "forged"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)
    RoutingClassifier.from_pretrained(folder, encoder=str(FOLDER / "encoder"), device="cpu")


def explanation(data: bytes) -> None:
    Explanation.load(written("why.safetensors", data))


def explanations() -> list[bytes]:
    path = FOLDER / "whole.safetensors"
    classifier().explain("the film is good").save(path)
    return [path.read_bytes()]


def image(data: bytes) -> None:
    picture = Picture.of(data)
    if picture.n_pixels < 1_000_000:
        picture.open()


def images() -> list[bytes]:
    found = []
    for kind in ("png", "jpeg", "gif", "webp", "tiff", "bmp", "ppm"):
        buffer = io.BytesIO()
        photo("red", 1, (12, 9)).save(buffer, kind)
        found.append(buffer.getvalue())
    return found


@functools.cache
def client() -> TestClient:
    client = TestClient(serve.create_app(classifier()))
    client.__enter__()
    return client


def http(data: bytes) -> None:
    for path in ("/predict", "/explain", "/page"):
        response = client().post(path, content=data, headers={"Content-Type": "application/json"})
        assert response.status_code in (200, 400, 413, 422), (path, response.status_code)
        assert response.status_code == 200 or list(response.json()) == ["detail"]


def bodies() -> list[bytes]:
    asked = {
        "text": "the film",
        "unit": "token",
        "output": "good",
        "against": "bad",
        "depth": 1,
        "margin": True,
    }
    return [json.dumps(asked).encode(), b'{"texts": ["a", "\\u00e9"], "unit": "word"}', b'{"text": "a"}']


TARGETS = {
    **{
        f"table-{suffix}": Target(functools.partial(table, suffix), functools.partial(tables_of, suffix))
        for suffix in ("csv", "tsv", "jsonl", "parquet")
    },
    **{
        f"vectors-{suffix}": Target(functools.partial(vectors, suffix), functools.partial(vectors_of, suffix))
        for suffix in ("npy", "safetensors", "parquet")
    },
    "cache": Target(cache, segments),
    "model-config": Target(model_config, lambda: [(model() / "config.json").read_bytes()]),
    "model-weights": Target(
        model_weights,
        lambda: [(model() / "model.safetensors").read_bytes()],
    ),
    "explanation": Target(explanation, explanations),
    "image": Target(image, images),
    "http": Target(http, bodies),
}


def check(name: str, data: bytes) -> None:
    """Give bytes to a target.

    Raises:
        Exception: anything but the errors that a reader documents.
    """
    try:
        TARGETS[name].read(data)
    except REFUSED as error:
        if not str(error).strip():
            raise RuntimeError(f"{type(error).__name__} says nothing") from error
