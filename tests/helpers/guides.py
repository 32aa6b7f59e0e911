"""Pages with code: which blocks they have, and what their Python prints."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

FENCE = re.compile(
    r"^(?P<not_run><!-- not run: (?P<why>.+?) -->\n+)?^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """Code between fences: its language, the source it is copied from, why no test runs it, its text."""

    language: str
    source: str | None
    why_not: str | None
    code: str


def blocks(text: str) -> list[Block]:
    """Return every block between fences, in order."""
    found = []
    for match in FENCE.finditer(text):
        source = re.search(r'title="(src/[^"]+)"', match["info"])
        language = match["info"].split(" ", 1)[0]
        found.append(Block(language, source and source[1], match["why"], match["code"]))
    return found


def python_of(text: str) -> list[str]:
    """Return the Python blocks that are to be run, from top to bottom."""
    return [b.code for b in blocks(text) if b.language == "python" and not b.source and not b.why_not]


def run(text: str, capsys: pytest.CaptureFixture, path: Path | None = None) -> tuple[list[str], list[str]]:
    """Return the output of the Python blocks of a text, and the output that their comments state."""
    codes = python_of(text)
    namespace: dict = {}
    for code in codes:
        exec(compile(code, str(path or "guide"), "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    expected = [
        said for code in codes for said in re.findall(r"^\s*print\(.*\)  # (.*)$", code, re.MULTILINE)
    ]
    assert len(expected) == sum(code.count("print(") for code in codes)
    return printed, expected
