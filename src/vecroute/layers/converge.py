"""Routing to convergence: the state that one more iteration does not change, and its implicit gradient.

With U for one iteration after the first (section 3.3 of the paper), a layer that converges gives

    x = U(x | x_inp),

and, whatever the solver did to find it, the gradient of that equation: for an upstream gradient g it solves
u = g + J^T u with J = dU/dx, by the same solver, and sends u through one iteration. Nothing of the search is
stored.
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

WINDOW = 5  # states that Anderson's method combines
WARM_UP = 10  # steps before it does: far from a fixed point it may run to another one than the loop does
GROWTH = 10  # of the residual, at which it has failed
INSIDE = ("vecroute", "torch")  # packages whose lines a warning does not point to

Update = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Converge:
    """In place of ``n_iters``: iterate until the state stands still.

    Args:
        tol: the residual at which a sample stops.
        max_iters: updates at most, after the first iteration from the flat prior.
        solver: "anderson" (Anderson's acceleration: the next state is the combination of the last five that
            makes the residual least; where that fails, back to the loop for a while) or "iterate" (the loop
            as it is).
        stop: the residual is |U(x) - x|, "absolute", or that divided by |U(x)|, "relative".

    Each sample of a batch stops by itself, also where the residual is down to rounding (10 units in the last
    place) and falls no more. ``layer.convergence`` says how the last call went. Where ``tol`` is not reached
    there is a warning, and the state with the smallest residual is used.

    Residuals are those of x; the layer gives U(x), and phi of that iteration, for only so is x_out exactly
    sum_i phi_ij V_ij. Near a stable fixed point that is nearer still; where J has an eigenvalue beyond 1 in
    size, the residual of U(x) may be greater than that of x by such a factor.

    Raises:
        ValueError, TypeError: an argument of the wrong value or type.
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
    """How a call of a layer with ``Converge`` went, sample by sample: of x, where the layer gives U(x)."""

    steps: Tensor  # [...] updates of the state, the first iteration aside
    residuals: Tensor  # [..., steps of the slowest sample] after each of them; the last one stays
    converged: Tensor  # [...] whether the residual came down to tol, or to rounding


def check_n_iters(n_iters: object) -> None:
    """Raise unless n_iters is a positive int or a ``Converge``."""
    if not isinstance(n_iters, Converge):
        check_size("n_iters", n_iters)


def not_compiled(function: Callable) -> Callable:
    """The function, as one that torch.compile leaves to Python; where nothing is compiled, as it is."""
    if is_exporting():
        raise ValueError(
            "n_iters must be an int in a layer to be exported: the steps of a Converge depend on the data"
        )
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def fixed_point(
    update: Update, x: Tensor, options: Converge, pull: Callable[[Tensor, Tensor], Tensor] | None = None
) -> tuple[Tensor, Convergence]:
    """The state x = update(x), with its implicit gradient, found from the state x [..., j, h].

    Args:
        update: U, differentiable by autograd.
        x: where to start.
        pull: (x, u) -> J^T u at x; None to have it from autograd.

    Raises:
        ValueError: a state is NaN or infinite.
    """
    with torch.no_grad():
        x, convergence = solve(update, x.detach(), options)
    if not (ok := convergence.converged).all():
        worst = convergence.residuals.amin(-1).max()  # of the states that are used
        warnings.warn(
            f"routing did not converge: {int((~ok).sum())} of {ok.numel()} samples have a residual above "
            f"tol={options.tol} after {options.max_iters} steps, the greatest is {worst:.1e}",
            stacklevel=_callers_level(),
        )
    if not torch.is_grad_enabled():
        return x, convergence
    y = update(x)  # [..., j, h], with the graph of one iteration
    if not y.requires_grad:
        return x, convergence
    if pull is None:
        pull = _pull_by_autograd(update, x)
    return _Implicit.apply(y, x, pull, options), convergence


def _callers_level() -> int:
    """The stacklevel of the first frame that is neither of this package nor of PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in INSIDE:
        frame, level = frame.f_back, level + 1
    return level


def _pull_by_autograd(update: Update, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, u) -> J^T u at this x, from the graph of an iteration of its own."""
    leaf = x.detach().requires_grad_()  # [..., j, h]
    y = update(leaf)  # [..., j, h]
    return lambda x, u: torch.autograd.grad(y, leaf, u, retain_graph=True, materialize_grads=True)[0]


class _Implicit(torch.autograd.Function):
    """The value x, and on the way back to y = update(x) the solution of u = g + J^T u instead of g."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, pull: Callable, options: Converge) -> Tensor:
        ctx.pull, ctx.options = pull, options
        ctx.save_for_backward(x)
        return x.clone()  # [..., j, h]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        (x,) = ctx.saved_tensors  # [..., j, h]
        # Divided by its length, and the residual absolute: for a linear equation that measures the error.
        scale = _norm(grad)[..., None, None]  # [..., 1, 1]
        scale = scale.where(scale > 0, 1.0)  # [..., 1, 1]
        g = grad / scale  # [..., j, h]
        options = Converge(ctx.options.tol, ctx.options.max_iters, ctx.options.solver, "absolute")
        u, (_, _, converged) = solve(lambda u: g + ctx.pull(x, u), g, options, linear=True)
        if not converged.all():
            bad = f"{int((~converged).sum())} of {converged.numel()}"
            warnings.warn(
                f"the gradient of the routing did not converge to tol={options.tol} after "
                f"{options.max_iters} steps in {bad} samples: the best found is used",
                stacklevel=2,
            )
        return u * scale, None, None, None


def solve(
    update: Update, x: Tensor, options: Converge, *, linear: bool = False
) -> tuple[Tensor, Convergence]:
    """Search for x = update(x) from x [..., j, h]; of each sample the state with the smallest residual.

    Args:
        linear: the update is linear: it has but one fixed point, and may meet NaN, as gradients at times are.
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
        # A sample that stopped keeps its residual, and so its best state, while others go on.
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
    """Plain steps, then combined ones; a sample where those fail goes back and takes twice as many plain.

    So it goes on along the loop, and settles where that does.
    """

    def __init__(self, x: Tensor, least: Tensor, linear: bool):
        self.linear = linear  # then there is nowhere to go astray
        self.history: list[tuple[Tensor, Tensor]] = []
        self.plain = x  # [..., j, h], the last state that plain steps led to
        self.least = least  # [...] residual since the sample went back
        self.age = torch.zeros_like(least, dtype=torch.long)  # [...] steps since then
        self.n_plain = self.age + (0 if linear else WARM_UP)  # [...] how many of them are plain

    def next_state(self, x: Tensor, y: Tensor, residual: Tensor) -> Tensor:
        """The state [..., j, h] after x, of which the iteration made y."""
        self.history = [*self.history[1 - WINDOW :], (x, y)]
        self.age = self.age + 1  # [...]
        if not self.linear:
            y = self._guard(y, residual)  # [..., j, h]
        combine = self.age > self.n_plain  # [...]
        if not combine.any():
            return y
        return _combination(self.history, self.age).to(y.dtype).where(combine[..., None, None], y)

    def _guard(self, y: Tensor, residual: Tensor) -> Tensor:
        """y [..., j, h], or the last plain state where combined ones have failed."""
        self.plain = y.where((self.age <= self.n_plain)[..., None, None], self.plain)  # [..., j, h]
        self.least = self.least.minimum(residual)  # [...]
        failed = (self.age > self.n_plain + 1) & (residual > GROWTH * self.least)  # [...]
        self.least = self.least.where(~failed, math.inf)  # [...]
        self.age = self.age.where(~failed, 0)  # [...]
        self.n_plain = self.n_plain.where(~failed, 2 * self.n_plain)  # [...]
        return self.plain.where(failed[..., None, None], y)


def _combination(history: list[tuple[Tensor, Tensor]], age: Tensor) -> Tensor:
    """The next state: sum_k alpha_k y_k, where alpha, of sum 1, makes |sum_k alpha_k (y_k - x_k)| least.

    The errors are scaled to unit length first, for they differ by orders of magnitude.

    Args:
        age: [...] how many of the last states count.
    """
    dtype = compute_dtype(history[-1][1].dtype)
    with without_autocast(history[-1][1]):
        # [..., k, n] each, of the last k states of n numbers
        xs, ys = (torch.stack(states, -3).to(dtype).flatten(-2) for states in zip(*history, strict=True))
        errors = ys - xs  # [..., k, n]
        length = torch.linalg.vector_norm(errors, dim=-1).clamp(min=torch.finfo(dtype).tiny)  # [..., k]
        back = torch.arange(len(history), 0, -1, device=ys.device)  # [k]
        length = length.where(back <= age.clamp(min=1)[..., None], math.inf)  # [..., k], of weight 0
        unit = errors / length[..., None]  # [..., k, n]
        # Where errors are all but parallel the least change is taken.
        ridge = torch.eye(len(history), dtype=dtype, device=ys.device) * 10 * torch.finfo(dtype).eps  # [k, k]
        weight = length.amin(-1, keepdim=True) / length  # [..., k]
        alpha = torch.linalg.solve(unit @ unit.mT + ridge, weight) * weight  # [..., k]
        alpha = alpha / alpha.sum(-1, keepdim=True)  # [..., k]
        return (alpha[..., None, :] @ ys).view(history[-1][1].shape)  # [..., j, h]
