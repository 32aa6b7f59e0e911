"""What is done to each pair i, j of a chunk, as Triton kernels.

Kernel vocabulary: ``o_`` offsets, ``m_`` masks of what is inside, ``b_`` blocks of values. Offsets are int64.
A program has some rows i of a sample and goes over all outputs j in blocks, once for the normaliser of R and
again for the result; the second time the blocks come from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vecroute.ops.fused_product import rows_times
from vecroute.ops.passes import Chunk, use_of
from vecroute.ops.problem import Problem
from vecroute.ops.products import accumulate, add, has_kernel


@triton.jit
def log_f(z):
    """log of the logistic function, finite for every finite z."""
    return tl.minimum(z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z)))


@triton.jit
def scores(dot, W_S, B_S, use, o_dot, o_S, o_use, j_use, o_j, m, FIRST: tl.constexpr, FIXED: tl.constexpr,
           MASKED: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """S of a block, -inf at unused pairs and outside; 0 under the flat prior; and the dot product."""
    b_dot = tl.zeros(m.shape, T)
    S = tl.zeros(m.shape, T)
    if not FIRST:
        b_dot = tl.load(dot + o_dot + o_j, mask=m, other=0.0).to(T)
        z = b_dot
        if FIXED:
            z = z * tl.load(W_S + o_S + o_j, mask=m, other=0.0).to(T)
        z += tl.load(B_S + o_S + o_j, mask=m, other=0.0).to(T)
        S = log_f(z)
    if MASKED:
        m = m & (tl.load(use + o_use + o_j * j_use, mask=m, other=0) != 0)
    return tl.where(m, S, -float("inf")), b_dot, m


@triton.jit
def normaliser(dot, W_S, B_S, use, o_dot, o_S, o_use, j_use, m_i, n_out, TILES: tl.constexpr, FIRST: tl.constexpr,
               FIXED: tl.constexpr, MASKED: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The greatest S of each row (0 if none is used) and 1 / sum_j exp(S - it) (0 if none is used)."""
    top = tl.full([BLOCK_I, 1], -float("inf"), T)
    total = tl.zeros([BLOCK_I, 1], T)
    for tile in range(TILES):
        o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
        m = m_i & (o_j < n_out)
        S, _, _ = scores(dot, W_S, B_S, use, o_dot, o_S, o_use, j_use, o_j, m, FIRST, FIXED, MASKED, T)
        new = tl.maximum(top, tl.max(S, 1)[:, None])
        safe = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(S - safe), 1)[:, None]
        top = new
    empty = total == 0.0
    return tl.where(empty, 0.0, top), tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))


@triton.jit
def betas(c_sum, c_ign, o_c, o_j, m, FIXED: tl.constexpr, T: tl.constexpr):
    """c_sum and c_ign of a block; of a fixed length the pointers are to beta_use and beta_ign."""
    b_sum = tl.load(c_sum + o_c + o_j, mask=m, other=0.0).to(T)
    b_ign = tl.load(c_ign + o_c + o_j, mask=m, other=0.0).to(T)
    if FIXED:
        b_sum += b_ign
    return b_sum, b_ign


@triton.jit
def coefficients_kernel(
    dot,  # [b, i, j] x_inp times x_hat; where FIRST not read
    c_sum,  # [b, i, j], or beta_use [i, j] where FIXED; where FLAT the flat c
    c_ign,  # the same of c_ign; where FLAT not read
    W_S,  # [i, j] where FIXED, else not read
    B_S,  # [i, j], or [1, j] with row stride 0
    use,  # [b, i, j] where MASKED
    f,  # [b, i]
    phi,  # [b, i, j] the result
    n_inp,
    n_out,
    dot_b, dot_i, c_b, c_i, S_i, use_b, use_i, use_j, f_b, phi_b, phi_j,  # strides
    FIRST: tl.constexpr,
    FIXED: tl.constexpr,
    FLAT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILES: tl.constexpr,  # blocks of outputs; if one, all of it stays in registers
    VEC: tl.constexpr,  # a divisor of n_out and all row strides, which are given in units of it
    T: tl.constexpr,  # what is computed in
):  # fmt: skip
    """phi = f (c_sum R - c_ign)."""
    n_out = n_out * VEC
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    b = tl.program_id(1).to(tl.int64)
    m_i = o_i < n_inp
    o_dot, o_c, o_S = (b * dot_b + o_i * dot_i) * VEC, (b * c_b + o_i * c_i) * VEC, o_i * S_i * VEC
    o_use = b * use_b + o_i * use_i
    p_phi = phi + b * phi_b + o_i
    b_f = tl.load(f + b * f_b + o_i, mask=m_i, other=0.0).to(T)
    if not FLAT:
        top, scale = normaliser(dot, W_S, B_S, use, o_dot, o_S, o_use, use_j, m_i, n_out, TILES, FIRST, FIXED, MASKED,
                                BLOCK_I, BLOCK_J, T)  # fmt: skip
    for tile in range(TILES):
        o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
        m = m_i & (o_j < n_out)
        if FLAT:
            u = tl.load(c_sum + o_c + o_j, mask=m, other=0.0).to(T)
            if MASKED:
                u = tl.where(tl.load(use + o_use + o_j * use_j, mask=m, other=0) != 0, u, 0.0)
        else:
            S, _, m_used = scores(
                dot, W_S, B_S, use, o_dot, o_S, o_use, use_j, o_j, m, FIRST, FIXED, MASKED, T
            )
            b_sum, b_ign = betas(c_sum, c_ign, o_c, o_j, m, FIXED, T)
            u = tl.where(m_used, b_sum * (tl.exp(S - top) * scale) - b_ign, 0.0)
        tl.store(p_phi + o_j.to(tl.int64) * phi_j, u * b_f, mask=m)


@triton.jit
def add_to(pointer, value, mask, fresh, T: tl.constexpr):
    """Add to what is stored, or store if fresh."""
    stale = tl.full(mask.shape, 0, tl.int32) + fresh == 0
    before = tl.load(pointer, mask=mask & stale, other=0.0).to(T)
    tl.store(pointer, (before + value).to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def coefficients_backward_kernel(
    pairs,  # [b, i, 2 j] grad_phi and dot, turned into phi and the gradient of dot; where FIRST [b, i, j]
    c_sum, c_ign, W_S, B_S, use, f,  # as above
    grad_s,  # [b, j]
    grad_f,  # [b, i], added to
    grad_sum,  # [b, i, j] of c_sum, or where FIXED of beta_use; where FLAT of the flat c
    grad_ign,  # the same of c_ign
    grad_W_S,  # [b, i, j] where FIXED
    grad_B_S,  # [b, i, j] where FIXED
    fresh,  # whether the gradients are stored instead of added to, where FIXED
    n_inp,
    n_out,
    pairs_b, pairs_i, c_b, c_i, S_i, use_b, use_i, use_j, f_b, grad_s_b, grad_f_b, grad_c_b, grad_c_i,
    FIRST: tl.constexpr,
    FIXED: tl.constexpr,
    FLAT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILES: tl.constexpr,  # as above
    VEC: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """The gradient of ``coefficients_kernel``."""
    n_out = n_out * VEC
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    b = tl.program_id(1).to(tl.int64)
    m_i = o_i < n_inp
    o_pairs, o_c, o_S = (b * pairs_b + o_i * pairs_i) * VEC, (b * c_b + o_i * c_i) * VEC, o_i * S_i * VEC
    o_grad_c, o_use = (b * grad_c_b + o_i * grad_c_i) * VEC, b * use_b + o_i * use_i
    o_dot = o_pairs + n_out
    b_f = tl.load(f + b * f_b + o_i, mask=m_i, other=0.0).to(T)
    if not FLAT:
        top, scale = normaliser(pairs, W_S, B_S, use, o_dot, o_S, o_use, use_j, m_i, n_out, TILES, FIRST, FIXED,
                                MASKED, BLOCK_I, BLOCK_J, T)  # fmt: skip
    # Once over j for what needs a sum over j: grad_f, and sum_j R grad_R for the softmax.
    sum_f = tl.zeros([BLOCK_I, 1], T)
    sum_R = tl.zeros([BLOCK_I, 1], T)
    for tile in range(TILES):
        o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
        m = m_i & (o_j < n_out)
        grad_phi = tl.load(pairs + o_pairs + o_j, mask=m, other=0.0).to(T)
        grad_phi += tl.load(grad_s + b * grad_s_b + o_j, mask=o_j < n_out, other=0.0).to(T)
        if FLAT:
            u = tl.load(c_sum + o_c + o_j, mask=m, other=0.0).to(T)
            if MASKED:
                used = tl.load(use + o_use + o_j * use_j, mask=m, other=0) != 0
                u, grad_phi = tl.where(used, u, 0.0), tl.where(used, grad_phi, 0.0)
            tl.store(pairs + o_pairs + o_j, u * b_f, mask=m)
            tl.store(grad_sum + o_grad_c + o_j, grad_phi * b_f, mask=m)
        else:
            S, _, m_used = scores(
                pairs, W_S, B_S, use, o_dot, o_S, o_use, use_j, o_j, m, FIRST, FIXED, MASKED, T
            )
            b_sum, b_ign = betas(c_sum, c_ign, o_c, o_j, m, FIXED, T)
            R = tl.exp(S - top) * scale
            grad_phi = tl.where(m_used, grad_phi, 0.0)
            u = tl.where(m_used, b_sum * R - b_ign, 0.0)
            sum_R += tl.sum(R * b_sum * grad_phi * b_f, 1)[:, None]
        sum_f += tl.sum(tl.where(m, u * grad_phi, 0.0), 1)[:, None]
    if not FLAT:
        for tile in range(TILES):
            o_j = tile * BLOCK_J + tl.arange(0, BLOCK_J)[None, :]
            m = m_i & (o_j < n_out)
            S, b_dot, m_used = scores(pairs, W_S, B_S, use, o_dot, o_S, o_use, use_j, o_j, m, FIRST, FIXED, MASKED,
                                      T)  # fmt: skip
            b_sum, b_ign = betas(c_sum, c_ign, o_c, o_j, m, FIXED, T)
            R = tl.exp(S - top) * scale
            grad_phi = tl.load(pairs + o_pairs + o_j, mask=m, other=0.0).to(T)
            grad_phi += tl.load(grad_s + b * grad_s_b + o_j, mask=o_j < n_out, other=0.0).to(T)
            grad_phi = tl.where(m_used, grad_phi * b_f, 0.0)
            if FIXED:
                add_to(grad_sum + o_grad_c + o_j, R * grad_phi, m, fresh, T)
                add_to(grad_ign + o_grad_c + o_j, (R - 1.0) * grad_phi, m, fresh, T)
            else:
                tl.store(grad_sum + o_grad_c + o_j, R * grad_phi, mask=m)
                tl.store(grad_ign + o_grad_c + o_j, -grad_phi, mask=m)
            if not FIRST:
                grad_z = R * (b_sum * grad_phi - sum_R) * (1.0 - tl.exp(S))
                if FIXED:
                    add_to(grad_W_S + o_grad_c + o_j, grad_z * b_dot, m, fresh, T)
                    add_to(grad_B_S + o_grad_c + o_j, grad_z, m, fresh, T)
                    grad_z *= tl.load(W_S + o_S + o_j, mask=m, other=0.0).to(T)
                tl.store(pairs + o_dot + o_j, grad_z, mask=m)
            tl.store(pairs + o_pairs + o_j, tl.where(m_used, b_sum * R - b_ign, 0.0) * b_f, mask=m)
    # Last, so that with one tile nothing that was loaded need be loaded again.
    add_to(grad_f + b * grad_f_b + o_i, sum_f, m_i, 0, T)


@triton.jit
def activations_kernel(
    x, W_A, B_A, sqrt_n_inp, a_inp,  # [b, i, d], [i, d], [i], [b], [b, i]
    n_inp, d_inp, x_b, x_i, x_d, W_i, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """a_inp_i = sum_d W_A_id x_inp_id / sqrt(n_inp) + B_A_i."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    b = tl.program_id(1).to(tl.int64)
    m_i = o_i < n_inp
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    for start in range(0, d_inp, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)[None, :]
        m = m_i & (o_d < d_inp)
        b_x = tl.load(x + b * x_b + o_i * x_i + o_d * x_d, mask=m, other=0.0).to(T)
        total += b_x * tl.load(W_A + o_i * W_i + o_d, mask=m, other=0.0).to(T)
    a = tl.sum(total, 1)[:, None] / tl.load(sqrt_n_inp + b) + tl.load(B_A + o_i, mask=m_i, other=0.0)
    tl.store(a_inp + b * n_inp + o_i, a, mask=m_i)


@triton.jit
def activations_backward_kernel(
    x, W_A, scaled, grad_x, grad_W_A,  # [b, i, d], [i, d], [b, i], [b, i, d], [i, d]
    n_batch, n_inp, d_inp, x_b, x_i, x_d, W_i, grad_x_b, grad_x_i, grad_x_d, grad_W_i, fresh,
    GRAD_X: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """grad_x_id += scaled_i W_A_id and grad_W_A_id = sum over the batch of scaled_i x_id."""
    o_i = tl.program_id(0).to(tl.int64) * BLOCK_I + tl.arange(0, BLOCK_I)[:, None]
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    m_i = o_i < n_inp
    m = m_i & (o_d < d_inp)
    b_W = tl.load(W_A + o_i * W_i + o_d, mask=m, other=0.0).to(T)
    total = tl.zeros([BLOCK_I, BLOCK_D], T)
    for b in range(tl.full([], 0, tl.int64), n_batch):
        b_a = tl.load(scaled + b * n_inp + o_i, mask=m_i, other=0.0)
        total += b_a * tl.load(x + b * x_b + o_i * x_i + o_d * x_d, mask=m, other=0.0).to(T)
        if GRAD_X:
            add_to(grad_x + b * grad_x_b + o_i * grad_x_i + o_d * grad_x_d, b_a * b_W, m, 0, T)
    add_to(grad_W_A + o_i * grad_W_i + o_d, total, m, fresh, T)


def triton_dtype(p: Problem) -> tl.dtype:
    """What the kernels compute in."""
    return tl.float64 if p.dtype == torch.float64 else tl.float32


def blocks_of_pairs(n_out: int) -> dict[str, int]:
    """Rows and outputs of a block: all outputs at once if they are not very many."""
    block_j = min(triton.next_power_of_2(n_out), 2048)
    tiles = triton.cdiv(n_out, block_j)
    return {"BLOCK_I": max(1, 1024 // block_j), "BLOCK_J": block_j, "TILES": tiles, "num_warps": 4}


def in_units(strides: dict[str, int], n_out: int) -> dict[str, int]:
    """n_out and row strides in units of 4 elements where they allow it: then 16 bytes are loaded at once."""
    sizes = {"n_out": n_out, **strides}
    vec = 1 if any(size % 4 for size in sizes.values()) else 4
    return {"VEC": vec, **{name: size // vec for name, size in sizes.items()}}


def pair_arguments(p: Problem, chunk: Chunk, c, f: Tensor, first: bool, strides: dict[str, int]) -> dict:
    """What both kernels over pairs take alike, and the given strides."""
    b, i = f.shape
    fixed, flat = c is None, c is not None and c.shape[-1] == p.n_out
    if fixed:
        c_sum, c_ign = p.w.beta_use[chunk.rows], p.w.beta_ign[chunk.rows]  # [i, j]
        W_S, B_S = p.w.W_S[chunk.rows], p.w.B_S[chunk.rows]  # [i, j]
        strides |= {"c_b": 0, "c_i": p.n_out, "S_i": p.n_out}
    else:
        c_sum, c_ign = c, c if flat else c[..., p.n_out :]  # [b, i, j]
        W_S, B_S = p.w.W_S, p.w.B_S  # [1, j]
        strides |= {"c_b": c.stride(0), "c_i": c.stride(1), "S_i": 0}
    use, use_strides = f, [0, 0, 0]
    if p.use is not None:
        use = use_of(p, chunk).view(torch.uint8).expand(b, i, p.n_out)  # [b, i, j]
        use_strides = list(use.stride())
    return {
        "c_sum": c_sum, "c_ign": c_ign, "W_S": W_S, "B_S": B_S, "use": use, "f": f, "n_inp": i,
        "f_b": f.stride(0),
        "use_b": use_strides[0], "use_i": use_strides[1], "use_j": use_strides[2],
        "FIRST": first, "FIXED": fixed, "FLAT": flat, "MASKED": p.use is not None, **blocks_of_pairs(p.n_out),
        "T": triton_dtype(p), **in_units(strides, p.n_out),
    }  # fmt: skip


def coefficients(p: Problem, chunk: Chunk, c, dot, f: Tensor) -> Tensor:
    """As ``chunked.coefficients``; neighbours in memory are neighbours in i, as sums over i like it best."""
    phi = f.new_empty(len(f), p.n_out, f.shape[1])  # [b, j, i]
    strides = {} if dot is None else {"dot_b": dot.stride(0), "dot_i": dot.stride(1)}
    arguments = {"dot_b": 0, "dot_i": 0} | pair_arguments(p, chunk, c, f, dot is None, strides)
    coefficients_kernel[triton.cdiv(f.shape[1], arguments["BLOCK_I"]), f.shape[0]](
        dot=f if dot is None else dot, phi=phi, phi_b=phi.stride(0), phi_j=phi.stride(1), **arguments
    )
    return phi.mT  # [b, i, j]


def coefficients_backward(
    p: Problem, chunk: Chunk, c, pairs, grad_c, f, grad_s, grad_f, grads, fresh
) -> None:
    """As ``chunked.coefficients_backward``."""
    n_out, (b, i), first = p.n_out, f.shape, pairs.shape[-1] == p.n_out
    names = ("beta_use", "beta_ign") if first else ("beta_use", "beta_ign", "W_S", "B_S")
    fresh = fresh and chunk.samples.start == 0
    if c is not None:
        of_pairs = [grad_c, grad_c if c.shape[-1] == n_out else grad_c[..., n_out:]]  # [b, i, j] each
    elif b == 1:
        of_pairs = [grads[name][None, chunk.rows] for name in names]  # [1, i, j] each
    else:
        # One part per sample, summed below: no two programs write to one place.
        of_pairs = list(f.new_empty(len(names), b, i, n_out))  # [b, i, j] each
    strides = {"grad_c_b": of_pairs[0].stride(0), "grad_c_i": of_pairs[0].stride(1)}
    strides |= {"pairs_b": pairs.stride(0), "pairs_i": pairs.stride(1)}
    arguments = pair_arguments(p, chunk, c, f, first, strides)
    coefficients_backward_kernel[triton.cdiv(i, arguments["BLOCK_I"]), b](
        pairs=pairs, grad_s=grad_s, grad_f=grad_f, grad_sum=of_pairs[0], grad_ign=of_pairs[1],
        grad_W_S=of_pairs[-2], grad_B_S=of_pairs[-1], fresh=int(fresh or b > 1),
        grad_s_b=grad_s.stride(0), grad_f_b=grad_f.stride(0), **arguments,
    )  # fmt: skip
    if c is None and b > 1:
        for name, part in zip(names, of_pairs, strict=True):
            add(grads[name][chunk.rows], part.sum(0), fresh)  # [i, j]


def activations(p: Problem, x: Tensor, chunk: Chunk) -> Tensor:
    """As ``chunked.activations``."""
    b, i, d = x.shape
    a_inp = x.new_empty(b, i, dtype=p.dtype)  # [b, i]
    W_A, B_A = p.w.W_A[chunk.rows], p.w.B_A[chunk.rows]  # [i, d], [i]
    block = {"BLOCK_I": 4, "BLOCK_D": min(triton.next_power_of_2(d), 1024), "T": triton_dtype(p)}
    activations_kernel[triton.cdiv(i, block["BLOCK_I"]), b](
        x, W_A, B_A, p.sqrt_n_inp[chunk.samples], a_inp, i, d, *x.stride(), W_A.stride(0), **block
    )  # fmt: skip
    return a_inp


def inputs_backward(p: Problem, chunk: Chunk, x, pairs, M, grad_a: Tensor, into, grads) -> None:
    """As ``chunked.inputs_backward``; of one sample all at once."""
    (b, i, d), fresh = x.shape, chunk.samples.start == 0
    scaled = (grad_a / p.sqrt_n_inp[chunk.samples]).contiguous()  # [b, i]
    W_A, grad_W_A = p.w.W_A[chunk.rows], grads["W_A"][chunk.rows]  # [i, d], [i, d]
    add(grads["B_A"][chunk.rows], grad_a.sum(0), fresh)  # [i]
    out = x if into.grad_x is None else into.grad_x[chunk.batch, chunk.rows]  # [b, i, d]
    if into.grad_x is not None:
        if b == 1 and fresh and has_kernel(p, x, W_A, out):
            rows_times(pairs, M.mT.contiguous(), out, into.fresh, (x[0], W_A, grad_W_A, scaled[0]))
            return
        accumulate(p, out, pairs, M, into.fresh)
    block = {"BLOCK_I": 4, "BLOCK_D": min(triton.next_power_of_2(d), 512), "T": triton_dtype(p)}
    activations_backward_kernel[triton.cdiv(i, block["BLOCK_I"]), triton.cdiv(d, block["BLOCK_D"])](
        x, W_A, scaled, out, grad_W_A, b, i, d, *x.stride(), W_A.stride(0), *out.stride(), grad_W_A.stride(0),
        int(fresh), GRAD_X=into.grad_x is not None, **block,
    )  # fmt: skip
