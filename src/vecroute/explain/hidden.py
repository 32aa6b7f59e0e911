"""From the hidden states of a sample to what each of them adds to the scores of a head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecroute.compose.contribution import contributions


def explain_hidden(
    head: Any, hidden: Tensor, outputs: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contributions and credit [n_pos, depth, n], base and scores [n] of some outputs of a ``RoutingHead``.

    Args:
        hidden: [n_pos, depth, d_emb] hidden states of one sample.
        outputs: which classes, by number.
    """
    hidden = hidden.clone().to(next(head.parameters()).device, torch.float32)  # [n_pos, depth, d_emb]
    shape = (*hidden.shape[:2], len(outputs))
    x_inp, _ = head.flatten(hidden)  # [i, d]
    parts = [contributions(head.network, x_inp, output=j) for j in outputs]
    values = torch.stack([part.values for part in parts], -1)  # [i, n]
    with torch.no_grad():
        credit = head.route(hidden).phi.unit_variance()
        phi = torch.stack([credit.column(j) for j in outputs], -1)  # [i, n]
    base, scores = (torch.stack([getattr(part, name) for part in parts]) for name in ("base", "output"))
    return values.reshape(shape), phi.reshape(shape), base, scores
