"""The display of an explanation: numbers that add up, text that stays text, self-contained pages."""

import io
import re
from decimal import Decimal

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.helpers.explanations import HOSTILE, explain
from tests.helpers.pages import Parser, numbers_of
from vecroute.explain.html import fragment, page
from vecroute.explain.shown import Shown, caption, pieces, shown, visible
from vecroute.explain.told import MEANING, Question, asked, chance, decided, predicted

TEXT = "A gorgeous, witty movie. Mr. Smith doesn't convince (3.5 of 10)! Unconvincingly so."


class TestNumbers:
    @given(st.lists(st.floats(-1e6, 1e6, width=32), max_size=40), st.floats(-1e3, 1e3, width=32))
    def test_what_is_shown_adds_up(self, values, base):
        explanation = rows_of(values, base)
        numbers = shown(explanation)
        assert sum(numbers.values) + numbers.base + numbers.rest == numbers.score
        written = [
            Decimal(numbers.number(value, "+")) for value in [*numbers.values, numbers.base, numbers.rest]
        ]
        assert sum(written) == Decimal(numbers.number(numbers.score))
        unit = 10.0**-numbers.decimals
        for value, whole in zip(explanation.totals(), numbers.values, strict=True):
            assert abs(value - whole * unit) <= unit * 1.001
        for value, whole in ((explanation.base_values, numbers.base), (explanation.scores, numbers.score)):
            assert abs(value[0] - whole * unit) <= unit * 0.501

    def test_rounding_alone_would_not_add_up(self):
        explanation = rows_of([0.3334] * 3, 0.0)
        numbers = shown(explanation)
        assert sorted(numbers.values) == [333, 333, 334]
        assert numbers.number(numbers.score) == "1.000"

    def test_the_fewest_and_the_nearest_are_moved(self):
        # Rounded, they add up to 0.4 + 0.1 = 0.5, one less than the score of 0.6.
        numbers = shown(rows_of([0.412, 0.014, 0.144], 0.0), decimals=1)
        assert numbers.values == [4, 0, 2]
        assert (numbers.base, numbers.rest, numbers.score) == (0, 0, 6)

    @pytest.mark.parametrize(
        ("value", "decimals", "sign", "expected"),
        [
            (0, 3, "+", "0.000"),
            (5, 3, "+", "+0.005"),
            (5, 3, "-", "0.005"),
            (-5, 3, "-", "-0.005"),
            (-12345, 3, "+", "-12.345"),
            (12, 0, "+", "+12"),
        ],
    )
    def test_how_numbers_are_written(self, value, decimals, sign, expected):
        assert Shown([], 0, 0, 0, decimals).number(value, sign) == expected

    @pytest.mark.parametrize(
        ("largest", "decimals"),
        [(0.0, 3), (1.0, 2), (9.99, 2), (0.5, 3), (0.0042, 5), (1234.0, 2), (1e-30, 12)],
    )
    def test_decimals(self, largest, decimals):
        assert shown(rows_of([largest, -largest / 2], 0.0)).decimals == decimals

    def test_what_is_not_explained_is_said(self):
        numbers = shown(rows_of([1.0, 1.0], 0.5, score=3.0))
        assert numbers.rest == 50
        assert sum(numbers.values) + numbers.base + numbers.rest == numbers.score == 300

    def test_numbers_too_large_for_their_decimals(self):
        numbers = shown(rows_of([3e37, -1e37, 1.5], 1e20))
        assert sum(numbers.values) + numbers.base + numbers.rest == numbers.score
        assert abs(numbers.rest) <= 1e-6 * abs(numbers.score)

    def test_no_rows(self):
        numbers = shown(rows_of([], 0.4, score=1.4))
        assert (numbers.values, numbers.base, numbers.rest, numbers.score) == ([], 40, 100, 140)


def rows_of(values, base, score=None):
    """An explanation with these contributions to one score."""
    array = np.array(values, dtype=np.float32).reshape(-1, 1, 1)
    score = float(array.sum(dtype=np.float64)) + float(np.float32(base)) if score is None else score
    text = "x" * len(values)
    offsets = [(i, i + 1) for i in range(len(values))]
    arrays = {"values": array, "phi": array, "base_values": [base], "scores": [score], "offsets": offsets}
    return explain(text, names=("one",), pieces=list(text), special=None, chunk=None, **arrays)


class TestText:
    @pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
    @pytest.mark.parametrize("unit", ["token", "word", "sentence", "chunk"])
    def test_pieces_are_the_whole_text(self, text, unit):
        rows = explain(text).aggregate(unit)
        found = list(pieces(rows))
        assert "".join(piece for piece, _ in found) == text
        members = [i for _, some in found for i in some]
        assert sorted(members) == [i for i, (start, end) in enumerate(rows.offsets) if start < end]

    def test_tokens_that_share_characters_share_a_piece(self):
        emoji = explain("a😀b", offsets=[(0, 0), (0, 1), (1, 2), (1, 2), (2, 3)], **five_rows())
        assert list(pieces(emoji)) == [("a", [1]), ("😀", [2, 3]), ("b", [4])]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a\tb\nc", "a\tb\nc"),
            ("a\r\nb\rc", "a\nb\\x0dc"),
            ("\x00\x1b[31m\x9b", "\\x00\\x1b[31m\\x9b"),
            ("\ud83d", "\\xd83d"),
            ("é\u200b😀", "é\u200b😀"),
        ],
    )
    def test_nothing_is_hidden(self, text, expected):
        assert visible(text) == expected

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("word", "word"),
            (" two\n\nlines ", "two lines"),
            ("", "(nothing)"),
            ("\u200b", "U+200B"),
            (" ", "U+0020"),
            ("a" * 50, "a" * 39 + "…"),
            ("\x07bell", "\\x07bell"),
        ],
    )
    def test_captions(self, text, expected):
        assert caption(text) == expected


def five_rows():
    """The arguments of an explanation of five tokens, except its offsets."""
    arrays = {
        "values": np.ones((5, 2, 2)),
        "phi": np.ones((5, 2, 2)),
        "base_values": [0, 0],
        "scores": [10, 10],
    }
    return {**arrays, "pieces": ["p"] * 5, "special": [True] + [False] * 4, "chunk": None}


class TestHtml:
    @pytest.mark.parametrize("name", HOSTILE)
    @pytest.mark.parametrize("unit", ["token", "word"])
    def test_hostile_texts_are_text(self, name, unit, tmp_path):
        text = HOSTILE[name]
        explain(text, names=("<b>bad</b>", "good\" onclick='x'", text or "other")).to_html(
            tmp_path / "x.html", unit=unit
        )
        html = Parser((tmp_path / "x.html").read_text(encoding="utf-8"))
        harmless = "html head meta title style body main div fieldset legend label input span section p b bdi"
        tables = (
            "h1 h2 h3 dl dt dd table caption thead tbody tfoot tr th td details summary svg path rect text"
        )
        assert {element.name for element in html.every} <= {*harmless.split(), *tables.split()}
        for element in html.every:
            assert not any(key.startswith("on") or key in ("src", "href") for key in element.attributes)
        shown_texts = [p.text for p in html.root.all("p", **{"class": "text"})]
        assert shown_texts == [visible(text)] * 4 if text else shown_texts == []  # the margin too
        assert "Why <b>bad</b>?" in next(html.root.all("fieldset")).text

    @pytest.mark.parametrize("unit", ["token", "word", "sentence", "chunk", "depth"])
    @pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
    def test_the_numbers_on_the_page_add_up(self, unit, scale):
        explanation = explain(TEXT * 3, names=("a", "b", "c"), scale=scale)
        html = Parser(page(explanation, unit))
        sections = list(html.root.all("section"))
        # The margin first, then the classes from the highest score down.
        names = [explanation.output_names[j] for j in np.argsort(-explanation.scores)]
        explained = [explanation.margin(), *(explanation[name] for name in names)]
        titles = [next(section.all("h2")).text.partition(" Score: ")[0] for section in sections]
        assert titles == [f"Why {names[0]} rather than {names[1]}?", *(f"Why {name}?" for name in names)]
        for one, section in zip(explained, sections, strict=True):
            (title,) = section.all("h2")
            score = Decimal(title.text.rpartition(": ")[2])
            unit_shown = 10.0 ** score.as_tuple().exponent
            assert float(score) == pytest.approx(one.scores[0], abs=0.51 * unit_shown)
            *tables, everything = section.all("table")
            assert len(tables) == 1 + (unit != "depth")
            for table in tables:
                *lines, foot = numbers_of(table)
                assert sum(lines) == foot == score
            (account,) = section.all("table", **{"class": "account"})
            base = numbers_of(account)[-2]
            assert float(base) == pytest.approx(one.base_values[0], abs=0.51 * unit_shown)
            assert sum(numbers_of(everything)) + base == score

    def test_the_numbers_in_the_text_add_up(self):
        html = Parser(page(explain(TEXT).aggregate("word")))
        for section in html.root.all("section"):
            titles = [
                Decimal(span.attributes["title"])
                for span in section.all("span")
                if "title" in span.attributes
            ]
            table = next(section.all("table", **{"class": "account"}))
            labels = [row.text for row in table.all("th", scope="row")]
            numbers = dict(zip(labels, numbers_of(table), strict=True))
            assert sum(titles) + numbers["base"] + numbers["special tokens"] == numbers["score"]

    def test_marks_do_not_rest_on_colour(self):
        section = next(Parser(page(explain(TEXT))).root.all("section"))
        spans = [span for span in section.all("span") if "title" in span.attributes]
        for span in spans:
            value, kind = Decimal(span.attributes["title"]), span.attributes.get("class", "")
            assert not kind or (value > 0) == (kind[0] == "p")
        marked = [span for span in spans if "data-n" in span.attributes]
        assert len(marked) == 8
        assert all(span.attributes["data-n"] == span.attributes["title"] for span in marked)
        least = min(abs(Decimal(span.attributes["title"])) for span in marked)
        assert all(abs(Decimal(span.attributes["title"])) <= least for span in spans if span not in marked)
        style = page(explain(TEXT))
        assert "2px solid" in style
        assert "2px dashed" in style

    def test_what_is_not_explained_has_a_line(self):
        html = page(explain(TEXT, scores=[100, 50]))
        for section in Parser(html).root.all("section"):
            for table in list(section.all("table"))[:2]:
                assert "not explained" in [row.text for row in table.all("th", scope="row")]
                *lines, score = numbers_of(table)
                assert sum(lines) == score

    def test_the_page_needs_nothing_but_itself(self):
        html = page(explain(TEXT))
        assert not re.search(
            r"https?:|//|@import|url\(|<script|<link|<iframe", html.replace("<!doctype html>", "")
        )
        policy = next(Parser(html).root.all("meta", **{"http-equiv": "Content-Security-Policy"}))
        assert policy.attributes["content"] == "default-src 'none'; style-src 'unsafe-inline'"
        assert html == page(explain(TEXT))

    def test_what_a_screen_reader_needs(self):
        html = Parser(page(explain(TEXT)))
        assert next(html.root.all("html")).attributes["lang"] == "en"
        for svg in html.root.all("svg"):
            assert svg.attributes.get("aria-hidden") == "true" or svg.attributes["aria-label"]
        for choice in html.root.all("input"):
            assert choice.parent.name == "label"
            assert choice.attributes["type"] == "radio"
        assert [choice for choice in html.root.all("input") if "checked" in choice.attributes] == [
            next(html.root.all("input"))
        ]
        assert all(head.attributes["scope"] in ("row", "col") for head in html.root.all("th"))
        ids = [element.attributes["id"] for element in html.every if "id" in element.attributes]
        assert len(ids) == len(set(ids))
        assert next(html.root.all("p", **{"class": "text"})).attributes["dir"] == "auto"

    def test_the_choice_of_classes_has_a_rule_each(self):
        html = page(explain(TEXT, names=("a", "b", "c", "d")), outputs=["d", "a"])
        parsed = Parser(html)
        assert [h2.text.partition("?")[0] for h2 in parsed.root.all("h2")] == ["Why d", "Why a"]
        assert "2 of 4 classes" in html
        for number in (1, 2):
            rule = f"#v0:has(#v0-{number}:not(:checked)) #v0-panel-{number} {{ display: none; }}"
            assert rule in html
            assert list(parsed.root.all("input", id=f"v0-{number}"))
            assert list(parsed.root.all("section", id=f"v0-panel-{number}"))
        with pytest.raises(ValueError, match="output must be one of 'bad', 'good', got 'x'"):
            page(explain(TEXT), outputs=["x"])

    def test_one_class_has_no_choice(self):
        assert "<input" not in page(explain(TEXT)["good"])

    def test_the_direction_of_the_letters_of_marked_words(self):
        html = Parser(page(explain("שלום hello !", names=("one",))))
        runs = {span.text: span.attributes.get("data-runs") for span in html.root.all("span")}
        assert (runs["שלום"], runs["hello"], runs["!"]) == ("rtl", "ltr", "none")

    def test_a_long_document(self):
        text = "Seven words stand in this long sentence. " * 290
        explanation = explain(text, depth=7, names="abcd", chunk_size=100)
        assert len(explanation.aggregate("word", skip_special_tokens=True)) > 2000
        html = page(explanation)
        assert len(html.encode()) < 2_000_000
        # Too many words and sentences for a map.
        maps = Parser(html).root.all("div", **{"class": "maps"})
        assert [one.attributes["aria-label"].partition(":")[0] for one in maps] == [
            "Map of depths and chunks"
        ] * 4

    @pytest.mark.slow
    def test_20000_words_make_a_page_of_3_megabytes(self):
        text = "Seven words stand in this long sentence, and with numbers it is longer. " * 1430
        explanation = explain(text, depth=7, names="abcd", chunk_size=400)
        words = explanation.aggregate("word", skip_special_tokens=True)
        assert len(words) > 20_000
        html = page(explanation, states=explanation)
        assert len(html.encode()) < 3_000_000
        for section in Parser(html).root.all("section"):
            first, whole = section.all("p", **{"class": "text"})
            assert len(first.text) < 5_000
            assert whole.text == text
            assert whole.parent.name == "details"
            (title,) = section.all("h2")
            everything = list(section.all("table"))[-1]
            (account,) = section.all("table", **{"class": "account"})
            base = numbers_of(account)[-2]
            assert sum(numbers_of(everything)) + base == Decimal(title.text.rpartition(": ")[2])
        # An explanation of words cannot be grouped by sentences, so the account lists all words.
        assert len(page(explanation.aggregate("word").sum_depth()).encode()) < 3_000_000

    def test_the_header(self):
        about = {"model": "<b>m</b>", "date": "2026-01-31"}
        explanation = explain(TEXT, scores=[-1, 2], temperature=2.0, of="words", about=about)
        root = Parser(page(explanation)).root
        (title,) = root.all("h1")
        assert title.text == "Predicted: good, 81.8\N{NO-BREAK SPACE}%"
        facts = dict(zip(root.all("dt"), root.all("dd"), strict=True))
        assert {name.text: told.text for name, told in facts.items()} == {
            "Text": TEXT,
            "Model": "<b>m</b>",
            "Date": "2026-01-31",
        }
        assert next(root.all("p", **{"class": "meaning"})).text.startswith(
            MEANING["words"].format(unit="word")
        )
        told = [next(section.all("p", **{"class": "note"})).text for section in root.all("section")]
        softmax = "= e^(score / T) / sum of e^(score / T) over all classes, with T = 2"
        assert [line.replace("\N{NO-BREAK SPACE}", " ") for line in told] == [
            "Probability of good: 81.8 % = 1 / (1 + e^(-score / T)), with T = 2",
            f"Probability of good: 81.8 % {softmax}",
            f"Probability of bad: 18.2 % {softmax}",
        ]

    def test_what_is_predicted_is_said_only_if_it_is_known(self):
        assert predicted(explain(TEXT, probabilities=[0.1, 0.3], scores=[0, 1])).startswith("Explained: good")
        assert predicted(explain(TEXT, probabilities=[0.1, 0.5], scores=[0, 1])).startswith("Predicted: good")
        assert predicted(explain(TEXT, probabilities=[np.nan] * 2, scores=[0, 1])) == "Highest score: good"
        several = explain(TEXT, scores=[1, 2], multi_label=True)
        assert predicted(several).startswith("Predicted: bad, 73.1")
        assert (
            predicted(several._replace(scores=[-1, -2], probabilities=None))
            == "Predicted: none of these labels"
        )
        # With multi_label, there is no margin between labels.
        titles = [h2.text.partition("?")[0] for h2 in Parser(page(several)).root.all("h2")]
        assert titles == ["Why good", "Why bad"]

    def test_a_margin_is_told_as_one(self):
        explanation = explain(TEXT, scores=[-1, 2], temperature=2.0)
        margin = explanation.margin()
        told = chance(margin, decided(margin))
        assert told == chance(explanation, decided(explanation))
        assert told["formula"] == "1 / (1 + e^(-score / T))"
        assert predicted(margin) == "Explained: good rather than bad, 81.8\N{NO-BREAK SPACE}%"
        titles = [h2.text.partition(" Score")[0] for h2 in Parser(page(margin)).root.all("h2")]
        assert titles == ["Why good rather than bad?"]
        assert asked(margin.aggregate("word"), decided(margin)).scores == margin.scores
        # The value in a file is not trusted.
        for about in ({"margin": "ab"}, {"margin": ["a"]}, {"margin": ["good", "bad"]}):
            assert decided(explanation._replace(about=about)) == Question("good", "bad")

    def test_names_that_run_from_right_to_left(self):
        assert Question("good", "טוב").title == "Why good rather than \u2068טוב\u2069?"

    def test_states_are_the_second_view(self):
        words = explain(TEXT, of="words", depth=1, depths=["all depths"], phi=None)
        states = explain(TEXT, depth=3, seed=5, scores=words.scores)
        alone, both = (Parser(page(words, states=second)).root for second in (None, states))
        assert not list(alone.all("div", **{"class": "maps"}))
        assert [h3.text for h3 in both.all("h3")] == ["Second view: inner states, depth by depth"] * 3
        for question, section in zip((None, "good", "bad"), both.all("section"), strict=True):
            by_depth, account, _ = section.all("table")
            one = words.aggregate("word").margin() if question is None else words.aggregate("word")[question]
            second = states.margin() if question is None else states[question]
            unit = Decimal(1).scaleb(numbers_of(account)[0].as_tuple().exponent)
            strongest = max(one.totals(), key=abs)
            assert abs(float(numbers_of(account)[0]) - strongest) <= unit
            found = numbers_of(by_depth)[:3]
            assert np.allclose(
                [float(n) for n in found], second.aggregate("depth").totals(), atol=float(unit)
            )

    def test_the_map(self):
        explanation = explain("ab cd", names=("one",), depth=2)
        values = np.zeros((4, 2, 1))
        values[1, 0], values[2, 1] = 9, -3
        (section,) = Parser(page(explain("ab cd", names=("one",), depth=2, values=values))).root.all(
            "section"
        )
        (svg,) = section.all("svg", **{"class": "map"})
        # Deepest first: cd lowers the score at layer 1, in the upper row, ab raises it at the bottom.
        paths = {path.attributes["class"]: path.attributes["d"] for path in svg.all("path")}
        assert paths == {"p9": "M0 14h19v13h-19z", "n3": "M20 0h19v13h-19z", "dash": "M26 6.5h7"}
        assert [label.text for label in svg.all("text")] == ["layer 1", "embeddings", "ab", "cd"]
        assert not list(Parser(page(explanation.sum_depth())).root.all("svg", **{"class": "map"}))

    def test_notebooks(self):
        explanation = explain(TEXT)
        first, second = Parser(explanation._repr_html_()), Parser(explanation._repr_html_())
        assert first.every[0].name == "div"
        assert first.every[0].attributes["id"] != second.every[0].attributes["id"]
        assert "<html" not in fragment(explanation)
        # Its rules are for its own elements alone.
        rules = re.sub(r"@[^{]+{", "", next(first.root.all("style")).text)
        for selector in re.findall(r"^\s*([^{}@]+?)\s*{", rules, re.MULTILINE):
            assert all(part.strip().startswith((".vecroute", "#v")) for part in selector.split(",")), selector

    def test_a_file_has_the_rights_of_any_file(self, tmp_path):
        explain(TEXT).to_html(tmp_path / "x.html")
        assert explain(TEXT).to_html() == (tmp_path / "x.html").read_text()
        (tmp_path / "y").touch()
        assert (tmp_path / "x.html").stat().st_mode == (tmp_path / "y").stat().st_mode


class TestPlots:
    @pytest.fixture(autouse=True)
    def close(self):
        yield
        plt.close("all")

    def test_the_map(self):
        explanation = explain(TEXT)
        fig, ax = explanation.plot(output="bad")
        assert ax.figure is fig
        plain = explanation.skip_special_tokens()
        (image,) = ax.images
        assert (image.get_array() == plain.values[..., 0].T).all()
        assert image.origin == "lower"
        assert [tick.get_text() for tick in ax.get_xticklabels()] == [
            plain.text[start:end] for start, end in plain.offsets
        ]
        assert [tick.get_text() for tick in ax.get_yticklabels()] == explanation.depth_names
        low, high = image.get_clim()
        assert -low == high == abs(image.get_array()).max()

    def test_the_map_of_credit(self):
        explanation = explain(TEXT)
        _, ax = explanation.plot(output="good", of="phi")
        assert (ax.images[0].get_array() == explanation.skip_special_tokens().phi[..., 1].T).all()
        assert "credit" in ax.get_title()

    def test_bars_add_up(self):
        explanation = explain(TEXT).aggregate("word")
        fig, ax = explanation.plot("bars", output="good", k=5)
        fig.canvas.draw()
        labels = [Decimal(text.get_text()) for text in ax.texts]
        assert len(labels) == len(ax.patches) == 5 + 3
        assert sum(labels) == Decimal(ax.get_title().rpartition("= ")[2])
        for label, rectangle in zip(labels, ax.patches, strict=True):
            assert rectangle.get_width() == pytest.approx(float(label))
            assert bool(rectangle.get_hatch()) == (label < 0)
        assert [tick.get_text() for tick in ax.get_yticklabels()][-3:] == [
            f"{(~explanation.special).sum() - 5} other words",
            "special tokens",
            "base",
        ]

    def test_axes_that_are_given(self):
        fig, (left, right) = plt.subplots(1, 2)
        assert explain(TEXT).plot(ax=left) == (fig, left)
        assert explain(TEXT).plot("bars", ax=right) == (fig, right)

    @pytest.mark.parametrize("kind", ["map", "bars"])
    def test_text_is_no_mathematics(self, kind):
        explanation = explain(r"$\frac $x_1$ \alpha 100$", names=(r"$\bad$",))
        fig, ax = explanation.plot(kind)
        fig.canvas.draw()  # raises where $\frac is read as a formula
        assert any("$" in text.get_text() for text in ax.findobj(plt.Text))

    @pytest.mark.parametrize("kind", ["map", "bars"])
    @pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
    @pytest.mark.filterwarnings("ignore:Glyph .* missing from font:UserWarning")
    @pytest.mark.filterwarnings("ignore:Matplotlib currently does not support:UserWarning")
    def test_hostile_texts(self, text, kind, tmp_path):
        explain(text[:30]).to_png(tmp_path / "x.png", kind, dpi=20)
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
        assert plt.get_fignums() == []

    def test_errors(self):
        with pytest.raises(ValueError, match="kind must be one of 'map', 'bars', got 'pie'"):
            explain(TEXT).plot("pie")
        with pytest.raises(ValueError, match="of must be one of 'values', 'phi', got 'credit'"):
            explain(TEXT).plot(of="credit")
        with pytest.raises(ValueError, match="plot needs at least one row"):
            explain("").skip_special_tokens().plot()


ACCOUNT = 7  # lines before the account: what was predicted, why, what the numbers mean, and the text


class TestTerminal:
    def printed(self, explanation, **options):
        stream = io.StringIO()
        Console(file=stream, width=200, **options).print(explanation)
        return stream.getvalue()

    def test_the_account_adds_up(self):
        explanation = explain(TEXT)
        lines = self.printed(explanation).splitlines()
        numbers = [Decimal(re.search(r"(\S+) *[+-]* *$", line).group(1)) for line in lines[ACCOUNT:]]
        assert sum(numbers[:-1]) == numbers[-1]
        assert lines[-1].startswith("score")
        # The margin of the page, in the same words.
        title = next(Parser(page(explanation)).root.all("h2")).text
        assert lines[:2] == [predicted(explanation), title]
        assert title.endswith(f": {numbers[-1]}")

    def test_the_text_with_the_numbers_of_its_strongest_words(self):
        line = self.printed(explain(TEXT)).splitlines()[ACCOUNT - 2]
        assert re.sub(r"\([+-]\d+\.\d+\)", "", line) == TEXT
        assert len(re.findall(r"\([+-]\d+\.\d+\)", line)) == 8

    @pytest.mark.parametrize("name", HOSTILE)
    def test_hostile_texts(self, name):
        explanation = explain(HOSTILE[name], names=("[red]x[/red]", "\x1b[2J"))
        plain = self.printed(explanation)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain)
        plain.encode()

    def test_markup_is_text(self):
        out = self.printed(explain("[red]no[/red]", names=("[b]x[/b]",)).to_rich(unit="sentence"))
        assert "Why [b]x[/b]?" in out
        assert "[red]no[/red]" in out

    def test_colours_where_there_are_some(self):
        out = self.printed(explain(TEXT), force_terminal=True, color_system="truecolor")
        assert "\x1b[30;48;2;" in out
        lines = re.sub(r"\x1b\[[\d;]*m", "", out).splitlines()
        for line in lines[ACCOUNT:-1]:
            number, bar = re.search(r"([+-]?\d+\.\d+) *([+-]*) *$", line).groups()
            assert set(bar) <= {"+" if Decimal(number) > 0 else "-"}

    def test_another_class_and_fewer_lines(self):
        explanation = explain(TEXT)
        out = self.printed(explanation.to_rich(output="bad", k=2, unit="token"))
        assert out.splitlines()[1].startswith("Why bad? Score: ")
        assert len(out.splitlines()) == ACCOUNT + 2 + 4
