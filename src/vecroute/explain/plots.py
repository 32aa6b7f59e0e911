"""Draw explanations with matplotlib: the map of rows and depths, and bars that add up to the score."""

import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from vecroute.explain.shown import account, caption, shown
from vecroute.ops.checks import check_choice
from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

UP, DOWN, GROUND = "#2166ac", "#d97008", "#f3f4f6"
MOST_LABELS = 80  # more labels would be too small to read


def plot(
    explanation: "Explanation",
    kind: str = "map",
    *,
    output: Any = None,
    of: str = "values",
    k: int = 20,
    ax: Any = None,
) -> tuple[Any, Any]:
    """Return the figure and the axes that were drawn on; see ``Explanation.plot``."""
    check_choice("kind", kind, ("map", "bars"))
    check_choice("of", of, ("values", "phi"))
    if ax is None:
        _, ax = require("matplotlib.pyplot", "plot").subplots(
            figsize=size(explanation, kind, k), layout="constrained"
        )
    if kind == "map":
        draw_map(ax, explanation, output, of)
    else:
        draw_bars(ax, explanation, output, k)
    return ax.figure, ax


def png(explanation: "Explanation", kind: str = "map", dpi: int = 150, **options: Any) -> bytes:
    """Return the figure of ``plot`` as the bytes of a PNG file."""
    figure = require("matplotlib.figure", "plot").Figure(
        figsize=size(explanation, kind, options.get("k", 20)), layout="constrained"
    )
    plot(explanation, kind, ax=figure.subplots(), **options)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def size(explanation: "Explanation", kind: str, k: int) -> tuple[float, float]:
    """Return width and height in inches, with room for every label."""
    n, depth, _ = explanation.values.shape
    if kind == "map":
        return 2.5 + 0.22 * min(max(n, 8), MOST_LABELS), 1.8 + 0.2 * depth
    return 7.0, 1.2 + 0.25 * (min(n, k) + 3)


def draw_map(ax: Any, explanation: "Explanation", output: Any, of: str) -> None:
    """Draw rows from left to right and depths from the embeddings up, without special tokens."""
    name = explanation.output_names[explanation.index(output)]
    rows = explanation if explanation.special.all() else explanation.skip_special_tokens()
    if not len(rows):
        raise ValueError("plot needs at least one row, the explanation has none")
    array = chosen(rows, of)  # [n, depth, n_cls]
    cells = array[..., rows.index(name)].T  # [depth, n]
    largest = float(abs(cells).max()) or 1.0
    colours = require("matplotlib.colors", "plot").LinearSegmentedColormap.from_list("", [DOWN, GROUND, UP])
    image = ax.imshow(
        cells, cmap=colours, vmin=-largest, vmax=largest, aspect="auto", origin="lower", interpolation="none"
    )
    # A dash marks cells that lower the score, so that the map can be read without colours.
    y, x = np.nonzero(cells < -largest / 4)
    ax.scatter(x, y, marker="_", color="black", s=16, linewidths=0.8)
    step = math.ceil(len(rows) / MOST_LABELS)
    labels = [caption(rows.label(i), 20) for i in range(0, len(rows), step)]
    ax.set_xticks(range(0, len(rows), step), labels, rotation=90, parse_math=False, fontsize=8)
    ax.set_yticks(range(len(cells)), rows.depth_names, parse_math=False, fontsize=8)
    what = "contribution to the score" if of == "values" else "credit"
    ax.set_title(f"{what} of {caption(name)}", parse_math=False, fontsize=10)
    ax.figure.colorbar(image, ax=ax, fraction=0.03, pad=0.02)


def chosen(explanation: "Explanation", of: str) -> np.ndarray:
    """Return contributions or credit, [n, depth, n_cls].

    Raises:
        ValueError: the explanation has no credit.
    """
    if of not in explanation.by_row:
        raise ValueError("of='phi' needs credit: explain a head of routings with of='states'")
    return explanation.by_row[of]


def draw_bars(ax: Any, explanation: "Explanation", output: Any, k: int) -> None:
    """Draw the largest contributions first, then the sum of the others, so that the numbers add up."""
    numbers = shown(explanation, output)
    lines = account(explanation, numbers, k)
    values = [line.value * 10.0**-numbers.decimals for line in lines]
    drawn = ax.barh(range(len(lines)), values, color=[UP if value > 0 else DOWN for value in values])
    for rectangle, value in zip(drawn, values, strict=True):
        rectangle.set_hatch("///" if value < 0 else "")
    ax.bar_label(drawn, [numbers.number(line.value, "+") for line in lines], padding=3, fontsize=8)
    labels = ax.set_yticks(range(len(lines)), [line.label for line in lines], parse_math=False, fontsize=8)
    for tick, line in zip(labels, lines, strict=True):
        tick.label1.set_style("italic" if line.is_sum else "normal")
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.axvline(0, color="black", linewidth=0.8)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    name = caption(explanation.output_names[explanation.index(output)])
    ax.set_title(f"score of {name} = {numbers.number(numbers.score)}", parse_math=False, fontsize=10)
