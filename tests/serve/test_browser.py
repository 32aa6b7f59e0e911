"""The page and saved reports in a real browser: typing, switching, hovering, comparing, saving, loading."""

import json
import re
import time
from decimal import Decimal

import numpy as np
import pytest

from tests.helpers.browser import browsing, chromium, fresh
from tests.helpers.explanations import HOSTILE, explain
from tests.helpers.served import served, tiny_classifier
from vecroute.explain.html import page as page_of
from vecroute.explain.report import report
from vecroute.explain.shown import visible
from vecroute.explain.told import TERMS

pytestmark = pytest.mark.slow

TEXT = "The film is good, and so witty! But the plot is dull ."


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    chromium()
    folder = tmp_path_factory.mktemp("served")
    tiny_classifier(folder / "encoder").save_pretrained(folder / "model")
    with served(folder / "model") as (address, _):
        yield address


@pytest.fixture(scope="module")
def open_page(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile"), chromium()) as page:
        yield page


@pytest.fixture
def page(open_page, address):
    with fresh(open_page, address) as page:
        yield page


def answer(page, action):
    """Return the answer of /explain to an action, after the page shows it."""
    with page.expect_response("**/explain") as found:
        action()
    page.wait_for_selector("body:not(.busy)")
    return found.value.json()


def type_text(page, text, area="#text-a"):
    return answer(page, lambda: page.fill(area, text))


def shown_text(page, section="#result-a"):
    return page.text_content(f"{section} .text")


def check_sums(page, section="#result-a"):
    """Check that the lines of every table sum to the score below them, which is also the score above."""
    heading = Decimal(page.text_content(f"{section} h2").rpartition(": ")[2])
    for table in page.query_selector_all(f"{section} table"):
        *lines, score = [Decimal(cell.text_content()) for cell in table.query_selector_all("td.number")]
        assert sum(lines) == score == heading


def test_typing_shows_the_prediction_and_the_explanation(page):
    assert page.is_hidden("#result-a")
    with page.expect_response("**/explain"):
        page.locator("#text-a").press_sequentially("the film is good")
    page.wait_for_selector("#result-a h2")
    found = type_text(page, TEXT)
    assert page.text_content("#result-a .prediction strong") == found["label"]
    likely = max(found["probabilities"].values())
    assert page.text_content("#result-a .chosen .number") == f"{100 * likely:.1f} %"
    assert shown_text(page) == TEXT
    check_sums(page)


def test_switching_class_depth_and_unit(page):
    first = type_text(page, TEXT)
    other = next(name for name in first["probabilities"] if name != first["output"])
    found = answer(page, lambda: page.select_option("#output", other))
    assert found["output"] == other
    assert page.text_content("#result-a h2").startswith(f"Why {other} rather than ")
    check_sums(page)
    found = answer(page, lambda: page.select_option("#against", label="(its score alone)"))
    assert (found["output"], found["against"]) == (other, None)
    assert page.text_content("#result-a h2").startswith(f"Why {other}? Score: ")
    check_sums(page)
    assert page.is_hidden("#depth")
    found = answer(page, lambda: page.check("input[value=states]"))
    assert found["of"] == "states"
    check_sums(page)
    found = answer(page, lambda: page.select_option("#depth", label="layer 1"))
    assert found["depth"] == 1
    assert page.text_content("#result-a tbody tr:last-child th") == "base and other depths"
    check_sums(page)
    for unit in ("token", "sentence"):
        found = answer(page, lambda unit=unit: page.check(f"input[value={unit}]"))
        assert found["unit"] == unit
        assert shown_text(page) == TEXT
        check_sums(page)


def test_pointing_at_a_word_shows_its_numbers(page):
    type_text(page, TEXT)
    found = answer(page, lambda: page.check("input[value=states]"))
    assert page.is_hidden("#tip")
    k = next(k for k, s in enumerate(found["shown"]["segments"]) if s["text"] == "witty")
    page.hover(f"#result-a span[data-k='{k}']")
    tip = page.locator("#tip")
    assert tip.is_visible()
    total = Decimal(tip.locator("b").text_content())
    (part,) = found["shown"]["segments"][k]["parts"]
    assert total * 10 ** found["shown"]["decimals"] == found["shown"]["values"][part]
    assert sum(Decimal(cell) for cell in tip.locator("td.number").all_text_contents()) == total
    start = TEXT.index("witty")
    assert f"characters {start}–{start + 5}" in tip.text_content()
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_examples_links_and_words_that_are_explained(page, address):
    page.wait_for_selector("#examples button")
    examples = page.locator("#examples button")
    assert examples.count() == 3
    found = answer(page, lambda: examples.nth(1).press("Enter"))
    assert shown_text(page) == examples.nth(1).text_content()
    link = page.url
    assert found["told"]["title"] in page.text_content("#result-a h2")
    page.goto("about:blank")
    with page.expect_response("**/explain"):
        page.goto(link)
    page.wait_for_selector("#result-a h2")
    assert page.input_value("#text-a") == page.locator("#examples button").nth(1).text_content()
    assert page.url == link
    # By hovering and by the keyboard.
    base = page.locator("#result-a .term.base").first
    told = "(element) => getComputedStyle(element, '::after').content"
    assert base.evaluate(told) == "none"
    base.focus()
    assert TERMS["base"] in base.evaluate(told)


def other_text(page, address, label):
    """Return a text with another label."""
    for text in ("a dull , dull story", "one two three", "good", "great", "bad", "witty film !", "so slow"):
        if page.request.post(f"{address}/predict", data={"text": text}).json()["label"] != label:
            return text
    raise LookupError(f"every text is {label}")


def test_two_texts_are_explained_by_the_same_class_and_scale(page, address):
    first = type_text(page, TEXT)
    page.click("#compare")
    other = other_text(page, address, first["label"])
    with page.expect_response(lambda r: r.url.endswith("/explain") and other in r.request.post_data):
        page.fill("#text-b", other)
    page.wait_for_selector("#result-b h2")
    page.wait_for_selector("body:not(.busy)")
    titles = [page.text_content(f"{s} h2").rpartition(": ")[0] for s in ("#result-a", "#result-b")]
    assert titles[0] == titles[1]
    assert first["output"] in titles[0]
    for section in ("#result-a", "#result-b"):
        check_sums(page, section)
    # The strongest word of both texts has the strongest colour.
    assert page.locator("#results .text .p9, #results .text .n9").count() >= 1
    page.click("#compare")
    page.wait_for_selector("#result-b", state="hidden")


@pytest.mark.parametrize("name", [name for name in HOSTILE if HOSTILE[name].strip()])
def test_hostile_texts_are_shown_as_text(page, name):
    text = HOSTILE[name]
    typed = "(text) => { const area = document.getElementById('text-a'); area.value = JSON.parse(text);"
    page.evaluate(f"{typed} area.dispatchEvent(new Event('input')); }}", json.dumps(text))
    page.wait_for_selector("#result-a h2")
    page.wait_for_selector("body:not(.busy)")
    # A text field changes line ends, and lone surrogates are not characters.
    text = re.sub(r"[\ud800-\udfff]", "\ufffd", re.sub(r"\r\n?", "\n", text))
    assert shown_text(page) == visible(text)
    assert page.locator("#result-a script, #result-a img, #result-a .text b").count() == 0
    check_sums(page)


def test_empty_texts_ask_for_one(page):
    type_text(page, TEXT)
    page.fill("#text-a", "  ")
    page.wait_for_selector("#result-a", state="hidden")
    assert "Type or paste a text" in page.text_content("#status")


def test_50000_characters(page):
    text = ("<b>the film</b> is good & dull 😀 . " * 1500)[:50_000]
    with page.expect_response("**/explain", timeout=120_000):
        page.fill("#text-a", text)
    page.wait_for_selector("body:not(.busy)", timeout=60_000)
    assert shown_text(page) == text
    check_sums(page)


def test_a_saved_page_opens_from_disk(page, tmp_path):
    type_text(page, f"<i>{TEXT}")
    with page.expect_download() as download:
        page.click("#save")
    file = tmp_path / "saved.html"
    download.value.save_as(file)
    before = len(page.seen["requests"])
    page.goto(file.as_uri())
    assert page.seen["requests"][before:] == [file.as_uri()]
    page.seen["requests"].clear()
    visible_texts = [p.text_content() for p in page.query_selector_all("p.text") if p.is_visible()]
    assert visible_texts == [f"<i>{TEXT}"]
    # The classes are switched without any script.
    page.check("#v0-2")
    titles = [h.text_content() for h in page.query_selector_all("h2") if h.is_visible()]
    assert len(titles) == 1
    assert titles == [page.text_content("#v0-panel-2 h2")]


def test_the_description_of_the_api_is_shown(page, address):
    page.goto(f"{address}/docs")
    page.wait_for_selector("h3")
    assert "POST /explain" in page.text_content("main")
    assert "ExplainRequest" in page.text_content("main")


def test_reports_open_from_disk_without_a_request(open_page, tmp_path):
    texts, p = [*HOSTILE.values()], np.array([[0.1, 0.9], [0.6, 0.4]] * len(HOSTILE))[: len(HOSTILE)]

    class Known:
        classes_ = np.array(["<bad>", "good"])

        def explain(self, texts, of="words"):
            return [explain(text, names=self.classes_.tolist()) for text in texts]

    html = report(
        Known(), texts, ["<bad>", "good"] * (len(texts) // 2) + ["<bad>"] * (len(texts) % 2), p, "x"
    )
    file = tmp_path / "report.html"
    file.write_bytes(html.encode(errors="replace"))
    for found in open_page.seen.values():
        found.clear()
    open_page.goto(file.as_uri())
    assert open_page.seen == {"wrong": [], "requests": [file.as_uri()]}
    assert open_page.locator("article").count() == len(HOSTILE)
    open_page.set_viewport_size({"width": 360, "height": 800})
    assert open_page.evaluate("document.documentElement.scrollWidth") <= 360
    open_page.set_viewport_size({"width": 1200, "height": 900})


def test_the_page_of_2000_words_is_small_and_opens_at_once(open_page, tmp_path):
    rng = np.random.default_rng(0)
    words = [f"{word}{k}" for k, word in enumerate(rng.choice(["film", "plot", "witty", "dull"], 2000))]
    text = " ".join(word + "." * (k % 15 == 14) for k, word in enumerate(words))
    file = tmp_path / "long.html"
    file.write_text(page_of(explain(text, names=("bad", "good", "odd"), depth=13, chunk_size=300)))
    assert file.stat().st_size < 2_000_000
    start = time.monotonic()
    open_page.goto(file.as_uri(), wait_until="load")
    open_page.wait_for_selector("h2")
    print(f"{file.stat().st_size / 1e6:.2f} MB, {time.monotonic() - start:.2f} s")
