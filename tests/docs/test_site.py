"""The site builds without a warning, its links lead somewhere, and readers find answers without a network."""

import functools
import http.server
import os
import posixpath
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.helpers.browser import browsing, chromium, fresh
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

# Search words of a reader, and the pages that answer them.
QUESTIONS = {
    "where R is computed": ["questions.html#where-is-r-computed", "paper.html#where-r-is-computed"],
    "how to explain an existing model": [
        "questions.html#how-do-i-explain-an-existing-model",
        "tutorials/model.html#",
    ],
    "what phi means and does not": ["questions.html#what-does-phi-mean-and-what-does-it-not-mean"],
    "why padding cannot change a result": [
        "questions.html#why-can-padding-not-change-a-result",
        "tutorials/layer.html#why-padding-cannot-change-a-result",
    ],
    "how to add a pooling head": [
        "contributing.html#add-a-pooling-head",
        "questions.html#how-do-i-add-a-pooling-head",
    ],
}


class Page(HTMLParser):
    """The links of a page, its anchors, and the files that it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(found["href"])
        elif tag in ("script", "img", "iframe") and "src" in found:
            self.loads.append(found["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Page]:
    found = {str(path.relative_to(site)): Page(path.read_text()) for path in site.rglob("*.html")}
    return {name: page for name, page in found.items() if name != "404.html"}


def targets(name: str, page: Page) -> Iterator[tuple[str, str]]:
    """Yield the places of the site that a page links to: file and anchor."""
    for link in page.links:
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = unquote(link).partition("#")
            yield posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name, anchor


def test_links_lead_somewhere(site, pages):
    broken = []
    for name, page in pages.items():
        for path, anchor in targets(name, page):
            path = "index.html" if path == "." else path
            if not (site / path).exists() or (path in pages and anchor and anchor not in pages[path].anchors):
                broken.append(f"{name}: {path}#{anchor}")
    assert broken == []
    assert len(pages) > 40


def test_it_loads_nothing_from_elsewhere(site, pages):
    loads = {load for page in pages.values() for load in page.loads}
    assert loads
    assert {load for load in loads if re.match(r"[a-z]+:|//", load) and not load.startswith("data:")} == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"url\([\"']?(https?:)?//", styles)


def test_tables_of_contents_of_the_api_name_each_class_once(site):
    link = r'<a href="#[^"]*" class="md-nav__link">\s*<span class="md-ellipsis">(.*?)</span>'
    for page in (site / "api").glob("*.html"):
        names = [re.sub(r"<.*?>", "", name).strip() for name in re.findall(link, page.read_text(), re.DOTALL)]
        assert names or page.name == "index.html", page.name
        assert [name for name, after in pairwise(names) if name == after] == [], page.name


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_at_most_two_links_from_the_start(question, pages):
    content = {"index.html"}
    for _ in range(2):
        reached = {target for name in content & pages.keys() for target in targets(name, pages[name])}
        if {f"{path}#{anchor}" for path, anchor in reached} & set(QUESTIONS[question]):
            return
        content |= {path for path, _ in reached}
    pytest.fail(f"two links from the start do not lead to {QUESTIONS[question]}")


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile"), chromium()) as page:
        yield page


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_among_the_first_three_results(question, address, page):
    with fresh(page, address):
        page.fill("input.md-search__input", question)
        page.wait_for_selector(".md-search-result__item")
        page.wait_for_timeout(500)
        results = page.eval_on_selector_all(
            ".md-search-result__item",
            "items => items.map(item => Array.from(item.querySelectorAll('a')).map(a => a.href))",
        )
    first = [re.sub(r"\?h=[^#]*", "", link.removeprefix(address)) for item in results[:3] for link in item]
    assert set(first) & set(QUESTIONS[question]), first


@pytest.mark.parametrize("path", ["index.html", "paper.html", "tutorials/layer.html", "api/layers.html"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_fits_its_window(path, width, address, page):
    page.set_viewport_size({"width": width, "height": 900})
    with fresh(page, address):
        page.goto(f"{address}{path}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
