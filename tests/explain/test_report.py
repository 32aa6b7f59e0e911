"""The report on a data set: figures, confusion, calibration, wrong texts with why, words and depths."""

import re
from decimal import Decimal

import numpy as np
import pytest

from tests.helpers.explanations import HOSTILE, explain
from tests.helpers.pages import Parser
from tests.helpers.served import tiny_classifier
from vecroute.cli import main
from vecroute.explain import html
from vecroute.explain import report as reports
from vecroute.explain.report import report
from vecroute.training.evaluation import evaluate

TEXTS = ["a fine film", "dull , dull plot", "warm and witty", "a dull film", "not fine at all", "fine"]
TRUTH = ["good", "bad", "good", "bad", "bad", "good"]


class Known:
    """A classifier whose probabilities and explanations are given."""

    def __init__(self, probabilities, classes=("bad", "good"), **options):
        self.probabilities, self.classes_, self.options = probabilities, np.array(classes), options

    def explain(self, texts, of="words"):
        return [
            explain(text, names=self.classes_.tolist(), seed=k, of=of, **self.options)
            for k, text in enumerate(texts)
        ]


def probabilities(*of_second):
    return np.array([[1 - p, p] for p in of_second])


# The third and the fifth text are wrong, the fifth with more confidence.
P = probabilities(0.9, 0.2, 0.4, 0.1, 0.8, 0.95)


def page_of(texts=TEXTS, truth=TRUTH, p=P, **options):
    found = report(Known(p, **options), texts, truth, p, title="model on <test>")
    return Parser(found).root, found


def section(root, name):
    (found,) = root.all("section", **{"aria-labelledby": name})
    return found


def rows_of(table):
    return [[cell.text for cell in row.children if not isinstance(cell, str)] for row in table.all("tr")]


def test_figures_and_confusion_are_those_of_the_evaluation():
    root, _ = page_of()
    result = evaluate(TRUTH, ["bad", "good"], P)
    figures = [dd.text for dd in root.all("dd")]
    assert figures == [
        "66.7 %",
        f"{result['macro_f1']:.3f}",
        f"{100 * result['calibration_error']:.1f} %",
        "6",
    ]
    (table,) = section(root, "confusion").all("table")
    assert rows_of(table)[1:] == [
        ["bad", "2", "1", "3", "0.667", "0.667", "0.667"],
        ["good", "1", "2", "3", "0.667", "0.667", "0.667"],
    ]


def test_calibration_joins_small_bins():
    root, _ = page_of()
    (table,) = section(root, "calibration").all("table")
    (row,) = rows_of(table)[1:]  # six texts are too few for two bins
    mean = np.mean(P.max(1))
    assert row == [f"{100 * mean:.1f} %", "66.7 %", "30 to 90 %", "6"]  # 4 of 6, by Wilson
    small, large = reports.FEWEST_IN_BIN - 1, reports.FEWEST_IN_BIN
    bins = [(0.5, 0.0, small), (0.6, 1.0, 1), (0.7, 0.5, large), (0.8, 1.0, 2), (0.9, 0.0, 2)]
    first, second = reports.joined(bins)
    assert first == pytest.approx(((0.5 * small + 0.6) / large, 1 / large, large))
    assert second == pytest.approx(
        ((0.7 * large + 1.6 + 1.8) / (large + 4), (large / 2 + 2) / (large + 4), large + 4)
    )


def test_the_summary_can_be_pasted_into_an_email():
    root, _ = page_of()
    (told,) = section(root, "summary").all("p")
    assert told.text.startswith(
        "model on <test>: 66.7 % of 6 texts are classified right (95 % interval 30.0 % to "
    )
    assert "The most frequent mistake: bad taken for good, 1 times." in told.text
    assert "On average it is" in told.text
    rising = rows_of(next(section(root, "words").all("table")))[1:]
    assert f"Words that speak most for good: {', '.join(row[0] for row in rising[:5])}." in told.text


def test_punctuation_marks_and_rare_words_are_in_no_list():
    texts = ["fine , fine , fine ,", "rare , fine"]
    lists = reports.word_lists(Known(P).explain(texts), "good", fewest=3)
    assert {row["label"] for key in ("raise", "lower", "total") for row in lists[key]} == {"fine"}


def test_wrong_texts_come_with_why_the_most_confident_first():
    root, _ = page_of()
    articles = list(section(root, "wrong").all("article"))
    titles = [next(article.all("h3")).text for article in articles]
    assert titles == ["Predicted good (80.0 %), labelled bad", "Predicted bad (60.0 %), labelled good"]
    names = ("Why good rather than bad?", "Why bad rather than good?")
    for article, text, name in zip(articles, (TEXTS[4], TEXTS[2]), names, strict=True):
        heat, total = article.all("p")
        assert "".join(heat.text) == text
        assert total.text.startswith(name)
        *parts, score = [Decimal(b.text) for b in total.all("b")]
        assert sum(parts) == score


def test_labels_that_the_classifier_does_not_know_are_wrong_and_said_so():
    root, _ = page_of(truth=["good", "bad", "ugly", "bad", "bad", "good"])
    titles = [h3.text for h3 in section(root, "wrong").all("h3")]
    assert titles[-1] == "Predicted bad (60.0 %), labelled ugly, a label that it does not know"


def test_no_wrong_texts_is_said_so():
    root, _ = page_of(p=probabilities(0.9, 0.2, 0.7, 0.1, 0.3, 0.95))
    assert "None: every prediction is right." in section(root, "wrong").text


def test_words_are_summed_over_the_corpus():
    explained = Known(P, classes=("a", "b", "c")).explain(["Dull plot dull", "dull"])
    (dull,) = (word for word in reports.corpus_words(explained, "b") if word.word == "dull")
    expected = 0.0
    for why in explained:
        rows = why.aggregate("word")
        totals = rows.values.sum(1, dtype=np.float64)  # [n, n_cls]
        mine = [i for i in range(len(rows)) if rows.label(i).lower() == "dull"]
        expected += sum(totals[i, 1] - (totals[i, 0] + totals[i, 2]) / 2 for i in mine)
    assert dull.uses == 3
    assert dull.total == pytest.approx(expected)
    assert dull.mean == pytest.approx(expected / 3)


def test_of_two_labels_one_has_the_words_of_both():
    root, _ = page_of()
    assert [s.text for s in section(root, "words").all("summary")] == ["good; the reverse holds for bad"]
    rising = rows_of(next(section(root, "words").all("table")))[1:]
    means = [float(row[1]) for row in rising]
    assert means == sorted(means, reverse=True)


def test_three_labels_have_a_list_each():
    p = np.full((2, 3), 1 / 3)
    root, _ = page_of(TEXTS[:2], ["x", "y"], p, classes=("x", "y", "z"))
    assert [s.text for s in section(root, "words").all("summary")] == ["x", "y", "z"]


def test_shares_of_depths_add_up_to_a_hundred_per_cent():
    root, _ = page_of(depth=7)
    (table,) = section(root, "depths").all("table")
    rows = rows_of(table)[1:]
    assert [row[0] for row in rows] == ["embeddings", *(f"layer {k}" for k in range(1, 7))]
    for column in (1, 3):
        assert sum(Decimal(row[column].removesuffix(" %")) for row in rows) == 100


def test_a_depth_that_does_it_all_has_it_all():
    explained = Known(P).explain(TEXTS)
    for why in explained:
        why.values[:, [0, 2]] = 0
    shares = [row["shares"][0]["number"] for row in reports.depth_shares(explained)]
    assert shares == ["0.0 %", "100.0 %", "0.0 %"]


def test_many_labels_have_a_list_of_confusions():
    names = [f"label {k}" for k in range(30)]
    p = np.roll(np.eye(30), 1, axis=1) * 0.9 + 0.1 / 30  # each class is taken for the next, except the first
    p[0] = p[-1]
    root, _ = page_of([f"text {k}" for k in range(30)], names, p, classes=names)
    first, second = section(root, "confusion").all("table")
    assert rows_of(first)[1:3] == [["label 1", "label 2", "1"], ["label 2", "label 3", "1"]]
    assert len(rows_of(first)) == 1 + reports.N_CONFUSED
    assert len(rows_of(second)) == 31
    assert [len(row) for row in rows_of(second)] == [5] * 31


def test_long_texts_are_cut_to_the_sentences_that_count_most():
    sentence = "it is fine and warm and witty and so on . "
    why = explain(sentence * 60 + "unbelievably dull .", seed=1)
    pieces = html.heat(rows := why.aggregate("word"), reports.shown(rows))
    cut = html.excerpt(pieces, reports.EXCERPT)
    assert sum(bool(piece["number"]) for piece in cut) <= reports.EXCERPT < len(pieces)
    assert any(piece["text"] == " … " for piece in cut)
    sums = {}
    for k, piece in enumerate(pieces):
        sums.setdefault("".join(p["text"] for p in pieces[:k]).count(" . "), []).append(piece)
    best = max(sums.values(), key=lambda found: abs(sum(float(p["number"] or 0) for p in found)))
    assert all(piece in cut for piece in best if piece["number"])


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if HOSTILE[kind].strip()])
def test_hostile_texts_and_labels_are_shown_as_text(kind):
    text = HOSTILE[kind]
    p = probabilities(0.9, 0.9)
    found = report(Known(p, classes=("bad", text)), [text, text], ["bad", text], p, title=text)
    parsed = Parser(found)
    assert not {element.name for element in parsed.every} & {"script", "img", "link", "iframe"}
    names = [name for element in parsed.every for name in element.attributes]
    assert not [name for name in names if name.startswith("on") or name in ("src", "style")]
    heat = next(next(parsed.root.all("article")).all("p"))
    assert heat.text == html.visible(text)


def test_the_page_needs_nothing_but_itself():
    _, found = page_of()
    assert "default-src 'none'" in found
    assert not re.search(r"https?:|<script|url\(|@import|<link", found)
    assert "model on &lt;test&gt;" in found


def test_tables_sorted_by_label_are_explained_from_end_to_end():
    assert reports.spread(5, 10) == [0, 1, 2, 3, 4]
    assert reports.spread(1000, 3) == [0, 500, 999]
    assert reports.spread(1, 3) == [0]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command in this process: its exit code and what it says on standard error."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["vecroute", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    return run


def test_the_commands_write_pages(command, tmp_path):
    model, table, file = tmp_path / "model", tmp_path / "test.csv", tmp_path / "report.html"
    tiny_classifier(tmp_path / "encoder").save_pretrained(model)
    table.write_text("text,label\n" + "\n".join(f'"{text}",good' for text in TEXTS))
    assert command("evaluate", model, table, "--html", file) == (0, "")
    root = Parser(file.read_text()).root
    assert next(root.all("h1")).text == "model on test.csv"
    articles = list(section(root, "wrong").all("article"))
    assert len(articles) == sum("labelled good" in article.text for article in articles)
    assert command("explain", model, "a <b>dull</b> film", "--html", tmp_path / "why.html") == (0, "")
    texts = [p.text for p in Parser((tmp_path / "why.html").read_text()).root.all("p", **{"class": "text"})]
    assert set(texts) == {"a <b>dull</b> film"}
    code, told = command("evaluate", model, table, "--html", tmp_path / "nowhere" / "report.html")
    assert code == 2
    assert "nowhere" in told
    assert told.count("\n") == 1


def test_serving_what_is_not_there_is_told_in_a_line(command, tmp_path):
    code, told = command("serve", tmp_path / "nothing", "--port", "0")
    assert code == 2
    assert "nothing" in told
    assert told.count("\n") == 1
    code, told = command("serve", tmp_path, "--port", "0", "--max-batch", "0")
    assert code == 2
    assert "--max-batch" in told
    assert told.count("\n") == 1
