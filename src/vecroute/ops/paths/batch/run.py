"""One call of the batch path, forward and backward.

Each iteration has two kernels over the inputs. One multiplies x_inp with the rows of a matrix and does all
other work on pairs, the other sums over inputs; see ``kernels``. Small steps run between iterations.
"""

import math
from typing import Any

import torch
from torch import Tensor

from vecroute.ops.common import Weights, aligned
from vecroute.ops.launch import Stream
from vecroute.ops.paths.batch.steps import Steps, Sum
from vecroute.ops.plan import Plan


def arguments(x_inp: Tensor, weights: Weights, input_mask: Tensor | None, pair_mask: Tensor | None):
    """Convert tensors for the kernels: parameters by name, and masks of every sample as bytes."""
    w = {name: t for name, t in weights._asdict().items() if t is not None}
    if input_mask is not None:
        input_mask = aligned(input_mask.expand(x_inp.shape[:-1])).view(torch.uint8)  # [..., i]
    use = None if pair_mask is None else flat_mask(pair_mask, x_inp).view(torch.uint8)  # [b, i, j]
    return aligned(x_inp), w, input_mask, use


def flat_mask(mask: Tensor, x_inp: Tensor) -> Tensor:
    """Return a pair mask [b, i, j] with the batch dimensions of x_inp as one."""
    batch = x_inp.shape[:-2]
    mask = mask.expand(*batch, *mask.shape[-2:])  # [..., i, j]
    return mask if len(batch) == 1 else mask.reshape(math.prod(batch), *mask.shape[-2:])  # [b, i, j]


def forward(
    plan: Plan, x_inp: Tensor, weights: Weights, input_mask: Tensor | None, pair_mask: Tensor | None,
    cu_seqlens: Tensor | None, phi: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x_out [..., j, h] and the memory for the backward pass. Fill phi [..., i, j] if it is given."""
    x_inp, w, input_mask, use = arguments(x_inp, weights, input_mask, pair_mask)
    steps: Steps = plan.steps
    case, stream = steps.case, Stream(x_inp.device)
    saved, temporary = steps.saved.new(x_inp), steps.temporary.new(x_inp)
    kept, t, at = steps.saved.at(saved), steps.temporary.at(temporary), pointers(stream, w)
    shape = [steps.batch] if steps.packed else x_inp.shape[:-2]
    x_out = x_inp.new_empty(*shape, steps.n_out, steps.h, dtype=steps.dtype)  # [..., j, h]
    f, M = kept["f"], kept["M"]
    none = f  # for arguments that a kernel does not read
    mask, use, cu, phi_out, x = (
        none if t is None else address(stream, t) for t in (input_mask, use, cu_seqlens, phi, x_inp)
    )
    n, tiles = kept["sqrt_n_inp"], kept.get("tiles", none)
    if steps.packed:
        steps.segments(stream, cu, n, tiles, kept["parts"])
    betas = at.get("beta_use", none), at.get("beta_ign", none)
    shared, bias, shared_tops = (kept.get(name, none) for name in ("shared", "bias", "shared_tops"))
    if case.variable:
        of_c = at["W_use"], at["W_ign"], at["B_use"], at["B_ign"], at["W_A"]
        steps.shared_rows(stream, *of_c, mask, n, shared, shared_tops, bias)
    else:
        steps.lengths(stream, mask, n)
    x_half, x_tops, M_tops = kept.get("x", none), kept.get("x_tops", none), kept.get("M_tops", none)
    steps.inputs(stream, x, at["W_A"], at["B_A"], n, mask, use, tiles, f, x_half, x_tops)
    x = x_half if steps.half else x
    c = (kept["c"], kept["c"]) if case.variable else betas
    to_sum = t["phi"], t["tops"], t["tile_sums"]
    for k in range(case.n_iters):
        if k == 0:
            of_M = shared, bias, x_tops, shared_tops
            steps.first(stream, x, *of_M, *betas, f, use, tiles, c[0], *to_sum, phi_out)
        else:
            steps.next[k](
                stream, x, M, x_tops, M_tops, *c, at["W_S"], at["B_S"], f, use, tiles, *to_sum, phi_out
            )
        y, s = kept[f"y{k}"], kept[f"s{k}"]
        tables = tiles, kept.get("parts", none), none, none
        add_up(stream, steps.sum_pairs_j, to_sum, x, f, tables, cu, t, "sum", y, s)
        x_out_k = address(stream, x_out) if k == steps.last else kept[f"before{k}"]
        small_steps(stream, steps, k, kept, t, at, x_out_k)
    return x_out, saved


def small_steps(stream: Stream, steps: Steps, k: int, kept: dict, t: dict, at: dict, x_out) -> None:
    """Compute x_out [b, j, h] after the pass of iteration k, and x_hat for the next iteration."""
    y, s, n, M = kept[f"y{k}"], kept[f"s{k}"], kept["sqrt_n_inp"], kept["M"]
    if steps.large:
        steps.outputs(stream, y, s, n, at["W_F1"], at["B_F2"], t["u"], x_out)
        steps.out_product(stream, t["u"], at["W_F2"], x_out, t["workspace"])
    else:
        steps.outputs(stream, y, s, n, at["W_F1"], at["W_F2"], at["B_F2"], x_out)
    if k == steps.last:
        return
    g, rows = kept[f"g{k}"], t["rows"] if steps.half else M
    scale = at["W_G2"], at["B_G2"], at["W_S"]
    if steps.large:
        v = x_out
        if steps.h > 1:
            v = t["v"]
            steps.normalize(stream, x_out, v)
        steps.predict(stream, v, at["W_G1"], g, t["workspace"])
        steps.scores_matrix[k](stream, g, *scale, rows)
    else:
        steps.predictions[k](stream, x_out, at["W_G1"], *scale, g, rows)
    if steps.half:
        steps.x_hat_halves[k](stream, rows, M, kept["M_tops"])


def backward(
    plan: Plan, grad_x_out: Tensor, x_inp: Tensor, weights: Weights, pair_mask: Tensor | None,
    cu_seqlens: Tensor | None, saved: Tensor, need_grad_x: bool,
) -> tuple[Tensor | None, dict[str, Tensor]]:  # fmt: skip
    """Return the gradients of x_inp (None if not needed) and of parameters, from grad_x_out [..., j, h]."""
    x_inp, w, _, use = arguments(x_inp, weights, None, pair_mask)
    steps: Steps = plan.steps
    case, stream = steps.case, Stream(x_inp.device)
    memory = steps.back.new(x_inp)
    kept, t, at = steps.saved.at(saved), steps.back.at(memory), pointers(stream, w)
    grads = {name: torch.empty_like(v, dtype=steps.dtype) for name, v in w.items()}
    if steps.last == 0:
        for name in ("W_S", "B_S", "W_G1", "W_G2", "B_G2"):
            grads[name].zero_()
    to, f, M = pointers(stream, grads), kept["f"], kept["M"]
    none = f
    grad_x_out = aligned(grad_x_out)
    use, cu, grad_out, x_inp_at = (
        none if m is None else address(stream, m) for m in (use, cu_seqlens, grad_x_out, x_inp)
    )
    x = kept["x"] if steps.half else x_inp_at
    n, tiles, parts = kept["sqrt_n_inp"], kept.get("tiles", none), t.get("pair_parts", none)
    x_tops, M_tops, shared_tops = (kept.get(name, none) for name in ("x_tops", "M_tops", "shared_tops"))
    c = (kept["c"], kept["c"]) if case.variable else (at["beta_use"], at["beta_ign"])
    to_sum = t["to_sum"], t["tops"], t["tile_sums"]
    workspace = (t["workspace"],) if steps.large else ()
    tops = t["row_tops"]  # tops of all iterations, the last iteration first
    after = t.get("grad_c", none), t["grad_f"], parts, *to_sum
    for k in reversed(range(case.n_iters)):
        steps.grad_u(stream, grad_out, at["W_F2"], t["grad_u"], *workspace)
        grad_y = t["rows"] if steps.half else M
        steps.outputs_backward[k](
            stream, grad_out, t["grad_u"], kept[f"y{k}"], kept[f"s{k}"], n, at["W_F1"], at["B_F2"], grad_y,
            t["u"], t["u"],
            t["grad_s"], to["W_F1"], to["B_F2"],
        )  # fmt: skip
        if steps.half:
            steps.grad_y_halves[k](stream, grad_y, M, M_tops)
        steps.grad_W_F2[k](stream, t["u"], grad_out, to["W_F2"], *workspace)
        if k == 0:
            steps.first_backward(
                stream, x, M, x_tops, M_tops, shared_tops, *c, f, n, t["grad_s"], use, tiles, t["results"],
                tops, row(stream, steps, tops, steps.last), *after,
            )  # fmt: skip
            break
        steps.next_backward[k](
            stream, x, M, x_tops, M_tops, *c, at["W_S"], at["B_S"], f, t["grad_s"], use, tiles, t["results"],
            row(stream, steps, tops, steps.last - k - 1), row(stream, steps, tops, steps.last - k), *after,
        )  # fmt: skip
        grad_x_hat, sums = t["grad_x_hat"], t["sums"]
        tables = tiles, kept.get("parts", none), none, none
        add_up(stream, steps.sum_pairs_j, to_sum, x, f, tables, cu, t, "sum", grad_x_hat, sums)
        g, before = kept[f"g{k - 1}"], kept[f"before{k - 1}"]
        if case.variable:
            steps.scores_matrix_backward(
                stream, grad_x_hat, g, at["W_G2"], at["B_G2"], at["W_S"], sums, t["parts_S"]
            )
            steps.sum_S[k](stream, t["parts_S"], to["W_S"], to["B_S"], to["W_S"], to["B_S"])
        steps.predictions_backward[k](stream, grad_x_hat, g, at["W_G2"], t["grad_g"], to["W_G2"], to["B_G2"])
        grad_out, v = t["grad_x_out"], before
        steps.grad_v(stream, t["grad_g"], at["W_G1"], t["grad_v"] if steps.h > 1 else grad_out, *workspace)
        if steps.h > 1:
            v = t["v"]
            steps.normalize_backward(stream, t["grad_v"], before, v, grad_out)
        steps.grad_W_G1[k](stream, v, t["grad_g"], to["W_G1"], *workspace)
    if case.variable:
        of_shared = t["grad_shared"], t["shared_sums"]
        of_a = tiles, none, t["grad_f"], x_tops
        add_up(stream, steps.sum_shared, to_sum, x, f, of_a, none, t, "whole", *of_shared)
        names = "W_use", "W_ign", "B_use", "B_ign", "W_A", "B_A"
        steps.shared_backward(stream, *of_shared, *(to[name] for name in names))
    else:
        steps.sum_pairs(stream, parts, to["beta_use"], to["beta_ign"], to["W_S"], to["B_S"])
        steps.activations_backward(stream, x_inp_at, f, t["grad_f"], n, to["W_A"], to["B_A"])
    grad_x = None
    if need_grad_x:
        grad_x = torch.empty(x_inp.shape, dtype=x_inp.dtype, device=x_inp.device)
        top = row(stream, steps, tops, steps.last)
        of_x = M, f, t["grad_f"], at["W_A"], tiles, address(stream, grad_x)
        steps.input_gradient(stream, t["results"], top, *of_x)
    return grad_x, grads


def add_up(
    stream: Stream, launches: Sum, pairs: tuple, x, f, others: tuple, cu_seqlens, t: dict, name, out, totals
):
    """Sum over the inputs of each sample, or of all samples: out [b, q, d] = pairs^T x_inp, totals [b, q]."""
    values, tops, sums = pairs
    many = launches.add is not None
    to = (t[f"{name}_parts"], t[f"{name}_totals"]) if many else (out, totals)
    launches.parts(stream, values, x, f, tops, sums, *others, *to)
    if launches.add is not None:
        launches.add(stream, *to, cu_seqlens, out, totals)


def row(stream: Stream, steps: Steps, tops, k: int):
    """Return row k of [t, r] numbers; any row if k is negative."""
    k = max(k, 0)
    return tops[k] if stream.interpreted else tops + k * steps.n_rows * steps.dtype.itemsize


def address(stream: Stream, t: Tensor):
    return t if stream.interpreted else t.data_ptr()


def pointers(stream: Stream, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return tensors if stream.interpreted else {name: t.data_ptr() for name, t in tensors.items()}
