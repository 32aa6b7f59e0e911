"""A pool of processes that run functions for tests, so that each process loads torch only once."""

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
SECONDS = 120  # time-out of the groups, long enough for a busy machine


class RankError(Exception):
    """The error that a function raised on a rank."""


def mesh_of(n: int) -> DeviceMesh:
    """Return a mesh of the first n ranks. All ranks create it together, once."""
    return MESHES[n]


MESHES: dict[int, DeviceMesh] = {}


def serve(rank: int, world: int, store: str, commands: Connection, backend: str, device: str) -> None:
    """Run the functions that arrive through the connection, as one rank of a world."""
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
    """Return the answer of a rank, or an error if the rank has ended."""
    try:
        return connection.recv()
    except EOFError:
        return False, ("EOFError", "the process has ended", "")


class Ranks:
    """Processes that run functions together on one kind of device.

    For the CPU they are forked from a process that has loaded torch. CUDA does not survive a fork, so for a
    GPU they are new processes.
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
        """Return (True, result) or (False, (type, message, traceback)) for each of the first n ranks."""
        for connection in self.connections[:n]:
            connection.send((function, arguments))
        return [received(connection) for connection in self.connections[:n]]

    def __call__(self, n: int, function: Callable, *arguments: Any) -> list[Any]:
        """Call function(*arguments) on each of the first n ranks."""
        results = self.outcomes(n, function, *arguments)
        for rank, (fine, result) in enumerate(results):
            if not fine:
                raise RankError(f"rank {rank}: {result[0]}: {result[1]}\n{result[2]}")
        return [result for _, result in results]

    def messages(self, n: int, function: Callable, *arguments: Any) -> list[str]:
        """Return the error message of each of the first n ranks. Every rank must raise."""
        results = self.outcomes(n, function, *arguments)
        assert not any(fine for fine, _ in results), [fine for fine, _ in results]
        return [f"{result[0]}: {result[1]}" for _, result in results]

    def close(self) -> None:
        for connection in self.connections:
            try:
                connection.send(None)
            except OSError:  # the process has already ended
                continue
        for process in self.processes:
            process.join(10)
            process.kill()
        self.folder.cleanup()
