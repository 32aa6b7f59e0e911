"""The cache of hidden states: computed once, checked, safe with two processes, kill -9 and a full disk."""

import copy
import errno
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.helpers.packing import pack
from tests.helpers.tiny_models import save_tiny
from vecroute.encoders import TextEncoder, cache
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.entries import digest, text_key
from vecroute.encoders.features import Features

TEXTS = [f"{'very ' * (k % 7)}good film {chr(97 + k)}" for k in range(20)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return TextEncoder(save_tiny(tmp_path_factory.mktemp("tiny")))


def opened(encoder, folder, **options):
    return FeatureCache(folder, encoder.key, **options)


def filled(encoder, folder, texts=TEXTS, **options):
    features = Features(encoder, texts, opened(encoder, folder, **options))
    features.prepare()
    return features


def segments(folder):
    return sorted(Path(folder).glob("*/*.safetensors"))


def assert_right(features, atol=2e-3):
    """Check that batches hold the encoder's hidden states, up to half precision, and zeros if masked."""
    hidden, mask = features.batch(range(len(features)))
    for k, truth in enumerate(features.encoder.encode(features.texts)):
        assert mask[k].tolist() == [True] * len(truth) + [False] * (mask.shape[1] - len(truth))
        torch.testing.assert_close(hidden[k][mask[k]].float(), truth, rtol=1e-3, atol=atol)
        assert not hidden[k][~mask[k]].any()


def refusing(encoder):
    """Return the encoder, but it raises if it must compute."""

    def tokenize(texts):
        assert not texts, "the encoder was asked for what the cache has"
        return []

    encoder = copy.copy(encoder)
    encoder.tokenize = tokenize
    return encoder


def test_hidden_states_are_computed_once(encoder, tmp_path):
    first = filled(encoder, tmp_path)
    assert first.nbytes == sum(first.lengths) * 3 * 16 * 2
    assert_right(first)
    second = Features(refusing(encoder), TEXTS, opened(encoder, tmp_path))
    assert second.prepare() == 0
    torch.testing.assert_close(second.batch([3, 1])[0], first.batch([3, 1])[0], rtol=0, atol=0)
    assert second.lengths == first.lengths


def test_they_are_in_half_precision_and_memory_mapped(encoder, tmp_path):
    features = filled(encoder, tmp_path)
    stored = features.cache.get(text_key(TEXTS[0]))
    assert stored.dtype == features.batch([0, 1])[0].dtype == torch.float16
    assert sum(path.stat().st_size for path in segments(tmp_path)) < features.nbytes + 10_000
    maps = Path("/proc/self/maps").read_text()
    assert str(segments(tmp_path)[0]) in maps


def test_a_text_may_be_added_again_before_it_is_written(encoder, tmp_path):
    store = opened(encoder, tmp_path)
    for n in (1, 2, 3):
        store.put(pack({"a": torch.full((n, 3, 16), 1.0).half(), f"b{n}": torch.zeros(n, 3, 16).half()}))
        assert store.n_pos("a") == len(store.get("a")) == n
    store.flush()
    assert len(segments(tmp_path)) == 3
    again = opened(encoder, tmp_path)
    assert again.get("a").eq(1).all()
    assert [again.n_pos(f"b{n}") for n in (1, 2, 3)] == [1, 2, 3]


def test_another_encoder_finds_nothing(encoder, tmp_path):
    filled(encoder, tmp_path)
    assert FeatureCache(tmp_path, "0" * 64).get(text_key(TEXTS[0])) is None
    assert opened(encoder, tmp_path).get(text_key(TEXTS[0])) is not None
    assert opened(encoder, tmp_path).get(text_key(TEXTS[0] + " ")) is None


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-50])


def garble_the_header(path):
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, garble_the_header, empty])
def test_damage_is_noticed_and_mended(encoder, tmp_path, damage):
    filled(encoder, tmp_path)
    (path,) = segments(tmp_path)
    damage(path)
    features = Features(encoder, TEXTS, opened(encoder, tmp_path))
    assert_right(features)
    assert not path.exists()
    features.prepare()
    again = Features(refusing(encoder), TEXTS, opened(encoder, tmp_path))
    torch.testing.assert_close(again.batch([5])[0], features.batch([5])[0], rtol=0, atol=0)


def test_what_does_not_fit_is_computed_on_the_fly(encoder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    features = Features(encoder, TEXTS, opened(encoder, tmp_path, max_bytes=5_000))
    left = features.prepare()
    assert 0 < left < len(TEXTS)
    assert f"hidden states of 20 texts take 0.00 GB in {tmp_path}" in caplog.text
    assert f"hidden states of {left} texts are computed anew each time" in caplog.text
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) < 5_000 + 3_000  # 3,000 for the header
    assert_right(features)


def test_a_nearly_full_disk_counts_as_full(encoder, tmp_path, monkeypatch):
    usage = cache.shutil.disk_usage(tmp_path)._replace(free=cache.KEEP_FREE + 100)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    features = Features(encoder, TEXTS, opened(encoder, tmp_path))
    assert features.prepare() == len(TEXTS)
    assert not segments(tmp_path)
    assert_right(features)


def test_a_disk_that_fills_up_is_no_error(encoder, tmp_path, monkeypatch, caplog):
    def no_space(path, segment, metadata):
        Path(path).write_bytes(b"half")
        assert not segments(tmp_path)  # half a file is not taken for a segment
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "write_segment", no_space)
    features = filled(encoder, tmp_path)
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.glob("*/*"))
    assert_right(features)


def test_segments_not_used_for_longest_make_room(encoder, tmp_path):
    filled(encoder, tmp_path, ["an old film"])
    (written,) = segments(tmp_path)
    old = written.rename(written.with_name("z.safetensors"))
    filled(encoder, tmp_path, ["a newer film"])
    (written,) = set(segments(tmp_path)) - {old}
    newer = written.rename(written.with_name("a.safetensors"))
    os.utime(old, (1, 1))
    os.utime(newer, (2, 2))
    size = sum(path.stat().st_size for path in segments(tmp_path))
    features = Features(encoder, ["one more film"], opened(encoder, tmp_path, max_bytes=size))
    assert features.prepare() == 0
    assert not old.exists()
    assert newer.exists()
    assert_right(features)


@pytest.mark.parametrize("crc32", ["", "x", "-1", "9" * 5000, "0"])
def test_headers_that_are_wrong_are_deleted(crc32, tmp_path):
    key = "0" * 64
    segment = tmp_path / key[:32] / "a.safetensors"
    segment.parent.mkdir()
    metadata = {"encoder": key, "crc32": crc32, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    save_file({"a": torch.zeros(1, 1, 1).half()}, segment, metadata)
    assert FeatureCache(tmp_path, key).get("a") is None
    assert not segment.exists()


def test_a_header_that_is_sealed_but_wrong_is_deleted(tmp_path):
    key, data = "0" * 64, bytes(4)
    described = {"a": {"dtype": "F32", "shape": [1, 1, 1], "data_offsets": [0, 4]}}
    seal = digest(key, zlib.crc32(data), described)
    metadata = {"encoder": key, "crc32": str(zlib.crc32(data)), "sha256": seal}
    listed = json.dumps({"__metadata__": metadata, **described}).encode()
    segment = tmp_path / key[:32] / "a.safetensors"
    segment.parent.mkdir()
    segment.write_bytes(len(listed).to_bytes(8, "little") + listed + data)
    assert FeatureCache(tmp_path, key).get("a") is None
    assert not segment.exists()


def test_files_of_others_are_never_deleted(encoder, tmp_path):
    """A user may give the folder of all models as the folder of the cache."""
    others = [tmp_path / "bert" / name for name in ("model.safetensors", "notes.tmp")]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"precious")
        os.utime(other, (0, 0))
    filled(encoder, tmp_path, max_bytes=1)
    assert [other.read_bytes() for other in others] == [b"precious"] * 2


def test_segments_in_use_never_make_room(encoder, tmp_path):
    filled(encoder, tmp_path, TEXTS[:2])
    features = Features(encoder, [TEXTS[0], "one more film"], opened(encoder, tmp_path, max_bytes=10))
    assert features.prepare() == 1
    assert len(segments(tmp_path)) == 1


def test_temporary_files_of_dead_processes_go_and_others_stay(encoder, tmp_path):
    filled(encoder, tmp_path)
    folder = segments(tmp_path)[0].parent
    dead, alive = folder / "dead.tmp", folder / "alive.tmp"
    for path in (dead, alive):
        path.write_bytes(b"half")
    os.utime(dead, (1, 1))
    opened(encoder, tmp_path)
    assert not dead.exists()
    assert alive.exists()


def test_each_process_computes_its_share(encoder, tmp_path):
    done = []
    features = Features(encoder, TEXTS, opened(encoder, tmp_path))
    features.prepare(share=(1, 2), step=done.append)
    assert done == [20]  # the other process is assumed to have done the same number
    assert [features.cache.n_pos(key) is not None for key in features.keys] == [False, True] * 10
    features.prepare(share=(0, 1))
    assert_right(features)


def test_progress_counts_what_is_there(encoder, tmp_path, monkeypatch):
    filled(encoder, tmp_path, TEXTS[:5])
    monkeypatch.setattr("vecroute.encoders.features.WINDOW_BYTES", 1)
    done = []
    Features(encoder, [*TEXTS[:7], TEXTS[0]], opened(encoder, tmp_path)).prepare(step=done.append)
    assert done == [6, 7]


def rounded(features):
    """Return the hidden states of each text, as training gets them, a few at a time."""
    found = {}
    for start in range(0, len(features), 3):
        which = list(range(start, min(start + 3, len(features))))
        hidden, mask = features.batch(which)
        found |= {k: hidden[row][mask[row]].half() for row, k in enumerate(which)}
    return found


def test_hidden_states_are_the_same_bits_with_any_cache(encoder, tmp_path):
    """The cache may be missing, full, filled in another order, incomplete or damaged. One dtype holds."""
    without = Features(encoder, TEXTS)
    assert without.batch(range(20))[0].dtype == torch.float16
    expected = rounded(without)
    filled(encoder, tmp_path / "other", [*TEXTS[::-1], *(f"{text} and one more" for text in TEXTS)])
    filled(encoder, tmp_path / "part", TEXTS[3:9])
    filled(encoder, tmp_path / "damaged", TEXTS[:10])
    flip_a_bit(segments(tmp_path / "damaged")[0])
    filled(encoder, tmp_path / "damaged", TEXTS[10:])
    caches = [filled(encoder, tmp_path / "full")]
    caches += [
        Features(encoder, TEXTS, opened(encoder, tmp_path / name)) for name in ("other", "part", "damaged")
    ]
    for features in caches:
        assert features.batch([4, 12])[0].dtype == torch.float16
        found = rounded(features)
        assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize("change", ["encoder", "swapped", "shape", "dtype", "checksum", "no header"])
def test_entries_that_do_not_fit_are_made_anew(encoder, tmp_path, change):
    """A complete segment may not fit the hidden states of this encoder for these texts."""
    filled(encoder, tmp_path)
    (path,) = segments(tmp_path)
    tensors, head = load_file(path), safe_open(path, "pt").metadata()
    one, other = sorted(tensors)[:2]
    if change == "encoder":
        head["encoder"] = "0" * 64
    elif change == "swapped":
        tensors[one], tensors[other] = tensors[other], tensors[one]
    elif change == "shape":
        tensors[one] = tensors[one][:1].clone()
    elif change == "dtype":
        tensors[one] = tensors[one].float()
    elif change == "checksum":
        head["crc32"] = str(int(head["crc32"]) ^ 1)
    else:
        head = {}
    save_file(tensors, path, head)
    features = Features(encoder, TEXTS, opened(encoder, tmp_path))
    assert features.lengths == Features(encoder, TEXTS).lengths
    assert_right(features)
    assert not path.exists()


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_a_damaged_segment_in_a_folder_that_is_read_only(encoder, tmp_path, damage, monkeypatch):
    filled(encoder, tmp_path)
    damage(segments(tmp_path)[0])

    def refused(*_, **__):
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(cache, "write_segment", refused)
    features = Features(encoder, TEXTS, opened(encoder, tmp_path))
    features.prepare()
    assert_right(features)
    assert len(segments(tmp_path)) == 1


FILL = """
import sys
from vecroute.encoders import TextEncoder, cache
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.features import Features
cache.SEGMENT_BYTES = 2_000  # many small segments
encoder = TextEncoder(sys.argv[1])
if sys.argv[3] == "GPU":
    Features._encode = Features._encode_by_length
print("ready", flush=True)
for start in range(0, 2000, 20):
    texts = [f"good film {k}" for k in range(start, start + 20)]
    Features(encoder, texts, FeatureCache(sys.argv[2], encoder.key)).prepare()
    if start == 40:
        print("going", flush=True)
"""


def start_filling(encoder, folder, way):
    process = subprocess.Popen(
        [sys.executable, "-c", FILL, encoder.name, str(folder), way], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("way", ["CPU", "GPU"])
def test_two_processes_fill_it_at_once_and_kill_9_leaves_it_whole(encoder, tmp_path, way):
    processes = [start_filling(encoder, tmp_path, way) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "going\n"
    time.sleep(0.2)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    texts = [f"good film {k}" for k in range(100)]
    store = opened(encoder, tmp_path)
    assert all(store.get(text_key(text)) is not None for text in texts[:40])
    features = Features(encoder, texts, store)
    assert features.prepare() == 0
    assert_right(features)


def test_without_a_cache_everything_is_computed_on_the_fly(encoder):
    features = Features(encoder, TEXTS)
    assert features.prepare() == len(TEXTS)
    assert_right(features, atol=1e-5)


def test_one_text_more_than_once(encoder, tmp_path):
    features = filled(encoder, tmp_path, ["good", "bad film", "good"])
    assert_right(features)
    assert_right(Features(encoder, ["good", "bad film", "good"]))


def test_the_default_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path / "here"))
    assert cache.default_folder() == tmp_path / "here"
    monkeypatch.delenv("VECROUTE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "vecroute"


def test_a_second_segment_with_the_same_text_is_checked_too(tmp_path):
    """Two processes may compute the same text at the same time."""
    one, another = (FeatureCache(tmp_path, "k" * 32) for _ in range(2))
    for store in (one, another):
        store.put(pack({"a": torch.ones(2, 3, 4).half()}))
    one.flush()
    assert torch.equal(one.get("a"), torch.ones(2, 3, 4).half())
    before = set(segments(tmp_path))
    another.flush()
    (new,) = set(segments(tmp_path)) - before
    new.write_bytes(new.read_bytes()[:-20] + bytes(20))
    one.refresh()
    found = one.get("a")
    assert found is None or torch.equal(found, torch.ones(2, 3, 4).half())
