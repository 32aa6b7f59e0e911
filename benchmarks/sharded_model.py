"""Predict a step of routing whose inputs are divided among processes: ``python benchmarks/sharded_model.py``.

A step alternates between work on a process's own inputs and messages to the others, all of them all-reduce
(docs/scaling.md). The simulation follows each rank through these parts. A message starts when the slowest
rank arrives. It travels along a ring or a tree of R ranks, whichever is faster:

    ring: 2 (R - 1) (latency + bytes / (R bandwidth))      tree: 2 ceil(log2 R) latency + 2 bytes / bandwidth

Without --check, it prints the prediction for --n-inp inputs on --ranks ranks. With --check, it starts 1, 2
and 4 gloo processes on this CPU, counts the bytes that they send, measures latency and bandwidth of gloo, and
compares predicted and measured times for 1 and 2 processes. All times are the fastest of several rounds,
since other work on the machine only adds to them; ``load`` says how much there was. Rows are appended to
sharded_model.csv.
"""

import argparse
import math
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import common
import torch
import torch.distributed as dist
import torch.multiprocessing
from floor import Case
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import vecroute as vr

SMALL, LARGE = 2, 2**21  # float32 numbers in the messages that measure latency and bandwidth


STEPS = 100  # simulated steps; the result is their mean


class Network(NamedTuple):
    """The links of a ring: seconds for a hop, and bytes per second that a rank sends."""

    latency: float
    bandwidth: float


# The model


def messages(case: Case, element_size: int = 4) -> tuple[list[int], list[int]]:
    """Return the bytes of each message of a step, in order: forward, backward."""
    b, m, d = max(case.batch, 1), case.n_out, case.d_inp
    agreement, lengths = 24, 8 * b
    forward = [agreement, lengths, *[element_size * b * m * (d + 1)] * case.n_iters]  # y and s
    backward = [element_size * b * m * d] * (case.n_iters - 1)  # the gradient of x_hat
    if case.variable:
        backward.append(element_size * (d + 1 + 2 * m + 2 * m * (d + 1)))  # parameters that inputs share
    return forward, backward


def all_reduce_s(n_bytes: float, ranks: int, network: Network) -> float:
    """Return the seconds of one message."""
    ring = 2 * (ranks - 1) * (network.latency + n_bytes / (ranks * network.bandwidth))
    tree = 2 * math.ceil(math.log2(ranks)) * network.latency + 2 * n_bytes / network.bandwidth
    return min(ring, tree) if ranks > 1 else 0.0


def simulate(
    case: Case,
    ranks: int,
    network: Network,
    work_s: tuple[float, float],
    *,
    jitter: float = 0.0,
    size: int = 4,
) -> dict[str, float]:
    """Follow the ranks through a step, or through several if their work varies.

    Args:
        work_s: seconds that one rank needs for its own inputs, forward and backward.
        jitter: standard deviation of the work between two messages, relative to its mean.
        size: bytes of an element.

    Returns:
        seconds of the step, the seconds in which messages travel, those in which ranks wait for the slowest,
        and the bytes of all messages.
    """
    generator = torch.Generator().manual_seed(0)
    step = travelling = waiting = 0.0
    for sent, work in zip(messages(case, size), work_s, strict=True):
        # The agreement and the lengths come before any work. Each later message ends one iteration's work,
        # and the backward of the first iteration has no message of its own with a fixed length.
        n_parts = case.n_iters
        parts = [0.0] * (len(sent) - n_parts) + [work / n_parts] * n_parts
        for k, part in enumerate(parts):
            drawn = part * (1 + jitter * torch.randn(STEPS, ranks, generator=generator))  # [STEPS, ranks]
            slowest = float(drawn.amax(1).mean())
            travel = all_reduce_s(sent[k], ranks, network) if k < len(sent) else 0.0
            step += slowest + travel
            travelling += travel
            waiting += slowest - float(drawn.mean())
    n_bytes = sum(map(sum, messages(case, size)))
    return {"step_s": step, "travelling_s": travelling, "waiting_s": waiting, "bytes": n_bytes}


# The check


def layer_and_input(case: Case, rows: int) -> tuple[vr.VectorRouting, Tensor]:
    """Return a layer, and the inputs of one rank."""
    torch.manual_seed(0)
    shape = (*([case.batch] if case.batch else []), rows, case.d_inp)
    return common.routing(case, "auto", None, "cpu"), torch.randn(shape, requires_grad=True)


def step(layer: vr.VectorRouting, x_inp: Tensor) -> tuple[float, float]:
    """Return the seconds of forward and of backward."""
    x_inp.grad = None
    layer.zero_grad(set_to_none=True)
    start = time.perf_counter()
    x_out = layer(x_inp)
    middle = time.perf_counter()
    x_out.square().sum().backward()
    return middle - start, time.perf_counter() - middle


def counted(layer: vr.VectorRouting, x_inp: Tensor) -> int:
    """Return the bytes of the messages of one step."""
    sent, all_reduce = [], dist.all_reduce

    def counting(message: Tensor, *args, **kwargs):
        sent.append(message.nbytes)
        return all_reduce(message, *args, **kwargs)

    dist.all_reduce = counting
    try:
        step(layer, x_inp)
    finally:
        dist.all_reduce = all_reduce
    return sum(sent)


def message_s(numbers: int, repeats: int) -> float:
    """Return the seconds of one all-reduce of float32 numbers."""
    message, times = torch.zeros(numbers), []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        times.append(time.perf_counter() - start)
    return min(times)


def rank_main(rank: int, ranks: int, folder: str, case: Case, repeats: int) -> None:
    """Measure as one rank, and save the results. Steps of one process and sharded steps alternate."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    rows = case.n_inp // ranks
    alone, x_inp = layer_and_input(case, rows)
    sharded = vr.distributed.shard_inputs(layer_and_input(case, rows)[0], init_device_mesh("cpu", (ranks,)))
    step(alone, x_inp)
    found = {"bytes": counted(sharded, x_inp), "alone": [], "sharded": []}
    for _ in range(repeats):
        dist.barrier()
        found["alone"].append(step(alone, x_inp))
        dist.barrier()
        found["sharded"].append(step(sharded, x_inp))
    found["small_s"], found["large_s"] = message_s(SMALL, 5 * repeats), message_s(LARGE, repeats)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # the threads of gloo release their last tensors


def measure(ranks: int, case: Case, repeats: int) -> dict[str, object]:
    """Return predicted and measured bytes and milliseconds of a step on several gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, case, repeats)
        torch.multiprocessing.spawn(rank_main, args=arguments, nprocs=ranks)
        found = [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(ranks)]
    first = found[0]
    # 2 (R - 1) hops, of 1 / R of the bytes each. A single process sends nothing.
    hops = 2 * (ranks - 1)
    latency = first["small_s"] / hops if hops else 0.0
    large = 4 * LARGE / ranks
    bandwidth = large / max(first["large_s"] / hops - latency, 1e-9) if hops else float("inf")
    # In each round, every rank takes as long as the slowest one.
    rounds = zip(*(rank["alone"] for rank in found), strict=True)
    slowest = [tuple(max(times) for times in zip(*each, strict=True)) for each in rounds]
    work = tuple(map(min, zip(*slowest, strict=True)))
    predicted = simulate(case, ranks, Network(latency, bandwidth), work)
    measured = min(map(sum, first["sharded"]))
    return {
        "ranks": ranks, **case.columns, "bytes_predicted": predicted["bytes"],
        "bytes_counted": first["bytes"], "latency_us": 1e6 * latency, "bandwidth_gb_s": bandwidth / 1e9,
        "work_ms": 1000 * sum(work), "predicted_ms": 1000 * predicted["step_s"],
        "measured_ms": 1000 * measured, "measured_of_predicted": measured / predicted["step_s"],
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare with gloo processes on this CPU")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--n-inp", type=float, default=1e9)
    parser.add_argument("--n-out", type=int, default=100)
    parser.add_argument("--d", type=int, default=1024, help="size of inputs and outputs")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 8, 100, 1000])
    parser.add_argument("--latency", type=float, default=2e-5, help="seconds for a hop")
    parser.add_argument("--bandwidth", type=float, default=5e10, help="bytes per second and rank")
    parser.add_argument("--forward-ns", type=float, default=7.3, help="work for one input, forward")
    parser.add_argument("--backward-ns", type=float, default=14.8, help="work for one input, backward")
    parser.add_argument("--jitter", type=float, default=0.05, help="relative deviation of the work")
    options = parser.parse_args(arguments)
    if options.check:
        return check(options)
    case = Case(int(options.n_inp), options.n_out, options.d, options.d, variable=True)
    network = Network(options.latency, options.bandwidth)
    for ranks in options.ranks:
        work = [1e-9 * ns * case.n_inp / ranks for ns in (options.forward_ns, options.backward_ns)]
        found = simulate(case, ranks, network, (work[0], work[1]), jitter=options.jitter)
        print(
            f"{ranks:6} ranks: step {1000 * found['step_s']:.4g} ms, messages {found['bytes'] / 1e6:.3g} MB "
            f"in {1000 * found['travelling_s']:.3g} ms, waiting {1000 * found['waiting_s']:.3g} ms"
        )


def check(options: argparse.Namespace) -> None:
    sizes = {"n_inp": 8000, "n_out": 16, "d_inp": 128, "d_out": 128}
    if options.short:
        sizes = {"n_inp": 64, "n_out": 3, "d_inp": 5, "d_out": 4}
    case, about = Case(**sizes, variable=True), common.about("cpu")
    for ranks in options.processes:
        row = measure(ranks, case, 2 if options.short else options.repeats)
        if ranks > 2:  # there are more processes than cores, so only the bytes count
            row |= dict.fromkeys(("work_ms", "predicted_ms", "measured_ms", "measured_of_predicted"))
        print({name: common.written(value) for name, value in row.items()}, flush=True)
        common.append(options.results / "sharded_model.csv", [row | about])


if __name__ == "__main__":
    main()
