"""Importing vecroute loads torch and no other heavy package, and imports inside it point downward only."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vecroute

PACKAGE = Path(vecroute.__file__).parent

# The layers of the package, lowest first. A module imports only from its own row and from lower rows.
# Add a new module or folder of vecroute to its row here.
ROWS = [
    {"ops"},
    {"layers", "networks", "storage"},
    {"compose"},
    {"distributed"},
    {"training", "heads", "encoders", "io"},
    {"classifier", "explain"},
    {"corpora"},
    {"cli", "serve", "demo", "__main__"},
]
ROW = {module: number for number, row in enumerate(ROWS) for module in row}

# The first rows need torch only. Each of these packages is imported in one module or folder only.
TORCH_ALONE = ROWS[0] | ROWS[1] | ROWS[2]
IN_ONE_MODULE_EACH = {"transformers", "triton", "matplotlib", "fastapi", "captum", "shap", "ray"}


def loaded_beyond_torch(statement: str, path: Path | None = None) -> set[str]:
    """Return the packages that the statement loads, but ``import torch`` and the standard library do not."""
    program = f"""
import sys
sys.path[:0] = {[str(path)] if path else []}
import torch
before = set(sys.modules)
{statement}
print(*{{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_vecroute_loads_torch_alone():
    assert loaded_beyond_torch("import vecroute") == {"vecroute"}


def test_the_test_above_can_fail(tmp_path):
    (tmp_path / "lightweight.py").write_text("import json\n")
    (tmp_path / "heavyweight.py").write_text("def load():\n    import onnx\nload()\n")
    assert loaded_beyond_torch("import lightweight", tmp_path) == {"lightweight"}
    assert {"heavyweight", "onnx"} <= loaded_beyond_torch("import heavyweight", tmp_path)


def imports_of(file: Path, package: Path) -> Iterator[str]:
    """Return the full names of everything that a file of the package imports, at any place in the file."""
    parent = [package.name, *file.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def breaches(package: Path) -> list[str]:
    """Return a line for every import in the package that breaks the order."""
    found, graph, homes = [], {}, {}
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        module = name.removesuffix(".py").partition("/")[0]
        if module == "__init__":
            continue
        if module not in ROW:
            found.append(f"{name}: {module} has no row in ROWS")
            continue
        for imported in imports_of(file, package):
            root, _, rest = imported.partition(".")
            if root != package.name:
                if root in IN_ONE_MODULE_EACH:
                    homes.setdefault(root, set()).add(module)
                elif module in TORCH_ALONE and root not in sys.stdlib_module_names | {"torch"}:
                    found.append(f"{name}: {module} may import torch alone, imports {root}")
                continue
            target = rest.partition(".")[0]
            if target not in ROW:
                found.append(f"{name}: imports {imported}, which is of no row")
            elif ROW[target] > ROW[module]:
                found.append(f"{name}: {module} imports {target}, which stands above it")
            elif target != module:
                graph.setdefault(module, set()).add(target)
    for root, modules in homes.items():
        if len(modules) > 1:
            found.append(f"{root} is imported in {', '.join(sorted(modules))}: one is enough")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"in a circle: {' -> '.join(error.args[1])}")
    return found


def test_imports_point_downward():
    assert breaches(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "text", "breach"),
    [
        ("ops/x.py", "from vecroute.layers import y", "layers, which stands above it"),
        ("ops/x.py", "def f():\n    from vecroute import heads", "heads, which stands above it"),
        ("layers/x.py", "from ..compose import Sum", "compose, which stands above it"),
        ("layers/x.py", "import vecroute.cli", "cli, which stands above it"),
        ("compose/x.py", "import numpy as np", "compose may import torch alone, imports numpy"),
        ("distributed/x.py", "from vecroute.heads import RoutingHead", "heads, which stands above it"),
        ("explain/x.py", "from vecroute.corpora import y", "corpora, which stands above it"),
        ("heads/x.py", "from vecroute import VectorRouting", "vecroute.VectorRouting, which is of no row"),
        ("novelty.py", "", "novelty has no row"),
        ("encoders/x.py", "import vecroute.training", "in a circle"),
        ("heads/x.py", "import transformers.models", "transformers is imported in encoders, heads"),
    ],
)
def test_the_test_above_can_fail_too(file, text, breach, tmp_path):
    package = tmp_path / "vecroute"
    clean = {
        "__init__.py": "from vecroute.cli import main",
        "ops/__init__.py": "import torch.nn",
        "compose/t.py": "from .u import Credit\nfrom vecroute.layers.vector import VectorRouting",
        "training/t.py": "from vecroute.encoders import y",
        "encoders/t.py": "def load():\n    import transformers\n    from .u import y",
    }

    def write(name: str, content: str) -> None:
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        with (package / name).open("a") as stream:
            stream.write(content + "\n")

    for name, content in clean.items():
        write(name, content)
    assert breaches(package) == []
    write(file, text)
    (found,) = breaches(package)
    assert breach in found
