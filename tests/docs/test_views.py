"""The examples of the paper's views: exact special cases of section 3.3, and small runs of the others."""

import copy
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import pyplot as plt
from torch import Tensor

import vecroute as vr
from tests.helpers.guides import run
from tests.helpers.paths import ROOT

EXAMPLES, GUIDE = ROOT / "examples", ROOT / "docs" / "views.md"
sys.path += [str(EXAMPLES), str(ROOT / "docs" / "views")]
import associative_memory  # noqa: E402
import blocks  # noqa: E402
import causal  # noqa: E402
import context_vectors  # noqa: E402
import figures  # noqa: E402
import recurrent_residual  # noqa: E402
import special_cases  # noqa: E402

SIZE, BATCH = st.integers(1, 9), st.lists(st.integers(1, 3), max_size=2)
SEED = st.integers(0, 2**31)


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Special cases


@settings(max_examples=100)
@given(batch=BATCH, n_inp=SIZE, n_out=SIZE, d=SIZE, scale=st.sampled_from([0.1, 1, 10]), seed=SEED)
def test_attention(batch, n_inp, n_out, d, scale, seed):
    """Test one head and several heads. Heads are one of the batch dimensions."""
    query, key, value = draw(seed, (*batch, n_out, d), (*batch, n_inp, d), (*batch, n_inp, d))
    expected = nnf.scaled_dot_product_attention(scale * query, key, value)
    assert_same(special_cases.attention(scale * query, key, value), expected)


@settings(max_examples=50)
@given(batch=BATCH, n_inp=SIZE, n_out=SIZE, d=SIZE, seed=SEED)
def test_masked_attention(batch, n_inp, n_out, d, seed):
    query, key, value = draw(seed, (*batch, n_out, d), (*batch, n_inp, d), (*batch, n_inp, d))
    mask = draw(seed + 1, (n_out, n_inp))[0] > 0  # [j, i]
    mask[:, 0] = True  # for a query that may attend to nothing, the result of SDPA depends on its backend
    expected = nnf.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    assert_same(special_cases.attention(query, key, value, mask), expected)


@settings(max_examples=100)
@given(
    batch=BATCH, n_inp=SIZE, n_out=SIZE, d=SIZE, beta=st.sampled_from([0.1, 1, 8]),
    n_iters=st.integers(1, 5), seed=SEED,
)  # fmt: skip
def test_hopfield(batch, n_inp, n_out, d, beta, n_iters, seed):
    patterns, query = draw(seed, (*batch, n_inp, d), (*batch, n_out, d))
    state = query.mT  # [..., d, j], as columns, the way Hopfield networks are written
    for _ in range(n_iters):
        state = patterns.mT @ torch.softmax(beta * patterns @ state, -2)
    assert_same(special_cases.hopfield(patterns, query, beta, n_iters), state.mT)


def test_hopfield_until_it_settles():
    patterns, query = draw(0, (3, 20, 16), (3, 5, 16))
    settled = special_cases.hopfield(patterns, query, 0.5, vr.Converge(1e-13, 1000))
    assert_same(special_cases.hopfield(patterns, query, 0.5, 2000), settled)


@settings(max_examples=50)
@given(batch=BATCH, n_inp=SIZE, n_slots=SIZE, d_inp=SIZE, d_slot=SIZE, seed=SEED)
def test_slot_competition(batch, n_inp, n_slots, d_inp, d_slot, seed):
    """R is the softmax over slots of slot attention, and x_out is the sum of values weighted by R."""
    torch.manual_seed(seed)
    module = special_cases.SlotCompetition(n_slots=n_slots, d_inp=d_inp, d_slot=d_slot, dtype=torch.float64)
    x_inp, slots = draw(seed, (*batch, n_inp, d_inp), (*batch, n_slots, d_slot))
    inputs = module.norm_inputs(x_inp)
    k, v, q = module.to_keys(inputs), module.to_values(inputs), module.to_queries(module.norm_slots(slots))
    attn = torch.softmax(torch.einsum("...id,...jd->...ij", k, q) * d_slot**-0.5, dim=-1)
    R, x_out = module(x_inp, slots)
    assert_same(R, attn)
    assert_same(x_out, attn.mT @ v)


def test_a_copy_of_the_slots_has_weights_of_its_own():
    module = special_cases.SlotCompetition(n_slots=2, d_inp=3, d_slot=3)
    x_inp, slots = torch.randn(4, 3), torch.randn(2, 3)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.to_keys.weight.neg_()
    assert not torch.allclose(other(x_inp, slots)[0], module(x_inp, slots)[0])


# Examples


def test_associative_memory():
    results = associative_memory.main(n_copies=10, n_steps=150)
    assert results["routing"] == results["Hopfield"] == 1
    assert results["difference"] < 1e-5
    assert results["corrupted"] < 0.1
    assert results["learned"] > 0.3


def test_blocks(tmp_path):
    results = blocks.main(n_steps=120, path=str(tmp_path / "k_lines.png"))
    assert results["accuracy"] > 0.9
    assert results["looked"] > 0.9
    assert (tmp_path / "k_lines.png").stat().st_size > 10_000


def test_k_lines_are_the_credit_of_the_network():
    network, (x_inp, _, _) = blocks.society(), blocks.scenes(3)
    first, second, third = blocks.k_lines(network, x_inp)
    torch.testing.assert_close(first @ second @ third, network.route(x_inp).phi.dense())


def test_causal():
    results = causal.main(n=6, d=16, n_steps=150)
    assert results["right"] > 0.6
    assert results["leaked"] == 0


@pytest.mark.parametrize("n_iters", [1, 3])
def test_the_past_does_not_hear_of_the_future(n_iters):
    layer = causal.CausalRouting(n=6, d=4, n_iters=n_iters).double()
    x_inp = torch.randn(6, 4, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(layer, x_inp).abs().sum((1, 3))  # [j, i]
    assert (J.triu(1) == 0).all()
    assert (J.tril() > 0)[torch.ones(6, 6).tril().bool()].all()


def test_competition_of_outputs_is_not_causal():
    """With one iteration the layer is causal. With two, the competition carries later information."""
    layer = vr.VectorRouting(n_inp=6, n_out=6, d_inp=4, d_out=4, dtype=torch.float64)
    x_inp, mask = torch.randn(6, 4, dtype=torch.float64), torch.ones(6, 6).triu().bool()
    leaks = []
    for layer.n_iters in (1, 2):
        J = torch.autograd.functional.jacobian(lambda x: layer(x, pair_mask=mask), x_inp).abs().sum((1, 3))
        leaks.append(bool((J.triu(1) > 0).any()))
    assert leaks == [False, True]


def test_context_vectors():
    results = context_vectors.main(n_steps=120, n_segment=4)
    assert results["right 6"] > 0.6
    assert results["looked 6"] > 0.2


def test_the_credit_of_a_context_is_that_of_the_network():
    """Compute the credit of two segments by hand: through the old context, and directly."""
    reader = context_vectors.Reader(n_context=2, n_segment=3, d=4)
    segments = torch.randn(1, 2, 3, 4)
    _, credit = reader.read(segments)
    context, first = reader.routing.route(torch.cat((reader.start, segments[0, 0])))
    _, second = reader.routing.route(torch.cat((context, segments[0, 1])))
    torch.testing.assert_close(credit[0], torch.cat((first[2:] @ second[:2], second[2:])))


def test_recurrent_residual():
    results = recurrent_residual.main(n_steps=100)
    assert results["right -1"] == 0.25
    assert results["right +0"] == 1
    assert results["credit -1"] == 0
    assert results["credit +0"] > 0


def test_the_credit_of_a_recurrence_is_that_of_a_sequence():
    chain = recurrent_residual.Chain(n=4, d=8)
    chain.neighbours.fill_(True)
    colours = torch.arange(3)
    sequence = vr.Sequential(chain.step, chain.step, chain.step)
    torch.testing.assert_close(chain.credit(colours, 3), sequence.route(chain.vectors(colours)).phi.dense())


def test_they_run_as_scripts():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "special_cases.py"], capture_output=True, text=True, check=True
    )
    assert "attention with 4 heads: greatest difference" in done.stdout


# The guide


def test_the_guide_prints_what_it_says(capsys):
    printed, expected = run(GUIDE.read_text(), capsys)
    assert len(expected) >= 12
    assert printed == expected


def test_the_figures_of_the_guide(tmp_path):
    """All figures exist, and the script draws them. Another test draws the figure of the society."""
    shown = re.findall(r"\]\(views/(\w+\.png)\)", GUIDE.read_text())
    drawn = {path.name for path in (GUIDE.parent / "views").glob("*.png")}
    assert len(shown) == 4
    assert set(shown) == drawn
    for draw_figure in (figures.geometry, figures.credit, figures.memory):
        draw_figure(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} | {"society.png"} == drawn
    plt.close("all")
