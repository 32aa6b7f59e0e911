"""The vector of a text: the input of the last layer of a head."""

from typing import Any

from torch import Tensor

from vecroute.compose.members import Each
from vecroute.heads import RoutingHead


def vectors(head: Any, hidden_states: Tensor, input_mask: Tensor) -> Tensor:
    """Return the vectors that the last layer reads, concatenated.

    Args:
        head: a ``RoutingHead``, whose last layer reads n_hid hidden vectors of each member, or a
            ``PoolingHead``, whose last layers read the pooled vector.
        hidden_states: [b, n_pos, depth, d_emb], input_mask: [b, n_pos].

    Returns:
        [b, k], k = n_members n_hid d_hid or d_pool.
    """
    read: list[Tensor] = []
    hook = last_of(head).register_forward_pre_hook(lambda module, given: read.append(given[0]))
    try:
        head(hidden_states, input_mask)
    finally:
        hook.remove()
    found = read[0]
    if isinstance(last_of(head), Each):
        found = found.movedim(0, 1)  # [b, n_members, n_hid, d_hid]
    return found.flatten(1)  # [b, k]


def n_vector(head: Any) -> int:
    """Return k, the size of a vector that ``vectors`` returns."""
    if not isinstance(head, RoutingHead):
        return head.pool.d_pool
    return head.n_members * head.options["n_hid"] * head.options["d_hid"]


def last_of(head: Any) -> Any:
    """Return the last routing of a ``RoutingHead``, or the layers after the pool of a ``PoolingHead``."""
    if not isinstance(head, RoutingHead):
        return head.classify
    network: Any = head.network
    return network[-1] if head.n_members == 1 else network[-1][-1]
