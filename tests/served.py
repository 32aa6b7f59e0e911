"""A classifier to serve: fitted in no time, badly, on a tiny encoder with random weights."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tiny_models import save_tiny

import vecroute as vr

WORDS = {"good": ["good", "great", "witty"], "bad": ["bad", "dull", "slow"], "odd": ["one", "two", "three"]}
TEXTS = [f"the {s} is {w} and {v}" for s in ("film", "plot") for ws in WORDS.values() for w in ws for v in ws]
LABELS = [name for _ in ("film", "plot") for name, ws in WORDS.items() for _ in ws for _ in ws]


def tiny_classifier(folder: Path) -> vr.RoutingClassifier:
    classifier = vr.RoutingClassifier(
        save_tiny(folder), max_epochs=2, validation_fraction=0, cache=False, device="cpu"
    )
    classifier.fit(TEXTS, LABELS)
    # Weights as large as trained ones, so that every word counts.
    with torch.no_grad():
        for parameter in classifier.head_.parameters():
            parameter.mul_(2)
    return classifier


@contextlib.contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """``vecroute serve`` on a free port, as a process of its own: its address, and the process."""
    command = [sys.executable, "-m", "vecroute", "serve", str(model), "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            line = process.stdout.readline()
            if " is at http://" not in line:
                raise RuntimeError(f"the server did not start: {line}{process.stderr.read()}")
            yield line.split()[-1], process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def wait_for(condition, seconds: float = 10.0):
    """What the condition gives, once it gives something."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds: {condition}")
        time.sleep(0.01)
    return found
