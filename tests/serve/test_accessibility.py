"""Every page, light and dark, wide and narrow: axe-core finds no barrier, and nothing is cut off."""

import pytest

from tests.explain.test_image_explanation import explain as explain_image
from tests.helpers.axe import axe_source, violations
from tests.helpers.browser import browsing, chromium
from tests.helpers.explanations import explain
from tests.helpers.served import photo, served, tiny_classifier, tiny_image_classifier
from vecroute.explain.html import page as page_of
from vecroute.explain.image_html import page as image_page_of
from vecroute.explain.image_report import image_report
from vecroute.explain.report import report

pytestmark = pytest.mark.slow

SCREENS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]
TEXT = "A gorgeous, witty, seductive movie. The plot, though, is as thin as paper and the jokes fall flat."


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    return axe_source(tmp_path_factory.mktemp("axe"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile"), chromium()) as page:
        yield page


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"texts": tiny_classifier(folder / "t"), "images": tiny_image_classifier(folder / "i")}


def explanation(classifiers):
    words = explain(TEXT, of="words", depth=1, depths=["all depths"], phi=None, about={"model": "m"})
    return page_of(words, states=explain(TEXT, depth=7, scores=words.scores))


def long_text(classifiers):
    return page_of(explain("A long text has many sentences, and few of them count. " * 250, chunk_size=200))


def report_of_texts(classifiers):
    texts = [f"the film is {word} and long" for word in ("good", "dull", "witty", "bad")] * 10
    probabilities = classifiers["texts"].predict_proba(texts)
    return report(
        classifiers["texts"], texts, ["good", "bad", "odd", "bad"] * 10, probabilities, "m on x.csv"
    )


def image(classifiers):
    return image_page_of(explain_image(rows=5, columns=6))


def report_of_images(classifiers):
    images, labels = [photo("red", k) for k in range(3)], ["red", "blue", "green"]
    probabilities = classifiers["images"].predict_proba(images)
    return image_report(classifiers["images"], images, labels, probabilities, "m on photos")


@pytest.mark.parametrize("make", [explanation, long_text, report_of_texts, image, report_of_images])
def test_files(browser, axe, classifiers, make, tmp_path):
    (tmp_path / "page.html").write_text(make(classifiers))
    check(browser, axe, (tmp_path / "page.html").as_uri(), lambda: None)


def test_the_page_for_texts(browser, axe, classifiers, tmp_path):
    classifiers["texts"].save_pretrained(tmp_path / "model")
    with served(tmp_path / "model") as (address, _):

        def fill():
            browser.locator("#examples button").first.click()
            browser.wait_for_selector("#result-a h2")
            browser.wait_for_selector("body:not(.busy)")

        check(browser, axe, address, fill)


def test_the_page_for_images(browser, axe, classifiers, tmp_path):
    classifiers["images"].save_pretrained(tmp_path / "model")
    photo("red", 1).save(tmp_path / "x.png")
    with served(tmp_path / "model") as (address, _):

        def fill():
            browser.set_input_files("#file", tmp_path / "x.png")
            browser.wait_for_selector("#result-a h2")
            browser.wait_for_selector("body:not(.busy)")

        check(browser, axe, address, fill)


def check(browser, axe, address, fill):
    """Check that no screen has a barrier, and that no page is wider than its screen."""
    for scheme, width in SCREENS:
        browser.emulate_media(color_scheme=scheme)
        browser.set_viewport_size({"width": width, "height": 900})
        browser.goto("about:blank")
        browser.goto(address)
        fill()
        browser.wait_for_timeout(400)  # wait for colour transitions
        assert violations(browser, axe) == [], (scheme, width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_barriers_are_found(browser, axe, tmp_path):
    faint = explanation(None).replace("--soft: #5c6370", "--soft: #c0c0c0").replace('lang="en"', "")
    (tmp_path / "page.html").write_text(faint)
    browser.emulate_media(color_scheme="light")
    browser.goto((tmp_path / "page.html").as_uri())
    assert {line.partition(":")[0] for line in violations(browser, axe)} == {
        "color-contrast",
        "html-has-lang",
    }


def test_a_choice_is_made_by_the_keyboard_alone(browser, tmp_path):
    (tmp_path / "page.html").write_text(explanation(None))
    browser.set_viewport_size({"width": 1280, "height": 900})
    browser.goto((tmp_path / "page.html").as_uri())
    seen = set()
    for _ in range(60):
        browser.keyboard.press("Tab")
        seen.add(browser.evaluate("document.activeElement.className || document.activeElement.id"))
    assert {"v0-1", "maps", "term base", "term temperature"} <= seen
    browser.focus("#v0-1")
    browser.keyboard.press("ArrowDown")
    visible = [h2 for h2 in browser.query_selector_all("h2") if h2.is_visible()]
    assert [h2.get_attribute("id") for h2 in visible] == ["v0-title-2"]


def test_the_report_reaches_its_details_within_four_screens(browser, classifiers, tmp_path):
    (tmp_path / "page.html").write_text(report_of_texts(classifiers))
    for width, height in ((1280, 900), (390, 844)):
        browser.set_viewport_size({"width": width, "height": height})
        browser.goto((tmp_path / "page.html").as_uri())
        top = browser.locator("#wrong").bounding_box()["y"]
        assert top <= 4 * height, (width, top)
        cut = "(e) => e.scrollWidth > e.clientWidth + 1"
        assert browser.evaluate(f"[...document.querySelectorAll('caption, th')].filter({cut}).length") == 0
