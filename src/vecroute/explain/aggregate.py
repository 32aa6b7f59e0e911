"""Sum an explanation over the tokens of each word, sentence or chunk, or over all tokens."""

from typing import TYPE_CHECKING, Any

import numpy as np

from vecroute.explain.segment import Span, locate, sentences, words

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation

Named = dict[int, tuple[str, Span]]  # number of a part -> its name and its characters


def by_part(explanation: "Explanation", unit: str) -> dict[str, Any]:
    """Return the fields of an explanation by words, sentences or chunks, ordered by their first tokens."""
    keys, parts = chunks(explanation) if unit == "chunk" else segments(explanation, unit)
    rows = {key: row for row, key in enumerate(parts)}
    group = np.array([rows[key] for key in keys], dtype=np.int64)  # [n]
    special = np.ones(len(rows), dtype=bool)  # [n_rows]
    np.logical_and.at(special, group, explanation.special)
    return {
        **sums(explanation, group, len(rows)),
        "pieces": [piece for piece, _ in parts.values()],
        "offsets": [span for _, span in parts.values()],
        "special": special,
        "chunk": explanation.chunk[np.unique(group, return_index=True)[1]],  # the chunk of the first token
        "unit": unit,
    }


def sums(explanation: "Explanation", group: np.ndarray, n_rows: int) -> dict[str, np.ndarray]:
    """Sum contributions and credit over the rows of each group, [n_rows, depth, n_cls] each.

    Args:
        group: [n] the new row of each row.
    """
    found = {}
    for name, array in explanation.by_row.items():
        found[name] = np.zeros((n_rows, *array.shape[1:]))  # [n_rows, depth, n_cls]
        np.add.at(found[name], group, array)
    return found


def by_depth(explanation: "Explanation") -> dict[str, Any]:
    """Return the fields of an explanation whose rows are depths."""
    arrays = explanation.by_row.items()
    found = {name: array.sum(0, dtype=np.float64)[:, None] for name, array in arrays}  # [depth, 1, n_cls]
    names = explanation.depth_names
    rows = {"pieces": names, "offsets": np.zeros((len(names), 2)), "special": None, "chunk": None}
    return {**found, "depths": ["all depths"], "unit": "depth", **rows}


def segments(explanation: "Explanation", unit: str) -> tuple[list[int], Named]:
    """Return the word or sentence of each token. Special tokens, which are in none, get negative numbers."""
    text, offsets = explanation.text, explanation.offsets.tolist()
    spans = words(text) if unit == "word" else sentences(text)
    own = explanation.special.tolist()
    keys = [-1 - i if k < 0 or own[i] else k for i, k in enumerate(locate(offsets, spans))]
    parts: Named = {}
    for k in dict.fromkeys(keys):
        parts[k] = (
            (text[slice(*spans[k])], spans[k]) if k >= 0 else (explanation.label(-1 - k), offsets[-1 - k])
        )
    return keys, parts


def chunks(explanation: "Explanation") -> tuple[list[int], Named]:
    """Return the chunk of each token, its special tokens included."""
    keys = explanation.chunk.tolist()
    parts: Named = {}
    for k in dict.fromkeys(keys):
        spans = explanation.offsets[(explanation.chunk == k) & ~explanation.special]  # [n_tokens, 2]
        span = (int(spans[:, 0].min()), int(spans[:, 1].max())) if len(spans) else (0, 0)
        parts[k] = (f"chunk {k}", span)
    return keys, parts
