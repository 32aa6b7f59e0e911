"""Hold the gates and scales of a module fixed, so that it becomes affine in its input.

An activation such as GELU is its argument times a gate, f(u) = (f(u) / u) u. A normalisation is a linear map
times a scale. Attention is a weighted mean. A sigmoid or a softmax is itself a gate. A module that runs under
``Gates`` returns its usual result, but its gradient treats gates, weights and scales as constants. If it runs
again on another input, it uses the same gates, weights and scales.

Every tensor that depends on x carries a mark. If a tensor is neither affine in x nor held fixed, its mark is
the name of the operation that made it. This is allowed if the tensor ends in a gate, like the scores of
attention.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vecroute.compose import rules
from vecroute.compose.rules import NoScore, NotAffine

# Marks of tensors that depend on x. Any other mark is the name of an operation that is not affine.
AFFINE = "affine"
GATE = "gate"  # affine, and the result of an activation: in a product it is the gate
HELD = "held"

SEVERAL = (tuple, list)  # every operation runs the checks below, so they must be fast
RETURNED = (Tensor, *SEVERAL)  # other results are sizes, dtypes, ...


class Step(NamedTuple):
    """One call of the first run with an argument that depends on x."""

    name: str
    affine: Callable[..., Any] | None  # the function that later runs call instead; None: the operation itself
    mark: str


class Gates(TorchFunctionMode):
    """The gates and scales of one module: set by its first run, held fixed in every later run.

    Args:
        source: a weight such as the table of word embeddings. In the first run, the result of the operation
            that uses this weight becomes x, and is stored as ``x``.
    """

    def __init__(self, source: Tensor | None = None) -> None:
        super().__init__()
        self.source, self.x = source, torch.empty(0)
        self.steps: list[Step] = []
        self.calls: int | None = None  # number of steps that this run has used; None in the first run

    def run(self, module: Callable[[Tensor], Any], x: Tensor) -> Any:
        """Return module(x) in the first run, and the value of its affine map at x in later runs."""
        x = x.clone()  # a copy that can carry a mark, and that modules may change in place
        with self:
            x_out = module(_mark(x, AFFINE))
        self._end()
        return x_out

    def run_from_source(self, module: Callable[[], Any], x: Tensor | None = None) -> Any:
        """Do the same as ``run`` for a module that computes x itself, from ``source``. Later runs pass x."""
        self.given, self.met = x, 0
        with self:
            x_out = module()
        if self.met != 1:
            raise NotAffine(f"its embeddings, which it computes {self.met} times in a run,")
        self._end()
        return x_out

    def _end(self) -> None:
        if self.calls not in (None, len(self.steps)):
            raise NotAffine("its code, which took another path through its operations,")
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.source is not None and len(args) > 1 and args[1] is self.source:
            return self._from_source(func, args, kwargs)
        marks = _marks(args, kwargs)
        if not marks:
            with torch.no_grad():  # only x needs gradients
                return func(*args, **kwargs)
        name = name_of(func)
        if name in rules.DECISIONS:
            raise NotAffine(f"{name}, by which values decide what is computed,")
        if name in rules.INDEPENDENT:
            return func(*args, **kwargs)
        if self.calls is None:
            return self._first(func, name, args, kwargs, marks)
        return self._again(func, name, args, kwargs)

    def _from_source(self, func, args, kwargs):
        self.met += 1
        if self.given is None:
            with torch.no_grad():
                self.x = func(*args, **kwargs)
            self.x = self.x.detach().requires_grad_()
        return _mark((self.x if self.given is None else self.given).clone(), AFFINE)

    def _first(self, func, name, args, kwargs, marks):
        """Call an operation, store its affine map for later runs, and mark its result."""
        plain, writes = plain_name(name), in_place(name, kwargs)
        affine: Callable[..., Any] | None = None
        mark = mark_of(plain, args, kwargs, marks)
        if mark == HELD and plain not in rules.RANDOM and plain not in rules.CONSTANT:
            out = func(*args, **kwargs)
        elif plain in rules.CONSTANT:
            with torch.no_grad():
                out = func(*args, **kwargs)
            affine = rules.constantly(out)
        elif mark in (AFFINE, GATE, HELD) and plain in rules.RULES:
            copied = (args[0].clone(), *args[1:]) if writes else args
            out, affine = rules.RULES[plain](func, *copied, **kwargs)
        elif mark in (AFFINE, GATE):
            hold = held_factor(plain, args)
            if hold is None:
                out = func(*_without_gradients(args), **kwargs)
            else:
                affine = rules.times(hold, args[hold].detach())
                out = affine(*args)
        else:
            with torch.no_grad():
                out = func(*args, **kwargs)
        if isinstance(out, Tensor) and not (out.is_floating_point() or out.is_complex()):
            affine, mark = rules.constantly(out), HELD
        if name == "__setitem__":
            out = args[0]
        elif not isinstance(out, RETURNED):
            return out
        elif affine is not None and writes:
            out, affine = args[0].copy_(out), rules.copied(affine)
        self.steps.append(Step(name, affine, mark))
        if mark == HELD:
            _name_gate(
                out, plain if plain in rules.CONSTANT else _gate_of((*args, *kwargs.values())) or plain
            )
        return _mark(out, mark)

    def _again(self, func, name, args, kwargs):
        """Call the same operation with the gates of the first run."""
        assert self.calls is not None
        if self.calls == len(self.steps) or self.steps[self.calls].name != name:
            out = func(*args, **kwargs)
            if not isinstance(out, RETURNED) and name != "__setitem__":
                return out
            raise NotAffine("its code, which took another path through its operations,")
        step = self.steps[self.calls]
        out = func(*args, **kwargs) if step.affine is None else step.affine(*args, **kwargs)
        if name == "__setitem__":
            out = args[0]
        elif not isinstance(out, RETURNED):
            return out
        self.calls += 1
        return _mark(out, step.mark)


def mark_of(plain: str, args: tuple, kwargs: dict, marks: list[str]) -> str:
    """Return the mark of a result from the marks of the arguments: AFFINE, GATE, HELD or a name."""
    if plain in rules.CONSTANT:
        return HELD
    refused = [mark for mark in marks if mark not in (AFFINE, GATE, HELD)]
    moving = [mark for mark in marks if mark in (AFFINE, GATE)]
    if not moving and not refused:
        return HELD
    if plain in rules.RULES:
        carrier = rules.carrier(plain, args, kwargs)
        own = _marks((carrier,), {})
        if any(mark not in (AFFINE, GATE, HELD) for mark in own):
            return refused[0]
        if plain == "dropout":
            return own[0]
        return GATE if rules.RULES[plain] is rules.gated else AFFINE
    if plain in rules.MULTILINEAR:
        return _mark_of_product(plain, args, marks, moving, refused)
    if refused:
        return refused[0]
    if plain in rules.LINEAR:
        return GATE if moving == [GATE] and plain not in rules.SUMS else AFFINE
    return plain


def _mark_of_product(plain: str, args: tuple, marks: list[str], moving: list[str], refused: list[str]) -> str:
    if plain == "mul" and len(marks) == 2 and len(moving) == 1:
        return AFFINE  # the other factor is held as its gate
    if plain == "mul" and len(moving) == 2 and len(set(moving)) == 2:
        return AFFINE
    if plain == "div":
        below = _marks(args[1:2], {})
        if below and below[0] != HELD:
            return refused[0] if refused else plain
    if refused:
        return refused[0]
    if len(moving) > 1 and not (plain in rules.WITH_SUMMAND and len(_marks(args[1:], {})) < len(moving)):
        return plain
    return moving[0] if plain in ("mul", "div") else AFFINE


def held_factor(plain: str, args: tuple) -> int | None:
    """If both factors of a product depend on x, return which one is held as a gate, 0 or 1; else None."""
    if plain != "mul":
        return None
    marks = [_marks((arg,), {}) for arg in args[:2]]
    if not (marks[0] and marks[1]) or HELD in (marks[0][0], marks[1][0]):
        return None
    return 0 if marks[1][0] == AFFINE or marks[0][0] not in (AFFINE, GATE) else 1


def check_affine_marks(out: Any, *, or_held: bool = False) -> None:
    """Raise unless a tensor, or each of several, is affine in x with its gates held.

    Raises:
        NotAffine: an operation is not affine, or the result is a gate. The message names the operation.
    """
    for tensor in out if isinstance(out, tuple | list) else [out]:
        mark = getattr(tensor, "depends_on_x", None)
        if mark == HELD and not or_held:
            raise NoScore(getattr(tensor, "gate", "an operation"))
        if mark not in (None, AFFINE, GATE, HELD):
            raise NotAffine(str(mark))


@contextmanager
def split_of(name: str) -> Iterator[None]:
    """Name the module that cannot be split into contributions in the errors raised inside."""
    try:
        yield
    except NotAffine as error:
        raise ValueError(f"{name} cannot be split into contributions: {error}") from error


def name_of(func: Any) -> str:
    """Return the name of a torch function, or of the property that it reads."""
    name = getattr(func, "__name__", type(func).__name__)
    return func.__self__.__name__ if name == "__get__" else name


@cache
def plain_name(name: str) -> str:
    """Return the name of the operation without the underscore of its in-place form."""
    name = rules.OTHER_NAMES.get(name, name)
    return name[:-1] if ends_in_place(name) else name


@cache
def ends_in_place(name: str) -> bool:
    """Return whether a name ends in the underscore of operations that change their first argument."""
    return name.endswith("_") and not name.endswith("__")


def in_place(name: str, kwargs: dict) -> bool:
    """Return whether a call changes its first argument."""
    return bool(kwargs and kwargs.get("inplace")) or ends_in_place(name)


def _without_gradients(args: Any) -> Any:
    """Detach weights and indices, which are not part of the graph of x."""
    if isinstance(args, tuple):
        return tuple([_without_gradients(arg) if isinstance(arg, (Tensor, tuple)) else arg for arg in args])
    if not isinstance(args, Tensor) or hasattr(args, "depends_on_x"):
        return args
    if args.is_inference():
        return args.clone()
    return args.detach() if args.requires_grad else args


def _mark(value: Any, mark: str) -> Any:
    """Mark a tensor, or each tensor in a tuple or list."""
    if isinstance(value, Tensor):
        value.depends_on_x = mark  # type: ignore[attr-defined]
    else:
        for part in value:
            if isinstance(part, Tensor):
                part.depends_on_x = mark if part.is_floating_point() else HELD  # type: ignore[attr-defined]
    return value


def _name_gate(value: Any, name: str) -> None:
    """Store the name of the operation that made a gate, for error messages."""
    for tensor in value if isinstance(value, tuple | list) else [value]:
        if isinstance(tensor, Tensor):
            tensor.gate = name  # type: ignore[attr-defined]


def _gate_of(args: tuple) -> str | None:
    """Return the name of the operation that made the first gate among the arguments."""
    for value in args:
        found = _gate_of(tuple(value)) if isinstance(value, tuple | list) else getattr(value, "gate", None)
        if found is not None:
            return found
    return None


def _marks(args: Sequence, kwargs: dict) -> list[str]:
    """Return the marks of all arguments that depend on x, including those in tuples and lists."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        mark = getattr(value, "depends_on_x", None)
        if mark is not None:
            found.append(mark)
        elif isinstance(value, SEVERAL):
            found += _marks(value, {})
    return found
