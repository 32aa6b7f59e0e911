"""What stands between the network and the application: limits on what comes in, headers on what goes out."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Guard:
    """ASGI middleware: requests of at most so many bytes, that come within so many seconds.

    Args:
        app: what it stands before.
        headers: of every response, unless it has them already.
        max_bytes: of a request's body, else 413.
        seconds: for the body to come, else 408.
    """

    def __init__(self, app: ASGIApp, headers: Mapping[str, str], max_bytes: int, seconds: float):
        self.app, self.headers, self.max_bytes, self.seconds = app, headers, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = 0
        deadline = asyncio.get_running_loop().time() + self.seconds

        async def receive_within_limits() -> Message:
            nonlocal seen
            left = deadline - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), max(left, 0))
            except TimeoutError:
                raise HTTPException(408, f"the request must come within {self.seconds:g} seconds") from None
            seen += len(message.get("body", b""))
            if seen > self.max_bytes:
                raise HTTPException(413, self._too_large)
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
                    headers.setdefault(name, value)
            await send(message)

        declared: Any = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            response = JSONResponse({"detail": self._too_large}, 413, {"Connection": "close"})
            await response(scope, receive, send_with_headers)
            return
        await self.app(scope, receive_within_limits, send_with_headers)

    @property
    def _too_large(self) -> str:
        return f"the request must have at most {self.max_bytes} bytes"
