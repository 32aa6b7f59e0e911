"""Every public name has a place in docs/api: a signature, shapes and an example that runs."""

import importlib
import inspect
import re

import pytest

import vecroute as vr
import vecroute.corpora
from tests.helpers.guides import blocks
from tests.helpers.paths import ROOT

PAGES = {page: page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
# Public modules, and the names in them that people call; None for every class and function of the module.
MODULES = {
    "vecroute.networks": None,
    "vecroute.layers.stability": ["probe", "jacobian_penalty"],
    "vecroute.distributed": vr.distributed.__all__,
    "vecroute.corpora": vecroute.corpora.__all__,
    "vecroute.encoders": vr.encoders.__all__,
    "vecroute.heads": ["PoolingHead", "RoutingHead", "make_head"],
    "vecroute.demo": ["sentence_polarity"],
    "vecroute.explain": ["Explanation", "Part"],
    "vecroute.explain.faithfulness": ["measure", "summarize"],
}
# Names that neither take nor return a tensor.
WITHOUT_SHAPES = {"Converge", "make_head", "own_rows", "sentence_polarity", "Part", *vecroute.corpora.__all__}
SHAPE = re.compile(r"\[(\.\.\., )?[a-z]\w*(, \w+)*\]|\[\.\.\.")


def own_names(module) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]


def public() -> dict[str, object]:
    """Return every public class and function, by its name."""
    found = {name: getattr(vr, name) for name in vr.__all__ if not inspect.ismodule(getattr(vr, name))}
    for path, names in MODULES.items():
        module = importlib.import_module(path)
        found |= {name: getattr(module, name) for name in names or own_names(module)}
    return found


PUBLIC = public()


def documented(text: str) -> set[str]:
    """Return the names that a page shows with their signatures."""
    found = set()
    for path, options in re.findall(r"^::: ([\w.]+)\n((?: +.*\n)*)", text + "\n", re.MULTILINE):
        members = re.search(r"members: \[(.*)\]", options)
        if members:
            found |= set(members[1].split(", "))
        elif path == "vecroute.networks":
            found |= set(own_names(vr.networks))
        else:
            found.add(path.rpartition(".")[2])
    return found


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_has_its_place(name):
    (text,) = [text for text in PAGES.values() if name in documented(text)]
    code = "".join(block.code for block in blocks(text) if block.language == "python")
    assert re.search(rf"\b{name}\b", code) or name in ("Tokenized", "Tokens", "Batch", "Patches"), (
        "no example"
    )
    doc = inspect.getdoc(PUBLIC[name]) or ""
    section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
    assert name in WITHOUT_SHAPES or SHAPE.search(doc + section) or SHAPE.search(source_of(name)), "no shapes"


def source_of(name: str) -> str:
    """Return the comments beside the fields of a tuple, or the lines of a short class."""
    return inspect.getsource(PUBLIC[name])


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_documented_arguments_exist(name):
    doc = inspect.getdoc(PUBLIC[name]) or ""
    arguments = re.search(r"^Args:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    if arguments is None:
        return
    described = {
        word
        for line in re.findall(r"^    (\w[\w, ]*):", arguments[1], re.MULTILINE)
        for word in line.split(", ")
    }
    known = set(inspect.signature(PUBLIC[name]).parameters)
    assert described <= known, f"{name} has no argument {sorted(described - known)}"


def test_the_index_names_every_public_name():
    index = PAGES[ROOT / "docs" / "api" / "index.md"]
    assert [name for name in vr.__all__ if f"`vr.{name}`" not in index] == []
