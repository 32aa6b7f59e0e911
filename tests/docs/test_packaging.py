"""The wheel and the sdist build and work, the public names are pinned, and links lead somewhere."""

import email
import inspect
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import torch
import yaml

import vecroute as vr
from tests.helpers.guides import blocks
from tests.helpers.paths import ROOT

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]

# Every public name, no more and no less. A new one is added here, to ``__all__`` and to the changelog.
PUBLIC_NAMES = {
    "Concat",
    "Contributions",
    "Converge",
    "Credit",
    "Explanation",
    "GeneralRouting",
    "MatrixRouting",
    "PerVector",
    "Residual",
    "Routed",
    "RoutingClassifier",
    "RoutingHead",
    "Sequential",
    "Sum",
    "VectorRouting",
    "contributions",
    "distributed",
    "encoders",
    "explain_model",
    "load_reference_state_dict",
    "networks",
    "stability",
}

CONSTRUCTORS = {
    vr.VectorRouting: "n_inp n_out d_inp d_out n_iters=2 normalize=True implementation='auto'",
    vr.GeneralRouting: "A F G S n_inp n_out d_inp n_iters=2 compete_over='outputs' "
    "beta_use=None beta_ign=None",
    vr.MatrixRouting: "n_inp n_out d_cov d_inp d_out n_iters=3 p_model='gaussian' single_beta=False",
}


def test_the_public_names():
    assert set(vr.__all__) == PUBLIC_NAMES
    assert list(vr.__all__) == sorted(vr.__all__)
    assert all(hasattr(vr, name) for name in PUBLIC_NAMES)
    # `dir` also shows the submodules, which are not public names.
    shown = {name for name in dir(vr) if not name.startswith("_") and f"vecroute.{name}" not in sys.modules}
    assert shown <= PUBLIC_NAMES


@pytest.mark.parametrize("layer", CONSTRUCTORS, ids=lambda layer: layer.__name__)
def test_the_constructors(layer):
    parameters = inspect.signature(layer).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    promised = CONSTRUCTORS[layer].split()
    assert shown[: len(promised)] == promised
    # All further parameters have a default.
    assert all("=" in parameter for parameter in shown[len(promised) :])
    assert shown[-2:] == ["device=None", "dtype=None"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Build an sdist, and from it a wheel, with the installed packages, and return their folder."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {name for name in names if name.startswith("vecroute/")}
    source = (ROOT / "src").rglob("vecroute/**/*")
    assert package == {
        str(path.relative_to(ROOT / "src")) for path in source if path.is_file() and path.suffix != ".pyc"
    }
    assert "vecroute/py.typed" in package
    assert all(name.startswith(f"vecroute-{vr.__version__}.dist-info/") for name in names - package)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_metadata_of_the_wheel(wheel):
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("vecroute", vr.__version__)
    assert found["Requires-Python"] == ">=3.11"
    assert found["License-Expression"] == "MIT"
    needed = [line for line in found.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == ["torch>=2.11"]
    # Upper limits would exclude versions that people need. The tested versions are in constraints.txt.
    assert not any(re.search(r"<|==\d|~=", line) for line in found.get_all("Requires-Dist", []))


def test_the_sdist_holds_what_its_tests_need(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE", "CITATION.cff"}
    assert needed <= names
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    golden = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.npz")}
    assert golden
    assert tests | golden <= names


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "env")
    python = tmp_path / "env/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    # Use only the folder with torch. An editable install of this project in it is not importable.
    (site_packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (site_packages / "torch.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    example, printed = (block.code for block in blocks((ROOT / "README.md").read_text())[1:3])
    (tmp_path / "example.py").write_text(f"{example}\nprint(vr.__file__)\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-W", "error", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[:-1] == printed.splitlines()
    assert Path(lines[-1]) == site_packages / "vecroute/__init__.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_and_tests_that_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    for file, names in re.findall(r"(tests/[\w/]+\.py)((?:::\w+)*)", text):
        assert (ROOT / file).exists(), file
        for name in re.findall(r"\w+", names):
            assert re.search(rf"(def|class) {name}\b", (ROOT / file).read_text()), f"{file} has no {name}"
    named = set(re.findall(r"`(test_\w+)`", text))
    everything = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")) if named else ""
    assert {name for name in named if f"def {name}(" not in everything} == set()


def test_citation_cites_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert paper["title"] == "An Algorithm for Routing Vectors in Sequences"
    assert [author["family-names"] for author in paper["authors"]] == ["Heinsen"]
    assert paper["url"] == "https://arxiv.org/abs/2211.11754"


def test_commits_are_checked_as_make_check_does():
    """The hooks of .pre-commit-config.yaml run every tool of `make check`."""
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = " ".join(hook["entry"] for hook in local["hooks"])
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    tools = re.findall(r"\$\(BIN\)/(\w+(?: (?:check|format))?)", recipe[1])
    assert tools
    assert [tool for tool in tools if f".venv/bin/{tool}" not in hooks] == []


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.name
)
def test_issue_forms_ask_something(form):
    found = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= found.keys()
    assert all(part["attributes"]["label"] for part in found["body"])
