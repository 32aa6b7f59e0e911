"""Draw the diagrams of docs/architecture.md from imports and from a profile of a call."""

import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vecroute"
WIDTH, ROW, BOX = 720, 84, (104, 34)
DEPTH = 9  # deepest level in the diagram of a call
# Leave out small helpers, which every step calls and which would hide the steps.
HELPERS = ("ops/checks.py", "ops/common.py", "ops/launch.py", "ops/problem.py", "ops/chunks.py")


def imports() -> dict[str, set[str]]:
    """Return the packages that each package or module of vecroute imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if name.startswith("__"):
            continue
        targets = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets |= {n.split(".")[1] for n in names if n.startswith("vecroute.")}
    return {name: {t for t in targets if t in found and t != name} for name, targets in found.items()}


def rows(graph: dict[str, set[str]]) -> list[list[str]]:
    """Group packages by height: the lowest row imports none of the others."""
    height: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((of(target) for target in graph[name]), default=-1)
        return height[name]

    for name in graph:
        of(name)
    return [sorted(n for n in graph if height[n] == h) for h in range(max(height.values()), -1, -1)]


def packages() -> str:
    """Draw an SVG: a box for each package, a line for each import that other imports do not imply."""
    graph = imports()
    layers = rows(graph)
    place = {}
    for y, names in enumerate(layers):
        for x, name in enumerate(names):
            place[name] = (WIDTH * (x + 1) / (len(names) + 1), ROW * y + BOX[1])
    shapes = []
    for name, targets in graph.items():
        beyond = {t for other in targets for t in reached(graph, other)}
        for target in sorted(targets - beyond):
            (x1, y1), (x2, y2) = place[name], place[target]
            ends = f'x1="{x1:.0f}" y1="{y1 + BOX[1] / 2:.0f}" x2="{x2:.0f}" y2="{y2 - BOX[1] / 2 - 5:.0f}"'
            shapes.append(f'<line {ends} marker-end="url(#tip)"/>')
    for name, (x, y) in place.items():
        corner = f'x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}"'
        shapes.append(f'<rect {corner} width="{BOX[0]}" height="{BOX[1]}" rx="5"/>')
        shapes.append(f'<text x="{x:.0f}" y="{y + 5:.0f}">{escape(name)}</text>')
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    )
    tip += '<path d="M0 0 8 4 0 8z"/></marker>'
    size = f'viewBox="0 0 {WIDTH} {ROW * len(layers)}"'
    label = 'role="img" aria-label="Packages of vecroute and their imports"'
    return f'<svg class="diagram" {size} {label}><defs>{tip}</defs>{"".join(shapes)}</svg>'


def reached(graph: dict[str, set[str]], name: str) -> set[str]:
    """Return everything that a package imports, directly or through others."""
    found = set(graph[name])
    for target in graph[name]:
        found |= reached(graph, target)
    return found


def call() -> str:
    """List the functions that forward and backward of a small layer call, as a block of text."""
    import torch

    import vecroute as vr

    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=8, d_out=8)
    x_inp = torch.randn(2, 50, 8, requires_grad=True)
    layer(x_inp).sum().backward()  # one-time work, such as making the plan, happens here
    seen: list[tuple[int, str]] = []
    stack: list[bool] = []

    def watch(frame, event, _):
        _, ours, path = frame.f_code.co_filename.rpartition("/vecroute/")
        step = bool(ours) and path not in HELPERS and "<" not in frame.f_code.co_name
        if event == "call":
            entry = (sum(stack), f"{frame.f_code.co_qualname}    {path}")
            if step and entry not in seen and entry[0] < DEPTH:
                seen.append(entry)
            stack.append(step)
        elif event == "return" and stack:
            stack.pop()

    lines = ["layer(x_inp)"]
    torch.autograd.set_multithreading_enabled(False)
    sys.setprofile(watch)
    try:
        x_out = layer(x_inp)
        sys.setprofile(None)
        forward = len(seen)
        loss = x_out.sum()
        stack.clear()
        sys.setprofile(watch)
        loss.backward()
    finally:
        sys.setprofile(None)
        torch.autograd.set_multithreading_enabled(True)
    width = 4 + max(2 * depth + len(text.split("    ")[0]) for depth, text in seen)

    def shown(entry: tuple[int, str]) -> str:
        name, path = entry[1].split("    ")
        return f"{'  ' * (entry[0] + 1)}{name}".ljust(width) + path

    lines += [shown(entry) for entry in seen[:forward]]
    lines += ["x_out.sum().backward()", *(shown(entry) for entry in seen[forward:])]
    return "```text\n" + "\n".join(lines) + "\n```"


DIAGRAMS = {"packages": packages, "call": call}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        print(name, draw(), sep="\n")
