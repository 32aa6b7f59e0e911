"""The server: a socket, and uvicorn, which finishes what it has begun before it ends."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

LOOPBACK = ["localhost", "127.0.0.1", "[::1]"]


def run(app: FastAPI, bound: socket.socket, seconds: float, ready: Callable[[], Any] = lambda: None) -> None:
    """Serve until interrupted or told to end; then no new requests, and answers to those at work.

    Args:
        app: what to serve.
        bound: the socket to listen on, see ``bind``.
        seconds: for the last answers.
        ready: called when requests are answered.
    """
    config = uvicorn.Config(
        app, log_level="warning", server_header=False, timeout_graceful_shutdown=max(1, round(seconds))
    )
    server = Server(config, ready)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[bound])


class Server(uvicorn.Server):
    """A server that says when it is ready."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], Any]):
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address.

    Raises:
        ValueError: the address is not of this machine, or in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error}") from error


def hosts_for(host: str) -> list[str] | None:
    """The names that a server at an address may be called by; any, where others are meant to reach it."""
    return [*LOOPBACK, host] if host in ("localhost", "::1") or host.startswith("127.") else None


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
