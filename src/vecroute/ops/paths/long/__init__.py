"""One long sample of a fixed length in tf32: few passes over x_inp, and one write of its gradient.

``clusters`` runs an iteration with one read of x_inp. ``halves`` makes the gradient of x_inp from float16
pairs with Triton, and ``by_rows`` does the same in CUDA C++. ``hopper`` compiles the CUDA C++ files.
"""

from torch import Tensor

from vecroute.ops.paths.long import by_rows, halves
from vecroute.ops.paths.long.clusters import iterate as iterate
from vecroute.ops.plan import Plan


def scaled_matrix(plan: Plan, matrices: list[Tensor], first: bool) -> tuple[Tensor, Tensor]:
    """Return M in the layout of ``input_gradient``, and the tops of the rows of M for the newest pairs.

    Args:
        matrices: [1, q, d] in the first iteration one for every iteration whose pairs wait, then its own. The
            other iterations pass only their own, because they need its tops but not yet M.
    """
    if first and plan.halves == "hopper":
        return by_rows.scaled_matrix(matrices, plan.case.n_out)
    return halves.scaled_matrix(matrices, first)


def input_gradient(plan: Plan, waiting, phi, M, top, x, W_A, grad_x, grad_W_A, grad_a: Tensor) -> None:
    """Fill grad_x and grad_W_A, [i, n]. Pairs of later iterations wait in the rows of grad_W_A.

    Args:
        waiting: [i, w] phi and the gradient of dot of every iteration but the first, in float16.
        phi: [i, j] of the first iteration, in float16.
        M: from ``scaled_matrix``.
        top: [t, i] the tops of pairs, powers of two.
        x, W_A: [i, n], grad_a: [i].
    """
    multiply = by_rows.input_gradient if plan.halves == "hopper" else halves.input_gradient
    multiply(waiting, phi, M, top, x, W_A, grad_x, grad_W_A, grad_a)
