"""Write the tables of the documents from the rows of benchmarks: ``python scripts/tables.py [--check]``.

A table is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; NAME is one of ``TABLES``. With
--check nothing is written, and the exit code is 1 if a table differs from its rows. A table of figures that
has no rows comes after ``<!-- by hand: REASON -->``.
"""

import re
import sys
from pathlib import Path

from table_rows import ROOT, commits, commits_line
from tables_accuracy import accuracy, accuracy_short, images_accuracy, little_data
from tables_explanations import (
    agreement,
    faithfulness,
    faithfulness_short,
    faithfulness_words,
    images_maps,
    planted,
    shap,
)
from tables_scale import billion, corpus, killed, paper_claims, sharded
from tables_speed import (
    attention,
    classifier,
    eager,
    eager_heads,
    eager_kinds,
    heads,
    linear,
    million,
    on_a_cpu,
    out_of_core,
    serve,
    throughput,
)

MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

TABLES = {
    "accuracy": accuracy,
    "accuracy-short": accuracy_short,
    "agreement": agreement,
    "attention": attention,
    "classifier": classifier,
    "cpu": on_a_cpu,
    "eager": eager,
    "eager-heads": eager_heads,
    "eager-kinds": eager_kinds,
    "eager-short": lambda: eager(others=False),
    "faithfulness-imdb": lambda: faithfulness("imdb"),
    "faithfulness-short": faithfulness_short,
    "faithfulness-sst2": lambda: faithfulness("sst2"),
    "faithfulness-words": lambda: faithfulness_words("sst2", "sentences"),
    "faithfulness-words-imdb": lambda: faithfulness_words("imdb", "reviews"),
    "heads": heads,
    "linear": linear,
    "images-accuracy": images_accuracy,
    "images-maps": images_maps,
    "little-data": little_data,
    "million": million,
    "billion": billion,
    "corpus": corpus,
    "killed": killed,
    "paper-claims": paper_claims,
    "throughput": throughput,
    "planted": planted,
    "out-of-core-cpu": lambda: out_of_core("cpu"),
    "out-of-core-gpu": lambda: out_of_core("gpu"),
    "serve": serve,
    "sharded-model": sharded,
    "shap": shap,
}


def filled(text: str, *, with_commits: bool = True) -> str:
    """Return a document with its tables written from the rows, and the commits of the rows below each.

    The README shows no commits. Its tables are also on other pages, or show rows of a longer table.
    """

    def made(match: re.Match[str]) -> str:
        commits.clear()
        content = TABLES[match[2]]()
        return f"{match[1]}{content}{commits_line() if with_commits else ''}{match[3]}"

    return MARKED.sub(made, text)


def documents() -> list[Path]:
    """Return the pages that have tables between markers."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in pages if MARKED.search(page.read_text()))


def main() -> int:
    check, stale = "--check" in sys.argv[1:], []
    for page in documents():
        before = page.read_text()
        after = filled(before, with_commits=page.name != "README.md")
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after)
    for name in stale:
        print(f"{name}: {'differs from its rows' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
