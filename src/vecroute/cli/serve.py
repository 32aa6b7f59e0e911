"""``vecroute serve``."""

from typing import Annotated

import typer

from vecroute.cli.common import Device, Encoder, Model, app, finite, load
from vecroute.storage import require


@app.command(
    short_help="Serve a web page and a JSON API.", epilog="Example: vecroute serve model/ --port 8000"
)
def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests answered together.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get 503.")] = 256,
    max_characters: Annotated[int, typer.Option(min=1, help="Characters per text.")] = 100_000,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per request, all its texts together.")
    ] = 32_768,
    max_image_bytes: Annotated[int, typer.Option(min=1, help="Bytes per image file.")] = 10_000_000,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels per image.")] = 25_000_000,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections open at a time; more get 503.")
    ] = 512,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.001,
            max=86400,
            callback=finite,
            help="Time limit for a request to arrive, for its answer, and for the client to read it.",
        ),
    ] = 60.0,
    encoder: Encoder = None,
    device: Device = None,
) -> None:
    """Serve a web page and a JSON API with predictions and explanations of texts or images."""
    for package in ("fastapi", "uvicorn"):
        require(package, "serve")
    from vecroute import serve as web

    limits = web.Limits(
        max_characters=max_characters,
        max_tokens=max_tokens,
        max_image_bytes=max_image_bytes,
        max_pixels=max_pixels,
        seconds=seconds,
        max_batch=max_batch,
        max_waiting=max_waiting,
        max_connections=max_connections,
    )
    with web.bind(host, port) as bound:
        classifier = load(model, encoder, device, verbose=False)
        page = web.create_app(classifier, name=model.resolve().name, limits=limits, hosts=web.hosts_for(host))
        told = f"{model} is at {web.address(bound)}"
        web.run(page, bound, seconds, lambda: print(told, flush=True), max_connections)
