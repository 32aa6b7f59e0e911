"""The batch path: many samples of a moderate size, padded, masked or packed, in few kernels of the host's time.

Each iteration has two kernels over the inputs. One multiplies x_inp with the rows of a matrix and does all that
is done to pairs, the other sums over inputs; see ``kernels``. Small steps lie between them.
"""

from typing import Any

import torch
from torch import Tensor

from vecroute.ops.common import Weights, compute_dtype
from vecroute.ops.launch import Stream


def arguments(x_inp: Tensor, weights: Weights, input_mask: Tensor | None, pair_mask: Tensor | None):
    """Tensors as the kernels take them: contiguous, aligned, masks of every sample as bytes."""
    w = {name: aligned(t) for name, t in weights._asdict().items() if t is not None}
    dtype = compute_dtype(x_inp.dtype)
    if w["W_F2"].dtype != dtype:  # operands of products
        w |= {name: w[name].to(dtype) for name in ("W_F2", "W_G1")}
    if input_mask is not None:
        input_mask = aligned(input_mask.expand(x_inp.shape[:-1])).view(torch.uint8)  # [..., i]
    use = None if pair_mask is None else flat_mask(pair_mask, x_inp).view(torch.uint8)  # [b, i, j]
    return aligned(x_inp), w, input_mask, use


def flat_mask(mask: Tensor, x_inp: Tensor) -> Tensor:
    """A pair mask [b, i, j] with the batch dimensions of x_inp as one."""
    batch = x_inp.shape[:-2]
    mask = mask.expand(*batch, *mask.shape[-2:])  # [..., i, j]
    return mask if len(batch) == 1 else mask.reshape(-1, *mask.shape[-2:])  # [b, i, j]


def aligned(t: Tensor) -> Tensor:
    """t, or a copy of it that is contiguous and begins at a multiple of 16 bytes."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


def forward(steps: Any, x_inp: Tensor, w: dict[str, Tensor], input_mask, use, cu_seqlens, phi: Tensor | None):
    """x_out [b, j, h] and the memory that the backward pass needs; fills phi [r, j] if it is given."""
    s, stream = steps.s, Stream(x_inp.device)
    saved, temporary = steps.saved.new(x_inp), steps.temporary.new(x_inp)
    kept, t = steps.saved.at(saved), steps.temporary.at(temporary)
    at = pointers(stream, w)
    x, shape = address(stream, x_inp), [s.batch] if s.packed else x_inp.shape[:-2]
    x_out = x_inp.new_empty(*shape, s.n_out, s.d_out, dtype=s.dtype)  # [..., j, h]
    none = kept["f"]  # for arguments that a kernel does not read
    input_mask, use, cu = (none if m is None else address(stream, m) for m in (input_mask, use, cu_seqlens))
    tiles, part_table = kept.get("tiles", none), kept.get("part_table", none)
    f, n, shared, last = kept["f"], kept["sqrt_n_inp"], kept.get("shared", none), s.n_iters - 1
    if s.packed:
        steps.segments(stream, cu, n, tiles, part_table)
    else:
        steps.lengths(stream, input_mask, n)
    if s.variable:
        steps.shared_rows(
            stream, at["W_use"], at["W_ign"], at["B_use"], at["B_ign"], at["W_A"], shared, kept["bias"]
        )
    betas = at.get("beta_use", none), at.get("beta_ign", none)
    c = (kept["c"], kept["c"]) if s.variable else betas
    for k in range(s.n_iters):
        phi_k = address(stream, phi) if phi is not None and k == last else t["phi"]
        if k == 0:
            steps.first(
                stream, x, shared, kept.get("bias", none), at["W_A"], at["B_A"], *betas, n, input_mask, use, tiles,
                kept.get("c", none), f, phi_k,
            )  # fmt: skip
        else:
            steps.next[k](stream, x, kept["M"], *c, at["W_S"], at["B_S"], f, use, tiles, phi_k)
        y, sums = kept[f"y{k}"], kept[f"s{k}"]
        add_up(stream, steps.sum_phi, phi_k, x, f, part_table, cu, t, y, sums)
        x_out_k = address(stream, x_out) if k == last else kept[f"before{k}"]
        steps.outputs(stream, y, sums, n, at["W_F1"], at["B_F2"], t["u"], x_out_k)
        steps.out_product(stream, t["u"], at["W_F2"], x_out_k, add=True)
        if k < last:
            v = x_out_k
            if s.d_out > 1:
                v = t["v"]
                steps.normalize(stream, x_out_k, v)
            steps.predict(stream, v, at["W_G1"], kept[f"g{k}"])
            steps.scores_matrix[k](stream, kept[f"g{k}"], at["W_G2"], at["B_G2"], at["W_S"], kept["M"])
    return x_out, saved


def backward(steps: Any, grad_x_out: Tensor, x_inp: Tensor, w: dict[str, Tensor], use, cu_seqlens, saved: Tensor, need_grad_x: bool):
    """Gradients of x_inp (None if not needed) and of the parameters by name, from grad_x_out [b, j, h]."""
    s, stream = steps.s, Stream(x_inp.device)
    memory = steps.back.new(x_inp)
    kept, t, at = steps.saved.at(saved), steps.back.at(memory), pointers(stream, w)
    grads = {name: torch.empty_like(v, dtype=s.dtype) for name, v in w.items()}
    if s.n_iters == 1:
        for name in ("W_S", "B_S", "W_G1", "W_G2", "B_G2"):
            grads[name].zero_()
    to, x, none = pointers(stream, grads), address(stream, x_inp), kept["f"]
    use, cu = (none if m is None else address(stream, m) for m in (use, cu_seqlens))
    tiles, part_table = kept.get("tiles", none), kept.get("part_table", none)
    f, n, last = kept["f"], kept["sqrt_n_inp"], s.n_iters - 1
    c = (kept["c"], kept["c"]) if s.variable else (at["beta_use"], at["beta_ign"])
    M, results = kept["M"], t["results"]
    parts = t.get("pair_parts", none)
    grad_out = address(stream, aligned(grad_x_out))
    for k in reversed(range(s.n_iters)):
        fresh = k == last
        y, sums = kept[f"y{k}"], kept[f"s{k}"]
        steps.grad_u(stream, grad_out, at["W_F2"], t["grad_u"])
        steps.outputs_backward[k](
            stream, grad_out, t["grad_u"], y, sums, n, at["W_F1"], at["B_F2"], M, t["u"], t["u"], t["grad_s"],
            to["W_F1"], to["B_F2"],
        )  # fmt: skip
        steps.grad_W_F2(stream, t["u"], grad_out, to["W_F2"], add=not fresh)
        if k == 0:
            steps.first_backward(
                stream, x, M, *c, f, n, t["grad_s"], use, tiles, results, t["grad_f"], parts
            )
            break
        steps.next_backward[k](
            stream, x, M, *c, at["W_S"], at["B_S"], f, t["grad_s"], use, tiles, results, t["grad_f"], parts
        )
        add_up(stream, steps.sum_dot[k], results, x, f, part_table, cu, t, t["grad_x_hat"], t["sums"])
        g, before = kept[f"g{k - 1}"], kept[f"before{k - 1}"]
        if s.variable:
            steps.scores_matrix_backward(
                stream, t["grad_x_hat"], g, at["W_G2"], at["B_G2"], at["W_S"], t["sums"], t["parts_S"]
            )
            steps.sum_S[k](stream, t["parts_S"], to["W_S"], to["B_S"], to["W_S"], to["B_S"])
        steps.predictions_backward[k](
            stream, t["grad_x_hat"], g, at["W_G2"], t["grad_g"], to["W_G2"], to["B_G2"]
        )
        grad_out, v = t["grad_x_out"], before
        steps.grad_v(stream, t["grad_g"], at["W_G1"], t["grad_v"] if s.d_out > 1 else grad_out)
        if s.d_out > 1:
            v = t["v"]
            steps.normalize_backward(stream, t["grad_v"], before, v, grad_out)
        steps.grad_W_G1(stream, v, t["grad_g"], to["W_G1"], add=not fresh)
    if s.variable:
        parts = {"parts": t["shared_parts"], "part_totals": t["shared_totals"]}
        add_up(stream, steps.sum_shared, results, x, f, none, none, parts, t["grad_shared"], t["shared_sums"])
        steps.shared_backward(
            stream, t["grad_shared"], t["shared_sums"], to["W_use"], to["W_ign"], to["B_use"], to["B_ign"], to["W_A"], to["B_A"]
        )
    else:
        steps.sum_pairs(stream, parts, to["beta_use"], to["beta_ign"], to["W_S"], to["B_S"])
        steps.activations_backward(stream, x, f, t["grad_f"], n, to["W_A"], to["B_A"])
    grad_x = None
    if need_grad_x:
        grad_x = torch.empty(x_inp.shape, dtype=x_inp.dtype, device=x_inp.device)
        steps.stack(stream, M, kept.get("shared", none), t["M_T"])
        steps.input_gradient(
            stream, results, t["M_T"], f, t["grad_f"], at["W_A"], tiles, address(stream, grad_x)
        )
    return grad_x, grads


def add_up(stream: Stream, launches: Any, pairs, x, f, parts, cu_seqlens, t: dict, out, totals) -> None:
    """out [b, q, d] = pairs^T x_inp and totals [b, q], sums over the inputs of each sample."""
    if launches.add is None:
        launches.parts(stream, pairs, x, f, parts, out, totals)
        return
    launches.parts(stream, pairs, x, f, parts, t["parts"], t["part_totals"])
    launches.add(stream, t["parts"], t["part_totals"], cu_seqlens, out, totals)


def address(stream: Stream, t: Tensor):
    return t if stream.interpreted else t.data_ptr()


def pointers(stream: Stream, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: address(stream, t) for name, t in tensors.items()}

