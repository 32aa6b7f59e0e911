"""What people are shown: numbers rounded so that they still add up, and text with nothing hidden in it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

DIGITS = 3  # significant ones, of the largest contribution
CONTROL = regex.compile(r"[\p{Cc}\p{Cs}--[\t\n]]", regex.V1)
INVISIBLE = regex.compile(r"[\s\p{C}\p{Z}]*")


class Shown(NamedTuple):
    """An output in numbers of a few decimals: score = base + sum of values + rest, exactly.

    All are whole numbers of the last decimal; ``number`` writes them.
    """

    values: list[int]  # [n] of every row
    base: int
    rest: int  # by how much the explanation misses the score; 0 unless that can be seen
    score: int
    decimals: int

    def number(self, value: int, sign: str = "-") -> str:
        """Return a whole number of the last decimal as a decimal number; sign "+" to write that too."""
        digits = f"{abs(value):0{self.decimals + 1}d}"
        whole, fraction = digits[: len(digits) - self.decimals], digits[len(digits) - self.decimals :]
        mark = "-" if value < 0 else "+" if sign == "+" and value > 0 else ""
        return f"{mark}{whole}.{fraction}" if fraction else f"{mark}{whole}"


def shown(explanation: "Explanation", output: Any = None, decimals: int | None = None) -> Shown:
    """Round an output so that what is shown adds up.

    To that end some values are rounded the other way, those nearest to the middle between two numbers. So no
    value is off by more than one in its last decimal.

    Args:
        explanation: what to show.
        output: the class, None for the class with the highest score.
        decimals: number of decimals, None for as many as give the largest value a few digits.
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
    """Whole numbers that add up to the total, each off by one at most, or as near as that allows."""
    rounded = [round(value) for value in values]
    missing = total - sum(rounded)
    step = 1 if missing > 0 else -1
    # What rounding moved farthest the other way comes first.
    order = sorted(range(len(rounded)), key=lambda i: step * (rounded[i] - values[i]))
    for i in order[: abs(missing)]:
        rounded[i] += step
    return rounded


def decimals_of(values: Iterable[float]) -> int:
    """How many decimals show the largest of the values with a few significant digits; two at least."""
    largest = max(map(abs, values))
    return DIGITS if largest == 0 else min(max(DIGITS - 1 - math.floor(math.log10(largest)), 2), 12)


def strongest(values: Sequence[int], k: int) -> list[int]:
    """Which k values are largest in size, largest first, of those that are not 0."""
    order = sorted(range(len(values)), key=lambda i: -abs(values[i]))
    return [i for i in order[:k] if values[i]]


class Line(NamedTuple):
    """A line of an account."""

    label: str
    value: int  # a whole number of the last decimal
    rows: list[int]  # of the explanation, none for the base
    is_sum: bool  # of what has no line of its own


def account(explanation: "Explanation", numbers: Shown, k: int) -> list[Line]:
    """Return the k rows that count most, then all others, special tokens and the base: together the score."""

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
    """What n of a unit are called."""
    return unit if n == 1 else f"{unit}{'e' * unit.endswith('ch')}s"


def visible(text: str) -> str:
    """The text with control characters and halves of characters written out; line ends and tabs are left."""
    return CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text.replace("\r\n", "\n"))


def caption(text: str, length: int = 40) -> str:
    """One line to call a part of a text by: written out where nothing of it can be seen, cut where long."""
    if INVISIBLE.fullmatch(text):
        return " ".join(f"U+{ord(char):04X}" for char in text[:length]) or "(nothing)"
    line = " ".join(visible(text).split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def pieces(explanation: "Explanation") -> Iterator[tuple[str, list[int]]]:
    """The text from its first character to its last in pieces, each with the rows that it is of, if any.

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
