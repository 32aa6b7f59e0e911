"""Run ``vecroute`` commands in this process."""

import io
import sys
from typing import NamedTuple

import pytest

from vecroute.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run_typed(monkeypatch, capfd, *arguments, stdin: bytes = b"") -> Done:
    """Run ``vecroute`` with these arguments, and return its exit code and its output."""
    monkeypatch.setattr(sys, "argv", ["vecroute", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    return Done(ended.value.code, *capfd.readouterr())
