"""Draw figures from the CSV files of results: ``python benchmarks/plots.py``.

scaling.png     parameters, peak memory and time over each size, from scaling.csv
attention.png   the same compared with a Transformer encoder layer, from attention.csv

If a row was measured twice, the later one counts. ``--device H200`` draws the rows of devices whose name
contains H200. The default is the device of the last row.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

RESULTS = Path(__file__).parent / "results"
PASSES = {"forward": "forward", "both": "forward + backward"}
LOOKS = {  # label, colour, marker, width of the line
    "official": ("official implementation", "#9a9a9a", "s", 1.6),
    "reference": ("reference", "#e69f00", "^", 1.6),
    "chunked": ("chunked", "#009e73", "D", 1.6),
    "fused": ("fused", "#0072b2", "o", 2.4),
    "encoder": ("encoder layer", "#d55e00", "s", 2.0),
}
AXES = {
    "n_inp": "$n_{inp}$",
    "n_out": "$n_{out}$",
    "d_inp": "$d_{inp}$",
    "d_out": "$d_{out}$",
    "n_iters": "iterations",
}
STYLE = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.edgecolor": "#888888",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "lines.markersize": 4.5,
    "legend.frameon": False,
}


def read(path: Path, device: str | None) -> list[dict[str, str]]:
    """Return the rows of one device."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    device = device or rows[-1]["device"]
    return [row for row in rows if device in row["device"]]


def points(rows: list[dict[str, str]], x: str, y: str) -> tuple[list[float], list[float]]:
    """Return x and y of the rows that have y, in order of x. The later of two rows with the same x counts."""
    found = {float(row[x]): float(row[y]) for row in rows if row[y]}
    return sorted(found), [found[key] for key in sorted(found)]


def quantities(which: str) -> dict[str, tuple[str, str, float]]:
    """Return column, column of its floor, and divisor of the unit, by the label of the panel."""
    name = PASSES[which]
    return {
        "parameters (millions)": ("parameters", "", 1e6),
        f"peak memory (GB)\n{name}": (f"{which}_mb", f"floor_{which}_mb", 1e9 / 2**20),
        f"time (ms)\n{name}": (f"{which}_ms", f"floor_{which}_ms", 1.0),
    }


def draw(panel: Axes, rows: list[dict[str, str]], who: str, x: str, y: str, unit: float) -> None:
    """Draw a line for each implementation or model, named in the column ``who``."""
    for name, (label, colour, marker, width) in LOOKS.items():
        xs, ys = points([row for row in rows if row[who] == name], x, y)
        if xs:
            scaled = [value / unit for value in ys]
            panel.plot(xs, scaled, color=colour, marker=marker, linewidth=width, label=label)


def scaling(rows: list[dict[str, str]], which: str) -> Figure:
    """Draw three quantities over five sizes, as in the paper's figure, with floors of memory and time."""
    figure, panels = plt.subplots(3, 5, figsize=(15, 8), sharey=False, constrained_layout=True)
    for column, (axis, label) in enumerate(AXES.items()):
        mine = [row for row in rows if row["case"] == axis]
        for panel, (title, (y, floor, unit)) in zip(
            panels[:, column], quantities(which).items(), strict=True
        ):
            draw(panel, mine, "implementation", axis, y, unit)
            if floor:
                xs, ys = points(mine, axis, floor)
                scaled = [value / unit for value in ys]
                panel.plot(xs, scaled, color="black", linestyle=":", linewidth=1.6, label="floor", zorder=5)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            panel.locator_params(nbins=5)
            if column == 0:
                panel.set_ylabel(title)
        panels[0, column].set_title(label)
    finish(figure, panels[-1, 0])
    return figure


def attention(rows: list[dict[str, str]], crossovers: list[dict[str, str]], which: str) -> Figure:
    """Draw three quantities over the length, with a row per precision, and mark the crossovers.

    Times are from captured passes if there are such rows, because launches dominate short eager passes.
    """
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    size = (13, 0.9 + 3.3 * len(modes))
    figure, panels = plt.subplots(len(modes), 3, figsize=size, squeeze=False, constrained_layout=True)
    best = [row["model"] for row in crossovers][-1:]
    at = {(row["mode"], row["launch"], row["quantity"]): row for row in crossovers if row["model"] in best}
    captured = "captured" if any(row["launch"] == "captured" for row in rows) else "eager"
    for line, mode in zip(panels, modes, strict=True):
        for panel, (title, (y, _, unit)) in zip(line, quantities(which).items(), strict=True):
            launch = captured if y.endswith("ms") else "eager"
            drawn = [row for row in rows if (row["mode"], row["launch"]) == (mode, launch)]
            draw(panel, drawn, "model", "N", y, unit)
            title = title.replace("\n", ", ") + (", captured" if launch == "captured" else "")
            panel.set(xscale="log", yscale="log", xlabel="N", title=title)
            if (found := at.get((mode, launch, y))) and found["relation"] == "at":
                mark(panel, float(found["N"]))
            for side, steps in ((panel.xaxis, (1, 2, 4)), (panel.yaxis, (1, 2, 5))):
                side.set_major_locator(LogLocator(subs=steps))
                side.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
                side.set_minor_formatter(NullFormatter())
        line[0].set_ylabel(mode, fontsize=13, fontweight="bold")
    finish(figure, panels[0, -1])
    return figure


def mark(panel: Axes, n: float) -> None:
    """Draw a vertical line at a crossover, labelled with its sequence length."""
    panel.axvline(n, color="#555555", linewidth=1, linestyle="--")
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 9}
    panel.annotate(f"{n:,.0f}", (n, 0.03), xytext=(4, 0), color="#555555", **place)


def finish(figure: Figure, panel: Axes) -> None:
    """Add one legend, with the lines of the panel, below all panels."""
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=12)


def short(value: float) -> str:
    """Abbreviate a number: 1000 is 1k, a million is 1M."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files and figures")
    parser.add_argument("--device", help="part of the name of the device")
    parser.add_argument("--mode", help="precision in scaling.png; default: the precision of the last row")
    parser.add_argument("--which", choices=PASSES, default="both", help="the pass to draw")
    options = parser.parse_args(arguments)
    results, device = options.results, options.device
    with plt.rc_context(STYLE):
        rows = [row for row in read(results / "scaling.csv", device) if row["case"] in AXES]
        if rows:
            mode = options.mode or rows[-1]["mode"]
            figure = scaling([row for row in rows if row["mode"] == mode], options.which)
            save(figure, results / "scaling.png", f"{rows[-1]['device']}, {mode}")
        else:
            print("no scaling.png: scaling.csv has no rows for this device")
        rows = read(results / "attention.csv", device)
        crossovers = read(results / "attention_crossovers.csv", device)
        if rows:
            save(attention(rows, crossovers, options.which), results / "attention.png", rows[-1]["device"])
        else:
            print("no attention.png: attention.csv has no rows for this device")


def save(figure: Figure, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=12, color="#555555")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


if __name__ == "__main__":
    main()
