"""Check what must hold before a release, one line per check. Results go to build/release.

    python scripts/release_check.py             # all checks; the last takes minutes
    python scripts/release_check.py bandit bom  # some of them

The lock file must hold every installed package at its version. The wheel and the sdist must build. An empty
environment takes all packages of the lock, each with its sha256 sum, and the wheel; there the examples of the
README must print what it says. Licences of all packages are listed, and a bill of materials in CycloneDX is
written.

``audit`` asks a service for known vulnerabilities. Without a network it cannot. It then says NOT CHECKED and
does not fail, and must be repeated where there is a network.
"""

import argparse
import csv
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "build" / "release"
NOT_LOCKED = {"vecroute", "pip", "setuptools"}  # this project, and what an environment begins with


class Failed(Exception):
    """A check did not pass; the message says why."""


def run(*command: object, **options: object) -> str:
    """Run a command and return its output.

    Raises:
        Failed: the exit code is not 0.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, set[str]]:
    """Return the versions of each package; several if they depend on the platform.

    Raises:
        Failed: a package has no sha256 sum.
    """
    found: dict[str, set[str]] = {}
    for entry in re.split(r"\n(?=\w)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)):
        name, version = re.match(r"([\w.-]+)==([^\s;]+)", entry).groups()  # type: ignore[union-attr]
        if not re.search(r"--hash=sha256:[0-9a-f]{64}", entry):
            raise Failed(f"{name} has no sha256 sum in the lock file")
        found.setdefault(canonical(name), set()).add(version)
    return found


def lock_file(torch_version: str) -> Path:
    """Return the lock file of an environment. CPU wheels of torch have their own version and lock file."""
    return ROOT / "locks" / ("cpu.txt" if "+cpu" in torch_version else "all.txt")


def not_locked(installed: Iterable[tuple[str, str]], lock: dict[str, set[str]]) -> list[str]:
    """List the packages whose version is not in the lock file."""
    return sorted(
        f"{name} {version} (locked: {', '.join(sorted(lock.get(canonical(name), {'not'})))})"
        for name, version in installed
        if canonical(name) not in NOT_LOCKED and version not in lock.get(canonical(name), set())
    )


def distributions() -> list[importlib.metadata.Distribution]:
    """Return all installed packages, by name."""
    found = {canonical(each.metadata["Name"]): each for each in importlib.metadata.distributions()}
    return [found[name] for name in sorted(found)]


def locked() -> str:
    file = lock_file(importlib.metadata.version("torch"))
    lock = read_lock(file.read_text())
    installed = [(each.metadata["Name"], each.version) for each in distributions()]
    tested = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    tested = [(name, version) for name, version in tested if name != "torch"]
    missing = not_locked([*installed, *tested], lock)
    if missing:
        raise Failed(f"{file.name} is not up to date, run scripts/lock.py: {'; '.join(missing)}")
    return f"all {len(installed)} installed packages and constraints.txt are in {file.name}"


def wheel() -> str:
    shutil.rmtree(OUT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", OUT / "dist", ROOT)
    built = sorted((OUT / "dist").iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    return f"{' and '.join(path.name for path in built)} build, and twine finds no mistake"


def environment() -> str:
    """Install all locked packages and the wheel in an empty environment, and run the README's examples."""
    file, (built,) = lock_file(importlib.metadata.version("torch")), (OUT / "dist").glob("*.whl")
    shutil.rmtree(OUT / "env", ignore_errors=True)
    venv.create(OUT / "env")
    python = OUT / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    run(*pip, "--require-hashes", "--requirement", file)
    run(*pip, "--no-index", built)
    place = run(python, "-c", "import vecroute; print(vecroute.__file__)").strip()
    if not Path(place).is_relative_to(OUT / "env"):
        raise Failed(f"the examples would run with {place}, not with the wheel")
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/docs/test_readme.py")
    return (
        f"{file.name} installs by its sums, and the examples of the README print what it says with the wheel"
    )


def licence(each: importlib.metadata.Distribution) -> str:
    """Return the licence in the metadata of a package; empty if there is none."""
    about = each.metadata
    words = (about.get("License-Expression") or about.get("License") or "").strip()
    named = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier", []) if "License ::" in line]
    files = [str(path) for path in each.files or [] if re.search(r"licen[cs]e|copying", path.name, re.I)]
    short = words.splitlines()[0][:80] if words else ""
    return (
        "; ".join(named) if named and len(words) > 80 else short or "; ".join(named) or "; ".join(files[:1])
    )


def licences() -> str:
    rows = [(each.metadata["Name"], each.version, licence(each)) for each in distributions()]
    with (OUT / "licences.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("package", "version", "licence"), *rows])
    unknown = [name for name, _, found in rows if not found]
    if unknown:
        raise Failed(f"no licence is known of {', '.join(unknown)}")
    return f"licences of {len(rows)} packages are in licences.csv"


def bom() -> str:
    file = OUT / "bom.json"
    run(sys.executable, "-m", "cyclonedx_py", "environment", sys.executable, "--of", "JSON", "-o", file)
    found = {canonical(part["name"]) for part in json.loads(file.read_text())["components"]}
    missing = {canonical(each.metadata["Name"]) for each in distributions()} - found - {"vecroute"}
    if missing:
        raise Failed(f"the bill of materials lacks {', '.join(sorted(missing))}")
    return f"a bill of materials in CycloneDX of {len(found)} packages is in bom.json"


def bandit() -> str:
    run(sys.executable, "-m", "bandit", "--quiet", "--configfile", "pyproject.toml", "--recursive", "src")
    return "bandit finds nothing that pyproject.toml does not explain"


def audit() -> str:
    lines = [f"{each.metadata['Name']}=={each.version.partition('+')[0]}" for each in distributions()]
    file = OUT / "installed.txt"
    file.write_text("\n".join(line for line in lines if not line.startswith("vecroute==")) + "\n")
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--requirement", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "known vulnerabilit" in done.stderr + done.stdout:
        if done.returncode:
            raise Failed(f"pip-audit: {done.stdout}{done.stderr}")
        return "pip-audit knows of no vulnerability"
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:200]
    return f"NOT CHECKED: pip-audit found no service that knows vulnerabilities ({last})"


CHECKS = {check.__name__: check for check in (locked, bandit, licences, bom, audit, wheel, environment)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", choices=[[], *CHECKS], help="all if left out")
    OUT.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in parser.parse_args(arguments).checks or CHECKS:
        try:
            print(f"{name}: {CHECKS[name]()}", flush=True)
        except Failed as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
