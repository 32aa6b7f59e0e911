"""``vecroute demo``."""

from pathlib import Path
from typing import Annotated

import typer

from vecroute.cli.common import app, told


@app.command(epilog="Example: vecroute demo --out demo/")
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the model and the report: demo, or demo-images.")
    ] = None,
    images: Annotated[bool, typer.Option("--images", help="Shapes drawn on photos instead.")] = False,
) -> None:
    """Fit film review sentences, or drawn images, compare with logistic regression, and explain a few."""
    from vecroute import demo, demo_images

    with told():
        if images:
            demo_images.run(out or Path("demo-images"))
        else:
            demo.run(out or Path("demo"))
