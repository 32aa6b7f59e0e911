"""Explanations: what each part of a text adds to each class score, as pages, plots, tables and files."""

from vecroute.explain.explanation import Explanation, Part

__all__ = ["Explanation", "Part"]
