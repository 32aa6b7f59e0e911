"""The README: short, and its examples print what it says."""

import re

from tests.helpers.guides import blocks
from tests.helpers.paths import ROOT

README = (ROOT / "README.md").read_text()
CODE = [block for block in blocks(README) if block.language in ("python", "text")]


def test_it_is_short():
    assert len(README.splitlines()) <= 120
    assert len(CODE[0].code.splitlines()) <= 12
    assert re.match(r"# vecroute\n\n`vecroute` is ", README)


def test_its_examples_print_what_it_says(tmp_path, monkeypatch, capsys):
    """Run the README from top to bottom. A block of text must be the output of the Python before it."""
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path))
    names: dict = {}
    shown = 0
    for block in CODE:
        if block.language == "python":
            exec(compile(block.code, "README.md", "exec"), names)
        else:
            assert capsys.readouterr().out == block.code
            shown += 1
    assert shown == sum(block.language == "python" for block in CODE)
