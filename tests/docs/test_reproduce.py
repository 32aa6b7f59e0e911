"""The page that lists claims: every command exists with its options, and every file of rows is there."""

import argparse
import importlib
import re
import shlex
import sys

import pytest

from tests.helpers.paths import ROOT

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]

PAGE = (ROOT / "docs" / "reproduce.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
STEP = r"\t\$\(BIN\)/(python benchmarks/.+)"
COMMANDS = sorted({*re.findall(r"`(python benchmarks/[^`]+)`", PAGE), *re.findall(STEP, MAKEFILE)})
HEAD = "| claim | command | minutes | device | rows |"


class ParsedError(Exception):
    pass


@pytest.fixture
def parse_only(monkeypatch):
    """Stop scripts after they have parsed their command line, whatever the state of the tree is."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, arguments=None, namespace=None):
        parse(self, arguments, namespace)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(importlib.import_module("rows"), "changes", list)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_or_of_make_is_understood(command, parse_only, monkeypatch):
    _, script, *options = shlex.split(re.sub(r"\$\((\w+)\)", r"\1", command))
    assert (ROOT / script).is_file(), f"{command}: there is no {script}"
    if "--help" in options:
        return
    monkeypatch.setattr(sys, "argv", [script, *options])
    module = importlib.import_module(script.removeprefix("benchmarks/").removesuffix(".py"))
    with pytest.raises(ParsedError):
        module.main()


def claims() -> list[list[str]]:
    """Return the cells of the table of claims."""
    lines = PAGE[PAGE.index(HEAD) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_claim_has_its_rows_or_says_that_it_has_none():
    listed = set()
    for claim, *_, files in claims():
        for name, missing in re.findall(r"`([\w.]+)`( \(not measured yet\))?", files):
            listed.add(name)
            exists = (ROOT / "benchmarks" / "results" / name).exists()
            assert exists != bool(missing), f"{claim}: {name} {'exists' if exists else 'is missing'}"
    # Files that no table and no claim needs.
    others = {"accuracy_differences.csv", "experiments_little_data.csv", "experiments_shapes.csv"}
    found = {path.name for path in (ROOT / "benchmarks" / "results").glob("*.csv")}
    assert not found - listed - others, "name the claim and the command in docs/reproduce.md"


def test_pages_with_rows_from_a_changed_tree_are_listed():
    section = PAGE[PAGE.index("## Rows from a changed tree") :]
    for page in (ROOT / "docs").glob("*.md"):
        changed = re.search(r"^Rows: .*with uncommitted changes", page.read_text(), re.MULTILINE)
        assert bool(changed) == (f"]({page.name})" in section), page.name


def test_steps_of_make_are_those_of_the_page():
    steps = re.search(r"^GPU_STEPS := (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert all(f"`gpu-{step}`" in PAGE and f"build/gpu/{step}.done:" in MAKEFILE for step in steps)
