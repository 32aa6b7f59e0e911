"""The text that ``print(plan)`` shows."""

from vecroute.ops.common import cdiv
from vecroute.ops.plan import limits, rows
from vecroute.ops.plan.plan import Plan

WAITS_IN = {
    "grad_W_A": "in the rows of grad_W_A, which are written last",
    "grad_x": "in the rows of grad_x, which are written last",
    "apart": "in memory of their own",
}


def told(plan: Plan) -> str:
    """Return the path, the reason, the dtypes, the chunks, the memory and the kernels, a line each."""
    case, samples = plan.case, "sample" if plan.batch == 1 else "samples"
    lines = [
        f"path: {plan.path} ({plan.why})",
        f"inputs: {plan.n_rows} vectors in {plan.batch} {samples}, {case.n_iters} iterations",
        f"operands of products: {operands(plan)}",
    ]
    return "\n".join(lines + (batch_lines(plan) if plan.path == "batch" else chunk_lines(plan)))


def operands(plan: Plan) -> str:
    if plan.path == "batch":
        exact = f"{plan.operand_dtype}, {plan.precision}"
        return "float16 with a scale for each row" if plan.half else exact
    tf32 = " as tf32" if plan.case.tf32 and plan.fused and plan.operand_dtype == plan.dtype else ""
    return f"{plan.operand_dtype}{tf32}; pairs {plan.pair_dtype}"


def megabytes(n: int) -> str:
    return f"{n / 2**20:.1f} MB" if n >= 2**20 else f"{n / 2**10:.1f} KB"


def batch_lines(plan: Plan) -> list[str]:
    steps = plan.steps
    memory = steps.saved, steps.temporary, steps.back
    saved, forward, backward = (megabytes(each.n_bytes) for each in memory)
    return [
        "chunks: none",
        f"memory on top: {saved} from forward to backward, {forward} in forward, {backward} in backward",
        "kernels: " + ", ".join(steps.kernels()),
    ]


def chunk_lines(plan: Plan) -> list[str]:
    chunks, memory = zip(*(pass_of(plan, forward) for forward in (True, False)), strict=True)
    saved = megabytes(plan.saved.n_bytes)
    return [
        f"chunks: {chunks[0]} in forward, {chunks[1]} in backward",
        f"memory on top: {saved} from forward to backward, {memory[0]} in forward, {memory[1]} in backward",
        f"pairs wait {WAITS_IN[plan.waits_in]}" if plan.waits_in else "pairs are not kept between passes",
        "kernels: " + ", ".join(kernels(plan)),
    ]


def pass_of(plan: Plan, forward: bool) -> tuple[str, str]:
    """Return the rows of a chunk in the largest pass, and the memory of its buffers."""
    if forward and plan.clusters:
        c, j = plan.d_inp // limits.CLUSTER_D, plan.case.n_out
        parts = plan.case.device.processors * (plan.d_inp // c + 1) * j  # y and s, summed over clusters
        return "none", megabytes((parts + c * plan.n_inp) * plan.dtype.itemsize)  # and scales of x_inp
    wide, most = plan.path == "wide", 0
    told = ""
    for first in (True, False) if plan.case.n_iters > 1 else (True,):
        if forward:
            row, share = rows.forward_row(plan, first, wide), plan.forward_share
        else:
            waits = bool(plan.waits_in)
            dtype = plan.dtype if waits else plan.pair_dtype
            row = rows.backward_row(plan, first, waits, dtype.itemsize)
            share = plan.backward_share(waits)
        size = plan.chunk_rows(row, share)
        n_bytes = min(size, plan.n_rows) * row * plan.dtype.itemsize
        if n_bytes >= most:
            most, told = n_bytes, f"{n_chunks(plan, size)} of at most {min(size, plan.n_rows)} rows"
    return told, megabytes(most)


def n_chunks(plan: Plan, size: int) -> int:
    """Count the chunks of at most ``size`` rows; a lower bound for packed samples of unknown lengths."""
    batch, n_inp = plan.rows
    if size < n_inp:
        return batch * cdiv(n_inp, size)
    return cdiv(batch, plan.chunk_samples(size, n_inp))


def kernels(plan: Plan) -> list[str]:
    """List the kernels for pairs and inputs, with the kernels of the path itself first."""
    if not plan.fused:
        return ["PyTorch's own"]
    found = ["clusters.cu"] if plan.clusters else []
    found += ["halves.input_gradient_kernel"] if plan.halves else []
    if plan.path == "wide":
        found += ["wide.rows_kernel", "wide.rows_backward_kernel"]
    else:
        found += [] if plan.clusters else ["coefficients_kernel"]
        found += ["coefficients_backward_kernel"]
    if plan.case.variable:
        found += ["shared_rows_kernel", "shared_rows_backward_kernel"]
    elif not plan.clusters:
        found += ["activations_kernel"]
    return [*found, "product.rows_kernel" if plan.ieee_kernel else "cuBLAS"]
