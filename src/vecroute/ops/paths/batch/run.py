"""One call of the batch path, forward and backward.

Each iteration has two kernels over the inputs. One multiplies x_inp with the rows of a matrix and does all
other work on pairs, the other sums over inputs; see ``kernels``. Small steps run between iterations.

``launch_forward`` and ``launch_backward`` only call launches with pointers to tensors and to arrays. On a GPU
they run once for each plan, and are recorded (see ``ops/recording.py``).
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vecroute.ops.common import Weights, aligned
from vecroute.ops.paths.batch.steps import Steps, Sum
from vecroute.ops.plan import Plan
from vecroute.ops.recording import Pass, Pointer, Recorder

Pointers = dict[str, Pointer]


def prepare(plan: Plan) -> Steps:
    """Return all launches of a plan, and its two passes."""
    steps = Steps(plan)
    steps.forward = Pass(partial(launch_forward, steps))
    steps.backward = Pass(partial(launch_backward, steps))
    return steps


def arguments(
    steps: Steps, x_inp: Tensor, weights: Sequence[Tensor], input_mask: Tensor | None,
    pair_mask: Tensor | None, cu_seqlens: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the tensors that a pass reads, by name, with masks of every sample as bytes."""
    tensors = dict(zip(steps.weights, weights, strict=True))
    tensors["x_inp"] = aligned(x_inp)  # [..., i, d]
    if input_mask is not None:
        tensors["input_mask"] = aligned(input_mask.expand(x_inp.shape[:-1])).view(torch.uint8)  # [..., i]
    if pair_mask is not None:
        tensors["use"] = flat_mask(pair_mask, x_inp).view(torch.uint8)  # [b, i, j]
    if cu_seqlens is not None:
        tensors["cu_seqlens"] = cu_seqlens  # [b + 1]
    return tensors


def flat_mask(mask: Tensor, x_inp: Tensor) -> Tensor:
    """Return a pair mask [b, i, j] with the batch dimensions of x_inp as one."""
    batch = x_inp.shape[:-2]
    mask = mask.expand(*batch, *mask.shape[-2:])  # [..., i, j]
    return mask if len(batch) == 1 else mask.reshape(math.prod(batch), *mask.shape[-2:])  # [b, i, j]


def forward(
    plan: Plan, x_inp: Tensor, weights: Sequence[Tensor], input_mask: Tensor | None,
    pair_mask: Tensor | None, cu_seqlens: Tensor | None, phi: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x_out [..., j, h] and the memory for the backward pass. Fill phi [..., i, j] if it is given."""
    steps: Steps = plan.steps
    tensors = arguments(steps, x_inp, weights, input_mask, pair_mask, cu_seqlens)
    shape = [steps.batch] if steps.packed else x_inp.shape[:-2]
    x_out = x_inp.new_empty(*shape, steps.n_out, steps.h, dtype=steps.dtype)  # [..., j, h]
    saved = steps.saved.new(x_inp)
    tensors |= {"x_out": x_out, "saved": saved, "temporary": steps.temporary.new(x_inp)}
    if phi is not None:
        tensors["phi"] = phi
    steps.forward(x_inp.device, tensors)
    return x_out, saved


def launch_forward(steps: Steps, stream: Recorder, at: Pointers) -> None:
    """Launch the kernels of a forward pass."""
    case, kept, t = steps.case, steps.saved.at(at["saved"]), steps.temporary.at(at["temporary"])
    f, M = kept["f"], kept["M"]
    none = f  # for arguments that a kernel does not read
    mask, use, cu, phi_out = (at.get(name, none) for name in ("input_mask", "use", "cu_seqlens", "phi"))
    n, tiles = kept["sqrt_n_inp"], kept.get("tiles", none)
    if steps.packed:
        steps.segments(stream, cu, n, tiles, kept["parts"])
    betas = at.get("beta_use", none), at.get("beta_ign", none)
    shared, bias, shared_tops = (kept.get(name, none) for name in ("shared", "bias", "shared_tops"))
    if case.variable:
        of_c = at["W_use"], at["W_ign"], at["B_use"], at["B_ign"]
        steps.shared_rows(stream, *of_c, mask, n, shared, shared_tops, bias)
    else:
        steps.lengths(stream, mask, n)
    x_half, x_tops, M_tops = kept.get("x", none), kept.get("x_tops", none), kept.get("M_tops", none)
    steps.inputs(stream, at["x_inp"], at["W_A"], at["B_A"], n, mask, use, tiles, f, x_half, x_tops)
    x = x_half if steps.half else at["x_inp"]
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
        ends = k == steps.last and not steps.normalized
        small_steps(stream, steps, k, kept, t, at, at["x_out"] if ends else kept[f"before{k}"])
    if steps.normalized:
        steps.normalize(stream, kept[f"before{steps.last}"], at["x_out"])


def small_steps(
    stream: Recorder, steps: Steps, k: int, kept: Pointers, t: Pointers, at: Pointers, x_out: Pointer
) -> None:
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
    plan: Plan, grad_x_out: Tensor, x_inp: Tensor, weights: Sequence[Tensor], pair_mask: Tensor | None,
    cu_seqlens: Tensor | None, saved: Tensor, need_grad_x: bool,
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """Return the gradients of x_inp (None if not needed) and of parameters, from grad_x_out [..., j, h]."""
    steps: Steps = plan.steps
    tensors = arguments(steps, x_inp, weights, None, pair_mask, cu_seqlens)
    grads = [torch.empty_like(w, dtype=steps.dtype) for w in weights]
    tensors |= zip(steps.grads, grads, strict=True)
    if steps.last == 0:
        for name in ("W_S", "B_S", "W_G1", "W_G2", "B_G2"):
            tensors[f"grad_{name}"].zero_()
    tensors |= {"grad_x_out": aligned(grad_x_out), "saved": saved, "memory": steps.back.new(x_inp)}
    grad_x = None
    if need_grad_x:
        grad_x = torch.empty(x_inp.shape, dtype=x_inp.dtype, device=x_inp.device)  # [..., i, d]
        tensors["grad_x"] = grad_x
    steps.backward(x_inp.device, tensors)
    return grad_x, grads


def launch_backward(steps: Steps, stream: Recorder, at: Pointers) -> None:
    """Launch the kernels of a backward pass."""
    case, kept, t = steps.case, steps.saved.at(at["saved"]), steps.back.at(at["memory"])
    to = {name: at[f"grad_{name}"] for name in Weights._fields if name in at}
    f, M = kept["f"], kept["M"]
    none = f
    grad_out, use, cu = at["grad_x_out"], at.get("use", none), at.get("cu_seqlens", none)
    x = kept["x"] if steps.half else at["x_inp"]
    n, tiles, grad_c = kept["sqrt_n_inp"], kept.get("tiles", none), t["grad_c"]
    x_tops, M_tops, shared_tops = (kept.get(name, none) for name in ("x_tops", "M_tops", "shared_tops"))
    c = (kept["c"], kept["c"]) if case.variable else (at["beta_use"], at["beta_ign"])
    to_sum = t["to_sum"], t["tops"], t["tile_sums"]
    workspace = (t["workspace"],) if steps.large else ()
    tops = t["row_tops"]  # tops of all iterations, the last iteration first
    after = grad_c, t["grad_f"], *to_sum
    if steps.normalized:
        before = kept[f"before{steps.last}"]
        steps.normalize_backward(stream, grad_out, before, t["v"], t["grad_x_out"])
        grad_out = t["grad_x_out"]
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
                tops, *after,
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
        steps.sum_pairs(stream, grad_c, to["beta_use"], to["beta_ign"], to["W_S"], to["B_S"])
        steps.activations_backward(stream, at["x_inp"], f, t["grad_f"], n, to["W_A"], to["B_A"])
    if "grad_x" in at:
        top = row(stream, steps, tops, steps.last)
        of_x = M, f, t["grad_f"], at["W_A"], tiles, at["grad_x"]
        steps.input_gradient(stream, t["results"], top, *of_x)


def add_up(
    stream: Recorder, launches: Sum, pairs: tuple, x: Pointer, f: Pointer, others: tuple, cu_seqlens: Pointer,
    t: Pointers, name: str, out: Pointer, totals: Pointer,
) -> None:  # fmt: skip
    """Sum over the inputs of each sample, or of all samples: out [b, q, d] = pairs^T x_inp, totals [b, q]."""
    values, tops, sums = pairs
    many = launches.add is not None
    to = (t[f"{name}_parts"], t[f"{name}_totals"]) if many else (out, totals)
    launches.parts(stream, values, x, f, tops, sums, *others, *to)
    if launches.add is not None:
        launches.add(stream, *to, cu_seqlens, out, totals)


def row(stream: Recorder, steps: Steps, tops: Pointer, k: int) -> Pointer:
    """Return row k of [t, r] numbers; any row if k is negative."""
    k = max(k, 0)
    return tops[k] if stream.interpreted else tops + k * steps.n_rows * steps.dtype.itemsize
