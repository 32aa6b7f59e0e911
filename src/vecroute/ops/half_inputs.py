"""Whether a call has x_inp in float16 for all its passes, and memory for that."""

import torch

from vecroute.ops import input_gradient
from vecroute.ops.common import multiple_of_8
from vecroute.ops.problem import Problem

ROWS = 64  # of a tile; what is summed over inputs shares a unit there
FEATURES = 128  # that a program of a sum over inputs has
LEAST_BYTES = 2**26  # of x_inp; below, much of it stays in the cache
MOST_OUTPUTS, MOST_FEATURES = 64, 8192  # that kernels have in their registers
LEAST_PROGRAMS = 96  # of a sum over inputs; with less a GPU is not busy


def half_inputs(p: Problem, n_iters: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what ``half_passes.HalfInputs`` has; none where it does not pay.

    That is for large batches of a variable length where tf32 is asked for, on GPUs that have the kernel of
    ``input_gradient``. float16 has the digits of tf32, at half the bytes and twice the rate.

    Returns:
        x_inp [b, i, d] in float16, and what its rows are over [b, i]; the same of the rows of M that all
        samples share, [q, d] and [q], and what is added to their products, [q].
    """
    if not (n_iters == 2 and has_whole_samples(p) and has_sizes(p) and has_kernels(p)):
        return []
    (b, i, d), q = p.x_inp.shape, multiple_of_8(2 * p.n_out + 1)
    half, single = torch.float16, torch.float32
    return [((b, i, d), half), ((b, i), single), ((q, d), half), ((q,), single), ((q,), single)]


def has_whole_samples(p: Problem) -> bool:
    """Whether samples of a variable length are as long as each other, and all their inputs used, and here."""
    whole = p.use is None and p.cu_seqlens is None and not p.group and p.x_inp.is_contiguous()
    return whole and p.implementation == "fused" and p.variable


def has_sizes(p: Problem) -> bool:
    """Whether x_inp is large, but not too large to be copied, and kernels can have j and d."""
    (b, i, d), j = p.x_inp.shape, p.n_out
    aligned_sizes = d % FEATURES == 0 and j % 8 == 0
    fits = aligned_sizes and d <= MOST_FEATURES and j <= MOST_OUTPUTS and b < 2**16
    copied, kept = b * i * d * 2, b * i * multiple_of_8(2 * j + 1) * 4  # bytes
    fits = fits and copied <= 4 * p.tuning.keep_bytes and kept <= p.tuning.keep_bytes
    fits = fits and b * i * 8 * j < 2**31  # offsets of pairs are 32 bits
    return fits and 2 * copied >= LEAST_BYTES and b * (d // FEATURES) >= LEAST_PROGRAMS


def has_kernels(p: Problem) -> bool:
    """Whether products are tf32, by name or under autocast, and the device has the kernels."""
    tf32 = p.x_inp.is_cuda and p.x_inp.dtype == p.operand_dtype == torch.float32
    tf32 = tf32 and (p.rounded != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32")
    return tf32 and input_gradient.has_kernel(input_gradient.of_many(p.n_out), p.x_inp.device)
