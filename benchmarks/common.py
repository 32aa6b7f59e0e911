"""Functions that the benchmarks share: layers, timing, peak memory, limits of the device, result rows."""

import argparse
import gc
import importlib.util
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from floor import Case
from rows import RESULTS, about, append, commit, read, results_folder, written
from torch import Tensor, nn

import vecroute as vr

__all__ = [
    "about",
    "append",
    "commit",
    "read",
    "written",
]  # names of rows.py, for the scripts that import common
MB = 2**20
MODES = ("fp32", "tf32", "bf16", "bf16-stored")  # bf16 uses autocast; bf16-stored stores all in bfloat16
IMPLEMENTATIONS = ("reference", "chunked", "fused")
WHICH = ("forward", "both")
# Sizes large enough to reach the limits of the device: rows of a matrix product, elements of a copy.
N_MATMUL = {"cuda": 8192, "cpu": 2048}
N_COPY = {"cuda": 2**30, "cpu": 2**26}

Name = TypeVar("Name", bound=Hashable)
Run = Callable[[], object]  # runs one pass
Build = Callable[
    ..., tuple[nn.Module, Tensor]
]  # build(tiny=False) returns a model and an input with gradient


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


# Models and passes


def routing(case: Case, implementation: str, against: Path | None, device: str) -> nn.Module:
    """Build a layer with the sizes of case. "official" takes the layer of the file ``against``."""
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
    """Return the dtype of inputs and parameters."""
    return torch.bfloat16 if mode == "bf16-stored" else torch.float32


def random_input(shape: tuple[int, ...], mode: str, device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=element_type(mode), requires_grad=True)


@contextmanager
def product_precision(mode: str) -> Iterator[None]:
    """Use IEEE float32 products in mode fp32, else tf32 (in bf16 for products that autocast skips)."""
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
    """Return the passes to measure: ``forward`` builds a graph, ``both`` also computes every gradient."""
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
    """Return a model, its input and its passes for each way to launch it: "eager", on a GPU "captured"."""
    ways = {}
    for way in ("eager", "captured") if is_cuda(device) else ("eager",):
        model, x_inp = build()
        runs = passes(model, x_inp, mode, device)
        if way == "captured":
            runs = {which: captured(run) for which, run in runs.items()}
        ways[way] = model, x_inp, runs
    return ways


def captured(run: Run) -> Run:
    """Capture a pass as a CUDA graph, which the host starts with one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()  # one-time setup must happen before the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(reads: Run = run) -> None:  # the default keeps the tensors that the graph reads alive
        graph.replay()

    return replay


# Time


def time_ms(runs: dict[Name, Run], device: str, seconds: float, rounds: int = 50) -> dict[Name, float]:
    """Return the median time of each run, after two warm-up runs, from 3 to ``rounds`` rounds.

    All rounds of a run take about ``seconds``. On the CPU the runs alternate, so that other load on the
    machine affects all of them equally. On a GPU each run is queued repeatedly, as in training, and its time
    is the interval between the ends of two consecutive runs.
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
    """Return the milliseconds from start to end."""
    if isinstance(end, float):
        return 1000 * (end - start)
    end.synchronize()
    return start.elapsed_time(end)


# Memory


class Peak:
    """``with Peak(device) as peak``: afterwards peak.mb is the peak memory minus the memory at the start."""

    def __init__(self, device: str):
        self.cuda = is_cuda(device)

    def __enter__(self) -> "Peak":
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        self.before = torch.cuda.memory_allocated() if self.cuda else resident("VmRSS")
        return self

    def __exit__(self, *error) -> None:
        after = torch.cuda.max_memory_allocated() if self.cuda else resident("VmHWM")
        self.mb = (after - self.before) / MB


def resident(key: str) -> int:
    """Return the resident memory of this process in bytes, current (VmRSS) or peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def size_mb(model: nn.Module, x_inp: Tensor) -> float:
    """Return the size of the input and the parameters. Their gradients take the same size again."""
    return sum(tensor.nbytes for tensor in (x_inp, *model.parameters())) / MB


def peaks_mb(build: Build, model: nn.Module, x_inp: Tensor, mode: str, device: str) -> dict[str, float]:
    """Return the peak memory of each pass, including the input and the parameters of the model.

    On a GPU this is the memory of allocated tensors. On the CPU each pass runs in a new process, which first
    runs it at a tiny size. NaN if the system does not report memory.
    """
    if is_cuda(device):
        for run in passes(model, x_inp, mode, device).values():
            run()  # one-time setup: compile kernels and choose among them
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
        run()  # one-time setup: code, threads, buffers of libraries
    return growth_mb(*build(), which, mode, "cpu")


def in_fresh_process(function: Callable, *arguments: object) -> float:
    """Call a function in a new process, forked from a process that has only imported the modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "vecroute", "common"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def available_mb(device: str) -> float:
    """Return the available memory, or infinity if the system does not report it."""
    if is_cuda(device):
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] / MB
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable")), math.inf)


# Limits of the device


def matmul(mode: str, device: str) -> tuple[Callable[[], object], int]:
    """Return a large matrix product and its FLOPs. Run it inside ``product_precision(mode)``."""
    n = N_MATMUL[torch.device(device).type]
    a, b = torch.randn(2, n, n, device=device, dtype=torch.float32 if "32" in mode else torch.bfloat16)
    return lambda: torch.mm(a, b), 2 * n**3


def matmul_rate(mode: str, device: str) -> float:
    """Return the FLOPs per second of a large matrix product."""
    run, flops = matmul(mode, device)
    with product_precision(mode):
        return 1000 * flops / time_ms({"matmul": run}, device, 0.5)["matmul"]


def copy_rate(device: str) -> float:
    """Return the bytes per second, read plus written, of a large copy."""
    source = torch.ones(N_COPY[torch.device(device).type], device=device)
    target = torch.empty_like(source)
    return 2000 * source.nbytes / time_ms({"copy": lambda: target.copy_(source)}, device, 0.5)["copy"]


# Command line


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    # argparse converts a default that is text, so a tree with changes is refused before anything is measured.
    parser.add_argument(
        "--results",
        type=results_folder,
        default=str(RESULTS),
        help="folder of the CSV files; benchmarks/results only accepts rows from a clean tree",
    )
    parser.add_argument("--short", action="store_true", help="small sizes: less than a minute on a CPU")
    parser.add_argument("--seconds", type=float, default=0.3, help="approximate time spent on each figure")
    return parser


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that compare implementations of routing."""
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS)
    parser.add_argument(
        "--against", type=Path, metavar="heinsen_routing.py", help="compare with the layer of this file"
    )


def implementations(options: argparse.Namespace, default: tuple[str, ...]) -> list[str]:
    """Return the requested implementations, else the defaults that the device supports, official first."""
    if options.against and not options.against.is_file():
        raise SystemExit(f"--against: there is no file {options.against}")
    possible = [name for name in default if name != "fused" or is_cuda(options.device)]
    return [*(["official"] if options.against else []), *(options.implementations or possible)]
