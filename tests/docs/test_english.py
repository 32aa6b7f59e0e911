"""Comments, docstrings, messages and pages contain no phrase that readers found hard to understand."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

# Phrases that were in the repository once. Only their authors understood them.
PHRASES = (
    "worth its while",
    "fell through on dev",
    "of it, one update is",
    "each one file without",
    "depend on what a sum",
    "is not worked for",
    "whatever is shown adds up",
    "goes on where it was",
    "the same of some samples",
    "pairs wait for it",
    "and after room for",
    "the same with those that wait",
    "in so many of x_inp",
    "which have all samples",
    "the one of the same",
    "would change places",
    "of dot, nothing yet",
    "this is the end of grad",
    "inputs used, and here",
    "multiplied with besides",
    "nothing but itself",
    "whom the folders are no business",
    "though it be",
    "has come to its end",
    "what is left has one together",
    "as many wait as may",
    "equally many",
    "however short",
    "gpus alone",
    "have much to say",
    "arguments are those of",
    "than float16 can say",
    "operands are times",
    "where there is one;",
    "on its own, at x",
    "what came of the",
    "fitted in no time",
)
# Write the noun instead of these words.
WORDS = ("that of", "of which", "whoever", "what is kept")
PATTERNS = {
    "a sentence that begins with 'Of'": re.compile(r"(?<![\w'])Of\s+(?=[a-z0-9`])"),
    # Name the argument, or say "this many".
    "'so many' of a number": re.compile(r"\b(?:at most|of|for|after|with|in|on|to|if)\s+so\s+many\b"),
    # Write "Do the same as ``x``".
    "'As ``x``' without a verb": re.compile(r"\AAs ``[\w.]+``\.\Z"),
    **{
        f"'{phrase}'": re.compile(rf"\b{phrase}\b".replace(" ", r"\s+"), re.IGNORECASE)
        for phrase in (*WORDS, *PHRASES)
    },
}
FOLDERS = ("src", "docs", "benchmarks", "scripts", "examples", "tests")
# The changelog describes earlier versions, and this file quotes the phrases.
EXCLUDED = {ROOT / "CHANGELOG.md", Path(__file__)}


def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*.md"))
    return sorted({path for path in found if path.suffix in PROSE and path not in EXCLUDED})


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each block of comments, docstring and string with several words."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    for line in comments:
        if line - 1 not in comments:
            end = next(k for k in range(line, line + len(comments) + 1) if k not in comments)
            yield line, "\n".join(comments[k] for k in range(line, end))
    tree = ast.parse(text)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text_like = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text_like and (node in docstrings or node.value.count(" ") > 2):
            yield node.lineno, node.value


def of_cuda(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each block of comments."""
    for match in re.finditer(r"(?:[ \t]*//.*\n)+|//.*", text):
        yield text[: match.start()].count("\n") + 1, match.group()


def of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the page without its blocks of code."""
    yield (
        1,
        re.sub(r"^```.*?^```", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL | re.MULTILINE),
    )


PROSE = {".py": of_python, ".cu": of_cuda, ".md": of_page, ".html": of_page, ".js": of_page}


def hard_phrases(path: Path) -> list[str]:
    """Return a line for each hard phrase in the prose of a file."""
    found = []
    for line, text in PROSE[path.suffix](path.read_text()):
        # A phrase may continue on the next line. The marks of comments become spaces, so that places stay.
        flat = re.sub(r"(?<=\n)[ \t]*(?:#|//)", lambda m: " " * len(m.group()), text)
        for name, pattern in PATTERNS.items():
            found += [
                f"{path}:{line + flat[: m.start()].count(chr(10))}: {name}" for m in pattern.finditer(flat)
            ]
    return found


def test_the_prose_is_plain():
    found = [phrase for path in files() for phrase in hard_phrases(path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", '"""Sum.\n\nThe error is that\nof x."""\n', "a.py:3: 'that of'"),
        ("a.py", "x = 1\n# Scores.\n# Of a row,\n# the sum.\n", "a.py:3: a sentence that begins with 'Of'"),
        ("a.py", 'print("stop whoever is late")\n', "a.py:1: 'whoever'"),
        ("a.py", "# texts of at most so\n# many words\nx = 1\n", "a.py:1: 'so many' of a number"),
        ("a.py", 'def f():\n    """As ``g``."""\n', "a.py:2: 'As ``x``' without a verb"),
        ("a.py", 'def f():\n    """Of it."""\n', "a.py:2: a sentence that begins with 'Of'"),
        ("a.cu", "int i;\n// written once: pairs\n// wait for it\n", "a.cu:2: 'pairs wait for it'"),
        ("a.md", "Text.\n\n```\nthat of\n```\nWhat is kept, is.\n", "a.md:6: 'what is kept'"),
    ],
)
def test_hard_phrases_are_found(name, text, expected, tmp_path):
    (tmp_path / name).write_text(text)
    assert [line.removeprefix(f"{tmp_path}/") for line in hard_phrases(tmp_path / name)] == [expected]


def test_names_and_code_are_no_prose(tmp_path):
    (tmp_path / "a.py").write_text("whoever = that_of = 1\nOf = whoever\n")
    assert hard_phrases(tmp_path / "a.py") == []
