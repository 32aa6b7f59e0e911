"""What the benchmarks share: layers to measure, time, peak memory, ceilings of the device, rows."""

import argparse
import csv
import datetime
import gc
import importlib.util
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from floor import Case
from torch import Tensor, nn

import vecroute as vr

RESULTS = Path(__file__).parent / "results"
MB = 2**20
MODES = ("fp32", "tf32", "bf16", "bf16-stored")  # bf16: autocast; bf16-stored: inputs and parameters too
IMPLEMENTATIONS = ("reference", "chunked", "fused")
WHICH = ("forward", "both")
# What is large enough to reach the ceilings: the order of the factors of a product, the elements of a copy.
N_MATMUL = {"cuda": 8192, "cpu": 2048}
N_COPY = {"cuda": 2**30, "cpu": 2**26}

Name = TypeVar("Name", bound=Hashable)
Run = Callable[[], object]  # a pass
Build = Callable[..., tuple[nn.Module, Tensor]]  # build(tiny=False): a model, and an input with gradient


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


# What is measured


def routing(case: Case, implementation: str, against: Path | None, device: str) -> nn.Module:
    """A layer of the sizes of case; that of the file ``against`` if the implementation is "official"."""
    sizes = {"n_out": case.n_out, "d_inp": case.d_inp, "d_out": case.d_out, "n_iters": case.n_iters}
    if implementation != "official":
        n_inp = None if case.variable else case.n_inp
        return vr.VectorRouting(n_inp=n_inp, **sizes, implementation=implementation, device=device)
    spec = importlib.util.spec_from_file_location("against", against)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.device(device):
        return module.EfficientVectorRouting(n_inp=-1 if case.variable else case.n_inp, **sizes)


def element_type(mode: str) -> torch.dtype:
    """Of inputs and parameters."""
    return torch.bfloat16 if mode == "bf16-stored" else torch.float32


def random_input(shape: tuple[int, ...], mode: str, device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=element_type(mode), requires_grad=True)


@contextmanager
def product_precision(mode: str) -> Iterator[None]:
    """IEEE float32 products in the mode fp32, tf32 in the others: in those of bf16, what autocast leaves."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee" if mode == "fp32" else "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def autocast(mode: str, device: str) -> torch.autocast:
    kind = torch.device(device).type
    return torch.autocast(kind, torch.bfloat16, enabled=mode == "bf16", cache_enabled=False)


def passes(model: nn.Module, x_inp: Tensor, mode: str, device: str) -> dict[str, Run]:
    """What is measured: ``forward``, with its graph, and ``both``, which makes every gradient anew."""
    grad: list[Tensor] = []

    def forward() -> None:
        with autocast(mode, device):
            model(x_inp)

    def both() -> None:
        x_inp.grad = None
        model.zero_grad(set_to_none=True)
        with autocast(mode, device):
            x_out = model(x_inp)
        if not grad:
            grad.append(torch.randn_like(x_out))
        x_out.backward(grad[0])

    return {"forward": forward, "both": both}


def launches(build: Build, mode: str, device: str) -> dict[str, tuple[nn.Module, Tensor, dict[str, Run]]]:
    """The ways to launch a model, with its input and passes: "eager", and on a GPU "captured"."""
    ways = {}
    for way in ("eager", "captured") if is_cuda(device) else ("eager",):
        model, x_inp = build()
        runs = passes(model, x_inp, mode, device)
        if way == "captured":
            runs = {which: captured(run) for which, run in runs.items()}
        ways[way] = model, x_inp, runs
    return ways


def captured(run: Run) -> Run:
    """A pass as one CUDA graph: the host starts all of it by one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()  # what is set up once is set up before
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(reads: Run = run) -> None:  # as long as there is a graph, there must be what it reads
        graph.replay()

    return replay


# Time


def time_ms(runs: dict[Name, Run], device: str, seconds: float, rounds: int = 50) -> dict[Name, float]:
    """The median time of each run after two of warm-up, over 3 to ``rounds`` rounds in about ``seconds``.

    On the CPU the runs take turns, so that what else the machine does weighs on all alike. On a GPU each run
    is queued again and again, as in training: its time is that between the ends of one and of the next.
    """
    groups = [[name] for name in runs] if is_cuda(device) else [list(runs)]
    medians = {}
    for group in groups:
        for name in group:
            runs[name]()
        start = now(device)
        for name in group:
            runs[name]()
        once = between(start, now(device)) / len(group)
        marks = [now(device)]
        for _ in range(max(3, min(rounds, int(1000 * seconds / once)))):
            for name in group:
                runs[name]()
                marks.append(now(device))
        spans = [between(a, b) for a, b in pairwise(marks)]
        medians |= {name: statistics.median(spans[k :: len(group)]) for k, name in enumerate(group)}
    return medians


def now(device: str) -> float | torch.cuda.Event:
    if not is_cuda(device):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Milliseconds."""
    if isinstance(end, float):
        return 1000 * (end - start)
    end.synchronize()
    return start.elapsed_time(end)


# Memory


class Peak:
    """``with Peak(device) as peak``: then peak.mb is the most memory in use within, beyond that before."""

    def __init__(self, device: str):
        self.cuda = is_cuda(device)

    def __enter__(self) -> "Peak":
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # makes the peak of resident memory start anew
        self.before = torch.cuda.memory_allocated() if self.cuda else resident("VmRSS")
        return self

    def __exit__(self, *error) -> None:
        after = torch.cuda.max_memory_allocated() if self.cuda else resident("VmHWM")
        self.mb = (after - self.before) / MB


def resident(key: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def count(model: nn.Module) -> int:
    """Parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def size_mb(model: nn.Module, x_inp: Tensor) -> float:
    """Of the input and the parameters; their gradients take as much again."""
    return sum(tensor.nbytes for tensor in (x_inp, *model.parameters())) / MB


def peaks_mb(build: Build, model: nn.Module, x_inp: Tensor, mode: str, device: str) -> dict[str, float]:
    """Peak memory of each pass, input and parameters (those of build) included.

    On a GPU of tensors allocated, on the CPU of a fresh process each, that had run before at tiny size only.
    Not a number where the system does not tell.
    """
    if is_cuda(device):
        for run in passes(model, x_inp, mode, device).values():
            run()  # sets up what is set up once: kernels and what it takes to choose them
        growth = {which: growth_mb(model, x_inp, which, mode, device) for which in WHICH}
    elif Path("/proc/self/clear_refs").exists():
        growth = {which: in_fresh_process(fresh_growth_mb, build, which, mode) for which in WHICH}
    else:
        growth = dict.fromkeys(WHICH, math.nan)
    return {which: size_mb(model, x_inp) + mb for which, mb in growth.items()}


def growth_mb(model: nn.Module, x_inp: Tensor, which: str, mode: str, device: str) -> float:
    x_inp.grad = None
    model.zero_grad(set_to_none=True)
    with Peak(device) as peak:
        passes(model, x_inp, mode, device)[which]()
    return peak.mb


def fresh_growth_mb(build: Build, which: str, mode: str) -> float:
    for run in passes(*build(tiny=True), mode, "cpu").values():
        run()  # loads what is loaded once: code, threads, buffers of libraries
    return growth_mb(*build(), which, mode, "cpu")


def in_fresh_process(function: Callable, *arguments: object) -> float:
    """function(*arguments) in a process of its own, forked from one that has only imported its modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "vecroute", "common"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def available_mb(device: str) -> float:
    """Memory left; without bound where the system does not tell."""
    if is_cuda(device):
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] / MB
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable")), math.inf)


# Ceilings


def matmul(mode: str, device: str) -> tuple[Callable[[], object], int]:
    """A large product in the precision of mode, for within ``product_precision``, and its FLOPs."""
    n = N_MATMUL[torch.device(device).type]
    a, b = torch.randn(2, n, n, device=device, dtype=torch.float32 if "32" in mode else torch.bfloat16)
    return lambda: torch.mm(a, b), 2 * n**3


def matmul_rate(mode: str, device: str) -> float:
    """FLOPs per second of a large product."""
    run, flops = matmul(mode, device)
    with product_precision(mode):
        return 1000 * flops / time_ms({"matmul": run}, device, 0.5)["matmul"]


def copy_rate(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.ones(N_COPY[torch.device(device).type], device=device)
    target = torch.empty_like(source)
    return 2000 * source.nbytes / time_ms({"copy": lambda: target.copy_(source)}, device, 0.5)["copy"]


# Rows


def about(device: str) -> dict[str, str]:
    """The columns that say where and with what a row was measured."""
    return {
        "device": torch.cuda.get_device_name() if is_cuda(device) else cpu_name(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "vecroute": vr.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{torch.get_num_threads()} threads of {model}"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def commit() -> str:
    """$COMMIT, else the commit of this repository, with a + if the sources have changed since."""

    def git(*command: str) -> str:
        return subprocess.run(
            ["git", "-C", str(RESULTS.parent), *command], capture_output=True, text=True, check=True
        ).stdout.strip()

    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "../src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append(path: Path, rows: list[dict[str, object]]) -> None:
    """Add rows to a CSV file, whole or not at all: numbers with 4 digits, nothing where there is none."""
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ",".join(columns) + "\n"
    if before.splitlines()[0] != ",".join(columns):
        raise ValueError(f"{path} has other columns than {columns}: move it away")
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("w", newline="") as file:
        file.write(before)
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writerows({name: written(value) for name, value in row.items()} for row in rows)
    os.replace(temporary, path)


def written(value: object) -> object:
    if not isinstance(value, float):
        return "" if value is None else value
    return f"{value:.4g}" if math.isfinite(value) else ""


# Command line


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--short", action="store_true", help="small sizes, in less than a minute on a CPU")
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each figure, about")
    return parser


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks that compare implementations of a routing."""
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS)
    parser.add_argument(
        "--against", type=Path, metavar="heinsen_routing.py", help="compare with this file's layer"
    )


def implementations(options: argparse.Namespace, default: tuple[str, ...]) -> list[str]:
    """Those asked for, else the default less what the device cannot run; the official one first."""
    if options.against and not options.against.is_file():
        raise SystemExit(f"--against: there is no file {options.against}")
    possible = [name for name in default if name != "fused" or is_cuda(options.device)]
    return [*(["official"] if options.against else []), *(options.implementations or possible)]
