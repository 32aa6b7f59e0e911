"""The server under load and invalid requests: no request is lost, memory is bounded, no server error."""

import csv
import json
import re
import subprocess
import sys
import urllib.request

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.served import TEXTS, served, tiny_classifier, tiny_image_classifier

sys.path.insert(0, str(ROOT / "benchmarks"))

import serve as load_benchmark

pytestmark = pytest.mark.slow

CLIENTS, SECONDS = 64, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tiny_classifier(folder / "encoder").save_pretrained(folder / "model")
    return folder / "model"


def port_of(address):
    return int(address.rpartition(":")[2])


def test_64_clients_for_a_minute(model):
    with served(model) as (address, process):
        load_benchmark.load(port_of(address), TEXTS, CLIENTS, 10)  # after this, memory no longer grows once
        before = load_benchmark.resident_mb(process.pid)
        found = load_benchmark.load(port_of(address), TEXTS, CLIENTS, SECONDS)
        growth = load_benchmark.resident_mb(process.pid, "VmHWM") - before
        with urllib.request.urlopen(f"{address}/health") as response:
            assert json.load(response)["waiting"] == 0
        assert process.poll() is None
    print(f"{len(found.milliseconds)} answered, {found.refused} refused, {growth:.0f} MB more")
    assert found.wrong == []
    assert found.refused == 0  # 64 clients cannot fill a queue of 256
    assert len(found.milliseconds) > CLIENTS
    assert growth < 50


def test_a_queue_that_overflows_loses_nothing(model):
    with served(model, "--max-waiting", "4", "--max-batch", "1") as (address, process):
        found = load_benchmark.load(port_of(address), TEXTS, CLIENTS, 10, "/explain")
        assert process.poll() is None
    print(f"{len(found.milliseconds)} answered, {found.refused} refused")
    assert found.wrong == []
    assert found.refused > 0
    assert len(found.milliseconds) > 0


@pytest.mark.parametrize("kind", ["texts", "images"])
def test_fuzzing_finds_no_error_of_the_server(model, kind, tmp_path):
    if kind == "images":
        model = tmp_path / "model"
        tiny_image_classifier(tmp_path / "encoder").save_pretrained(model)
    pytest.importorskip("schemathesis", reason="needs schemathesis: pip install 'vecroute[browser]'")
    checks = "not_a_server_error,response_schema_conformance,content_type_conformance"
    options = ["--checks", checks, "--max-examples", "200", "--seed", "1", "--no-color"]
    with served(model) as (address, process):
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert process.poll() is None
    print(done.stdout[-1500:])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 500


def test_the_benchmark_writes_whole_rows(model, tmp_path):
    load_benchmark.main(["--short", "--model", str(model), "--clients", "8", "--results", str(tmp_path)])
    with (tmp_path / "serve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["max_batch"], row["max_waiting"]) for row in rows] == [
        ("1", "256"),
        ("64", "256"),
        ("64", "16"),
    ]
    assert all(row["lost"] == "0" and float(row["per_second"]) > 0 for row in rows)
