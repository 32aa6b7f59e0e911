"""Bytes that once broke a reader no longer do so, and valid bytes are read."""

import pytest

from tests.fuzz.run import SEEDS, by_hypothesis, seeds
from tests.fuzz.targets import TARGETS, Target, check


@pytest.mark.parametrize("name", TARGETS)
def test_valid_bytes_are_read_and_what_broke_a_reader_is_refused(name):
    for data in TARGETS[name].valid():
        TARGETS[name].read(data)
    for data in seeds(name):
        check(name, data)


def test_seeds_are_of_targets():
    assert {path.name for path in SEEDS.iterdir() if path.is_dir()} <= set(TARGETS)


def test_a_reader_that_breaks_is_found(monkeypatch):
    def read(data):
        if data.count(b"\0") > 7:
            raise KeyError("zeros")
        if data:
            raise ValueError("refused")

    monkeypatch.setitem(TARGETS, "broken", Target(read, lambda: [b"abc"]))
    tried, broke = by_hypothesis("broken", 20.0)
    assert tried > 0
    assert broke is not None
    assert broke.count(b"\0") > 7
