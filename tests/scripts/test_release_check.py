"""Checks before a release: a package must be locked, with its checksum."""

import importlib.util
import sys

import pytest

from tests.helpers.paths import ROOT

spec = importlib.util.spec_from_file_location("release_check", ROOT / "scripts/release_check.py")
release_check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(release_check)

SUM = "--hash=sha256:" + "0" * 64
LOCK = f"""# Made by hand.
Alpha_one==1.0 \\
    {SUM}
beta==2 ; python_version < '3' \\
    {SUM} \\
    {SUM}
"""


def test_a_lock_file_is_read():
    assert release_check.read_lock(LOCK) == {"alpha-one": {"1.0"}, "beta": {"2"}}


def test_a_package_without_its_sum_is_named():
    with pytest.raises(release_check.Failed, match="gamma has no sha256 sum"):
        release_check.read_lock(LOCK + "gamma==3\n")


def test_packages_that_are_not_locked_are_named():
    lock = release_check.read_lock(LOCK)
    installed = [("alpha.one", "1.0"), ("beta", "3"), ("gamma", "1"), ("vecroute", "9"), ("pip", "1")]
    assert release_check.not_locked(installed, lock) == ["beta 3 (locked: 2)", "gamma 1 (locked: not)"]


@pytest.mark.parametrize("name", ["all", "cpu"])
def test_the_lock_files_have_sums_and_name_no_place(name):
    text = (ROOT / f"locks/{name}.txt").read_text()
    lock = release_check.read_lock(text)
    assert {"torch", "transformers", "pillow", "starlette", "h11"} <= set(lock)
    assert "://" not in text
    assert "--index-url" not in text
    assert "--find-links" not in text


def test_a_command_that_fails_is_told():
    with pytest.raises(release_check.Failed, match="ended with 3"):
        release_check.run(sys.executable, "-c", "raise SystemExit(3)")
