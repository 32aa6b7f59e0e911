"""Makes the images of the README: pages of the demos' classifiers, photographed in Chromium.

    make demo
    vecroute demo --images
    python docs/images/make.py

Needs the extras demo, serve and browser, and chromium.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from sklearn.model_selection import train_test_split

from vecroute.classifier import RoutingClassifier
from vecroute.demo import SEED, TEST_FRACTION, sentence_polarity
from vecroute.explain.report import report

HERE = Path(__file__).parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TEXT = "A gorgeous, witty, seductive movie. The plot, though, is as thin as paper and the jokes fall flat."
OTHER = "A gorgeous, witty, seductive movie. The plot, though, is deep and the jokes are hilarious."
N_TEST = 400  # sentences in the report
N_LINES = 8  # of the account of the second text
COLOURS = 256  # of an image; with fewer, shades of blue become grey


def write_report(classifier: RoutingClassifier, file: Path) -> None:
    """The report on some of the sentences that the demo holds out."""
    table = sentence_polarity()
    _, test = train_test_split(table, test_size=TEST_FRACTION, random_state=SEED, stratify=table["label"])
    test = test[:N_TEST]
    probabilities = classifier.predict_proba(test["text"])
    file.write_text(report(classifier, test["text"], test["label"], probabilities, "film reviews, held out"))


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server."""
    command = [sys.executable, "-m", "vecroute", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def photograph(page: Any, name: str, height: int | None = None) -> None:
    """Take a picture of the page from its top, at most ``height`` pixels high, with few colours."""
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    whole = whole.crop((0, 0, whole.width, min(height or whole.height, whole.height)))
    keep(whole, name)


def keep(image: Image.Image, name: str) -> None:
    few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(HERE / f"{name}.png", optimize=True)
    print(HERE / f"{name}.png", few.size, (HERE / f"{name}.png").stat().st_size)


def make_texts(playwright: Any, demo: Path) -> None:
    """The pages about texts."""
    with tempfile.TemporaryDirectory() as folder:
        model = demo / "model"
        classifier = RoutingClassifier.from_pretrained(model)
        why, on_data = Path(folder) / "why.html", Path(folder) / "report.html"
        classifier.explain(TEXT).to_html(why, states=classifier.explain(TEXT, of="states"))
        write_report(classifier, on_data)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1100, "height": 700})
        page.goto(why.as_uri())
        photograph(page, "explanation")
        page.goto(on_data.as_uri())
        depths = page.locator("section[aria-labelledby=depths]").bounding_box()
        photograph(page, "report", round(depths["y"] + depths["height"]))
        page.set_viewport_size({"width": 1280, "height": 900})
        with served(model) as address:
            page.goto(address)
            page.fill("#text-a", TEXT)
            page.click("#compare")
            page.fill("#text-b", OTHER)
            page.wait_for_selector("#result-b h2")
            page.hover("#result-a span:text-is('thin')")  # its depths hide nothing of the text
            line = page.locator("#result-b tbody tr").nth(N_LINES - 1).bounding_box()
            photograph(page, "page", round(line["y"] + line["height"]))
        browser.close()


def make_images(playwright: Any, demo: Path) -> None:
    """The maps of the demo, of the first held-out image of each shape, and the page with one of these."""
    with Image.open(demo / "maps.png") as maps:
        keep(maps, "maps")
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    with served(demo / "model") as address:
        page.goto(address)
        page.set_input_files("#file", next(iter(sorted((demo / "images/test/star").glob("*.png")))))
        page.wait_for_selector("#result-a h2")
        tables = page.locator("#result-a .tables").bounding_box()
        photograph(page, "image-page", round(tables["y"] + tables["height"]))
    browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--demo", type=Path, default=Path("demo"), help="folder that `make demo` wrote")
    add("--demo-images", type=Path, default=Path("demo-images"), help="that `vecroute demo --images` wrote")
    add("--only", choices=["texts", "images"], help="all if left out")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        if options.only != "images":
            make_texts(playwright, options.demo)
        if options.only != "texts":
            make_images(playwright, options.demo_images)


if __name__ == "__main__":
    main()
