"""Explanation: its data, sums that hold whatever is aggregated, files, tables and other tools' forms."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vecroute as vr
from tests.helpers.explanations import HOSTILE, explain
from tests.helpers.guides import run
from tests.helpers.paths import ROOT
from vecroute.explain.explanation import ARRAYS, UNITS
from vecroute.explain.segment import VISIBLE, locate, sentences, words

TEXT = "A gorgeous, witty movie. Mr. Smith doesn't convince (3.5 of 10)! Unconvincingly so."


def check_sums(explanation, original):
    """Check that the explanation adds up, and has the scores and the credit of the original."""
    scale = abs(explanation.values).sum((0, 1)) + abs(explanation.base_values) + abs(explanation.scores) + 1
    total = explanation.values.sum((0, 1), dtype=np.float64) + explanation.base_values  # [n_cls]
    assert (abs(total - original.scores) <= 1e-6 * scale).all()
    assert (explanation.scores == original.scores).all()
    credit, whole = (e.phi.sum((0, 1), dtype=np.float64) for e in (explanation, original))
    assert np.allclose(credit, whole, rtol=0, atol=1e-6 * abs(original.phi).sum())


class TestData:
    def test_the_arrays(self):
        explanation = explain(TEXT)
        assert explanation.values.dtype == explanation.phi.dtype == np.float32
        assert explanation.base_values.dtype == explanation.scores.dtype == np.float32
        assert explanation.values.shape == (len(explanation), 3, 2)
        assert explanation.output_names == ["bad", "good"]
        assert explanation.completeness_error <= 1e-6

    def test_tensors_lists_and_arrays_are_the_same(self):
        fields = vars(explain(TEXT))
        for convert in (torch.from_numpy, np.ndarray.tolist):
            other = vr.Explanation(**{k: convert(v) if k in ARRAYS else v for k, v in fields.items()})
            for name in ARRAYS:
                assert (getattr(other, name) == fields[name]).all(), name

    def test_tensors_with_a_graph_and_of_less_precision(self):
        values = torch.ones(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
        arrays = {"values": values, "phi": values, "base_values": values[0, 0] * 0, "scores": values[0, 0]}
        explanation = vr.Explanation(**arrays, output_names=[1], text="a", offsets=[(0, 1)])
        assert explanation.values.tolist() == [[[1.0]]]
        assert explanation.output_names == ["1"]
        assert explanation.pieces == ["a"]

    def test_it_does_not_change_with_what_it_was_made_of(self):
        values = np.zeros((1, 1, 1), dtype=np.float32)
        explanation = vr.Explanation(
            values=values,
            phi=values,
            base_values=[0],
            scores=[0],
            output_names="a",
            text="",
            offsets=[(0, 0)],
        )
        values += 1
        assert (explanation.values == 0).all()
        assert (explanation.phi == 0).all()

    def test_contributions_of_a_head(self):
        head = vr.RoutingHead(d_emb=8, depth=3, n_cls=2)
        hidden = torch.randn(4, 3, 8)  # [n_pos, depth, d_emb]
        x_inp, _ = head.flatten(hidden)
        found = vr.contributions(head.network, x_inp)
        explanation = vr.Explanation(
            values=found.values.T.reshape(4, 3, 2),
            phi=head.route(hidden).phi.dense().reshape(4, 3, 2),
            base_values=found.base,
            scores=head(hidden),
            output_names=["bad", "good"],
            text="so very witty !",
            offsets=[(0, 2), (3, 7), (8, 13), (14, 15)],
        )
        assert explanation.completeness_error <= 1e-5
        assert explanation.pieces == ["so", "very", "witty", "!"]

    def test_the_repr(self):
        explanation = explain("ab cd", scores=[1, -20], names=("x", "y"))
        assert repr(explanation) == "Explanation(4 tokens, depth=3, scores: x=1, y=-20)"
        assert "1 chunk," in repr(explanation.aggregate("chunk"))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"values": np.zeros((2, 3))}, r"values must be \[n, depth, n_cls=2\], got \[2, 3\]"),
            ({"values": np.zeros((2, 3, 1))}, r"values must be \[n, depth, n_cls=2\], got \[2, 3, 1\]"),
            ({"phi": np.zeros((2, 3, 2))}, r"phi must be \[n=4, depth=3, n_cls=2\], got \[2, 3, 2\]"),
            ({"base_values": 0.0}, r"base_values must be \[n_cls=2\], got \[\]"),
            ({"scores": [0, 1, 2]}, r"scores must be \[n_cls=2\], got \[3\]"),
            ({"scores": [0, float("nan")]}, "scores must be finite numbers, got nan"),
            ({"phi": np.full((4, 3, 2), np.inf)}, "phi must be finite numbers, got inf"),
            ({"output_names": ["a", "a"]}, r"output_names must be different names, at least one, got \['a'"),
            ({"output_names": []}, "output_names must be different names, at least one"),
            ({"offsets": [(0, 1)]}, r"offsets must be \[n=4, 2\], got \[1, 2\]"),
            ({"offsets": [0, 1] * 4}, r"offsets must be \[n=4, 2\], got \[8\]"),
            ({"offsets": [(0, 6)] * 4}, r"0 <= start <= end <= 5, the length of text, got \[0, 6\]"),
            ({"offsets": [(2, 1)] * 4}, r"got \[2, 1\]"),
            ({"offsets": [(-1, 1)] * 4}, r"got \[-1, 1\]"),
            ({"special": [True]}, "special must have 4 elements, got 1"),
            ({"chunk": [0] * 5}, "chunk must have 4 elements, got 5"),
            ({"pieces": ["a"]}, "pieces must have 4 elements, got 1"),
            ({"depths": [0, 1]}, "depths must have 3 elements, got 2"),
            ({"unit": "letter"}, "unit must be one of 'token', 'word', .* got 'letter'"),
        ],
    )
    def test_what_does_not_fit(self, changes, message):
        with pytest.raises(ValueError, match=message):
            explain("ab cd", **changes)

    def test_a_text_that_is_none(self):
        with pytest.raises(TypeError, match="text must be a string, got NoneType"):
            vr.Explanation(**{**vars(explain("ab")), "text": None})


class TestCompleteness:
    def test_by_hand(self):
        one = np.array([[[3.0, 0.0]], [[-1.0, 0.0]]])
        explanation = explain("ab cd", values=np.concatenate([one, 0 * one]), phi=np.zeros((4, 1, 2)))
        fixed = {**vars(explanation), "base_values": [1, 0], "scores": [4, 0]}
        # 3 - 1 + 1 = 3 instead of 4, and 3 + 1 + 1 = 5; the second class has nothing and misses nothing.
        assert vr.Explanation(**fixed).completeness_error == pytest.approx(1 / 5)
        assert vr.Explanation(**{**fixed, "scores": [3, 0]}).completeness_error == 0
        assert vr.Explanation(**{**fixed, "scores": [3, 1]}).completeness_error == np.inf


class TestOutputs:
    def test_one_class_by_name(self):
        explanation = explain(TEXT, names=("bad", "good", "odd"))
        good = explanation["good"]
        assert good.output_names == ["good"]
        assert (good.values[..., 0] == explanation.values[..., 1]).all()
        assert (good.phi[..., 0] == explanation.phi[..., 1]).all()
        assert good.completeness_error <= 1e-6
        assert explanation[["odd", "bad"]].scores.tolist() == explanation.scores[[2, 0]].tolist()

    def test_names_that_are_numbers(self):
        explanation = explain(TEXT, names=(1, 0))
        assert explanation[0].scores.tolist() == [explanation.scores[1]]

    def test_a_class_that_is_not_there(self):
        with pytest.raises(ValueError, match="output must be one of 'bad', 'good', got 'god'"):
            explain(TEXT)["god"]
        with pytest.raises(ValueError, match="got 'god'"):
            explain(TEXT).top(3, output="god")

    def test_margin(self):
        explanation = explain(TEXT, names=("a", "b", "c"))
        margin = explanation.margin("c", "a")
        assert margin.output_names == ["c - a"]
        expected = explanation.values[..., 2] - explanation.values[..., 0]
        assert np.allclose(margin.values[..., 0], expected, atol=1e-6)
        assert margin.scores[0] == pytest.approx(explanation.scores[2] - explanation.scores[0], abs=1e-5)
        assert margin.completeness_error <= 1e-6

    def test_margin_of_the_highest_score_over_the_next(self):
        explanation = explain("ab cd", names=("a", "b", "c"), scores=[1, 5, 3])
        assert explanation.margin().output_names == ["b - c"]
        assert explanation.margin("a").output_names == ["a - b"]
        with pytest.raises(ValueError, match="margin needs two classes, this explains 'a' alone"):
            explanation["a"].margin()
        with pytest.raises(ValueError, match="margin needs two different classes, got 'a' and 'a'"):
            explanation.margin("a", "a")


class TestAggregate:
    @pytest.mark.parametrize("unit", UNITS)
    @pytest.mark.parametrize("name", HOSTILE)
    def test_sums_hold_for_hostile_texts(self, name, unit):
        explanation = explain(HOSTILE[name])
        check_sums(explanation.aggregate(unit), explanation)
        check_sums(explanation.aggregate(unit).sum_depth(), explanation)

    @given(st.text(), st.sampled_from(UNITS))
    def test_sums_hold(self, text, unit):
        explanation = explain(text)
        check_sums(explanation.aggregate(unit), explanation)
        skipped = explanation.aggregate(unit, skip_special_tokens=True)
        assert not skipped.special.any()
        assert skipped.completeness_error <= 1e-6

    @given(st.text(), st.sampled_from(["word", "sentence"]))
    def test_pieces_are_the_characters_of_the_text(self, text, unit):
        parts = explain(text).aggregate(unit)
        for piece, (start, end), special in zip(parts.pieces, parts.offsets, parts.special, strict=True):
            assert special or piece == text[start:end]

    def test_words_sum_their_tokens(self):
        explanation = explain(TEXT)
        parts = explanation.aggregate("word")
        # The tokens are of three characters: Unc onv inc ing ly
        tokens = slice(explanation.pieces.index("##Unc"), explanation.pieces.index("##ly") + 1)
        assert explanation.pieces[tokens] == ["##Unc", "##onv", "##inc", "##ing", "##ly"]
        row = parts.pieces.index("Unconvincingly")
        assert TEXT[slice(*parts.offsets[row])] == "Unconvincingly"
        assert np.allclose(parts.values[row], explanation.values[tokens].sum(0), atol=1e-6)
        assert np.allclose(parts.phi[row], explanation.phi[tokens].sum(0), atol=1e-6)
        assert not any("##" in piece for piece in parts.pieces)

    def test_words_across_chunks_are_whole(self):
        explanation = explain("wonderfully", chunk_size=2)
        parts = explanation.aggregate("word")
        assert parts.pieces == ["[CLS]", "wonderfully", "[SEP]", "[CLS]", "[SEP]"]
        assert parts.special.tolist() == [True, False, True, True, True]
        assert parts.chunk.tolist() == [0, 0, 0, 1, 1]

    def test_sentences(self):
        parts = explain(TEXT).aggregate("sentence", skip_special_tokens=True)
        assert parts.pieces == [
            "A gorgeous, witty movie.",
            "Mr. Smith doesn't convince (3.5 of 10)!",
            "Unconvincingly so.",
        ]
        assert [TEXT[start:end] for start, end in parts.offsets] == parts.pieces

    def test_chunks_have_their_special_tokens(self):
        explanation = explain("ab cd ef gh ij", chunk_size=2)
        parts = explanation.aggregate("chunk")
        assert parts.pieces == ["chunk 0", "chunk 1", "chunk 2"]
        assert sorted(part.piece for part in parts.top(3)) == parts.pieces
        assert parts.offsets.tolist() == [[0, 5], [6, 11], [12, 14]]
        assert np.allclose(parts.values[1], explanation.values[explanation.chunk == 1].sum(0), atol=1e-6)

    def test_depths(self):
        explanation = explain(TEXT, depths=[0, 3, 12])
        parts = explanation.aggregate("depth")
        assert parts.pieces == explanation.depth_names == ["embeddings", "layer 3", "layer 12"]
        assert parts.values.shape == (3, 1, 2)
        assert np.allclose(parts.values[:, 0], explanation.values.sum(0), atol=1e-5)
        of_words = explanation.aggregate("word").aggregate("depth")
        assert np.allclose(of_words.values, parts.values, atol=1e-5)

    def test_sum_over_depth(self):
        explanation = explain(TEXT)
        flat = explanation.sum_depth()
        assert flat.values.shape == (len(explanation), 1, 2)
        assert np.allclose(flat.values[:, 0], explanation.values.sum(1), atol=1e-6)
        assert np.allclose(flat.phi[:, 0], explanation.phi.sum(1), atol=1e-6)

    def test_one_depth_leaves_the_others_to_the_base(self):
        explanation = explain(TEXT, depths=[0, 3, 12])
        for level, d in ((0, 0), ("layer 3", 1), (12, 2)):
            one = explanation.at_depth(level)
            assert one.depths == [explanation.depths[d]]
            assert np.array_equal(one.values[:, 0], explanation.values[:, d])
            assert np.array_equal(one.phi[:, 0], explanation.phi[:, d])
            total = one.values.sum((0, 1), dtype=np.float64) + one.base_values
            assert np.allclose(total, explanation.scores, atol=1e-4)
        with pytest.raises(ValueError, match=r"level must be one of \[0, 3, 12, 'embeddings', .*got 1$"):
            explanation.at_depth(1)

    def test_what_special_tokens_gave_is_in_the_base(self):
        explanation = explain(TEXT)
        plain = explanation.skip_special_tokens()
        given_by_special = explanation.values[explanation.special].sum((0, 1))
        assert given_by_special.any()
        assert np.allclose(plain.base_values, explanation.base_values + given_by_special, atol=1e-5)
        assert len(plain) == (~explanation.special).sum()
        assert plain.pieces == [piece for piece in explanation.pieces if piece.startswith("##")]

    def test_what_cannot_be_aggregated(self):
        with pytest.raises(ValueError, match=r"unit must be one of 'token', .* got 'letters'"):
            explain(TEXT).aggregate("letters")
        parts = explain(TEXT).aggregate("word")
        assert parts.aggregate("word") is parts
        with pytest.raises(ValueError, match="needs the explanation of tokens, this is one of words"):
            parts.aggregate("sentence")

    def test_top(self):
        explanation = explain(TEXT).aggregate("word")
        totals = explanation.values[..., 0].sum(1, dtype=np.float64)
        found = explanation.top(3, output="bad")
        assert [abs(part.value) for part in found] == sorted(abs(totals), reverse=True)[:3]
        for part in found:
            row = totals.tolist().index(part.value)
            assert explanation.offsets[row].tolist() == [part.start, part.end]
            assert explanation.pieces[row] == part.piece
        assert len(explanation.top(1000)) == len(explanation)
        with pytest.raises(ValueError, match="k must be a positive int, got 0"):
            explanation.top(0)

    def test_top_is_of_the_highest_score(self):
        explanation = explain("ab cd", scores=[5, 1])
        assert explanation.top(2) == explanation.top(2, output="bad") != explanation.top(2, output="good")


NEW_FIELDS = {
    "of": "words",
    "phi": None,
    "temperature": 2.5,
    "multi_label": True,
    "not_explained": [0.25, -0.5],
    "about": {"model": "x", "date": "2026-01-31"},
}


class TestProbabilities:
    def test_all_classes(self):
        explanation = explain("ab cd", names=("a", "b", "c"), scores=[2, 0, 1], temperature=2.0)
        expected = torch.tensor([1.0, 0.0, 0.5]).softmax(0)
        assert explanation.probabilities.tolist() == pytest.approx(expected.tolist())
        assert explanation[["b", "a"]].probabilities.tolist() == pytest.approx(expected[[1, 0]].tolist())
        margin = explanation.margin("a", "b")
        assert margin.probabilities.tolist() == pytest.approx([torch.tensor(1.0).sigmoid().item()])

    def test_two_classes(self):
        explanation = explain("ab cd", scores=[-1, 2], temperature=4.0)
        margin = explanation.margin()
        assert margin.output_names == ["good - bad"]
        assert margin.probabilities[0] == pytest.approx(explanation.probabilities[1])
        assert margin.probabilities[0] == pytest.approx(1 / (1 + np.exp(-3 / 4)))

    def test_labels_that_do_not_exclude_one_another(self):
        explanation = explain("ab cd", scores=[1000, -2], temperature=2.0, multi_label=True)
        assert explanation.probabilities.tolist() == pytest.approx([1, 1 / (1 + np.e)])

    def test_some_classes(self):
        explanation = explain("ab cd", probabilities=[0.1, 0.2])
        assert explanation["good"].aggregate("word").probabilities.tolist() == pytest.approx([0.2])

    def test_one_score_alone(self):
        assert np.isnan(explain("ab cd", names=("one",)).probabilities).all()

    @pytest.mark.parametrize("temperature", [0, -1.0, np.nan, np.inf])
    def test_the_temperature_is_positive(self, temperature):
        with pytest.raises(ValueError, match="temperature must be a positive number, got"):
            explain("ab", temperature=temperature)


class TestWords:
    def test_what_is_not_explained_counts_for_completeness(self):
        explanation = explain(TEXT)
        rest = np.array([1, -2])
        missing = explanation._replace(
            scores=explanation.scores + rest, not_explained=rest, of="words", phi=None
        )
        assert missing.completeness_error < 1e-6
        for changed in (missing["bad"], missing.margin(), missing.aggregate("word"), missing.at_depth(0)):
            assert changed.completeness_error < 1e-6
            assert changed.not_explained.any()
        assert missing._replace(not_explained=None).completeness_error > 1e-3
        with pytest.raises(ValueError, match=r"not_explained must be \[n_cls=2\], got \[1\]"):
            explain(TEXT, not_explained=[0])

    @pytest.mark.parametrize(
        "change",
        [
            lambda e: e["bad"],
            lambda e: e.margin(),
            lambda e: e.aggregate("word"),
            lambda e: e.aggregate("depth"),
            lambda e: e.sum_depth(),
            lambda e: e.at_depth(0),
            lambda e: e.skip_special_tokens(),
        ],
    )
    def test_every_change_keeps_where_it_comes_from(self, change):
        changed = change(explain(TEXT, **NEW_FIELDS))
        for name in ("of", "phi", "temperature", "multi_label"):
            assert getattr(changed, name) == NEW_FIELDS[name]
        about = {name: value for name, value in changed.about.items() if name != "margin"}
        assert about == NEW_FIELDS["about"]  # a margin adds its classes

    def test_there_may_be_no_credit(self):
        explanation = explain(TEXT, **NEW_FIELDS)
        assert "phi" not in explanation.to_dataframe().columns
        with pytest.raises(ValueError, match=r"of='phi' needs credit: explain a head of routings"):
            explanation.plot(of="phi")
        with pytest.raises(ValueError, match="of must be one of 'words', 'states', got 'letters'"):
            explain(TEXT, of="letters")


class TestSegments:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", []),
            (" \n\t ", []),
            ("don't stop", ["don't", "stop"]),
            ("well-made (3.5)!", ["well", "-", "made", "(", "3.5", ")", "!"]),
            ("e\u0301te\u0301 nai\u0308ve", ["e\u0301te\u0301", "nai\u0308ve"]),
            ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
            ("👨‍👩‍👧 👍🏽👍🏽 🇩🇪🇫🇷", ["👨‍👩‍👧", "👍🏽", "👍🏽", "🇩🇪", "🇫🇷"]),
            ("我喜欢", ["我", "喜", "欢"]),
            ("שלום, עולם", ["שלום", ",", "עולם"]),
            ("<b>x</b>", ["<", "b", ">", "x", "<", "/", "b", ">"]),
            ("zero\u200bwidth", ["zero", "width"]),
            ("a\x00b\x1b", ["a", "b"]),
        ],
    )
    def test_words(self, text, expected):
        assert [text[start:end] for start, end in words(text)] == expected

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", []),
            ("  no end ", ["no end"]),
            ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
            ("He said “stop.” Then left.", ["He said “stop.”", "Then left."]),
            ("Dr. No met J. Bond, e.g. there.", ["Dr. No met J. Bond, e.g. there."]),
            ("It costs 3.50 or so... maybe not. x", ["It costs 3.50 or so... maybe not. x"]),
            ("a movie . it is split .", ["a movie .", "it is split ."]),
            ("mr . deeds goes .", ["mr . deeds goes ."]),
            ("A title\n\nand a line\nthat goes on", ["A title", "and a line\nthat goes on"]),
            ("很好。不错！是吗？", ["很好。", "不错！", "是吗？"]),
            ("...", ["..."]),
        ],
    )
    def test_sentences(self, text, expected):
        assert [text[start:end] for start, end in sentences(text)] == expected

    @given(st.text(), st.sampled_from([words, sentences]))
    def test_every_visible_character_is_in_one_part(self, text, split):
        count = [0] * len(text)
        spans = split(text)
        assert spans == sorted(spans)
        for start, end in spans:
            assert start < end
            for k in range(start, end):
                count[k] += 1
        assert all(count[k] == 1 for k in range(len(text)) if VISIBLE.match(text[k]))
        assert max(count, default=0) <= 1

    @pytest.mark.parametrize(
        "pattern", [".", "\n", ". ", '."', " \n", "?!… ", "。", "'", "\u0301", "a", "1.", "\u200d"]
    )
    def test_long_runs(self, pattern):
        # This would take minutes if the search tried anything twice.
        text = pattern * 50_000
        for split in (words, sentences):
            spans = split(text)
            assert not spans or spans[-1][1] <= len(text)

    @pytest.mark.parametrize(
        ("token", "part"),
        [
            ((0, 2), 0),
            ((2, 4), 0),  # between two: the first of equals
            ((2, 6), 1),  # most of it in the second
            ((3, 3), 1),  # no characters
            ((6, 7), 2),  # a space: the next part
            ((10, 12), 2),  # after the end: the last part
            ((4, 12), 1),  # the same number in the last part
        ],
    )
    def test_the_part_of_a_token(self, token, part):
        assert locate([token], [(0, 3), (3, 6), (8, 10)]) == [part]

    def test_no_parts(self):
        assert locate([(0, 1), (0, 0)], []) == [-1, -1]


class TestFiles:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_save_and_load(self, name, tmp_path):
        saved = explain(HOSTILE[name], names=("<b>", '"é\n'), depths=["a", 1, 2]).aggregate("word")
        saved.save(tmp_path / "x.safetensors")
        loaded = vr.Explanation.load(tmp_path / "x.safetensors")
        self.check_equal(saved, loaded)

    def check_equal(self, saved, loaded):
        for field, value in vars(saved).items():
            found = getattr(loaded, field)
            if field in ARRAYS and value is not None:
                assert found.dtype == value.dtype
                found, value = found.tolist(), value.tolist()
            assert found == value, field

    def test_every_field_is_saved(self, tmp_path):
        saved = explain(TEXT, **NEW_FIELDS)
        saved.save(tmp_path / "x.safetensors")
        self.check_equal(saved, vr.Explanation.load(tmp_path / "x.safetensors"))

    def test_old_files_load_as_explanations_of_states(self, tmp_path):
        from vecroute.storage import save_tensors

        fields = vars(explain(TEXT))
        old = [name for name in ARRAYS if name not in ("probabilities", "not_explained")]
        about = {name: fields[name] for name in ("output_names", "text", "pieces", "depths", "unit")}
        tensors = {name: torch.from_numpy(fields[name]) for name in old}
        save_tensors(tmp_path / "x.safetensors", tensors, {"kind": "explanation", **about})
        loaded = vr.Explanation.load(tmp_path / "x.safetensors")
        assert (loaded.of, loaded.temperature, loaded.about) == ("states", 1.0, {})
        assert not loaded.not_explained.any()
        assert np.isnan(loaded.probabilities).all()  # the file does not say whether these are all classes
        assert (loaded.values == fields["values"]).all()

    def test_the_file_is_compact(self, tmp_path):
        explanation = explain("word " * 1000, depth=7)
        explanation.save(tmp_path / "x.safetensors")
        arrays = sum(getattr(explanation, name).nbytes for name in ARRAYS)
        strings = len(explanation.text) + sum(len(piece) + 8 for piece in explanation.pieces)
        assert (tmp_path / "x.safetensors").stat().st_size <= arrays + strings + 2000
        assert explanation.offsets.dtype == explanation.chunk.dtype == np.int32

    def test_other_files(self, tmp_path):
        path = tmp_path / "x.safetensors"
        vr.Credit(torch.ones(2, 2)).save(path)
        with pytest.raises(ValueError, match=r"path must be a file of explanation, .* holds credit"):
            vr.Explanation.load(path)
        path.write_bytes(b"not a file of tensors")
        with pytest.raises(ValueError, match="is no safetensors file"):
            vr.Explanation.load(path)

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "x.safetensors"
        explain("ab cd").save(path)
        before = path.read_bytes()

        def full(*_):
            raise OSError("no space left")

        monkeypatch.setattr("os.replace", full)
        for write in ("save", "to_html", "to_png"):
            with pytest.raises(OSError, match="no space left"):
                getattr(explain("other text"), write)(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


class TestOtherTools:
    def test_data_frame(self):
        explanation = explain(TEXT).aggregate("word")
        frame = explanation.to_dataframe()
        columns = "word start end special chunk level output contribution phi"
        assert list(frame.columns) == columns.split()
        assert len(frame) == explanation.values.size
        sums = frame.groupby("output").contribution.sum()
        for name, base, score in zip(
            explanation.output_names, explanation.base_values, explanation.scores, strict=True
        ):
            assert sums[name] + base == pytest.approx(score, abs=1e-4)
        row = frame[(frame.word == "witty") & (frame.level == "layer 2") & (frame.output == "good")]
        i = explanation.pieces.index("witty")
        assert row.contribution.tolist() == [explanation.values[i, 2, 1]]
        assert row.phi.tolist() == [explanation.phi[i, 2, 1]]
        assert TEXT[row.start.item() : row.end.item()] == "witty"

    @pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # shap's own, when it is imported
    def test_shap(self):
        import shap

        explanation = explain(TEXT).aggregate("word", skip_special_tokens=True)
        both = explanation.to_shap()
        assert isinstance(both, shap.Explanation)
        assert "".join(both.data) == TEXT
        assert both.values.shape == (len(explanation), 2)
        assert np.allclose(both.values.sum(0) + both.base_values, explanation.scores, atol=1e-5)
        one = explanation["good"].to_shap()
        assert one.values.sum() + one.base_values == pytest.approx(explanation.scores[1], abs=1e-5)
        for drawn in (both, one):
            html = shap.plots.text(drawn, display=False)
            assert "gorgeous" in html
            assert "good" in html

    @pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
    def test_shap_of_special_tokens(self):
        data = explain("ab cd").to_shap().data.tolist()
        assert data == ["[CLS]", "ab ", "cd", "[SEP]"]

    def test_captum(self):
        explanation = explain(TEXT, scores=[100, 0])
        attributions, delta = explanation.to_captum("good")
        assert attributions.shape == (1, len(explanation), 3)
        assert (attributions[0].numpy() == explanation.values[..., 1]).all()
        expected = explanation.values[..., 1].sum() + explanation.base_values[1] - explanation.scores[1]
        assert delta.tolist() == pytest.approx([expected], abs=1e-4)
        assert (explanation.to_captum()[0] == explanation.to_captum("bad")[0]).all()


class TestMissingPackages:
    @pytest.mark.parametrize(
        ("package", "extra", "use"),
        [
            ("pandas", "data", lambda e, path: e.to_dataframe()),
            ("shap", "eval", lambda e, path: e.to_shap()),
            ("safetensors", "data", lambda e, path: e.save(path)),
            ("jinja2", "report", lambda e, path: e.to_html(path)),
            ("matplotlib", "plot", lambda e, path: e.plot()),
            ("matplotlib", "plot", lambda e, path: e.to_png(path)),
            ("rich", "cli", lambda e, path: e.to_rich()),
        ],
    )
    def test_the_error_names_the_extra(self, package, extra, use, monkeypatch, tmp_path):
        from vecroute.explain import html

        html.environment.cache_clear()
        explanation = explain("ab cd")
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"needs {package}: pip install 'vecroute\[{extra}\]'"):
            use(explanation, tmp_path / "x")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("package", ["regex", "numpy"])
    def test_the_name_itself(self, package, monkeypatch):
        for name in [name for name in sys.modules if name.startswith("vecroute.explain")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=rf"needs {package}: pip install 'vecroute\[data\]'"):
            _ = vr.Explanation

    def test_a_name_that_is_none(self):
        with pytest.raises(AttributeError, match="module 'vecroute' has no attribute 'Explanations'"):
            _ = vr.Explanations


def test_the_guide_prints_what_it_says(capsys):
    printed, expected = run((ROOT / "docs/explanations.md").read_text(), capsys)
    assert len(expected) >= 10
    assert printed == expected
