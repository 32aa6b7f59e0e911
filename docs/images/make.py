"""Makes the images of the README: pages of the demo's classifier of film reviews, photographed in Chromium.

    make demo
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
COLOURS = 64  # of an image: enough for pages, and small


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
    """A picture of the page from its top, as high as the page or so many pixels, with few colours."""
    whole = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    whole = whole.crop((0, 0, whole.width, min(height or whole.height, whole.height)))
    few = whole.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(HERE / f"{name}.png", optimize=True)
    print(HERE / f"{name}.png", few.size, (HERE / f"{name}.png").stat().st_size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, default=Path("demo"), help="folder that `make demo` wrote")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        model = options.demo / "model"
        classifier = RoutingClassifier.from_pretrained(model)
        why, on_data = Path(folder) / "why.html", Path(folder) / "report.html"
        classifier.explain(TEXT).to_html(why)
        write_report(classifier, on_data)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 960, "height": 700})
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
            page.hover("#result-a span:text-is('witty')")
            photograph(page, "page", 760)
        browser.close()


if __name__ == "__main__":
    main()
