"""The server: a socket and uvicorn, which answers the running requests before it stops."""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from vecroute.serve.batching import share_memory

LOOPBACK = ["localhost", "127.0.0.1", "[::1]"]


MAX_CONNECTIONS = 512
HEADER_BYTES = 65_536  # limit for the headers of a request
CHUNKS, BYTES_PER_CHUNK = 10_000, 64  # a body may have CHUNKS chunks, plus one per 64 bytes
LINGER = 5.0  # seconds; a refused connection may still send its request, so that it can read the refusal


def run(
    app: FastAPI,
    bound: socket.socket,
    seconds: float,
    ready: Callable[[], Any] = lambda: None,
    max_connections: int = MAX_CONNECTIONS,
) -> None:
    """Serve until a signal arrives. Then refuse new requests and finish the running ones.

    Args:
        app: the application to serve.
        bound: the socket to listen on; see ``bind``.
        seconds: time for a request to arrive, for the client to read its answer, and for the last answers.
        ready: called once the server answers requests.
        max_connections: open connections; more get 503.
    """
    share_memory()
    server = make_server(app, seconds, ready, max_connections)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


def make_server(
    app: FastAPI, seconds: float, ready: Callable[[], Any], max_connections: int = MAX_CONNECTIONS
) -> "Server":
    """Make a server that does not run yet; see ``run``."""
    config = uvicorn.Config(
        app,
        http=partial(Connection, seconds=seconds, most=max_connections),  # type: ignore[arg-type]
        ws="none",
        h11_max_incomplete_event_size=HEADER_BYTES,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=max(1, round(seconds)),
    )
    return Server(config, ready)


class Connection(H11Protocol):
    """A connection with time limits: for a request with its headers to arrive, and for reading the answer.

    Args:
        seconds: the limit for each of the two.
        most: open connections; one more gets an error and is closed.
    """

    def __init__(self, *args: Any, seconds: float, most: int, **options: Any):
        super().__init__(*args, **options)
        self.conn = Chunks(h11.SERVER, HEADER_BYTES)
        self.seconds, self.most = seconds, most
        self.too_many = False
        self.timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.too_many = len(self.connections) > self.most
        self._within("request", min(LINGER, self.seconds) if self.too_many else self.seconds, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self.timers):
            self._done(name)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.too_many:
            self._refuse(503, f"too many connections: at most {self.most} are open at a time")
            return
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._done("request")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:  # wait for the next request
            self._within("request", self.seconds, self._too_late)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._within("answer", self.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._done("answer")

    def _should_upgrade(self) -> bool:
        return False  # this server has no web sockets, and uvicorn would warn about that

    def _too_late(self) -> None:
        """Refuse a request that has not arrived in time."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._within("request", 1.0, self._too_late)  # ``Guard`` answers first, then this closes
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408, f"the request must arrive in {self.seconds:g} seconds")
        else:
            self.transport.close()

    def _refuse(self, status: int, told: str) -> None:
        """Answer without the application, and close."""
        body = json.dumps({"detail": told}).encode()
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
        }
        if status == 503:
            headers["Retry-After"] = "1"
        lines = [f"HTTP/1.1 {status} {'Service Unavailable' if status == 503 else 'Request Timeout'}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _within(self, name: str, seconds: float, late: Callable[[], Any]) -> None:
        self._done(name)
        self.timers[name] = self.loop.call_later(seconds, late)

    def _done(self, name: str) -> None:
        if name in self.timers:
            self.timers.pop(name).cancel()


class Chunks(h11.Connection):
    """A connection that limits the number of chunks of a body.

    Parsing a body with chunks of one byte would block the event loop for a minute.
    """

    left = CHUNKS

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.left = CHUNKS
        elif isinstance(event, h11.Data):
            self.left += len(event.data) // BYTES_PER_CHUNK - 1
            if self.left < 0:
                raise h11.RemoteProtocolError("a body of too many chunks")
        return event


class Server(uvicorn.Server):
    """A server that calls ``ready`` once it answers requests."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], Any]):
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address.

    Raises:
        ValueError: the address does not belong to this machine, or is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error}") from error


def hosts_for(host: str) -> list[str] | None:
    """Return the host names that requests may use; None (any) if other machines may reach the server."""
    return [*LOOPBACK, host] if host in ("localhost", "::1") or host.startswith("127.") else None


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
