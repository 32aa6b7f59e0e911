"""The command line: one short function per command, no logic of its own."""

import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

# Importing a command adds it to the app.
from vecroute.cli import compare, demo, evaluate, explain, faithfulness, fit, predict, serve  # noqa: F401
from vecroute.cli.common import app, fail

__all__ = ["app", "fail", "main"]

# The order of the commands in `vecroute --help`.
ORDER = ("demo", "fit", "predict", "evaluate", "explain", "serve", "compare", "faithfulness")
# click raises this error for a wrong command or option. typer may bundle click under another module name.
UsageError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def show_version(asked: bool) -> None:
    if asked:
        print(f"vecroute {version('vecroute')}")
        raise typer.Exit


@app.callback()
def options(
    shown: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command. A user's mistake ends in one line and exit code 2."""
    if sys.stderr is None:  # standard error is closed: drop messages
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        fail("standard output is closed")
    command: Any = typer.main.get_command(app)
    command.commands = {name: command.commands[name] for name in ORDER}
    try:
        with command.make_context("vecroute", sys.argv[1:] or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as asked:
        sys.exit(asked.exit_code)
    except UsageError as error:
        fail(error.format_message().replace("Value error, ", ""))  # words of pydantic
    except BrokenPipeError:  # the reader of the output, such as head, has closed the pipe
        leave_output()
        sys.exit(0)
    except (ValueError, TypeError, ImportError, OSError) as error:
        leave_output()
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted", 130)
    sys.exit(0)


def leave_output() -> None:
    """Drop output that cannot be written, so that Python does not try again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
