"""The report on a folder of images: figures, examples, wrong images with their maps, depths."""

import base64
import io
import re
from decimal import Decimal

import numpy as np
import pytest
from PIL import Image

from tests.explain.test_image_explanation import explain
from tests.helpers.explanations import HOSTILE
from tests.helpers.pages import Parser
from tests.helpers.served import COLOURS, photo, tiny_image_classifier
from vecroute.explain import image_report as reports
from vecroute.explain.image_report import image_report
from vecroute.training.evaluation import evaluate

TRUTH = ["blue", "green", "red"] * 3
IMAGES = [photo(label, 200 + k) for k, label in enumerate(TRUTH)]
# The second image is classified as red, and the ninth, with more confidence, as blue. Both are wrong.
P = np.array([[0.8, 0.1, 0.1], [0.1, 0.3, 0.6], [0.1, 0.2, 0.7]] * 3)
P[[4, 7]], P[8] = [0.2, 0.7, 0.1], [0.9, 0.06, 0.04]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return tiny_image_classifier(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def page(classifier):
    return image_report(classifier, IMAGES, TRUTH, P, title="model on <photos>")


@pytest.fixture(scope="module")
def root(page):
    return Parser(page).root


def section(root, name):
    (found,) = root.all("section", **{"aria-labelledby": name})
    return found


def test_figures_are_those_of_the_evaluation(root):
    result = evaluate(TRUTH, [*COLOURS], P)
    figures = {next(div.all("dt")).text: next(div.all("dd")).text for div in next(root.all("dl")).all("div")}
    assert figures == {
        "accuracy": "77.8 %",
        "macro F1": f"{result['macro_f1']:.3f}",
        "calibration error": f"{100 * result['calibration_error']:.1f} %",
        "images": "9",
    }
    assert "texts" not in root.text


def test_wrong_images_come_with_maps_the_most_confident_first(root, classifier):
    articles = list(section(root, "wrong").all("article"))
    titles = [next(article.all("h3")).text for article in articles]
    assert titles == ["Predicted blue (90.0 %), labelled red", "Predicted red (60.0 %), labelled green"]
    for article, k, names in zip(articles, (8, 1), (("blue", "red"), ("red", "green")), strict=True):
        margin = classifier.explain(IMAGES[k]).margin(*names)
        (image,) = article.all("image")
        pixels = Image.open(io.BytesIO(base64.b64decode(image.attributes["href"].partition(",")[2])))
        np.testing.assert_array_equal(np.asarray(pixels), np.asarray(IMAGES[k]))
        tiles = [tile for tile in article.all("rect") if "title" in {c.name for c in tile.children}]
        shown = sorted(float(tile.text) for tile in tiles)
        grid = margin.grid()
        strong = np.sort(grid[abs(grid) > abs(grid).max() / 9 * 0.6])
        assert len(shown) >= len(strong)
        assert max(shown, key=abs) == pytest.approx(grid.flat[abs(grid).argmax()], rel=0.01)
        (total,) = article.all("p")
        *parts, score = [Decimal(b.text) for b in total.all("b")]
        assert total.text.startswith("Why {} rather than {}?".format(*names))
        assert sum(parts) == score
        assert float(score) == pytest.approx(margin.scores[0], abs=0.02)


def test_the_first_image_of_each_label_is_an_example(root):
    articles = list(section(root, "examples").all("article"))
    titles = [next(article.all("h3")).text for article in articles]
    assert titles == [
        "blue: predicted blue (80.0 %)",
        "green: predicted red (60.0 %)",
        "red: predicted red (70.0 %)",
    ]
    assert [len(list(article.all("image"))) for article in articles] == [1, 1, 1]
    assert "The first image of each label" in section(root, "examples").text


def test_shares_of_depths_add_up_to_a_hundred_per_cent(root):
    (table,) = section(root, "depths").all("table")
    rows = [[cell.text for cell in row.children if not isinstance(cell, str)] for row in table.all("tr")][1:]
    assert [row[0] for row in rows] == ["embeddings", "layer 1", "layer 2"]
    for column in (1, 3):
        assert sum(Decimal(row[column].removesuffix(" %")) for row in rows) == 100
    assert next(section(root, "depths").all("summary")).text.startswith("Mean over 9 images")


def test_the_page_needs_nothing_but_itself(page):
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page
    assert not re.search(r"https?:|<script|url\(|@import|<link", page)
    assert "model on &lt;photos&gt;" in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


class Known:
    """A classifier whose explanations are given."""

    def __init__(self, *names):
        self.classes_ = np.array(names)

    def explain(self, picture, classes, of="words"):
        return explain(names=classes)


def test_more_than_five_classes_have_a_top_five_and_labels_may_be_new():
    names = [f"kind {k}" for k in range(7)]
    p = np.tile(np.linspace(0.25, 0.05, 7) / np.linspace(0.25, 0.05, 7).sum(), (4, 1))
    found = image_report(Known(*names), IMAGES[:4], ["kind 0", "kind 4", "kind 6", "novel"], p, "x")
    root = Parser(found).root
    figures = {next(div.all("dt")).text: next(div.all("dd")).text for div in next(root.all("dl")).all("div")}
    assert (figures["accuracy"], figures["among the likeliest five"]) == ("25.0 %", "50.0 %")
    titles = [h3.text for h3 in section(root, "wrong").all("h3")]
    assert titles[-1].endswith("labelled novel, a label that it does not know")
    assert "The first image of each label" in section(root, "examples").text
    assert len(list(section(root, "examples").all("article"))) == 3


def test_many_labels_have_some_examples(monkeypatch):
    monkeypatch.setattr(reports, "N_EXAMPLES", 2)
    found = image_report(Known("a", "b", "c"), IMAGES[:3], ["a", "b", "c"], P[:3], "x")
    examples = section(Parser(found).root, "examples")
    assert len(list(examples.all("article"))) == 2
    assert "The first image of 2 of the 3 labels" in examples.text


@pytest.mark.parametrize("kind", ["script", "quotes", "template"])
def test_hostile_labels_are_shown_as_text(kind):
    text = HOSTILE[kind]
    found = image_report(Known("bad", text), IMAGES[:2], ["bad", text], P[:2, :2], title=text)
    parsed = Parser(found)
    assert not {element.name for element in parsed.every} & {"script", "img", "link", "iframe"}
    names = [name for element in parsed.every for name in element.attributes]
    assert not [name for name in names if name.startswith("on") or name in ("src", "style")]


def test_large_images_are_stored_small():
    assert reports.smaller(np.zeros((1000, 500, 3), np.uint8)).shape == (416, 208, 3)
    assert reports.smaller(np.zeros((10, 20, 3), np.uint8)).shape == (10, 20, 3)
