"""Middleware between the network and the application: limits on requests, headers on responses."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HELD = 16  # all requests together may hold this many bodies of the largest size in memory


class Guard:
    """ASGI middleware that limits the size of a request and the time it takes to arrive.

    A request whose client has gone is cancelled.

    Args:
        app: the application behind it.
        headers: added to every response that does not have them already.
        max_bytes: largest body of a request; a larger one gets 413.
        seconds: time for the body to arrive; a slower one gets 408.
    """

    def __init__(self, app: ASGIApp, headers: Mapping[str, str], max_bytes: int, seconds: float):
        self.app, self.headers, self.max_bytes, self.seconds = app, headers, max_bytes, seconds
        self.held = 0  # bytes in memory, the bodies of all requests together

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may use the header that we ignore, and read the rest of the body as the next request.
            told = "the request must have Content-Length or Transfer-Encoding, not both"
            response = JSONResponse({"detail": told}, 400, {"Connection": "close"})
            await response(scope, receive, send_with_headers)
            return
        declared: Any = headers.get("content-length", "0")
        if len(declared) > 20 or (declared.isdecimal() and int(declared) > self.max_bytes):
            response = JSONResponse({"detail": self._too_large}, 413, {"Connection": "close"})
            await response(scope, receive, send_with_headers)
            return
        body = Body(self, receive)
        try:
            await self._while_connected(self.app(scope, body.receive, send_with_headers), body)
        finally:
            self.held -= body.seen

    async def _while_connected(self, answering: Any, body: "Body") -> None:
        """Wait for the answer, or cancel it when the client has gone."""
        answer = asyncio.ensure_future(answering)
        gone = asyncio.ensure_future(body.gone())
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and not gone.cancelled() and gone.result():
                answer.cancel()
                await asyncio.wait([answer])
        except asyncio.CancelledError:
            answer.cancel()
            raise
        finally:
            gone.cancel()
        if not answer.cancelled():
            answer.result()  # raises the application's error, if any

    @property
    def _too_large(self) -> str:
        return f"the request must have at most {self.max_bytes} bytes"


class Body:
    """The body of one request while it arrives."""

    def __init__(self, guard: Guard, receive: Receive):
        self.guard, self._receive = guard, receive
        self.seen, self.left = 0, False  # bytes received; whether the client left before the end
        self.ended = asyncio.Event()
        self.deadline = asyncio.get_running_loop().time() + guard.seconds

    async def receive(self) -> Message:
        """Return the next part of the body. After the last part, or if the client leaves, wait forever.

        Raises:
            HTTPException: the body is late or too large, or all bodies together take too much memory.
        """
        if self.ended.is_set():
            await asyncio.get_running_loop().create_future()
        left = self.deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0))
        except TimeoutError:
            raise HTTPException(408, f"the request must arrive in {self.guard.seconds:g} seconds") from None
        if message["type"] == "http.disconnect":
            self.left = True
            self.ended.set()
            await asyncio.get_running_loop().create_future()
        size = len(message.get("body", b""))
        self.seen += size
        self.guard.held += size
        if self.seen > self.guard.max_bytes:
            raise HTTPException(413, self.guard._too_large)
        if self.guard.held > HELD * self.guard.max_bytes:
            told = "too many large requests are being answered already"
            raise HTTPException(503, told, {"Retry-After": "1"})
        if not message.get("more_body"):
            self.ended.set()
        return message

    async def gone(self) -> bool:
        """Return whether a message says that the client has gone, during the body or after it."""
        await self.ended.wait()
        return self.left or (await self._receive())["type"] == "http.disconnect"
