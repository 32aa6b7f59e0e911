"""The explanations that are CUDA graphs on a GPU, run here without graphs: same numbers, for all shapes."""

import threading

import pytest
import torch

from tests.explain.test_words import BOUNDS, TEXTS, error_of, head_on
from tests.helpers import tiny_models
from vecroute.encoders import TextEncoder
from vecroute.explain import captured
from vecroute.explain.text import explain_words

MANY = [*TEXTS[:3], "a", "dull dull plot", "warm story but so dull ."]


@pytest.fixture
def graphed(monkeypatch):
    """Explain as on a GPU, but without graphs, from the first batch of a shape on."""
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    monkeypatch.setattr(captured, "EAGER", 0)


@pytest.fixture
def encoder(tmp_path):
    return TextEncoder(tiny_models.save_tiny(tmp_path, "bert"), dtype=torch.float64)


def words(encoder, head, texts, outputs=(0, 2), **options):
    found = explain_words(encoder, head, texts, [list(outputs)] * len(texts), **options)
    return [{**fields, "all_scores": scores} for fields, scores in found]


def check_equal(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        for name in ("values", "base_values", "scores", "all_scores"):
            torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_padded_batches_give_the_same_explanations(kind, tmp_path, monkeypatch):
    encoder = TextEncoder(tiny_models.save_tiny(tmp_path, kind), dtype=torch.float64)
    head = head_on(encoder)
    for options in ({}, {"by_depth": True}, {"samples": 4}):
        expected = words(encoder, head, MANY, **options)
        monkeypatch.setattr(captured, "DEVICES", ("cpu",))
        monkeypatch.setattr(captured, "EAGER", 0)
        found = words(encoder, head, MANY, **options)
        assert captured.graphs_of(head).captured
        check_equal(found, expected, 1e-9)
        if "samples" not in options:
            assert max(map(error_of, found)) <= BOUNDS[torch.float64]
        monkeypatch.undo()


def test_buffers_are_filled_anew_for_each_batch(encoder, graphed):
    head = head_on(encoder)
    for texts in (MANY[:1], MANY[1:2], MANY[:5], MANY[1:4], MANY[:3]):
        for outputs in ((0,), (1,), (2, 1)):
            found = words(encoder, head, texts, outputs)
            check_equal(found, [words(encoder, head, [text], outputs)[0] for text in texts], 1e-9)


def test_only_shapes_that_come_again_are_captured(encoder, monkeypatch):
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    monkeypatch.setattr(captured, "MOST_GRAPHS", 2)
    head = head_on(encoder)
    for k in range(captured.EAGER + 1):
        assert len(captured.graphs_of(head).captured) == 0, k
        words(encoder, head, MANY[:1])
    assert len(captured.graphs_of(head).captured) == 1
    for texts in (MANY[:2], MANY[:3], MANY[:5]):
        for _ in range(captured.EAGER + 1):
            words(encoder, head, texts)
    assert len(captured.graphs_of(head).captured) == 2


def test_large_batches_and_long_texts_are_not_captured(encoder, graphed, monkeypatch):
    head = head_on(encoder)
    words(encoder, head, ["warm story ! " * 200])  # several chunks
    monkeypatch.setattr(captured, "MOST_POSITIONS", 63)
    words(encoder, head, MANY[:4])
    assert not captured.graphs_of(head).captured


def test_buffers_never_exceed_the_limit_of_the_encoder(tmp_path, graphed):
    encoder = TextEncoder(tiny_models.save_tiny(tmp_path, "roberta"), max_length=11)
    head = head_on(encoder)
    assert error_of(words(encoder, head, ["a"])[0]) <= BOUNDS[torch.float32]
    ((buffers, _),) = captured.graphs_of(head).captured.values()
    assert buffers[0].shape == (1, 11)


def test_changed_weights_are_noticed(encoder, graphed):
    head = head_on(encoder)
    words(encoder, head, MANY[:2])
    graphs = captured.graphs_of(head)
    kept = set(graphs.captured)
    for parameter in head.parameters():
        parameter.data += 0.1  # in place: a graph reads the new weights
    words(encoder, head, MANY[:2])
    assert set(graphs.captured) == kept
    assert len(kept) == 1
    for parameter in head.parameters():
        parameter.data = parameter.data + 0.1  # elsewhere in memory: a graph would read the old ones
    words(encoder, head, MANY[:1])
    assert len(graphs.captured) == 1
    assert set(graphs.captured) != kept


def as_it_was(*given):
    return given[-1]


@pytest.mark.parametrize("change", ["n_iters", "train", "part", "hook", "hook before"])
def test_graphs_of_other_settings_are_forgotten(encoder, graphed, change):
    head = head_on(encoder)
    words(encoder, head, MANY[:2])
    (before,) = captured.graphs_of(head).captured.values()
    if change == "n_iters":
        head.network[1].n_iters = 3
    elif change == "train":
        head.train()
    elif change == "part":
        head.network[0].train()
    elif change == "hook":
        encoder.model.encoder.layer[0].register_forward_hook(as_it_was)
    else:
        head.network[0].register_forward_pre_hook(as_it_was)
    words(encoder, head, MANY[:1])
    (after,) = captured.graphs_of(head).captured.values()
    assert after is not before


def test_graphs_of_another_matmul_precision_are_forgotten(encoder, graphed):
    head, matmul = head_on(encoder), torch.backends.cuda.matmul
    words(encoder, head, MANY[:2])
    (before,) = captured.graphs_of(head).captured.values()
    precision = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"  # get_float32_matmul_precision() raises now
        words(encoder, head, MANY[:1])
    finally:
        matmul.fp32_precision = precision
    (after,) = captured.graphs_of(head).captured.values()
    assert after is not before


def test_encoders_of_one_model_may_read_other_depths(encoder, graphed):
    others = [
        TextEncoder(encoder.model, tokenizer=encoder.tokenizer, depths=depths) for depths in ([0, 1], [2, 1])
    ]
    head = head_on(others[0])
    for other in others:
        found = words(other, head, MANY)
        expected = other.encode(MANY)
        for one, hidden in zip(found, expected, strict=True):
            scores = head(hidden[None], torch.ones(1, len(hidden), dtype=torch.bool))[0]
            torch.testing.assert_close(one["all_scores"], scores.detach(), rtol=1e-9, atol=1e-9)


def test_no_graph_under_autocast(encoder, graphed):
    head = head_on(encoder)
    with torch.autocast("cpu", torch.bfloat16):
        words(encoder, head, MANY)
    assert not captured.graphs_of(head).captured
    words(encoder, head, MANY)
    assert captured.graphs_of(head).captured


def test_after_a_failure_there_are_no_graphs(encoder, graphed, monkeypatch):
    head, asked = head_on(encoder), []
    words(encoder, head, MANY[:1])
    graphs = captured.graphs_of(head)
    assert graphs.captured
    monkeypatch.setattr(captured.Graphs, "capture", lambda *rest: asked.append(rest))
    for texts in (MANY[:2], MANY[:5], MANY[:1]):
        words(encoder, head, texts)
    assert len(asked) == 1
    assert not graphs.captured


def test_modes_of_autograd_do_not_matter(encoder, graphed):
    head = head_on(encoder)
    expected = words(encoder, head, MANY)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            check_equal(words(encoder, head, MANY), expected, 0)


def test_threads_take_turns(encoder, graphed):
    head, found = head_on(encoder), {}
    expected = [words(encoder, head, [text]) for text in MANY]

    def explain(k):
        for _ in range(5):
            found.setdefault(k, []).append(words(encoder, head, [MANY[k]]))

    threads = [threading.Thread(target=explain, args=(k,)) for k in range(len(MANY))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, results in found.items():
        for result in results:
            check_equal(result, expected[k], 1e-9)


def test_what_does_not_add_up_is_refused(encoder, graphed, monkeypatch):
    real = captured.unchecked_split

    def wrong(*args, **options):
        split = real(*args, **options)
        return split._replace(error=split.error + 1)

    monkeypatch.setattr(captured, "unchecked_split", wrong)
    with pytest.raises(ValueError, match="cannot be split into contributions: they miss its output"):
        words(encoder, head_on(encoder), MANY)
