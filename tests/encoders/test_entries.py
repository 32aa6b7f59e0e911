"""The format of a segment: what safetensors reads, and what earlier versions wrote."""

import hashlib
import zlib

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.helpers.packing import pack
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.entries import write_segment


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
    write_segment(tmp_path / "x", [pack(segment) for segment in segments], {"encoder": "k"})
    expected = {name: hidden for segment in segments for name, hidden in segment.items()}
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"encoder": "k"}
        assert set(file.keys()) == set(expected)
        for name, hidden in expected.items():
            found = file.get_tensor(name)
            assert found.dtype == hidden.dtype
            assert torch.equal(found, hidden)


def test_segments_of_earlier_versions_are_read(tmp_path):
    """They were written by safetensors, text by text."""
    key = "0" * 64
    states = {name: torch.randn(n, 3, 4).half() for name, n in (("a", 2), ("b", 5))}
    sums = {name: zlib.crc32(hidden.numpy().tobytes()) for name, hidden in states.items()}
    listed = (
        f'{{"a": ["torch.float16", [2, 3, 4], {sums["a"]}], "b": ["torch.float16", [5, 3, 4], {sums["b"]}]}}'
    )
    seal = hashlib.sha256((key + listed).encode()).hexdigest()
    (tmp_path / key[:32]).mkdir()
    path = tmp_path / key[:32] / "a.safetensors"
    save_file(states, path, {"encoder": key, "entries": listed, "sha256": seal})
    store = FeatureCache(tmp_path, key)
    for name, hidden in states.items():
        assert store.n_pos(name) == len(hidden)
        assert torch.equal(store.get(name), hidden)
    store.put(pack(states))
    store.flush()
    (written,) = set(store.own.glob("*.safetensors")) - {path}
    assert safe_open(written, "pt").metadata() == safe_open(path, "pt").metadata()
