"""Ray Data: one model for each worker, all columns kept, mistakes found before work starts."""

import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.corpora import predict_rows, ray_predict
from vecroute.corpora.clusters import Worker, cpus_of_a_worker


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    options = {"max_epochs": 1, "cache": False, "estimate": False, "device": "cpu", "verbose": False}
    classifier = vr.RoutingClassifier(save_tiny(folder / "encoder"), **options).fit(TEXTS, LABELS)
    classifier.save_pretrained(folder / "model")
    classifier.folder = folder / "model"
    return classifier


def test_a_worker_adds_columns(classifier):
    table = pa.table({"text": [TEXTS[0], None, TEXTS[1]], "label": [1, 2, 3]})
    found = Worker(str(classifier.folder), "text")(table)
    assert found.column_names == ["text", "label", "label_predicted", "neg", "pos"]
    assert found.select(["text", "label"]).equals(table)
    p = np.array(found["pos"].to_pylist()[::2])
    np.testing.assert_allclose(p, classifier.predict_proba(TEXTS[:2])[:, 1], atol=1e-6)
    assert found["pos"].to_pylist()[1] is None


def test_without_ray(classifier, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"this needs ray: pip install 'vecroute\[ray\]'"):
        ray_predict(classifier, None)


def node(alive: bool = True, **resources: float) -> dict:
    return {"Alive": alive, "Resources": {name.upper(): float(n) for name, n in resources.items()}}


@pytest.mark.parametrize(
    ("nodes", "workers", "share"),
    [
        ([node(cpu=2)], 2, 0.5),
        ([node(cpu=8)], 4, 1.0),
        ([node(cpu=3)], 3, 0.6666),  # Ray would round 2 / 3 up, and 0.9999 CPUs would be left
        ([node(cpu=1)], 2, 0.0),
        ([node(cpu=2), node(cpu=2)], 4, 0.5),  # two on each node
        ([node(cpu=2), node(), node(False, cpu=8)], 1, 1.0),
    ],
)
def test_workers_leave_a_cpu_for_reading(nodes, workers, share):
    assert cpus_of_a_worker(nodes, workers) == share


@pytest.fixture
def fake_ray(monkeypatch):
    """Return a function that puts a Ray in place which has these resources and starts nothing."""

    def put(**resources: float) -> None:
        ray = SimpleNamespace(
            nodes=lambda: [node(**resources)],
            cluster_resources=lambda: node(**resources)["Resources"],
            data=SimpleNamespace(ActorPoolStrategy=lambda size: size),
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        monkeypatch.setitem(sys.modules, "ray.data", ray.data)

    return put


def dataset_of(schema: pa.Schema | None) -> SimpleNamespace:
    """A dataset that returns the options of ``map_batches``."""
    return SimpleNamespace(schema=lambda: schema, map_batches=lambda worker, **given: given)


@pytest.mark.parametrize(
    ("resources", "workers", "expected"),
    [
        ({"cpu": 2}, 2, (2, None, 0.5)),
        ({"cpu": 4}, None, (2, None, 1.0)),
        ({"cpu": 8, "gpu": 2}, None, (2, 1.0, None)),
        ({"cpu": 8, "gpu": 2}, 4, (4, 0.5, None)),
    ],
)
def test_resources_of_workers(classifier, fake_ray, resources, workers, expected):
    fake_ray(**resources)
    given = ray_predict(classifier, dataset_of(pa.schema({"text": pa.string()})), workers=workers)
    assert (given["compute"], given["num_gpus"], given["num_cpus"]) == expected


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (None, {}, "dataset must have the column 'text', it has no rows"),
        (pa.schema({"id": pa.int64()}), {}, "dataset must have the column 'text', it has id"),
        (pa.schema({"text": pa.int64()}), {}, "column 'text' of the dataset must have texts, it has int64"),
        (pa.schema({"text": pa.string()}), {"workers": 0}, "workers must be at least 1, got 0"),
    ],
)
def test_mistakes_are_found_before_work_starts(classifier, fake_ray, schema, options, message):
    fake_ray(cpu=2)
    with pytest.raises(ValueError, match=message):
        ray_predict(classifier, dataset_of(schema), **options)


def test_a_worker_names_a_cell_without_text(classifier):
    with pytest.raises(TypeError, match=r"'text' of the dataset must have texts, line 1 has 3 \(int\)"):
        Worker(classifier, "text")(pa.table({"text": [3, 4]}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray warns about its own code
def test_a_dataset_on_two_workers(classifier):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        frame = pd.DataFrame({"id": range(480), "text": TEXTS * 4})
        dataset = ray.data.from_pandas(frame).repartition(4)
        found = ray_predict(str(classifier.folder), dataset, workers=2, batch_size=64).to_pandas()
        found = found.sort_values("id")
        assert found["id"].tolist() == list(range(480))
        np.testing.assert_allclose(found["pos"][:5], classifier.predict_proba(TEXTS)[:5, 1], atol=1e-6)
        with pytest.raises(ValueError, match="dataset must have the column 'words', it has id, text"):
            ray_predict(classifier, dataset, text="words")
        with pytest.raises(ValueError, match="must have texts, it has int64"):
            ray_predict(classifier, dataset, text="id")
        with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
            ray_predict(classifier, dataset, workers=0)
    finally:
        ray.shutdown()


def test_rows_of_streams_keep_their_cells(classifier):
    rows = [{"id": 0, "text": TEXTS[0]}, {"id": 1, "text": " "}, {"id": 2, "text": TEXTS[1], "label": "x"}]
    found = list(predict_rows(classifier, iter(rows), text="text"))
    assert [row["id"] for row in found] == [0, 1, 2]
    assert found[0]["label"] == classifier.predict(TEXTS[:1])[0]
    assert (found[1]["label"], found[1]["probabilities"]) == ("", {})
    assert (found[2]["label"], found[2]["label_predicted"]) == ("x", classifier.predict(TEXTS[1:2])[0])
    with pytest.raises(
        ValueError, match=r"row 1 of rows must have the column 'words', it has \['id', 'text'\]"
    ):
        list(predict_rows(classifier, rows, text="words"))


def test_mistakes_in_rows(classifier):
    assert list(predict_rows(classifier, [])) == []
    for rows, message in (
        (None, "rows must be an iterable of dicts, got NoneType"),
        (TEXTS[:2], "row 1 of rows must be a dict, got str"),
        ([{"text": "good"}, 3], "row 2 of rows must be a dict, got int"),
        ([{"text": "good"}, {"text": 3}], r"column 'text' of rows must have texts, line 2 has 3 \(int\)"),
    ):
        with pytest.raises(TypeError, match=message):
            list(predict_rows(classifier, rows))
