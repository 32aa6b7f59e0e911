"""Rows of results: which code, device and command they come from, and how they reach their CSV file."""

import argparse
import csv
import datetime
import functools
import hashlib
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import vecroute as vr

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LATER = ("src", "command")  # columns that older files do not have
TABLE = re.compile(r"(<!-- table: [\w-]+ -->\n).*?(<!-- end of table -->)", re.DOTALL)


def about(device: str) -> dict[str, str]:
    """Return the columns that describe where a row comes from: device, versions, code and command."""
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else cpu_name(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "vecroute": vr.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "src": tree_hash(ROOT / "src"),
        "command": command(sys.argv),
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{torch.get_num_threads()} threads of {model}"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def command(argv: list[str]) -> str:
    """Return the command line without the folders of this machine: an absolute path becomes its name."""
    script = Path(argv[0]).resolve()
    name = script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name
    words = []
    for word in argv[1:]:
        option, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
        words.append(option + equals + (Path(value).name if value.startswith("/") else value))
    return shlex.join(["python", name, *words])


# The state of the code


def git(*arguments: str) -> str:
    """Return what git prints about the repository. Raises OSError if there is no git or no repository."""
    run = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    if run.returncode:
        raise OSError(run.stderr.strip())
    return run.stdout.strip("\n")


def commit() -> str:
    """Return $COMMIT, else the commit of this repository, with a + if its tree has changes."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if changes() else "")
    except OSError:
        return "unknown"


@functools.cache
def changes() -> list[str]:
    """Return the changed and the new files, except results and pages that differ only in their tables.

    Later calls repeat the first answer, since a process runs the code that it started with.
    """
    changed = git("diff", "--name-only", "--no-renames", "-z", "HEAD").split("\0")
    new = git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
    outside = [path for path in [*changed, *new] if path and not path.startswith("benchmarks/results/")]
    return [path for path in outside if path in new or not only_tables(path)]


def only_tables(path: str) -> bool:
    """Tell whether a page of the repository differs from the commit only in its generated tables."""
    if not path.endswith(".md") or not (ROOT / path).exists():
        return False
    before, after = git("show", f"HEAD:{path}"), (ROOT / path).read_text().strip("\n")
    return TABLE.sub(r"\1\2", before) == TABLE.sub(r"\1\2", after)


def tree_hash(folder: Path) -> str:
    """Return the hash that git gives a folder, as ``git rev-parse HEAD:src`` does for src at a commit.

    It is computed from the files themselves, so it holds without git and for uncommitted changes.
    """
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix in (".egg-info", ".pyc"):
            continue
        if path.is_dir():
            entries.append((path.name + "/", "40000", tree_hash(path)))
        else:
            mode = "100755" if os.access(path, os.X_OK) else "100644"
            entries.append((path.name, mode, git_hash("blob", path.read_bytes())))
    listed = [
        f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(value)
        for name, mode, value in sorted(entries)
    ]
    return git_hash("tree", b"".join(listed))


def git_hash(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


# Where rows go


def results_folder(name: str) -> Path:
    """Return the folder named by --results. Refuses ``benchmarks/results`` if the tree has changes."""
    try:
        check_clean(Path(name))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(name)


def check_clean(folder: Path) -> None:
    """Raise ValueError if rows for ``benchmarks/results`` would come from code that is not committed."""
    if not folder.resolve().is_relative_to(RESULTS.resolve()):
        return
    elsewhere = "commit first, or name another folder with --results"
    try:
        changed = changes()
    except OSError as error:
        raise ValueError(f"rows of benchmarks/results need a git repository ({error}): {elsewhere}") from None
    if changed:
        more = f" and {len(changed) - 1} more" if changed[1:] else ""
        raise ValueError(f"rows must come from a clean tree, but {changed[0]}{more} changed: {elsewhere}")


def append(path: Path, rows: list[dict[str, object]]) -> None:
    """Append rows to a CSV file. Numbers have 4 digits, and missing values are empty.

    Rows that were written before the columns ``src`` and ``command`` existed leave them empty. The file is
    replaced at the end, so an interrupted call does not damage it.

    Raises:
        ValueError: the file has other columns, or it is in ``benchmarks/results`` and the tree has changes.
    """
    check_clean(path.parent)
    columns = list(rows[0])
    before = read(path) if path.exists() else []
    had = list(before[0]) if before else columns
    if not {*had} <= {*columns} or not {*columns} - {*had} <= {*LATER}:
        raise ValueError(f"{path} must have the columns {columns}, but has others: move the file away")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(before)
        writer.writerows({name: written(value) for name, value in row.items()} for row in rows)
    os.replace(temporary, path)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def written(value: object) -> object:
    if not isinstance(value, float):
        return "" if value is None else value
    return f"{value:.4g}" if math.isfinite(value) else ""
