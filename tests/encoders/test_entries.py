"""The format of a segment: safetensors reads it, and its checksum is compared once."""

import errno
import gc
import hashlib
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.packing import pack
from vecroute.encoders import cache, entries
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.entries import checksum_of, read_contents, write_segment


def test_bfloat16_and_float16_are_kept_as_they_are(tmp_path):
    store = FeatureCache(tmp_path, "0" * 64)
    great = torch.full((2, 3, 16), 1e6).bfloat16()
    store.put(pack({"great": great}))
    store.put(pack({"small": torch.ones(2, 3, 16).half()}))
    store.flush()
    again = FeatureCache(tmp_path, "0" * 64)
    assert again.get("small").dtype == torch.float16
    assert again.get("great").dtype == torch.bfloat16
    assert torch.equal(again.get("great"), great)


def test_safetensors_reads_a_segment(tmp_path):
    segments = [
        {
            "a": torch.randn(3, 1, 5).half(),
            "none": torch.ones(0, 1, 5).half(),
            "b": torch.randn(2, 1, 5).half(),
        },
        {"é": torch.randn(1, 2, 7).bfloat16()},
        {"c": torch.ones(0, 2, 7).half()},
    ]
    contents = write_segment(tmp_path / "x", [pack(segment) for segment in segments], "k")
    assert read_contents(tmp_path / "x", "k") == contents
    assert write_segment(tmp_path / "empty", [], "k") == read_contents(tmp_path / "empty", "k")
    assert checksum_of(tmp_path / "x") == contents.checksum
    expected = {name: hidden for segment in segments for name, hidden in segment.items()}
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata()["encoder"] == "k"
        assert set(file.keys()) == set(expected)
        for name, hidden in expected.items():
            found = file.get_tensor(name)
            assert found.dtype == hidden.dtype
            assert torch.equal(found, hidden)


def test_writing_leaves_few_objects_to_the_garbage_collector(tmp_path):
    """It examines all objects of the process once their number has grown by a quarter."""
    segment = [pack({str(k): torch.ones(1 + k % 5, 2, 4).half() for k in range(2000)})]
    gc.disable()
    try:
        gc.collect()
        contents = write_segment(tmp_path / "x", segment, "k")
        assert gc.get_count()[0] < 500
    finally:
        gc.enable()
    assert len(contents.entries) == 2000


def test_the_checksum_is_read_in_parts(tmp_path, monkeypatch):
    contents = write_segment(tmp_path / "x", [pack({"a": torch.randn(7, 3, 5).half()})], "k")
    monkeypatch.setattr(entries, "READ_BYTES", 33)
    assert checksum_of(tmp_path / "x") == contents.checksum


def test_segments_of_earlier_versions_are_deleted(tmp_path):
    """They had a checksum for each text."""
    key = "0" * 64
    hidden = torch.randn(2, 3, 4).half()
    listed = f'{{"a": ["torch.float16", [2, 3, 4], {zlib.crc32(hidden.numpy().tobytes())}]}}'
    seal = hashlib.sha256((key + listed).encode()).hexdigest()
    (tmp_path / key[:32]).mkdir()
    path = tmp_path / key[:32] / "a.safetensors"
    save_file({"a": hidden}, path, {"encoder": key, "entries": listed, "sha256": seal})
    assert FeatureCache(tmp_path, key).get("a") is None
    assert not path.exists()


def test_threads_check_a_segment_once(tmp_path, monkeypatch):
    store = FeatureCache(tmp_path, "0" * 64)
    store.put(states := pack({str(k): torch.randn(2, 3, 5).half() for k in range(40)}))
    store.flush()
    again, counted = FeatureCache(tmp_path, "0" * 64), []

    def slow(path):
        counted.append(path)
        time.sleep(0.1)
        return checksum_of(path)

    monkeypatch.setattr(cache, "checksum_of", slow)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(again.get, states.names))
    assert len(counted) == 1
    assert torch.equal(torch.cat(found), states.hidden)


def test_no_thread_reads_a_damaged_segment(tmp_path):
    store = FeatureCache(tmp_path, "0" * 64)
    store.put(states := pack({str(k): torch.randn(2, 3, 5).half() for k in range(40)}))
    store.flush()
    (path,) = store.own.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    again = FeatureCache(tmp_path, "0" * 64)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(again.get, states.names)) == [None] * 40
    assert not path.exists()


def segment_of_40(folder):
    """Write a segment of 40 texts. Return a cache that has opened it, the segment, and the hidden states."""
    store = FeatureCache(folder, "0" * 64)
    store.put(states := pack({str(k): torch.randn(k % 3, 3, 5).half() for k in range(40)}))
    store.flush()
    (path,) = store.own.glob("*.safetensors")
    return FeatureCache(folder, "0" * 64), path, states


def test_a_segment_that_another_process_deletes_stays_readable(tmp_path):
    """Another process may need room."""
    store, path, states = segment_of_40(tmp_path)
    path.unlink()
    found = [store.get(name) for name in states.names]
    assert all(hidden is not None for hidden in found)
    assert torch.equal(torch.cat(found), states.hidden)


def test_a_damaged_segment_that_another_process_deletes_is_not_read(tmp_path):
    _, path, states = segment_of_40(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    store = FeatureCache(tmp_path, "0" * 64)
    path.unlink()
    assert [store.get(name) for name in states.names] == [None] * 40


def test_a_segment_that_cannot_be_read_is_deleted(tmp_path, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    store, path, _ = segment_of_40(tmp_path)
    monkeypatch.setattr(cache, "checksum_of", fails)
    assert store.get("1") is None
    assert not path.exists()
