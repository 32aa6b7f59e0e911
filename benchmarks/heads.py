"""Measure the cost of heads: ``python benchmarks/heads.py [--against heinsen_routing.py]``.

On a GPU: a small routing, the paper's head for text, and the first routing of its head for images, launched
kernel by kernel (eager), and each pass captured as one CUDA graph. On the CPU: sizes of a small encoder.
In addition to times, it measures the memory on top of inputs, parameters and gradients. It also measures
which share of the matmul rate in the same run the products of forward + backward reach.

Rows are appended to heads.csv.
"""

import argparse
import math
from dataclasses import replace
from functools import partial

import common
import torch
from floor import Case, flops
from torch import nn

import vecroute as vr

SMALL = Case(batch=32, n_inp=64, n_out=64)
GPU_SHAPES = {
    "small": [SMALL],
    "text-head": [
        Case(batch=32, n_inp=1850, n_out=64, variable=True),
        SMALL,
        Case(batch=32, n_inp=64, n_out=2, d_out=1),
    ],
    "image": [Case(batch=16, n_inp=4925, n_out=64, variable=True)],
}
CPU_SHAPES = {
    "long": [Case(n_inp=100_000, n_out=64, d_inp=384, d_out=384, variable=True)],
    "batch": [Case(batch=32, n_inp=350, n_out=64, d_inp=384, d_out=384, variable=True)],
    "fixed": [Case(n_inp=30_000, n_out=100, d_inp=512, d_out=512)],
}


def shortened(case: Case) -> Case:
    return replace(
        case, n_inp=min(case.n_inp, 2000), batch=min(case.batch, 4), d_inp=256, d_out=min(case.d_out, 256)
    )


def head_and_input(
    cases: list[Case], name: str, options: argparse.Namespace, mode: str, *, tiny: bool = False
):
    if tiny:
        cases = [replace(cases[0], n_inp=8, n_out=4, d_inp=16, d_out=16, batch=min(cases[0].batch, 2))]
    layers = [common.routing(case, name, options.against, options.device) for case in cases]
    join = nn.Sequential if name == "official" else vr.Sequential
    model = layers[0] if len(layers) == 1 else join(*layers)
    return model.to(common.element_type(mode)), common.random_input(cases[0].shape, mode, options.device)


def measure(cases: list[Case], mode: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Return one row of figures for each implementation, eager and, on a GPU, captured."""
    device = options.device
    builds = {
        name: partial(head_and_input, cases, name, options, mode)
        for name in common.implementations(options, common.IMPLEMENTATIONS)
    }
    with common.product_precision(mode):
        heads = {
            (name, launch): head
            for name, build in builds.items()
            for launch, head in common.launches(build, mode, device).items()
        }
        mb = {
            name: common.peaks_mb(build, *heads[name, "eager"][:2], mode, device)
            for name, build in builds.items()
        }
        runs = {(*key, which): run for key, (_, _, runs) in heads.items() for which, run in runs.items()}
        # The large product alternates with the other runs, so that other load affects all of them equally.
        product, product_flops = common.matmul(mode, device)
        ms = common.time_ms({**runs, "matmul": product}, device, options.seconds)
    flops_per_s = 1000 * product_flops / ms["matmul"]
    rows = []
    for (name, launch), (head, x_inp, _) in heads.items():
        size = common.size_mb(head, x_inp)
        peaks = mb[name] if launch == "eager" else dict.fromkeys(common.WHICH, math.nan)
        row = {"implementation": name, "launch": launch, "parameters": common.count(head)}
        row |= {f"{which}_ms": ms[name, launch, which] for which in common.WHICH}
        row |= {f"{which}_mb": peaks[which] for which in common.WHICH}
        row |= {"forward_extra_mb": peaks["forward"] - size, "both_extra_mb": peaks["both"] - 2 * size}
        row |= speedups(ms, name, launch)
        row |= {"both_matmul_share": share(cases, row["both_ms"], flops_per_s)}
        rows.append(row | {"matmul_tflops": flops_per_s / 1e12})
    return rows


def speedups(ms: dict, name: str, launch: str) -> dict[str, float | None]:
    """Return the speedup over the official code launched in the same way, and over its eager launch."""
    official = {"speedup": launch, "speedup_over_eager": "eager"}
    return {
        f"{which}_{column}": ms["official", way, which] / ms[name, launch, which]
        if ("official", way, which) in ms
        else None
        for column, way in official.items()
        for which in common.WHICH
    }


def share(cases: list[Case], both_ms: float, flops_per_s: float) -> float:
    """Return the share of the matmul rate: the time of the products at that rate over the measured time.

    With variable length, z and the betas count once, as if they were stored. With fixed length, z counts in
    the backward pass too.
    """
    products = sum(sum(flops(case, kept=case.variable)) for case in cases)
    return 1000 * products / flops_per_s / both_ms


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    common.add_layer_options(parser)
    parser.add_argument(
        "--cases", nargs="+", choices=[*GPU_SHAPES, *CPU_SHAPES], help="default: those of the device"
    )
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    cuda = common.is_cuda(options.device)
    about = common.about(options.device)
    shapes = GPU_SHAPES | CPU_SHAPES
    for mode in options.modes or (["tf32", "bf16"] if cuda else ["fp32"]):
        for name in options.cases or (GPU_SHAPES if cuda else CPU_SHAPES):
            cases = [shortened(case) for case in shapes[name]] if options.short else shapes[name]
            sizes = {**cases[0].columns, "network": " -> ".join(str(case.n_out) for case in cases)}
            for figures in measure(cases, mode, options):
                row = {"case": name, **sizes, "mode": mode, **figures, **about}
                common.append(options.results / "heads.csv", [row])
                report(row)


def report(row: dict) -> None:
    line = f"{row['case']:9} {row['mode']:5} {row['implementation']:9} {row['launch']:8}"
    line += f" forward {row['forward_ms']:.3g} ms, both {row['both_ms']:.3g} ms"
    line += f" ({100 * row['both_matmul_share']:.0f} % of the matmul rate)"
    if row["launch"] == "eager":
        line += f", extra {row['forward_extra_mb']:.3g} / {row['both_extra_mb']:.3g} MB"
    if row["both_speedup"]:
        line += f", {row['forward_speedup']:.2f}x / {row['both_speedup']:.2f}x, launched alike"
    print(line, flush=True)


if __name__ == "__main__":
    main()
