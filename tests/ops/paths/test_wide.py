"""Pairs in bfloat16: with many outputs of a fixed length, where products are rounded to it."""

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

import vecroute as vr
from tests.helpers.problems import problem_of
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import rms, twin, upstream
from vecroute.ops import Tuning, loop
from vecroute.ops.autograd import operator_arguments
from vecroute.ops.backends.fused import pairs as fused
from vecroute.ops.backends.fused import steps as fused_steps
from vecroute.ops.chunks import Chunk, Room, as_operand
from vecroute.ops.columns import new_matrix
from vecroute.ops.passes import new_kept
from vecroute.ops.paths import wide
from vecroute.ops.plan import Plan
from vecroute.ops.problem import Grads, Problem

CASES = [  # batch, n_inp, n_out, n_iters, rows of a chunk
    ((), 40, 24, 2, 0),
    ((), 37, 20, 3, 0),  # a size that is no power of two
    ((), 40, 24, 2, 13),
    ((), 7, 600, 2, 0),  # outputs in more than one block
    ((2,), 100, 24, 1, 40),
    ((2,), 30, 24, 3, 16),  # samples one after another
    ((2,), 30, 20, 2, 16),  # the same, with rows padded with zeros
    ((), 40, 10, 2, 0),  # pairs wait in the rows of a gradient
    ((2,), 40, 10, 2, 0),
]


def rounded(values, dtype, to, mode, cut_off=interpreter._convert_float):
    """Convert floats like the interpreter, but round to the nearest bfloat16, as a GPU does."""
    if str(dtype) != "fp32" or str(to) != "bf16":
        return cut_off(values, dtype, to, mode)
    nearest = torch.from_numpy(np.array(values, np.float32)).bfloat16()
    return nearest.view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(autouse=True)
def device(monkeypatch, limits):
    """A GPU if there is one, else Triton's interpreter. The wide path starts at few outputs."""
    limits(WIDE_OUTPUTS=(8, 4096))
    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield device


@pytest.fixture
def dtypes(monkeypatch):
    """A dict that collects the dtypes of the arguments of kernels over pairs, by name."""
    dtypes = {}

    def seen(kernel):
        class Seen:
            def __getitem__(self, grid):
                def launch(**arguments):
                    found = {n: a.dtype for n, a in arguments.items() if isinstance(a, torch.Tensor)}
                    dtypes.setdefault(kernel.__name__, []).append(found)
                    return kernel[grid](**arguments)

                return launch

        return Seen()

    for name in ("coefficients", "coefficients_backward"):
        monkeypatch.setattr(fused, f"{name}_kernel", seen(getattr(fused, f"{name}_kernel")))
    for name in ("rows_kernel", "rows_backward_kernel"):
        monkeypatch.setattr(wide, name, seen(getattr(wide, name)))
    return dtypes


@pytest.fixture
def saved(monkeypatch):
    """A list with an entry for each forward pass: the arrays it saves for the backward pass, by name."""
    saved, forward = [], loop.forward

    def seen(p, *args):
        x_out, memory = forward(p, *args)
        arrays = p.plan.saved
        saved.append({name: arrays.tensor(memory, name) for name in arrays.arrays})
        return x_out, memory

    monkeypatch.setattr(loop, "forward", seen)
    return saved


def make(n_inp: int, n_out: int, n_iters: int, rows: int = 0, **sizes: int) -> vr.VectorRouting:
    sizes = {"n_inp": n_inp, "n_out": n_out, "d_inp": 32, "d_out": 16, **sizes}
    layer = with_noise(vr.VectorRouting(**sizes, n_iters=n_iters, implementation="fused"))
    return with_chunks(layer, rows)


def under_autocast(layer: vr.VectorRouting, x_inp: torch.Tensor, **options) -> dict[str, torch.Tensor]:
    """Return x_out and every gradient, under autocast."""
    layer.zero_grad()
    x_inp = x_inp.detach().clone().requires_grad_()  # [..., i, d]
    with torch.autocast(x_inp.device.type, torch.bfloat16):
        x_out = layer(x_inp, **options)  # [..., j, h]
    x_out.backward(upstream(x_out))
    grads = {f"grad {name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"x_out": x_out.detach(), "grad x_inp": x_inp.grad, **grads}


def assert_within_autocast(layer: vr.VectorRouting, x_inp: torch.Tensor, **options) -> None:
    """Check that errors are at most twice the errors of the reference under autocast."""
    got = under_autocast(layer, x_inp, **options)
    reference = under_autocast(twin(layer, torch.float32), x_inp, **options)
    truth = under_autocast(twin(layer, torch.float64), x_inp.double(), **options)
    for name, exact in truth.items():  # with one iteration, scores have no gradient
        error, of_reference = (rms(value.double() - exact) for value in (got[name], reference[name]))
        allowed = 2 * of_reference + 1e-5 * rms(exact)
        if exact.numel() > 1:
            assert error <= allowed, f"{name}: {error:.3e}, the reference has {of_reference:.3e}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_errors_are_those_of_autocast(case, nan_filled_memory):
    batch, n_inp, *rest = case
    assert_within_autocast(make(n_inp, *rest), torch.randn(*batch, n_inp, 32))


@pytest.mark.parametrize(("n_inp", "n_out"), [(40, 24), (40, 20), (None, 24)])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_steps_are_rounded_too(batch, n_inp, n_out, monkeypatch, nan_filled_memory):
    """Operands of steps are rounded, as on a GPU."""
    monkeypatch.setattr(Plan, "step_dtype", torch.bfloat16)
    assert_within_autocast(make(n_inp, n_out, 3), torch.randn(*batch, 40, 32))


def test_rows_of_whole_16_bytes(nan_filled_memory):
    """Rows are padded with zeros. Pairs do not wait, because there is no memory for the padding."""
    layer, x_inp = make(40, 20, 2, d_inp=128), torch.randn(40, 128)
    p = make_problem(layer, x_inp)
    M = new_matrix(p, 2)  # [1, 48, d]
    assert (p.width, M.shape[1], new_kept(p).shape[2]) == (24, 48, 24)
    assert not M[:, 20:24].any()
    assert not M[:, 44:].any()
    assert not p.plan.waits_in
    aligned = make_problem(make(40, 24, 2, d_inp=128), x_inp)
    assert aligned.width == 24
    assert aligned.plan.waits_in == "grad_W_A"
    assert_within_autocast(layer.requires_grad_(), x_inp)


def test_what_is_rounded(dtypes):
    """Pairs are rounded, unless phi is returned. Parameters and gradients are not rounded."""
    layer, x_inp = make(20, 16, 2), torch.randn(20, 32, requires_grad=True)
    with torch.autocast(x_inp.device.type, torch.bfloat16):
        layer(x_inp).sum().backward()
        phi = layer.route(x_inp).phi
    rows, backward = dtypes["rows_kernel"], dtypes["rows_backward_kernel"]
    assert len(rows) == 3
    for seen in rows:
        assert {name for name, dtype in seen.items() if dtype == torch.bfloat16} == {"phi", "dot"}
    for seen in backward:
        assert {name for name, dtype in seen.items() if dtype == torch.bfloat16} == {
            "pairs",
            "dot",
            "waiting",
        }
    (last,) = dtypes["coefficients_kernel"]
    assert torch.bfloat16 not in last.values()
    assert phi.dtype == torch.float32
    assert not torch.equal(phi, phi.bfloat16().float())


def test_sums_of_phi_are_of_what_it_was_before(dtypes):
    """The sums add unrounded phi, so they have the digits of float32, but products those of bfloat16."""
    p = make_problem(make(40, 24, 2), torch.randn(40, 32))
    like, room, f = Chunk(slice(0, 1), slice(0, 1), slice(0, 40)), Room(), torch.rand(1, 40)
    dot = torch.randn(1, 40, 24).bfloat16()
    phi, to_sum, fill = fused.coefficients(p, like, None, dot, None, f, torch.bfloat16, room)
    fill(like)
    exact, _, fill = fused.coefficients(p, like, None, dot, None, f, torch.float32, Room())
    fill(like)
    assert to_sum.shape[-1] < 40
    torch.testing.assert_close(to_sum.sum(-1), exact.sum(1), rtol=1e-5, atol=1e-5)
    assert phi.dtype == torch.bfloat16
    torch.testing.assert_close(phi.float(), exact, rtol=2**-7, atol=0)


@pytest.mark.parametrize("shift", [35, -200])
@pytest.mark.parametrize("n_iters", [2, 3])
def test_extreme_scores(shift, n_iters):
    """For such scores, f(z) is 1 or 0 in float32, but 1 - f(z) and R are not."""
    layer = make(13, 20, n_iters)
    with torch.no_grad():
        layer.B_S += shift
    assert_within_autocast(layer, torch.randn(2, 13, 32))


@pytest.mark.parametrize(
    "which",
    ["fewer outputs", "more outputs", "not aligned", "any length", "float32", "masked", "waiting"],
)
def test_other_pairs_are_not_rounded(which, dtypes, limits):
    """Pairs that wait until the end of a backward pass are float32 from its beginning."""
    limits(WIDE_OUTPUTS=(8, 15 if which == "more outputs" else 16))
    d = 48 if which == "waiting" else 32
    n_out = {"fewer outputs": 4, "not aligned": 14}.get(which, 16)
    layer = make(None if which == "any length" else 20, n_out, 2, d_inp=d)
    x_inp = torch.randn(20, d, requires_grad=True)
    mask = torch.rand(20) > 0.3 if which == "masked" else None
    with torch.autocast(x_inp.device.type, torch.bfloat16, enabled=which != "float32"):
        x_out = layer(x_inp, mask)
    x_out.sum().backward()
    assert "rows_backward_kernel" not in dtypes
    assert ("rows_kernel" in dtypes) == (which == "waiting")
    others = dtypes.get("coefficients_kernel", []) + dtypes["coefficients_backward_kernel"]
    pairs = [seen[name] for seen in others for name in ("dot", "phi", "pairs") if name in seen]
    assert set(pairs) == {torch.float32}


@pytest.mark.parametrize("missing", [0, 1], ids=["fits", "does not fit"])
def test_dot_products_are_kept_for_a_backward_alone(missing, saved, nan_filled_memory):
    layer, x_inp = make(20, 16, 3), torch.randn(20, 32)
    layer.tuning = Tuning(keep_bytes=20 * 2 * 16 * 2 - missing)
    with torch.autocast(x_inp.device.type, torch.bfloat16):
        layer(x_inp)
        with torch.no_grad():
            layer(x_inp)
        layer.route(x_inp, phi_out=torch.empty(20, 16))
    kept = [arrays["kept"] for arrays in saved]
    assert [len(each) for each in kept] == [0 if missing else 1, 0, 0]
    assert kept[0].dtype == torch.bfloat16
    assert kept[0].isfinite().all()


def test_x_hat_is_made_once_if_it_is_small(monkeypatch, limits, nan_filled_memory):
    made, scores_matrix, n_iters = [], fused_steps.scores_matrix, 3
    monkeypatch.setattr(fused_steps, "scores_matrix", lambda *args: made.append(1) or scores_matrix(*args))
    layer, x_inp, results = make(20, 16, n_iters), torch.randn(20, 32), []
    for missing in (0, 1):
        limits(SMALL_COPY=(n_iters - 1) * 16 * 32 * 2 - missing)
        results.append({name: value.clone() for name, value in under_autocast(layer, x_inp).items()})
        assert len(made) == (n_iters - 1) * (3 if missing else 1)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_kept_dot_products_can_be_used_twice():
    layer, x_inp = make(20, 16, 2), torch.randn(20, 32, requires_grad=True)
    with torch.autocast(x_inp.device.type, torch.bfloat16):
        x_out = layer(x_inp)
    first, second = (torch.autograd.grad(x_out.sum(), x_inp, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def make_problem(layer: vr.VectorRouting, x_inp: torch.Tensor, **tuning: int) -> Problem:
    with torch.autocast(x_inp.device.type, torch.bfloat16):
        tuning = Tuning(**tuning) if tuning else None
        return problem_of(layer.requires_grad_(False), x_inp, tuning=tuning)


@pytest.mark.parametrize("missing", [0, 1], ids=["small", "not small"])
def test_x_inp_is_rounded_once_if_it_is_small(missing, limits):
    """This holds with and without a backward pass."""
    x_inp, rows = torch.randn(20, 32), slice(5, 20)
    limits(SMALL_COPY=2 * x_inp.numel() - missing)
    p = make_problem(make(20, 16, 2), x_inp, keep_bytes=0)
    once, again = (as_operand(p, p.x_inp[:, rows], Chunk(slice(0, 1), slice(0, 1), rows)) for _ in range(2))
    assert torch.equal(once[0], x_inp[5:].bfloat16())
    assert (once.data_ptr() == again.data_ptr()) == (not missing)
    assert ("x_inp" in p.copies) == (not missing)


def test_copies_are_kept_for_the_backward(monkeypatch, saved):
    """x_inp and weights are rounded once and stored, except a masked x_inp, or without a graph."""

    def copies() -> dict[str, tuple[int, ...]]:
        """Shapes of the copies that the last forward pass saved."""
        return {name: tuple(t.shape) for name, t in saved[-1].items() if name.startswith("copy of")}

    monkeypatch.setattr(Plan, "step_dtype", torch.bfloat16)
    made, in_dtype = [], Problem.in_dtype

    def seen(p, name, *args):
        made.extend([name] if name not in p.copies else [])
        return in_dtype(p, name, *args)

    monkeypatch.setattr(Problem, "in_dtype", seen)
    layer, x_inp = make(20, 16, 2), torch.randn(20, 32, requires_grad=True)
    stored = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t),
        torch.autocast(x_inp.device.type, torch.bfloat16),
    ):
        layer(x_inp).sum().backward()
        assert made == []  # the forward pass fills the copies, and the backward finds them
        weights = {"copy of W_F2": (32, 16), "copy of W_G1": (16, 32)}
        assert copies() == {"copy of x_inp": (1, 20, 32), **weights}
        assert saved[-1]["copy of x_inp"].dtype == torch.bfloat16
        assert torch.equal(saved[-1]["copy of x_inp"][0], x_inp.bfloat16())
        memory = [t.untyped_storage().data_ptr() for t in stored]
        assert saved[-1]["copy of x_inp"].untyped_storage().data_ptr() in memory
        stored.clear()
        with torch.no_grad():
            layer(x_inp)
        assert stored == []
        layer(x_inp, torch.rand(20) > 0.3)
        assert copies() == weights


@pytest.mark.parametrize("steps", ["rounded", "exact"])
def test_opcheck(steps, monkeypatch, nan_filled_memory):
    """Saved memory has the size that compilers expect, and unwritten memory is always the same."""
    if steps == "rounded":
        monkeypatch.setattr(Plan, "step_dtype", torch.bfloat16)
    layer = make(9, 8, 2, d_inp=4, d_out=2)
    options = {"implementation": "fused", "tuning": layer.tuning}
    x_inp = torch.randn(2, 9, 4, requires_grad=True)
    with torch.autocast(x_inp.device.type, torch.bfloat16):
        arguments = operator_arguments(x_inp, layer.weights(), None, None, 1 / 8, **options)
    result = torch.library.opcheck(torch.ops.vecroute.loop.default, (*arguments, 2, False, None))
    assert set(result.values()) == {"SUCCESS"}


def test_weights_are_rounded_once(monkeypatch):
    p = make_problem(make(20, 16, 2), torch.randn(20, 32))
    monkeypatch.setitem(vars(p.plan), "step_dtype", torch.bfloat16)
    y, s, grads = torch.randn(1, 16, 32), torch.randn(1, 16), Grads()
    x_out = p.steps.outputs(p, y, s)
    p.steps.predictions_backward(p, y, x_out, p.steps.predicted(p, x_out), grads)
    p.steps.outputs_backward(p, x_out, y, s, grads, torch.empty_like(y))
    assert {name: copy.dtype for name, copy in p.copies.items()} == dict.fromkeys(
        ("W_F2", "W_G1"), torch.bfloat16
    )
