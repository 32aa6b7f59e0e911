"""Write the lock files: exact versions and sha256 sums of all packages, including indirect dependencies.

    python scripts/lock.py                                        # locks/all.txt
    python scripts/lock.py --torch wheels/torch-2.13.0+cpu-....whl    # locks/cpu.txt

``locks/all.txt`` is for every platform, with torch from the package index. ``locks/cpu.txt`` is for the
Python and the platform that run this script, with the CPU wheel of torch, which the index does not have.
Both follow constraints.txt. `make release-check` installs one of them into an empty environment.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEADS = {
    "all": "# Every package of every extra, for all platforms. Made by scripts/lock.py.",
    "cpu": "# Every package of every extra, with torch for CPUs, for {platform}. Made by scripts/lock.py.",
}


def compile_lock(name: str, *options: str) -> None:
    """Resolve all extras within constraints.txt, and write the result."""
    out = ROOT / "locks" / f"{name}.txt"
    given = ["pyproject.toml", "--all-extras", "--constraint", "constraints.txt", "--generate-hashes"]
    quiet = ["--no-header", "--no-annotate", "--quiet"]
    command = [sys.executable, "-m", "uv", "pip", "compile", *given, *quiet, *options]
    # Start without the old lock file, whose versions would otherwise be kept.
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    head = HEADS[name].format(
        platform=f"{sys.platform} and Python {sys.version_info[0]}.{sys.version_info[1]}"
    )
    temporary = out.with_suffix(".new")
    temporary.write_text(f"{head}\n{done.stdout}")
    os.replace(temporary, out)
    names = re.findall(r"^\w", done.stdout, re.MULTILINE)
    print(f"{out.relative_to(ROOT)} has {len(names)} packages")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", type=Path, help="a wheel of torch for CPUs")
    wheel = parser.parse_args(arguments).torch
    if wheel is None:
        compile_lock("all", "--universal", "--python-version", "3.11.5")
        return
    version = wheel.name.split("-")[1]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write(f"torch=={version}\n")
        overrides.flush()
        compile_lock("cpu", "--overrides", overrides.name, "--find-links", str(wheel.resolve().parent))


if __name__ == "__main__":
    main()
