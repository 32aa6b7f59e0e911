"""Measure how many requests per second `vecroute serve` answers, with and without batches, and how fast.

For each row, the server runs in one process and the clients in another, on the loopback interface. Each
client sends a text, waits for the answer, and sends the next. Texts are sentences of film reviews, or their
first words, each sent once. The classifier is fitted on a few of them, on a frozen MiniLM.

    python benchmarks/serve.py                       # 64 clients for 60 seconds, to results/serve.csv
    python benchmarks/serve.py --model model/ --short --results build/bench
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import common
import numpy as np

N_WORDS = 6  # words of the short texts


class Load(NamedTuple):
    """The outcome of the requests of some clients."""

    milliseconds: list[float]  # times of the answers with status 200
    refused: int  # answers with status 503 and Retry-After
    wrong: list[str]  # all other answers, and lost connections
    seconds: float


@contextlib.contextmanager
def server(model: Path, *options: str) -> Iterator[tuple[int, int]]:
    """Start a server on a free port, and yield the port and the process id."""
    command = [sys.executable, "-m", "vecroute", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline().rpartition(":")[2]), process.pid
        finally:
            process.terminate()


def load(port: int, texts: list[str], clients: int, seconds: float, path: str = "/predict") -> Load:
    """Run the clients in their own process, and return the outcome."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run_clients, port, texts, clients, seconds, path).result()


def run_clients(port: int, texts: list[str], clients: int, seconds: float, path: str) -> Load:
    return asyncio.run(gather(port, texts, clients, seconds, path))


async def gather(port: int, texts: list[str], clients: int, seconds: float, path: str) -> Load:
    found = Load([], 0, [], 0.0)
    counts = itertools.count()
    start = time.perf_counter()
    refused = 0

    async def client() -> None:
        nonlocal refused
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() - start < seconds:
            # A number makes each text new, in case there are fewer texts than requests.
            k = next(counts)
            text = texts[k % len(texts)] + (f" {k // len(texts)}" if k >= len(texts) else "")
            sent = time.perf_counter()
            status, headers, body = await exchange(reader, writer, path, json.dumps({"text": text}).encode())
            if status == 200 and b'"label"' in body:
                found.milliseconds.append(1000 * (time.perf_counter() - sent))
            elif status == 503 and "retry-after" in headers:
                refused += 1
                await asyncio.sleep(float(headers["retry-after"]))
            else:
                found.wrong.append(f"{status} {body[:200]!r}")
        writer.close()
        await writer.wait_closed()

    ends = await asyncio.gather(*(client() for _ in range(clients)), return_exceptions=True)
    found.wrong.extend(repr(end) for end in ends if end is not None)
    return found._replace(refused=refused, seconds=time.perf_counter() - start)


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Send one request on an open connection, and return status, headers and body of the answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def resident_mb(pid: int, key: str = "VmRSS") -> float:
    """Return the memory of a process, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def fitted(folder: Path) -> Path:
    """Return a classifier on MiniLM, fitted on a few sentences. Its accuracy does not matter here."""
    from vecroute.classifier import RoutingClassifier
    from vecroute.demo import sentence_polarity

    table = sentence_polarity().sample(200, random_state=0)
    classifier = RoutingClassifier("minilm", max_epochs=1, cache=False)
    classifier.fit(table["text"], table["label"]).save_pretrained(folder / "model")
    return folder / "model"


def row(
    model: Path, kind: str, texts: list[str], max_batch: int, max_waiting: int, options: argparse.Namespace
) -> dict[str, object]:
    """Measure one server with all clients, and return a row."""
    settings = ("--max-batch", str(max_batch), "--max-waiting", str(max_waiting))
    with server(model, *settings, "--device", options.device) as (port, pid):
        load(port, texts[:200], 8, min(2.0, options.load_seconds))  # warm
        before = resident_mb(pid)
        found = load(port, texts[200:], options.clients, options.load_seconds)
        peak = resident_mb(pid, "VmHWM")
    if found.wrong:
        raise RuntimeError(f"{len(found.wrong)} requests went wrong, the first: {found.wrong[0]}")
    p50, p99 = np.percentile(found.milliseconds, [50, 99])
    return {
        "texts": kind,
        "mean_characters": float(np.mean([len(text) for text in texts])),
        "clients": options.clients,
        "max_batch": max_batch,
        "max_waiting": max_waiting,
        "seconds": found.seconds,
        "answered": len(found.milliseconds),
        "refused": found.refused,
        "lost": len(found.wrong),
        "per_second": len(found.milliseconds) / found.seconds,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "before_mb": before,
        "peak_mb": peak,
        **common.about(options.device),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a classifier; else one is fitted")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--load-seconds", type=float, help="of every row, 60 unless --short")
    options = parser.parse_args(arguments)
    options.load_seconds = options.load_seconds or (2.0 if options.short else 60.0)
    from vecroute.demo import sentence_polarity

    sentences = sentence_polarity()["text"].sample(frac=1, random_state=0).tolist()
    phrases = [" ".join(sentence.split()[:N_WORDS]) for sentence in sentences]
    cases = [("phrases", phrases, 1, 256), ("phrases", phrases, 64, 256), ("phrases", phrases, 64, 16)]
    if not options.short:
        cases += [("sentences", sentences, 1, 256), ("sentences", sentences, 64, 256)]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or fitted(Path(folder))
        for kind, texts, max_batch, max_waiting in cases:
            found = row(model, kind, texts, max_batch, max_waiting, options)
            common.append(options.results / "serve.csv", [found])
            print({name: common.written(value) for name, value in found.items()}, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
