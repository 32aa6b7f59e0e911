"""Draw explanations of images with matplotlib: colours on the image, and a map of patches at each depth."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vecroute.explain import plots
from vecroute.explain.plots import DOWN, GROUND, UP
from vecroute.explain.shown import caption
from vecroute.ops.checks import check_choice
from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.image import ImageExplanation

KINDS = ("overlay", "map", "compare", "bars")
SHEET_DEPTHS = 5  # depths that get their own map on a sheet
MOST_OPAQUE = 0.75  # opacity of the strongest patch, so that the image stays visible


def plot(
    explanation: "ImageExplanation",
    kind: str = "overlay",
    *,
    output: Any = None,
    other: Any = None,
    of: str = "values",
    k: int = 20,
    ax: Any = None,
) -> tuple[Any, Any]:
    """Return the figure and the axes that were drawn on; see ``ImageExplanation.plot``."""
    check_choice("kind", kind, KINDS)
    check_choice("of", of, ("values", "phi"))
    if ax is None:
        pyplot = require("matplotlib.pyplot", "plot")
        _, ax = pyplot.subplots(1, columns(kind), figsize=size(explanation, kind, k), layout="constrained")
    draw(explanation, kind, output, other, of, k, ax)
    return (ax[0] if kind == "compare" else ax).figure, ax


def png(explanation: "ImageExplanation", kind: str = "overlay", dpi: int = 150, **options: Any) -> bytes:
    """Return the figure of ``plot`` as the bytes of a PNG file."""
    figure = require("matplotlib.figure", "plot").Figure(
        figsize=size(explanation, kind, options.get("k", 20)), layout="constrained"
    )
    plot(explanation, kind, ax=figure.subplots(1, columns(kind)), **options)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def sheet(explanations: Sequence["ImageExplanation"], titles: Sequence[str], dpi: int = 100) -> bytes:
    """Draw several images, one per line, and return the bytes of a PNG file.

    Each line shows what the patches add to the highest score: first summed over depth, then at some depths.
    The depths of a line share a scale.
    """
    depth = len(explanations[0].depths)
    apart = SHEET_DEPTHS if depth > 1 else 0  # with one depth, its map is the sum
    some = np.unique(np.linspace(0, depth - 1, apart).round().astype(int))
    across, down = 2 + len(some), len(explanations)
    figure = require("matplotlib.figure", "plot").Figure((1.35 * across, 1.5 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for row, (why, title, line) in enumerate(zip(explanations, titles, axes, strict=True)):
        line[0].imshow(why.image, extent=(0, why.size[0], why.size[1], 0), interpolation="nearest")
        line[0].set_title(title, parse_math=False, fontsize=7)
        line[0].set_axis_off()
        grids = [why.grid(), *(why.grid(level=level) for level in some)]  # [rows, columns] each
        largest = max((float(abs(grid).max()) for grid in grids[1:]), default=0.0) or 1.0
        names = ["all depths", *(why.depth_names[level] for level in some)]
        for k, (ax, grid, name) in enumerate(zip(line[1:], grids, names, strict=True)):
            draw_overlay(ax, why, grid, largest if k else float(abs(grid).max()) or 1.0)
            ax.set_title("" if row else name, parse_math=False, fontsize=7)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def columns(kind: str) -> int:
    return 2 if kind == "compare" else 1


def size(explanation: "ImageExplanation", kind: str, k: int) -> tuple[float, float]:
    """Return width and height in inches."""
    if kind == "bars":
        return plots.size(explanation, kind, k)
    if kind == "map":
        across, down = layout(len(explanation.depths))
        return 1.2 + 1.3 * across, 0.6 + 1.5 * down
    shape = explanation.size[1] / explanation.size[0]
    return 4.6 * columns(kind), min(max(4.0 * shape, 2.0), 12.0) + 0.5


def layout(n: int) -> tuple[int, int]:
    """Return the numbers of columns and rows for n maps."""
    across = math.ceil(math.sqrt(1.6 * n))
    return across, math.ceil(n / across)


def draw(
    explanation: "ImageExplanation", kind: str, output: Any, other: Any, of: str, k: int, ax: Any
) -> None:
    """Draw on the axes; "compare" needs two of them."""
    if kind == "bars":
        plots.draw_bars(ax, explanation, output, k)
        return
    if kind == "map":
        draw_map(ax, explanation, output, of)
        return
    names = [output] if kind == "overlay" else two_classes(explanation, output, other)
    grids = [strength(explanation.grid(name, of), of) for name in names]  # [rows, columns] each
    largest = max(float(abs(grid).max()) for grid in grids) or 1.0
    for axes, name, grid in zip(ax if kind == "compare" else [ax], names, grids, strict=True):
        draw_overlay(axes, explanation, grid, largest)
        j = explanation.index(name)
        title = f"{caption(explanation.output_names[j])}: {explanation.scores[j]:.3g}"
        axes.set_title(title, parse_math=False, fontsize=10)


def two_classes(explanation: "ImageExplanation", output: Any, other: Any) -> list[str]:
    """Return the names of the two classes to compare."""
    first = explanation.index(output)
    ranked = [j for j in np.argsort(-explanation.scores, kind="stable") if j != first]
    if not ranked:
        raise ValueError(
            f"compare needs two classes, this explains {explanation.output_names[first]!r} alone"
        )
    second = ranked[0] if other is None else explanation.index(other)
    return [explanation.output_names[first], explanation.output_names[second]]


def strength(grid: np.ndarray, of: str) -> np.ndarray:
    """Return contributions unchanged, and the absolute value of credit, as in the paper."""
    return abs(grid) if of == "phi" else grid


def draw_overlay(ax: Any, explanation: "ImageExplanation", grid: np.ndarray, largest: float) -> None:
    """Draw the image and colour each patch by its strength. Patches that lower the score are hatched."""
    width, height = explanation.size
    grey = explanation.image.mean(-1)  # [height, width], so that all colours come from the patches
    ax.imshow(grey, extent=(0, width, height, 0), interpolation="nearest", cmap="gray", vmin=-80, vmax=300)
    rectangle = require("matplotlib.patches", "plot").Rectangle
    for place, value in np.ndenumerate(grid):
        left, top, right, bottom = explanation.tiles[place]
        share = min(abs(value) / largest, 1.0)
        if share < 0.02 or right <= left or bottom <= top:
            continue
        marked = {"hatch": "///", "edgecolor": (0, 0, 0, 0.35)} if value < 0 and share > 0.25 else {}
        patch = rectangle((left, top), right - left, bottom - top, **{"edgecolor": "none", **marked})
        patch.set_facecolor((*colour(UP if value > 0 else DOWN), MOST_OPAQUE * share))
        patch.set_linewidth(0)
        patch.set_antialiased(False)  # no seams between patches
        ax.add_patch(patch)
    ax.set_axis_off()


def colour(name: str) -> tuple[float, float, float]:
    return require("matplotlib.colors", "plot").to_rgb(name)


def draw_map(ax: Any, explanation: "ImageExplanation", output: Any, of: str) -> None:
    """Draw a map of all patches for each depth, embeddings first, in reading order."""
    rows, n_columns = explanation.cells.shape
    across, down = layout(len(explanation.depths))
    sheet = np.full((down * (rows + 2), across * (n_columns + 1)), np.nan)
    for level, name in enumerate(explanation.depth_names):
        top, left = (level // across) * (rows + 2) + 1, (level % across) * (n_columns + 1)
        sheet[top : top + rows, left : left + n_columns] = strength(explanation.grid(output, of, level), of)
        ax.text(left - 0.4, top - 0.7, name, fontsize=7, va="bottom", parse_math=False)
    largest = float(np.nanmax(abs(sheet))) or 1.0
    colours = require("matplotlib.colors", "plot").LinearSegmentedColormap.from_list
    signed = of == "values"
    scale = colours("", [DOWN, GROUND, UP] if signed else [GROUND, UP])
    image = ax.imshow(sheet, cmap=scale, vmin=-largest if signed else 0.0, vmax=largest, interpolation="none")
    # A dash marks patches that lower the score, so that the map can be read without colours.
    y, x = np.nonzero(sheet < -largest / 4)
    ax.scatter(x, y, marker="_", color="black", s=8, linewidths=0.6)
    ax.set_axis_off()
    what = "contribution to the score" if signed else "absolute credit"
    name = caption(explanation.output_names[explanation.index(output)])
    ax.set_title(f"{what} of {name}", parse_math=False, fontsize=10)
    ax.figure.colorbar(image, ax=ax, fraction=0.03, pad=0.02)
