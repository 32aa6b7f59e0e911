"""Find the words and sentences of a text, and the word or sentence of each token."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import regex

Span = tuple[int, int]  # first character and one past the last

# Boundaries by the rules of Unicode (UAX #29): combining marks and joined emoji stay in one piece.
WORD_BOUNDARY = regex.compile(r"(?w)\b")
VISIBLE = regex.compile(r"[^\s\p{C}\p{Z}]|\p{Co}|\p{Cn}|\p{Cs}")

# Possessive quantifiers (++) and the look-behind prevent backtracking, so that long runs of full stops or
# spaces take linear time.
SENTENCE_END = regex.compile(
    r"""(?<![.!?…])[.!?…]++["'”’»)\]]*+\s++|[。！？]++["'”’»」』）]*+\s*+|\n(?:[^\S\n]*+\n)++\s*+"""
)
LAST_WORD = regex.compile(r"\w+(?=\s*$)")
TITLES = {"mr", "mrs", "ms", "dr", "prof", "st", "vs"}


def words(text: str) -> list[Span]:
    """Return the words, numbers, punctuation marks and symbols of a text, in order.

    Spaces and control characters are left out. Each Chinese or Japanese ideograph and hiragana is a word.
    """
    cuts = (match.start() for match in WORD_BOUNDARY.finditer(text))
    return [span for span in pairwise(cuts) if VISIBLE.search(text, *span)]


def sentences(text: str) -> list[Span]:
    """Return the sentences of a text, in order, without the spaces between them."""
    ends = (match.span() for match in SENTENCE_END.finditer(text))
    cuts = [0, *(end for start, end in ends if ends_sentence(text, start, end)), len(text)]
    return [strip(text, *span) for span in pairwise(cuts) if VISIBLE.search(text, *span)]


def ends_sentence(text: str, start: int, end: int) -> bool:
    """Return whether the mark at start, such as a full stop, ends a sentence, and the next begins at end."""
    if text[start] in "\n。！？":
        return True
    # A full stop after a space comes from a tokenized text, which may be all lower case.
    apart = start > 0 and text[start - 1].isspace()
    if text[start] == ".":
        last = LAST_WORD.search(text, max(0, start - 20), start)
        word = last.group() if last else ""
        if word.lower() in TITLES or (len(word) == 1 and word.isalpha() and not apart):
            return False
    return apart or not text[end : end + 1].islower()


def strip(text: str, start: int, end: int) -> Span:
    """Return a span without the spaces at its ends."""
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())


def locate(tokens: Iterable[Sequence[int]], parts: list[Span]) -> list[int]:
    """Return the index of the part that each token belongs to, -1 if there are no parts.

    A token belongs to the part that has most of its characters. A token between parts belongs to the next
    part, or to the last one if none follows.

    Args:
        tokens: first character of each token and one past the last.
        parts: spans in order that do not overlap.
    """
    starts, ends = [start for start, _ in parts], [end for _, end in parts]
    found = []
    for start, end in tokens:
        first, last = bisect_right(ends, start), bisect_left(starts, max(end, start + 1))
        shared = [min(end, ends[k]) - max(start, starts[k]) for k in range(first, last)]
        found.append(first + shared.index(max(shared)) if shared else min(first, len(parts) - 1))
    return found
