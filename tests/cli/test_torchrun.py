"""The command line under torchrun: one model, whether processes share the texts or the positions of each."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.tiny_models import save_tiny

TEXTS = ["a great witty film", "so dull and slow", "the plot is fine", "a bad flat story", "very good"] * 8


def vecroute(*command: str, n: int = 1) -> str:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *several, "-m", "vecroute", *command],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_fit_with_the_positions_of_each_text_shared(tmp_path):
    encoder = save_tiny(tmp_path / "encoder")
    rows = [f"{text},{'good' if k % 2 else 'bad'}" for k, text in enumerate(TEXTS)]
    (tmp_path / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    found = []
    for n, options in ((1, []), (3, ["--shard-inputs"])):
        out = str(tmp_path / f"model-{n}")
        common = ["--encoder", encoder, "--epochs", "2", "--out", out, "--device", "cpu", "--no-cache"]
        told = vecroute("fit", str(tmp_path / "train.csv"), *common, *options, n=n)
        assert told.count("2 classes from") == 1
        lines = vecroute("predict", out, str(tmp_path / "train.csv"), "--device", "cpu").splitlines()
        found.append([json.loads(line)["probabilities"]["good"] for line in lines])
    assert found[1] == pytest.approx(found[0], abs=1e-3)
