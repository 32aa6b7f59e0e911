"""Fuzz every target for some seconds: half by Hypothesis, half by Atheris, which follows branches of code.

    python -m tests.fuzz.run --seconds 20
    python -m tests.fuzz.run --seconds 600 image http

Bytes that break a target are written to tests/fuzz/seeds/TARGET, where the tests read them from then on.
Inputs of Atheris that reached new branches stay in build/fuzz/TARGET and are the start of the next run.
"""

import argparse
import contextlib
import hashlib
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, check
from tests.helpers.paths import ROOT

SEEDS = ROOT / "tests/fuzz/seeds"
KEPT = ROOT / "build/fuzz"
EXAMPLES = 200  # examples of Hypothesis between two checks of the time


def seeds(name: str) -> list[bytes]:
    """Return the bytes that once broke a target."""
    return [path.read_bytes() for path in sorted((SEEDS / name).glob("*"))]


def keep(name: str, data: bytes) -> Path:
    path = SEEDS / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@st.composite
def damaged(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """Draw valid bytes with some parts cut out, doubled, replaced or overwritten by digits and brackets."""
    data = bytearray(draw(st.sampled_from([*valid, b""])))
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(data)))
        end = min(len(data), place + draw(st.sampled_from([0, 1, 2, 4, 8, 64])))
        new = draw(
            st.one_of(
                st.binary(max_size=8),
                st.sampled_from(
                    [b"", b"[" * 5000, b"{}", b"null", b"-1", b"1e999", b"NaN", b'"', b"\0" * 8, b"\xff" * 8]
                ),
                st.integers(-(2**63), 2**63).map(lambda n: str(n).encode()),
                st.just(bytes(data[place:end]) * 3),
            )
        )
        data[place:end] = new
    return bytes(data[: draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))])


def by_hypothesis(name: str, seconds: float) -> tuple[int, bytes | None]:
    """Return the number of tried inputs, and the smallest input found that broke the target, or None."""
    valid = TARGETS[name].valid() + seeds(name)
    tried, broke = 0, None
    start = time.monotonic()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(damaged(valid))
    def example(data: bytes) -> None:
        nonlocal tried, broke
        tried += 1
        try:
            check(name, data)
        except Exception:
            broke = data  # the last is the smallest
            raise

    for number in range(10**6):
        try:
            seed(number)(example)()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return tried, broke
        if time.monotonic() - start > seconds:
            break
    return tried, None


def by_atheris(name: str, seconds: float) -> tuple[int, bytes | None]:
    """Do the same as ``by_hypothesis`` in a new process, which a crash of a C library may end."""
    corpus, crash = KEPT / name, KEPT / f"{name}.crash"
    corpus.mkdir(parents=True, exist_ok=True)
    crash.unlink(missing_ok=True)
    for data in TARGETS[name].valid() + seeds(name):
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    options = ["-rss_limit_mb=6000", "-timeout=60", "-max_len=200000", f"-max_total_time={round(seconds)}"]
    command = [sys.executable, "-m", "tests.fuzz.follow", name, str(corpus), f"-exact_artifact_path={crash}"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, errors="replace")
    runs = [int(n) for n in re.findall(r"^#(\d+)", done.stderr, re.MULTILINE)]
    if crash.exists() or done.returncode:
        print(f"{name}: atheris ended with {done.returncode}\n{done.stderr[-2000:]}", flush=True)
        return max(runs, default=0), crash.read_bytes() if crash.exists() else b""
    return max(runs, default=0), None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(TARGETS)}; all if left out")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each target")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    tools = {"hypothesis": by_hypothesis}
    try:
        import atheris  # noqa: F401

        tools["atheris"] = by_atheris
    except ImportError:
        print("atheris is not installed: Hypothesis alone")
    total, broken = 0, 0
    start = time.monotonic()
    for name in options.targets or TARGETS:
        for tool, fuzz in tools.items():
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                tried, data = fuzz(name, options.seconds / len(tools))
            total += tried
            broken += data is not None
            told = f", one broke it, kept in {keep(name, data).relative_to(ROOT)}" if data is not None else ""
            print(f"{name}: {tried} inputs by {tool}{told}", flush=True)
    print(f"{total} inputs in {time.monotonic() - start:.0f} seconds, {broken} targets broke")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
