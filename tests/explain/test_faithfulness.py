"""Measures of faithfulness: on heads whose truth is known, every method, intervals, one command."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import vecroute as vr
from tests.helpers.texts import LABELS, TEXTS
from tests.helpers.tiny_models import save_tiny, without_special_tokens
from vecroute.cli import main
from vecroute.encoders import TextEncoder
from vecroute.explain.attribution import Attribution, Reader
from vecroute.explain.faithfulness import FRACTIONS, agreement, measure, spearman, summarize
from vecroute.explain.rivals import METHODS, by_shap, integrated, neighbour_tree, repeated
from vecroute.explain.text import explain_words
from vecroute.heads import make_head

SOME = ["a warm and witty film", "the plot is so slow and cold !", "good " * 60]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    encoder = TextEncoder(save_tiny(tmp_path_factory.mktemp("tiny")), device="cpu")
    encoder.tokenizer.mask_token = encoder.tokenizer.unk_token  # a baseline of integrated gradients
    return encoder


def head_of(encoder, name="routing", seed=0):
    head = make_head(name, seed=seed, d_emb=encoder.d_emb, depth=encoder.depth, n_cls=2)
    torch.manual_seed(seed)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


@pytest.fixture(scope="module")
def reader(encoder):
    return Reader(encoder, head_of(encoder))


def test_layouts_give_the_hidden_states_of_the_encoder(encoder, reader):
    layout = reader.layout(reader.tokens(SOME))
    assert len(layout.ids) > len(SOME)  # the long text comes in chunks
    hidden = reader.hidden(layout)
    for k, expected in enumerate(encoder.encode(SOME)):
        torch.testing.assert_close(hidden[k][layout.mask[k]], expected, rtol=1e-4, atol=1e-5)
        specials = 2 * -(-len(reader.tokens([SOME[k]])[0]) // (encoder.max_length - 2))
        assert (layout.mask[k] & ~layout.content[k]).sum() == specials
    twice = repeated(layout, 2)
    torch.testing.assert_close(reader.hidden(twice)[len(SOME) :], hidden, rtol=1e-4, atol=1e-5)
    embedded = reader.hidden(layout, reader.embeddings(layout))
    torch.testing.assert_close(embedded, hidden, rtol=1e-4, atol=1e-5)


def test_special_tokens_that_are_not_routed_are_left_out(tmp_path):
    encoder = TextEncoder(save_tiny(tmp_path), device="cpu", special_tokens=False)
    reader = Reader(encoder, head_of(encoder))
    layout = reader.layout(reader.tokens(SOME))
    assert torch.equal(layout.mask, layout.content)
    torch.testing.assert_close(reader.hidden(layout)[0][layout.mask[0]], encoder.encode(SOME)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_texts_that_lose_their_only_token_and_have_no_special_tokens(tmp_path):
    encoder = TextEncoder(save_tiny(tmp_path), tokenizer=without_special_tokens(), device="cpu")
    reader = Reader(encoder, head_of(encoder))
    layout = reader.layout([[]])
    assert layout.ids.shape == layout.mask.shape == (1, 1)
    assert not layout.mask.any()
    torch.testing.assert_close(reader.scores(layout), reader.scores(reader.layout([[], [5]]))[:1])
    for row in measure(reader, ["good", "a film"], ["words", "SHAP, 4 evaluations", "leave one out"]):
        assert 0 <= row["deletion"] <= 1


def test_a_stride_is_refused(tmp_path):
    encoder = TextEncoder(save_tiny(tmp_path), device="cpu", stride=2)
    with pytest.raises(ValueError, match="stride=0, got stride=2"):
        Reader(encoder, head_of(encoder))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("name", METHODS)
def test_methods_say_something_of_every_position_and_add_up_if_they_promise_to(reader, name):
    layout = reader.layout(reader.tokens(SOME[:2]))
    target, other = reader.scores(layout).topk(2).indices.unbind(-1)
    values, error = METHODS[name](reader, layout, target, other)
    assert values.shape == layout.mask.shape
    assert values.isfinite().all()
    assert values[layout.content].unique().numel() > 1
    promises = ("states", "integrated", "SHAP")
    assert (error is not None) == (name.startswith(promises) or name == "words")
    # The head normalises hidden states, so that a straight path from zero jumps at its start.
    if error is not None and name != "integrated gradients at states":
        assert error.max() < (0.02 if name.startswith("integrated") else 1e-5)


def test_the_methods_of_routings_refuse_other_heads(encoder):
    reader = Reader(encoder, head_of(encoder, "probe"))
    layout = reader.layout(reader.tokens(SOME[:1]))
    target, other = reader.scores(layout).topk(2).indices.unbind(-1)
    for name in ("states, bias in votes", "phi"):
        with pytest.raises(ValueError, match="need a RoutingHead, got PoolingHead"):
            METHODS[name](reader, layout, target, other)
    for name in ("words", "states"):
        assert METHODS[name](reader, layout, target, other).completeness_error.max() < 1e-5


def test_a_baseline_that_the_tokenizer_lacks_is_refused(tmp_path):
    encoder = TextEncoder(save_tiny(tmp_path), device="cpu")
    reader = Reader(encoder, head_of(encoder))
    layout = reader.layout(reader.tokens(SOME[:1]))
    target, other = reader.scores(layout).topk(2).indices.unbind(-1)
    with pytest.raises(ValueError, match=r"needs a mask token, which .* lacks"):
        METHODS["integrated gradients from [MASK]"](reader, layout, target, other)


def test_words_are_the_contributions_of_explanations(encoder):
    """Methods on batches of token ids and ``explain_words`` on texts give the same contributions."""
    reader = Reader(encoder, head_of(encoder))
    layout = reader.layout(reader.tokens(SOME))
    target, other = reader.scores(layout).topk(2).indices.unbind(-1)
    values = METHODS["words"](reader, layout, target, other).values  # [b, n_pos]
    pairs = torch.stack([target, other], 1).tolist()
    for k, (fields, _) in enumerate(explain_words(encoder, reader.head, SOME, pairs)):
        margin = fields["values"][:, 0, 0] - fields["values"][:, 0, 1]  # [n]
        torch.testing.assert_close(values[k][layout.mask[k]], margin, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_integrated_gradients_equal_those_of_captum():
    captum = pytest.importorskip("captum.attr")
    x, without = torch.randn(2, 3, 5, 4, dtype=torch.float64)  # [b, n, d] each
    weight = torch.randn(4, 4, dtype=torch.float64)

    def outputs(x):
        return (x @ weight).tanh().prod(-1).sum(-1)

    expected = captum.IntegratedGradients(lambda x: outputs(x)).attribute(x, without, n_steps=20)
    torch.testing.assert_close(integrated(outputs, x, without, 20), expected)
    assert expected.abs().max() > 1e-3


def test_values_in_a_batch_are_those_alone(reader):
    """Long and short texts, in batches over texts and sub-texts and alone, get the same values."""
    texts = reader.tokens([*SOME, "good"])
    whole = reader.layout(texts)
    pairs = reader.scores(whole).topk(2).indices
    for name in ("words", "words, 24 samples", "leave one out"):
        together = METHODS[name](reader, whole, *pairs.unbind(-1)).values
        for k, ids in enumerate(texts):
            alone = reader.layout([ids])
            values = METHODS[name](reader, alone, *pairs[k : k + 1].unbind(-1)).values
            torch.testing.assert_close(
                together[k][whole.mask[k]], values[alone.mask], rtol=1e-3, atol=1e-4, msg=name
            )


def test_margins_of_both_ways_are_opposite(reader):
    layout = reader.layout(reader.tokens(SOME[:2]))
    target, other = reader.scores(layout).topk(2).indices.unbind(-1)
    for name in ("words", "states", "gradient x input", "integrated gradients, margin"):
        forth = METHODS[name](reader, layout, target, other).values
        back = METHODS[name](reader, layout, other, target).values
        torch.testing.assert_close(forth, -back, rtol=1e-3, atol=1e-5)


class Counting(torch.nn.Module):
    """A head with known scores: 4 for each token with the marked embedding, minus 2."""

    def __init__(self, marked):
        super().__init__()
        self.marked = torch.nn.Parameter(marked)  # [d_emb], the embedding of the token

    def forward(self, hidden, mask):
        mask = mask if mask.dim() == 2 else mask[..., 0]
        found = ((hidden[..., 0, :] - self.marked).abs().sum(-1) < 1e-4) & mask  # [b, n_pos]
        score = 4.0 * found.sum(-1) - 2  # [b]
        return torch.stack([torch.zeros_like(score), score], -1)


def knowing(encoder, sign):
    """Return a head that counts the word "good", and a method that names it (or the opposite)."""
    encoder.model.embeddings.position_embeddings.weight.data.zero_()
    with torch.no_grad():
        (good,) = encoder.tokenizer("good", add_special_tokens=False)["input_ids"]
        (hidden,) = encoder.encode(["good"])
    reader = Reader(encoder, Counting(hidden[1, 0].clone()))
    return reader, lambda reader, layout, target, other: Attribution(
        sign * (layout.ids.flatten()[layout.rows] == good).float()
    )


def test_measures_of_a_head_whose_truth_is_known(tmp_path):
    encoder = TextEncoder(save_tiny(tmp_path), device="cpu")
    text = "a good film is a film that is very good " + "and the plot is so slow " * 3
    n = 28
    reader, truth = knowing(encoder, 1)
    methods = {"truth": truth, "backwards": knowing(encoder, -1)[1], "phi": METHODS["random"]}
    rows = {row["method"]: row for row in measure(reader, [text], methods)}
    p = 1 / (1 + np.exp(-6.0))  # two marked words
    without = {
        share: 1 / (1 + np.exp(-(4.0 * max(0, 2 - max(1, round(share * n))) - 2))) for share in FRACTIONS
    }
    alone = {share: 1 / (1 + np.exp(-(4.0 * min(2, max(1, round(share * n))) - 2))) for share in FRACTIONS}
    row = rows["truth"]
    assert row["n_tokens"] == n
    assert row["comprehensiveness"] == pytest.approx(np.mean([p - q for q in without.values()]), abs=1e-5)
    assert row["sufficiency"] == pytest.approx(np.mean([p - q for q in alone.values()]), abs=1e-5)
    for name in ("comprehensiveness", "sufficiency", "deletion", "insertion"):
        # This head reads each token separately, so it does not matter how the others are deleted.
        assert row[f"{name}_masked"] == pytest.approx(row[name], abs=1e-5)
    assert row["leave_one_out"] == pytest.approx(1)
    wrong = rows["backwards"]
    assert wrong["comprehensiveness"] == pytest.approx(0, abs=1e-5)
    assert wrong["sufficiency"] > 0.8
    assert wrong["leave_one_out"] == pytest.approx(-1)
    assert row["deletion"] < 0.3 < 0.9 < wrong["deletion"]
    assert row["insertion"] > 0.9 > wrong["insertion"]


def test_texts_alone_and_together_give_the_same(reader):
    methods = ["states", "phi"]
    together = measure(reader, SOME[:2], methods, leave_one_out=False)
    alone = [row for text in SOME[:2] for row in measure(reader, [text], methods, leave_one_out=False)]
    for row in together:
        (same,) = [r for r in alone if (r["method"], r["n_tokens"]) == (row["method"], row["n_tokens"])]
        for name in ("comprehensiveness", "sufficiency_masked", "insertion"):
            assert row[name] == pytest.approx(same[name], abs=1e-4)
        assert row["leave_one_out"] is None


def test_agreement_over_seeds_and_with_random_weights(encoder, reader):
    method = METHODS["states"]
    assert agreement([reader, reader], SOME[:2], method) == pytest.approx([1, 1])
    other = Reader(encoder, head_of(encoder, seed=5))
    assert max(agreement([reader, other], SOME, method)) < 0.99


def test_rank_correlation():
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert spearman(a, a.exp()) == pytest.approx(1)
    assert spearman(a, -a) == pytest.approx(-1)
    assert spearman(a, torch.tensor([1.0, 1.0, 2.0, 2.0])) == pytest.approx(2 / np.sqrt(5))
    assert np.isnan(spearman(a, torch.ones(4)))


def test_the_tree_of_neighbours_joins_every_token_once():
    tree = neighbour_tree(5)
    assert tree.shape == (4, 4)
    assert sorted(tree[:, :2].flatten().tolist()) == list(range(8))
    assert tree[-1, 3] == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_shap_of_a_sum_is_what_each_token_adds(tmp_path):
    encoder = TextEncoder(save_tiny(tmp_path), device="cpu")
    reader, _ = knowing(encoder, 1)
    layout = reader.layout(reader.tokens(["a good film is good"]))
    found = by_shap(200)(reader, layout, torch.tensor([1]), torch.tensor([0])).values[layout.content]
    torch.testing.assert_close(found, torch.tensor([0.0, 4, 0, 0, 4]), rtol=0, atol=1e-4)


def test_intervals_hold_the_mean_and_shrink_with_more_texts():
    def rows(n):
        drawn = np.random.default_rng(0).normal(size=n)
        return [
            {"method": "m", "text": k, "deletion": value, "leave_one_out": None}
            for k, value in enumerate(drawn)
        ]

    (few,), (many,) = summarize(rows(50)), summarize(rows(5000))
    assert few["low"] < few["mean"] < few["high"]
    assert many["high"] - many["low"] < 0.2 * (few["high"] - few["low"])
    # The mean of 5000 standard normal numbers has a standard error of 0.0141.
    assert many["high"] - many["low"] == pytest.approx(2 * 1.96 * 0.0141, rel=0.1)
    assert (few["measure"], few["texts"]) == ("deletion", 50)


@pytest.mark.parametrize(
    ("texts", "methods", "message"),
    [
        (["good", " "], ["phi"], "text 1 is ' '"),
        (["good"], ["magic"], "methods must be one of 'words'"),
    ],
)
def test_wrong_arguments(reader, texts, methods, message):
    with pytest.raises(ValueError, match=message):
        measure(reader, texts, methods)


def test_the_command(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path / "cache"))
    tiny = save_tiny(tmp_path / "tiny")
    vr.RoutingClassifier(tiny, max_epochs=1).fit(TEXTS, LABELS).save_pretrained(tmp_path / "model")
    data = tmp_path / "data.csv"
    pd.DataFrame({"text": TEXTS}).to_csv(data, index=False)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vecroute", "faithfulness", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    code, out, _ = run(tmp_path / "model", data, "--texts", 3, "--json")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["method"] for row in rows} == {"words", "states", "phi", "random"}
    assert {row["texts"] for row in rows if row["measure"] == "comprehensiveness"} == {3}
    code, out, _ = run(tmp_path / "model", data, "--texts", 2, "--methods", "phi;random")
    assert code == 0
    assert "comprehensiveness" in out
    code, _, err = run(tmp_path / "model", data, "--methods", "magic")
    assert code == 2
    assert "--methods must be some of these" in err
