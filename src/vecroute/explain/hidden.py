"""From the hidden states of samples to what each of them adds to the scores of a head."""

from typing import Any

import torch
from torch import Tensor

from vecroute.explain.words import HeldHead
from vecroute.heads import RoutingHead


def explain_hidden(
    head: Any, hidden: Tensor, mask: Tensor, outputs: Tensor
) -> list[tuple[dict[str, Any], Tensor]]:
    """What each hidden state adds to some outputs of a head: fields of explanations, and all scores.

    Args:
        head: of ``vecroute.heads``; the credit phi is None unless it is a ``RoutingHead``.
        hidden: [b, n_pos, depth, d_emb] hidden states of some samples.
        mask: [b, n_pos] True at those that are used.
        outputs: [b, k] which classes, by number.
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
def credit(head: RoutingHead, hidden: Tensor, mask: Tensor, outputs: Tensor) -> Tensor:
    """The credit [b, n_pos, depth, k] of hidden states for some outputs of each sample."""
    phi = head.route(hidden, mask).phi.unit_variance().dense()  # [b, i, n_cls]
    index = outputs.to(phi.device)[:, None].expand(-1, phi.shape[1], -1)  # [b, i, k]
    return phi.gather(-1, index).reshape(*hidden.shape[:3], -1)  # [b, n_pos, depth, k]
