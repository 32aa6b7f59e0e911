"""A real browser for tests: Chromium without a window, in which nothing may go wrong or leave the machine."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def chromium() -> str:
    """Where Chromium is; tests are skipped, saying why, where it or what drives it is not."""
    pytest.importorskip("playwright", reason="needs playwright: pip install 'vecroute[browser]'")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium (`make test-all` tries to)")
    return found


@contextlib.contextmanager
def browsing(profile: Path, path: str) -> Iterator:
    """A page of a browser with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=path, args=FLAGS, viewport={"width": 1200, "height": 900}
        )
        page = context.new_page()
        page.seen = watch(page)
        yield page
        context.close()


@contextlib.contextmanager
def fresh(page, address: str) -> Iterator:
    """The page of a server, fresh; in the end nothing went wrong and no request left the machine."""
    for found in page.seen.values():
        found.clear()
    page.goto(address)
    yield page
    assert page.seen["wrong"] == []
    assert {url for url in page.seen["requests"] if not url.startswith((address, "blob:"))} == set()


def watch(page) -> dict[str, list[str]]:
    """What goes wrong in a page, and where its requests go, from now on."""
    seen: dict[str, list[str]] = {"wrong": [], "requests": []}
    page.on("console", lambda message: seen["wrong"].append(message.text))
    page.on("pageerror", lambda error: seen["wrong"].append(str(error)))
    page.on("requestfailed", lambda request: seen["wrong"].extend(failure(request)))
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.on("dialog", lambda dialog: (seen["wrong"].append(dialog.message), dialog.dismiss()))
    return seen


def failure(request) -> list[str]:
    """Why a request failed, unless the page took it back, as it does while somebody types."""
    return [] if request.failure == "net::ERR_ABORTED" else [f"{request.url}: {request.failure}"]
