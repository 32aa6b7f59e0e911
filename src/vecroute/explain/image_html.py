"""Write explanations of images as self-contained HTML, with the image inside the page."""

import base64
import io
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from vecroute.explain.html import (
    STYLE,
    bars,
    colour,
    depths,
    environment,
    frame,
    page_numbers,
    questions_about,
)
from vecroute.explain.shown import caption, shown
from vecroute.explain.told import Question, asked, chance
from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.image import ImageExplanation

WIDTH = 384  # width of the image on the page, in pixels
EXACT_PIXELS = 128 * 128  # larger images are stored as JPEG
CELL = 8  # width of a patch in the map of a depth, in pixels


def page(
    explanation: "ImageExplanation",
    unit: str = "region",
    outputs: Sequence[Any] | None = None,
    states: "ImageExplanation | None" = None,
) -> str:
    """Return a complete page, with the hidden states of the image if these are given."""
    part = content(explanation, unit, outputs, "v0", states)
    return environment().get_template("image_page.html").render({"part": part, "heading": "h1", **STYLE})


def fragment(
    explanation: "ImageExplanation", unit: str = "region", outputs: Sequence[Any] | None = None
) -> str:
    """Return a part of a page, such as the output of a cell of a notebook."""
    part = content(explanation, unit, outputs, f"v{next(page_numbers)}")
    return environment().get_template("image.html").render({"part": part, "heading": "p", **STYLE})


def content(
    explanation: "ImageExplanation",
    unit: str,
    outputs: Sequence[Any] | None,
    prefix: str,
    states: "ImageExplanation | None" = None,
) -> dict[str, Any]:
    """Return the values for the template of a fragment. All its element ids begin with the prefix."""
    rows = explanation.aggregate(unit) if explanation.unit == "patch" else explanation
    questions = questions_about(explanation, outputs)
    second = explanation if states is None else states
    compared = list(dict.fromkeys(question.output for question in questions))[:2]
    grids = [explanation.grid(name) for name in compared]  # [rows, columns] each
    largest = max(float(abs(grid).max()) for grid in grids)
    name = PurePath(
        explanation.text
    ).name  # a page may be shared, so it does not show the folders of this machine
    around = frame(explanation, rows.unit, questions, prefix, second)
    return around | {
        "title": caption(name, 60),
        "about": around["about"] | {"Text": None, "Image": caption(name, 160)},
        "image": data_uri(explanation.image),
        "size": explanation.size,
        "shown": size_on_page(explanation.size, WIDTH),
        "map_size": (CELL * explanation.cells.shape[1], CELL * explanation.cells.shape[0]),
        "outline": outline(rows),
        "labels": labels(rows),
        "panels": [panel(explanation, rows, second, question) for question in questions],
        "compared": [
            {"name": caption(name, 100), "tiles": tiles(explanation, grid, largest)}
            for name, grid in zip(compared, grids, strict=True)
        ],
    }


def size_on_page(size: Sequence[int], most: int) -> tuple[int, int]:
    """Return width and height of an image on the page: at most ``most`` wide and 2 ``most`` high."""
    scale = min(most / size[0], 2 * most / size[1])
    return max(1, round(scale * size[0])), max(1, round(scale * size[1]))


def data_uri(image: np.ndarray) -> str:
    """Encode an image [height, width, 3] as a data: address."""
    buffer = io.BytesIO()
    kind = "png" if image.shape[0] * image.shape[1] <= EXACT_PIXELS else "jpeg"
    require("PIL.Image", "images").fromarray(image).save(buffer, kind)
    return f"data:image/{kind};base64," + base64.b64encode(buffer.getvalue()).decode()


def outline(rows: "ImageExplanation") -> str:
    """Return an SVG path along the borders between regions."""
    if rows.unit != "region":
        return ""
    path, cells = "", rows.cells
    for (y, x), row in np.ndenumerate(cells):
        left, top, right, bottom = rows.tiles[y, x].round(2).tolist()
        if x + 1 < cells.shape[1] and cells[y, x + 1] != row:
            path += f"M{right:g} {top:g}V{bottom:g}"
        if y + 1 < cells.shape[0] and cells[y + 1, x] != row:
            path += f"M{left:g} {bottom:g}H{right:g}"
    return path


def labels(rows: "ImageExplanation") -> list[dict[str, Any]]:
    """Return the name of each region, placed on the patch nearest to its middle."""
    found: list[dict[str, Any]] = []
    for row in np.unique(rows.cells[rows.cells >= 0]) if rows.unit == "region" else []:
        middles = (rows.tiles[rows.cells == row][:, :2] + rows.tiles[rows.cells == row][:, 2:]) / 2  # [n, 2]
        x, y = middles[abs(middles - middles.mean(0)).sum(1).argmin()].tolist()
        found.append(
            {
                "x": round(x, 2),
                "y": round(y, 2),
                "text": caption(rows.pieces[row].removeprefix("region "), 20),
            }
        )
    return found


def panel(
    explanation: "ImageExplanation",
    rows: "ImageExplanation",
    second: "ImageExplanation",
    question: Question,
) -> dict[str, Any]:
    """Return the values for the answer to one question: patches, the account of the score, and depths."""
    one, by_patch, by_state = (asked(why, question) for why in (rows, explanation, second))
    numbers = shown(one)
    by_depth = by_state.aggregate("depth")
    grid = by_patch.grid()  # [rows, columns]
    return {
        "title": question.title,
        "score": numbers.number(numbers.score),
        "chance": chance(explanation, question),
        "tiles": tiles(explanation, grid, float(abs(grid).max())),
        "strongest": f"{abs(grid).max():.3g}",
        "bars": bars(one, numbers),
        "profile_width": 0,
        "depths": depths(by_depth, shown(by_depth, decimals=numbers.decimals)) if len(by_depth) > 1 else [],
        "maps": maps(by_state) if len(by_state.depths) > 1 else [],
    }


def tiles(explanation: "ImageExplanation", grid: np.ndarray, largest: float) -> list[dict[str, Any]]:
    """Return the visible patches, each with its box, its colour and its number."""
    return [
        {
            "box": [round(float(side), 2) for side in (left, top, right - left, bottom - top)],
            "colour": shade,
            "number": f"{value:+.3g}",
        }
        for place, value in np.ndenumerate(grid)
        for left, top, right, bottom in [explanation.tiles[place].tolist()]
        if (shade := colour(float(value), largest)) and right > left and bottom > top
    ]


def maps(explanation: "ImageExplanation") -> list[dict[str, Any]]:
    """Return the map of patches at each depth, the embeddings first, all on one scale."""
    grids = [explanation.grid(level=level) for level in range(len(explanation.depths))]
    largest = max(float(abs(grid).max()) for grid in grids)
    return [
        {"name": name, "paths": squares(grid, largest)}
        for name, grid in zip(explanation.depth_names, grids, strict=True)
    ]


def squares(grid: np.ndarray, largest: float) -> dict[str, str]:
    """Return one SVG path for each colour, and one for the dashes that mark negative patches."""
    paths: dict[str, str] = {}
    side = CELL - 1
    for (y, x), value in np.ndenumerate(grid):
        shade = colour(float(value), largest)
        if shade:
            paths[shade] = paths.get(shade, "") + f"M{x * CELL} {y * CELL}h{side}v{side}h-{side}z"
            if value < 0 and abs(value) > largest / 4:
                paths["dash"] = paths.get("dash", "") + f"M{x * CELL + 2} {y * CELL + CELL / 2 - 0.5}h3"
    return dict(sorted(paths.items(), key=lambda item: item[0] == "dash"))
