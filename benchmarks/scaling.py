"""Measure the cost of a routing as its sizes grow: ``python benchmarks/scaling.py [--against FILE]``.

It measures parameters, peak memory and time of forward and of forward + backward. The floor is the least time
and memory that a device with the matmul rate and the copy bandwidth of the same run needs (see floor.py).

axes        one of n_inp, n_out, d_inp, d_out, n_iters grows, the others stay at 100, 100, 1024, 1024, 2
busy        the same with others so large that a GPU computes, instead of waiting for launches
headline    1,000,000 x 1024 -> 100 x 1024, fixed and variable length
longest     89,600 x 1024 -> 64 x 1024, variable length: the longest sequence of the paper's benchmarks
ten-million 10,000,000 x 1024 -> 100 x 1024, variable length, stored in bfloat16

Rows are appended to scaling.csv, and straight lines fitted to the axes to scaling_fits.csv. FILE is the
authors' heinsen_routing.py.
"""

import argparse
import statistics
from dataclasses import replace
from functools import partial

import common
import floor
import torch
from common import MB
from floor import Case

AXES = {
    "n_inp": (100, 1000, 10_000, 100_000, 250_000, 500_000, 750_000, 1_000_000),
    "n_out": (100, 1000, 10_000, 25_000, 50_000, 75_000, 100_000),
    "d_inp": (1024, 4096, 8192, 12_288, 16_384),
    "d_out": (1024, 4096, 8192, 12_288, 16_384),
    "n_iters": (2, 4, 6, 8, 10),
}
SHORT_AXES = {
    "n_inp": (100, 2000, 4000),
    "n_out": (100, 1000, 2000),
    "d_inp": (256, 512, 1024),
    "d_out": (256, 512, 1024),
    "n_iters": (2, 6, 10),
}
# Sizes that keep a GPU busy: for each axis, the sizes that stay the same, and the values of the axis.
BUSY_AXES = {
    "n_inp": ({}, (250_000, 500_000, 750_000, 1_000_000)),
    "n_out": ({}, (25_000, 50_000, 75_000, 100_000)),
    "d_inp": ({"n_inp": 100_000}, (1024, 4096, 8192, 12_288, 16_384)),
    "d_out": ({"n_out": 20_000}, (1024, 4096, 8192, 12_288, 16_384)),
    "n_iters": ({"n_inp": 100_000}, (2, 4, 6, 8, 10)),
}
QUANTITIES = ("parameters", "forward_ms", "both_ms", "forward_mb", "both_mb")


def cases(options: argparse.Namespace) -> list[tuple[str, Case, list[str]]]:
    """Return name, sizes and modes of every requested case."""
    cuda = common.is_cuda(options.device)
    modes = options.modes or (["fp32", "tf32", "bf16"] if cuda else ["fp32"])
    d = 256 if options.short else 1024
    baseline = Case(d_inp=d, d_out=d)
    million = 10_000 if options.short else 1_000_000
    found = []
    if "axes" in options.cases:
        axes = SHORT_AXES if options.short else AXES
        axis_modes = options.modes or (["tf32"] if cuda else ["fp32"])
        found += [
            (axis, replace(baseline, **{axis: value}), axis_modes)
            for axis in options.axes
            for value in axes[axis]
        ]
    if "busy" in options.cases:
        found += [
            (f"busy {axis}", replace(baseline, **fixed, **{axis: value}), options.modes or modes[:1])
            for axis, (fixed, values) in BUSY_AXES.items()
            if axis in options.axes
            for value in values
        ]
    if "headline" in options.cases:
        found += [("headline", replace(baseline, n_inp=million, variable=v), modes) for v in (False, True)]
    if "longest" in options.cases:
        longest = replace(baseline, n_inp=896 if options.short else 89_600, n_out=64, variable=True)
        found.append(("longest", longest, modes))
    if "ten-million" in options.cases:
        ten_million = replace(baseline, n_inp=10 * million, variable=True)
        found.append(("ten-million", ten_million, options.modes or ["bf16-stored"]))
    return found


def routing_and_input(case: Case, name: str, options: argparse.Namespace, mode: str, *, tiny: bool = False):
    if tiny:
        case = replace(case, n_inp=8, n_out=4, d_inp=16, d_out=16)
    model = common.routing(case, name, options.against, options.device).to(common.element_type(mode))
    return model, common.random_input(case.shape, mode, options.device)


def measure(case: Case, name: str, mode: str, options: argparse.Namespace) -> dict[str, object]:
    """Return parameters, times and peaks of one implementation; None each if memory is too small."""
    size = torch.finfo(common.element_type(mode)).bits // 8
    # The reference and the official implementation store several i x j matrices and copies of x.
    room = 1.1 if name in ("chunked", "fused") else 3
    if room * floor.memory(case)[1] * size / MB > common.available_mb(options.device):
        return {**dict.fromkeys(QUANTITIES), "note": "not enough memory"}
    build = partial(routing_and_input, case, name, options, mode)
    try:
        with common.product_precision(mode):
            model, x_inp = build()
            runs = common.passes(model, x_inp, mode, options.device)
            ms = common.time_ms(runs, options.device, options.seconds)
            mb = common.peaks_mb(build, model, x_inp, mode, options.device)
    except torch.OutOfMemoryError:
        return {**dict.fromkeys(QUANTITIES), "note": "out of memory"}
    values = (common.count(model), ms["forward"], ms["both"], mb["forward"], mb["both"])
    return {**dict(zip(QUANTITIES, values, strict=True)), "note": ""}


def floors(case: Case, mode: str, flops_per_s: float, bytes_per_s: float) -> dict[str, float]:
    size = torch.finfo(common.element_type(mode)).bits // 8
    forward_ms, both_ms = floor.floor_ms(
        case, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, element_size=size
    )
    forward_mb, both_mb = (elements * size / MB for elements in floor.memory(case))
    return {
        "floor_forward_ms": forward_ms,
        "floor_both_ms": both_ms,
        "floor_forward_mb": forward_mb,
        "floor_both_mb": both_mb,
        "matmul_tflops": flops_per_s / 1e12,
        "copy_gb_s": bytes_per_s / 1e9,
    }


def speedups(row: dict, official: dict | None) -> dict[str, float | None]:
    """Return how many times faster a row is than the official implementation, if both were measured."""
    return {
        f"{which}_speedup": official[f"{which}_ms"] / row[f"{which}_ms"]
        if official and official[f"{which}_ms"] and row[f"{which}_ms"]
        else None
        for which in common.WHICH
    }


def fit(rows: list[dict], axis: str) -> list[dict[str, object]]:
    """Fit quantity = intercept + slope * axis by least squares, for each implementation and mode."""
    fits = []
    for name, mode in dict.fromkeys((row["implementation"], row["mode"]) for row in rows):
        mine = [row for row in rows if (row["implementation"], row["mode"]) == (name, mode)]
        for quantity in QUANTITIES:
            points = [(row[axis], row[quantity]) for row in mine if row[quantity] is not None]
            x, y = zip(*points, strict=True) if points else ((), ())
            if len(set(x)) < 3:
                continue
            slope, intercept = statistics.linear_regression(x, y)
            r2 = statistics.correlation(x, y) ** 2 if len(set(y)) > 1 else 1.0  # a constant has a perfect fit
            fits.append(
                {"axis": axis, "implementation": name, "mode": mode, "quantity": quantity, "points": len(x)}
                | {"slope": float(slope), "intercept": float(intercept), "r2": f"{r2:.6f}"}
            )
    return fits


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    common.add_layer_options(parser)
    cases_known = ("axes", "headline", "longest", "busy", "ten-million")
    parser.add_argument("--cases", nargs="+", choices=cases_known, default=cases_known[:2])
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    about = common.about(options.device)
    names = common.implementations(options, common.IMPLEMENTATIONS)
    bytes_per_s = common.copy_rate(options.device)
    flops_per_s: dict[str, float] = {}
    rows: list[dict] = []
    for case_name, case, modes in cases(options):
        for mode in modes:
            if mode not in flops_per_s:
                flops_per_s[mode] = common.matmul_rate(mode, options.device)
            official = None
            for name in names:
                figures = measure(case, name, mode, options)
                official = figures if name == "official" else official
                row = {"case": case_name, **case.columns, "implementation": name, "mode": mode, **figures}
                row |= {
                    **speedups(figures, official),
                    **floors(case, mode, flops_per_s[mode], bytes_per_s),
                    **about,
                }
                rows.append(row)
                common.append(options.results / "scaling.csv", [row])
                report(row)
    for case_name in dict.fromkeys(row["case"] for row in rows):
        axis = case_name.removeprefix("busy ")
        fits = fit([row for row in rows if row["case"] == case_name], axis) if axis in AXES else []
        if fits:
            lines = [{"case": case_name, **line, **about} for line in fits]
            common.append(options.results / "scaling_fits.csv", lines)
        for line in fits:
            print(f"{case_name} {line['implementation']} {line['mode']} {line['quantity']}: R^2 {line['r2']}")


def report(row: dict) -> None:
    sizes = f"{row['n_inp']} x {row['d_inp']} -> {row['n_out']} x {row['d_out']}, {row['n_iters']}"
    line = f"{row['case']:12} {sizes:34} {row['length']:8} {row['mode']:5} {row['implementation']:9}"
    line += row["note"]
    for which in common.WHICH:
        if row[f"{which}_ms"]:
            times = row[f"{which}_ms"] / row[f"floor_{which}_ms"]
            memory = row[f"{which}_mb"] / row[f"floor_{which}_mb"]
            line += f" {which} {row[f'{which}_ms']:.3g} ms ({times:.2f} floor)"
            line += f" {row[f'{which}_mb']:.4g} MB ({memory:.3f} floor);"
    if row["both_speedup"]:
        line += f" {row['forward_speedup']:.2f}x / {row['both_speedup']:.2f}x"
    print(line, flush=True)


if __name__ == "__main__":
    main()
