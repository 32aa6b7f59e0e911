"""A classifier for tests of the server: a quick fit on a tiny encoder with random weights."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vecroute as vr
from tests.helpers.tiny_models import save_tiny
from tests.helpers.tiny_vision import save_tiny_vision

WORDS = {"good": ["good", "great", "witty"], "bad": ["bad", "dull", "slow"], "odd": ["one", "two", "three"]}
TEXTS = [f"the {s} is {w} and {v}" for s in ("film", "plot") for ws in WORDS.values() for w in ws for v in ws]
LABELS = [name for _ in ("film", "plot") for name, ws in WORDS.items() for _ in ws for _ in ws]


def tiny_classifier(folder: Path) -> vr.RoutingClassifier:
    classifier = vr.RoutingClassifier(
        save_tiny(folder), max_epochs=2, validation_fraction=0, cache=False, device="cpu"
    )
    return enlarged(classifier.fit(TEXTS, LABELS))


COLOURS = {"blue": (20, 20, 230), "green": (20, 200, 20), "red": (230, 20, 20)}


def photo(label: str, seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Draw noise with a square of the colour at a random place."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(60, 140, (*size[::-1], 3), dtype=np.uint8)
    side = min(size) // 2
    x, y = (int(rng.integers(0, length - side)) for length in size)
    pixels[y : y + side, x : x + side] = COLOURS[label]
    return Image.fromarray(pixels)


def tiny_image_classifier(folder: Path) -> vr.RoutingClassifier:
    """Fit a classifier of images whose labels are colours."""
    labels = [*COLOURS] * 6
    classifier = vr.RoutingClassifier(
        save_tiny_vision(folder), max_epochs=8, batch_size=6, validation_fraction=0, cache=False, device="cpu"
    )
    return enlarged(classifier.fit([photo(label, k) for k, label in enumerate(labels)], labels))


def enlarged(classifier: vr.RoutingClassifier) -> vr.RoutingClassifier:
    """Scale the weights to the size of trained ones, so that every input has an effect."""
    with torch.no_grad():
        for parameter in classifier.head_.parameters():
            parameter.mul_(2)
    return classifier


def check_sums(answer, rest=0):
    """Check that the parts of an answer sum to its score, and the displayed ones to the displayed score."""
    total = sum(part["value"] for part in answer["parts"]) + answer["base"]
    assert total == pytest.approx(answer["score"], abs=1e-4)
    shown = answer["shown"]
    for sums in (shown, shown["depths"]):
        assert sum(sums["values"]) + sums["base"] + sums["rest"] == sums["score"]
    assert abs(shown["rest"]) <= rest
    assert sum(line["value"] for line in shown["lines"]) == shown["score"]
    assert [sum(row) for row in shown["by_depth"]] == shown["values"]
    assert shown["score"] / 10 ** shown["decimals"] == pytest.approx(
        answer["score"], abs=0.51 / 10 ** shown["decimals"]
    )


@contextlib.contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Start ``vecroute serve`` on a free port, and return its address and the process."""
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
    """Wait until the condition returns a true value, and return it."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds: {condition}")
        time.sleep(0.01)
    return found
