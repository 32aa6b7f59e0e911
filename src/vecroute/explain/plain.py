"""Turn explanations into JSON types, for files and for other programs."""

from typing import Any


def plain(why: Any, unit: str) -> dict[str, Any]:
    """Return the explanation in JSON types, its values summed by unit."""
    rows, names = why.aggregate(unit), why.output_names

    def by_class(values: Any) -> dict[str, float]:
        return dict(zip(names, map(float, values), strict=True))

    return {
        "text": why.text,
        "of": why.of,
        "probabilities": by_class(why.probabilities),
        "scores": by_class(why.scores),
        "base_values": by_class(why.base_values),
        "not_explained": by_class(why.not_explained),
        "unit": unit,
        "parts": [
            {"piece": rows.label(k), **place, "values": by_class(values)}
            for k, (place, values) in enumerate(zip(places(rows), rows.values.sum(1), strict=True))
        ],
    }


def places(rows: Any) -> list[dict[str, Any]]:
    """Say where each row is: characters of the text, or a box in pixels of the image."""
    if hasattr(rows, "boxes"):
        return [{"box": box} for box in rows.boxes.tolist()]
    return [{"start": start, "end": end} for start, end in rows.offsets.tolist()]
