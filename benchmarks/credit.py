"""Measure the cost of credit and contributions: ``python benchmarks/credit.py [--device cuda]``.

1. A million inputs and three routings: the additional peak memory while routing, and while computing one
   column of the end-to-end credit.
2. The paper's head, 1850 x 1024 -> 64 -> 64 -> 2: the time to compute the credit and the contributions of
   one class, as a multiple of the forward pass in the same run.
3. The paper's largest credit matrix, 4925 x 1000, scaled to unit variance: the time and the additional peak
   memory of computing all of it, with the forward pass.
4. Words through the frozen MiniLM, 32 sentences: the time of one margin, with its base, as a multiple of the
   time of the predictions in the same run, and the sentences explained per second; and the additional peak
   memory for a chunk of 512 tokens.

Rows are appended to credit.csv.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import common
import torch
from common import MB, Peak

import vecroute as vr
from vecroute.encoders import TextEncoder
from vecroute.explain.rows import chunk_step, rows_of
from vecroute.explain.text import split_texts


def head(d: int, n_hid: int, n_cls: int, device: str) -> vr.Sequential:
    """Build the paper's three routings."""
    return vr.Sequential(
        vr.VectorRouting(n_inp=None, n_out=n_hid, d_inp=d, d_out=d, device=device),
        vr.VectorRouting(n_inp=n_hid, n_out=n_hid, d_inp=d, d_out=d, device=device),
        vr.VectorRouting(n_inp=n_hid, n_out=n_cls, d_inp=d, d_out=1, device=device),
    )


def million(device: str, n_inp: int) -> list[tuple[str, float, str]]:
    d, n_hid = 64, 64
    network, x_inp = head(d, n_hid, 2, device), torch.randn(n_inp, d, device=device)
    case = f"{n_inp} x {d} -> {n_hid} -> {n_hid} -> 2"
    with torch.no_grad():
        network.route(x_inp[:1000]).phi.column(0)  # one-time setup
        with Peak(device) as routing:
            credit = network.route(x_inp).phi
        with Peak(device) as column:
            start = time.perf_counter()
            credit.column(0).sum().item()
            seconds = time.perf_counter() - start
    return [
        (f"{case}: one factor, phi of the first routing", n_inp * n_hid * 4 / MB, "MB"),
        (f"{case}: peak while routing", routing.mb, "MB"),
        (f"{case}: peak while computing one column", column.mb, "MB"),
        (f"{case}: one column", seconds * 1000, "ms"),
    ]


def cost(device: str, repeats: int) -> list[tuple[str, float, str]]:
    network, x_inp = head(1024, 64, 2, device), torch.randn(1850, 1024, device=device)

    def synchronized(f: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                f()
            if device.startswith("cuda"):
                torch.cuda.synchronize()

        return run

    ways = {
        "forward": synchronized(lambda: network(x_inp)),
        "credit of one class": synchronized(lambda: network.route(x_inp).phi.column(1)),
        "contributions of one class": synchronized(lambda: vr.contributions(network, x_inp, output=1)),
        "contributions of the margin": synchronized(
            lambda: vr.contributions(network, x_inp, output=1, margin=0)
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 2):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if repeat >= 2:
                times[name].append(time.perf_counter() - start)
    case = "1850 x 1024 -> 64 -> 64 -> 2"
    forward = statistics.median(times["forward"])
    rows = [(f"{case}: forward", forward * 1000, "ms")]
    for name in list(ways)[1:]:
        # Each time is divided by the adjacent forward pass, so that other load affects both equally.
        ratios = [t / f for t, f in zip(times[name], times["forward"], strict=True)]
        rows.append((f"{case}: {name}", statistics.median(ratios), "x forward"))
    return rows


def images(device: str, repeats: int, n_inp: int = 4925, n_cls: int = 1000) -> list[tuple[str, float, str]]:
    network, x_inp = head(1024, 64, n_cls, device), torch.randn(n_inp, 1024, device=device)
    times = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            with Peak(device) as peak:
                start = time.perf_counter()
                phi = network.route(x_inp).phi.unit_variance().dense()  # [i, j]
                phi.std().item()
                times.append(time.perf_counter() - start)
    case = f"{phi.shape[0]} x {phi.shape[1]} end-to-end credit of unit variance"
    return [
        (f"{case}: one matrix", phi.nbytes / MB, "MB"),
        (f"{case}: peak", peak.mb, "MB"),
        (f"{case}: time", 1000 * statistics.median(times[1:]), "ms"),
    ]


def words(device: str, repeats: int, name: str = "minilm") -> list[tuple[str, float, str]]:
    encoder = TextEncoder(name, device=device, dtype=torch.float32)
    network = vr.RoutingHead(d_emb=encoder.d_emb, depth=encoder.depth, n_cls=2).to(device).eval()
    sentences = [" ".join(["a warm and witty film , though slow ."] * (1 + k % 4)) for k in range(32)]
    texts = encoder.tokenize(sentences)
    rows = [rows_of(text, chunk_step(encoder)) for text in texts]

    def predict() -> None:
        with torch.inference_mode():
            for batch in encoder.batches(texts):
                network(batch.hidden, batch.mask).cpu()

    def explain(which: slice = slice(None), by_depth: bool = False) -> None:
        outputs = [[0, 1]] * len(texts[which])
        split_texts(encoder, network, texts[which], outputs, rows[which], by_depth=by_depth, margin=True)

    def seconds(run: Callable[[], None]) -> float:
        start = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - start

    ways = {"one margin": explain, "one margin by depth": partial(explain, by_depth=True)}
    case = f"words, MiniLM, {len(sentences)} sentences"
    found_rows = []
    for name, run in ways.items():
        # Divide each time by the time of the predictions beside it, so that other load affects both equally.
        times = [(seconds(predict), seconds(run)) for _ in range(repeats + 3)][3:]
        found_rows.append((f"{case}: {name}", statistics.median(b / a for a, b in times), "x predictions"))
        speed = len(sentences) / statistics.median(b for _, b in times)
        found_rows.append((f"{case}: {name}, speed", speed, "sentences/s"))
    texts = encoder.tokenize(["film " * 510])
    rows = [rows_of(text, chunk_step(encoder)) for text in texts]
    with Peak(device) as peak:
        explain()
    return [*found_rows, ("words, MiniLM, 512 tokens: peak", peak.mb, "MB")]


PARTS = {"million": million, "cost": cost, "images": images, "words": words}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--n-inp", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--encoder", default="minilm", help="MiniLM: its name or a folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    n_inp, repeats = (10_000, 3) if options.short else (options.n_inp, options.repeats)
    rows = []
    for part in options.parts:
        given = {"million": (n_inp,), "words": (repeats, options.encoder)}.get(part, (repeats,))
        rows += PARTS[part](options.device, *given)
    for what, value, unit in rows:
        print(f"{what:75} {value:10.3g} {unit}")
    about = common.about(options.device)
    common.append(
        options.results / "credit.csv",
        [{"what": what, "value": value, "unit": unit, **about} for what, value, unit in rows],
    )


if __name__ == "__main__":
    main()
