"""Inputs beyond one device and one memory: sharded over the ranks of a process group, or read from files."""

from vecroute.distributed.sharding import gather, own_rows, shard_inputs

__all__ = ["gather", "own_rows", "shard_inputs"]
