"""Handle single cells of tables: missing values, spreadsheet formulas, and terminal control characters."""

import re
import unicodedata
from typing import Any

# A spreadsheet reads a cell that begins with one of these as a formula, unless the cell is a number.
FORMULA = ("=", "+", "-", "@", "\t", "\r")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
# Unicode categories: control (Cc), format such as text direction (Cf), surrogate (Cs), line and paragraph
# separators (Zl, Zp).
INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
JOINERS = "\u200c\u200d"  # format characters that words and emoji need
CONTROLS = re.compile(r"[^\x20-\x7e]")


def is_missing(value: Any) -> bool:
    """Return whether a value is None, NaN or the missing value of pandas."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or bool(value != value)


def is_blank(value: Any) -> bool:
    """Return whether a cell is missing or holds only white space."""
    return not value.strip() if isinstance(value, str) else is_missing(value)


def is_whole(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shortened(text: str, most: int = 40) -> str:
    """Return the text, or its first characters and three dots."""
    return text if len(text) <= most else f"{text[:most]}..."


def inert(cell: Any) -> Any:
    """Put an apostrophe before a cell that a spreadsheet would read as a formula."""
    if isinstance(cell, str) and cell.startswith(FORMULA) and not NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


def visible(text: str, keep: str = "") -> str:
    """Write control characters as escapes, such as \\x1b, so that a terminal does not obey them.

    Args:
        text: any text from outside, such as a label or a column name.
        keep: control characters to leave as they are, such as newline.
    """

    def shown(found: re.Match) -> str:
        character = found[0]
        if character in keep or character in JOINERS or unicodedata.category(character) not in INVISIBLE:
            return character
        return character.encode("unicode_escape").decode()

    return CONTROLS.sub(shown, text)
