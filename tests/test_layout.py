"""The root of the package has few modules, and the folders of tests mirror the folders of the source."""

from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

MODULES_AT_ROOT = 4
# Folders that mirror no package: helpers, outputs of the public implementation, and fuzzing.
SHARED = {"helpers", "golden", "fuzz"}
# Folders of the repository, other than the package, that have tests.
BESIDE = {"benchmarks", "docs", "examples", "scripts"}
# Kinds of files that a command leaves where it runs; none belongs at the root of the repository.
LEFTOVERS = {".whl", ".gz", ".html", ".safetensors", ".csv", ".png", ".jsonl", ".parquet", ".onnx"}


def folders(path: Path) -> set[str]:
    return {child.name for child in path.iterdir() if child.is_dir() and child.name != "__pycache__"}


def disorder(root: Path) -> list[str]:
    """Return a line for every file or folder in the wrong place."""
    package, tests = root / "src" / "vecroute", root / "tests"
    found = []
    modules = sorted(path.name for path in package.glob("*.py"))
    if len(modules) > MODULES_AT_ROOT:
        found.append(f"{len(modules)} modules at the root of the package: {', '.join(modules)}")
    packages = {name for name in folders(package) if (package / name / "__init__.py").exists()}
    for name in sorted(folders(tests) - SHARED - packages - (BESIDE & folders(root))):
        found.append(f"tests/{name} tests no package")
    for name in sorted(packages - folders(tests)):
        found.append(f"src/vecroute/{name} has no tests/{name}")
    for path in sorted(tests.glob("test_*.py")):
        name = path.stem.removeprefix("test_")
        if name in packages:
            found.append(f"tests/{path.name} belongs into tests/{name}")
    for path in sorted(tests.rglob("*.py")):
        if not (path.parent / "__init__.py").exists():
            found.append(f"{path.relative_to(root)} lies in a folder without __init__.py")
    return found


def test_everything_is_in_its_place():
    assert disorder(ROOT) == []


def leftovers(root: Path) -> list[str]:
    """Return the files at the root of a repository that some command left there."""
    return sorted(path.name for path in root.iterdir() if path.suffix in LEFTOVERS)


def test_no_command_left_a_file_at_the_root(tmp_path):
    assert leftovers(ROOT) == []
    (tmp_path / "cfgv-3.5.0-py2.py3-none-any.whl").touch()
    assert leftovers(tmp_path) == ["cfgv-3.5.0-py2.py3-none-any.whl"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("src/vecroute/fifth.py", "5 modules at the root of the package"),
        ("src/vecroute/novelty/__init__.py", "src/vecroute/novelty has no tests/novelty"),
        ("tests/novelty/__init__.py", "tests/novelty tests no package"),
        ("tests/assets/__init__.py", "tests/assets tests no package"),
        ("tests/scripts/__init__.py", "tests/scripts tests no package"),
        ("tests/test_ops.py", "tests/test_ops.py belongs into tests/ops"),
        ("tests/helpers/x.py", "lies in a folder without __init__.py"),
    ],
)
def test_the_test_above_can_fail(file, message, tmp_path):
    modules = ("__init__", "__main__", "networks", "storage", "ops/__init__", "assets/x/y")
    tests = ("__init__", "conftest", "ops/__init__", "ops/test_x", "docs/__init__")

    def write(name: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    (tmp_path / "docs").mkdir()
    for name in modules:
        write(f"src/vecroute/{name}.py")
    for name in tests:
        write(f"tests/{name}.py")
    assert disorder(tmp_path) == []
    write(file)
    (found,) = disorder(tmp_path)
    assert message in found
