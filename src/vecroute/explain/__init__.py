"""Explanations: what each part of a text adds to each class score, to look at, to keep and to reckon with."""

from vecroute.explain.explanation import Explanation, Part

__all__ = ["Explanation", "Part"]
