"""The plan of a call: which path it takes, and why. Every threshold that chooses a path stands here."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from vecroute.ops.common import compute_dtype

MOST_OUTPUTS = 128  # a program of the batch path has all outputs of 64 inputs in its registers
MOST_FEATURES = 8192  # of an output vector, which one program normalises
MOST_BYTES = 2**29  # what the batch path may take for pairs; longer calls are cut into chunks
MOST_HALF_BYTES = 2**28  # of x_inp in float16, which is kept for the backward
PLANS = 512  # as many are kept, the last used


class Tuning(NamedTuple):
    """How a call is cut up: rows of a chunk (0: chosen from the shapes), bytes of i x j quantities kept.

    A tuning other than the default asks for chunks.
    """

    rows: int = 0
    keep_bytes: int = 64 * 2**20


class Case(NamedTuple):
    """Everything of a call that its plan depends on."""

    shape: tuple[int, ...]  # of x_inp
    dtype: torch.dtype  # of x_inp
    rounded: torch.dtype  # to which autocast rounds operands, else that of x_inp
    w_dtype: torch.dtype
    n_out: int
    d_out: int
    n_iters: int
    variable: bool  # whether n_inp is None
    input_mask: bool
    use_strides: tuple[int, int, int] | None  # of pair_mask [b, i, j], None if there is none
    packed: tuple[int, torch.dtype] | None  # how many samples, and the dtype of cu_seqlens
    prior: float
    implementation: str
    tuning: Tuning
    group: bool
    tf32: bool  # whether products of float32 may be rounded to tf32
    need_phi: bool
    device: torch.device


@dataclass(frozen=True)
class Plan:
    """The path of a call, and the reason; ``print(plan)`` tells both, with the kernels and the memory."""

    case: Case
    path: str
    why: str

    # Sizes in the paper's letters, over all samples.
    @cached_property
    def batch(self) -> int:
        if self.case.packed:
            return self.case.packed[0]
        n = 1
        for size in self.case.shape[:-2]:
            n *= size
        return n

    @cached_property
    def n_inp(self) -> int:
        return self.case.shape[-2]

    @cached_property
    def n_rows(self) -> int:
        return self.n_inp if self.case.packed else self.batch * self.n_inp

    @cached_property
    def half(self) -> bool:
        """Whether operands of products are float16 with a unit, which has the digits of tf32."""
        case = self.case
        fits = case.shape[-1] <= MOST_FEATURES and self.n_rows * case.shape[-1] * 2 <= MOST_HALF_BYTES
        return fits and (case.tf32 or case.dtype == torch.float16)

    @cached_property
    def operand(self) -> torch.dtype:
        """The dtype of operands of products that are not halves.

        On a CPU kernels are interpreted, which cuts digits off instead of rounding to bfloat16.
        """
        rounds = self.case.dtype == torch.bfloat16 and self.case.device.type == "cuda"
        return torch.bfloat16 if rounds else compute_dtype(self.case.dtype)

    @cached_property
    def precision(self) -> str:
        """How Triton multiplies float32 operands: float16 numbers are tf32 numbers too."""
        if self.operand != torch.float32:
            return "ieee"
        return "tf32x3" if self.case.dtype == torch.float32 and not self.case.tf32 else "tf32"

    @cached_property
    def steps(self) -> Any:
        """The prepared launches of the batch path."""
        from vecroute.ops.paths.batch.steps import Steps

        return Steps(self)

    def __str__(self) -> str:
        lines = [f"path: {self.path} ({self.why})", f"inputs: {self.n_rows} vectors in {self.batch} samples"]
        if self.path == "batch":
            operands = f"{self.operand}, {self.precision}"
            operands = "float16 with a unit for each row" if self.half else operands
            memory = self.steps.saved, self.steps.temporary, self.steps.back
            saved, forward, backward = (f"{each.n_bytes / 2**20:.1f} MB" for each in memory)
            lines += [
                f"operands of products: {operands}",
                f"memory: {saved} from forward to backward, {forward} in forward, {backward} in backward",
                "kernels: " + ", ".join(self.steps.kernels()),
            ]
        return "\n".join(lines)


@lru_cache(PLANS)
def make_plan(case: Case) -> Plan:
    """The plan of a call, made once for each case."""
    return choose_path(case)


def choose_path(case: Case) -> Plan:
    """Choose the path of a call; compilers ask with sizes that they do not know."""
    if case.implementation != "fused":
        return Plan(case, "chunked", f"implementation={case.implementation!r}")
    why_not = why_not_batch(case)
    return Plan(case, "chunks", why_not) if why_not else Plan(case, "batch", "few outputs, all pairs fit")


def why_not_batch(case: Case) -> str | None:
    """What keeps a call from the batch path, if anything does."""
    j, n = case.n_out, 1
    for size in case.shape[:-1]:
        n *= size
    if case.group:
        return "inputs are sharded over ranks"
    if case.tuning != Tuning():
        return "chunks are asked for"
    if n == 0 or (case.packed and case.packed[0] == 0):
        return "there are no inputs"
    if j > MOST_OUTPUTS:
        return f"n_out={j} is more than {MOST_OUTPUTS}"
    if case.d_out > MOST_FEATURES:
        return f"d_out={case.d_out} is more than {MOST_FEATURES}"
    n_bytes = n * j * (2 * case.n_iters + 3) * compute_dtype(case.dtype).itemsize
    if n_bytes > MOST_BYTES:
        return f"pairs take {n_bytes / 2**20:.0f} MB, more than {MOST_BYTES / 2**20:.0f}"
    return None
