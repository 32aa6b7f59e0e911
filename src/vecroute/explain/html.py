"""Write explanations as self-contained HTML without JavaScript. jinja2 escapes every piece of text."""

import itertools
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vecroute.explain.segment import sentences
from vecroute.explain.shown import Shown, account, caption, pieces, shown, strongest, visible
from vecroute.explain.told import (
    MEANING,
    TERM_OF,
    TERMS,
    Question,
    asked,
    chance,
    decided,
    margin_of,
    meaning,
    predicted,
)
from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

LEVELS = 9  # shades of a colour
N_OUTPUTS = 3  # classes explained by default
N_BARS = 20  # rows in the account of a score
N_MARKED = 8  # words whose number is shown in the text
LONG = 2_000  # with more rows, they are not listed one by one
EXCERPT = 300  # words of a longer text that are shown first
ABOUT = ("model", "date")  # shown above the explanation
MAP_COLUMNS, MAP_LINE = 240, 34  # greatest number of columns of a map, in all and per line
CELL_WIDTH, CELL_HEIGHT = 20, 14

STYLE = {
    "levels": range(1, LEVELS + 1),
    "cell": (CELL_WIDTH, CELL_HEIGHT),
    "terms": TERMS,
    "states_meaning": MEANING["states"].format(unit="word", units="words", whole="text"),
}

page_numbers = itertools.count()


def page(
    explanations: "Explanation | Sequence[Explanation]",
    unit: str = "word",
    outputs: Sequence[Any] | None = None,
    states: "Explanation | Sequence[Explanation] | None" = None,
) -> str:
    """Return a complete page about one text or several, with their hidden states if these are given."""
    several = explanations if isinstance(explanations, Sequence) else [explanations]
    seconds = states if isinstance(states, Sequence) else [states] * len(several)
    parts = [
        content(one, unit, outputs, f"v{k}", second)
        for k, (one, second) in enumerate(zip(several, seconds, strict=True))
    ]
    filled = {"title": "; ".join(part["title"] for part in parts), "parts": parts}
    return environment().get_template("page.html").render(filled | STYLE)


def fragment(explanation: "Explanation", unit: str = "word", outputs: Sequence[Any] | None = None) -> str:
    """Return a part of a page, such as the output of a cell of a notebook."""
    part = content(explanation, unit, outputs, f"v{next(page_numbers)}")
    return environment().get_template("fragment.html").render({"part": part, "heading": "p"} | STYLE)


@cache
def environment() -> Any:
    """Return the jinja2 environment with the templates of the package."""
    jinja2 = require("jinja2", "report")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def content(
    explanation: "Explanation",
    unit: str,
    outputs: Sequence[Any] | None,
    prefix: str,
    states: "Explanation | None" = None,
) -> dict[str, Any]:
    """Return the values for the template of a fragment. All its element ids begin with the prefix."""
    rows = explanation.aggregate(unit) if explanation.unit == "token" else explanation
    questions = questions_about(explanation, outputs)
    whole = listed(explanation, rows)
    second = explanation if states is None else states
    return frame(explanation, rows.unit, questions, prefix, second) | {
        "panels": [panel(explanation, rows, whole, second, question) for question in questions],
    }


def frame(
    explanation: "Explanation", unit: str, questions: Sequence[Question], prefix: str, second: "Explanation"
) -> dict[str, Any]:
    """Return the values around the panels: prediction, sample, model and date, and the choice of a panel.

    Args:
        unit: the unit of the listed rows.
        questions: the question of each panel.
        prefix: beginning of all element ids.
        second: the explanation that the views by depth show.
    """
    about = {name: caption(str(explanation.about[name]), 100) for name in ABOUT if name in explanation.about}
    return {
        "title": caption(explanation.text, 60),
        "predicted": predicted(explanation),
        "about": {"Text": caption(explanation.text, 160)}
        | {name.capitalize(): told for name, told in about.items()},
        "meaning": meaning(explanation, unit),
        "prefix": prefix,
        "unit": unit,
        "n_outputs": len(explanation.output_names),
        "n_explained": len({question.output for question in questions}),
        "of_depths": second.of,
    }


def questions_about(explanation: "Explanation", outputs: Sequence[Any] | None) -> list[Question]:
    """Return the questions to answer: the given classes, else the decision and the highest scores."""
    if outputs is not None:
        return [Question(str(name)) for name in outputs]
    if margin_of(explanation) is not None:
        return [decided(explanation)]
    best = np.argsort(-explanation.scores, kind="stable")[:N_OUTPUTS]
    questions = [decided(explanation), *(Question(explanation.output_names[j]) for j in best)]
    return list(dict.fromkeys(questions))


def listed(explanation: "Explanation", rows: "Explanation") -> "Explanation | None":
    """Return the rows to list. Long texts list sentences or chunks instead, or nothing (None)."""
    units = ("sentence", "chunk") if explanation.unit == "token" else ()
    for parts in (rows, *(explanation.aggregate(unit) for unit in units if unit in explanation.units)):
        if len(parts) <= LONG:
            return parts
    return None


def panel(
    explanation: "Explanation",
    rows: "Explanation",
    whole: "Explanation | None",
    second: "Explanation",
    question: Question,
) -> dict[str, Any]:
    """Return the values for the answer to one question: text, account of the score, and depths."""
    one = asked(rows, question)
    numbers = shown(one)
    pieces_shown = heat(one, numbers)
    by_depth = asked(second, question).aggregate("depth")
    return {
        "title": question.title,
        "score": numbers.number(numbers.score),
        "chance": chance(explanation, question),
        "pieces": excerpt(pieces_shown, EXCERPT) if len(rows) > LONG else pieces_shown,
        "bars": bars(one, numbers),
        "profile_width": 6 * len(one.depths) if len(one.depths) > 1 and one.unit != "depth" else 0,
        "depths": depths(by_depth, shown(by_depth, decimals=numbers.decimals)) if len(by_depth) > 1 else [],
        "maps": maps(asked(second, question), rows.unit),
        **in_order(None if whole is None else asked(whole, question), numbers.decimals, whole is not rows),
    }


def in_order(rows: "Explanation | None", decimals: int, coarser: bool) -> dict[str, Any]:
    """List every row in the order of the text. For rows coarser than asked, add the whole coloured text."""
    if rows is None:
        return {"unit": "", "rows": [], "whole": []}
    numbers = shown(rows, decimals=decimals)
    return {
        "unit": rows.unit,
        "rows": row_list(rows, numbers),
        "whole": heat(rows, numbers) if coarser else [],
    }


def row_list(rows: "Explanation", numbers: Shown) -> list[dict[str, Any]]:
    """Return every row in the order of the text, with its characters and its number."""
    return [
        {"label": caption(rows.label(i)), "span": span, "number": numbers.number(value, "+")}
        for i, (span, value) in enumerate(zip(rows.offsets.tolist(), numbers.values, strict=True))
    ]


def heat(rows: "Explanation", numbers: Shown) -> list[dict[str, Any]]:
    """Return the text in pieces, each coloured by its strength. The strongest show their numbers."""
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


def excerpt(pieces: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Shorten a long text to the sentences that count most, with … for each part that is left out.

    Args:
        pieces: the result of ``heat``.
        most: number of pieces that stay.
    """
    if sum(bool(piece["number"]) for piece in pieces) <= most:
        return pieces
    ends = np.cumsum([len(piece["text"]) for piece in pieces])
    text = "".join(piece["text"] for piece in pieces)
    groups: dict[int, list[int]] = defaultdict(list)  # the pieces of each sentence
    starts = [start for start, _ in sentences(text)]
    for k, end in enumerate(ends):
        groups[int(np.searchsorted(starts, end, side="left")) - 1].append(k)
    weights = {
        sentence: abs(sum(float(pieces[k]["number"] or 0) for k in members))
        for sentence, members in groups.items()
    }
    kept: set[int] = set()
    for sentence in sorted(weights, key=lambda s: -weights[s]):
        kept.update(groups[sentence][: most - len(kept)])
        if len(kept) >= most:
            break
    found: list[dict[str, Any]] = []
    for k, piece in enumerate(pieces):
        if k in kept:
            found.append(piece)
        elif not found or found[-1]["text"] != " … ":
            found.append({"text": " … ", "colour": "", "number": "", "marked": ""})
    return found


def direction(text: str) -> str:
    """Return the direction of the letters of a text: "ltr", "rtl" or "none"."""
    for char in text:
        kind = unicodedata.bidirectional(char)
        if kind in ("L", "R", "AL"):
            return "ltr" if kind == "L" else "rtl"
    return "none"


def colour(value: float, largest: float) -> str:
    """Return the CSS class of a value: p1 to p9 if it raises a score, n1 to n9 if it lowers it, or none."""
    level = round(LEVELS * min(abs(value) / largest, 1)) if largest else 0
    return f"{'p' if value > 0 else 'n'}{level}" if level else ""


def bars(rows: "Explanation", numbers: Shown) -> list[dict[str, Any]]:
    """Return the account of the score, with a bar and the profile over depths for each line."""
    lines = account(rows, numbers, N_BARS)
    longest = max(abs(line.value) for line in lines) or 1
    cells = rows.values[..., 0].astype(np.float64)  # [n, depth]
    # The sum of many rows may be far larger than any row, so its profile is clipped.
    tallest = max((abs(cells[line.rows]).max() for line in lines if not line.is_sum), default=0) or 1
    return [
        {
            **bar(line.label, line.value, longest, numbers),
            "profile": profile(np.clip(cells[line.rows].sum(0) / tallest, -1, 1)) if line.rows else None,
            "is_sum": line.is_sum,
            "term": TERM_OF.get(line.label) if line.is_sum else None,
        }
        for line in lines
    ]


def bar(label: str, value: int, longest: int, numbers: Shown) -> dict[str, Any]:
    """Return a line with a bar. Its width is in per cent of the longest bar."""
    width = round(100 * abs(value) / longest, 1)
    return {"label": label, "number": numbers.number(value, "+"), "width": width, "negative": value < 0}


def profile(heights: np.ndarray) -> tuple[str, str]:
    """Return two SVG paths with one column per depth: the columns above the middle, and those below."""
    up, down = "", ""
    for x, height in enumerate(heights):
        size = round(10 * abs(float(height)), 1)
        if size and height > 0:
            up += f"M{x * 6} 10v-{size}h5v{size}z"
        elif size:
            down += f"M{x * 6} 10v{size}h5v-{size}z"
    return up, down


def depths(by_depth: "Explanation", numbers: Shown) -> list[dict[str, Any]]:
    """List what each depth adds, embeddings first, and the base."""
    lines = [*zip(by_depth.pieces, numbers.values, strict=True), ("base", numbers.base)]
    if numbers.rest:
        lines.append(("not explained", numbers.rest))
    longest = max(abs(value) for _, value in lines) or 1
    return [
        {
            **bar(label, value, longest, numbers),
            "is_sum": k >= len(by_depth),
            "term": TERM_OF[label] if k >= len(by_depth) else None,
        }
        for k, (label, value) in enumerate(lines)
    ]


def maps(explanation: "Explanation", unit: str) -> list[dict[str, Any]]:
    """Return the map of depths and words, in lines as wide as the page; sentences if words are too many."""
    units = dict.fromkeys([unit, "sentence", "chunk"] if explanation.unit == "token" else [explanation.unit])
    for one in units:
        parts = explanation.aggregate(one).skip_special_tokens()
        if len(parts) <= MAP_COLUMNS:
            break
    cells = parts.values[..., 0].T[::-1]  # [depth, n], deepest first
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
    """Return one SVG path for each colour, and one for the dashes that mark negative cells."""
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
