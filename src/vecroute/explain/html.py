"""An explanation as HTML: no script, nothing from elsewhere, every piece of text escaped by jinja2."""

import itertools
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vecroute.explain.shown import Shown, account, caption, pieces, shown, strongest, visible
from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

LEVELS = 9  # strengths of a colour
N_OUTPUTS = 3  # classes explained unless others are asked for
N_BARS = 20  # rows in the list of what counts most
N_MARKED = 8  # words with their number in the text
MAP_COLUMNS, MAP_LINE = 240, 44  # most columns that a map has, and how many go side by side
CELL_WIDTH, CELL_HEIGHT = 20, 14

STYLE = {"levels": range(1, LEVELS + 1), "cell": (CELL_WIDTH, CELL_HEIGHT)}

page_numbers = itertools.count()


def page(
    explanations: "Explanation | Sequence[Explanation]",
    unit: str = "word",
    outputs: Sequence[Any] | None = None,
) -> str:
    """A whole page, for a file, about one text or several."""
    several = explanations if isinstance(explanations, Sequence) else [explanations]
    parts = [content(one, unit, outputs, f"v{k}") for k, one in enumerate(several)]
    filled = {"title": "; ".join(part["title"] for part in parts), "parts": parts}
    return environment().get_template("page.html").render(filled | STYLE)


def fragment(explanation: "Explanation", unit: str = "word", outputs: Sequence[Any] | None = None) -> str:
    """A part of a page, such as the output of a cell of a notebook."""
    part = content(explanation, unit, outputs, f"v{next(page_numbers)}")
    return environment().get_template("fragment.html").render(part | STYLE)


@cache
def environment() -> Any:
    """Where templates come from, and how they are filled in."""
    jinja2 = require("jinja2", "report")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def content(
    explanation: "Explanation", unit: str, outputs: Sequence[Any] | None, prefix: str
) -> dict[str, Any]:
    """What a fragment is filled with, whose ids all begin with the prefix."""
    rows = explanation.aggregate(unit) if explanation.unit == "token" else explanation
    panels = []
    if outputs is None:
        best = np.argsort(-explanation.scores, kind="stable")[:N_OUTPUTS]
        outputs = [explanation.output_names[j] for j in best]
        if len(outputs) > 1:  # what decided comes first
            panels.append(panel(explanation.margin(), rows.margin(), None))
    panels += [panel(explanation, rows, name) for name in outputs]
    return {
        "prefix": prefix,
        "title": caption(explanation.text, 60),
        "unit": rows.unit,
        "n_outputs": len(explanation.output_names),
        "n_explained": len(outputs),
        "panels": panels,
    }


def panel(explanation: "Explanation", rows: "Explanation", output: Any) -> dict[str, Any]:
    """All that is shown of one class."""
    numbers = shown(rows, output)
    by_depth = rows.aggregate("depth")
    return {
        "name": caption(rows.output_names[rows.index(output)], 100),
        "score": numbers.number(numbers.score),
        "pieces": heat(rows, numbers),
        "bars": bars(rows, numbers, output),
        "rows": [
            {"label": caption(rows.label(i)), "span": span, "number": numbers.number(value, "+")}
            for i, (span, value) in enumerate(zip(rows.offsets.tolist(), numbers.values, strict=True))
        ],
        "depths": depths(by_depth, shown(by_depth, output, numbers.decimals)) if len(by_depth) > 1 else [],
        "maps": maps(explanation, rows, output),
    }


def heat(rows: "Explanation", numbers: Shown) -> list[dict[str, Any]]:
    """The text in pieces, each with a colour of its strength; the strongest are marked with their number."""
    found = [(text, sum(numbers.values[i] for i in members), members) for text, members in pieces(rows)]
    largest = max((abs(value) for _, value, _ in found), default=0)
    marked = strongest([value for _, value, _ in found], N_MARKED)
    return [
        {
            "text": visible(text),
            "colour": colour(value, largest),
            "number": numbers.number(value, "+") if members else "",
            "marked": direction(text) if position in marked else "",
        }
        for position, (text, value, members) in enumerate(found)
    ]


def direction(text: str) -> str:
    """In which direction the letters of a text run."""
    for char in text:
        kind = unicodedata.bidirectional(char)
        if kind in ("L", "R", "AL"):
            return "ltr" if kind == "L" else "rtl"
    return "none"


def colour(value: float, largest: float) -> str:
    """The class of a strength: p1 to p9 for what raises a score, n1 to n9 for what lowers it, or nothing."""
    level = round(LEVELS * min(abs(value) / largest, 1)) if largest else 0
    return f"{'p' if value > 0 else 'n'}{level}" if level else ""


def bars(rows: "Explanation", numbers: Shown, output: Any) -> list[dict[str, Any]]:
    """The account of the score, with a bar and the profile over depths for each line."""
    lines = account(rows, numbers, N_BARS)
    longest = max(abs(line.value) for line in lines) or 1
    cells = rows.values[..., rows.index(output)].astype(np.float64)  # [n, depth]
    # Sums of many rows may be far taller than any row, and are cut.
    tallest = max((abs(cells[line.rows]).max() for line in lines if not line.is_sum), default=0) or 1
    return [
        {
            **bar(line.label, line.value, longest, numbers),
            "profile": profile(np.clip(cells[line.rows].sum(0) / tallest, -1, 1)) if line.rows else None,
            "is_sum": line.is_sum,
        }
        for line in lines
    ]


def bar(label: str, value: int, longest: int, numbers: Shown) -> dict[str, Any]:
    """A line with a bar, its width in per cent of the longest."""
    width = round(100 * abs(value) / longest, 1)
    return {"label": label, "number": numbers.number(value, "+"), "width": width, "negative": value < 0}


def profile(heights: np.ndarray) -> tuple[str, str]:
    """Paths of the columns, one for each depth, that go up from the middle, and of those that go down."""
    up, down = "", ""
    for x, height in enumerate(heights):
        size = round(10 * abs(float(height)), 1)
        if size and height > 0:
            up += f"M{x * 6} 10v-{size}h5v{size}z"
        elif size:
            down += f"M{x * 6} 10v{size}h5v-{size}z"
    return up, down


def depths(by_depth: "Explanation", numbers: Shown) -> list[dict[str, Any]]:
    """What each depth adds, the embeddings first, and the base."""
    lines = [*zip(by_depth.pieces, numbers.values, strict=True), ("base", numbers.base)]
    if numbers.rest:
        lines.append(("not explained", numbers.rest))
    longest = max(abs(value) for _, value in lines) or 1
    return [{**bar(*line, longest, numbers), "is_sum": k >= len(by_depth)} for k, line in enumerate(lines)]


def maps(explanation: "Explanation", rows: "Explanation", output: Any) -> list[dict[str, Any]]:
    """The map of depths and words in lines of a page's width, by sentences where words are too many."""
    for unit in (rows.unit, "sentence", "chunk"):
        parts = (rows if unit == rows.unit else explanation.aggregate(unit)).skip_special_tokens()
        if len(parts) <= MAP_COLUMNS or explanation.unit != "token":
            break
    cells = parts.values[..., parts.index(output)].T[::-1]  # [depth, n], deepest first
    if not 0 < len(parts) <= MAP_COLUMNS or len(cells) < 2:
        return []
    largest = float(abs(cells).max())
    return [
        {
            "unit": parts.unit,
            "labels": [caption(parts.label(i), 14) for i in range(left, min(left + MAP_LINE, len(parts)))],
            "depths": parts.depth_names[::-1],
            "paths": map_paths(cells[:, left : left + MAP_LINE], largest),
        }
        for left in range(0, len(parts), MAP_LINE)
    ]


def map_paths(cells: np.ndarray, largest: float) -> dict[str, str]:
    """A path for each colour, and one of the dashes that mark what lowers a score."""
    paths: dict[str, str] = {}
    width, height = CELL_WIDTH - 1, CELL_HEIGHT - 1
    for (y, x), value in np.ndenumerate(cells):
        shade = colour(float(value), largest)
        if shade:
            left, top = x * CELL_WIDTH, y * CELL_HEIGHT
            paths[shade] = paths.get(shade, "") + f"M{left} {top}h{width}v{height}h-{width}z"
            if value < 0 and abs(value) > largest / 4:
                paths["dash"] = paths.get("dash", "") + f"M{left + 6} {top + 6.5}h7"
    return dict(sorted(paths.items(), key=lambda item: item[0] == "dash"))
