"""Guides whose code runs."""

import re

import pytest


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
