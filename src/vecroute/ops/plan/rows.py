"""Count the numbers that one input takes in the buffers of a pass. They decide the rows of a chunk."""

from vecroute.ops.common import multiple_of_8
from vecroute.ops.plan.plan import Plan


def n_own(plan: Plan, first: bool, forward: bool) -> int:
    """Count the columns of pairs whose rows of M differ between samples: grad_y and the scores' matrix."""
    return plan.width * ((not first) + (not forward))


def n_shared(plan: Plan, first: bool, n_before: int, flat: bool) -> int:
    """Count the columns for c, after n_before others; in the first iteration also a_inp and padding."""
    n = plan.case.n_out if flat else 2 * plan.case.n_out
    return multiple_of_8(n_before + n + 1) - n_before if first else n


def n_computed(plan: Plan, first: bool, forward: bool) -> int:
    """Count the columns of pairs that a product computes."""
    own, kept = n_own(plan, first, forward), plan.kept[0][0] > 0
    if not plan.case.variable:
        return plan.width if kept and not first and not forward else own
    filling = forward and kept and first
    if kept and not filling:
        return own
    return own + n_shared(plan, first, own, plan.is_flat(first) and not filling)


def n_results(plan: Plan, first: bool, adds_up: bool) -> int:
    """Count the columns of a backward pass's results, without the gradient of c if it is summed elsewhere."""
    own = n_own(plan, first, False)
    if not plan.case.variable or (adds_up and not first):
        return own
    return own + n_shared(plan, first, own, plan.is_flat(first) and not adds_up)


def forward_row(plan: Plan, first: bool, rounded: bool) -> int:
    """Count the numbers of one input in a forward pass, in units of the dtype of sums.

    Args:
        rounded: True if pairs and phi are bfloat16.
    """
    n_out = plan.case.n_out
    row = n_computed(plan, first, True) + n_out
    if rounded:
        return row // 2
    return row + (n_out // 2 if plan.operand_dtype != plan.dtype else 0)  # phi, rounded for the product


def backward_row(plan: Plan, first: bool, waits: bool, itemsize: int) -> int:
    """Count the numbers of one input in a backward pass, in units of the dtype of sums."""
    n = n_results(plan, first, waits)
    pairs = max(n_computed(plan, first, False), n_own(plan, first, False), 0 if waits else n)
    besides = 0
    if not first:
        besides = 0 if plan.case.variable else plan.case.n_out  # a copy of the gradient of dot, for sums
    elif waits and plan.waits_in != "apart":
        besides = plan.case.n_out // 2 if plan.halves else plan.n_waiting + n
    return pairs * itemsize // plan.dtype.itemsize + besides
