"""The command line: one short function per command, no logic of its own."""

import os
import sys
from typing import Any

import typer

# Importing a command adds it to the app.
from vecroute.cli import demo, evaluate, explain, fit, predict  # noqa: F401
from vecroute.cli.common import app, fail

__all__ = ["app", "fail", "main"]

# The error of a wrong command or option: click's, which typer may bring along under another name.
UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main() -> None:
    """Run a command. Mistakes of the user end in one line and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except UsageError as error:
        fail(error.format_message())
    except (ValueError, TypeError, ImportError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)
