"""Convert explanations for other tools: pandas, shap, captum."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.explanation import Explanation


def to_dataframe(explanation: "Explanation"):
    """Return a data frame with a row for each row of the explanation, depth and class."""
    pandas = require("pandas", "data")
    i, d, j = np.indices(explanation.values.shape).reshape(3, -1)  # [n * depth * n_cls] each
    labels = [explanation.label(row) for row in range(len(explanation))]
    return pandas.DataFrame(
        {
            explanation.unit: np.array(labels, dtype=object)[i],
            "start": explanation.offsets[i, 0],
            "end": explanation.offsets[i, 1],
            "special": explanation.special[i],
            "chunk": explanation.chunk[i],
            "level": np.array(explanation.depth_names, dtype=object)[d],
            "output": np.array(explanation.output_names, dtype=object)[j],
            "contribution": explanation.values.reshape(-1),
            **({} if explanation.phi is None else {"phi": explanation.phi.reshape(-1)}),
        }
    )


def to_shap(explanation: "Explanation"):
    """Return a ``shap.Explanation`` whose data are the strings of the rows, with the spaces that follow."""
    shap = require("shap", "eval")
    found = shap.Explanation(
        values=explanation.values.sum(1, dtype=np.float64),  # [n, n_cls]
        base_values=explanation.base_values.astype(np.float64),  # [n_cls]
        data=np.array(with_spaces(explanation), dtype=object),  # [n]
        output_names=explanation.output_names,
    )
    return found[:, 0] if len(explanation.output_names) == 1 else found


def with_spaces(explanation: "Explanation") -> list[str]:
    """Return the string of each row with the characters up to the next row. Together they are the text."""
    strings, after = [], len(explanation.text)
    for i in reversed(range(len(explanation))):
        start, end = explanation.offsets[i]
        between = ""
        if start < end:
            between, after = explanation.text[end:after], start
        strings.append(explanation.label(i) + between)
    return strings[::-1]


def to_captum(explanation: "Explanation", j: int) -> tuple[Tensor, Tensor]:
    """Return attributions [1, n, depth] of class j, and the difference of their sum to the score, [1]."""
    values = torch.tensor(explanation.values[..., j])[None]  # [1, n, depth]
    base, score = float(explanation.base_values[j]), float(explanation.scores[j])
    return values, (values.double().sum((1, 2)) + base - score).float()
