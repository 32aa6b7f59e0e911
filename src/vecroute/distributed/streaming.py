"""Out-of-core routing: every pass reads the inputs from a file, with one chunk in memory at a time.

Each chunk goes through the passes of ``vecroute.ops``. No tensor with a dimension i outlives its chunk: each
pass recomputes the activations from the chunk and adds their gradients to the parameters at once.
"""

import operator
import os
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecroute.compose.modules import PerVector, Sequential, checked_group_of, module_name
from vecroute.distributed.prefetch import prefetched
from vecroute.distributed.vectors import Vectors, open_vectors
from vecroute.layers import Routed, VectorRouting
from vecroute.ops import choose, passes
from vecroute.ops.autograd import plan_of, tf32_under_autocast
from vecroute.ops.checks import check_size
from vecroute.ops.columns import block_of, new_matrix
from vecroute.ops.common import Weights, compute_dtype, normalize, product_dtype, without_autocast
from vecroute.ops.gradient import InputGradient, new_grad_x
from vecroute.ops.group import add_up, all_reduce, announced, sum_gradients, together
from vecroute.ops.matmul import product
from vecroute.ops.plan import Tuning
from vecroute.ops.problem import Grads, Problem
from vecroute.storage import require

CHUNK_MB = {"cpu": 8, "cuda": 128}  # size of a chunk in the layer's dtype; 8 MB fits the caches of a CPU
READ_CHUNKS = {"cpu": 4, "cuda": 1}  # chunks per read, so that threads synchronise less often


def stream(network: nn.Module, x_inp: Any, *, rows: int | None = None) -> Tensor:
    """Route vectors that need not fit in memory.

    The forward pass reads the file once per iteration, and so does the backward pass. The backward pass
    computes the gradient of every parameter of the network, but no gradient of the vectors.

    Args:
        network: a ``VectorRouting`` with n_inp=None, or a ``Sequential``: first any per-vector modules, then
            such a layer, then any other modules. After ``shard_inputs`` each rank streams its own vectors.
        x_inp: anything that ``open_vectors`` accepts.
        rows: rows of a chunk. None means about 8 MB on a CPU and 128 MB on a GPU.

    Returns:
        x_out [n_out, d_out], with a graph.

    Raises:
        ValueError, TypeError: the network or the vectors are unsuitable, or the file is damaged or changes.
    """
    run = Streamed(network, x_inp, rows)
    return run.rest(run.route())


def stream_credit(
    network: nn.Module,
    x_inp: Any,
    path: str | os.PathLike,
    outputs: Sequence[int],
    *,
    rows: int | None = None,
) -> Tensor:
    """Do the same as ``stream``, without a graph, and write the credit [n_inp, len(outputs)] to a file.

    The result is a .npy file of float32. An interrupted call leaves no file. The credit of a network is end
    to end, for the outputs of the whole network, and needs one more pass over the vectors. In a sharded
    network each rank writes the credit of its own vectors, so give each rank a different path.

    Args:
        path: the file to write.
        outputs: the outputs for which credit is written, one column each.

    Returns:
        x_out [n_out, d_out].

    Raises:
        ValueError, TypeError: as in ``stream``, or an output does not exist.
        OSError: the file cannot be written.
    """
    run = Streamed(network, x_inp, rows)
    with torch.no_grad(), ExitStack() as stack:
        with announced(checked_group_of(network)):
            columns = [operator.index(j) for j in outputs]
            after = (part.n_out for part in reversed(run.after) if hasattr(part, "n_out"))
            n_out = next(after, run.layer.n_out)
            if not columns or not all(0 <= j < n_out for j in columns):
                raise ValueError(f"outputs must be ints from 0 to n_out - 1 = {n_out - 1}, got {columns}")
            file = stack.enter_context(CreditFile(path, run.vectors.n_inp, len(columns)))
        if not run.after:
            return run.rest(run.route(lambda phi: file.write(phi[:, columns])))
        x_out, credit = run.credit_of_rest(run.route(), columns)  # [j, h], [j', len(columns)]
        run.last_pass(lambda phi: file.write(phi @ credit.to(phi.dtype)))
        return x_out


class State(NamedTuple):
    """Results of the forward pass that the backward pass needs, for t iterations and one sample."""

    y: Tensor  # [t, 1, j, d]
    s: Tensor  # [t, 1, j]
    before: Tensor  # [t - 1, 1, j, h]
    g: Tensor  # [t - 1, 1, j, d]


class Streamed:
    """A network that streams vectors through its first routing and the per-vector modules before it."""

    def __init__(self, network: nn.Module, x_inp: Any, rows: int | None):
        parts = list(network) if isinstance(network, Sequential) else [network]
        first = next((k for k, part in enumerate(parts) if not isinstance(part, PerVector)), 0)
        layer: Any = parts[first]
        fits = isinstance(layer, VectorRouting) and layer.n_inp is None and isinstance(layer.n_iters, int)
        if not fits or layer.implementation == "reference":
            raise TypeError(
                "network must be a VectorRouting with n_inp=None, an int as n_iters and an implementation "
                "other than 'reference', or a Sequential in which only PerVector comes before such a layer, "
                f"got {module_name(layer)}"
            )
        self.layer: VectorRouting = layer
        self.n_iters: int = layer.n_iters
        self.before: list[Any] = parts[:first]
        self.after: list[Any] = parts[first + 1 :]
        self.trained = [p for part in self.before for p in part.parameters() if p.requires_grad]
        with together(layer.group) as alike:
            self.vectors: Vectors = open_vectors(x_inp)
            check_size("d_inp of x_inp", self.vectors.d_inp)
            d_inp = parts[0].d_inp if isinstance(parts[0], VectorRouting) else None
            if d_inp not in (None, self.vectors.d_inp):
                raise ValueError(f"x_inp must be [n_inp, d_inp={d_inp}], got d_inp={self.vectors.d_inp}")
            check_size("rows", rows, none_means="chosen by size")
            alike |= {"d_inp": self.vectors.d_inp, "dtype of x_inp": self.vectors.dtype}
        self.dtype, self.device, kind = layer.W_F2.dtype, layer.W_F2.device, layer.W_F2.device.type
        # The backward pass must use the present autocast setting, for products and for modules.
        self.rounded = product_dtype(layer.W_F2)
        self.autocast: dict[str, Any] = {
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        row = self.vectors.d_inp * self.dtype.itemsize
        self.rows = rows or max(1, CHUNK_MB.get(self.device.type, 8) * 2**20 // row)
        n_inp = torch.tensor([[self.vectors.n_inp]], device=self.device)  # [1, 1]
        n_inp = all_reduce(layer.group, n_inp) if layer.group else n_inp
        if n_inp == 0:
            raise ValueError("x_inp must have at least one vector, got none")
        self.sqrt_n_inp = n_inp.to(compute_dtype(self.dtype)).sqrt()  # [1, 1]
        self.M: Tensor | None = None  # [1, j, d] the matrix of the scores of the last iteration

    def route(self, see_phi: Callable[[Tensor], None] | None = None) -> Tensor:
        """Return x_out [j, h] of the routing. The last pass gives each chunk's phi [i, j] to see_phi."""
        weights = [w for w in self.layer.weights() if w is not None]
        shared = sum_gradients(self.layer.group, *self.trained)
        x_out = _Route.apply(self, see_phi, len(weights), *weights, *shared)  # [1, j, h]
        x_out = normalize(x_out) if self.layer.normalize else x_out  # [1, j, h]
        return x_out[0].to(self.dtype)  # [j, h]

    def rest(self, x_out: Tensor) -> Tensor:
        """Run the modules that follow the routing."""
        for part in self.after:
            x_out = part(x_out)  # [j, h]
        return x_out

    def credit_of_rest(self, x_out: Tensor, columns: list[int]) -> tuple[Tensor, Tensor]:
        """Return x_out of the network, and the credit [j, k] of the routing's outputs for k columns of it."""
        routed = Routed(*Sequential(*self.after).route(x_out))
        return routed.x_out, torch.stack([routed.phi.column(j) for j in columns], -1)

    # Passes

    def problem(self, x: Tensor, weights: Sequence[Tensor]) -> Problem:
        """Return one chunk [1, i, d] as a routing problem."""
        w = Weights._make((*weights[:10], None, None, *weights[10:]))
        implementation = choose(x, None) if self.layer.implementation == "auto" else self.layer.implementation
        options = self.layer.prior, self.rounded, Tuning(self.layer.tuning.rows, 0), implementation, ""
        plan = plan_of(x, weights, None, None, None, *options, 1, one_by_one=True)
        return Problem(x, w, None, self.sqrt_n_inp, None, plan)

    def chunks(self) -> Generator[Tensor]:
        """Yield the chunks of one pass, [i, d], in the layer's dtype. A chunk is valid until the next one."""
        shape = min(self.rows, self.vectors.n_inp), self.vectors.d_inp
        # One buffer for all chunks: allocating memory for each chunk would take longer than writing to it.
        room = torch.empty(shape, dtype=self.dtype, device=self.device)  # [rows, d]
        rows = self.rows * READ_CHUNKS.get(self.device.type, 1)
        with closing(prefetched(self.vectors, rows, self.device)) as chunks:
            for chunk in (part for read in chunks for part in read.split(self.rows)):
                yield chunk if chunk.dtype == self.dtype else room[: len(chunk)].copy_(chunk)

    def into_routing(self, x: Tensor) -> Tensor:
        """Run the per-vector modules on a chunk [i, d], and return the input [1, i, d] of the routing."""
        with torch.autocast(self.device.type, **self.autocast):
            for part in self.before:
                x = part.module(x)  # [i, d]
        return x.to(self.dtype)[None]

    def forward_pass(self, weights: Sequence[Tensor], M: Tensor | None, see_phi: Any):
        """Return y [1, j, d] and s [1, j] of an iteration, summed over all chunks and ranks."""
        j, d = self.layer.W_F1.shape
        y, s = self.sqrt_n_inp.new_zeros(1, j, d), self.sqrt_n_inp.new_zeros(1, j)  # [1, j, d], [1, j]
        y_chunk, s_chunk = torch.empty_like(y), torch.empty_like(s)  # [1, j, d], [1, j]
        with together(self.layer.group, self.layer.check_ranks), closing(self.chunks()) as chunks:
            for chunk in chunks:
                p = self.problem(self.into_routing(chunk), weights)
                f = y.new_empty(1, len(chunk)) if M is None else activations(p)  # [1, i]
                phi = y.new_empty(1, len(chunk), j) if see_phi else None  # [1, i, j]
                passes.forward_pass(p, M, f, passes.new_kept(p), y_chunk, s_chunk, phi, None)
                y += y_chunk
                s += s_chunk
                if phi is not None:
                    see_phi(phi[0])
        if self.layer.group:
            add_up(self.layer.group, y, s)
        return y, s

    def last_pass(self, see_phi: Callable[[Tensor], None]) -> None:
        """Repeat the pass of the last iteration, and give the phi [i, j] of each chunk to see_phi."""
        weights = [w for w in self.layer.weights() if w is not None]
        with without_autocast(self.layer.W_F2):
            self.forward_pass(weights, self.M, see_phi)

    def backward_pass(self, weights: Sequence[Tensor], g, M, grad_s, grads: Grads, trained) -> Tensor:
        """Return grad_x_hat [1, j, d] of an iteration, and add to ``grads`` and ``trained``."""
        grad_x_hat, needed = grad_s.new_zeros(1, *self.layer.W_F1.shape), bool(trained)  # [1, j, d]
        with together(self.layer.group, self.layer.check_ranks), closing(self.chunks()) as chunks:
            for chunk in chunks:
                with torch.set_grad_enabled(needed):
                    x = self.into_routing(chunk)  # [1, i, d]
                p = self.problem(x.detach(), weights)
                f = activations(p)  # [1, i]
                into = InputGradient(p, new_grad_x(p, needed))
                grad_f = torch.zeros_like(f)  # [1, i]
                kept = passes.new_kept(p)
                found = passes.backward_pass(p, g, f, kept, M, grad_s, into, grad_f, grads, True)
                if g is not None:
                    grad_x_hat += found  # [1, j, d]
                    activations_backward(p, grad_f * f * (1 - f), into.grad_x, grads)
                if needed:
                    of_chunk = torch.autograd.grad(x, self.trained, into.grad_x, materialize_grads=True)
                    torch._foreach_add_(trained, list(of_chunk))
        if self.layer.group and g is not None:
            add_up(self.layer.group, grad_x_hat)
        return grad_x_hat

    # Iterations

    def forward(self, weights: Sequence[Tensor], see_phi: Any) -> tuple[Tensor, State]:
        """Run all iterations. Return x_out [1, j, h], not normalised, and the state for the backward pass."""
        ys, ss, before, gs = [], [], [], []
        p = self.problem(self.sqrt_n_inp.new_empty(1, 0, self.layer.d_inp, dtype=self.dtype), weights)
        self.M = None
        with tf32_under_autocast(p):
            for t in range(self.n_iters):
                last = t == self.n_iters - 1
                y, s = self.forward_pass(weights, self.M, see_phi if last else None)
                x_out = p.steps.outputs(p, y, s)  # [1, j, h]
                ys.append(y)
                ss.append(s)
                if not last:
                    before.append(x_out)
                    gs.append(p.steps.predicted(p, x_out))  # [1, j, d]
                    self.M = new_matrix(p, 1)  # [1, j, d]
                    p.steps.scores_matrix(p, gs[-1], block_of(p, self.M, 0))
        j, d = self.layer.W_F1.shape
        none = x_out.new_empty(0, *x_out.shape), x_out.new_empty(0, 1, j, d)
        stacked = (torch.stack(before), torch.stack(gs)) if before else none
        return x_out, State(torch.stack(ys), torch.stack(ss), *stacked)

    def backward(self, weights: Sequence[Tensor], state: State, grad: Tensor) -> tuple[Grads, list[Tensor]]:
        """Return the gradients of the weights by name, and of the parameters before the routing."""
        p = self.problem(self.sqrt_n_inp.new_empty(1, 0, self.layer.d_inp, dtype=self.dtype), weights)
        grads = Grads()
        trained = [torch.zeros_like(parameter) for parameter in self.trained]
        with tf32_under_autocast(p):
            for t in reversed(range(self.n_iters)):
                g: Any = state.g[t - 1] if t > 0 else None  # [1, j, d]
                M = new_matrix(p, 1 if g is None else 2)  # [1, j or 2 j, d]
                y, s = state.y[t], state.s[t]  # [1, j, d], [1, j]
                grad_s = p.steps.outputs_backward(p, grad, y, s, grads, block_of(p, M, 0))  # [1, j]
                if g is not None:
                    p.steps.scores_matrix(p, g, block_of(p, M, 1))
                grad_x_hat = self.backward_pass(weights, g, M, grad_s, grads, trained)  # [1, j, d]
                if t > 0:
                    before = state.before[t - 1]  # [1, j, h]
                    grad = p.steps.predictions_backward(p, grad_x_hat, before, g, grads)  # [1, j, h]
        return grads, trained


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Streamed, see_phi: Any, n_weights: int, *parameters: Tensor) -> Tensor:
        weights = parameters[:n_weights]
        x_out, state = run.forward(weights, see_phi)
        ctx.run, ctx.n_weights = run, n_weights
        ctx.save_for_backward(*weights, *state)
        return x_out  # [1, j, h]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor):
        weights, state = ctx.saved_tensors[: ctx.n_weights], State(*ctx.saved_tensors[ctx.n_weights :])
        grads, found = ctx.run.backward(weights, state, grad)
        names = [name for name in Weights._fields if name not in ("beta_use", "beta_ign")]
        of_weights = [
            grads[name].to(w.dtype) if name in grads else torch.zeros_like(w)
            for name, w in zip(names, weights, strict=True)
        ]
        return None, None, None, *of_weights, *found


def activations(p: Problem) -> Tensor:
    """Return f(a_inp) of a chunk, [1, i]."""
    a_inp = product(p, p.x_inp, p.w.W_A.mT[None])[..., 0] / p.sqrt_n_inp + p.w.B_A  # [1, i]
    return torch.sigmoid(a_inp)  # [1, i]


def activations_backward(p: Problem, grad_a: Tensor, grad_x: Tensor | None, grads: Grads) -> None:
    """Add the terms that come from grad_a [1, i] to the gradients of W_A, B_A and x_inp [1, i, d]."""
    scaled = grad_a / p.sqrt_n_inp  # [1, i]
    grads.add("W_A", scaled @ p.x_inp[0].to(scaled.dtype))  # [1, d]
    grads.add("B_A", grad_a.sum()[None])  # [1]
    if grad_x is not None:
        grad_x.addcmul_(scaled[..., None].to(grad_x.dtype), p.w.W_A.to(grad_x.dtype))


class CreditFile:
    """A .npy file [n_inp, n] of float32, written in chunks of rows. After an error no file remains."""

    def __init__(self, path: str | os.PathLike, n_inp: int, n: int):
        self.path = Path(path)
        self.temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}")
        self.head = {"descr": "<f4", "fortran_order": False, "shape": (n_inp, n)}

    def __enter__(self) -> "CreditFile":
        self.file = open(self.temporary, "xb")  # closed in __exit__
        require("numpy.lib.format", "data").write_array_header_2_0(self.file, self.head)
        return self

    def write(self, rows: Tensor) -> None:
        """Append rows [i, n]."""
        self.file.write(rows.float().cpu().contiguous().numpy().data)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.file.close()
        if kind is None:
            os.replace(self.temporary, self.path)
        else:
            self.temporary.unlink(missing_ok=True)
