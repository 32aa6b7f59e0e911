"""The batch path: many samples of a moderate size, padded, masked or packed, in few launches.

``sizes`` computes the sizes, ``steps`` prepares the launches, and ``run`` runs them. The Triton kernels stand
in ``forward_kernels``, ``backward_kernels``, ``sum_kernels``, ``products`` and ``segments``, and their common
parts in ``tiles``.
"""

from vecroute.ops.launch import Memory
from vecroute.ops.paths.batch.run import backward as backward
from vecroute.ops.paths.batch.run import forward as forward
from vecroute.ops.paths.batch.run import prepare as prepare
from vecroute.ops.paths.batch.sizes import Sizes
from vecroute.ops.plan import Plan


def saved(plan: Plan) -> Memory:
    """Return the memory that lives until the backward pass. Under a compiler, lengths may be unknown."""
    return Sizes(plan).saved
