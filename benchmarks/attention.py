"""Routing against self-attention, as in the paper: ``python benchmarks/attention.py``.

It compares VectorRouting with n_inp = n_out = N, d_inp = d_out = 1024 and 2 iterations with an
nn.TransformerEncoderLayer over N vectors of that size (8 heads, dim_feedforward 2048, no dropout, PyTorch's
fused attention). It measures parameters, peak memory, and the time of forward and of forward + backward in
the same precision: launched kernel by kernel (eager), and on a GPU with each pass as one CUDA graph.

Rows are appended to attention.csv. attention_crossovers.csv gets, for each quantity, the N up to which
routing needs less.
"""

import argparse
import math
from functools import partial

import common
import torch
from floor import Case
from torch import nn

LENGTHS = (100, 200, 400, 600, 800, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 12_000, 16_000)
SHORT_LENGTHS = (100, 400, 1000)
QUANTITIES = ("parameters", "forward_ms", "both_ms", "forward_mb", "both_mb")


def model_and_input(n: int, name: str, options: argparse.Namespace, mode: str, *, tiny: bool = False):
    n, d = (16, 16) if tiny else (n, options.d)
    if name == "encoder":
        model = nn.TransformerEncoderLayer(d, 8, dropout=0.0, batch_first=True, device=options.device)
    else:
        case = Case(n_inp=n, n_out=n, d_inp=d, d_out=d)
        model = common.routing(case, name, options.against, options.device)
    return model.to(common.element_type(mode)), common.random_input((1, n, d), mode, options.device)


def measure(n: int, name: str, mode: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for eager passes and, on a GPU, one for captured passes. Both have the eager memory."""
    build = partial(model_and_input, n, name, options, mode)
    rows = []
    with common.product_precision(mode):
        for launch, (model, x_inp, runs) in common.launches(build, mode, options.device).items():
            ms = common.time_ms(runs, options.device, options.seconds)
            mb = dict.fromkeys(common.WHICH, math.nan)
            if launch == "eager":
                mb = common.peaks_mb(build, model, x_inp, mode, options.device)
            values = (common.count(model), ms["forward"], ms["both"], mb["forward"], mb["both"])
            rows.append({"launch": launch, **dict(zip(QUANTITIES, values, strict=True))})
    return rows


def crossovers(rows: list[dict]) -> list[dict[str, object]]:
    """Return for each quantity the N up to which routing needs less than the encoder layer.

    Between two measured lengths, quantities are interpolated as powers of N. From the measured length
    ``from_N`` up to N, routing needs less at every measured length. ``relation`` is "at", "above" if it still
    needs less at the longest length, or "never".
    """
    kinds = dict.fromkeys((row["model"], row["mode"], row["launch"]) for row in rows)
    table = {kind: {row["N"]: row for row in rows if of_kind(row, kind)} for kind in kinds}
    found = []
    for kind in (kind for kind in kinds if kind[0] != "encoder"):
        mine, encoder = table[kind], table["encoder", *kind[1:]]
        for quantity in QUANTITIES:
            logs = [(n, math.log(mine[n][quantity] / encoder[n][quantity])) for n in sorted(mine)]
            if not any(math.isnan(log) for _, log in logs):
                columns = dict(zip(("model", "mode", "launch"), kind, strict=True))
                found.append({**columns, "quantity": quantity, **crossover(logs)})
    return found


def of_kind(row: dict, kind: tuple[str, str, str]) -> bool:
    return (row["model"], row["mode"], row["launch"]) == kind


def crossover(logs: list[tuple[int, float]]) -> dict[str, object]:
    """Return the crossover of one quantity, from the logarithms of its ratios."""
    less = [k for k, (_, log) in enumerate(logs) if log < 0]
    if not less:
        return {"relation": "never", "N": None, "from_N": None}
    last = less[-1]
    first = logs[next(k for k in reversed(range(last + 1)) if k == 0 or k - 1 not in less)][0]
    if last == len(logs) - 1:
        return {"relation": "above", "N": float(logs[last][0]), "from_N": first}
    (n_1, log_1), (n_2, log_2) = logs[last : last + 2]
    return {"relation": "at", "N": n_1 * (n_2 / n_1) ** (log_1 / (log_1 - log_2)), "from_N": first}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    common.add_layer_options(parser)
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--d", type=int, help="size of vectors, 1024")
    options = parser.parse_args(arguments)
    options.d = options.d or (256 if options.short else 1024)
    torch.manual_seed(0)
    cuda = common.is_cuda(options.device)
    about = common.about(options.device)
    names = ["encoder", *common.implementations(options, ("fused",) if cuda else ("chunked",))]
    rows: list[dict] = []
    for mode in options.modes or (["tf32", "bf16"] if cuda else ["fp32"]):
        for n in options.lengths or (SHORT_LENGTHS if options.short else LENGTHS):
            for name in names:
                for figures in measure(n, name, mode, options):
                    rows.append({"N": n, "d": options.d, "model": name, "mode": mode, **figures, **about})
                    common.append(options.results / "attention.csv", rows[-1:])
                    report(rows[-1])
    found = [{**row, **about} for row in crossovers(rows)]
    if found:
        common.append(options.results / "attention_crossovers.csv", found)
    for row in found:
        kind = f"{row['model']:9} {row['mode']:5} {row['launch']:8} {row['quantity']:10}"
        print(f"{kind} less from N {row['from_N']} up to N {row['relation']} {common.written(row['N'])}")


def report(row: dict) -> None:
    line = f"N {row['N']:6} {row['mode']:5} {row['model']:9} {row['launch']:8}"
    line += f" {row['parameters'] / 1e6:.3g} M parameters"
    for which in common.WHICH:
        line += f", {which} {row[f'{which}_ms']:.3g} ms {row[f'{which}_mb']:.4g} MB"
    print(line, flush=True)


if __name__ == "__main__":
    main()
