"""Routing to convergence: the fixed point, its implicit gradient, and the report of the search."""

import copy
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.paths import ROOT
from tests.helpers.samples import D_INP, inputs, make
from vecroute import ops
from vecroute.layers.converge import WARM_UP, WINDOW, fixed_point, solve

# The fused kernels are slow in Triton's interpreter, and take the same steps as "chunked". Only tests that
# depend on the kernels use them.
QUICK = ("reference", "chunked", "general", "general over inputs")
LAYERS = (*QUICK, "fused")


def layer_of(kind: str, n_inp: int | None = None, dtype=torch.float64, **converge) -> nn.Module:
    """Build a small layer with a ``Converge``."""
    layer = make("auto" if kind in ("chunked", "fused") else kind, n_inp).to(dtype)
    if kind in ("chunked", "fused"):
        layer.implementation = kind
    layer.n_iters = vr.Converge(**converge)
    return layer


def scaled(scale: float, n_iters: object = 2, implementation: str = "reference") -> vr.VectorRouting:
    """Build a layer whose scores are steeper than the initial ones by a factor."""
    torch.manual_seed(0)
    options = {"n_inp": None, "n_out": 4, "d_inp": 8, "d_out": 8, "dtype": torch.float64}
    layer = vr.VectorRouting(n_iters=n_iters, implementation=implementation, **options)
    with torch.no_grad():
        layer.W_S.fill_(scale)
    return layer


def as_general(vector: vr.VectorRouting) -> vr.GeneralRouting:
    """Return Algorithm 1 with the networks and parameters of a layer of Algorithm 2 of variable length."""
    sizes = {"n_out": vector.n_out, "d_inp": vector.d_inp}
    layer = vr.GeneralRouting(
        A=vr.networks.LinearActivation(n_inp=None, d_inp=vector.d_inp),
        F=vr.networks.EfficientVotes(**sizes, d_out=vector.d_out),
        G=vr.networks.EfficientPrediction(**sizes, d_out=vector.d_out),
        S=vr.networks.LogLogistic(n_inp=None, **sizes),
        n_inp=None,
        **sizes,
    ).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(getattr(vector, name.split(".")[-1]))
    return layer


def gradients(layer: nn.Module, x_inp: Tensor, **masks: Tensor) -> Tensor:
    """Return the gradients of x_inp and every parameter as one vector."""
    x_inp = x_inp.detach().requires_grad_()
    x_out = layer(x_inp, **masks)
    upstream = torch.linspace(-1, 1, x_out.numel(), dtype=x_out.dtype).view(x_out.shape).cos()
    grads = torch.autograd.grad(x_out, [x_inp, *layer.parameters()], upstream, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


# The fixed point


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("solver", ["iterate", "anderson"])
@pytest.mark.parametrize("stop", ["relative", "absolute"])
def test_another_iteration_changes_nothing(kind, solver, stop):
    x_inp, input_mask, pair_mask = inputs(batch=3, dtype=torch.float64)
    layer = layer_of(kind, tol=1e-9, max_iters=500, solver=solver, stop=stop)
    with torch.no_grad():
        x_out = layer.state(x_inp, input_mask, pair_mask)
        error = (layer.update(x_inp, x_out, input_mask, pair_mask) - x_out).norm(dim=(-2, -1))
    assert (error <= 1e-9 * (x_out.norm(dim=(-2, -1)) if stop == "relative" else 1)).all()
    convergence = layer.convergence
    assert convergence.converged.all()
    assert (convergence.residuals[..., -1] <= 1e-9).all()
    assert convergence.residuals.shape == (3, convergence.steps.max())


def test_random_layers_converge():
    """At least 99 of 100 untrained layers converge, by a residual that the test computes itself."""
    tol, settled, sizes = 1e-4, 0, torch.Generator().manual_seed(0)
    for number in range(100):
        n_inp, n_out, d_inp, d_out = torch.randint(2, 33, (4,), generator=sizes).tolist()
        layer = vr.VectorRouting(
            n_inp=n_inp if number % 2 else None,
            n_out=n_out,
            d_inp=d_inp,
            d_out=d_out,
            n_iters=vr.Converge(tol, 200),
            dtype=torch.float64,
        )
        x_inp = torch.randn(n_inp, d_inp, dtype=torch.float64)
        with torch.no_grad():
            x_out = layer.state(x_inp)
            residual = (layer.update(x_inp, x_out) - x_out).norm() / x_out.norm()
        settled += bool(residual <= 2 * tol)
    assert settled >= 99


def uneven() -> tuple[Tensor, Tensor]:
    """Return inputs of five samples that need different numbers of steps, and their input_mask."""
    x_inp, input_mask, _ = inputs(batch=5, dtype=torch.float64)
    return x_inp * torch.arange(1, 6, dtype=torch.float64)[:, None, None], input_mask


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.filterwarnings("ignore:routing did not converge")
def test_plain_steps_are_iterations(kind):
    """A sample that took k steps equals n_iters = k + 1, since the first iteration is not counted."""
    x_inp, input_mask = uneven()
    layer = layer_of(kind, tol=1e-3, solver="iterate")
    x_out, convergence = layer(x_inp, input_mask), layer.convergence
    done = convergence.converged.nonzero().flatten().tolist()
    assert len(set(convergence.steps[done].tolist())) > 1
    for b in done:
        layer.n_iters = int(convergence.steps[b]) + 1
        torch.testing.assert_close(x_out[b], layer(x_inp[b], input_mask[b]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("solver", "tol", "error"), [("iterate", 1e-3, 1e-12), ("anderson", 1e-10, 1e-7)])
@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.filterwarnings("ignore:routing did not converge")
def test_samples_stop_by_themselves(kind, solver, tol, error):
    """A sample has the same result alone. Anderson steps magnify the rounding of other batch sizes."""
    x_inp, input_mask = uneven()
    layer = layer_of(kind, tol=tol, max_iters=100, solver=solver)
    whole, of_all = layer.route(x_inp, input_mask), layer.convergence
    assert len(set(of_all.steps.tolist())) > 1
    for b in of_all.converged.nonzero().flatten().tolist():
        alone = layer.route(x_inp[b], input_mask[b])
        torch.testing.assert_close(whole.x_out[b], alone.x_out, rtol=error, atol=error)
        torch.testing.assert_close(whole.phi[b], alone.phi, rtol=error, atol=error)
        assert solver == "anderson" or of_all.steps[b] == layer.convergence.steps


def test_x_init_is_where_the_search_starts():
    layer = layer_of("general", tol=1e-10, max_iters=500)
    x_inp, _, _ = inputs(dtype=torch.float64)
    x_out = layer(x_inp)
    again = layer(x_inp, x_init=x_out.detach())
    assert (layer.convergence.steps == 1).all()
    torch.testing.assert_close(again, x_out, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("batch", [(), (1,)])
def test_x_init_broadcasts_over_the_batch(batch):
    layer = layer_of("general", tol=1e-10, max_iters=500)
    x_inp, _, _ = inputs(dtype=torch.float64)
    x_init = torch.randn(*batch, *layer(x_inp).shape[1:], dtype=torch.float64)
    x_out = layer(x_inp, x_init=x_init)
    assert layer.convergence.steps.shape == (2,)
    torch.testing.assert_close(x_out, layer(x_inp, x_init=x_init.expand(x_out.shape)))


def test_wrong_x_init():
    layer = layer_of("general")
    x_inp, _, _ = inputs(dtype=torch.float64)
    x_init = layer(x_inp).detach()
    for wrong in (x_init[[0, 0, 0]], x_init[None]):
        expected = r"x_init must have leading dimensions broadcastable to those of x_inp, \[2\], got \["
        with pytest.raises(ValueError, match=expected):
            layer(x_inp, x_init=wrong)
    x_init[1] = torch.nan
    with pytest.raises(ValueError, match=r"in 1 of 2 samples: look for NaN .* in x_inp, x_init and"):
        layer(x_inp, x_init=x_init)


@pytest.mark.parametrize("kind", ["reference", "chunked", "fused"])
def test_packed_and_nested_samples(kind):
    layer = layer_of(kind, tol=1e-6)
    x_inp, _, _ = inputs(batch=2, dtype=torch.float64)
    samples = [x_inp[0], x_inp[1, :4]]
    packed = layer.route(torch.cat(samples), cu_seqlens=torch.tensor([0, 11, 11, 15], dtype=torch.int32))
    assert layer.convergence.steps.shape == (3,)
    assert layer.convergence.converged.all()
    assert (packed.x_out[1] == 0).all()  # a sample with no inputs
    alone = [layer.route(sample) for sample in samples]
    torch.testing.assert_close(packed.x_out[[0, 2]], torch.stack([r.x_out for r in alone]))
    torch.testing.assert_close(packed.phi, torch.cat([r.phi for r in alone]))
    nested = torch.nested.nested_tensor(samples, layout=torch.jagged)
    torch.testing.assert_close(layer(nested), packed.x_out[[0, 2]])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_sample_without_inputs(kind):
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer, mask = layer_of(kind), torch.tensor([[True] * 11, [False] * 11])
    grads = gradients(layer, x_inp, input_mask=mask)
    assert (layer(x_inp, mask)[1] == 0).all()
    assert layer.convergence.converged.all()
    assert grads.isfinite().all()


# The gradient


@pytest.mark.parametrize(("tol", "bound"), [(1e-7, 1e-4), (1e-12, 1e-8)])
@pytest.mark.parametrize("solver", ["iterate", "anderson"])
@pytest.mark.parametrize("n_inp", [11, None], ids=["fixed", "variable"])
@pytest.mark.parametrize("kind", QUICK)
def test_the_implicit_gradient_is_the_unrolled_one(kind, n_inp, solver, tol, bound):
    assert_as_unrolled(kind, n_inp, solver, tol, bound)


@pytest.mark.parametrize("n_inp", [11, None], ids=["fixed", "variable"])
def test_the_implicit_gradient_of_the_fused_kernels(n_inp):
    assert_as_unrolled("fused", n_inp, "anderson", 1e-12, 1e-8)


def assert_as_unrolled(kind: str, n_inp: int | None, solver: str, tol: float, bound: float) -> None:
    """Compare the gradients of a converged layer with the gradients of many iterations of the reference."""
    x_inp, input_mask, pair_mask = inputs(dtype=torch.float64)
    masks = {"input_mask": input_mask, "pair_mask": pair_mask}
    layer = layer_of(kind, n_inp, tol=tol, max_iters=500, solver=solver)
    implicit = gradients(layer, x_inp, **masks)
    assert layer.convergence.converged.all()
    assert layer.convergence.steps.max() > 3
    layer.n_iters = 400 if isinstance(layer, vr.GeneralRouting) else 120  # some converge slowly
    if isinstance(layer, vr.VectorRouting):
        layer.implementation = "reference"
    unrolled = gradients(layer, x_inp, **masks)
    assert (implicit - unrolled).norm() <= bound * unrolled.norm()


def test_the_implicit_gradient_in_single_precision():
    layer = layer_of("chunked", tol=1e-7, dtype=torch.float32)
    x_inp, _, _ = inputs()
    implicit = gradients(layer, x_inp)
    assert layer.convergence.converged.all()
    layer.n_iters, layer.implementation = 100, "reference"
    unrolled = gradients(layer.double(), x_inp.double())
    assert (implicit - unrolled).norm() <= 1e-4 * unrolled.norm()


@pytest.mark.parametrize("kind", ["reference", "general"])
def test_the_gradient_of_phi(kind):
    """The gradient of phi goes through the state too, and equals the unrolled gradient."""
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer = layer_of(kind, tol=1e-12, max_iters=500)
    grads = []
    for n_iters in (layer.n_iters, 100):
        layer.n_iters = n_iters
        loss = layer.route(x_inp).phi.sin().sum()
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*layer.parameters()])]))
    assert (grads[0] - grads[1]).norm() <= 1e-8 * grads[1].norm()


def stored(layer: nn.Module, x_inp: Tensor) -> int:
    """Return the number of bytes that autograd stores for the backward pass."""
    sizes = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
    ):
        layer(x_inp)
    return sum(sizes.values())


@pytest.mark.parametrize("kind", ["reference", "chunked", "general"])
@pytest.mark.filterwarnings("ignore:routing did not converge")
def test_what_is_stored_does_not_grow_with_the_steps(kind):
    x_inp = torch.randn(20, 12, 8, dtype=torch.float64, requires_grad=True)
    layer = scaled(40, 2, "reference" if kind == "general" else kind)
    if kind == "general":
        layer = as_general(layer)
    bytes_of = {}
    for n_steps in (2, 200):
        layer.n_iters = vr.Converge(1e-8, n_steps, "iterate")
        bytes_of[n_steps] = stored(layer, x_inp)
        assert layer.convergence.steps.max() == n_steps
    assert bytes_of[200] == bytes_of[2]
    layer.n_iters = 20
    assert kind == "chunked" or stored(layer, x_inp) > 3 * bytes_of[2]  # so the test can fail


PEAK = """
import resource, sys, warnings, torch, vecroute as vr
from tests.layers import test_converge as t
warnings.simplefilter("ignore")
n_iters = eval(sys.argv[1])
layer, small = t.scaled(40, n_iters), t.scaled(40, n_iters)
small(torch.randn(2, 12, 8).double()).sum().backward()
x_inp = torch.randn(2000, 12, 8, dtype=torch.float64, requires_grad=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
layer(x_inp).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_peak_of_memory_does_not_grow_with_the_steps():
    """Measure peaks in kB, in a new process each. 200 unrolled iterations would take 2 GB."""

    def peak(n_iters: str) -> int:
        command = [sys.executable, "-c", PEAK, n_iters]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    few, many = (peak(f"vr.Converge(1e-8, {n}, 'iterate')") for n in (2, 200))
    unrolled = peak("200")
    assert many - few < 0.05 * unrolled, (few, many, unrolled)


def test_gradients_only_once():
    x_inp, _, _ = inputs(dtype=torch.float64)
    x_inp.requires_grad_()
    (grad,) = torch.autograd.grad(layer_of("reference")(x_inp).sin().sum(), x_inp, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("kind", QUICK)
def test_nothing_is_solved_backward_where_nobody_asks(kind):
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer = layer_of(kind).requires_grad_(False)
    assert not layer(x_inp).requires_grad
    with torch.inference_mode():
        assert layer(x_inp).isfinite().all()


@pytest.mark.parametrize("n_inp", [11, None])
def test_a_step_whose_x_out_alone_has_a_gradient(n_inp):
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer = layer_of("chunked", n_inp).requires_grad_(False)
    how = {"implementation": "chunked", "tuning": layer.tuning, "cu_seqlens": None}
    step, pull = ops.steps(x_inp, layer.weights(), None, None, layer.prior, **how)
    x_out = step(None)[0].requires_grad_()  # [batch, j, h]
    upstream = torch.randn_like(x_out)
    step(x_out)[0].backward(upstream)
    torch.testing.assert_close(x_out.grad, pull(x_out.detach(), upstream))


# Credit


@pytest.mark.parametrize("kind", QUICK)
def test_credit_and_contributions_stay_exact(kind):
    x_inp, input_mask, _ = inputs(dtype=torch.float64)
    layer = layer_of(kind, tol=1e-6)
    for n_iters in (layer.n_iters, vr.Converge(1e-1, 5)):  # with a loose tolerance too
        layer.n_iters = n_iters
        why = vr.contributions(layer, x_inp, output=1, input_mask=input_mask)
        assert why.completeness_error.max() < 1e-12
    last = vr.VectorRouting(n_inp=5, n_out=2, d_inp=3, d_out=1, dtype=torch.float64)
    network = vr.Sequential(layer, last)
    credit = network.route(x_inp, input_mask).phi
    torch.testing.assert_close(
        credit.dense(), layer.route(x_inp, input_mask).phi @ last.route(layer(x_inp, input_mask)).phi
    )
    assert vr.contributions(network, x_inp, output=0, input_mask=input_mask).completeness_error.max() < 1e-12


@pytest.mark.parametrize("kind", ["reference", "chunked", "fused"])
def test_phi_of_some_outputs_and_where_to_write_it(kind):
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer = layer_of(kind)
    phi, place = layer.route(x_inp).phi, torch.zeros(2, 11, 2, dtype=torch.float64)
    routed = layer.route(x_inp, outputs=[3, 1], phi_out=place)
    torch.testing.assert_close(place, phi[..., [3, 1]])
    assert routed.phi is place
    assert not routed.x_out.requires_grad


@pytest.mark.parametrize("kind", ["chunked", "general"])
def test_the_trace_ends_where_routing_does(kind):
    x_inp, input_mask, _ = inputs(dtype=torch.float64)
    layer = layer_of(kind, tol=1e-8)
    routed, steps = layer.route(x_inp, input_mask), int(layer.convergence.steps.max())
    trace = layer.trace(x_inp, input_mask)
    # One iteration from the flat prior, the steps of the search, two for the gradient, and the last one.
    assert len(trace) == 1 + steps + 3
    assert trace[0].x_hat is None
    torch.testing.assert_close(trace[-1].phi, routed.phi)
    torch.testing.assert_close(trace[-1].x_out, layer.state(x_inp, input_mask))


# Solvers


def test_anderson_solves_linear_equations_in_as_many_steps_as_they_have_unknowns():
    """Solve x = M x + c. Some eigenvalues exceed 1, so plain iteration would diverge."""
    M, c = torch.randn(3, 4, 4, dtype=torch.float64), torch.randn(3, 4, 1, dtype=torch.float64)
    x, found = solve(lambda x: M @ x + c, torch.zeros_like(c), vr.Converge(1e-9, 10, "anderson"), linear=True)
    torch.testing.assert_close(x, torch.linalg.solve(torch.eye(4, dtype=torch.float64) - M, c))
    assert found.steps.max() <= 6


def test_of_what_runs_away_the_best_is_kept():
    """From 0, x = 2 x + 1 has residuals 1, 2, 4, ..., and x = 1 + x / 2 has residuals 1, 1/2, ..."""
    factor = torch.tensor([2.0, 0.5])[:, None, None]
    options = vr.Converge(1e-9, 5, "iterate", "absolute")
    x, found = solve(lambda x: factor * x + 1, torch.zeros(2, 1, 1), options)
    assert x.flatten().tolist() == [0, 1.9375 - 0.0625]
    assert found.residuals.tolist() == [[1, 2, 4, 8, 16], [1, 0.5, 0.25, 0.125, 0.0625]]
    assert found.steps.tolist() == [5, 5]
    assert not found.converged.any()


@pytest.mark.filterwarnings("ignore:routing did not converge")
def test_anderson_needs_fewer_steps_where_plain_iteration_is_slow():
    torch.manual_seed(1)
    x_inp, compared = torch.randn(20, 12, 8, dtype=torch.float64), 0
    for scale in (1, 2, 3, 4):
        plain = scaled(scale, vr.Converge(1e-8, 500, "iterate"))
        fast = scaled(scale, vr.Converge(1e-8, 500, "anderson"))
        with torch.no_grad():
            plain(x_inp), fast(x_inp)
        assert fast.convergence.converged.all()
        slow = plain.convergence.steps >= 50  # some of these do not converge at all
        assert (fast.convergence.steps < plain.convergence.steps)[slow].all()
        compared += int((slow & plain.convergence.converged).sum())
    assert compared >= 5


@pytest.mark.filterwarnings("ignore:routing did not converge")
@pytest.mark.parametrize("scale", [8, 16])
def test_anderson_falls_back_to_plain_iteration(scale):
    """Anderson converges where plain iteration does, in at most twice the steps, even after a failure."""
    torch.manual_seed(2)
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=8, d_out=8, dtype=torch.float64)
    x_inp = torch.randn(60, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    found = []
    with torch.no_grad():
        layer.W_S.mul_(scale)
        for solver in ("iterate", "anderson"):
            layer.n_iters = vr.Converge(1e-8, 500, solver)
            layer(x_inp)
            found.append(layer.convergence)
    plain, fast = found
    assert plain.converged.sum() >= 40
    assert fast.converged[plain.converged].all()
    assert (fast.steps <= 2 * plain.steps)[plain.converged].all()


@pytest.mark.filterwarnings("ignore:routing did not converge")
def test_anderson_goes_where_the_loop_goes():
    """Anderson finds the fixed point of plain iteration, not another one: its first steps are plain."""
    torch.manual_seed(1)
    compared, x_inp = 0, torch.randn(200, 5, 7, dtype=torch.float64)
    for n_out in (2, 3, 8):
        layer = vr.VectorRouting(n_inp=None, n_out=n_out, d_inp=7, d_out=5, dtype=torch.float64)
        with torch.no_grad():
            layer.n_iters = vr.Converge(1e-9, 200, "iterate")
            x_out, plain = layer(x_inp), layer.convergence
            layer.n_iters = vr.Converge(1e-9, 200, "anderson")
            error = (layer(x_inp) - x_out).norm(dim=(-2, -1)) / x_out.norm(dim=(-2, -1))
        assert error[plain.converged].max() < 1e-4
        compared += int((plain.converged & (plain.steps > WARM_UP + WINDOW)).sum())
    assert compared >= 100


def test_rounding_is_rest():
    """Float32 cannot reach a residual of 1e-9, so the search stops at rounding errors."""
    layer = layer_of("chunked", tol=1e-9, dtype=torch.float32)
    x_inp, _, _ = inputs(batch=32)
    layer(x_inp)
    assert layer.convergence.converged.all()
    assert (layer.convergence.residuals[:, -1] > 1e-9).any()
    assert (layer.convergence.residuals[:, -1] < 2e-6).all()


def test_autocast_does_not_round_the_solver():
    c = torch.randn(2, 1, 8)

    def update(x: Tensor) -> Tensor:
        return 0.95 * x.roll(1, -1) * torch.linspace(-1, 1, 8) + c

    options = vr.Converge(1e-6, 60)
    x, plain = solve(update, c, options)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, found = solve(update, c, options)
    assert plain.steps.max() > WARM_UP + 2
    torch.testing.assert_close(rounded, x)
    assert found.steps.tolist() == plain.steps.tolist()


# Samples that do not converge


@pytest.mark.parametrize("solver", ["iterate", "anderson"])
@pytest.mark.parametrize("kind", ["reference", "chunked"])
def test_what_does_not_converge_is_told_and_finite(kind, solver):
    torch.manual_seed(1)
    x_inp = torch.randn(20, 12, 8, dtype=torch.float64, requires_grad=True)
    layer = scaled(40, vr.Converge(1e-8, 30 if solver == "iterate" else 12, solver), kind)
    with pytest.warns(UserWarning, match=r"routing did not converge: \d+ of 20 samples .* tol=1e-08 after"):
        x_out = layer(x_inp)
    told = layer.convergence
    assert 0 < int(told.converged.sum()) < 20
    assert ((told.residuals[:, -1] <= 1e-8) == told.converged).all()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (grad,) = torch.autograd.grad(x_out.sin().sum(), x_inp)
    told = [str(warning.message) for warning in caught]
    # If plain iteration does not converge forward, it diverges backward. Anderson need not.
    assert solver == "anderson" or "the gradient of the routing did not converge to tol=1e-08" in told[0]
    assert x_out.isfinite().all()
    assert grad.isfinite().all()
    assert grad.abs().max() < 1e6


@pytest.mark.parametrize("kind", QUICK)
def test_the_warning_points_to_the_caller(kind):
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer = layer_of(kind, tol=1e-300, max_iters=3, solver="iterate")
    with pytest.warns(UserWarning, match="did not converge") as caught:
        layer(x_inp)
    assert caught[0].filename == __file__


def test_the_warning_tells_the_least_residual():
    """From 0, x = 2 x + 1 has residuals 1, 2, 4, so the first state is used."""
    options = vr.Converge(1e-9, 3, "iterate", "absolute")
    with pytest.warns(UserWarning, match=r"the largest residual is 1\.0e\+00"):
        fixed_point(lambda x: 2 * x + 1, torch.zeros(1, 1, 1), options)


def test_gradients_that_are_not_finite_pass():
    """A loss with too large a scale has infinite or NaN gradients."""
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer = layer_of("chunked")
    with pytest.warns(UserWarning, match="the gradient of the routing did not converge .* in 1 of 2 samples"):
        (layer(x_inp) * torch.tensor([1, torch.inf], dtype=torch.float64)[:, None, None]).sum().backward()
    assert not layer.W_F2.grad.isfinite().all()


class BrokenAtLast(nn.Module):
    """A G that returns infinity in its fourth call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x_out: Tensor) -> Tensor:
        self.calls += 1
        x_hat = x_out.mean(-1, keepdim=True).expand(*x_out.shape[:-1], D_INP)
        return x_hat * (torch.inf if self.calls == 4 else 1)


def test_nan_on_the_way():
    layer = layer_of("general", tol=1e-14)
    layer.G, layer.S = BrokenAtLast(), vr.networks.DotProduct()
    x_inp, _, _ = inputs(dtype=torch.float64)
    message = r"x_out became NaN or infinite in step 4 of Converge\(.*\), in 2 of 2 samples: look for NaN or"
    with pytest.raises(ValueError, match=message):
        layer(x_inp)


@pytest.mark.parametrize("kind", QUICK)
def test_nan_in_the_inputs(kind):
    x_inp, _, _ = inputs(dtype=torch.float64)
    x_inp[1, 2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"x_out became NaN or infinite in step 1 of .*, in 1 of 2 samples"):
        layer_of(kind)(x_inp)
    mask = torch.arange(11) != 2
    assert layer_of(kind)(x_inp, mask).isfinite().all()


# Options

WRONG = {
    "no tol": ({"tol": 0}, ValueError, "tol must be a positive number, got 0"),
    "negative tol": ({"tol": -1e-3}, ValueError, "tol must be a positive number, got -0.001"),
    "nan": ({"tol": float("nan")}, ValueError, "tol must be a positive number, got nan"),
    "infinite": ({"tol": float("inf")}, ValueError, "tol must be a positive number, got inf"),
    "tol of another type": ({"tol": "1"}, TypeError, "tol must be a positive number, got '1' (str)"),
    "bool": ({"tol": True}, TypeError, "tol must be a positive number, got True (bool)"),
    "no iterations": ({"max_iters": 0}, ValueError, "max_iters must be a positive int, got 0"),
    "half": ({"max_iters": 1.5}, TypeError, "max_iters must be a positive int, got 1.5 (float)"),
    "solver": ({"solver": "newton"}, ValueError, "solver must be one of 'iterate', 'anderson', got 'newton'"),
    "stop": ({"stop": "now"}, ValueError, "stop must be one of 'relative', 'absolute', got 'now'"),
}


@pytest.mark.parametrize(("options", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        vr.Converge(**options)


def test_matrix_routing_counts():
    sizes = {"n_inp": 3, "n_out": 2, "d_cov": 1, "d_inp": 2, "d_out": 2}
    with pytest.raises(TypeError, match="n_iters must be a positive int"):
        vr.MatrixRouting(**sizes, n_iters=vr.Converge())


def test_layers_show_it_copy_it_and_keep_nothing():
    layer = layer_of("auto", tol=0.01)
    assert "n_iters=Converge(tol=0.01, max_iters=50, solver='anderson', stop='relative')" in repr(layer)
    assert layer.convergence is None
    x_inp, _, _ = inputs(dtype=torch.float64)
    x_out, names = layer(x_inp), set(layer.state_dict())
    torch.testing.assert_close(copy.deepcopy(layer)(x_inp), x_out)
    assert names == set(make("auto").state_dict())


@pytest.mark.parametrize("kind", ["reference", "chunked", "general"])
def test_half_precision(kind):
    layer = layer_of(kind, tol=1e-2, dtype=torch.float32)
    x_inp, _, _ = inputs()
    exact = layer(x_inp)
    with torch.autocast("cpu", torch.bfloat16):
        x_out = layer(x_inp)
    x_out.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    torch.testing.assert_close(x_out.float(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kind", ["chunked", "general"])
def test_export_wants_a_number(kind):
    with pytest.raises(ValueError, match="n_iters must be an int in a layer to be exported"):
        torch.export.export(layer_of(kind), (inputs(dtype=torch.float64)[0],))


@pytest.mark.parametrize("kind", ["chunked", "general"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads .grad at a graph break
def test_compiled(kind):
    x_inp, _, _ = inputs(dtype=torch.float64)
    layer = layer_of(kind)
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x_inp), layer(x_inp))
