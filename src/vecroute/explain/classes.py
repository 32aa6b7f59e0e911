"""Which classes to explain."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any


def class_numbers(classes: Any, known: Sequence[Any], *, by_number: bool = False) -> list[int] | None:
    """Return the numbers of the classes to explain, None for all.

    Args:
        classes: some of the labels, None for all.
        known: all labels, in the order of the scores.
        by_number: True if a class may be given by its number instead.

    Raises:
        TypeError: classes is one label or no collection.
        ValueError: a class does not exist or comes twice, or there is none.
    """
    if classes is None:
        return None
    names = list(known)
    if isinstance(classes, str | bytes) or not isinstance(classes, Iterable):
        raise TypeError(f"classes must be a list of some of {names}, got {classes!r}")
    numbers: list[int] = []
    for label in classes:
        is_number = isinstance(label, Integral) and not isinstance(label, bool)
        if label in names:
            numbers.append(names.index(label))
        elif by_number and is_number and 0 <= label < len(names):
            numbers.append(int(label))
        else:
            raise ValueError(f"classes must be some of {names}, got {label!r}")
    if not numbers:
        raise ValueError(f"classes must be at least one of {names}, got none")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"classes must be different, got {[names[j] for j in numbers]}")
    return numbers
