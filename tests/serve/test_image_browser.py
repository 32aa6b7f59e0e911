"""The page for images in a real browser: choosing one, switching, two classes, saving, damaged files."""

import io
from decimal import Decimal

import numpy as np
import pytest
from PIL import Image

from tests.helpers.browser import browsing, chromium, fresh
from tests.helpers.served import photo, served, tiny_image_classifier
from tests.serve.test_browser import check_sums
from vecroute.explain.image_report import image_report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    chromium()
    return tiny_image_classifier(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def address(classifier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    classifier.save_pretrained(folder / "model")
    with served(folder / "model", "--max-image-bytes", "300000") as (address, _):
        yield address


@pytest.fixture(scope="module")
def open_page(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile"), chromium()) as page:
        yield page


@pytest.fixture
def page(open_page, address):
    with fresh(open_page, address) as page:
        page.wait_for_selector("#units input")
        yield page


@pytest.fixture
def file(tmp_path):
    """Write an image that is higher than wide, and stored on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    photo("red", 100, (60, 40)).save(tmp_path / "photo.jpg", exif=exif, quality=95)
    return tmp_path / "photo.jpg"


def answer(page, action):
    """Return the answer of /explain to an action, after the page shows it."""
    with page.expect_response("**/explain?**") as found:
        action()
    page.wait_for_selector("body:not(.busy)")
    return found.value.json()


def choose(page, file):
    # Pass bytes, because the browser does not keep answers to requests with a file from the disk.
    sent = {"name": file.name, "mimeType": "image/jpeg", "buffer": file.read_bytes()}
    return answer(page, lambda: page.set_input_files("#file", sent))


def test_an_image_shows_the_prediction_and_its_patches(page, file, classifier):
    found = choose(page, file)
    assert (
        page.text_content("#result-a .prediction strong") == found["label"] == classifier.predict([file])[0]
    )
    assert page.locator("#result-a .overlay rect").count() == 16
    strongest = max(found["parts"][1:], key=lambda part: abs(part["value"]))
    k = found["parts"].index(strongest) - 1
    rect = page.locator("#result-a .overlay rect").nth(k)
    assert rect.get_attribute("class") == ("p9" if strongest["value"] > 0 else "n9")
    assert rect.locator("title").text_content().startswith(strongest["piece"])
    states = answer(page, lambda: page.check("input[value=states]"))
    maps = np.array(states["maps"])  # [depth, rows, columns]
    assert page.locator(".depths .dash").count() == (maps < -abs(maps).max() / 4).sum() > 0
    box = page.locator("#result-a canvas").first.bounding_box()
    assert box["height"] / box["width"] == pytest.approx(60 / 40, rel=0.02)
    check_sums(page)


def test_the_image_is_drawn_upright(page, file):
    choose(page, file)
    shown = page.evaluate(
        """() => { const canvas = document.querySelectorAll("#result-a canvas")[1];
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return [canvas.width, canvas.height, [...data]]; }"""
    )
    pixels = np.array(shown[2]).reshape(shown[1], shown[0], 4)[..., :3]
    upright = np.asarray(Image.open(file).transpose(Image.Transpose.ROTATE_270), dtype=int)
    assert pixels.shape == upright.shape == (60, 40, 3)
    assert abs(pixels - upright).mean() < 1


def test_switching_class_depth_and_unit(page, file):
    first = choose(page, file)
    other = next(name for name in first["probabilities"] if name not in (first["output"], first["against"]))
    found = answer(page, lambda: page.select_option("#output", other))
    assert found["output"] == other
    check_sums(page)
    found = answer(page, lambda: page.select_option("#against", label="(its score alone)"))
    assert page.text_content("#result-a h2").startswith(f"Why {other}? Score: ")
    answer(page, lambda: page.check("input[value=states]"))
    found = answer(page, lambda: page.click(".depths button[data-depth='1']"))
    assert found["depth"] == 1
    assert page.input_value("#depth") == "1"
    assert page.get_attribute(".depths button[data-depth='1']", "aria-pressed") == "true"
    check_sums(page)
    found = answer(page, lambda: page.click(".depths button[data-depth='1']"))
    assert found["depth"] is None
    found = answer(page, lambda: page.check("input[value=region]"))
    assert found["unit"] == "region"
    numbers = page.locator("#result-a .regions text").all_text_contents()
    assert sorted(numbers) == sorted(part["piece"][7:] for part in found["parts"] if not part["special"])
    check_sums(page)


def test_two_classes_side_by_side_share_a_scale(page, file):
    first = choose(page, file)
    page.click("#compare")
    page.wait_for_selector("#result-b h2")
    page.wait_for_selector("body:not(.busy)")
    titles = [page.text_content(f"{s} h2").rpartition(": ")[0] for s in ("#result-a", "#result-b")]
    assert titles == [f"Why {first['output']}? Score", f"Why {first['against']}? Score"]
    for section in ("#result-a", "#result-b"):
        check_sums(page, section)
    assert page.locator("#results .overlay .p9, #results .overlay .n9").count() >= 1
    page.click("#compare")
    page.wait_for_selector("#result-b", state="hidden")


def test_an_image_may_be_dropped_or_pasted(page):
    buffer = io.BytesIO()
    photo("blue", 5).save(buffer, "png")
    program = """([data, kind]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(data)], "x.png", { type: "image/png" }));
        const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: transfer, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: transfer });
        document.dispatchEvent(event); }"""
    for kind in ("drop", "paste"):
        found = answer(page, lambda kind=kind: page.evaluate(program, [list(buffer.getvalue()), kind]))
        assert found["size"] == [40, 30]


def test_damaged_and_large_files_are_told(page, file, tmp_path):
    choose(page, file)
    (tmp_path / "broken.png").write_bytes(b"<script>alert(1)</script>")
    with page.expect_response("**/explain?**"):
        page.set_input_files("#file", tmp_path / "broken.png")
    page.wait_for_selector("#status.wrong")
    assert "is not an image that can be read" in page.text_content("#status")
    assert page.is_hidden("#result-a")
    page.seen["wrong"].clear()  # browsers log every 422
    (tmp_path / "large.png").write_bytes(bytes(300_001))
    page.set_input_files("#file", tmp_path / "large.png")
    page.wait_for_function("document.getElementById('status').textContent.includes('300001')")
    choose(page, file)
    assert page.is_visible("#result-a")


def test_a_saved_page_opens_from_disk(page, file, tmp_path):
    choose(page, file)
    with page.expect_download() as download:
        page.click("#save")
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    before = len(page.seen["requests"])
    page.goto(saved.as_uri())
    assert [url for url in page.seen["requests"][before:] if not url.startswith("data:")] == [saved.as_uri()]
    page.seen["requests"].clear()
    assert page.locator("svg.overlay").count() >= 2


def test_a_narrow_screen_is_wide_enough(page, file):
    page.set_viewport_size({"width": 360, "height": 800})
    choose(page, file)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.set_viewport_size({"width": 1200, "height": 900})


def test_reports_open_from_disk_without_a_request(open_page, classifier, tmp_path):
    labels = ["blue", "green", "red"] * 4
    images = [photo(label, 50 + k) for k, label in enumerate(labels)]
    p = np.roll(np.eye(3), 1, axis=1)[[0, 1, 2] * 4] * 0.7 + 0.1
    report = tmp_path / "report.html"
    report.write_text(image_report(classifier, images, labels, p, "x"))
    for found in open_page.seen.values():
        found.clear()
    open_page.goto(report.as_uri())
    assert open_page.seen["wrong"] == []
    assert {url for url in open_page.seen["requests"] if not url.startswith("data:")} == {report.as_uri()}
    assert open_page.locator("section[aria-labelledby=wrong] article").count() == 12
    for total in open_page.locator("p.sum").all():
        *lines, score = [Decimal(b) for b in total.locator("b").all_text_contents()]
        assert sum(lines) == score
    open_page.set_viewport_size({"width": 360, "height": 800})
    assert open_page.evaluate("document.documentElement.scrollWidth") <= 360
    open_page.set_viewport_size({"width": 1200, "height": 900})
