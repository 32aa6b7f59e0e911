"""Test a server with 64 clients, 2 % of whose requests are hostile: right answers, memory, times.

    python benchmarks/soak.py --minutes 10
    python benchmarks/soak.py --minutes 1 --clients 8 --model model/

Each client sends texts whose probabilities are known, and compares the answers. One request in 50 is hostile:
no JSON, too deep, too long, a slow body, a lost connection, nonsense on the socket. The exit code is 1 if an
answer was wrong, the server stopped, memory grew by more than 5 %, or the 99th percentile of the times was
above ``--limit``, the limit of the server. A row is appended to results/soak.csv. It has the memory of the
server at ten moments, which shows whether it still grows at the end.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import common
import numpy as np
from serve import exchange, fitted, resident_mb, server

HOSTILE = 0.02
GROWTH = 0.05
N_LOOKS = 10  # measurements of the server's memory
WARM_SECONDS = 30.0  # after this time, threads, their memory and the cache of explanations no longer grow


async def ask(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """Send one request on a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        status, _, answer = await exchange(reader, writer, path, body)
    finally:
        writer.close()
    return status, answer


async def send(port: int, data: bytes, wait: float = 0.0) -> None:
    """Send bytes on a new socket, and close it without reading."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    await asyncio.sleep(wait)
    writer.close()


def refused(path: str, body: bytes, *expected: int) -> Callable[[int], Awaitable[str | None]]:
    """Return a request that must be refused with one of some codes."""

    async def attack(port: int) -> str | None:
        status, answer = await ask(port, path, body)
        return None if status in expected else f"{status} {answer[:100]!r} to {body[:40]!r}"

    return attack


def dropped(data: bytes, wait: float = 0.0) -> Callable[[int], Awaitable[str | None]]:
    async def attack(port: int) -> str | None:
        await send(port, data, wait)
        return None

    return attack


HEAD = (
    b"POST /explain HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
LONG = json.dumps({"text": "a gorgeous, witty film . " * 3900}).encode()
ATTACKS = [
    refused("/predict", b"{", 422),
    refused("/predict", b"[" * 200_000, 400),
    refused("/explain", b'{"text": "a \\ud83d"}', 422),
    refused("/explain", json.dumps({"text": "a" * 100_001}).encode(), 413),
    refused("/page", json.dumps({"texts": ["a"] * 9}).encode(), 422),
    refused("/explain", b'{"text": "a", "depth": 99}', 422),
    dropped(HEAD % len(LONG) + LONG, 0.5),  # much work, but the client leaves
    dropped(HEAD % 10_000 + b'{"text": "a', 2.0),
    dropped(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    dropped(b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000, 0.2),
]


class Soak:
    """The clients, and their results."""

    def __init__(self, port: int, known: dict[str, list[float]], seed: int):
        self.port, self.known, self.random = port, known, random.Random(seed)
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.memory: list[float] = []  # MB

    async def client(self, end: float) -> None:
        texts = list(self.known)
        while time.monotonic() < end:
            start = time.monotonic()
            try:
                if self.random.random() < HOSTILE:
                    self.counts["hostile"] += 1
                    problem = await self.random.choice(ATTACKS)(self.port)
                    self.wrong += [problem] if problem else []
                    continue
                text = self.random.choice(texts)
                status, answer = await ask(self.port, "/predict", json.dumps({"text": text}).encode())
            except (OSError, asyncio.IncompleteReadError) as error:
                self.wrong.append(repr(error))
                continue
            self.seconds.append(time.monotonic() - start)
            self.counts[str(status)] += 1
            found = list(json.loads(answer)["probabilities"].values()) if status == 200 else None
            if found is None or not np.allclose(found, self.known[text], atol=1e-4):
                self.wrong.append(f"{status} {answer[:200]!r} to {text!r}")

    async def look(self, pid: int, seconds: float) -> None:
        """Measure the memory of the server at regular intervals."""
        for _ in range(N_LOOKS):
            await asyncio.sleep(seconds / N_LOOKS)
            self.memory.append(resident_mb(pid))

    async def run(self, pid: int, clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        await asyncio.gather(self.look(pid, seconds), *(self.client(end) for _ in range(clients)))


async def warm_up(port: int) -> None:
    """Run every attack a few times, one after another."""
    for attack in ATTACKS * 3:
        await attack(port)


def known_answers(model: Path, n: int) -> dict[str, list[float]]:
    """Return the probabilities of some texts, from the classifier itself."""
    from vecroute.classifier import RoutingClassifier
    from vecroute.demo import sentence_polarity

    texts = [" ".join(text.split()[:6]) for text in sentence_polarity()["text"].sample(n, random_state=1)]
    texts = list(dict.fromkeys(texts))
    found = RoutingClassifier.from_pretrained(model, device="cpu").predict_proba(texts).tolist()
    return dict(zip(texts, found, strict=True))


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that the server has for an answer")
    parser.add_argument("--model", type=Path, help="folder of a classifier of texts; else one is fitted")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or fitted(Path(folder))
        known = known_answers(model, 300)
        with server(model, "--device", "cpu", "--seconds", str(options.limit)) as (port, pid):
            warm = min(WARM_SECONDS, 30 * options.minutes)
            asyncio.run(warm_up(port))
            asyncio.run(Soak(port, known, 0).run(pid, options.clients, warm))
            before = resident_mb(pid)
            soak, start = Soak(port, known, 1), time.monotonic()
            asyncio.run(soak.run(pid, options.clients, 60 * options.minutes))
            took, after = time.monotonic() - start, resident_mb(pid)
    p50, p99 = np.percentile(soak.seconds, [50, 99])
    growth = after / before - 1
    row = {
        "clients": options.clients,
        "seconds": took,
        "answered": soak.counts["200"],
        "hostile": soak.counts["hostile"],
        "wrong": len(soak.wrong),
        "p50_seconds": float(p50),
        "p99_seconds": float(p99),
        "limit_seconds": options.limit,
        "before_mb": before,
        "after_mb": after,
        "growth_percent": 100 * growth,
        "memory_mb": " ".join(f"{mb:.1f}" for mb in soak.memory),
        **common.about("cpu"),
    }
    common.append(options.results / "soak.csv", [row])
    print(json.dumps({name: common.written(value) for name, value in row.items()}, indent=1))
    for problem in soak.wrong[:10]:
        print(problem)
    return 1 if soak.wrong or growth > GROWTH or p99 > options.limit else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
