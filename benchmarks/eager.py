"""Measure the cost of an ordinary, eager call: ``python benchmarks/eager.py [--against heinsen_routing.py]``.

Forward + backward, launched kernel by kernel (eager). host_ms is the time until the Python call returns,
with the GPU idle before it; whole_ms is the time from the end of one call to the end of the next, back to
back. captured_ms is the whole time of the same call as one CUDA graph, a median of 20 calls or more. The
others are medians of three rounds: in each round, all implementations and kinds of input of a case have 20
calls or more in turn. On the CPU, host_ms equals whole_ms and captured_ms is empty.

The official layer has no masks and no packed samples. For these kinds of input, speedup compares with the
official layer on the same batch, padded, without a mask.

The rows "compiled" are calls of ``torch.compile(head, dynamic=True)``, which is meant to compile once for all
lengths. graphs is the number of graphs that it made for five lengths. Without dynamic=True there are two,
since PyTorch first compiles for one length alone.

Rows are appended to eager.csv when all cases are done. ``--cases`` runs only some cases.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import calls
import common
import torch
from calls import Call
from floor import Case
from torch._dynamo.utils import counters

import vecroute as vr

SIZES = ("batch", "n_inp", "n_out", "d_inp", "d_out", "n_iters", "variable")
TIMES = ("host_ms", "host_mean_ms", "whole_ms", "captured_ms")
COUNTS = ("kernels", "copies", "speedup", "graphs", "calls", "jumps")
COLUMNS = (
    "case",
    *SIZES,
    "mode",
    "kind",
    "implementation",
    *TIMES,
    *COUNTS,
)  # followed by the columns of common.about


def variable(batch: int, n_inp: int, n_out: int, d_inp: int = 1024, d_out: int | None = None) -> Case:
    return Case(n_inp, n_out, d_inp, d_out or d_inp, variable=True, batch=batch)


def fixed(batch: int, n_inp: int, n_out: int, d_inp: int = 1024, d_out: int | None = None) -> Case:
    return Case(n_inp, n_out, d_inp, d_out or d_inp, batch=batch)


TEXT = variable(32, 1850, 64)
LAYERS = {
    "text": [TEXT],
    "image64": [variable(16, 4925, 64)],
    "image128": [variable(16, 4925, 128)],
    "fixed": [fixed(32, 64, 64)],
    "head4": [variable(64, 448, 4, 384)],
    "three-iterations": [replace(TEXT, n_iters=3)],
    "packed64": [variable(64, 400, 4, 384), variable(64, 400, 64)],
    "others": [
        variable(1, 5000, 3, 384),
        variable(1, 80_000, 100, 384),
        variable(2, 40_000, 17, 768),
        variable(4, 1000, 128, 1000),
        variable(8, 333, 17, 770),
        variable(64, 100, 3, 768),
        variable(128, 625, 100, 384),
        fixed(1, 20_000, 100, 770),
        fixed(3, 2047, 128, 1000, 384),
        fixed(16, 64, 17, 384),
        fixed(32, 200, 3, 768, 384),
        fixed(128, 100, 128, 1000),
    ],
}
# Kinds of input: plain (all vectors), masked (a batch padded at its ends) and packed (no padding).
KINDS = dict.fromkeys(("text", "image64", "head4"), ("plain", "masked", "packed"))
KINDS["packed64"] = ("masked", "packed")
SHORTEST = {"packed64": 0.05}  # shortest masked or packed sample, as a share of n_inp; 0.1 in other cases
LENGTHS = variable(8, 450, 16, 384)  # the repeated length; 200 other lengths are from 50 to 449
HEADS = ((32, 48, 7, 384), (16, 128, 25, 1024))  # batch, positions, depths, size of the hidden states
CASES = (*LAYERS, "lengths", "heads", "trace")
Key = tuple[str, str]  # kind of input and implementation
Builds = dict[Key, Callable[[], Call]]


@dataclass
class Measured:
    """A row, and a function that builds its call again, to capture it or count kernels (else None)."""

    row: dict[str, object]
    build: Callable[[], Call] | None = None


def shortened(case: Case) -> Case:
    return replace(
        case,
        batch=min(case.batch, 3),
        n_inp=min(case.n_inp, 40),
        n_out=min(case.n_out, 8),
        d_inp=min(case.d_inp, 32),
        d_out=min(case.d_out, 32),
    )


def least_calls(options: argparse.Namespace) -> int:
    return 3 if options.short else 20


def sizes(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in SIZES}


# Calls


def layer_call(
    case: Case,
    implementation: str,
    mode: str,
    options: argparse.Namespace,
    kind: str = "plain",
    shortest: float = 0.1,
) -> Call:
    layer = common.routing(case, implementation, options.against, "cpu")
    x_inp, given = calls.random_input(case.shape, mode, options.device), {}
    if kind != "plain":
        lengths = calls.lengths_of(case.batch, case.n_inp, shortest)
        given = {"input_mask": calls.prefix_mask(lengths, case.n_inp, options.device)}
    if kind == "packed":
        x_inp = x_inp[given["input_mask"]]  # [total, d]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        given = {"cu_seqlens": starts.to(options.device, torch.int32)}
    layer = layer.to(options.device, common.element_type(mode))
    return Call(layer, x_inp.requires_grad_(), given, mode, options.device)


def head_call(name: str, shape: tuple[int, int, int, int], mode: str, options: argparse.Namespace) -> Call:
    """Return a call of a head on hidden states of a frozen encoder, with a mask of positions."""
    batch, n_pos, depth, d = shape
    size = {"d_emb": d, "depth": depth, "n_cls": 2}
    if name == "routing":
        head = vr.RoutingHead(**size)
    else:
        width = vr.RoutingHead(**size).options["d_mlp"]  # so that both heads have the same MLPs
        mlps = {"d_inp_mlp": width, "gated": True} if name == "probe, MLPs" else {}
        head = vr.heads.PoolingHead.probe(**size, **mlps)
    given = {"input_mask": calls.prefix_mask(calls.lengths_of(batch, n_pos, 0.1), n_pos, options.device)}
    hidden_states = calls.random_input((batch, n_pos, depth, d), mode, options.device)
    head = head.to(options.device, common.element_type(mode))
    return Call(head, hidden_states, given, mode, options.device)


# Measurements


def measure(builds: Builds, options: argparse.Namespace) -> dict[Key, dict]:
    """Measure host time, whole time and, on a GPU, captured time of calls that alternate.

    The official layer is not captured, and is left out if its call does not fit the memory. Packed calls are
    captured at the end of a run.
    """
    timing = options.seconds, least_calls(options)
    ready = {key: build() for key, build in builds.items()}
    ready = {key: call for key, call in ready.items() if fits(key, call)}
    rows = dict(zip(ready, calls.figures(list(ready.values()), options.device, *timing), strict=True))
    ready.clear()  # frees the inputs
    for (kind, implementation), row in rows.items():
        if common.is_cuda(options.device) and implementation != "official" and kind != "packed":
            row["captured_ms"] = calls.captured_ms(builds[kind, implementation](), *timing)
    return rows


def fits(key: Key, call: Call) -> bool:
    """Run a call. Return False if the official layer runs out of memory; other layers must not."""
    try:
        call()
    except torch.OutOfMemoryError as error:
        if key[1] != "official":
            raise
        print(f"the official layer fails: {calls.first_line(error)}", flush=True)
        return False
    return True


def implementations(options: argparse.Namespace) -> list[str]:
    return common.implementations(options, ("fused",) if common.is_cuda(options.device) else ("chunked",))


def layers(name: str, mode: str, options: argparse.Namespace) -> Iterator[Measured]:
    """Measure every implementation on every kind of input. Packed calls are captured at the end of a run."""
    for case in LAYERS[name]:
        case = shortened(case) if options.short else case
        builds: Builds = {
            (kind, implementation): partial(
                layer_call, case, implementation, mode, options, kind, SHORTEST.get(name, 0.1)
            )
            for implementation in implementations(options)
            for kind in (("plain",) if implementation == "official" else KINDS.get(name, ("plain",)))
        }
        rows = measure(builds, options)
        official = rows.get(("plain", "official"))
        for (kind, implementation), row in rows.items():
            row["speedup"] = official and official["whole_ms"] / row["whole_ms"]
            columns = {**sizes(case), "kind": kind, "implementation": implementation}
            yield Measured({**columns, **row}, builds[kind, implementation])


def lengths(name: str, mode: str, options: argparse.Namespace) -> Iterator[Measured]:
    """Measure one length repeatedly, then many other lengths in turn, twice. Their n_inp is the longest."""
    case = shortened(LENGTHS) if options.short else LENGTHS
    drawn = range(case.n_inp // 9, case.n_inp)
    repeated, *others = random.Random(0).sample(drawn, 9 if options.short else 201)
    official: dict[str, float] = {}  # whole time
    builds: Builds = {
        ("repeated", implementation): partial(
            layer_call, replace(case, n_inp=repeated), implementation, mode, options
        )
        for implementation in implementations(options)
    }
    for (_, implementation), repeated_row in measure(builds, options).items():
        build = builds["repeated", implementation]
        rows = {"repeated": repeated_row} | sweeps(build(), others)
        for kind, row in rows.items():
            if implementation == "official" and "whole_ms" in row:
                official[kind] = row["whole_ms"]
            row["speedup"] = official[kind] / row["whole_ms"] if kind in official else None
            columns = sizes(replace(case, n_inp=repeated if kind == "repeated" else max(others)))
            columns |= {"kind": kind, "implementation": implementation}
            yield Measured({**columns, **row}, build if kind == "repeated" else None)


def sweeps(call: Call, lengths: list[int]) -> dict[str, dict[str, float]]:
    """Return the host time of the first sweep over all lengths, and host and whole time of the second."""
    call()  # draws the gradient of the output, which all calls share
    batch, _, d = call.x_inp.shape
    runs = [
        replace(call, x_inp=calls.random_input((batch, n_inp, d), call.mode, call.device).requires_grad_())
        for n_inp in lengths
    ]
    first, second = (calls.host_columns(calls.host_times(runs, call.device)) for _ in range(2))
    second["whole_ms"] = median(calls.whole_times(runs, call.device))
    return {"first sweep": first, "second sweep": second}


def heads(name: str, mode: str, options: argparse.Namespace) -> Iterator[Measured]:
    """Yield rows of the default routing head and of attentive probes; in the first mode also compiled."""
    for shape in HEADS:
        batch, n_pos, depth, d = (3, 8, 3, 24) if options.short else shape
        columns = sizes(Case(n_pos * depth, 2, d, 1, variable=True, batch=batch))
        builds: Builds = {
            ("masked", head): partial(head_call, head, (batch, n_pos, depth, d), mode, options)
            for head in ("routing", "probe, MLPs", "probe")
        }
        for (kind, head), row in measure(builds, options).items():
            key = {"kind": kind, "implementation": head}
            yield Measured({**columns, **key, **row}, builds[kind, head])
        if mode == modes(options)[0]:
            build = partial(head_call, "routing", (batch, n_pos, depth, d), mode, options)
            key = {"kind": "compiled", "implementation": "routing"}
            yield Measured({**columns, **key, **compiled(build(), options)})


def compiled(call: Call, options: argparse.Namespace) -> dict[str, object]:
    """Return times of the compiled head, and the number of graphs that five numbers of positions need."""
    torch.compiler.reset()
    counters.clear()
    backend = "inductor" if common.is_cuda(options.device) else "aot_eager"
    call = replace(call, model=torch.compile(call.model, backend=backend, dynamic=True))
    n_pos = call.x_inp.shape[1]
    try:
        for n in (n_pos, n_pos - 1, n_pos - 2, n_pos // 2, n_pos // 2 + 1):
            # Copies, since PyTorch compiles again if one input is a view and another is not.
            given = {"input_mask": call.given["input_mask"][:, :n].clone()}
            replace(call, x_inp=call.x_inp[:, :n].clone(), given=given)()
        graphs = counters["stats"]["unique_graphs"]
        (row,) = calls.figures([call], options.device, options.seconds, least_calls(options))
        return {"graphs": graphs, **row}
    except Exception as error:  # compilers raise errors of many types, and the other cases should still run
        print(f"heads: torch.compile fails: {type(error).__name__}: {calls.first_line(error)}", flush=True)
        return {}


def trace(name: str, mode: str, options: argparse.Namespace) -> Iterator[Measured]:
    """Count the Python calls of one forward + backward of the text case."""
    case = TEXT if common.is_cuda(options.device) and not options.short else shortened(TEXT)
    implementation = implementations(options)[-1]
    found = calls.traced(layer_call(case, implementation, mode, options))
    row = {"kind": "trace", "implementation": implementation, "calls": found.calls, "jumps": found.jumps}
    yield Measured({**sizes(case), **row})


# The run


def modes(options: argparse.Namespace) -> list[str]:
    return options.modes or (["tf32", "bf16"] if common.is_cuda(options.device) else ["fp32"])


def finish(measured: list[Measured], options: argparse.Namespace) -> None:
    """Run measurements that may disturb others: captures that may fail, then the profiler."""
    if not common.is_cuda(options.device):
        return
    for each in measured:
        if each.row["kind"] == "packed" and each.build:
            with common.product_precision(each.row["mode"]):
                ms = calls.captured_ms(each.build(), options.seconds, least_calls(options))
            each.row["captured_ms"] = ms
            print(f"{label(each.row)} captured {'-' if ms is None else f'{ms:.3g} ms'}", flush=True)
    calls.count_kernels(lambda: None)  # the first use of the profiler sets it up
    for each in measured:
        if each.build:
            with common.product_precision(each.row["mode"]):
                call = each.build()
                for _ in range(2):
                    call()
                torch.cuda.synchronize()
                each.row |= calls.count_kernels(call)
            counts = f"{each.row['kernels']} kernels, {each.row['copies']} copies and fills"
            print(f"{label(each.row)} {counts}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    common.add_layer_options(parser)
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all")
    parser.add_argument("--trace", action="store_true", help="the same as --cases trace")
    options = parser.parse_args(arguments)
    cases = [*(options.cases or ([] if options.trace else CASES)), *(["trace"] if options.trace else [])]
    about = common.about(options.device)
    torch.manual_seed(0)
    measured: list[Measured] = []
    try:
        for mode in modes(options):
            for name in dict.fromkeys(cases):
                function = {"lengths": lengths, "heads": heads, "trace": trace}.get(name, layers)
                with common.product_precision(mode):
                    for each in function(name, mode, options):
                        each.row = dict.fromkeys(COLUMNS) | {"case": name, "mode": mode} | each.row | about
                        measured.append(each)
                        report(each.row)
        finish(measured, options)
    finally:  # rows measured before an error are written too
        if measured:
            common.append(options.results / "eager.csv", [each.row for each in measured])


def label(row: dict) -> str:
    shape = f"{row['batch']} x {row['n_inp']} x {row['d_inp']} -> {row['n_out']} x {row['d_out']}"
    return f"{row['case']:16} {shape:32} {row['mode']:5} {row['kind']:12} {row['implementation']:11}"


def report(row: dict) -> None:
    if row["calls"] is not None:
        line = f"{row['calls']} calls into vecroute, {row['jumps']} of them from another of its files"
        print(f"{label(row)} {line}", flush=True)
        return
    names = {"host_ms": "host", "host_mean_ms": "mean", "whole_ms": "whole", "captured_ms": "captured"}
    line = ", ".join(f"{name} {row[ms]:.3g} ms" for ms, name in names.items() if row[ms] is not None)
    line += f", {row['speedup']:.2f}x" if row["speedup"] else ""
    line += f", {row['graphs']} graphs" if row["graphs"] is not None else ""
    print(f"{label(row)} {line}", flush=True)


if __name__ == "__main__":
    main()
