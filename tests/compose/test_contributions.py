"""Contributions: they sum to the output exactly, and agree with the votes of the paper."""

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.random_networks import D, mlp, networks, routing
from vecroute.compose.contribution import completeness_error

LIKE = {"dtype": torch.float64}


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def head(n_cls: int = 3, d: int = D) -> vr.Sequential:
    """Return the paper's head, small: layer normalisation and three routings."""
    return vr.Sequential(
        vr.PerVector(nn.LayerNorm(d, **LIKE)),
        routing(None, 5, d_inp=d, d_out=d),
        routing(5, 5, d_inp=d, d_out=d),
        routing(5, n_cls, d_inp=d, d_out=1),
    )


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_one_layer_by_hand(implementation):
    layer = routing(None, 4, d_inp=5, normalize=False, implementation=implementation)
    x_inp = randn(2, 7, 5)  # [b, i, d]
    phi = layer.route(x_inp).phi  # [b, i, j]
    got = vr.contributions(layer, x_inp)
    votes = torch.einsum("bij,bid,jd,dh->bjhi", phi, x_inp, layer.W_F1, layer.W_F2) / 7**0.5
    close(got.values, votes)
    close(got.base, phi.sum(-2)[..., None] * layer.B_F2)
    assert torch.equal(got.output, layer(x_inp))
    # The paper's votes include the bias.
    got = vr.contributions(layer, x_inp, bias="votes")
    close(got.values, votes + torch.einsum("bij,jh->bjhi", phi, layer.B_F2))
    close(got.base, torch.zeros(2, 4, D, **LIKE))


def test_two_layers_by_hand():
    """Normalisation subtracts the mean, which is linear, and divides by a scale, which is held."""
    first, second = routing(None, 4), routing(4, 2, d_out=1)
    x_inp = randn(6, D)  # [i, d]
    phi_1, phi_2 = first.route(x_inp).phi, second.route(first(x_inp)).phi  # [i, j], [j, k]
    V = (x_inp[:, None] * first.W_F1) @ first.W_F2 / 6**0.5  # [i, j, h]
    x_mid = (phi_1[..., None] * (V + first.B_F2)).sum(0)  # [j, h]
    scale = (x_mid.var(-1, correction=0) + 1e-5).rsqrt()  # [j]

    def second_part(x: Tensor) -> Tensor:
        """Return what vectors [..., j, h] before normalisation add to the scores [..., k]."""
        x = (x - x.mean(-1, keepdim=True)) * scale[:, None]  # [..., j, h]
        return torch.einsum("jk,...jh,kh,h->...k", phi_2, x, second.W_F1, second.W_F2[:, 0]) / 4**0.5

    got = vr.contributions(vr.Sequential(first, second), x_inp)
    close(got.values, second_part(phi_1[..., None] * V).mT)
    bias = second_part(phi_1.sum(0)[:, None] * first.B_F2) + phi_2.sum(0) * second.B_F2[:, 0]  # [k]
    close(got.base, bias)
    votes = vr.contributions(vr.Sequential(first, second), x_inp, bias="votes")
    close(votes.values, second_part(phi_1[..., None] * (V + first.B_F2)).mT)
    close(votes.base, phi_2.sum(0) * second.B_F2[:, 0])


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_contributions_add_up(data, seed):
    torch.manual_seed(seed)
    n_inp, n_out = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    network = data.draw(networks(n_inp, n_out))
    x_inp = randn(2, n_inp, D)  # [b, i, d]
    mask = torch.rand(2, n_inp) < 0.7 if data.draw(st.booleans()) else None  # [b, i]
    bias = data.draw(st.sampled_from(["base", "votes"]))
    got = vr.contributions(network, x_inp, input_mask=mask, bias=bias)
    assert got.values.shape == (2, n_out, D, n_inp)
    assert got.base.shape == got.output.shape == got.completeness_error.shape == (2, n_out, D)
    assert got.completeness_error.max() <= 1e-12
    assert torch.equal(got.completeness_error, completeness_error(got.values, got.base, got.output))
    torch.testing.assert_close(got.output, network(x_inp, input_mask=mask), rtol=0, atol=0)
    torch.testing.assert_close(got.values.sum(-1) + got.base, got.output, rtol=1e-9, atol=1e-9)
    if mask is not None:
        assert (got.values[~mask[:, None, None].expand_as(got.values)] == 0).all()


@pytest.mark.parametrize("implementation", ["reference", "chunked"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_completeness_on_trained_and_untrained_heads(dtype, tolerance, implementation):
    d, n_cls = 32, 4
    options = {"implementation": implementation, "dtype": dtype}
    network = vr.Sequential(
        vr.PerVector(nn.LayerNorm(d, dtype=dtype)),
        vr.Residual(vr.PerVector(mlp(d, d).to(dtype))),
        vr.VectorRouting(n_inp=None, n_out=16, d_inp=d, d_out=d, **options),
        vr.Residual(vr.VectorRouting(n_inp=16, n_out=16, d_inp=d, d_out=d, **options)),
        vr.VectorRouting(n_inp=16, n_out=n_cls, d_inp=d, d_out=1, **options),
    )
    x_inp = torch.randn(6, 40, d, dtype=dtype)  # [b, i, d]
    mask = torch.arange(40) < torch.tensor([[40], [1], [17], [30], [0], [39]])  # [b, i]
    labels = torch.arange(6) % n_cls  # [b]
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for step in range(31):
        if step in (0, 30):
            for bias in ("base", "votes"):
                got = vr.contributions(network, x_inp, input_mask=mask, bias=bias)
                assert got.values.shape == (6, n_cls, 40)
                assert got.completeness_error.max() <= tolerance, (step, bias)
        loss = nnf.cross_entropy(network(x_inp, input_mask=mask)[..., 0], labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2


@pytest.mark.gpu
def test_completeness_on_a_gpu():
    network = head(d=32).float()
    x_inp = torch.randn(3, 200, 32)  # [b, i, d]
    mask = torch.arange(200) < torch.tensor([[200], [31], [1]])  # [b, i]
    expected = vr.contributions(network, x_inp, input_mask=mask)
    network.cuda()
    got = vr.contributions(network, x_inp.cuda(), input_mask=mask.cuda())
    assert got.completeness_error.max() <= 1e-5
    scale = (expected.values.abs().sum(-1) + expected.base.abs()).max()
    assert (got.values.cpu() - expected.values).abs().max() <= 1e-4 * scale
    credit = network.route(x_inp.cuda(), input_mask=mask.cuda()).phi.unit_variance()
    assert credit.top(3, 0).indices.is_cuda
    assert credit.cpu().dense().shape == (3, 200, 3)


def test_the_error_sees_what_is_missing():
    got = vr.contributions(head(), randn(7, D), output=1)
    assert got.completeness_error <= 1e-12
    for i in range(7):
        values = got.values.clone()
        values[i] += 1e-6 * got.values.abs().sum()
        assert completeness_error(values, got.base, got.output) > 1e-7
    assert completeness_error(got.values, got.base + 1e-6, got.output) > 1e-10
    assert completeness_error(torch.zeros(3), torch.tensor(0.0), torch.tensor(0.0)) == 0


def test_base_is_not_what_is_left_over(monkeypatch):
    """A wrong gradient does not change the base, because the base is computed separately, at x = 0."""
    network, x_inp = head(), randn(7, D)
    got = vr.contributions(network, x_inp, output=1)
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kwargs: tuple(2 * g for g in grad(*args, **kwargs))
    )
    spoiled = vr.contributions(network, x_inp, output=1)
    assert torch.equal(spoiled.base, got.base)
    close(spoiled.values, 2 * got.values)
    assert spoiled.completeness_error > 1e-3


def test_outputs_and_margins():
    network, x_inp = head(), randn(2, 7, D)
    whole = vr.contributions(network, x_inp)  # values [b, j, i]
    assert whole.values.shape == (2, 3, 7)
    one = vr.contributions(network, x_inp, output=1)
    assert one.values.shape == (2, 7)
    assert one.base.shape == one.output.shape == (2,)
    close(one.values, whole.values[:, 1])
    close(one.base, whole.base[:, 1])
    close(vr.contributions(network, x_inp, output=-1).values, whole.values[:, 2])
    margin = vr.contributions(network, x_inp, output=1, margin=2)
    close(margin.values, whole.values[:, 1] - whole.values[:, 2])
    close(margin.base, whole.base[:, 1] - whole.base[:, 2])
    close(margin.output, whole.output[:, 1] - whole.output[:, 2])
    # Each sample has its own margin: the predicted class over the next.
    first, second = whole.output.topk(2).indices.unbind(-1)  # [b] each
    each = vr.contributions(network, x_inp, output=first, margin=second)
    for b in range(2):
        close(each.values[b], whole.values[b, first[b]] - whole.values[b, second[b]])


def test_vector_outputs():
    network, x_inp = vr.Sequential(routing(None, 4), routing(4, 3, d_out=5)), randn(2, 7, D)
    whole = vr.contributions(network, x_inp)
    assert whole.values.shape == (2, 3, 5, 7)
    one = vr.contributions(network, x_inp, output=2)
    assert one.values.shape == (2, 5, 7)
    assert one.base.shape == (2, 5)
    close(one.values, whole.values[:, 2])


def test_tuples_of_inputs():
    first, second, last = routing(None, 4), routing(None, 4, d_inp=5), routing(4, 2, d_out=1)
    network = vr.Sequential(vr.Sum(vr.Sequential(vr.PerVector(mlp()), first), second), last)
    x_1, x_2 = randn(6, D), randn(3, 5)
    mask = torch.tensor([True, False, True])  # [i_2]
    for bias in ("base", "votes"):
        got = vr.contributions(network, (x_1, x_2), output=0, input_mask=(None, mask), bias=bias)
        assert got.values.shape == (9,)
        assert got.values[7] == 0
        assert got.completeness_error <= 1e-12
        padded = vr.contributions(network, (x_1, x_2[mask]), output=0, bias=bias)
        close(got.values[[0, 1, 2, 3, 4, 5, 6, 8]], padded.values)


def test_votes_reach_inputs_through_what_joins_them():
    """The bias of the first routing's votes goes back to the inputs that its vectors came from."""
    join = vr.Concat(vr.PerVector(nn.Identity()), vr.PerVector(nn.Identity()))
    first, last = routing(None, 4), routing(4, 2, d_out=1)
    x_1, x_2 = randn(3, D), randn(2, D)
    together = vr.contributions(vr.Sequential(first, last), torch.cat([x_1, x_2]), bias="votes")
    apart = vr.contributions(vr.Sequential(join, first, last), (x_1, x_2), bias="votes")
    close(apart.values, together.values)
    close(apart.base, together.base)
    twice = vr.contributions(vr.Sequential(join, first, last), x_1, bias="votes")
    assert twice.completeness_error.max() <= 1e-12
    both = vr.contributions(vr.Sequential(first, last), torch.cat([x_1, x_1]), bias="votes")
    close(twice.values, both.values[:, :3] + both.values[:, 3:])
    # If two inputs form one vector, each has half of its bias.
    added = vr.Sequential(vr.Sum(vr.PerVector(nn.Identity()), vr.PerVector(nn.Identity())), first, last)
    whole = vr.contributions(vr.Sequential(first, last), 2 * x_1, bias="votes")
    close(vr.contributions(added, x_1, bias="votes").values, whole.values)
    halves = vr.contributions(added, (x_1, x_1), bias="votes")
    close(halves.values, torch.cat([whole.values, whole.values], -1) / 2)
    assert halves.completeness_error.max() <= 1e-12


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value, self.out = (nn.Linear(D, D, **LIKE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nnf.silu(self.gate(x)) * self.value(x))


class SigmoidGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, D, **LIKE)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x))


class OwnRMSNorm(nn.Module):
    """RMS normalisation as many people write it by hand, with a scale for each feature."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(D))

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return nnf.gelu(x) * self.weight


class OwnLayerNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(randn(7, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


AFFINE_ONCE_HELD = [
    nn.LayerNorm(D, **LIKE),
    nn.LayerNorm(D, elementwise_affine=False, **LIKE),
    nn.RMSNorm(D, **LIKE),
    nn.Linear(D, D, **LIKE),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.SiLU(),
    nn.Mish(),
    nn.ELU(),
    nn.LeakyReLU(),
    nn.PReLU(**LIKE),
    nn.Hardswish(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.Softmax(-1),
    nn.Sequential(nn.Linear(D, 2 * D, **LIKE), nn.GLU()),
    nn.Sequential(nn.Linear(D, 8, **LIKE), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, D, **LIKE)),
    nn.Dropout(0.5),
    nn.BatchNorm1d(7, **LIKE).eval(),
    nn.Identity(),
    SwiGLU(),
    SigmoidGate(),
    OwnRMSNorm(),
    OwnLayerNorm(),
    Positions(),
    torch.relu,
    lambda x: nnf.normalize(x, dim=-1),
]


@pytest.mark.parametrize("module", AFFINE_ONCE_HELD, ids=lambda m: getattr(m, "__name__", type(m).__name__))
def test_gates_and_scales_are_held(module):
    torch.manual_seed(0)
    network = vr.Sequential(
        vr.PerVector(module), routing(None, 4), vr.PerVector(mlp()), routing(4, 2, d_out=1)
    )
    x_inp = randn(2, 7, D)  # [b, i, d]
    x_inp[0, 0, 0] = 0  # an activation divided by its argument is undefined at 0
    torch.manual_seed(1)
    output = network(x_inp)[..., 0]
    torch.manual_seed(1)
    got = vr.contributions(network, x_inp)
    assert torch.equal(got.output, output)
    assert got.completeness_error.max() <= 1e-12


def test_unused_inputs_contribute_nothing_whatever_the_module_makes_of_zeros():
    network = vr.Sequential(vr.PerVector(lambda x: x / x.norm(dim=-1, keepdim=True)), routing(None, 2))
    x_inp, mask = randn(6, D), torch.arange(6) < 4  # [i, d], [i]
    got = vr.contributions(network, x_inp, input_mask=mask)
    assert got.completeness_error.max() <= 1e-12
    assert (got.values[..., 4:] == 0).all()
    close(got.values[..., :4], vr.contributions(network, x_inp[:4]).values)


@pytest.mark.parametrize("module", [None, nn.LayerNorm(D, **LIKE), nn.GELU()])
def test_an_input_without_pairs_contributes_nothing_whatever_it_is(module):
    for layer in (routing(None, 4), general(lambda x: torch.stack([x, 2 * x, x + 1, -x], -2))):
        network = layer if module is None else vr.Sequential(vr.PerVector(module), layer)
        x_inp = randn(2, 6, D)  # [b, i, d]
        pair_mask = torch.ones(6, layer.n_out, dtype=torch.bool)  # [i, j]
        pair_mask[3] = False
        expected = vr.contributions(network, x_inp, pair_mask=pair_mask)
        x_inp[:, 3] = torch.nan
        got = vr.contributions(network, x_inp, pair_mask=pair_mask)
        close(got.values, expected.values)
        close(got.base, expected.base)
        close(got.output, expected.output)
        assert (got.values[..., 3] == 0).all()


def test_an_activation_is_its_argument_times_a_gate():
    """Checked by hand: GELU(x) = gate(x) x, so the gradient that contributions see is the gate alone."""
    layer = routing(None, 2, d_out=1)
    x_inp = randn(5, D)  # [i, d]
    got = vr.contributions(vr.Sequential(vr.PerVector(nn.GELU()), layer), x_inp)
    close(got.values, vr.contributions(layer, nnf.gelu(x_inp)).values)
    # Weights after an activation that do not depend on x are no gate.
    scaled = vr.Sequential(vr.PerVector(lambda x: nnf.gelu(x) * torch.arange(1, D + 1)), layer)
    expected = vr.contributions(layer, nnf.gelu(x_inp) * torch.arange(1, D + 1))
    close(vr.contributions(scaled, x_inp).values, expected.values)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class SquareStillUnused(nn.Module):
    """A module whose weights are 0 at first, which hides that it is not affine."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D, **LIKE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x.square()


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else torch.sigmoid(torch.relu(x))


@pytest.mark.parametrize("module", [Square(), SquareStillUnused(), Branches(), torch.cos, nn.Softplus()])
def test_what_cannot_be_split_is_named(module):
    network = vr.Sequential(vr.PerVector(module), routing(None, 2))
    name = getattr(module, "__name__", type(module).__name__)
    with pytest.raises(ValueError, match=rf"PerVector\({name}\) cannot be split into contributions"):
        vr.contributions(network, randn(7, D))


@pytest.mark.parametrize(
    "f", [lambda x: x / (1 + x.abs()), lambda x: x / (1 + torch.relu(x)), lambda x: 1 / (1 + x)]
)
def test_what_is_infinite_once_held_is_not_affine(f):
    layer = vr.VectorRouting(n_inp=None, n_out=3, d_inp=4, d_out=5)
    with pytest.raises(ValueError, match=r"PerVector\(<lambda>\) cannot be split into contributions"):
        vr.contributions(vr.Sequential(vr.PerVector(f), layer), torch.randn(2, 6, 4))


def general(F) -> vr.GeneralRouting:
    return vr.GeneralRouting(
        A=nn.Linear(D, 1, **LIKE),
        F=F,
        G=nn.Linear(D, D, **LIKE),
        S=vr.networks.DotProduct(),
        n_inp=None,
        n_out=4,
        d_inp=D,
        **LIKE,
    )


class Votes(nn.Module):
    """Votes from an MLP on each vector."""

    def __init__(self):
        super().__init__()
        self.mlp = mlp(D, 4 * D)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x).unflatten(-1, (4, D))  # [..., i, j, h]


class SquaredVotes(Votes):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


class MixingVotes(Votes):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(-2))


@pytest.mark.parametrize(
    "F",
    [
        Votes(),
        vr.networks.EfficientVotes(n_out=4, d_inp=D, d_out=D, **LIKE),
        vr.networks.LearnedMemories(n_inp=7, n_out=4, d_out=D, **LIKE),
    ],
    ids=lambda F: type(F).__name__,
)
@pytest.mark.parametrize("masked", [False, True])
def test_general_routings(F, masked):
    layer = general(F)
    network = vr.Sequential(vr.PerVector(nn.LayerNorm(D, **LIKE)), layer, routing(4, 2, d_out=1))
    x_inp = randn(2, 7, D)  # [b, i, d]
    mask = torch.arange(7) < torch.tensor([[7], [4]]) if masked else None  # [b, i]
    for bias in ("base", "votes"):
        got = vr.contributions(network, x_inp, input_mask=mask, bias=bias)
        assert got.completeness_error.max() <= 1e-12
    x_inp = network[0](x_inp)
    V, phi = F(x_inp), layer.route(x_inp).phi  # [b, i, j, h], [b, i, j]
    if isinstance(F, vr.networks.LearnedMemories):
        close(vr.contributions(layer, x_inp).values, torch.zeros(2, 4, D, 7, **LIKE))
        close(vr.contributions(layer, x_inp, bias="votes").values, torch.einsum("bij,bijh->bjhi", phi, V))


def test_votes_that_cannot_be_split():
    with pytest.raises(ValueError, match=r"F \(SquaredVotes\) of GeneralRouting cannot be split"):
        vr.contributions(general(SquaredVotes()), randn(7, D))
    with pytest.raises(ValueError, match=r"F \(MixingVotes\) of GeneralRouting mixes vectors"):
        vr.contributions(general(MixingVotes()), randn(7, D))


def test_networks_that_mix_vectors_elsewhere():
    attention = nn.TransformerEncoderLayer(D, 1, 8, batch_first=True, **LIKE).eval()
    with pytest.raises(ValueError, match=r"PerVector\(TransformerEncoderLayer\) mixes vectors"):
        vr.contributions(vr.Sequential(vr.PerVector(attention), routing(None, 2)), randn(7, D))
    with pytest.raises(TypeError, match="network must be a module, got int"):
        vr.contributions(7, randn(7, D))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_does_not_depend_on_the_batch(dtype):
    network = head(d=8).to(dtype)
    x_inp = torch.randn(4, 20, 8, dtype=dtype)  # [b, i, d]
    lengths = [20, 7, 13, 1]
    mask = torch.arange(20) < torch.tensor(lengths)[:, None]  # [b, i]
    x_inp[~mask] = torch.nan
    together = vr.contributions(network, x_inp, input_mask=mask)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for b, n in enumerate(lengths):
        alone = vr.contributions(network, x_inp[b, :n])
        scale = (alone.values.abs().sum(-1) + alone.base.abs()).max()
        assert (together.values[b, :, :n] - alone.values).abs().max() <= tolerance * scale
        assert (together.base[b] - alone.base).abs().max() <= tolerance * scale
        assert (together.values[b, :, n:] == 0).all()


@given(data=st.data(), seed=st.integers(0, 2**31))
def test_permuting_splitting_and_grouping(data, seed):
    torch.manual_seed(seed)
    network = vr.Sequential(vr.PerVector(mlp()), routing(None, 4), data.draw(networks(4, 2)))
    x_inp = randn(2, 6, D)  # [b, i, d]
    bias = data.draw(st.sampled_from(["base", "votes"]))
    got = vr.contributions(network, x_inp, output=0, bias=bias)  # values [b, h, i]
    order = torch.tensor(data.draw(st.permutations(range(6))))  # [i]
    close(vr.contributions(network, x_inp[:, order], output=0, bias=bias).values, got.values[..., order])
    half = torch.rand(2, 6) < 0.5  # [b, i]
    twice, masks = torch.cat([x_inp, x_inp], 1), torch.cat([half, ~half], 1)  # [b, 2 i, d], [b, 2 i]
    split = vr.contributions(network, twice, output=0, bias=bias, input_mask=masks)
    close(split.sum_groups(torch.arange(6).repeat(2)).values, got.values)
    index = torch.randint(0, 3, (2, 6))  # [b, i]
    groups = got.sum_groups(index, 3)
    assert groups.values.shape == (2, D, 3)
    for b in range(2):
        for g in range(3):
            close(groups.values[b, :, g], got.values[b, :, index[b] == g].sum(-1))
    assert groups.completeness_error.max() <= 1e-12


def test_no_trace_is_left():
    network, x_inp = head(), randn(7, D).requires_grad_()
    with torch.no_grad():
        quiet = vr.contributions(network, x_inp)
    got = vr.contributions(network, x_inp)
    assert torch.equal(got.values, quiet.values)
    assert not any(t.requires_grad or t.grad_fn for t in got)
    assert x_inp.grad is None
    assert all(p.grad is None for p in network.parameters())
    with torch.inference_mode():
        inside = vr.contributions(network, x_inp * 1)
    close(inside.values, got.values)


def test_one_backward_pass_for_each_output(monkeypatch):
    network, x_inp = head(), randn(2, 7, D)
    grad, passes = torch.autograd.grad, []
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *a, **k: passes.append(k["retain_graph"]) or grad(*a, **k)
    )
    vr.contributions(network, x_inp, output=0, margin=1)
    assert passes == [False]
    vr.contributions(network, x_inp)
    assert passes[1:] == [True, True, False]


def test_tables_and_files(tmp_path):
    got = vr.contributions(head(), randn(2, 7, D))  # values [b, j, i]
    arrays = got.to_numpy()
    assert list(arrays) == ["values", "base", "output", "completeness_error"]
    assert (arrays["values"] == got.values.numpy()).all()
    frame = got.to_pandas()
    assert frame.shape == (2 * 3 * 7, 4)
    assert frame.index.names == ["axis_0", "axis_1", "i"]
    assert frame.loc[(1, 2, 5), "value"] == got.values[1, 2, 5].item()
    assert frame.loc[(1, 2, 5), "base"] == got.base[1, 2].item()
    got.save(tmp_path / "contributions")
    loaded = vr.Contributions.load(tmp_path / "contributions")
    assert all(torch.equal(a, b) for a, b in zip(loaded, got, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"output": 3}, ValueError, r"output must be one of 0, ..., n_out - 1 = 2, got 3"),
        ({"output": 0, "margin": -4}, ValueError, r"margin must be one of 0, ..., n_out - 1 = 2, got -4"),
        ({"margin": 1}, ValueError, "margin needs an output to subtract from, got output=None and margin=1"),
        ({"output": 1.0}, TypeError, r"output must be an int or an integer tensor, got 1.0 \(float\)"),
        ({"output": "a"}, TypeError, r"output must be an int or an integer tensor, got 'a' \(str\)"),
        ({"output": [0, 1]}, TypeError, r"output must be an int or an integer tensor, got \[0, 1\] \(list\)"),
        ({"output": True}, TypeError, r"output must be an int or an integer tensor, got True \(bool\)"),
        ({"output": 0, "margin": 1.0}, TypeError, "margin must be an int or an integer tensor"),
        (
            {"output": torch.tensor([0, 1])},
            ValueError,
            r"output must be an int or an integer tensor \[\].*\[2\]",
        ),
        ({"bias": "both"}, ValueError, "bias must be one of 'base', 'votes', got 'both'"),
        ({"input_mask": torch.ones(6)}, TypeError, "input_mask must be a bool"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        vr.contributions(head(), randn(7, D), **options)


def test_errors_of_groups():
    got = vr.contributions(head(), randn(7, D))
    with pytest.raises(ValueError, match="index must put every input in a group, got negative numbers"):
        got.sum_groups(torch.tensor([0, 0, 0, 1, 1, 1, -1]))
    got = vr.contributions(head(), randn(2, 7, D), output=0)  # [b, i]
    for shape in ((3, 7), (2, 2, 7)):
        with pytest.raises(ValueError, match=r"index must be .* the batch, \[2\], got"):
            got.sum_groups(torch.zeros(shape).long())


def test_autocast_is_no_sign_of_curvature():
    network = vr.Sequential(
        vr.PerVector(nn.Linear(16, 16)), vr.VectorRouting(n_inp=None, n_out=3, d_inp=16, d_out=5)
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = vr.contributions(network, torch.randn(2, 6, 16))
        assert (got.completeness_error < 0.1).all()
        with pytest.raises(ValueError, match=r"PerVector\(Square\) cannot be split"):
            vr.contributions(vr.Sequential(vr.PerVector(Square()), network[1]), torch.randn(2, 6, 16))


def test_errors_of_inputs():
    with pytest.raises(ValueError, match=r"x_inp must have at least one sample, got \[0, 7, 3\]"):
        vr.contributions(head(), randn(0, 7, D))
    with pytest.raises(ValueError, match=r"x_inp must have at least one vector, got \[2, 0, 3\]"):
        vr.contributions(head(), randn(2, 0, D))
    matrices = vr.MatrixRouting(n_inp=None, n_out=2, d_cov=2, d_inp=2, d_out=2)
    with pytest.raises(TypeError, match="network is a MatrixRouting, which routes matrices"):
        vr.contributions(matrices, randn(7, D))
