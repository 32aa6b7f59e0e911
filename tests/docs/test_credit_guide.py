"""The code of the guide to credit runs and prints the stated output."""

from tests.helpers.guides import run
from tests.helpers.paths import ROOT

GUIDE = ROOT / "docs" / "credit.md"


def test_the_guide_prints_what_it_says(capsys):
    printed, expected = run(GUIDE.read_text(), capsys)
    assert len(expected) >= 10
    assert printed == expected


def test_the_test_above_can_fail(capsys):
    printed, expected = run("```python\nprint(1 + 1)  # 3\n```\n", capsys)
    assert (printed, expected) == (["2"], ["3"])
