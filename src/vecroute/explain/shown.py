"""Prepare numbers and text for display: rounded numbers that add up, and text without hidden characters."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

DIGITS = 3  # significant digits of the largest contribution
CONTROL = regex.compile(r"[\p{Cc}\p{Cs}--[\t\n]]", regex.V1)
INVISIBLE = regex.compile(r"[\s\p{C}\p{Z}]*")


class Shown(NamedTuple):
    """An output in rounded numbers for which score = base + sum of values + rest holds exactly.

    All are integers in units of the last decimal. ``number`` writes them as decimals.
    """

    values: list[int]  # [n] one per row
    base: int
    rest: int  # score minus base and values; 0 unless rounding leaves it visible
    score: int
    decimals: int

    def number(self, value: int, sign: str = "-") -> str:
        """Write a value as a decimal number; sign="+" writes a plus sign too."""
        digits = f"{abs(value):0{self.decimals + 1}d}"
        whole, fraction = digits[: len(digits) - self.decimals], digits[len(digits) - self.decimals :]
        mark = "-" if value < 0 else "+" if sign == "+" and value > 0 else ""
        return f"{mark}{whole}.{fraction}" if fraction else f"{mark}{whole}"


def shown(explanation: "Explanation", output: Any = None, decimals: int | None = None) -> Shown:
    """Round an output so that the shown numbers add up.

    Some values are rounded the other way: those nearest to the middle between two numbers. So no value is off
    by more than one in its last decimal.

    Args:
        explanation: the explanation to show.
        output: the class, None for the class with the highest score.
        decimals: number of decimals. None gives the largest value DIGITS significant digits.
    """
    j = explanation.index(output)
    base, score = float(explanation.base_values[j]), float(explanation.scores[j])
    values = explanation.totals(output).tolist()  # [n]
    if decimals is None:
        decimals = decimals_of(values) if any(values) else decimals_of([base, score])
    scale = 10.0**decimals
    rounded_base, rounded_score = round(base * scale), round(score * scale)
    rest = round((score - base - sum(values)) * scale)
    exact = [value * scale for value in values]
    rounded = round_to_sum(exact, rounded_score - rounded_base - rest)
    rest = rounded_score - rounded_base - sum(rounded)
    return Shown(rounded, rounded_base, rest, rounded_score, decimals)


def round_to_sum(values: Sequence[float], total: int) -> list[int]:
    """Round to integers, each off by at most one, that add up to the total or come as near as possible."""
    rounded = [round(value) for value in values]
    missing = total - sum(rounded)
    step = 1 if missing > 0 else -1
    # Change first the values that rounding moved farthest in the opposite direction.
    order = sorted(range(len(rounded)), key=lambda i: step * (rounded[i] - values[i]))
    for i in order[: abs(missing)]:
        rounded[i] += step
    return rounded


def decimals_of(values: Iterable[float]) -> int:
    """Return the number of decimals, at least two, that gives the largest value DIGITS significant digits."""
    largest = max(map(abs, values))
    return DIGITS if largest == 0 else min(max(DIGITS - 1 - math.floor(math.log10(largest)), 2), 12)


def strongest(values: Sequence[int], k: int) -> list[int]:
    """Return the indices of the k largest absolute values, largest first, without zeros."""
    order = sorted(range(len(values)), key=lambda i: -abs(values[i]))
    return [i for i in order[:k] if values[i]]


class Line(NamedTuple):
    """A line of an account, which shows how a score adds up."""

    label: str
    value: int  # in units of the last decimal
    rows: list[int]  # rows of the explanation; empty for the base
    is_sum: bool  # True if the line sums rows that have no line of their own


def account(explanation: "Explanation", numbers: Shown, k: int) -> list[Line]:
    """List the k largest rows, then the sums of all others and of special tokens, and the base."""

    def line(label: str, rows: list[int], is_sum: bool = True) -> Line:
        return Line(label, sum(numbers.values[i] for i in rows), rows, is_sum)

    plain = [i for i, special in enumerate(explanation.special) if not special]
    special = [i for i, special in enumerate(explanation.special) if special]
    top = [plain[i] for i in strongest([numbers.values[i] for i in plain], k)]
    others = sorted(set(plain) - set(top))
    lines = [line(caption(explanation.label(i)), [i], False) for i in top]
    if others:
        lines.append(line(f"{len(others):,} other {plural(explanation.unit, len(others))}", others))
    if special:
        lines.append(line("special tokens", special))
    lines.append(Line("base", numbers.base, [], True))
    if numbers.rest:
        lines.append(Line("not explained", numbers.rest, [], True))
    return lines


def plural(unit: str, n: int) -> str:
    """Return the name of a unit, in the plural unless n is 1."""
    return unit if n == 1 else f"{unit}{'e' * unit.endswith('ch')}s"


def visible(text: str) -> str:
    """Write control characters and lone surrogates as escapes. Line ends and tabs stay."""
    return CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text.replace("\r\n", "\n"))


def caption(text: str, length: int = 40) -> str:
    """Return a one-line name for a part of a text: shortened if long, as escapes if it is invisible."""
    if INVISIBLE.fullmatch(text):
        return " ".join(f"U+{ord(char):04X}" for char in text[:length]) or "(nothing)"
    line = " ".join(visible(text).split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def pieces(explanation: "Explanation") -> Iterator[tuple[str, list[int]]]:
    """Yield the whole text in pieces, each with the rows that it belongs to, if any.

    Rows that share characters, such as the tokens of one emoji, share a piece.
    """
    text, cut, spans = explanation.text, 0, explanation.offsets.tolist()
    order = sorted((i for i, (start, end) in enumerate(spans) if start < end), key=spans.__getitem__)
    joined: list[tuple[int, int, list[int]]] = []
    for i in order:
        start, end = spans[i]
        if joined and start < joined[-1][1]:
            first, last, rows = joined[-1]
            joined[-1] = (first, max(last, end), [*rows, i])
        else:
            joined.append((start, end, [i]))
    for start, end, rows in joined:
        if cut < start:
            yield text[cut:start], []
        yield text[start:end], rows
        cut = end
    if cut < len(text):
        yield text[cut:], []
