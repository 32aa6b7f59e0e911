"""RoutingHead: it maps hidden states to scores, and its credit reaches every hidden state."""

import pytest
import torch
import torch.nn.functional as nnf
from torch._dynamo.utils import counters

import vecroute as vr
from vecroute.heads import GatedMLP, ResidualMLP

SIZES = {"d_emb": 12, "depth": 3, "n_cls": 4}


def trained(head):
    """Make all weights nonzero, as after training, so that the MLPs are not the identity."""
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def test_hidden_states_are_flattened_depth_inside_position_and_normalised():
    head = vr.RoutingHead(**SIZES)
    hidden = torch.randn(2, 5, 3, 12)
    x_inp, mask = head.flatten(hidden, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 1]]))
    assert x_inp.shape == (2, 15, 12)
    for position in range(5):
        for level in range(3):
            assert torch.equal(x_inp[:, position * 3 + level], hidden[:, position, level])
    assert mask.tolist()[1] == [1] * 6 + [0] * 6 + [1] * 3
    # The untrained MLP is the identity.
    torch.testing.assert_close(head.network[0](x_inp), nnf.layer_norm(x_inp, (12,)))


@pytest.mark.parametrize("make", [vr.RoutingHead, vr.RoutingHead.paper])
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_scores_and_credit_have_the_shapes_promised(make, batch):
    head = make(**SIZES, **({} if make is vr.RoutingHead else {"n_hid": 5}))
    hidden = torch.randn(*batch, 7, 3, 12)
    assert head(hidden).shape == (*batch, 4)
    scores, credit = head.route(hidden)
    torch.testing.assert_close(scores, head(hidden))
    assert credit.dense().shape == (*batch, 21, 4)


def test_the_papers_head_has_three_routings_by_way_of_64_vectors():
    routings = [m for m in vr.RoutingHead.paper(**SIZES).modules() if isinstance(m, vr.VectorRouting)]
    sizes = [(m.n_inp, m.n_out, m.d_inp, m.d_out, m.n_iters) for m in routings]
    assert sizes == [(None, 64, 12, 12, 2), (64, 64, 12, 12, 2), (64, 4, 12, 1, 2)]
    assert not any(isinstance(m, ResidualMLP | GatedMLP) for m in vr.RoutingHead.paper(**SIZES).modules())


def test_the_default_head_has_two_routings_and_mlps_around_the_first():
    head = vr.RoutingHead(**SIZES)
    first, routing, second, last = head.network
    assert [type(m) for m in first.module] == [torch.nn.LayerNorm, GatedMLP]
    assert isinstance(second.module, GatedMLP)
    assert second.module.inner.out_features == 8  # two thirds of 12
    assert (routing.n_inp, routing.n_out, last.n_inp, last.n_out) == (None, 4, 4, 4)
    assert all(m.implementation == "auto" for m in head.modules() if isinstance(m, vr.VectorRouting))


@pytest.mark.parametrize("mlp", [ResidualMLP, GatedMLP])
def test_a_fresh_mlp_is_the_identity(mlp):
    x = torch.randn(3, 12)
    torch.testing.assert_close(mlp(12, 5)(x), x, rtol=0, atol=0)


@pytest.mark.parametrize("make", [vr.RoutingHead, vr.RoutingHead.paper])
def test_padding_changes_nothing(make):
    head = trained(make(**SIZES, n_hid=5)).double().eval()
    hidden = torch.randn(3, 6, 3, 12, dtype=torch.float64)
    lengths = [6, 2, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    padded = torch.where(mask[..., None, None], hidden, torch.nan)
    scores = head(padded, mask)
    for k, n_pos in enumerate(lengths):
        torch.testing.assert_close(scores[k], head(hidden[k, :n_pos]))


def test_single_levels_can_be_masked():
    head = trained(vr.RoutingHead(**SIZES)).double().eval()
    hidden = torch.randn(2, 6, 3, 12, dtype=torch.float64)
    mask = torch.ones(2, 6, 3, dtype=torch.bool)
    mask[0, 2, 1] = False
    changed = hidden.clone()
    changed[0, 2, 1] = torch.randn(12)
    torch.testing.assert_close(head(changed, mask), head(hidden, mask), rtol=0, atol=1e-12)
    assert (head(changed) - head(hidden))[0].abs().max() > 1e-6


@pytest.mark.parametrize("make", [vr.RoutingHead, vr.RoutingHead.paper])
def test_contributions_add_up_to_the_scores(make):
    head = trained(make(**SIZES, n_hid=5)).double()
    hidden = torch.randn(2, 6, 3, 12, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [3]])
    x_inp, input_mask = head.flatten(hidden, mask)
    parts = vr.contributions(head.network, x_inp, input_mask=input_mask)
    torch.testing.assert_close(parts.values.sum(-1) + parts.base, head(hidden, mask))
    assert parts.values.shape == (2, 4, 18)
    assert parts.completeness_error.max() < 1e-12
    assert not parts.values[1, :, 9:].any()


def test_gradients_reach_every_parameter():
    head = trained(vr.RoutingHead(**SIZES))
    head(torch.randn(2, 5, 3, 12)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 5, 3, 11),), ValueError, r"\[\.\.\., n_pos, depth=3, d_emb=12\], got \[2, 5, 3, 11"),
        ((torch.zeros(5, 12),), ValueError, r"hidden_states must be .* got \[5, 12\]"),
        ((torch.zeros(2, 5, 3, 12).long(),), TypeError, "hidden_states must be a floating-point tensor"),
        ((torch.zeros(2, 5, 3, 12).double(),), TypeError, "hidden_states must have the dtype of the layer"),
        ((torch.zeros(2, 5, 3, 12), torch.ones(2, 4)), ValueError, r"input_mask must be \[\.\.\., n_pos\]"),
        ((torch.zeros(2, 5, 3, 12), torch.ones(2, 5)), TypeError, "input_mask must be a bool or 0/1 integer"),
        ((torch.zeros(2, 0, 3, 12),), ValueError, "at least one vector"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        vr.RoutingHead(**SIZES)(*arguments)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"n_routings": 1}, ValueError, "n_routings must be at least 2, got 1"),
        ({"gated": "no"}, TypeError, r"gated must be a bool, got 'no' \(str\)"),
        ({"n_cls": 0}, ValueError, "n_cls must be a positive int, got 0"),
        ({"d_mlp": -1}, ValueError, "d_mlp must be a positive int, got -1"),
        ({"d_emb": None}, TypeError, r"d_emb must be a positive int, got None \(NoneType\)"),
        ({"d_emb": "a"}, TypeError, r"d_emb must be a positive int, got 'a' \(str\)"),
        ({"n_routings": "3"}, TypeError, r"n_routings must be a positive int, got '3' \(str\)"),
        ({"n_hid": 0}, ValueError, "n_hid must be a positive int, got 0"),
        ({"d_hid": 1.5}, TypeError, r"d_hid must be a positive int, got 1.5 \(float\)"),
    ],
)
@pytest.mark.parametrize("make", [vr.RoutingHead, vr.RoutingHead.wide, vr.RoutingHead.paper])
def test_wrong_options(make, option, error, message):
    with pytest.raises(error, match=message):
        make(**SIZES | option)


@pytest.mark.parametrize("implementation", ["chunked", pytest.param("fused", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("device")
def test_compiles_once_for_all_lengths(implementation):
    head = trained(vr.RoutingHead(**SIZES, implementation=implementation))
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True, dynamic=True)
    for n_pos in (8, 7, 6, 4, 5):
        hidden, mask = torch.randn(2, n_pos, 3, 12), torch.rand(2, n_pos) > 0.3
        got, expected = compiled(hidden, mask), head(hidden, mask)
        torch.testing.assert_close(got, expected)
        parameters = list(head.parameters())
        gradients = [torch.autograd.grad(scores.sum(), parameters) for scores in (got, expected)]
        torch.testing.assert_close(*gradients)
    assert counters["stats"]["unique_graphs"] == 1
