"""The guide to credit: its code runs, and prints what it says."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "credit.md"


def run(text: str, capsys: pytest.CaptureFixture) -> tuple[list[str], list[str]]:
    """What the Python blocks of a text print, and what the comments after each print say that they do."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "guide", "exec"), namespace)
    expected = [
        said for block in blocks for said in re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    ]
    assert len(expected) == sum(block.count("print(") for block in blocks)
    return capsys.readouterr().out.splitlines(), expected


def test_the_guide_prints_what_it_says(capsys):
    printed, expected = run(GUIDE.read_text(), capsys)
    assert len(expected) >= 10
    assert printed == expected


def test_the_test_above_can_fail(capsys):
    printed, expected = run("```python\nprint(1 + 1)  # 3\n```\n", capsys)
    assert (printed, expected) == (["2"], ["3"])
