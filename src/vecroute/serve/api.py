"""The routes of the API. Texts arrive as JSON, an image as the body of a request."""

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from vecroute.io.images import Picture
from vecroute.serve import schemas
from vecroute.serve.answers import Answers, Explain, Predict, Save

PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": schemas.Problem, "description": "Invalid JSON"},
    408: {"model": schemas.Problem, "description": "The request arrived too slowly"},
    413: {"model": schemas.Problem, "description": "Text or request too long"},
    422: {"model": schemas.Problem, "description": "The request cannot be answered; the detail says why"},
    503: {
        "model": schemas.Problem,
        "description": "Too many requests are waiting",
        "headers": {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds"}},
    },
    504: {"model": schemas.Problem, "description": "No answer within the time limit"},
}
IMAGE_PROBLEMS = {status: told for status, told in PROBLEMS.items() if status != 400} | {
    413: {"model": schemas.Problem, "description": "Image too large"},
    415: {"model": schemas.Problem, "description": "Not sent as an image"},
}
IMAGE_BODY = {
    "requestBody": {
        "required": True,
        "description": "The bytes of an image file.",
        "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def add_api(app: FastAPI, answers: Answers, ask: Callable[..., Awaitable[Any]]) -> None:
    """Add the routes for texts."""

    @app.post("/predict", response_model=schemas.Prediction, responses=PROBLEMS)
    async def predict(asked: schemas.PredictRequest) -> Response:
        """Predict the label and the probability of each class."""
        return as_json(await ask(Predict(asked.text)))

    @app.post("/explain", response_model=schemas.Explained, responses=PROBLEMS)
    async def explain(asked: schemas.ExplainRequest) -> Response:
        """Explain what each part of a text adds to the score of a class."""
        check_choice(asked, answers)
        return as_json(await ask(Explain(**asked.model_dump())))

    @app.post("/page", response_class=Response, responses=PROBLEMS | {200: {"content": {"text/html": {}}}})
    async def page(asked: schemas.SaveRequest) -> Response:
        """Return a self-contained HTML page about one text or two, to keep."""
        found = await ask(Save(asked.texts, asked.unit))
        return Response(found.encode(), media_type="text/html; charset=utf-8")


def add_image_api(app: FastAPI, answers: Answers, ask: Callable[..., Awaitable[Any]]) -> None:
    """Add the routes for images: the body of a request is the image file, its options are in the address."""
    taken: dict[str, Any] = {"openapi_extra": IMAGE_BODY, "responses": IMAGE_PROBLEMS}

    @app.post("/predict", response_model=schemas.Prediction, **taken)
    async def predict(request: Request) -> Response:
        """Predict the label and the probability of each class."""
        return as_json(await ask(Predict(await sent_image(request))))

    @app.post("/explain", response_model=schemas.ImageExplained, **taken)
    async def explain(request: Request, asked: Annotated[schemas.ImageExplainQuery, Query()]) -> Response:
        """Explain what each part of an image adds to the score of a class."""
        check_choice(asked, answers)
        return as_json(await ask(Explain(await sent_image(request), **asked.model_dump())))

    page_taken: dict[str, Any] = taken | {"responses": IMAGE_PROBLEMS | {200: {"content": {"text/html": {}}}}}

    @app.post("/page", response_class=Response, **page_taken)
    async def page(request: Request, asked: Annotated[schemas.ImageQuery, Query()]) -> Response:
        """Return a self-contained HTML page about the image, to keep."""
        found = await ask(Save([await sent_image(request)], asked.unit))
        return Response(found.encode(), media_type="text/html; charset=utf-8")


async def sent_image(request: Request) -> Picture:
    """Return the image in the body of a request. Only its header is read, not its pixels."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.startswith("image/") and kind != "application/octet-stream":
        raise HTTPException(415, "the request must be an image: Content-Type image/png, image/jpeg, ...")
    data = await request.body()
    try:
        picture = await run_in_threadpool(Picture.of, data)
        await run_in_threadpool(lambda: picture.n_pixels)  # in a thread, since it would block the event loop
    except ValueError as error:
        raise HTTPException(422, str(error)) from None
    return picture


def check_choice(asked: schemas.Choice, answers: Answers) -> None:
    """Raise an error for an unknown class or depth."""
    known = {"output": answers.names, "against": answers.names, "depth": answers.classifier.encoder_.depths}
    for field, values in known.items():
        value = getattr(asked, field)
        if value is not None and value not in values:
            raise HTTPException(422, f"{field} must be one of {json.dumps(values)}")


def as_json(answer: Any) -> Response:
    return Response(json.dumps(answer, ensure_ascii=False).encode(), media_type="application/json")
