"""Words through frozen encoders: they add up in every family, and means over samples are correct."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import vecroute as vr
from tests.helpers import tiny_models, tiny_vision
from vecroute.encoders import TextEncoder, VisionEncoder
from vecroute.explain.image import explain_patches
from vecroute.explain.rows import chunk_step, rows_of
from vecroute.explain.samples import part_of, sub_texts, words_of
from vecroute.explain.text import explain_words, split_texts
from vecroute.heads import make_head
from vecroute.io.images import Picture

TEXTS = [
    "a good film .",
    "the plot was so dull , but witty",
    "!",
    "warm story ! " * 25,
]
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def head_on(encoder, n_cls: int = 3, name: str = "routing"):
    head = make_head(name, seed=0, d_emb=encoder.d_emb, depth=encoder.depth, n_cls=n_cls).eval()
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return head.to(encoder.dtype)


def error_of(fields) -> float:
    """Return the completeness error of one explanation, the worst of its classes."""
    values, base, scores = (fields[name].double() for name in ("values", "base_values", "scores"))
    return ((values.sum((0, 1)) + base - scores).abs() / (values.abs().sum((0, 1)) + base.abs())).max().item()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_words_add_up_in_every_family_of_texts(kind, dtype, tmp_path):
    encoder = TextEncoder(tiny_models.save_tiny(tmp_path, kind), dtype=dtype)
    head, outputs = head_on(encoder), [[0, 2, 1]] * len(TEXTS)
    before = encoder.model.config._attn_implementation
    for by_depth in (False, True):
        found = explain_words(encoder, head, TEXTS, outputs, by_depth=by_depth)
        for text, (fields, scores) in zip(TEXTS, found, strict=True):
            assert error_of(fields) <= BOUNDS[dtype]
            with torch.no_grad():
                truth = head(encoder.encode([text])[0].clone())  # [n_cls]
            torch.testing.assert_close(scores, truth, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(fields["scores"], truth[[0, 2, 1]], rtol=1e-4, atol=1e-4)
    assert encoder.model.config._attn_implementation == before
    assert not encoder.model._forward_hooks


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_patches_add_up_in_every_family_of_images(kind, dtype, tmp_path):
    encoder = VisionEncoder(tiny_vision.save_tiny_vision(tmp_path, kind), dtype=dtype)
    head = head_on(encoder, name="probe")
    rng = np.random.default_rng(0)
    pictures = [Picture.of(rng.integers(0, 255, (24, 20, 3), dtype=np.uint8)) for _ in range(3)]
    for by_depth in (False, True):
        found = explain_patches(encoder, head, pictures, [[0, 1, 2]] * 3, by_depth=by_depth)
        hidden = torch.stack(encoder.encode(pictures)).clone()
        for k, (fields, scores) in enumerate(found):
            assert error_of(fields) <= BOUNDS[dtype]
            assert fields["values"].shape == (encoder.n_pos, encoder.depth if by_depth else 1, 3)
            with torch.no_grad():
                torch.testing.assert_close(scores, head(hidden)[k], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TextEncoder(tiny_models.save_tiny(tmp_path_factory.mktemp("tiny")), max_length=12, stride=4)


def test_a_margin_is_the_difference_of_two_classes(tiny):
    head = head_on(tiny)
    texts = tiny.tokenize([TEXTS[1]])
    rows = [rows_of(texts[0], chunk_step(tiny))]
    (split,) = split_texts(tiny, head, texts, [[0, 1]], rows)
    (margin,) = split_texts(tiny, head, texts, [[0, 1]], rows, margin=True)
    torch.testing.assert_close(margin.values[..., 0], split.values[..., 0] - split.values[..., 1])
    torch.testing.assert_close(margin.base[0], split.base[0] - split.base[1])


def test_overlapping_chunks_have_one_row_for_each_token(tiny):
    text = TEXTS[3]
    (tokenized,) = tiny.tokenize([text])
    assert len(tokenized.chunks) > 3
    rows = rows_of(tokenized, chunk_step(tiny))
    content = [k for k, special in enumerate(rows.special) if not special]
    assert [text[rows.start[k] : rows.end[k]] for k in content] == text.split()
    assert sum(rows.special) == 2 * len(tokenized.chunks)
    ((fields, _),) = explain_words(tiny, head_on(tiny), [text], [[0, 1, 2]])
    assert error_of(fields) <= 1e-5
    assert len(fields["values"]) == len(text.split()) + 2 * len(tokenized.chunks)


def test_special_tokens_that_are_not_routed_are_still_read(tiny):
    plain = TextEncoder(tiny.name, special_tokens=False)
    ((fields, _),) = explain_words(plain, head_on(plain), TEXTS[:1], [[0, 1, 2]])
    assert fields["special"] == [True, False, False, False, False, True]
    assert error_of(fields) <= 1e-5


class TestSamples:
    def test_each_value_is_a_mean_over_sub_texts(self, tiny):
        head, text = head_on(tiny), "the plot is slowly good ,"
        (whole,) = tiny.tokenize([text])
        rows = rows_of(whole, chunk_step(tiny))
        ((fields, _),) = explain_words(tiny, head, [text], [[0, 1]], samples=6)
        ((full, _),) = explain_words(tiny, head, [text], [[0, 1]])
        group = words_of(rows, text)
        assert group == [-1, 0, 1, 2, 3, 3, 4, 5, -1]  # slow ##ly is one word
        total, count = np.zeros((9, 2)), np.zeros((9, 1))
        keeps = sub_texts(group, 6, 0)
        assert len(keeps) == 6
        for keep, other in zip(keeps[::2], keeps[1::2], strict=True):
            assert all((a != b) or g < 0 for a, b, g in zip(keep, other, group, strict=True))
            assert keep[4] == keep[5]
        for keep in keeps:
            part, own = part_of(whole, rows, keep)
            (split,) = split_texts(tiny, head, [part], [[0, 1]], [own])
            total += split.values[:, 0].numpy()
            count += np.array(keep)[:, None]
            ids = [t for t, stays in zip(whole.chunks[0], keep, strict=True) if stays]
            assert part.chunks == [ids]
        np.testing.assert_allclose(fields["values"][:, 0], total / count, atol=1e-5)
        torch.testing.assert_close(fields["base_values"], full["base_values"])
        torch.testing.assert_close(fields["scores"], full["scores"])
        explained = fields["values"].sum((0, 1)) + fields["base_values"] + fields["not_explained"]
        torch.testing.assert_close(explained, fields["scores"], rtol=1e-5, atol=1e-5)

    def test_they_are_the_same_alone_in_a_batch_and_again(self, tiny):
        head = head_on(tiny)
        together = explain_words(tiny, head, TEXTS, [[0]] * 4, samples=4)
        for text, (fields, _) in zip(TEXTS, together, strict=True):
            ((alone, _),) = explain_words(tiny, head, [text], [[0]], samples=4)
            torch.testing.assert_close(alone["values"], fields["values"], rtol=1e-4, atol=1e-5)

    def test_one_word_is_as_without(self, tiny):
        head = head_on(tiny)
        ((with_samples, _),) = explain_words(tiny, head, ["slowly"], [[0, 1]], samples=4)
        ((without, _),) = explain_words(tiny, head, ["slowly"], [[0, 1]])
        torch.testing.assert_close(with_samples["values"], without["values"])
        assert (with_samples["not_explained"] == 0).all()

    def test_a_chunk_without_the_words_of_a_sub_text(self, tiny):
        tokenizer = tiny_models.without_special_tokens()
        encoder = TextEncoder(tiny.model, tokenizer=tokenizer, max_length=2)
        ((fields, _),) = explain_words(encoder, head_on(encoder), [TEXTS[0]], [[0, 1]], samples=8)
        assert fields["values"].isfinite().all()
        rest = fields["scores"] - fields["base_values"] - fields["values"].sum((0, 1))  # [k]
        torch.testing.assert_close(fields["not_explained"], rest)


def save_classifier(folder, kind: str, **options):
    """Save a tiny classifier with a tokenizer or image processor."""
    torch.manual_seed(0)
    if kind in tiny_vision.KINDS:
        tiny_vision.save_tiny_vision(folder, kind)
        auto, processor = transformers.AutoModelForImageClassification, transformers.AutoImageProcessor
    else:
        tiny_models.save_tiny(folder, kind)
        auto, processor = transformers.AutoModelForSequenceClassification, transformers.AutoTokenizer
    config = transformers.AutoConfig.from_pretrained(folder)
    if kind in ("siglip", "clip"):  # models of texts and images
        both = {"siglip": transformers.SiglipConfig, "clip": transformers.CLIPConfig}[kind]
        config = both(vision_config=config.to_dict(), text_config={"hidden_size": 16, "num_hidden_layers": 1})
    config.id2label, config.num_labels = {0: "bad", 1: "good", 2: "odd"}, 3
    model = auto.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    more = {"backend": "pil"} if kind in tiny_vision.KINDS else {}
    return auto.from_pretrained(folder), processor.from_pretrained(folder, **more)


class Sine(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
class TestExistingModels:
    @pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "deberta", "modernbert"])
    def test_of_texts(self, kind, tmp_path):
        model, tokenizer = save_classifier(tmp_path, kind)
        explained = vr.explain_model(model, tokenizer, TEXTS[:3])
        for text, why in zip(TEXTS, explained, strict=False):
            with torch.no_grad():
                scores = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0]
            np.testing.assert_allclose(why.scores, scores.numpy(), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(why.probabilities, scores.softmax(-1).numpy(), atol=1e-5)
            assert why.completeness_error < 1e-5
            assert (why.of, why.phi, why.depths) == ("words", None, ["all depths"])
            assert why.output_names == ["bad", "good", "odd"]
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        one = vr.explain_model(model, tokenizer, TEXTS[1], classes=["odd", 0])
        assert one.output_names == ["odd", "bad"]
        np.testing.assert_allclose(one["odd"].values, explained[1]["odd"].values, atol=1e-5)
        one.to_html(tmp_path / "why.html")

    @pytest.mark.parametrize("pad", [None, -1, 5])
    def test_of_texts_by_decoders_with_and_without_a_padding_token(self, pad):
        """The tokenizer may have none, or another one than the model."""
        tokenizer = tiny_models.without_special_tokens()
        tokenizer.pad_token = None
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
        config = transformers.GPT2Config(vocab_size=len(tokenizer), **sizes, bos_token_id=0, eos_token_id=0)
        torch.manual_seed(0)
        model = transformers.GPT2ForSequenceClassification(config).eval()
        model.config.pad_token_id = pad
        together = vr.explain_model(model, tokenizer, TEXTS[:3])
        for text, why in zip(TEXTS, together, strict=False):
            with torch.no_grad():
                scores = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0]
            np.testing.assert_allclose(why.scores, scores.numpy(), rtol=1e-4, atol=1e-5)
            alone = vr.explain_model(model, tokenizer, text)
            np.testing.assert_allclose(why.values, alone.values, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("kind", ["vit", "beit", "deit", "dinov2", "siglip", "clip"])
    def test_of_images(self, kind, tmp_path):
        model, processor = save_classifier(tmp_path, kind)
        image = np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8)
        why = vr.explain_model(model, processor, image)
        with torch.no_grad():
            pixels = processor([image], return_tensors="pt")["pixel_values"]
            np.testing.assert_allclose(why.scores, model(pixels).logits[0].numpy(), rtol=1e-4, atol=1e-4)
        assert why.completeness_error < 1e-5
        assert why.grid("odd").shape == (4, 4)
        why.to_html(tmp_path / "why.html")
        with pytest.raises(ValueError, match="samples must be 0 for images, got 2"):
            vr.explain_model(model, processor, image, samples=2)

    def test_samples(self, tmp_path):
        model, tokenizer = save_classifier(tmp_path, "bert")
        why = vr.explain_model(model, tokenizer, TEXTS[1], samples=4)
        assert why.completeness_error < 1e-5
        assert abs(why.not_explained).max() > 0

    def test_mistakes(self, tmp_path):
        model, tokenizer = save_classifier(tmp_path, "bert")
        cases = [
            (model, tokenizer, "", {}, ValueError, "input 0 is ''"),
            (model, tokenizer, ["a", 7], {}, TypeError, "inputs must be texts, input 1 is int"),
            (model, tokenizer, [], {}, ValueError, "inputs must be one text or a list of texts, got none"),
            (model, tokenizer, None, {}, TypeError, "one text or a list of texts, got NoneType"),
            (model, tokenizer, {"a": 1}, {}, TypeError, "one text or a list of texts, got dict"),
            (
                model,
                tokenizer,
                pd.DataFrame({"text": ["a"]}),
                {},
                TypeError,
                "one text or a list of texts, got DataFrame: give one of its columns",
            ),
            (
                model.bert,
                tokenizer,
                "a",
                {},
                ValueError,
                "BertModel must return logits, .*, got BaseModelOutput",
            ),
            (
                model,
                tokenizer,
                "a " * 50,
                {},
                ValueError,
                "inputs must be at most 40 tokens long, input 0 has 52",
            ),
            (model, tokenizer, "a", {"classes": ["x"]}, ValueError, "classes must be some of .*, got 'x'"),
            (
                model,
                tokenizer,
                "a",
                {"classes": []},
                ValueError,
                "classes must be at least one of .*, got none",
            ),
            (model, tokenizer, "a", {"samples": 3}, ValueError, "samples must be an even number"),
            (model, object(), "a", {}, TypeError, "processor must be an image processor or a fast tokenizer"),
            (7, tokenizer, "a", {}, TypeError, "model must be a Hugging Face model, got int"),
            (model, tokenizer, "a", {}, ValueError, r"call model.eval\(\)"),
        ]
        for own, processor, inputs, options, error, message in cases:
            model.train("eval" in message)
            with pytest.raises(error, match=message):
                vr.explain_model(own, processor, inputs, **options)

    def test_an_operation_without_a_rule_is_named(self, tmp_path):
        model, tokenizer = save_classifier(tmp_path, "bert")
        model.bert.encoder.layer[0].intermediate.intermediate_act_fn = Sine()
        with pytest.raises(ValueError, match=r"BertForSequenceClassification cannot be split.*: sin is not"):
            vr.explain_model(model, tokenizer, "a good film")

    def test_a_model_that_returns_probabilities_is_told_to_return_scores(self, tmp_path):
        model, tokenizer = save_classifier(tmp_path, "bert")
        model.classifier = torch.nn.Sequential(model.classifier, torch.nn.Softmax(-1))
        with pytest.raises(ValueError, match=r"softmax.*return the scores before softmax"):
            vr.explain_model(model, tokenizer, "a good film")


@pytest.mark.slow
def test_minilm_on_many_texts():
    encoder = TextEncoder("minilm")
    rng = np.random.default_rng(0)
    vocabulary = [w for w in encoder.tokenizer.get_vocab() if w.isalpha()]
    texts = [" ".join(rng.choice(vocabulary, rng.integers(1, 60))) for _ in range(300)]
    texts += [" ".join(rng.choice(vocabulary, 2000)), "movie", "!", "... ?! ,"]
    for head in (head_on(encoder), head_on(encoder, name="probe")):
        found = explain_words(encoder, head, texts, [[0, 1]] * len(texts))
        assert max(error_of(fields) for fields, _ in found) <= 1e-5
