"""Every block of Python on every page is run by a test, is copied from the source, or says why neither."""

import doctest
import importlib
import re
import shlex
import sys

import pytest
import torch

from tests.helpers.guides import blocks, python_of, run
from tests.helpers.paths import ROOT

sys.path.append(str(ROOT / "scripts"))
from site_hooks import line_of

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# Pages whose code another test runs, because it needs more than the page.
ELSEWHERE = {
    "README.md": "tests/docs/test_readme.py",
    "docs/classifier.md": "tests/classifier/test_classifier.py",
    "docs/credit.md": "tests/docs/test_credit_guide.py",
    "docs/explanations.md": "tests/explain/test_explanation.py",
    "docs/scaling.md": "tests/docs/test_scaling.py",
    "docs/views.md": "tests/docs/test_views.py",
}
# Notebooks; building the site runs them, which tests/docs/test_site.py does.
NOTEBOOKS = "docs/tutorials/"


def name_of(page) -> str:
    return str(page.relative_to(ROOT))


def runs_here(page) -> bool:
    name = name_of(page)
    return name not in ELSEWHERE and not name.startswith(NOTEBOOKS) and bool(python_of(page.read_text()))


@pytest.mark.parametrize("page", list(filter(runs_here, PAGES)), ids=name_of)
def test_a_page_prints_what_it_says(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VECROUTE_CACHE", str(tmp_path / "cache"))
    before = torch.get_default_dtype()
    try:
        printed, expected = run(page.read_text(), capsys, page)
    finally:
        torch.set_default_dtype(before)
    assert printed == expected


def test_the_test_above_can_fail(capsys):
    printed, expected = run("```python\nprint(1 + 1)  # 3\n```\n", capsys)
    assert (printed, expected) == (["2"], ["3"])


def test_what_runs_elsewhere_does():
    for page, test in ELSEWHERE.items():
        assert page.removeprefix("docs/") in (ROOT / test).read_text(), f"{test} does not run {page}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_from_the_source_is_in_the_source(page):
    for block in blocks(page.read_text()):
        if block.source:
            line_of(block.source, block.code)


def test_the_test_above_can_fail_too():
    with pytest.raises(ValueError, match="has no such lines any more"):
        line_of("src/vecroute/ops/reference.py", "R = 1\n")


def test_examples_in_docstrings_run():
    """No docstring has an example yet. The examples of public names are on the pages of docs/api."""
    for path in sorted((ROOT / "src" / "vecroute").rglob("*.py")):
        text = path.read_text()
        if ">>> " in text:
            name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            assert doctest.testmod(importlib.import_module(name)).failed == 0, path


# Commands

PROGRAMS = {"vecroute", "python", "make", "pip", "torchrun", "pytest"}


def commands(page) -> list[list[str]]:
    """Return the lines of blocks without a language that start one of our programs, as words."""
    lines = "\n".join(b.code for b in blocks(page.read_text()) if b.language in ("", "sh", "bash"))
    lines = lines.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if "'" not in line]
    return [line for line in words if PROGRAMS & set(line[:1] + line[3:4])]


def options_of(subcommand: str) -> set[str]:
    """Return every option that ``vecroute SUBCOMMAND`` knows."""
    import typer

    from vecroute.cli import app

    command = typer.main.get_command(app).commands[subcommand]
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


def mistakes(words: list[str]) -> list[str]:
    """Return the names in a command that do not exist: a subcommand, an option, a file, a target of make."""
    found = []
    for previous, word in zip(["", *words], words, strict=False):
        if previous == "make" and not re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE):
            found.append(f"make {word}")
        if re.match(r"(benchmarks|examples|scripts|tests)/\S+\.py", word):
            found += [word] if not (ROOT / word.partition("::")[0]).exists() else []
    if "vecroute" in words[:-1]:
        subcommand, *rest = words[words.index("vecroute") + 1 :]
        try:
            known = options_of(subcommand)
        except KeyError:
            return [*found, f"vecroute {subcommand}"]
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        found += [f"vecroute {subcommand} {option}" for option in sorted(given - known)]
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_name_what_exists(page):
    assert [mistake for line in commands(page) for mistake in mistakes(line)] == []


@pytest.mark.parametrize(
    "line",
    ["make nothing", "python benchmarks/nothing.py", "vecroute nothing x", "vecroute fit x.csv --nothing 1"],
)
def test_the_test_of_commands_can_fail(line):
    assert len(mistakes(shlex.split(line))) == 1
