"""On a GPU, explanations of small batches are CUDA graphs: they equal eager ones, for every family."""

import gc
import logging
import threading
import weakref

import pytest
import torch

from tests.explain.test_captured import MANY, check_equal, words
from tests.explain.test_words import head_on
from tests.helpers import tiny_models
from vecroute.encoders import TextEncoder
from vecroute.explain import captured

pytestmark = pytest.mark.gpu
CAPTURED = ("bert", "roberta", "distilbert", "electra")  # models that copy nothing from the host


def explained(kind, folder, monkeypatch, name="routing"):
    """Return eager explanations, those by graphs, and the graphs."""
    encoder = TextEncoder(tiny_models.save_tiny(folder, kind), device="cuda", dtype=torch.float32)
    head = head_on(encoder, name=name).cuda()
    monkeypatch.setattr(captured, "DEVICES", ())
    expected = [words(encoder, head, MANY[:n]) for n in (1, 3, 5)]
    monkeypatch.undo()
    for _ in range(captured.EAGER + 2):
        found = [words(encoder, head, MANY[:n]) for n in (1, 3, 5)]
    return expected, found, captured.graphs_of(head)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_graphs_give_the_explanations_of_eager_runs(kind, tmp_path, monkeypatch):
    expected, found, graphs = explained(kind, tmp_path, monkeypatch)
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other, 1e-3)
    if kind in CAPTURED:
        assert not graphs.failed
        assert len(graphs.captured) == 3


@pytest.mark.parametrize("name", ["probe", "mean_all", "paper"])
def test_graphs_of_every_head(name, tmp_path, monkeypatch):
    expected, found, graphs = explained("bert", tmp_path, monkeypatch, name)
    for one, other in zip(found, expected, strict=True):
        check_equal(one, other, 1e-3)
    assert not graphs.failed


def test_a_failed_capture_is_told_once(tmp_path, monkeypatch, caplog):
    def split(*args, **options):
        found = real(*args, **options)
        found.base.cpu()  # waits for the device, which no graph can
        return found

    real = captured.unchecked_split
    monkeypatch.setattr(captured, "unchecked_split", split)
    encoder = TextEncoder(tiny_models.save_tiny(tmp_path, "bert"), device="cuda", dtype=torch.float32)
    head = head_on(encoder).cuda()
    with caplog.at_level(logging.WARNING):
        found = [words(encoder, head, MANY) for _ in range(captured.EAGER + 3)]
    assert len(caplog.messages) == 1
    assert "explanations cannot be CUDA graphs" in caplog.text
    check_equal(found[-1], found[0], 1e-3)


def test_threads_take_turns(tmp_path):
    encoder = TextEncoder(tiny_models.save_tiny(tmp_path, "bert"), device="cuda", dtype=torch.float32)
    head, found = head_on(encoder).cuda(), {}
    expected = [words(encoder, head, [text]) for text in MANY]

    def explain(k):
        with torch.cuda.stream(torch.cuda.Stream()):
            found[k] = [words(encoder, head, [MANY[k]]) for _ in range(20)]

    threads = [threading.Thread(target=explain, args=(k,)) for k in range(len(MANY))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(len(MANY)))
    for k, results in found.items():
        for result in results:
            check_equal(result, expected[k], 1e-3)


def test_graphs_are_captured_again_when_weights_move(tmp_path):
    encoder = TextEncoder(tiny_models.save_tiny(tmp_path, "bert"), device="cuda", dtype=torch.float32)
    head = head_on(encoder).cuda()
    expected = words(encoder, head, MANY)
    graphs = captured.graphs_of(head)
    for _ in range(3):
        for parameter in head.parameters():
            parameter.data = parameter.data.clone()
        for _ in range(captured.EAGER + 1):
            found = words(encoder, head, MANY)
        check_equal(found, expected, 1e-3)
        assert len(graphs.captured) == 1
        assert not graphs.failed


def test_graphs_go_with_their_head(tmp_path):
    encoder = TextEncoder(tiny_models.save_tiny(tmp_path, "bert"), device="cuda", dtype=torch.float32)
    head = head_on(encoder).cuda()
    for _ in range(captured.EAGER + 1):
        words(encoder, head, MANY)
    graphs = weakref.ref(captured.graphs_of(head))
    assert len(graphs().captured) == 1
    del head
    gc.collect()
    assert graphs() is None
