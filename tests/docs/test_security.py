"""The page of attacks: each row has its own entry point and a test that exists."""

import ast
import functools
import re

from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs/security.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if re.match(r"\| .*`tests/", line)
]


@functools.cache
def names_in(file: str) -> set[str]:
    """Return the names of the tests in a file."""
    return {
        node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_row_is_an_input_a_door_what_happens_and_a_test_that_exists():
    assert {len(row) for row in ROWS} == {4}
    missing = []
    for row in ROWS:
        file, _, name = row[3].strip("`").partition("::")
        if not name.startswith("test_") or not (ROOT / file).exists() or name not in names_in(file):
            missing.append(row[3])
    assert missing == []


def test_there_are_60_different_pairs_of_input_and_door():
    pairs = {(row[0], row[1]) for row in ROWS}
    assert len(pairs) == len(ROWS) >= 60
