"""Single cells of tables: missing ones, formulas of spreadsheets, and characters that control a terminal."""

import re
import unicodedata
from typing import Any

# A spreadsheet takes a cell that begins so for a formula, unless it is a number.
FORMULA = ("=", "+", "-", "@", "\t", "\r")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# Controls (Cc), bidirectional overrides and their kin (Cf), lines and paragraphs (Zl, Zp), surrogates (Cs).
INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
JOINERS = "\u200c\u200d"  # parts of words and of emoji
CONTROLS = re.compile(r"[^\x20-\x7e]")


def is_missing(value: Any) -> bool:
    """None, NaN, or the missing value of pandas."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(value != value)


def is_blank(value: Any) -> bool:
    """Whether a cell says nothing: it is missing, or a string of white space."""
    return not value.strip() if isinstance(value, str) else is_missing(value)


def inert(cell: Any) -> Any:
    """The cell with an apostrophe before it if a spreadsheet would take it for a formula."""
    if isinstance(cell, str) and cell.startswith(FORMULA) and not NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


def visible(text: str, keep: str = "") -> str:
    """The text with control characters as escapes, such as \\x1b, so that a terminal does not obey them.

    Args:
        text: anything, such as a label or a name of a column.
        keep: control characters that stay, such as newline.
    """

    def shown(found: re.Match) -> str:
        character = found[0]
        if character in keep or character in JOINERS or unicodedata.category(character) not in INVISIBLE:
            return character
        return character.encode("unicode_escape").decode()

    return CONTROLS.sub(shown, text)
