"""Shared memory that the CUDA C++ kernels need, computed from the layout in their files."""

from vecroute.ops.common import multiple_of_8
from vecroute.ops.plan import limits
from vecroute.ops.plan.case import Device


def fits(n_bytes: int, device: Device) -> bool:
    """Return whether a device is a Hopper GPU with n_bytes of shared memory per block, and a compiler."""
    return device.capability == (9, 0) and device.compiles and n_bytes <= device.shared_bytes


def cluster_bytes(c: int, n_out: int, first: bool) -> int:
    """Return the bytes for ``clusters.cu``, with clusters of c multiprocessors."""
    rows, warps, stages, j, d = 64, 16, 4 if first else 3, multiple_of_8(n_out), limits.CLUSTER_D
    loaded = stages * warps * d * 4
    tiles = 2 * rows * d * 2 + 2 * rows * 128  # x_inp and phi
    others = loaded + 5 * rows * 4 if first else j * d * 2 + (2 * c - 1) * (rows // c) * j * 4
    return tiles + loaded + others + j * 4 + stages * warps * 4 + 16
