"""The vector of a text: the input of the last layer of a head."""

from typing import Any

from torch import Tensor

from vecroute.heads import RoutingHead


def vectors(head: Any, hidden_states: Tensor, input_mask: Tensor) -> Tensor:
    """Return the vectors that the last layer reads, concatenated.

    Args:
        head: a ``RoutingHead``, whose last layer reads n_hid hidden vectors, or a ``PoolingHead``, whose last
            layers read the pooled vector.
        hidden_states: [b, n_pos, depth, d_emb], input_mask: [b, n_pos].

    Returns:
        [b, k], k = n_hid d_hid or d_pool.
    """
    read: list[Tensor] = []
    hook = last_of(head).register_forward_pre_hook(lambda module, given: read.append(given[0]))
    try:
        head(hidden_states, input_mask)
    finally:
        hook.remove()
    return read[0].flatten(1)  # [b, k]


def n_vector(head: Any) -> int:
    """k of ``vectors``."""
    last = last_of(head)
    return last.n_inp * last.d_inp if isinstance(head, RoutingHead) else head.pool.d_pool


def last_of(head: Any) -> Any:
    """Return the last routing of a ``RoutingHead``, or the layers after the pool of a ``PoolingHead``."""
    if not isinstance(head, RoutingHead):
        return head.classify
    network: Any = head.network
    return network[-1]
