"""The batch path: many samples of a moderate size, padded, masked or packed, in few launches.

``sizes`` says how large everything is, ``steps`` prepares the launches, ``run`` makes them, ``kernels`` and
``products`` are Triton's.
"""

from vecroute.ops.launch import Memory
from vecroute.ops.paths.batch.run import backward as backward
from vecroute.ops.paths.batch.run import forward as forward
from vecroute.ops.paths.batch.sizes import Sizes
from vecroute.ops.paths.batch.steps import Steps
from vecroute.ops.plan import Plan


def saved(plan: Plan) -> Memory:
    """The memory that lives until the backward pass, also for lengths that a compiler does not know."""
    return Sizes(plan).saved


def prepare(plan: Plan) -> Steps:
    """Return all launches of a plan."""
    return Steps(plan)
