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

from tests.helpers.packing import pack
from vecroute.encoders import cache
from vecroute.encoders.ahead import ahead
from vecroute.encoders.cache import FeatureCache


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
    shared.put(pack({"a": torch.zeros(2, 3, 4).half()}))
    shared.flush()
    context = multiprocessing.get_context("fork")

    def write():
        shared.put(pack({"b": torch.ones(2, 3, 4).half()}))
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
        shared.put(pack({text: torch.randn(2, 3, 4).half()}))
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


def test_states_can_be_read_before_during_and_after_their_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SEGMENT_BYTES", 97)  # the first six texts are a segment, the last one waits
    write, may_write = FeatureCache._write, threading.Event()
    monkeypatch.setattr(FeatureCache, "_write", lambda *rest: may_write.wait() and write(*rest))
    store = FeatureCache(tmp_path, "0" * 64)
    states = {f"text {k}": torch.full((k, 1, 8), float(k)).half() for k in range(7)}
    names = list(states)
    for some in (names[:1], names[1:4], names[4:6], names[6:]):
        store.put(pack({name: states[name] for name in some}))
    assert not list(tmp_path.glob("*/*.safetensors"))
    for _ in range(2):
        for k, (text, hidden) in enumerate(states.items()):
            assert store.n_pos(text) == k
            assert torch.equal(store.get(text), hidden)
        may_write.set()
        store.flush()
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    assert not store._in_memory


def test_written_segments_leave_memory_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "SEGMENT_BYTES", 1)
    store = FeatureCache(tmp_path, "0" * 64)
    store.put(pack({"a": torch.ones(2, 3, 4).half()}))
    for _, written in store._writing:
        written.result()
    store.put(pack({"b": torch.ones(2, 3, 4).half()}))
    assert "a" not in store._in_memory
    assert torch.equal(store.get("a"), torch.ones(2, 3, 4).half())
