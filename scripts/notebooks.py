"""Run the notebooks of docs/tutorials, which are stored as text, and write outputs below their cells.

``jupytext --to ipynb docs/tutorials/layer.md`` makes a notebook to play with.
"""

import base64
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
# Executed notebooks. A notebook with the same text and source need not run again.
KEPT = ROOT / "build" / "notebooks"
LIMIT = 600  # seconds for a cell
# The fragment that a notebook shows, as a page of its own that follows the reader's light or dark mode.
PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
    "<title>Output</title><style>body {{ margin: 0.5rem; }}</style>{}</html>"
)
FRAME = '<iframe class="output" src="{}" loading="lazy" title="output of the cell above"></iframe>'


def with_outputs(text: str, name: str) -> tuple[str, dict[str, bytes]]:
    """Return the text of a notebook with its outputs, and the files that the outputs show, by name."""
    notebook = executed(text)
    parts: list[str] = []
    files: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            number = len(files) + 1
            shown = output.get("data", {})
            if "image/png" in shown:
                files[f"{name}-{number}.png"] = base64.b64decode(shown["image/png"])
                parts.append(f"![What the cell above draws]({name}-{number}.png)")
            elif "text/html" in shown:
                files[f"{name}-{number}.html"] = PAGE.format(shown["text/html"]).encode()
                parts.append(FRAME.format(f"{name}-{number}.html"))
            elif output.get("name") != "stderr":
                plain = output.get("text") or shown.get("text/plain", "")
                parts.append(f"```{{ .text .output }}\n{plain.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", files


def executed(text: str) -> Any:
    """Run all cells of a notebook in an empty folder, without a network, and return it.

    Raises:
        CellExecutionError: a cell raised an error.
        ValueError: a cell warned.
    """
    kept = KEPT / f"{fingerprint(text)}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    notebook = jupytext.reads(text, fmt="md")
    with tempfile.TemporaryDirectory() as folder:
        offline = {"HF_HUB_OFFLINE": "1", "VECROUTE_CACHE": f"{folder}/cache"}
        offline["PYTHONWARNINGS"] = "ignore:IProgress not found"  # no progress bars are shown
        client = NotebookClient(notebook, timeout=LIMIT, startup_timeout=LIMIT, kernel_name="python3")
        client.resources = {"metadata": {"path": folder}}
        client.extra_arguments = ["--log-level=ERROR"]
        client.execute(env=os.environ | offline)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" and "Warning" in output.text:
                raise ValueError(f"a cell warned:\n{cell.source}\n{output.text}")
    KEPT.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(".part")
    nbformat.write(notebook, part)
    part.rename(kept)
    return notebook


def fingerprint(text: str) -> str:
    """Return a key that changes with the text of a notebook and with the package."""
    digest = hashlib.sha256(text.encode())
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
