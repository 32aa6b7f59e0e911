"""The stability probe, compared with eigenvalues, and the value and effect of the regulariser."""

import pytest
import torch
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.samples import inputs, make
from vecroute.layers import stability

KINDS = ("reference", "auto", "general", "general over inputs")


def settled(kind: str) -> nn.Module:
    layer = make(kind).double()
    layer.n_iters = vr.Converge(1e-10, 500)
    return layer


def jacobian(layer: nn.Module, x_inp: Tensor, **masks: Tensor) -> Tensor:
    """Return dU/dx_out of one sample at the state of the layer, [j h, j h]."""
    state = layer.state(x_inp, **masks).detach()
    J = torch.autograd.functional.jacobian(lambda x: layer.update(x_inp, x, **masks), state)
    return J.reshape(state.numel(), state.numel())


@pytest.mark.parametrize("kind", KINDS)
def test_the_spectral_radius_is_the_greatest_eigenvalue(kind):
    x_inp, input_mask, pair_mask = inputs(batch=3, dtype=torch.float64)
    layer = settled(kind)
    found = stability.probe(layer, x_inp, input_mask, pair_mask, n_steps=200)
    for b in range(3):
        J = jacobian(layer, x_inp[b], input_mask=input_mask[b], pair_mask=pair_mask[b])
        radius = torch.linalg.eigvals(J).abs().max()
        torch.testing.assert_close(found.spectral_radius[b], radius, rtol=0.03, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_that_of_plain_iteration(kind):
    x_inp, input_mask, _ = inputs(dtype=torch.float64)
    layer = make(kind).double()
    curve = stability.probe(layer, x_inp, input_mask, n_steps=6).residuals
    assert curve.shape == (2, 6)
    states = []
    for layer.n_iters in (3, 4):
        states.append(layer.state(x_inp, input_mask).flatten(1))
    expected = (states[1] - states[0]).norm(dim=1) / states[1].norm(dim=1)
    torch.testing.assert_close(curve[:, 2], expected)
    layer.n_iters = vr.Converge(1e-300, 6, "iterate")
    with pytest.warns(UserWarning, match="did not converge"):
        layer(x_inp, input_mask)
    torch.testing.assert_close(curve, layer.convergence.residuals)


def test_one_output_is_settled_at_once():
    layer = vr.VectorRouting(n_inp=None, n_out=1, d_inp=4, d_out=3, n_iters=vr.Converge())
    x_inp = torch.randn(2, 5, 4)
    found = stability.probe(layer, x_inp, n_steps=4)
    assert (found.spectral_radius == 0).all()
    assert (found.residuals == 0).all()
    assert stability.jacobian_penalty(layer, x_inp) == 0


@pytest.mark.parametrize("learned", [True, False])
def test_scores_that_do_not_depend_on_the_state(learned):
    layer = vr.GeneralRouting(
        A=lambda x: x[..., 0],
        F=lambda x: x[..., None, :].expand(*x.shape[:-1], 3, 4),
        G=lambda x: x,
        S=lambda x, x_hat: x[..., :3],
        n_inp=None,
        n_out=3,
        d_inp=4,
        n_iters=vr.Converge(),
        **({} if learned else {"beta_use": 1, "beta_ign": 0}),
    )
    x_inp = torch.randn(2, 5, 4)
    assert (stability.probe(layer, x_inp, n_steps=4).spectral_radius == 0).all()
    assert stability.jacobian_penalty(layer, x_inp) == 0
    if learned:
        layer(x_inp).sum().backward()
        assert layer.W_use.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_is_the_mean_square_of_the_jacobian(kind):
    x_inp, _, _ = inputs(batch=1, dtype=torch.float64)
    layer = settled(kind)
    J = jacobian(layer, x_inp[0])
    penalty = stability.jacobian_penalty(layer, x_inp, n_draws=1000).detach()
    torch.testing.assert_close(penalty, J.square().sum() / len(J), rtol=0.1, atol=0)


@pytest.mark.filterwarnings("ignore:.* did not converge")
def test_the_penalty_keeps_a_layer_converging_while_it_learns():
    """The scores are so steep that many samples do not converge. Only the penalty repairs this."""
    torch.manual_seed(1)
    x_inp, target = torch.randn(20, 12, 8, dtype=torch.float64), torch.randn(20, 4, 8, dtype=torch.float64)
    converged: dict[int, list] = {0: [], 3: []}
    losses: dict[int, list] = {0: [], 3: []}
    for strength in converged:
        torch.manual_seed(0)
        layer = vr.VectorRouting(
            n_inp=None,
            n_out=4,
            d_inp=8,
            d_out=8,
            n_iters=vr.Converge(1e-5, 30, "iterate"),
            dtype=torch.float64,
        )
        with torch.no_grad():
            layer.W_S.fill_(4)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
        for _ in range(40):
            loss = (layer(x_inp) - target).square().mean()
            converged[strength].append(int(layer.convergence.converged.sum()))
            losses[strength].append(loss.item())
            loss = loss + strength * stability.jacobian_penalty(layer, x_inp)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
    assert converged[3][0] <= 12
    assert sum(converged[0][-10:]) <= 150  # of 200
    assert sum(converged[3][-10:]) >= 180
    assert losses[3][-1] < 0.75 * losses[3][0]


def test_wrong_arguments():
    x_inp, _, _ = inputs()
    with pytest.raises(TypeError, match="layer must be a VectorRouting or GeneralRouting, got Linear"):
        stability.probe(nn.Linear(2, 2), x_inp)
    with pytest.raises(TypeError, match=r"x_inp must be a floating-point tensor .*, got list"):
        stability.probe(make("auto"), [1])
    with pytest.raises(ValueError, match="n_steps must be a positive int, got 0"):
        stability.probe(make("auto"), x_inp, n_steps=0)
    with pytest.raises(ValueError, match="n_draws must be a positive int, got 0"):
        stability.jacobian_penalty(make("auto"), x_inp, n_draws=0)
    with pytest.raises(ValueError, match=r"x_out must be \[..., n_out=5, d_out=3\], got \[2, 5, 4\]"):
        make("auto").update(x_inp, torch.zeros(2, 5, 4))
