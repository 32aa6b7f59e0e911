"""Which path a call takes, and why.

A compiler calls these functions with symbolic sizes. Each comparison then becomes a guard of its own.
"""

from functools import lru_cache

import torch

from vecroute.ops.common import compute_dtype
from vecroute.ops.plan import hopper, limits
from vecroute.ops.plan.case import Case, Tuning
from vecroute.ops.plan.plan import Plan


@lru_cache(limits.PLANS)
def make_plan(case: Case) -> Plan:
    """Return the plan of a call, made once for each case."""
    return choose_path(case)


def choose_path(case: Case) -> Plan:
    """Return the first path that fits: batch, then long, then wide, then the loop over chunks."""
    if case.implementation != "fused":
        return Plan(case, "chunked", f"implementation={case.implementation!r}")
    not_batch = why_not_batch(case)
    if not_batch is None:
        return Plan(case, "batch", "few outputs, all pairs fit")
    if has_clusters(case) or has_halves(case):
        return Plan(case, "long", f"{not_batch}; one long sample of a fixed length, in tf32")
    if is_wide(case):
        return Plan(case, "wide", f"{not_batch}; many outputs of a fixed length, in bfloat16")
    return Plan(case, "fused", not_batch)


def why_not_batch(case: Case) -> str | None:
    """Return the reason why a call cannot take the batch path, or None if it can."""
    j, n = case.n_out, 1
    for size in case.shape[:-1]:
        n *= size
    if case.one_by_one:
        return "iterations run one by one"
    if case.group:
        return "inputs are sharded over ranks"
    if case.tuning != Tuning():
        return "chunks are asked for"
    if n == 0 or (case.packed and case.packed[0] == 0):
        return "there are no inputs"
    if j > limits.BATCH_OUTPUTS:
        return f"n_out={j} is more than {limits.BATCH_OUTPUTS}"
    if case.d_out > limits.BATCH_D_OUT:
        return f"d_out={case.d_out} is more than {limits.BATCH_D_OUT}"
    n_bytes = n * j * (2 * case.n_iters + 3) * compute_dtype(case.dtype).itemsize
    if n_bytes > limits.BATCH_BYTES:
        return f"pairs take {n_bytes / 2**20:.0f} MB, more than {limits.BATCH_BYTES / 2**20:.0f}"
    is_ieee = case.dtype == torch.float32 and not case.tf32
    if is_ieee and not case.packed and n * j * case.shape[-1] * case.n_iters > limits.BATCH_IEEE:
        return "many products in IEEE float32, which are faster in chunks"
    return None


def is_long(case: Case, rows: int) -> bool:
    """Return whether a call has one sample of a fixed length in tf32, with at least ``rows`` aligned rows."""
    if case.variable or not case.tf32 or case.w_dtype != torch.float32 or not case.aligned:
        return False
    for size in case.shape[:-2]:
        if size != 1:
            return False
    return case.shape[-2] >= rows and case.shape[-1] % 4 == 0


def has_clusters(case: Case) -> bool:
    """Return whether iterations read x_inp once, in clusters of multiprocessors."""
    if not is_long(case, limits.CLUSTER_ROWS) or case.input_mask or case.use_strides is not None:
        return False
    c, least, most = case.shape[-1] // limits.CLUSTER_D, *limits.CLUSTER_OUTPUTS
    if c not in limits.CLUSTER_SIZES or case.shape[-1] % limits.CLUSTER_D:
        return False
    sized = least <= case.n_out <= most and case.n_out % 4 == 0
    return sized and hopper.fits(hopper.cluster_bytes(c, case.n_out, first=False), case.device)


def has_halves(case: Case) -> bool:
    """Return whether the gradient of x_inp comes from pairs in float16.

    Until then, pairs wait in the rows of grad_W_A. They must fit its first block of columns, which is written
    last. The pairs of every iteration must start at a multiple of 16 bytes.
    """
    if not is_long(case, limits.HALVES_ROWS) or case.n_iters < 2:
        return False
    n_waiting = (case.n_iters - 1) * 2 * case.n_out
    fits = n_waiting <= limits.HALVES_PAIRS and n_waiting + case.n_out <= case.shape[-1]
    aligned = case.n_iters == 2 or case.n_out % 4 == 0
    return fits and aligned and case.shape[-1] >= limits.HALVES_D_INP


def is_wide(case: Case) -> bool:
    """Return whether pairs are bfloat16. With many outputs, pairs are most of the memory traffic.

    Rows must begin at multiples of 8 bytes, because other rows would be loaded number by number.
    """
    if case.variable or case.input_mask or case.use_strides is not None:
        return False
    least, most = limits.WIDE_OUTPUTS
    return case.rounded == torch.bfloat16 and least <= case.n_out <= most and case.n_out % 4 == 0
