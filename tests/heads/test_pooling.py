"""The baseline heads: each pools the right values, and padding and masked positions change nothing."""

import pytest
import torch
import torch.nn.functional as nnf

from vecroute.heads import HEADS, GatedMLP, PoolingHead, ResidualMLP, make_head
from vecroute.heads.pooling import Attention

SIZES = {"d_emb": 12, "depth": 3, "n_cls": 4}
BASELINES = [name for name in HEADS if name not in ("routing", "wide", "paper")]


def trained(head):
    """Make all weights nonzero, as after training."""
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head.double().eval()


def hidden_states(*batch):
    return torch.randn(*batch, 6, 3, 12, dtype=torch.float64)


def test_every_baseline_that_was_promised_has_a_name():
    means = {"mean_last", "mean_all", "scalar_mix", "cls"}
    assert means | {"probe", "probe_4", "efficient", "pma", "hopfield"} == set(BASELINES)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("gated", [True, False])
def test_every_baseline_takes_the_mlps_of_a_routing_head(name, gated):
    head = make_head(name, seed=0, **SIZES, d_inp_mlp=5, d_mlp=7, gated=gated)
    kind = GatedMLP if gated else ResidualMLP
    assert (type(head.inputs), type(head.classify[0])) == (kind, kind)
    assert (head.inputs.inner.out_features, head.classify[0].inner.out_features) == (5, 7)


def test_efficient_probing_reads_a_part_of_the_values_with_each_query():
    head, hidden = trained(make_head("efficient", seed=0, **SIZES, n_queries=3)), hidden_states(2)
    pool, x = head.pool, hidden.flatten(1, 2)
    weights = (x @ pool.queries.T / 12**0.5).softmax(1)  # [b, i, q]
    values = (x @ pool.W_V.T).unflatten(-1, (3, 4))  # [b, i, q, k]
    expected = torch.einsum("biq,biqk->bqk", weights, values).flatten(1)
    torch.testing.assert_close(pooled(head, hidden), pool.normalize(expected))
    count = sum(p.numel() for p in pool.parameters())
    assert count < 0.5 * sum(p.numel() for p in make_head("probe", seed=0, **SIZES).pool.parameters())
    with pytest.raises(ValueError, match="n_queries must divide d_emb=12, got 5"):
        make_head("efficient", seed=0, **SIZES, n_queries=5)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_scores_have_the_shape_promised(name, batch):
    head = make_head(name, seed=0, **SIZES)
    assert head(torch.randn(*batch, 5, 3, 12)).shape == (*batch, 4)


@pytest.mark.parametrize("name", BASELINES)
def test_padding_changes_nothing(name):
    head, hidden, lengths = trained(make_head(name, seed=0, **SIZES)), hidden_states(3), [6, 2, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    scores = head(torch.where(mask[..., None, None], hidden, torch.nan), mask)
    for k, n_pos in enumerate(lengths):
        torch.testing.assert_close(scores[k], head(hidden[k, :n_pos]))


@pytest.mark.parametrize("name", [name for name in BASELINES if name not in ("mean_last", "cls")])
def test_masked_levels_are_not_read_and_others_are(name):
    head, hidden = trained(make_head(name, seed=0, **SIZES)), hidden_states(2)
    mask = torch.ones(2, 6, 3, dtype=torch.bool)
    mask[0, 2, 1] = False
    changed = hidden.clone()
    changed[0, 2, 1] = torch.randn(12)
    torch.testing.assert_close(head(changed, mask), head(hidden, mask), rtol=0, atol=1e-12)
    assert (head(changed) - head(hidden))[0].abs().max() > 1e-6


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_reach_every_parameter(name):
    head = trained(make_head(name, seed=0, **SIZES))
    head(hidden_states(2)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in head.parameters())


def pooled(head, hidden):
    return head.pool(hidden, torch.ones(hidden.shape[:-1], dtype=torch.bool))


def test_what_means_and_the_first_position_pool():
    hidden = hidden_states(2)
    means = hidden.mean(1)  # [b, depth, d]
    torch.testing.assert_close(pooled(PoolingHead.mean_last(**SIZES), hidden), means[:, -1])
    torch.testing.assert_close(pooled(PoolingHead.mean_all(**SIZES), hidden), means.flatten(1))
    torch.testing.assert_close(pooled(PoolingHead.first_position(**SIZES), hidden), hidden[:, 0, -1])
    mix = PoolingHead.scalar_mix(**SIZES).double()
    torch.testing.assert_close(pooled(mix, hidden), means.mean(1))
    with torch.no_grad():
        mix.pool.weights.copy_(torch.tensor([0.0, 9.0, 0.0]))
        mix.pool.gamma.fill_(2.0)
    weights = torch.tensor([0.0, 9.0, 0.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(pooled(mix, hidden), 2 * torch.einsum("l,bld->bd", weights, means))


def test_attention_is_that_of_torch():
    """Multiplying queries by W_K and means by W_V equals attention with explicit keys and values."""
    attention = trained(Attention(12, 5, 3))
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    q, k, v = (
        t.unflatten(-1, (3, 4)).transpose(-2, -3)
        for t in (attention.queries.expand(2, 5, 12), x @ attention.W_K.T, x @ attention.W_V.T)
    )
    expected = nnf.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])  # [b, n, q, k]
    expected = attention.outer(expected.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(attention(x, mask), expected)


def test_a_hopfield_state_that_is_updated_once_is_attention_and_more_updates_move_it():
    x, mask = torch.randn(2, 7, 1, 12, dtype=torch.float64), torch.ones(2, 7, 1, dtype=torch.bool)
    once, thrice = (
        trained(make_head("hopfield", seed=0, **SIZES | {"depth": 1}, n_updates=n)) for n in (1, 3)
    )
    thrice.load_state_dict(once.state_dict())
    found = once.pool.attention(x[:, :, 0], mask[..., 0])  # [b, 1, d]
    torch.testing.assert_close(once.pool(x, mask), once.pool.normalize(found).flatten(1))
    assert (once.pool(x, mask) - thrice.pool(x, mask)).abs().max() > 1e-3
    many = make_head("hopfield", seed=0, **SIZES | {"depth": 1}, n_updates=60).double()
    more = make_head("hopfield", seed=0, **SIZES | {"depth": 1}, n_updates=61).double()
    more.load_state_dict(many.state_dict())
    torch.testing.assert_close(many.pool(x, mask), more.pool(x, mask), rtol=1e-3, atol=1e-3)  # converged


def test_options_of_probes():
    assert make_head("probe_4", seed=0, **SIZES).pool.d_pool == 48
    assert make_head("probe", seed=0, **SIZES, n_queries=2).pool.d_pool == 24
    head = make_head("probe", seed=0, **SIZES, d_inp_mlp=16, gated=True)
    assert isinstance(head.inputs, GatedMLP)
    with pytest.raises(ValueError, match="n_heads must divide d_emb=12, got 5"):
        make_head("probe", seed=0, **SIZES, n_heads=5)
    with pytest.raises(ValueError, match="n_queries must be a positive int, got 0"):
        make_head("probe", seed=0, **SIZES, n_queries=0)


def test_a_fresh_gated_mlp_is_the_identity_and_a_trained_one_is_as_written():
    x, mlp = torch.randn(3, 12), GatedMLP(12, 5)
    torch.testing.assert_close(mlp(x), x, rtol=0, atol=0)
    mlp, x = trained(mlp), x.double()
    gate, inner, outer = (t.weight.T for t in (mlp.gate, mlp.inner, mlp.outer))
    a = x @ gate + mlp.gate.bias
    expected = x + (a * a.sigmoid() * (x @ inner + mlp.inner.bias)) @ outer + mlp.outer.bias
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("name", BASELINES)
def test_wrong_hidden_states(name):
    with pytest.raises(ValueError, match=r"hidden_states must be \[\.\.\., n_pos, depth=3, d_emb=12\]"):
        make_head(name, seed=0, **SIZES)(torch.zeros(2, 5, 2, 12))


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"d_emb": None}, TypeError, r"d_emb must be a positive int, got None \(NoneType\)"),
        ({"d_emb": "a"}, TypeError, r"d_emb must be a positive int, got 'a' \(str\)"),
        ({"depth": None}, TypeError, r"depth must be a positive int, got None \(NoneType\)"),
        ({"d_mlp": -1}, ValueError, "d_mlp must be a positive int, got -1"),
        ({"d_mlp": "8"}, TypeError, r"d_mlp must be a positive int, got '8' \(str\)"),
        ({"d_inp_mlp": 1.5}, TypeError, r"d_inp_mlp must be a positive int, got 1.5 \(float\)"),
    ],
)
def test_wrong_sizes(name, option, error, message):
    with pytest.raises(error, match=message):
        make_head(name, seed=0, **SIZES | option)


def test_the_same_seed_gives_the_same_head():
    first, again, other = (make_head("probe", seed=seed, **SIZES) for seed in (1, 1, 2))
    assert torch.equal(first.pool.attention.W_K, again.pool.attention.W_K)
    assert not torch.equal(first.pool.attention.W_K, other.pool.attention.W_K)
    with pytest.raises(ValueError, match=r"head must be one of 'routing', .*, got 'nothing'"):
        make_head("nothing", seed=0, **SIZES)
