"""Compositions of routings: the rules of Appendix A, masks, and errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.random_networks import D, dense_route, mlp, networks, routing


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_sequential_multiplies():
    first, second, third = routing(None, 5), routing(5, 4), routing(4, 2, d_out=1)
    x_inp = inputs(2, 7, D)  # [b, i, d]
    x_out, phi = vr.Sequential(first, second, third).route(x_inp)
    x_1, phi_1 = first.route(x_inp)
    x_2, phi_2 = second.route(x_1)
    x_3, phi_3 = third.route(x_2)
    assert torch.equal(x_out, x_3)
    close(phi.dense(), torch.einsum("bij,bjk,bkl->bil", phi_1, phi_2, phi_3))


def test_residual_adds_the_identity():
    first, second = routing(7, 4), routing(4, 4)
    x_inp = inputs(2, 7, D)  # [b, i, d]
    x_out, phi = vr.Sequential(first, vr.Residual(second)).route(x_inp)
    x_1, phi_1 = first.route(x_inp)
    x_2, phi_2 = second.route(x_1)
    assert torch.equal(x_out, x_1 + x_2)
    close(phi.dense(), phi_1 + phi_1 @ phi_2)
    alone = vr.Residual(second).route(x_1).phi
    close(alone.dense(), torch.eye(4, dtype=torch.float64) + phi_2)


def test_a_sum_of_independent_routings_stacks_over_i():
    first, second = routing(None, 4), routing(None, 4, d_inp=5)
    x_1, x_2 = inputs(2, 7, D), inputs(2, 3, 5)  # [b, i_1, d_1], [b, i_2, d_2]
    x_out, phi = vr.Sum(first, second).route((x_1, x_2))
    assert torch.equal(x_out, first(x_1) + second(x_2))
    close(phi.dense(), torch.cat([first.route(x_1).phi, second.route(x_2).phi], -2))


def test_a_sum_over_one_input_adds():
    first, second = routing(None, 4), routing(None, 4)
    x_inp = inputs(2, 7, D)  # [b, i, d]
    x_out, phi = vr.Sum(first, second).route(x_inp)
    assert torch.equal(x_out, first(x_inp) + second(x_inp))
    close(phi.dense(), first.route(x_inp).phi + second.route(x_inp).phi)


def test_a_concatenation_of_independent_routings_is_block_diagonal():
    first, second = routing(None, 4), routing(None, 2, d_inp=5)
    x_1, x_2 = inputs(7, D), inputs(3, 5)  # [i_1, d_1], [i_2, d_2]
    x_out, phi = vr.Concat(first, second).route((x_1, x_2))
    assert torch.equal(x_out, torch.cat([first(x_1), second(x_2)]))
    close(phi.dense(), torch.block_diag(first.route(x_1).phi, second.route(x_2).phi))


def test_a_concatenation_over_one_input_stands_side_by_side():
    first, second = routing(None, 4), routing(None, 2)
    x_inp = inputs(2, 7, D)  # [b, i, d]
    x_out, phi = vr.Concat(first, second).route(x_inp)
    assert torch.equal(x_out, torch.cat([first(x_inp), second(x_inp)], -2))
    close(phi.dense(), torch.cat([first.route(x_inp).phi, second.route(x_inp).phi], -1))


def test_tuples_nest():
    a, b, c, d = routing(None, 4), routing(None, 2), routing(None, 6), routing(6, 2, d_out=1)
    x_a, x_b, x_c = inputs(3, D), inputs(5, D), inputs(7, D)
    network = vr.Sequential(vr.Sum(vr.Concat(a, b), c), d)
    mask = torch.tensor([True, True, False, True, True])  # [i_b]
    masks = ((None, mask), None)
    x_out, phi = network.route(((x_a, x_b), x_c), input_mask=masks)
    assert torch.equal(x_out, network(((x_a, x_b), x_c), input_mask=masks))
    x_mid = torch.cat([a(x_a), b(x_b, mask)]) + c(x_c)  # [j, h]
    close(x_out, d(x_mid))
    blocks = torch.block_diag(a.route(x_a).phi, b.route(x_b, mask).phi)  # [i_a + i_b, j]
    close(phi.dense(), torch.cat([blocks, c.route(x_c).phi]) @ d.route(x_mid).phi)
    assert phi.input_mask.tolist() == [True] * 3 + mask.tolist() + [True] * 7


def test_a_block_may_feed_two_others_and_a_layer_may_be_shared():
    # A network of blocks, as in the figure of the Society of Mind.
    first, second, third = routing(None, 4), routing(4, 3), routing(4, 4)
    last = routing(7, 2, d_out=1)
    x_inp = inputs(6, D)  # [i, d]
    network = vr.Sequential(first, vr.Concat(second, vr.Sequential(third, third)), last)
    x_1, phi_1 = first.route(x_inp)
    x_2, phi_2 = second.route(x_1)
    x_3, phi_3 = third.route(x_1)
    x_4, phi_4 = third.route(x_3)
    x_5, phi_5 = last.route(torch.cat([x_2, x_4]))
    x_out, phi = network.route(x_inp)
    assert torch.equal(x_out, x_5)
    close(phi.dense(), phi_1 @ torch.cat([phi_2, phi_3 @ phi_4], 1) @ phi_5)
    assert len(list(network.parameters())) == len(
        [p for r in (first, second, third, last) for p in r.parameters()]
    )


def test_general_routings_compose():
    layer = general(vr.networks.EfficientVotes(n_out=4, d_inp=D, d_out=D, dtype=torch.float64))
    last = routing(4, 2)
    x_inp = inputs(2, 6, D)  # [b, i, d]
    phi = vr.Sequential(layer, last).route(x_inp).phi
    x_1, phi_1 = layer.route(x_inp)
    close(phi.dense(), phi_1 @ last.route(x_1).phi)


@settings(max_examples=100)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_random_networks_agree_with_the_dense_computation(data, seed):
    torch.manual_seed(seed)
    n_inp, n_out = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    network = data.draw(networks(n_inp, n_out))
    x_inp = inputs(2, n_inp, D)  # [b, i, d]
    mask = torch.rand(2, n_inp) < 0.7 if data.draw(st.booleans()) else None  # [b, i]
    x_out, phi = network.route(x_inp, input_mask=mask)
    close(network(x_inp, input_mask=mask), x_out)
    phi = vr.Credit(phi) if isinstance(phi, Tensor) else phi
    for b in range(2):
        x_dense, phi_dense, _ = dense_route(network, x_inp[b], None if mask is None else mask[b])
        close(x_out[b], x_dense)
        close(phi.dense()[b], phi_dense)
        for j in range(n_out):
            close(phi[b].column(j), phi_dense[:, j])


def deep() -> vr.Sequential:
    """Build a network in which masks pass through many parts."""
    return vr.Sequential(
        vr.PerVector(mlp()),
        vr.Concat(vr.PerVector(mlp()), vr.Residual(vr.PerVector(mlp()))),
        vr.Sum(vr.PerVector(mlp()), vr.PerVector(mlp())),
        routing(None, 4),
        vr.Residual(routing(4, 4)),
        routing(4, 2, d_out=1),
    )


def test_sums_of_what_is_partly_masked():
    per_vector, first, last = vr.PerVector(mlp()), routing(4, 4), routing(4, 2)
    x_inp, mask = inputs(4, D), torch.tensor([True, False, True, True])  # [i, d], [i]
    # One branch is a routing, so nothing is masked after the sum. Unused vectors must enter it as zeros.
    got = vr.Sequential(vr.Sum(per_vector, first), last)(x_inp, input_mask=mask)
    close(got, last(per_vector(x_inp).where(mask[:, None], 0.0) + first(x_inp, mask)))
    # Without a routing, a vector of the sum is used if one of its terms is used.
    x_2, mask_2 = inputs(4, D), torch.tensor([True, False, False, True])  # [i, d], [i]
    network = vr.Sequential(vr.Sum(per_vector, vr.PerVector(nn.Identity())), last)
    x_out, phi = network.route((x_inp, x_2), input_mask=(mask, mask_2))
    x_mid = per_vector(x_inp).where(mask[:, None], 0.0) + x_2.where(mask_2[:, None], 0.0)  # [i, d]
    expected = last.route(x_mid, input_mask=mask | mask_2)
    close(x_out, expected.x_out)
    close(phi.dense(), torch.cat([torch.diag(m.double()) for m in (mask, mask_2)]) @ expected.phi)


def test_padding_changes_nothing():
    network = deep()
    x_inp = inputs(5, D)  # [i, d]
    padded = torch.full((2, 9, D), torch.nan, dtype=torch.float64)  # [b, i, d]
    padded[0, [0, 2, 3, 5, 8]] = x_inp
    padded[1] = inputs(9, D)
    mask = torch.ones(2, 9, dtype=torch.bool)  # [b, i]
    mask[0, [1, 4, 6, 7]] = False
    x_out, phi = network.route(padded, input_mask=mask)
    alone = network.route(x_inp)
    close(x_out[0], alone.x_out)
    close(network(padded, input_mask=mask), x_out)
    close(phi.dense()[0, mask[0]], alone.phi.dense())
    assert (phi.dense()[0, ~mask[0]] == 0).all()


def test_padding_reaches_no_gradient():
    network = deep()
    x_inp = inputs(2, 6, D)  # [b, i, d]
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])  # [b, i]
    x_inp[~mask] = torch.nan
    network(x_inp, input_mask=mask).sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters() if p.grad is not None)


def test_pair_mask_goes_to_the_first_routing():
    first, second = routing(6, 4), routing(4, 2)
    x_inp, pair_mask = inputs(6, D), torch.rand(6, 4) < 0.5  # [i, d], [i, j]
    per_vector = vr.PerVector(mlp())
    routed = vr.Sequential(per_vector, first, second).route(x_inp, pair_mask=pair_mask)
    x_1, phi_1 = first.route(per_vector(x_inp), pair_mask=pair_mask)
    close(routed.x_out, second(x_1))
    close(routed.phi.dense(), phi_1 @ second.route(x_1).phi)
    # The masks of branches that do not route are concatenated like their vectors.
    both = vr.Sequential(vr.Concat(per_vector, vr.PerVector(nn.Identity())), routing(None, 4))
    x_2, half = inputs(2, D), torch.tensor([[True, False, True, True]] * 2)  # [i_2, d], [i_2, j]
    got = both((x_inp, x_2), pair_mask=(pair_mask, half))
    expected = both[1](torch.cat([per_vector(x_inp), x_2]), pair_mask=torch.cat([pair_mask, half]))
    close(got, expected)


def test_a_pair_mask_that_no_part_takes_is_refused():
    x_inp, pair_mask = inputs(2, 7, D), torch.ones(7, 7, dtype=torch.bool)
    for network in (vr.PerVector(nn.GELU()), vr.Sequential(vr.Residual(vr.PerVector(nn.GELU())))):
        for verb in (network, network.route):
            with pytest.raises(ValueError, match="pair_mask needs a routing that receives the inputs"):
                verb(x_inp, pair_mask=pair_mask)
    # The first part need not use the pair_mask if a later part does.
    network = vr.Sequential(vr.Sequential(vr.PerVector(nn.GELU())), routing(None, 7))
    assert network(x_inp, pair_mask=pair_mask).shape == (2, 7, D)


def test_forward_asks_for_no_credit(monkeypatch):
    network, x_inp = deep(), inputs(6, D)
    expected = network(x_inp)
    monkeypatch.setattr(vr.VectorRouting, "route", None)
    monkeypatch.setattr("vecroute.compose.modules.check_independent", None)
    assert torch.equal(network(x_inp), expected)


def test_they_are_ordinary_modules():
    network = deep()
    calls = []
    for module in network.modules():
        module.register_forward_hook(lambda module, *_: calls.append(module))
    network(inputs(6, D))
    assert set(calls) == {m for m in network.modules() if not isinstance(m, nn.ModuleList)}
    twin = deep()
    twin.load_state_dict(network.state_dict())
    x_inp = inputs(6, D)
    assert torch.equal(twin(x_inp), network(x_inp))
    assert isinstance(network[:2], vr.Sequential)
    assert len(network) == 6


def general(F, **options) -> vr.GeneralRouting:
    """Build a GeneralRouting with the given votes and 4 outputs."""
    like = {"dtype": torch.float64}
    return vr.GeneralRouting(
        A=nn.Linear(D, 1, **like),
        F=F,
        G=nn.Linear(D, D, **like),
        S=vr.networks.DotProduct(),
        n_inp=None,
        n_out=4,
        d_inp=D,
        **like,
        **options,
    )


class Mean(nn.Module):
    """A module that mixes vectors: each output is the mean of all inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(-2, keepdim=True).expand_as(x)


class Previous(nn.Module):
    """A module that mixes vectors: each output adds the previous input times a weight, which is still 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x.roll(1, -2)


@pytest.mark.parametrize(
    "module",
    [
        Mean(),
        Previous(),
        nn.TransformerEncoderLayer(D, 1, 8, batch_first=True, dtype=torch.float64).eval(),
        nn.BatchNorm1d(6, dtype=torch.float64),
        lambda x: x.softmax(-2),
    ],
    ids=["mean", "previous", "attention", "batch norm in training", "softmax"],
)
def test_credit_does_not_pass_through_what_mixes_vectors(module):
    network = vr.Sequential(vr.PerVector(module), routing(None, 2))
    x_inp = inputs(2, 6, D)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network(x_inp)
    name = getattr(module, "__name__", type(module).__name__)
    with pytest.raises(ValueError, match=rf"PerVector\({name}\) mixes vectors"):
        network.route(x_inp)
    assert all(value.isfinite().all() for value in network.state_dict().values())
    if not isinstance(module, nn.BatchNorm1d):
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


class Positions(nn.Module):
    """Position embeddings for a fixed number of vectors."""

    def __init__(self, n: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(n, D, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


@pytest.mark.parametrize(
    "module",
    [
        mlp(),
        nn.Dropout(0.5),
        nn.Identity(),
        Positions(100),
        nn.BatchNorm1d(100, dtype=torch.float64).eval(),
        torch.relu,
        lambda x: (x + 10).log(),
    ],
    ids=["mlp", "dropout", "identity", "positions", "batch norm", "function", "logarithm"],
)
def test_credit_passes_through_what_treats_each_vector_alone(module):
    first = routing(None, 2)
    network = vr.Sequential(vr.PerVector(module), first)
    x_inp = inputs(2, 100, D)  # [b, i, d]
    torch.manual_seed(1)
    phi = network.route(x_inp).phi
    torch.manual_seed(1)
    close(phi.dense(), first.route(module(x_inp)).phi)


def test_a_probe_takes_no_random_numbers():
    network = vr.Sequential(vr.PerVector(nn.Dropout(0.5)), routing(None, 2))
    x_inp = inputs(6, D)
    torch.manual_seed(1)
    network(x_inp)
    after_forward = torch.get_rng_state()
    torch.manual_seed(1)
    network.route(x_inp)
    assert torch.equal(torch.get_rng_state(), after_forward)


def test_nan_of_the_module_itself_is_no_sign_of_mixing():
    first = routing(None, 2)
    x_inp = inputs(100, D).abs() + 1  # [i, d]
    phi = vr.Sequential(vr.PerVector(lambda x: (x - 1).log()), first).route(x_inp).phi
    close(phi.dense(), first.route((x_inp - 1).log()).phi)


def test_a_module_is_probed_once():
    calls = []
    network = vr.Sequential(vr.PerVector(lambda x: calls.append(len(x)) or x), routing(None, 2))
    network.route(inputs(70, D))
    n_calls = len(calls)
    assert n_calls > 1
    network.route(inputs(80, D))
    assert len(calls) == n_calls + 1


def test_credit_of_shapes_alone():
    network = vr.Sequential(vr.PerVector(mlp()), routing(None, 4), routing(4, 2)).to("meta")
    x_out, phi = network.route(inputs(3, 7, D).to("meta"))
    assert (x_out.shape, phi.dense().shape) == ((3, 2, D), (3, 7, 2))
    assert phi.dense().is_meta


def test_unknown_modules_are_named():
    x_inp = inputs(2, 6, D)
    attention = nn.TransformerEncoderLayer(D, 1, 8, batch_first=True, dtype=torch.float64).eval()
    network = vr.Sequential(routing(None, 4), vr.Sum(routing(4, 4), vr.Sequential(attention, routing(4, 4))))
    assert network(x_inp).shape == (2, 4, D)
    with pytest.raises(TypeError, match=r"network\.1\.1\.0 is a TransformerEncoderLayer.*PerVector"):
        network.route(x_inp)
    with pytest.raises(TypeError, match=r"network\.0 is a LayerNorm"):
        vr.Sequential(nn.LayerNorm(D, dtype=torch.float64), routing(None, 4)).route(x_inp)
    mask = torch.ones(2, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"masks cannot pass through LayerNorm: wrap it in .*PerVector"):
        vr.Sequential(nn.LayerNorm(D, dtype=torch.float64), routing(None, 4))(x_inp, input_mask=mask)


@pytest.mark.parametrize("ask", [lambda network, x: network.route(x), vr.contributions])
@pytest.mark.parametrize(
    ("f", "shape"),
    [
        (lambda x: x + x[..., :1, :], (2, 5, D)),
        (lambda x: x + x[..., 1:2, :], (2, 5, D)),
        (lambda x: x + x[..., -1:, :], (2, 5, D)),
        (lambda x: x.flip(-2), (2, 5, D)),
        (lambda x: x.flip(-2), (5, D)),
        (lambda x: x - x.mean(0, keepdim=True), (2, 1, D)),
        (lambda x: x - x.mean(1, keepdim=True), (2, 3, 6, D)),
        (lambda x: x + x[-1:], (2, 3, 6, D)),
        (lambda x: x + torch.cat([x[:, 2:], x[:, :2]], 1) if x.shape[1] == 3 else 1 / 0, (2, 3, 6, D)),
    ],
)
def test_no_mixing_is_missed(f, shape, ask):
    x_inp = inputs(*shape)

    def F(x: Tensor) -> Tensor:  # [..., i, d] -> [..., i, j, h]
        return f(x)[..., None, :].expand(*x.shape[:-1], 4, D)

    with pytest.raises(ValueError, match=r"PerVector\(<lambda>\) mixes vectors"):
        ask(vr.Sequential(vr.PerVector(f), routing(None, 2)), x_inp)
    with pytest.raises(ValueError, match=r"F \(F\) of GeneralRouting mixes vectors"):
        ask(vr.Sequential(general(F)), x_inp)


def test_votes_that_mix_inputs():
    votes = vr.networks.EfficientVotes(n_out=4, d_inp=D, d_out=D, dtype=torch.float64)
    x_inp = inputs(6, D)

    def F(x):
        return votes(x.mean(-2, keepdim=True).expand_as(x))

    mixing, declared = general(F), general(F, independent_votes=True)
    denied = general(votes, independent_votes=False)
    with pytest.raises(ValueError, match=r"F \(F\) of GeneralRouting mixes vectors"):
        vr.Sequential(mixing).route(x_inp)
    assert vr.Sequential(declared).route(x_inp).phi.shape == (6, 4)
    with pytest.raises(ValueError, match=r"F \(EfficientVotes\) .* \(independent_votes=False\)"):
        vr.Sequential(denied).route(x_inp)
    assert vr.Sequential(general(votes)).route(x_inp).phi.shape == (6, 4)
    with pytest.raises(
        TypeError, match=r"independent_votes must be True, False or None \(probed\), got 'yes'"
    ):
        general(votes, independent_votes="yes")


@pytest.mark.parametrize(
    ("network", "arguments", "error", "message"),
    [
        (lambda: vr.Sequential(), None, ValueError, "Sequential needs at least one module, got none"),
        (lambda: vr.Sum(), None, ValueError, "Sum needs at least one module, got none"),
        (lambda: vr.Concat(len), None, TypeError, "Concat takes modules, got builtin_function_or_method"),
        (lambda: vr.Residual(len), None, TypeError, "Residual takes modules, got builtin_function_or_method"),
        (lambda: vr.PerVector(3), None, TypeError, "module must be a module or function, got int"),
        (
            lambda: vr.PerVector(nn.Flatten()),
            (inputs(2, 6, D),),
            ValueError,
            r"PerVector\(Flatten\) must return one vector per input vector, \[2, 6, 'd_out'\], got \[2, 18\]",
        ),
        (
            lambda: vr.PerVector(nn.Identity()),
            ((inputs(6, D), inputs(6, D)),),
            TypeError,
            r"PerVector\(Identity\) takes one tensor x_inp \[..., n_inp, d_inp\], got tuple",
        ),
        (
            lambda: vr.Residual(routing(6, 4)),
            (inputs(6, D),),
            ValueError,
            r"Residual\(VectorRouting\) must keep the shape \[6, 3\], got \[4, 3\]",
        ),
        (
            lambda: vr.Residual(routing(6, 6)),
            ((inputs(6, D), inputs(6, D)),),
            TypeError,
            r"Residual\(VectorRouting\) takes one tensor x_inp \[..., n_inp, d_inp\], got tuple",
        ),
        (
            lambda: vr.Sequential(routing(6, 6)),
            ((inputs(6, D), inputs(6, D)),),
            TypeError,
            r"VectorRouting takes one tensor x_inp \[..., n_inp, d_inp\], got tuple",
        ),
        (
            lambda: vr.Sum(routing(6, 4), routing(6, 1)),
            (inputs(6, D),),
            ValueError,
            r"branches of Sum must return outputs of one shape, got \[4, 3\], \[1, 3\]",
        ),
        (
            lambda: vr.Concat(routing(6, 4), routing(6, 1, d_out=5)),
            (inputs(6, D),),
            ValueError,
            r"branches of Concat must return vectors of one size, got \[4, 3\], \[1, 5\]",
        ),
        (
            lambda: vr.Sum(routing(6, 4), routing(6, 4)),
            ((inputs(6, D),) * 3,),
            ValueError,
            "x_inp must be one tensor or a tuple of 2, one per branch of Sum, got 3",
        ),
        (
            lambda: vr.Sum(routing(6, 4), routing(6, 4)),
            ((inputs(6, D),) * 2, torch.ones(6, dtype=torch.bool)),
            ValueError,
            "input_mask must be None or a tuple of 2, one per input, got Tensor",
        ),
        (
            lambda: vr.Sequential(routing(6, 4)),
            ("text",),
            TypeError,
            r"x_inp must be a tensor \[..., n_inp, d_inp\] or a tuple of them, got str",
        ),
        (
            lambda: vr.Sequential(routing(6, 4)),
            (inputs(6, D), torch.ones(5, dtype=torch.bool)),
            ValueError,
            r"input_mask must be \[..., n_inp=6\].*got \[5\]",
        ),
        (
            lambda: vr.Sequential(vr.PerVector(mlp())),
            (inputs(6, D), None, torch.ones(6, 4, dtype=torch.bool)),
            ValueError,
            "pair_mask needs a routing that receives the inputs, but Sequential has none",
        ),
        (
            lambda: vr.Sequential(vr.Sum(vr.PerVector(mlp()), vr.PerVector(mlp())), routing(6, 4)),
            (
                (inputs(6, D),) * 2,
                None,
                (torch.ones(6, 4, dtype=torch.bool), torch.ones(6, 4, dtype=torch.bool)),
            ),
            ValueError,
            "pair_mask must be one mask for all branches of a Sum without routings, got several",
        ),
    ],
)
def test_errors(network, arguments, error, message):
    with pytest.raises(error, match=message):
        network().route(*arguments)


def test_errors_of_inputs():
    network = vr.Sequential(vr.PerVector(nn.GELU()), routing(None, 2))
    nested = torch.nested.nested_tensor([inputs(3, D), inputs(2, D)], layout=torch.jagged)
    with pytest.raises(
        TypeError, match=r"x_inp must be a tensor \[\.\.\., n_inp, d_inp\], got a nested tensor"
    ):
        network.route(nested)
    with pytest.raises(TypeError, match="got a nested tensor"):
        vr.contributions(network, nested)
    for verb in (network, network.route, vr.PerVector(nn.GELU())):
        with pytest.raises(ValueError, match=r"x_inp must have at least one vector, got \[2, 0, 3\]"):
            verb(inputs(2, 0, D))
    with pytest.raises(TypeError, match=r"x_inp must be a tensor \[\.\.\., n_inp, d_inp\] .*got \[3\]"):
        vr.PerVector(nn.GELU())(inputs(D))
