"""The code of docs/scaling.md and its examples, at small size."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.paths import ROOT
from tests.helpers.ranks import mesh_of

PAGE = ROOT / "docs" / "scaling.md"
sys.path += [str(ROOT / "examples"), str(ROOT / "benchmarks")]
import million_vectors  # noqa: E402
import out_of_core  # noqa: E402
import torchrun_sharded  # noqa: E402


def test_a_million_vectors_or_a_few(tmp_path):
    found = million_vectors.run(tmp_path, 2000, 25)
    assert found["last"] < found["first"] / 10
    assert found["signal"] > 3 * found["noise"]


def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    """Run the code in a process group of one process, as torchrun would start it."""
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict = {}
    try:
        for block in blocks:
            exec(compile(block, "scaling.md", "exec"), names)
    finally:
        dist.destroy_process_group()
    assert names["phi"].shape == (1000, 8)
    assert names["credit"].shape == (5000, 2)
    assert all(parameter.grad is not None for parameter in names["layer"].parameters())


@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_the_benchmark(cached, tmp_path, monkeypatch):
    """Use small sizes, and this process instead of one with a memory limit."""
    most = {"peak_mb": 7.0, "peak_gpu_mb": None}
    monkeypatch.setattr(out_of_core, "limited", lambda _, function, *arguments: (function(*arguments), most))
    sizes = [
        "--gigabytes",
        "1e-4",
        "--d-inp",
        "16",
        "--n-out",
        "3",
        "--rows",
        "500",
        "--parts",
        "2",
        "--device",
        "cpu",
    ]
    places = ["--folder", str(tmp_path), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["out_of_core.py", *sizes, *places, *(["--cached"] * cached)])
    out_of_core.main()
    with (tmp_path / "results" / "out_of_core.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["which"] for row in rows] == ["forward", "both"]
    for row in rows:
        seconds = {name: float(row[f"parts_{name}_s"] or 0) for name in out_of_core.TIMED}
        for share, arithmetic in (("share", "arithmetic"), ("share_in_memory", "in_memory")):
            bound = max(seconds["reading"], seconds["copying"], seconds[arithmetic])
            assert float(row[share]) == pytest.approx(bound / seconds["streaming"], rel=1e-2)
        assert (row["n_inp"], row["peak_mb"]) == ("3125", "7")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]  # the file is gone


def train_example(n: int, folder: str, steps: int) -> float:
    return torchrun_sharded.train(mesh_of(n), Path(folder), 50, steps)


def test_the_sharded_example_goes_on_with_another_number_of_processes(ranks, tmp_path):
    folder = tmp_path / "several"
    for n, steps in ((2, 4), (3, 8)):
        losses = ranks(n, train_example, n, str(folder), steps)
        assert [path.name for path in folder.iterdir()] == [str(steps)]
        (folder / "5").mkdir(exist_ok=True)  # as if the process was killed while saving
        (folder / "5" / "__0_0.distcp").write_bytes(b"half of")
    assert len(set(losses)) == 1
    (alone,) = ranks(1, train_example, 1, str(tmp_path / "one"), 8)
    assert losses[0] == pytest.approx(alone, rel=1e-4)


@pytest.mark.slow
def test_the_sharded_example_under_torchrun(tmp_path):
    example = str(ROOT / "examples" / "torchrun_sharded.py")
    for n, first in ((2, "step 1:"), (3, "step 4:")):
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        steps = "3" if n == 2 else "5"
        command = [*start, example, "--folder", str(tmp_path / "run"), "--n-inp", "40", "--steps", steps]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(first)
        assert "of 40" in done.stdout
