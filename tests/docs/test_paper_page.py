"""docs/paper.md has every line of both algorithms and every equation, each with source and a snippet."""

import re

import pytest

from tests.helpers.guides import blocks
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "paper.md").read_text()
# The paper numbers 15 lines in each of its algorithms, and 23 equations.
ITEMS = {"Algorithm 1, line": 15, "Algorithm 2, line": 15, "Equation": 23}


def sections(text: str, name: str) -> dict[int, str]:
    """Return the section of each line or equation, by its number; one section may have several of them."""
    found = {}
    for part in re.split(r"^(?=##)", text, flags=re.MULTILINE):
        heading = re.match(rf"### {name}s? (\d+)(?: (?:to|and) (\d+))?:", part)
        if heading:
            first, last = int(heading[1]), int(heading[2] or heading[1])
            found |= dict.fromkeys(range(first, last + 1), part)
    return found


@pytest.mark.parametrize("name", ITEMS)
def test_every_item_has_a_formula_its_source_and_a_snippet(name):
    found = sections(PAGE, name)
    assert sorted(found) == list(range(1, ITEMS[name] + 1))
    for number, section in found.items():
        assert "$$" in section, f"{name} {number} has no formula"
        code = blocks(section)
        assert any(block.source for block in code), f"{name} {number} has no line of the source"
        assert any("print(" in block.code for block in code if not block.source), f"{name} {number}"


def test_the_test_above_can_fail():
    text = "### Equations 1 and 2: two\n\n$$x$$\n\n### Equation 4: one\n"
    assert sorted(sections(text, "Equation")) == [1, 2, 4]
