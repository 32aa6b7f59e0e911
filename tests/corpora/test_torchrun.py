"""A corpus under torchrun: processes share the shards, and a run with a killed process is repeated."""

import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vecroute"]


@pytest.fixture
def command(tmp_path):
    classifier = vr.RoutingClassifier(
        save_tiny(tmp_path / "encoder"), max_epochs=1, cache=False, estimate=False
    )
    classifier.fit(TEXTS, LABELS).save_pretrained(tmp_path / "model")
    (tmp_path / "corpus").mkdir()
    for k in range(6):
        rows = pd.DataFrame({"id": range(2000 * k, 2000 * k + 2000), "text": (TEXTS * 17)[:2000]})
        rows.to_parquet(tmp_path / "corpus" / f"{k}.parquet")
    paths = [str(tmp_path / name) for name in ("model", "corpus", "out")]
    return [sys.executable, *TORCHRUN, "predict", *paths[:2], "--out", paths[2], "--device", "cpu"]


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.slow
def test_a_killed_process_costs_nothing(command, tmp_path):
    out, environment = tmp_path / "out", os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while not list(out.glob("*.parquet")):
        assert run.poll() is None
        time.sleep(0.05)
    os.kill(children(run.pid)[-1], signal.SIGKILL)
    assert run.wait() != 0
    assert len(list(out.glob("*.parquet"))) < 6
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("shards written") == 1
    found = pd.concat(pd.read_parquet(path) for path in sorted(out.glob("*.parquet")))
    assert found["id"].tolist() == list(range(12_000))
    assert list(found) == ["id", "text", "label", "neg", "pos"]
    assert not list(out.glob(".*"))


@pytest.mark.slow
def test_a_damaged_shard_does_not_stop_the_other_process(command, tmp_path):
    (tmp_path / "corpus" / "0.parquet").write_bytes(b"damaged")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("vecroute: 0.parquet could not be done") == 1
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 5
