"""Inputs that do not fit one device: sharded over the ranks of a process group, or read from files."""

from vecroute.distributed.sharding import gather, own_rows, shard_inputs
from vecroute.distributed.streaming import stream, stream_credit
from vecroute.distributed.vectors import open_vectors

__all__ = ["gather", "open_vectors", "own_rows", "shard_inputs", "stream", "stream_credit"]
