"""Preparing ahead, and the parts of the cache that work ahead of the disk and of the host."""

import multiprocessing
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.helpers.texts import TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.encoders import TextEncoder, cache
from vecroute.encoders.ahead import ahead
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.features import Features
from vecroute.encoders.text import Batch


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_all_items_come_in_order(n, count):
    assert list(ahead(lambda k: 2 * k, iter(range(count)), n)) == [2 * k for k in range(count)]


def test_several_threads_keep_the_order():
    def prepare(k):
        time.sleep(0.05 if k % 2 == 0 else 0.0)
        return k, threading.get_ident()

    found = list(ahead(prepare, range(8), 4, threads=4))
    assert [k for k, _ in found] == list(range(8))
    assert len({thread for _, thread in found}) > 1


def test_a_forked_process_writes_to_the_cache_of_its_parent(tmp_path):
    """It has none of its parent's threads."""
    shared = FeatureCache(tmp_path, "k" * 32)
    shared.put("a", torch.zeros(2, 3, 4))
    shared.flush()
    context = multiprocessing.get_context("fork")

    def write():
        shared.put("b", torch.ones(2, 3, 4))
        shared.flush()

    child = context.Process(target=write)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child.start()
    child.join(20)
    assert child.exitcode == 0
    shared.refresh()
    assert torch.equal(shared.get("b"), torch.ones(2, 3, 4).half())


def test_readers_find_damage_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SEGMENT_BYTES", 1)
    texts = [str(k) for k in range(60)]
    shared = FeatureCache(tmp_path, "k" * 32)
    for text in texts:
        shared.put(text, torch.randn(2, 3, 4))
    shared.flush()
    for path in shared.own.glob("*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[:-20] + bytes(20))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    monkeypatch.setattr(
        Path, "unlink", lambda *_, **__: time.sleep(1e-4)
    )  # the files stay, for the next time
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                damaged = FeatureCache(tmp_path, "k" * 32)
                assert list(pool.map(damaged.get, 3 * texts)) == [None] * 3 * len(texts)
    finally:
        sys.setswitchinterval(interval)


def test_the_next_item_is_prepared_meanwhile_and_no_more():
    read, prepared = [], []

    def items():
        for k in range(6):
            read.append(k)
            yield k

    for k in ahead(lambda k: prepared.append(k) or k, items(), 1):
        time.sleep(0.05)
        assert prepared == list(range(min(k + 2, 6)))
        assert len(read) <= k + 2


def test_an_error_in_the_thread_reaches_the_caller():
    def prepare(k):
        if k == 2:
            raise ValueError("item 2")
        return k

    found = []
    with pytest.raises(ValueError, match="item 2"):
        found.extend(ahead(prepare, range(4)))
    assert threading.active_count() < 20


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return TextEncoder(save_tiny(tmp_path_factory.mktemp("encoder")), device="cpu")


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("batch_bytes", [1, 10_000, 10**9])
def test_batches_of_similar_length_hold_the_same_states(encoder, special_tokens, batch_bytes, monkeypatch):
    """A GPU encodes texts in batches of similar length; the numbers are the same to rounding."""
    monkeypatch.setattr("vecroute.encoders.features.GPU_BATCH_BYTES", batch_bytes)
    encoder = TextEncoder(encoder.model, tokenizer=encoder.tokenizer, special_tokens=special_tokens)
    texts = [*TEXTS[:20], " ".join(TEXTS[:9])]  # the last one has several chunks
    features = Features(encoder, texts)
    found = dict(features._encode_by_length(encoder.tokenize(texts)))
    expected = dict(features._encode(encoder.tokenize(texts)))
    assert found.keys() == expected.keys() == set(range(len(texts)))
    for k, hidden in expected.items():
        assert found[k].shape == hidden.shape
        torch.testing.assert_close(found[k].float(), hidden.float(), rtol=2e-3, atol=2e-3)


def test_a_text_with_great_numbers_does_not_round_the_others_of_its_batch(encoder, monkeypatch):
    hidden = torch.randn(2, 3, encoder.depth, encoder.d_emb)
    hidden[0, 1] *= 1e6  # more than float16 can hold
    batch = Batch([1, 0], hidden, torch.tensor([[True] * 3, [True, True, False]]))
    monkeypatch.setattr(TextEncoder, "batches", lambda *_: iter([batch]))
    found = dict(Features(encoder, ["a", "b"])._encode_by_length([]))
    assert torch.equal(found[1], hidden[0].bfloat16())
    assert torch.equal(found[0], hidden[1, :2].half())


def test_states_can_be_read_before_during_and_after_their_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SEGMENT_BYTES", 60)  # a few texts for each segment
    write, may_write = FeatureCache._write, threading.Event()
    monkeypatch.setattr(FeatureCache, "_write", lambda *rest: may_write.wait() and write(*rest))
    store = FeatureCache(tmp_path, "0" * 64)
    states = {f"text {k}": torch.full((2, 1, 8), float(k)).half() for k in range(7)}
    for text, hidden in states.items():
        store.put(text, hidden)
    assert not list(tmp_path.glob("*/*.safetensors"))
    for _ in range(2):
        for text, hidden in states.items():
            assert store.n_pos(text) == 2
            assert torch.equal(store.get(text), hidden)
        may_write.set()
        store.flush()
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 4
    assert store._in_memory("text 0") is None
