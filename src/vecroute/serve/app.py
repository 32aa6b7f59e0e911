"""The web application: routes, limits, and headers that let browsers run its own script alone."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from vecroute.explain.explanation import UNITS
from vecroute.explain.html import STYLE, environment
from vecroute.serve import schemas
from vecroute.serve.answers import Answers, Explain, Predict, Save
from vecroute.serve.batching import Batcher, QueueFull
from vecroute.serve.guard import Guard

VERSION = version("vecroute")

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# All that can be read through the server, by its address.
PAGES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/view.js": ("view.js", "text/javascript; charset=utf-8"),
    "/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": schemas.Problem, "description": "Not JSON that can be read"},
    408: {"model": schemas.Problem, "description": "The request came too slowly"},
    413: {"model": schemas.Problem, "description": "Text or request too long"},
    422: {"model": schemas.Problem, "description": "Something that cannot be answered, and why"},
    503: {
        "model": schemas.Problem,
        "description": "Too many requests wait already",
        "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}},
    },
    504: {"model": schemas.Problem, "description": "No answer within the time limit"},
}


@dataclass(frozen=True)
class Limits:
    """What a server takes on.

    Args:
        max_characters: of a text.
        seconds: for a request to come, and for its answer.
        max_batch: requests answered together, 1 for none.
        max_waiting: requests that wait; more get 503 and when to come again.
    """

    max_characters: int = 100_000
    seconds: float = 60.0
    max_batch: int = 64
    max_waiting: int = 256

    def __post_init__(self) -> None:
        for name in ("max_characters", "seconds", "max_batch", "max_waiting"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}")

    @property
    def max_bytes(self) -> int:
        """Of a request: two texts of the longest escapes of JSON, and the rest of it."""
        return 2 * 12 * self.max_characters + 10_000


def create_app(
    classifier: Any,
    *,
    name: str = "classifier",
    limits: Limits | None = None,
    hosts: list[str] | None = None,
) -> FastAPI:
    """The page and the API of a fitted ``RoutingClassifier``.

    Args:
        classifier: fitted; its encoder is loaded now.
        name: of the model, for the page.
        limits: what it takes on, None for the defaults.
        hosts: names that the server may be called by, None for any. Given these, pages of other sites cannot
            reach it by a name of theirs that leads to this machine.
    """
    limits = limits or Limits()
    classifier.predict_proba(["warm up"])
    answers = Answers(classifier)
    batcher = Batcher(answers.answer, max_jobs=limits.max_batch, max_waiting=limits.max_waiting)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    app = FastAPI(
        title="vecroute",
        version=VERSION,
        description="Predictions of a classifier, and what each part of a text adds to the score.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    if hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    app.add_middleware(Guard, headers=HEADERS, max_bytes=limits.max_bytes, seconds=limits.seconds)
    app.add_exception_handler(RequestValidationError, mistake)
    add_pages(app)
    add_api(app, answers, partial(ask, batcher, limits))

    @app.get("/health", response_model=schemas.Health)
    async def health() -> dict[str, Any]:
        """Whether it is up, and how many requests wait."""
        waiting, capacity = batcher.queue.qsize(), limits.max_waiting
        return {"status": "ok", "version": VERSION, "waiting": waiting, "capacity": capacity}

    @app.get("/model", response_model=schemas.About)
    async def model() -> dict[str, Any]:
        """The classes there are, the depths of the encoder, and how long a text may be."""
        depths = classifier.encoder_.depths
        return {
            "name": name,
            "classes": answers.names,
            "depths": ["embeddings" if depth == 0 else f"layer {depth}" for depth in depths],
            "depth_numbers": depths,
            "units": UNITS,
            "multi_label": classifier.multi_label,
            "max_characters": limits.max_characters,
        }

    return app


def add_api(app: FastAPI, answers: Answers, ask: Callable[..., Awaitable[Any]]) -> None:
    """What is asked of the classifier."""

    @app.post("/predict", response_model=schemas.Prediction, responses=PROBLEMS)
    async def predict(asked: schemas.PredictRequest) -> Response:
        """The label and the probability of each class."""
        return as_json(await ask(Predict(asked.text)))

    @app.post("/explain", response_model=schemas.Explained, responses=PROBLEMS)
    async def explain(asked: schemas.ExplainRequest) -> Response:
        """What each part of a text adds to the score of a class."""
        for field in ("output", "against"):
            check_known(field, getattr(asked, field), answers.names)
        check_known("depth", asked.depth, answers.classifier.encoder_.depths)
        return as_json(await ask(Explain(**asked.model_dump())))

    @app.post("/page", response_class=Response, responses=PROBLEMS | {200: {"content": {"text/html": {}}}})
    async def page(asked: schemas.SaveRequest) -> Response:
        """A page to keep, about one text or two, that needs nothing but itself."""
        found = await ask(Save(asked.texts, asked.unit))
        return Response(found.encode(), media_type="text/html; charset=utf-8")


def add_pages(app: FastAPI) -> None:
    """What browsers show: a few files of the package, read once, so no path is ever looked up."""
    folder = files("vecroute.serve") / "static"
    contents = {path: ((folder / file).read_bytes(), kind) for path, (file, kind) in PAGES.items()}
    style = environment().get_template("style.css").render(STYLE)
    contents["/style.css"] = (style.encode(), "text/css; charset=utf-8")
    for path, (content, kind) in contents.items():
        app.add_api_route(path, partial(static, content, kind), include_in_schema=False)


async def static(content: bytes, kind: str) -> Response:
    return Response(content, media_type=kind)


async def ask(batcher: Batcher, limits: Limits, job: Predict | Explain | Save) -> Any:
    """The answer to a job, or why there is none."""
    if max(map(len, job.texts)) > limits.max_characters:
        raise HTTPException(413, f"text must have at most {limits.max_characters} characters")
    try:
        return await batcher.ask(job, limits.seconds)
    except QueueFull:
        raise HTTPException(503, "too many requests wait already", {"Retry-After": "1"}) from None
    except TimeoutError:
        raise HTTPException(504, f"no answer in {limits.seconds:g} seconds") from None
    except ValueError as error:  # such as a text of spaces alone
        raise HTTPException(422, str(error)) from None


def check_known(field: str, value: Any, known: list[Any]) -> None:
    if value is not None and value not in known:
        raise HTTPException(422, f"{field} must be one of {json.dumps(known)}")


def as_json(answer: Any) -> Response:
    return Response(json.dumps(answer, ensure_ascii=False).encode(), media_type="application/json")


async def mistake(request: Request, error: Exception) -> Response:
    """What is wrong with a request, in a line; what came is not sent back, since it may be no text at all."""
    told = []
    for problem in error.errors() if isinstance(error, RequestValidationError) else []:
        place = ".".join(str(step) for step in problem["loc"] if step != "body")
        told.append(f"{place}: {problem['msg']}" if place else problem["msg"])
    return JSONResponse({"detail": "; ".join(told)}, 422)
