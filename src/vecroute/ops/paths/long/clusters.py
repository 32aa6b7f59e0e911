"""One iteration with x_inp read once, on a GPU whose multiprocessors work in clusters (Hopper).

One multiprocessor cannot hold both the sums [j, d] and rows of x_inp until their scores are known. A cluster
of multiprocessors can, each with a part of the features. ``clusters.cu`` has the kernel, which PyTorch
compiles when it is first called.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vecroute.ops.common import cdiv, multiple_of_8
from vecroute.ops.paths.long import hopper
from vecroute.ops.paths.long.halves import row_tops
from vecroute.ops.plan import limits
from vecroute.ops.plan.hopper import cluster_bytes
from vecroute.ops.problem import Problem

THREADS = 512


def iterate(p: Problem, x_hat: Any, f_a_inp: Tensor, y: Tensor, s: Tensor) -> None:
    """Do the same as ``passes.forward_pass``: fill y [1, j, d], s [1, j], in the first iteration f_a_inp."""
    (i, d), device = p.x_inp.shape[1:], p.x_inp.device
    c, first = d // limits.CLUSTER_D, x_hat is None
    launch, n_clusters = kernel(c, p.n_out, first, device)
    j = multiple_of_8(p.n_out)
    y_parts, s_parts = y.new_empty(n_clusters, d, j), y.new_empty(n_clusters * c, j)  # [., d, j], [., j]
    if first:
        units, unit_sums = y.new_empty(c, i), y.new_empty(n_clusters * c)  # [c, i], [.]
        halves = unit_x_hat = y  # not read
    else:
        assert p.units is not None
        units, unit_sums = p.units  # [i], []
        unit_x_hat = row_tops(x_hat)[0] / 2**14  # [j, 1]
        halves = (x_hat[0] / unit_x_hat).half()  # [j, d]
    w, x = p.w, p.x_inp[0]  # [i, d]
    arguments = [
        x, w.W_A, w.B_A, p.sqrt_n_inp, halves, unit_x_hat, w.beta_use, w.beta_ign, w.W_S, w.B_S, f_a_inp,
        units, unit_sums, y_parts, s_parts, i, p.n_out, x.stride(0), w.W_A.stride(0),
    ]  # fmt: skip
    with torch.cuda.device(device):
        launch(
            grid=(n_clusters * c, 1, 1), block=(THREADS, 1, 1), args=arguments,
            shared_mem=cluster_bytes(c, p.n_out, first),
        )  # fmt: skip
    if first:
        p.units = units.amax(0), unit_sums.amax(0)  # [i], []
    y[0] = y_parts.sum(0).mT[: p.n_out]  # [j, d]
    torch.sum(s_parts[:, : p.n_out], 0, out=s[0])  # [j]


@cache
def kernel(c: int, n_out: int, first: bool, device: torch.device) -> tuple[Any, int]:
    """Return the compiled kernel, and the number of clusters that the device runs at a time."""
    shared = cluster_bytes(c, n_out, first)
    compiled = hopper.compiled(source(c, n_out, first), "iteration", shared, device)
    with torch.cuda.device(device):
        return compiled, clusters_at_a_time(compiled.func, c, shared)


def source(c: int, n_out: int, first: bool) -> str:
    """Return the kernel with its sizes as constants."""
    tiles = cdiv(n_out, 8)
    n_scorers = scorers(c)
    of_group = cdiv(tiles, n_scorers)
    constants = f"constexpr int C = {c}, NT = {tiles}, FIRST = {int(first)};\n"
    constants += f"constexpr int SCORERS = {n_scorers}, TILES = {of_group};\n"
    scores = hopper.multiplication("scores_mma", of_group)
    sums = hopper.multiplication("sum_mma", tiles, transposed=1)
    return hopper.source("clusters.cu", constants, scores, sums)


def scorers(c: int) -> int:
    """Return how many of the four groups of 128 threads compute scores.

    Each of them reads all of x_inp, so two are faster than four. In a cluster of two multiprocessors, each
    has twice as many rows, and too few registers to hold the scores of two groups.
    """
    return 4 if c == 2 else 2


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of CUDA's driver."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("n_attributes", ctypes.c_uint),
    ]  # fmt: skip


def clusters_at_a_time(function: Any, c: int, shared: int) -> int:
    """Return the number of clusters of c blocks that the current device runs at once."""
    n, config = ctypes.c_int(), LaunchConfig(c, 1, 1, THREADS, 1, 1, shared)
    status = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters(
        ctypes.byref(n), function, ctypes.byref(config)
    )
    if status or n.value < 1:
        raise RuntimeError(f"no cluster of {c} blocks fits this device (CUDA's driver says {status}).")
    return n.value
