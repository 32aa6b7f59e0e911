"""Predict a corpus of made-up texts while processes are killed: ``python benchmarks/million_texts.py``.

1. 50 Parquet shards by two processes under torchrun. One process is killed midway, and the run is repeated.
2. The same by Ray Data with two workers. One of them is killed midway (``--ray``).

Both end with every text exactly once and with all columns. Rows (texts per second, peak memory of a process)
are appended to million_texts.csv. The encoder is tiny by default, because the benchmark measures the work
around it; ``--encoder minilm`` takes a real one.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

import vecroute as vr

ROOT = Path(__file__).parents[1]
WORDS = [
    "a",
    "the",
    "film",
    "story",
    "plot",
    "actor",
    "scene",
    "is",
    "was",
    "feels",
    "very",
    "so",
    "good",
    "great",
    "fine",
    "witty",
    "bad",
    "dull",
    "slow",
    "flat",
]


def make_texts(n: int, seed: int) -> list[str]:
    """Make short texts of 2 to 12 words."""
    random = np.random.default_rng(seed)
    words = np.array(WORDS)[random.integers(len(WORDS), size=(n, 12))]  # [n, 12]
    return [" ".join(row[:k]) for row, k in zip(words, random.integers(2, 13, n), strict=True)]


def make_corpus(folder: Path, n: int, shards: int) -> None:
    folder.mkdir()
    for k in range(shards):
        ids = np.arange(k * n // shards, (k + 1) * n // shards)
        columns = {"id": ids, "text": make_texts(len(ids), k), "source": ["made up"] * len(ids)}
        parquet.write_table(pa.table(columns), folder / f"part-{k:03}.parquet")


def make_model(folder: Path, encoder: str | None) -> Path:
    if encoder is None:
        sys.path.append(str(ROOT))
        from tests.helpers.tiny_models import save_tiny

        encoder = save_tiny(folder / "encoder")
    texts = make_texts(200, 1000)
    classifier = vr.RoutingClassifier(encoder, max_epochs=1, cache=False, estimate=False, device="cpu")
    classifier.fit(texts, ["good" if "good" in text else "other" for text in texts])
    classifier.save_pretrained(folder / "model")
    return folder / "model"


def check(out: Path, n: int) -> None:
    """Raise unless every text is there exactly once, with all columns."""
    files = sorted(out.rglob("*.parquet"))
    ids = np.sort(
        np.concatenate([parquet.read_table(path, columns=["id"])["id"].to_numpy() for path in files])
    )
    names = {tuple(parquet.read_schema(path).names) for path in files}
    if not np.array_equal(ids, np.arange(n)) or names != {("id", "text", "source", "label", "good", "other")}:
        raise ValueError(f"{len(ids):,} rows with {len(np.unique(ids)):,} ids of {n:,}, columns {names}")


def descendants(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    own = [int(line) for line in found.stdout.split()]
    return own + [pid for child in own for pid in descendants(child)]


def peak_mb(pid: int) -> float:
    """Return the peak resident memory of a process so far, 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def torchrun(model: Path, corpus: Path, out: Path, stop_at: int | None) -> tuple[float, float]:
    """Run once, and return seconds and peak memory. Kill a process when ``stop_at`` shards are there."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vecroute"]
    command += ["predict", str(model), str(corpus), "--out", str(out), "--device", "cpu"]
    start, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile() as log:
        run = subprocess.Popen([sys.executable, *command], stderr=log)
        while run.poll() is None:
            workers = descendants(run.pid)
            peak = max([peak, *map(peak_mb, workers)])
            if stop_at is not None and len(list(out.glob("*.parquet"))) >= stop_at:
                os.kill(workers[-1], signal.SIGKILL)
                stop_at = None
            time.sleep(0.2)
        if run.returncode and stop_at is None and len(list(out.glob("*.parquet"))) == 0:
            log.seek(0)
            raise ValueError(log.read().decode()[-2000:])
    return time.perf_counter() - start, peak


def ray(model: Path, corpus: Path, out: Path, n: int, shards: int) -> tuple[float, float]:
    """Run by Ray Data, kill a worker midway, and return seconds and the peak memory of a worker."""
    import threading

    import ray

    from vecroute.corpora import ray_predict

    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    start, peak, killed, ended = time.perf_counter(), 0.0, False, threading.Event()

    def watch() -> None:
        nonlocal peak, killed
        while not ended.wait(0.2):
            names = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(os.getpid())}
            workers = [pid for pid, file in names.items() if is_worker(file)]
            peak = max([peak, *map(peak_mb, workers)])
            if not killed and len(workers) == 2 and len(list(out.glob("*.parquet"))) >= shards // 3:
                os.kill(workers[0], signal.SIGKILL)
                killed = True
                print(f"killed worker {workers[0]}")

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        # By default, Ray makes one block of many small files, and one worker gets it.
        rows = n // shards
        dataset = ray.data.read_parquet(str(corpus)).repartition(target_num_rows_per_block=rows)
        ray_predict(str(model), dataset, workers=2, batch_size=min(rows, 2048)).write_parquet(str(out))
    finally:
        ended.set()
        thread.join()
        ray.shutdown()
    if not killed:
        raise ValueError("the run ended before a worker was killed: take more texts")
    return time.perf_counter() - start, peak


def is_worker(file: Path) -> bool:
    """Return whether a process is an actor of Ray with a model."""
    try:
        return b"MapWorker" in file.read_bytes() or b"MapBatches(Worker)" in file.read_bytes()
    except OSError:
        return False


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--encoder", help="name or folder of an encoder; a tiny one if left out")
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=50)
    parser.add_argument("--ray", action="store_true", help="by Ray Data instead of torchrun")
    options = parser.parse_args(arguments)
    n = 2_000 if options.short else options.texts
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder, options.encoder)
        make_corpus(folder / "corpus", n, options.shards)
        paths = (model, folder / "corpus", folder / "out")
        name = f"{n:,} texts in {options.shards} shards, {options.encoder or 'tiny encoder'}"
        if options.ray:
            seconds, peak = ray(*paths, n, options.shards)
            rows = [(f"{name}: Ray Data, 2 workers, one killed", seconds, "s")]
        else:
            first, peak_1 = torchrun(*paths, stop_at=max(1, options.shards // 3))
            left = options.shards - len(list((folder / "out").glob("*.parquet")))
            if left == 0:
                raise ValueError("the run ended before a process was killed: take more texts")
            print(f"killed a process: {left} shards are missing")
            second, peak_2 = torchrun(*paths, stop_at=None)
            peak = max(peak_1, peak_2)
            rows = [
                (f"{name}: torchrun, 2 processes, until one was killed", first, "s"),
                (f"{name}: torchrun, 2 processes, the {left} shards left", second, "s"),
            ]
        check(folder / "out", n)
    way = "Ray Data" if options.ray else "torchrun"
    rows.append((f"{name}: {way}, peak memory of a process", peak, "MB"))
    for what, value, unit in rows:
        print(f"{what:90} {value:10.4g} {unit}")
    about = common.about("cpu")
    common.append(
        options.results / "million_texts.csv",
        [{"what": what, "value": value, "unit": unit} | about for what, value, unit in rows],
    )


if __name__ == "__main__":
    main()
