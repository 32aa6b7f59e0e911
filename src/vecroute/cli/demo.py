"""``vecroute demo``."""

from pathlib import Path
from typing import Annotated

import typer

from vecroute.cli.common import app, told


@app.command(epilog="Example: vecroute demo --out demo/")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the model and the report.")] = Path("demo"),
) -> None:
    """Fit film review sentences, compare with logistic regression, and explain a few of them."""
    from vecroute.demo import run

    with told():
        run(out)
