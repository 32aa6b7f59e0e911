"""Compute what each hidden state of a sample adds to the scores of a head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vecroute.explain.words import HeldHead
from vecroute.heads import RoutingHead


def explain_hidden(
    head: Any, hidden: Tensor, outputs: Sequence[int]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return contributions and credit [n_pos, depth, n], base and scores [n] of some outputs of a head.

    Args:
        head: one of ``vecroute.heads``. The credit is None unless it is a ``RoutingHead``.
        hidden: [n_pos, depth, d_emb] hidden states of one sample.
        outputs: numbers of the classes to explain.
    """
    mask = torch.ones(1, len(hidden), dtype=torch.bool)  # [1, n_pos]
    ((fields, _),) = explain_states_of(head, hidden[None], mask, torch.tensor([list(outputs)]))
    return fields["values"], fields["phi"], fields["base_values"], fields["scores"]


def explain_states_of(
    head: Any, hidden: Tensor, mask: Tensor, outputs: Tensor
) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the contributions of hidden states: fields of explanations, and all scores, of each sample.

    Args:
        head: one of ``vecroute.heads``. The credit is None unless it is a ``RoutingHead``.
        hidden: [b, n_pos, depth, d_emb] hidden states of some samples.
        mask: [b, n_pos] True at the positions that are used.
        outputs: [b, k] numbers of the classes to explain.
    """
    held = HeldHead(head, hidden, mask, outputs)
    mask = mask.to(held.hidden.device)  # [b, n_pos]
    values = torch.stack([(g * held.hidden).sum(-1) for g in held.gradients], -1)  # [b, n_pos, depth, k]
    phi = credit(head, held.hidden, mask, outputs) if isinstance(head, RoutingHead) else None
    base = held.base()  # [b, k]
    return [
        (
            {
                "values": values[b][mask[b]],  # [n, depth, k]
                "phi": None if phi is None else phi[b][mask[b]],  # [n, depth, k]
                "base_values": base[b],
                "scores": held.scores[b],
            },
            held.all_scores[b],
        )
        for b in range(len(values))
    ]


@torch.no_grad()
def credit(head: RoutingHead, hidden: Tensor, mask: Tensor, outputs: Tensor) -> list[Tensor]:
    """Return the credit [n_pos, depth, k] of the hidden states of each sample for some of its outputs."""
    phi = head.route(hidden, mask).phi.unit_variance()
    return [
        torch.stack([phi[b].column(j) for j in own], -1).reshape(*hidden.shape[1:3], -1)
        for b, own in enumerate(outputs.tolist())
    ]
