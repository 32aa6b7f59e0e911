"""The script that fills disks and kills processes, in a few rounds of each kind."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT


@pytest.mark.slow
def test_after_each_fault_there_is_the_old_or_the_new(tmp_path):
    command = [sys.executable, ROOT / "scripts/faults.py", "--limits", "8", "--kills", "5"]
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    limits, kills = map(json.loads, done.stdout.splitlines())
    assert limits["the same work again ends with the same weights and output"] == limits["rounds"] == 8
    assert kills["the same work again ends with the same weights and output"] == kills["rounds"] == 5
    assert limits["told that it cannot write"] >= 4
    assert limits["ended"] >= 1  # the last limit is more than any file needs
    assert sum(n for name, n in kills.items() if name.startswith("killed in")) == kills.get("killed", 0) >= 3
