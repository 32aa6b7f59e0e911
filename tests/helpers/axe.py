"""axe-core finds barriers that keep people from using a page: contrast, names, order, keyboard."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

VERSION = "4.10.3"
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


def axe_source(folder: Path) -> str:
    """Return the script of axe-core from npm. If npm cannot get it, skip the test with the reason."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, for axe-core: apt-get install npm")
    command = [npm, "pack", f"axe-core@{VERSION}", "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"npm could not get axe-core {VERSION}: {done.stderr.strip()[-200:]}")
    with tarfile.open(folder / f"axe-core-{VERSION}.tgz") as package:
        return package.extractfile("package/axe.min.js").read().decode()


def violations(page, source: str) -> list[str]:
    """Return the barriers of a page, a line for each kind, with its first places."""
    page.evaluate(source)
    run = "(tags) => axe.run({ runOnly: tags })"
    found = page.evaluate(run, TAGS)["violations"]
    return [
        f"{one['id']}: {one['help']}: {[node['target'] for node in one['nodes'][:3]]} "
        f"{one['nodes'][0].get('failureSummary', '')}"
        for one in found
    ]
