"""On a CPU, the bits of a text's hidden states do not depend on the other texts."""

import copy

import pytest
import torch

from tests.helpers.texts import TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.encoders import TextEncoder
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.features import Features
from vecroute.encoders.shapes import CANDIDATES, MOST, WORTH, batch_positions, has_same_bits, same_shapes


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return TextEncoder(save_tiny(tmp_path_factory.mktemp("encoder")), device="cpu")


@pytest.mark.parametrize("least", [1, 6, 12])
def test_groups_hold_every_row_and_enough_positions(least):
    lengths = [3, 5, 3, 0, 3, 3, 20, 5, 3]
    groups = list(same_shapes(lengths, 12, least))
    firsts = [group[: len(set(group))] for group in groups]  # without the repeated rows
    assert sorted(row for group in firsts for row in group) == list(range(len(lengths)))
    for group in groups:
        (length,) = {lengths[row] for row in group}
        assert length * len(group) <= max(12, length)
        assert length * len(group) >= min(least, 12 // max(length, 1) * length)


def test_batches_have_a_fixed_shape_only_if_bits_differ(encoder, monkeypatch):
    fixed = encoder.filled, encoder.filled
    passed = [least for least in CANDIDATES if has_same_bits(encoder, least)]
    assert batch_positions(encoder, WORTH) == ((MOST, passed[0]) if passed else fixed)
    assert batch_positions(encoder, WORTH - 1) == fixed  # without a trial
    other, states = copy.copy(encoder), TextEncoder.states

    def as_if_sums_were_in_another_order(self, ids, attended=None):
        found = states(self, ids, attended)  # [b, n, depth, d_emb]
        return found + 1e-3 if len(ids) < 10 else found

    monkeypatch.setattr(TextEncoder, "states", as_if_sums_were_in_another_order)
    assert batch_positions(other, WORTH) == fixed
    monkeypatch.undo()
    assert batch_positions(other, WORTH) == fixed  # there is one trial for each encoder


def test_an_encoder_that_fails_in_the_trial_has_batches_of_a_fixed_shape(encoder, monkeypatch):
    def fail(self, ids):
        raise RuntimeError("too many positions")

    monkeypatch.setattr(TextEncoder, "states", fail)
    assert not has_same_bits(encoder, CANDIDATES[0])


@pytest.mark.parametrize("sizes", [(40, 40), (MOST, CANDIDATES[-1])])
def test_bits_of_a_text_do_not_depend_on_the_others(encoder, sizes, monkeypatch):
    monkeypatch.setattr("vecroute.encoders.features.batch_positions", lambda encoder, n: sizes)
    texts = [*TEXTS, *(f"{text} and {text}" for text in TEXTS)]
    expected, mask = Features(encoder, texts).batch(range(len(texts)))  # [b, n_pos, depth, d_emb], [b, n_pos]
    order = torch.randperm(len(texts)).tolist()
    for size in (1, 2, 7):
        for start in range(0, len(texts), size):
            some = order[start : start + size]
            found, _ = Features(encoder, [texts[k] for k in some]).batch(range(len(some)))
            for k, hidden in zip(some, found, strict=True):
                n = int(mask[k].sum())
                assert torch.equal(hidden[:n], expected[k, :n])


def test_a_batch_from_the_cache_needs_no_trial(encoder, tmp_path, monkeypatch):
    features = Features(encoder, TEXTS, FeatureCache(tmp_path, encoder.key))
    features.prepare()
    monkeypatch.delattr("vecroute.encoders.features.batch_positions")
    features.batch(range(len(TEXTS)))
