"""``vecroute demo``."""

from pathlib import Path
from typing import Annotated

import typer

from vecroute.cli.common import app, told
from vecroute.cli.threads import limit_threads


@app.command(
    short_help="Fit film reviews or drawn images, and explain a few.",
    epilog="Example: vecroute demo --out demo/",
)
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the model and the report; demo or demo-images if left out."),
    ] = None,
    images: Annotated[
        bool, typer.Option("--images", help="Classify shapes drawn on photos instead of sentences.")
    ] = False,
) -> None:
    """Fit film review sentences, or drawn images, compare with logistic regression, and explain a few."""
    limit_threads()
    folder = out or Path("demo-images" if images else "demo")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose another --out")
    if images:
        from vecroute.demo.shapes import run
    else:
        from vecroute.demo import run
    with told():
        run(folder)
