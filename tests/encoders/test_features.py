"""Hidden states on demand: batches as on a GPU, rounding, and what is tokenized."""

import copy

import pytest
import torch

from tests.helpers.texts import LONG, TEXTS
from tests.helpers.tiny_models import save_tiny
from vecroute.encoders import TextEncoder, cache
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.entries import Packed, rounded
from vecroute.encoders.features import Features, used
from vecroute.encoders.text import Batch

OPTIONS = [{}, {"special_tokens": False}, {"max_length": 12, "stride": 4}]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return TextEncoder(save_tiny(tmp_path_factory.mktemp("encoder")), device="cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(Features, "_encode", Features._encode_by_length)


def like(encoder, **options):
    return TextEncoder(encoder.model, tokenizer=encoder.tokenizer, **options)


def split(several):
    """Return the hidden states [n_pos, depth, d_emb] under each name."""
    return {name: packed.one(name) for packed in several for name in packed.names}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch_bytes", [1, 10_000, 10**9])
def test_batches_of_similar_length_hold_the_same_states(encoder, options, batch_bytes, monkeypatch):
    """A GPU encodes texts in batches of similar length; the numbers are the same to rounding."""
    monkeypatch.setattr("vecroute.encoders.features.GPU_BATCH_BYTES", batch_bytes)
    encoder = like(encoder, **options)
    texts = [*TEXTS[:20], "", LONG, TEXTS[3]]  # without a token, of several chunks, once more
    features, tokenized = Features(encoder, texts), encoder.tokenize(texts)
    found = split(features._encode_by_length(range(len(texts)), tokenized))
    expected = split(features._encode(range(len(texts)), tokenized))
    assert found.keys() == expected.keys() == set(range(len(texts)))
    for k, truth in enumerate(encoder.encode(texts)):
        assert found[k].shape == expected[k].shape == truth.shape
        assert found[k].dtype == expected[k].dtype == torch.float16
        torch.testing.assert_close(found[k].float(), truth, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(expected[k].float(), truth, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_cache_filled_as_on_a_gpu_holds_each_text(encoder, options, tmp_path, monkeypatch, as_on_a_gpu):
    monkeypatch.setattr(cache, "SEGMENT_BYTES", 30_000)
    monkeypatch.setattr("vecroute.encoders.features.GPU_BATCH_BYTES", 10_000)
    encoder = like(encoder, **options)
    texts = [*TEXTS, "", LONG, TEXTS[3]]
    store = FeatureCache(tmp_path, encoder.key)
    assert Features(encoder, texts, store).prepare() == 0
    assert len(list(store.own.glob("*.safetensors"))) > 1
    again = Features(encoder, texts, FeatureCache(tmp_path, encoder.key))
    assert not again._tokenized  # everything is there
    for k, truth in enumerate(encoder.encode(texts)):
        torch.testing.assert_close(again.cache.get(again.keys[k]).float(), truth, rtol=2e-3, atol=2e-3)
    hidden, mask = again.batch(range(len(texts)))
    assert mask.sum(1).tolist() == again.lengths
    assert not hidden[~mask].any()


def test_damage_in_a_segment_of_a_gpu_is_noticed_for_each_text(encoder, tmp_path, as_on_a_gpu):
    store = FeatureCache(tmp_path, encoder.key)
    Features(encoder, TEXTS, store).prepare()
    (path,) = store.own.glob("*.safetensors")
    written = path.read_bytes()
    expected = {key: store.get(key).clone() for key in Features(encoder, TEXTS, store).keys}
    for place in range(len(written) - 20_000, len(written), 1_000):
        path.write_bytes(written[:place] + bytes([written[place] ^ 4]) + written[place + 1 :])
        damaged = FeatureCache(tmp_path, encoder.key)
        found = [damaged.get(key) for key in expected]
        assert not path.exists()
        right = zip(found, expected.values(), strict=True)
        assert all(hidden is None or torch.equal(hidden, truth) for hidden, truth in right)


def test_a_text_with_great_numbers_does_not_round_the_others_of_its_batch(encoder, monkeypatch):
    hidden = torch.randn(2, 5, encoder.depth, encoder.d_emb)
    hidden[0, 1] *= 1e6  # more than float16 can hold
    batch = Batch([1, 0], hidden, torch.tensor([[True] * 5, [False, True, True, False, True]]))
    monkeypatch.setattr(TextEncoder, "batches", lambda *_: iter([batch]))
    tokenized = encoder.tokenize(["a b c", "good film a"])
    tokenized[0] = tokenized[0]._replace(keep=[[True] * 3])
    tokenized[1] = tokenized[1]._replace(keep=[[True] * 5])
    found = split(Features(encoder, [])._encode_by_length("ab", tokenized))
    assert torch.equal(found["b"], hidden[0].bfloat16())
    assert torch.equal(found["a"], hidden[1, [1, 2, 4]].half())


def test_great_numbers_of_padding_do_not_change_the_rounding(encoder, monkeypatch):
    hidden = torch.randn(1, 3, encoder.depth, encoder.d_emb)
    hidden[0, 2] = 1e6
    batch = Batch([0], hidden, torch.tensor([[True, True, False]]))
    monkeypatch.setattr(TextEncoder, "batches", lambda *_: iter([batch]))
    tokenized = [one._replace(keep=[[True] * 2]) for one in encoder.tokenize(["a"])]
    found = split(Features(encoder, [])._encode_by_length("a", tokenized))
    assert torch.equal(found["a"], hidden[0, :2].half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_bytes_are_kept_as_they_are(dtype):
    hidden = torch.randn(5, 2, 3).to(dtype)
    hidden[0, 0, 0] = torch.inf
    (found,) = rounded(Packed("ab", [2, 3], hidden))
    assert found.hidden is hidden


def test_each_text_is_rounded_as_if_it_were_alone():
    hidden = torch.randn(6, 2, 3)
    hidden[2] = 1e6
    found = split(rounded(Packed("abc", [2, 3, 1], hidden)))
    expected = {"a": hidden[:2].half(), "b": hidden[2:5].bfloat16(), "c": hidden[5:].half()}
    assert {name: one.dtype for name, one in found.items()} == {k: v.dtype for k, v in expected.items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_used_states_keep_their_order(share):
    hidden, mask = torch.randn(7, 9, 2, 3), torch.rand(7, 9) < share
    assert torch.equal(used(hidden, mask, int(mask.sum())), hidden[mask])


@pytest.mark.parametrize("remembered", [0, 100, 10**6])
def test_texts_are_tokenized_once_as_far_as_they_are_remembered(encoder, tmp_path, monkeypatch, remembered):
    monkeypatch.setattr("vecroute.encoders.features.REMEMBERED", remembered)
    monkeypatch.setattr("vecroute.encoders.features.TOGETHER", 8)
    encoder, asked = copy.copy(encoder), []
    encoder.tokenize = lambda texts: asked.extend(texts) or TextEncoder.tokenize(encoder, texts)
    features = Features(encoder, TEXTS, FeatureCache(tmp_path, encoder.key))
    assert asked == TEXTS
    assert sum(one.n_pos for one in features._tokenized.values()) <= remembered
    kept = len(features._tokenized)
    assert kept == {0: 0, 100: 8, 10**6: len(TEXTS)}[remembered]
    assert features.prepare() == 0
    assert asked == [*TEXTS, *TEXTS[kept:]]
    assert not features._tokenized
    hidden, _ = features.batch(range(len(TEXTS)))
    torch.testing.assert_close(hidden, Features(encoder, TEXTS).batch(range(len(TEXTS)))[0], rtol=0, atol=0)


def test_remembered_texts_are_forgotten_after_a_share_of_the_work(encoder, tmp_path):
    features = Features(encoder, TEXTS, FeatureCache(tmp_path, encoder.key))
    assert len(features._tokenized) == len(TEXTS)
    features.prepare(share=(1, 2))
    assert not features._tokenized


def test_rows_of_a_batch_may_come_in_any_order(encoder, monkeypatch):
    """On a CPU some rows are repeated texts, whose results are dropped."""
    texts = ["a b c", "good film a"]
    expected = Features(encoder, texts).batch([0, 1])[0]
    batches = TextEncoder.batches

    def reversed_rows(*rest):
        for which, hidden, mask in batches(*rest):
            yield Batch(which[::-1], hidden.flip(0), mask.flip(0))

    monkeypatch.setattr(TextEncoder, "batches", reversed_rows)
    assert torch.equal(Features(encoder, texts).batch([0, 1])[0], expected)
