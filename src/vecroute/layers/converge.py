"""Routing to convergence: find the state that one more iteration does not change, and differentiate it.

U is one iteration after the first (section 3.3 of the paper). A solver searches for the fixed point

    x = U(x | x_inp).

The backward pass differentiates this equation, not the search. For an upstream gradient g, the same solver
finds u = g + J^T u with J = dU/dx, and u then flows back through one iteration. The search stores no
intermediate state for the backward pass.
"""

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vecroute.ops.checks import check_choice, check_size
from vecroute.ops.common import compute_dtype, is_exporting, without_autocast

WINDOW = 5  # how many of the latest states Anderson acceleration combines
# Plain steps before Anderson acceleration starts. If it starts far from a fixed point, it may converge to a
# different fixed point than plain iteration does.
WARM_UP = 10
GROWTH = 10  # Anderson acceleration has failed when the residual exceeds this multiple of its minimum
INSIDE = ("vecroute", "torch")  # a warning must point to a line outside these packages

Update = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Converge:
    """Pass this as ``n_iters`` to iterate until the outputs stop changing.

    Args:
        tol: a sample stops when its residual is at most tol.
        max_iters: greatest number of updates after the first iteration, which starts from the flat prior.
        solver: "iterate" repeats the iteration. "anderson" (Anderson acceleration) combines the last five
            states so that the residual is smallest, and returns to plain iteration for a while when this
            fails.
        stop: the residual is |U(x) - x| if "absolute", |U(x) - x| / |U(x)| if "relative".

    Each sample of a batch stops on its own. A sample also stops when its residual is as small as rounding
    errors (10 units in the last place) and no longer decreases. ``layer.convergence`` describes the last
    call. If a sample does not reach ``tol``, the layer warns and uses the state with the smallest residual.

    The residuals belong to x, but the layer returns U(x) and the phi of that iteration, because only then
    x_out equals sum_i phi_ij V_ij exactly. U(x) is closer to a stable fixed point than x is. If J has an
    eigenvalue of absolute value above 1, the residual of U(x) may exceed the residual of x by that factor.

    Raises:
        ValueError, TypeError: an argument has the wrong value or type.
    """

    tol: float = 1e-4
    max_iters: int = 50
    solver: str = "anderson"
    stop: str = "relative"

    def __post_init__(self):
        if isinstance(self.tol, bool) or not isinstance(self.tol, Real):
            raise TypeError(f"tol must be a positive number, got {self.tol!r} ({type(self.tol).__name__})")
        if not 0 < self.tol < math.inf:
            raise ValueError(f"tol must be a positive number, got {self.tol}")
        check_size("max_iters", self.max_iters)
        check_choice("solver", self.solver, ("iterate", "anderson"))
        check_choice("stop", self.stop, ("relative", "absolute"))


class Convergence(NamedTuple):
    """How the search of a layer with ``Converge`` went, for each sample."""

    steps: Tensor  # [...] number of updates, without the first iteration
    residuals: Tensor  # [..., t] residual after each step; a sample that stopped repeats its last residual
    converged: Tensor  # [...] True if the residual reached tol or the size of rounding errors


def check_n_iters(n_iters: object) -> None:
    """Raise unless n_iters is a positive int or a ``Converge``."""
    if not isinstance(n_iters, Converge):
        check_size("n_iters", n_iters)


def not_compiled(function: Callable) -> Callable:
    """Exclude the function from torch.compile: its number of steps depends on the data."""
    if is_exporting():
        raise ValueError(
            "n_iters must be an int in a layer to be exported: with a Converge, the number of steps depends "
            "on the data"
        )
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def fixed_point(
    update: Update, x: Tensor, options: Converge, pull: Callable[[Tensor, Tensor], Tensor] | None = None
) -> tuple[Tensor, Convergence]:
    """Find x = update(x) and attach its implicit gradient.

    Args:
        update: U, differentiable by autograd.
        x: [..., j, h] the state from which the search starts.
        pull: (x, u) -> J^T u at x, or None to compute it by autograd.

    Returns:
        The state [..., j, h] and how the search went.

    Raises:
        ValueError: a state is NaN or infinite.
    """
    with torch.no_grad():
        x, convergence = solve(update, x.detach(), options)
    if not (ok := convergence.converged).all():
        worst = convergence.residuals.amin(-1).max()
        warnings.warn(
            f"routing did not converge: {int((~ok).sum())} of {ok.numel()} samples have a residual above "
            f"tol={options.tol} after {options.max_iters} steps; the largest residual is {worst:.1e}",
            stacklevel=_callers_level(),
        )
    if not torch.is_grad_enabled():
        return x, convergence
    y = update(x)  # [..., j, h] with the graph of one iteration
    if not y.requires_grad:
        return x, convergence
    if pull is None:
        pull = _pull_by_autograd(update, x)
    return _Implicit.apply(y, x, pull, options), convergence


def _callers_level() -> int:
    """Return the stacklevel of the first frame outside this package and PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    return level


def _pull_by_autograd(update: Update, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (x, u) -> J^T u at this x. It differentiates its own copy of one iteration."""
    leaf = x.detach().requires_grad_()  # [..., j, h]
    y = update(leaf)  # [..., j, h]
    return lambda x, u: torch.autograd.grad(y, leaf, u, retain_graph=True, materialize_grads=True)[0]


class _Implicit(torch.autograd.Function):
    """Return x. In the backward pass, send the solution u of u = g + J^T u to y = update(x), instead of g."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, pull: Callable, options: Converge) -> Tensor:
        ctx.pull, ctx.options = pull, options
        ctx.save_for_backward(x)
        return x.clone()  # [..., j, h]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        (x,) = ctx.saved_tensors  # [..., j, h]
        # The equation for u is linear in g. With g of length 1, the absolute residual is a relative error.
        scale = _norm(grad)[..., None, None]  # [..., 1, 1]
        scale = scale.where(scale > 0, 1.0)  # [..., 1, 1]
        g = grad / scale  # [..., j, h]
        options = Converge(ctx.options.tol, ctx.options.max_iters, ctx.options.solver, "absolute")
        u, (_, _, converged) = solve(lambda u: g + ctx.pull(x, u), g, options, linear=True)
        if not converged.all():
            bad = f"{int((~converged).sum())} of {converged.numel()}"
            warnings.warn(
                f"the gradient of the routing did not converge to tol={options.tol} after "
                f"{options.max_iters} steps in {bad} samples; the approximation with the smallest residual "
                "is used",
                stacklevel=2,
            )
        return u * scale, None, None, None


def solve(
    update: Update, x: Tensor, options: Converge, *, linear: bool = False
) -> tuple[Tensor, Convergence]:
    """Search for x = update(x), starting from x [..., j, h].

    Args:
        linear: the update is linear, so it has a single fixed point. NaN is allowed, since an upstream
            gradient may contain NaN.

    Returns:
        For each sample, the state with the smallest residual, [..., j, h], and how the search went.
    """
    best, least = x, torch.full_like(_norm(x), math.inf)  # [..., j, h], [...]
    active = torch.ones_like(least, dtype=torch.bool)  # [...]
    converged = ~active  # [...]
    steps = torch.zeros_like(active, dtype=torch.long)  # [...]
    residuals = least[..., None].repeat_interleave(options.max_iters, -1)  # [..., t]
    anderson = _Anderson(x, least, linear) if options.solver == "anderson" else None
    rounding = 10 * torch.finfo(x.dtype).eps
    for step in range(1, options.max_iters + 1):
        y = update(x)  # [..., j, h]
        residual, length = _norm(y - x), _norm(y)  # [...], [...]
        if options.stop == "relative":
            residual, length = residual / length.where(length > 0, 1.0), torch.ones_like(length)  # [...]
        lost = active & ~residual.isfinite()  # [...]
        if not linear and lost.any():
            raise ValueError(
                f"x_out became NaN or infinite in step {step} of {options}, in {int(lost.sum())} of "
                f"{lost.numel()} samples: look for NaN or very large numbers in x_inp, x_init and the "
                "parameters"
            )
        # A sample that stopped keeps its residual, and therefore its best state, while others continue.
        residual = residual.where(active, residuals[..., step - 2])  # [...]
        better = residual < least  # [...]
        at_rest = (residual <= rounding * length) & ~better  # [...]
        best = x.where(better[..., None, None], best)  # [..., j, h]
        least = residual.where(better, least)  # [...]
        residuals[..., step - 1] = residual
        steps += active
        converged |= (residual <= options.tol) | at_rest
        active = ~converged & residual.isfinite()  # [...]
        if not active.any():
            break
        x = y if anderson is None else anderson.next_state(x, y, residual)  # [..., j, h]
    return best, Convergence(steps, residuals[..., :step].clone(), converged)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), dtype=compute_dtype(x.dtype))  # [...]


class _Anderson:
    """Anderson acceleration with restarts, for each sample separately.

    A sample takes ``n_plain`` plain steps, then combined steps. If combined steps fail, the sample returns to
    the state after its last plain step, doubles ``n_plain`` and starts again. So the search follows plain
    iteration and ends at the same fixed point.
    """

    def __init__(self, x: Tensor, least: Tensor, linear: bool):
        self.linear = linear  # a linear update has a single fixed point, so no restart is needed
        self.history: list[tuple[Tensor, Tensor]] = []
        self.plain = x  # [..., j, h] the state after the last plain step
        self.least = least  # [...] smallest residual since the last restart
        self.age = torch.zeros_like(least, dtype=torch.long)  # [...] steps since the last restart
        self.n_plain = self.age + (0 if linear else WARM_UP)  # [...] plain steps after a restart

    def next_state(self, x: Tensor, y: Tensor, residual: Tensor) -> Tensor:
        """Return the state [..., j, h] that follows x, given y = update(x)."""
        self.history = [*self.history[1 - WINDOW :], (x, y)]
        self.age = self.age + 1  # [...]
        if not self.linear:
            y = self._guard(y, residual)  # [..., j, h]
        combine = self.age > self.n_plain  # [...]
        if not combine.any():
            return y
        return _combination(self.history, self.age).to(y.dtype).where(combine[..., None, None], y)

    def _guard(self, y: Tensor, residual: Tensor) -> Tensor:
        """Return y [..., j, h], or the last plain state for samples whose combined steps failed."""
        self.plain = y.where((self.age <= self.n_plain)[..., None, None], self.plain)  # [..., j, h]
        self.least = self.least.minimum(residual)  # [...]
        failed = (self.age > self.n_plain + 1) & (residual > GROWTH * self.least)  # [...]
        self.least = self.least.where(~failed, math.inf)  # [...]
        self.age = self.age.where(~failed, 0)  # [...]
        self.n_plain = self.n_plain.where(~failed, 2 * self.n_plain)  # [...]
        return self.plain.where(failed[..., None, None], y)


def _combination(history: list[tuple[Tensor, Tensor]], age: Tensor) -> Tensor:
    """Return sum_k alpha_k y_k, where alpha minimises |sum_k alpha_k (y_k - x_k)| and sums to 1.

    The errors y_k - x_k differ by orders of magnitude, so they are first scaled to unit length.

    Args:
        age: [...] how many of the latest states to combine.
    """
    dtype = compute_dtype(history[-1][1].dtype)
    with without_autocast(history[-1][1]):
        # [..., k, n] each: the last k states, flattened to n = n_out d_out numbers
        xs, ys = (torch.stack(states, -3).to(dtype).flatten(-2) for states in zip(*history, strict=True))
        errors = ys - xs  # [..., k, n]
        length = torch.linalg.vector_norm(errors, dim=-1).clamp(min=torch.finfo(dtype).tiny)  # [..., k]
        back = torch.arange(len(history), 0, -1, device=ys.device)  # [k]
        # An infinite length gives weight 0 to states from before the restart.
        length = length.where(back <= age.clamp(min=1)[..., None], math.inf)  # [..., k]
        unit = errors / length[..., None]  # [..., k, n]
        # The ridge keeps the system solvable when the errors are almost parallel.
        ridge = torch.eye(len(history), dtype=dtype, device=ys.device) * 10 * torch.finfo(dtype).eps  # [k, k]
        weight = length.amin(-1, keepdim=True) / length  # [..., k]
        alpha = torch.linalg.solve(unit @ unit.mT + ridge, weight) * weight  # [..., k]
        alpha = alpha / alpha.sum(-1, keepdim=True)  # [..., k]
        return (alpha[..., None, :] @ ys).view(history[-1][1].shape)  # [..., j, h]
