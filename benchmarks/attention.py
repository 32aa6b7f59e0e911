"""Routing against self-attention, as in the paper: ``python benchmarks/attention.py``.

VectorRouting with n_inp = n_out = N, d_inp = d_out = 1024 and 2 iterations, beside nn.TransformerEncoderLayer
with 8 heads, dim_feedforward 2048, no dropout and PyTorch's fused attention, over N vectors of that size:
parameters, peak memory, time of forward and of forward + backward, in the same precision.

Rows are appended to attention.csv; to attention_crossovers.csv, for each quantity, up to which N the routing
needs less.
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


def measure(n: int, name: str, mode: str, options: argparse.Namespace) -> dict[str, float]:
    build = partial(model_and_input, n, name, options, mode)
    with common.product_precision(mode):
        model, x_inp = build()
        ms = common.time_ms(
            common.passes(model, x_inp, mode, options.device), options.device, options.seconds
        )
        mb = common.peaks_mb(build, model, x_inp, mode, options.device)
    values = (common.count(model), ms["forward"], ms["both"], mb["forward"], mb["both"])
    return dict(zip(QUANTITIES, values, strict=True))


def crossovers(rows: list[dict], name: str, mode: str) -> list[dict[str, object]]:
    """The N at which the routing stops to need less than the encoder layer, by powers between the lengths.

    ``below`` where it needs more at the shortest length, ``above`` where it needs less at the longest.
    """
    mine = {row["N"]: row for row in rows if (row["model"], row["mode"]) == (name, mode)}
    encoder = {row["N"]: row for row in rows if (row["model"], row["mode"]) == ("encoder", mode)}
    found = []
    for quantity in QUANTITIES:
        logs = [(n, math.log(mine[n][quantity] / encoder[n][quantity])) for n in sorted(mine)]
        if any(math.isnan(log) for _, log in logs):
            continue  # no memory figures on this system
        more = next((k for k, (_, log) in enumerate(logs) if log > 0), None)
        if more is None:
            relation, at = "above", float(logs[-1][0])
        elif more == 0:
            relation, at = "below", float(logs[0][0])
        else:
            (n_1, log_1), (n_2, log_2) = logs[more - 1], logs[more]
            relation, at = "at", n_1 * (n_2 / n_1) ** (log_1 / (log_1 - log_2))
        found.append({"model": name, "mode": mode, "quantity": quantity, "relation": relation, "N": at})
    return found


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
                row = {"N": n, "d": options.d, "model": name, "mode": mode}
                rows.append({**row, **measure(n, name, mode, options), **about})
                common.append(options.results / "attention.csv", rows[-1:])
                report(rows[-1])
        for name in names[1:]:
            found = crossovers(rows, name, mode)
            common.append(options.results / "attention_crossovers.csv", [{**row, **about} for row in found])
            for row in found:
                print(f"{name} {mode}: less {row['quantity']} up to N {row['relation']} {row['N']:.0f}")


def report(row: dict) -> None:
    line = f"N {row['N']:6} {row['mode']:5} {row['model']:9} {row['parameters'] / 1e6:.3g} M parameters"
    for which in common.WHICH:
        line += f", {which} {row[f'{which}_ms']:.3g} ms {row[f'{which}_mb']:.4g} MB"
    print(line, flush=True)


if __name__ == "__main__":
    main()
