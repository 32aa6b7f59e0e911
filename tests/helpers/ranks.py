"""A few processes that stay: tests hand them functions, so that torch is loaded once for all of them."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

WORLD = 4
SECONDS = 120  # the time-out of the groups, which a busy machine should not reach


class RankError(Exception):
    """What a function raised on a rank."""


def mesh_of(n: int) -> DeviceMesh:
    """The first n ranks; made once, by all of them."""
    return MESHES[n]


MESHES: dict[int, DeviceMesh] = {}


def serve(rank: int, world: int, store: str, commands: Connection, backend: str, device: str) -> None:
    """Run what comes through the connection, as one rank of a world."""
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SECONDS),
    )
    for n in range(1, world + 1):
        group = dist.new_group(list(range(n)), timeout=timedelta(seconds=SECONDS))
        if rank < n:
            MESHES[n] = DeviceMesh.from_group(group, device, mesh_dim_names=("sp",))
    while True:
        command = commands.recv()
        if command is None:
            break
        function, arguments = command
        try:
            torch.manual_seed(0)
            commands.send((True, function(*arguments)))
        except Exception as error:
            commands.send((False, (type(error).__name__, str(error), traceback.format_exc())))
    dist.destroy_process_group()
    os._exit(0)


def received(connection: Connection) -> tuple[bool, Any]:
    """What a rank answers; that it has ended, if it has."""
    try:
        return connection.recv()
    except EOFError:
        return False, ("EOFError", "the process has ended", "")


class Ranks:
    """Processes that run functions together, with meshes of a kind of device.

    They are forked from one that has torch loaded, or new ones for a GPU, which does not survive a fork.
    """

    def __init__(self, world: int = WORLD, backend: str = "gloo", device: str = "cpu"):
        context: Any = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            context.set_forkserver_preload(["torch", "torch.distributed.tensor", "vecroute.distributed"])
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            store = str(Path(self.folder.name) / "store")
            arguments = rank, world, store, there, backend, device
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.connections.append(here)
            self.processes.append(process)

    def outcomes(self, n: int, function: Callable, *arguments: Any) -> list[tuple[bool, Any]]:
        """(True, result) or (False, (type, message, traceback)) of each of the first n ranks."""
        for connection in self.connections[:n]:
            connection.send((function, arguments))
        return [received(connection) for connection in self.connections[:n]]

    def __call__(self, n: int, function: Callable, *arguments: Any) -> list[Any]:
        """function(*arguments) on each of the first n ranks."""
        results = self.outcomes(n, function, *arguments)
        for rank, (fine, result) in enumerate(results):
            if not fine:
                raise RankError(f"rank {rank}: {result[0]}: {result[1]}\n{result[2]}")
        return [result for _, result in results]

    def messages(self, n: int, function: Callable, *arguments: Any) -> list[str]:
        """What each of the first n ranks raised, none of which may have come to an end."""
        results = self.outcomes(n, function, *arguments)
        assert not any(fine for fine, _ in results), [fine for fine, _ in results]
        return [f"{result[0]}: {result[1]}" for _, result in results]

    def close(self) -> None:
        for connection in self.connections:
            try:
                connection.send(None)
            except OSError:  # it has ended already
                continue
        for process in self.processes:
            process.join(10)
            process.kill()
        self.folder.cleanup()
