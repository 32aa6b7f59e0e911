"""The routing loop of Algorithm 2, in several implementations of one signature.

Each takes ``(x_inp, weights, n_iters, input_mask, pair_mask, prior)`` and gives the last x_out, not yet
normalised, and phi. ``reference`` is the truth; the others must agree with it.
"""

from torch import Tensor

from vecroute.ops.common import Weights
from vecroute.ops.reference import route_reference

IMPLEMENTATIONS = ("auto", "reference")


def route(
    x_inp: Tensor,
    weights: Weights,
    n_iters: int,
    input_mask: Tensor | None,
    pair_mask: Tensor | None,
    implementation: str,
    prior: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the loop with the named implementation on arguments already checked.

    Returns:
        x_out [..., j, h], not yet normalised, and phi [..., i, j], both at least float32.
    """
    last = route_reference(x_inp, weights, n_iters, input_mask, pair_mask, prior)
    return last.x_out, last.phi
