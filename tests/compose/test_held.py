"""Contributions of modules of standard operations: they add up, or the operation is named."""

import threading

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import vecroute as vr
from vecroute.compose import rules
from vecroute.compose.contribution import completeness_error
from vecroute.heads import HEADS, make_head

D = 8
LIKE = {"dtype": torch.float64}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, **LIKE)


def adds_up(module, x_inp: Tensor, **options) -> vr.Contributions:
    """Check that the contributions sum to the output of the module, and return them."""
    got = vr.contributions(module, x_inp, **options)
    assert got.completeness_error.max() <= 1e-12
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(got.values.sum(-1) + got.base, got.output, **close)
    return got


@pytest.mark.parametrize("name", HEADS)
def test_every_head(name):
    head = make_head(name, seed=0, d_emb=16, depth=3, n_cls=4).to(**LIKE).eval()
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    hidden, mask = (
        randn(2, 7, 3, 16),
        torch.arange(7) < torch.tensor([[7], [4]]),
    )  # [b, n_pos, depth, d], [b, n_pos]
    got = adds_up(head, hidden, input_mask=mask)
    assert got.values.shape == (2, 4, 21)
    assert (got.values[1, :, 12:] == 0).all()
    torch.testing.assert_close(got.output, head(hidden, mask))
    alone = adds_up(head, hidden[1, :4])
    torch.testing.assert_close(alone.values, got.values[1, :, :12], rtol=1e-9, atol=1e-12)


class Pooled(nn.Module):
    """A module that a user may write: a Transformer, a mean, a classifier."""

    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True, **options, **LIKE)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(D, 3, **LIKE)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.encoder(x).mean(-2))


class OwnAttention(nn.Module):
    """Attention, GELU and a normalisation, all by hand, with operations in place."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, **LIKE) for _ in range(3))
        self.scale = nn.Parameter(randn(D))

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("...id,...jd->...ij", self.q(x), self.k(x))
        scores /= D**0.5
        weights = scores.softmax(-1)
        x = x + weights @ self.v(x)
        x *= torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        x = 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))
        out = x.new_zeros(x.shape)
        out[..., 1:, :] = x[..., :-1, :]
        return out.relu_().sum(-2)


class Hybrid(nn.Module):
    """Operations that models have: convolution, clamp, maximum, largest, log_softmax, a detached gate."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3, padding=1, **LIKE)

    def forward(self, x: Tensor) -> Tensor:
        x = nnf.conv1d(x.mT, self.conv.weight, self.conv.bias, padding=1).mT
        x = torch.maximum(x, -0.5 * x).clamp(-0.2, 0.9) * x.sin().detach()
        return (x.max(-2).values + x.amax(-2, keepdim=True)[..., 0, :]).log_softmax(-1)


MODULES = [Pooled().eval(), Pooled(norm_first=True, activation="gelu").eval(), OwnAttention(), Hybrid()]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_modules_that_mix_vectors(module):
    x_inp = randn(2, 5, D)  # [b, i, d]
    got = adds_up(module, x_inp)
    torch.testing.assert_close(got.output, module(x_inp))
    assert (got.values != 0).any()
    one = adds_up(module, x_inp[0], output=1, margin=0)
    torch.testing.assert_close(one.values, got.values[0, 1] - got.values[0, 0])
    assert all(p.grad is None for p in module.parameters())


def test_attention_holds_its_weights():
    """Contributions equal the contributions of the values with fixed weights, computed by hand."""
    q, k, v = (nn.Linear(D, D, **LIKE) for _ in range(3))
    x_inp = randn(5, D)  # [i, d]
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    got = adds_up(lambda x: nnf.scaled_dot_product_attention(q(x), k(x), v(x), mask), x_inp)
    scores = (q(x_inp) @ k(x_inp).T / D**0.5).masked_fill(~mask, -torch.inf)
    expected = torch.einsum("ji,hd,id->jhi", scores.softmax(-1), v.weight, x_inp)
    torch.testing.assert_close(got.values, expected)
    torch.testing.assert_close(got.base, v.bias.expand(5, D))


def test_a_network_may_mix_modules_and_routings():
    module, routing = Pooled().eval(), vr.VectorRouting(n_inp=None, n_out=3, d_inp=D, d_out=1, **LIKE)
    x_inp = randn(2, 5, D)
    network = vr.Sequential(module.encoder, routing)
    torch.testing.assert_close(adds_up(network, x_inp).output, network(x_inp)[..., 0])


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (lambda x: x.cumprod(-2), "cumprod"),
        (lambda x: x.exp().sum(-2), "exp"),
        (lambda x: (x * x).sum(-2), "mul"),
        (lambda x: x @ x.mT, "matmul"),
        (lambda x: x / (1 + x.abs()), "div"),
        (lambda x: torch.fft.fft(x).real, "fft_fft"),
        (lambda x: x if x.sum() > 0 else 2 * x, "__bool__"),
        (lambda x: x * x.sum().item(), "item"),
        (lambda x: nnf.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "dropout"),
        (nn.BatchNorm1d(5, **LIKE), "batch_norm"),
    ],
)
def test_what_no_rule_holds_is_named(module, named):
    with pytest.raises(ValueError, match=rf"cannot be split into contributions: .*{named}.*\.detach\(\)"):
        vr.contributions(module, randn(2, 5, D))


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (lambda x: x.mean(-2).softmax(-1), "softmax"),
        (lambda x: nnf.softmax(x.mean(-2), -1), "softmax"),
        (lambda x: 2 * x.mean(-2).softmax(-1), "softmax"),
        (lambda x: x.mean(-2).softmax(-1).log(), "softmax"),
        (lambda x: x.mean(-2).sigmoid(), "sigmoid"),
        (lambda x: x.norm(dim=-1).softmax(-1) * x.mean((-2, -1)).sigmoid()[..., None], "softmax"),
    ],
)
def test_a_module_that_ends_in_probabilities_is_told_to_return_scores(module, named):
    message = f"cannot be split into contributions: .*{named}.*return the scores before {named}"
    with pytest.raises(ValueError, match=message):
        vr.contributions(module, randn(2, 5, D))


class Hidden(torch.autograd.Function):
    """An operation that torch functions do not show."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


@pytest.mark.parametrize(
    "module", [Hidden.apply, lambda x: x - x.mean(0, keepdim=True) ** 1 * x.new_ones(2, 1, 1)]
)
def test_what_hides_is_found_by_its_sum(module):
    with pytest.raises(ValueError, match=r"cannot be split into contributions"):
        vr.contributions(module, randn(2, 5, D))


@pytest.mark.parametrize("name", ["multi_head_attention_forward", "layer_norm", "gelu"])
def test_a_broken_rule_shows_in_the_error(name, monkeypatch):
    """The base is computed separately, so the sum is wrong if the gradient holds nothing fixed."""
    module, x_inp = Pooled(activation="gelu").eval(), randn(2, 5, D)
    monkeypatch.setitem(rules.RULES, name, lambda func, *args, **kwargs: (func(*args, **kwargs), func))
    monkeypatch.setattr("vecroute.compose.contribution.check_complete", lambda *_: None)
    assert vr.contributions(module, x_inp).completeness_error.max() > 1e-4


def test_outputs_that_are_no_scores():
    with pytest.raises(ValueError, match=r"must return a tensor \[..., j\] or \[..., j, h\].*got tuple"):
        vr.contributions(lambda x: (x, x), randn(5, D))
    with pytest.raises(ValueError, match="input_mask: the forward of OwnAttention takes none"):
        vr.contributions(OwnAttention(), randn(5, D), input_mask=torch.ones(5, dtype=torch.bool))


def test_threads_do_not_meet():
    module = MODULES[0]
    inputs = [randn(2, n, D) for n in (3, 5, 7, 9)]
    expected = [vr.contributions(module, x) for x in inputs]
    found: list = [None] * len(inputs)

    def work(k: int) -> None:
        for _ in range(3):
            found[k] = vr.contributions(module, inputs[k])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.values, wanted.values)


def test_autocast():
    module, x_inp = Pooled().eval().float(), torch.randn(2, 5, D)
    with torch.autocast("cpu", torch.bfloat16):
        got = vr.contributions(module, x_inp)
    assert got.completeness_error.max() < 0.02
    exact = vr.contributions(module, x_inp)
    assert (got.values - exact.values).abs().max() < 0.05 * exact.values.abs().max()
    assert completeness_error(exact.values, exact.base, exact.output).max() <= 1e-6
