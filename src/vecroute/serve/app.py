"""The web application: routes, limits, and headers that let browsers run only its own script."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from torch import nn

from vecroute.classifier.parts import ready
from vecroute.explain.explanation import UNITS
from vecroute.explain.html import STYLE, environment
from vecroute.explain.image import ImageExplanation
from vecroute.serve import schemas
from vecroute.serve.answers import Answers, Explain, Predict, Save
from vecroute.serve.api import add_api, add_image_api
from vecroute.serve.batching import Batcher, GivenUp, QueueFull, cut_into_pieces
from vecroute.serve.guard import Guard

VERSION = version("vecroute")
DAY = 24 * 60 * 60
MOST_TOKENS = 32  # tokens per character at most; the longest Unicode decomposition has 18 characters

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# All files that the server sends, by address. The page at "/" depends on the model: texts or images.
PAGES = {
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/ask.js": ("ask.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/image.js": ("image.js", "text/javascript; charset=utf-8"),
    "/view.js": ("view.js", "text/javascript; charset=utf-8"),
    "/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Args:
        max_characters: characters per text.
        max_tokens: tokens per request, all its texts together.
        max_image_bytes: bytes per image file.
        max_pixels: pixels per image.
        seconds: time for a request to arrive, for its answer, and for the client to read the answer.
        max_batch: requests answered together; 1 turns batching off.
        max_waiting: waiting requests; more get 503 and a Retry-After header.
        max_connections: open connections; more get 503.

    Raises:
        ValueError: a limit is not greater than 0, or seconds is more than a day.
    """

    max_characters: int = 100_000
    max_tokens: int = 32_768
    max_image_bytes: int = 10_000_000
    max_pixels: int = 25_000_000
    seconds: float = 60.0
    max_batch: int = 64
    max_waiting: int = 256
    max_connections: int = 512

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be more than 0, got {value}")
        if self.seconds > DAY:
            raise ValueError(f"seconds must be at most {DAY}, got {self.seconds}")

    @property
    def max_bytes(self) -> int:
        """Largest body of a request: two texts with every character escaped, and the other fields."""
        return 2 * 12 * self.max_characters + 10_000


def create_app(
    classifier: Any,
    *,
    name: str = "classifier",
    limits: Limits | None = None,
    hosts: list[str] | None = None,
) -> FastAPI:
    """Make the web application of a fitted ``RoutingClassifier``: its page and its API.

    Args:
        classifier: a fitted classifier. This function loads its encoder.
        name: name of the model, shown on the page.
        limits: the limits of the server, None for the defaults.
        hosts: host names that requests may use, None for any. A list of names protects against DNS rebinding.
            In this attack, another site lets its own host name point at this machine, so that its pages can
            reach the server.
    """
    if not hasattr(classifier, "encoder_"):  # pickles hold no encoder
        ready(classifier)
    limits, images = limits or Limits(), hasattr(classifier.encoder_, "grid")
    classifier.predict_proba([np.zeros((8, 8, 3), np.uint8)] if images else ["warm up"])
    answers, sample = Answers(classifier, name), "an image" if images else "a text"
    if isinstance(network := getattr(classifier.encoder_, "model", None), nn.Module):
        cut_into_pieces(network)
    batcher = Batcher(answers.answer, max_jobs=limits.max_batch, max_waiting=limits.max_waiting)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    app = FastAPI(
        title="vecroute",
        version=VERSION,
        description=f"Predictions of a classifier, and what each part of {sample} adds to the score.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    if hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    max_bytes = limits.max_image_bytes if images else limits.max_bytes
    app.add_middleware(Guard, headers=HEADERS, max_bytes=max_bytes, seconds=limits.seconds)
    app.add_exception_handler(RequestValidationError, mistake)
    app.add_exception_handler(StarletteHTTPException, refusal)
    add_pages(app, "image.html" if images else "index.html")
    (add_image_api if images else add_api)(app, answers, partial(ask, batcher, Budget(classifier, limits)))

    @app.get("/health", response_model=schemas.Health)
    async def health() -> dict[str, Any]:
        """Say that the server is up, and how many requests wait."""
        capacity = limits.max_waiting
        return {"status": "ok", "version": VERSION, "waiting": batcher.waiting, "capacity": capacity}

    @app.get("/model", response_model=schemas.ImageAbout if images else schemas.About)
    async def model() -> dict[str, Any]:
        """List the classes, the depths of the encoder, and the limits on requests."""
        depths = classifier.encoder_.depths
        limit = "max_image_bytes" if images else "max_characters"
        return {
            "name": name,
            "classes": answers.names,
            "depths": ["embeddings" if depth == 0 else f"layer {depth}" for depth in depths],
            "depth_numbers": depths,
            "units": ImageExplanation.units if images else UNITS,
            "multi_label": classifier.multi_label,
            **({} if images else {"examples": answers.examples}),
            limit: getattr(limits, limit),
        }

    return app


def add_pages(app: FastAPI, first: str) -> None:
    """Add the pages for browsers. Their files are read once, so a request never looks up a path."""
    folder = files("vecroute.serve") / "static"
    pages = PAGES | {"/": (first, "text/html; charset=utf-8")}
    contents = {path: ((folder / file).read_bytes(), kind) for path, (file, kind) in pages.items()}
    style = environment().get_template("style.css").render(STYLE)
    contents["/style.css"] = (style.encode(), "text/css; charset=utf-8")
    for path, (content, kind) in contents.items():
        app.add_api_route(path, partial(static, content, kind), include_in_schema=False)


async def static(content: bytes, kind: str) -> Response:
    return Response(content, media_type=kind)


class Budget:
    """Check the size of a request before the work begins: its characters, tokens and pixels."""

    def __init__(self, classifier: Any, limits: Limits):
        self.classifier, self.limits = classifier, limits
        self.counting = asyncio.Lock()  # one text at a time, so that counting takes at most one core

    async def check(self, samples: Sequence[Any]) -> None:
        """Refuse a request that is too large.

        Raises:
            HTTPException: status 413, with the limit in its message.
        """
        limits = self.limits
        for sample in samples:
            if isinstance(sample, str) and len(sample) > limits.max_characters:
                raise HTTPException(413, f"text must have at most {limits.max_characters} characters")
            if not isinstance(sample, str) and sample.n_pixels > limits.max_pixels:
                told = f"image must have at most {limits.max_pixels} pixels, got {sample.n_pixels}"
                raise HTTPException(413, told)
        texts = [sample for sample in samples if isinstance(sample, str)]
        if sum(map(len, texts)) <= limits.max_tokens // MOST_TOKENS:
            return
        async with self.counting:
            tokenized = await run_in_threadpool(self.classifier.encoder_.tokenize, texts)
        n = sum(text.n_pos for text in tokenized)
        if n > limits.max_tokens:
            raise HTTPException(413, f"the request must have at most {limits.max_tokens} tokens, got {n}")


async def ask(batcher: Batcher, budget: Budget, job: Predict | Explain | Save) -> Any:
    """Return the answer to a job, or raise an HTTP error that says why there is none."""
    seconds = budget.limits.seconds
    await budget.check(job.texts)
    try:
        return await batcher.ask(job, seconds)
    except QueueFull:
        raise HTTPException(503, "too many requests wait already", {"Retry-After": "1"}) from None
    except (TimeoutError, GivenUp):
        raise HTTPException(504, f"no answer in {seconds:g} seconds") from None
    except ValueError as error:  # such as a text that holds only spaces
        raise HTTPException(422, str(error)) from None


async def mistake(request: Request, error: Exception) -> Response:
    """Say in one line what is wrong with a request. Its content is not echoed: it may not even be text."""
    told = []
    for problem in error.errors() if isinstance(error, RequestValidationError) else []:
        place = ".".join(str(step) for step in problem["loc"] if step != "body")
        told.append(f"{place}: {problem['msg']}" if place else problem["msg"])
    return JSONResponse({"detail": "; ".join(told)}, 422)


async def refusal(request: Request, error: Exception) -> Response:
    """Say in one line why there is no answer."""
    if not isinstance(error, StarletteHTTPException):
        raise error
    told = error.detail
    if isinstance(error.__cause__, RecursionError):
        told = "the request must be JSON, got brackets nested too deeply"
    return JSONResponse({"detail": told}, error.status_code, error.headers)
