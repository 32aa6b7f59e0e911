"""Headless Chromium for tests. A page must not log an error or send a request to another machine."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def chromium() -> str:
    """Return the path of Chromium. Skip the test, with the reason, if it or its driver is missing."""
    pytest.importorskip("playwright", reason="needs playwright: pip install 'vecroute[browser]'")
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium (`make test-all` tries to)")
    return found


@contextlib.contextmanager
def browsing(profile: Path, path: str) -> Iterator:
    """Open a page in a browser with a new profile."""
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
    """Open the page of a server. At the end check for errors and for requests to other machines."""
    for found in page.seen.values():
        found.clear()
    page.goto(address)
    yield page
    assert page.seen["wrong"] == []
    assert {url for url in page.seen["requests"] if not url.startswith((address, "blob:"))} == set()


def watch(page) -> dict[str, list[str]]:
    """Record the errors of a page and the addresses of its requests from now on."""
    seen: dict[str, list[str]] = {"wrong": [], "requests": []}
    page.on("console", lambda message: seen["wrong"].append(message.text))
    page.on("pageerror", lambda error: seen["wrong"].append(str(error)))
    page.on("requestfailed", lambda request: seen["wrong"].extend(failure(request)))
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.on("dialog", lambda dialog: (seen["wrong"].append(dialog.message), dialog.dismiss()))
    return seen


def failure(request) -> list[str]:
    """Return why a request failed, or None if the page aborted it, as it does during typing."""
    return [] if request.failure == "net::ERR_ABORTED" else [f"{request.url}: {request.failure}"]
