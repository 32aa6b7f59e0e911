"""Make the problem of a call, in the form that the loop over chunks takes."""

import torch

import vecroute as vr
from vecroute.ops import Tuning
from vecroute.ops.autograd import operator_arguments, plan_of, problem
from vecroute.ops.problem import Problem


def problem_of(
    layer: vr.VectorRouting, x_inp: torch.Tensor, implementation: str = "fused", n_iters: int = 2,
    tuning: Tuning | None = None, input_mask: torch.Tensor | None = None,
) -> Problem:  # fmt: skip
    """Return the problem of a call. Its tuning is not the default, so that it avoids the batch path."""
    tuning = tuning or Tuning(keep_bytes=Tuning().keep_bytes + 1)
    options = {"implementation": implementation, "tuning": tuning}
    arguments = operator_arguments(x_inp, layer.weights(), input_mask, None, layer.prior, **options)
    return problem(plan_of(*arguments, n_iters), *arguments)
