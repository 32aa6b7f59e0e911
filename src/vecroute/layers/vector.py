"""VectorRouting: Algorithm 2 of the paper as a layer."""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vecroute import ops
from vecroute.layers.common import ANY_LENGTH, Routed, reset_betas
from vecroute.layers.converge import Converge, Convergence, check_n_iters, fixed_point, not_compiled
from vecroute.ops.checks import check_bool, check_choice, check_masks, check_size, check_vectors
from vecroute.ops.common import Iteration, Weights, normalize
from vecroute.ops.group import local_rows, local_weights, together
from vecroute.ops.reference import route_reference


class VectorRouting(nn.Module):
    """Route n_inp vectors of size d_inp to n_out vectors of size d_out: Algorithm 2 of the paper.

        phi_ij = beta_use_ij D_use_ij - beta_ign_ij D_ign_ij
        x_out_jh = sum_i phi_ij V_ijh

    Args:
        n_inp: number of input vectors, or None for any number.
        n_out: number of output vectors. With n_out=1 there is no competition: R is 1 and nothing is ignored.
        d_inp, d_out: size of input and output vectors.
        n_iters: number of iterations, or a ``Converge`` to iterate until the outputs stop changing.
        normalize: scale each output vector to mean 0 and variance 1 at the end (not if d_out is 1).
        implementation: "auto", "reference", "chunked" or "fused" (CUDA). Only the reference has second
            derivatives and a gradient of phi.

    Shapes:
        x_inp [..., n_inp, d_inp], input_mask [..., n_inp], pair_mask [..., n_inp, n_out]
        -> x_out [..., n_out, d_out].
        True (or 1) in a mask means *use*. The batch dimensions of masks broadcast. Masked pairs leave the
        competition and have phi = 0. A sample without used inputs has phi = 0 and x_out = 0.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, type, dtype or device.
    """

    def __init__(
        self,
        *,
        n_inp: int | None,
        n_out: int,
        d_inp: int,
        d_out: int,
        n_iters: int | Converge = 2,
        normalize: bool = True,
        implementation: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_size("n_inp", n_inp, none_means=ANY_LENGTH)
        for name, value in (("n_out", n_out), ("d_inp", d_inp), ("d_out", d_out)):
            check_size(name, value)
        check_n_iters(n_iters)
        check_choice("implementation", implementation, ops.IMPLEMENTATIONS)
        check_bool("normalize", normalize)
        self.n_inp, self.n_out, self.d_inp, self.d_out = n_inp, n_out, d_inp, d_out
        self.n_iters, self.normalize, self.implementation = n_iters, normalize, implementation
        self.prior = 1 / n_out
        self.tuning = ops.Tuning()
        # Set by ``distributed.shard_inputs``: the group of ranks among which the inputs are divided, and
        # whether each call checks that the ranks agree.
        self.group, self.check_ranks = "", True
        self.convergence: Convergence | None = None  # set by each call if n_iters is a Converge

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        one_or_n_inp = n_inp or 1
        self.W_A = parameter(one_or_n_inp, d_inp)
        self.B_A = parameter(one_or_n_inp)
        self.W_F1 = parameter(n_out, d_inp)
        self.W_F2 = parameter(d_inp, d_out)
        self.B_F2 = parameter(n_out, d_out)
        self.W_G1 = parameter(d_out, d_inp)
        self.W_G2 = parameter(n_out, d_inp)
        self.B_G2 = parameter(n_out, d_inp)
        self.W_S = parameter(one_or_n_inp, n_out)
        self.B_S = parameter(one_or_n_inp, n_out)
        if n_inp is None:
            self.W_use, self.B_use = parameter(d_inp, n_out), parameter(n_out)
            self.W_ign, self.B_ign = parameter(d_inp, n_out), parameter(n_out)
        else:
            self.beta_use, self.beta_ign = parameter(n_inp, n_out), parameter(n_inp, n_out)
        for name in Weights._fields:
            if name not in self._parameters:
                self.register_parameter(name, None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values that the paper's authors chose."""
        nn.init.normal_(self.W_A, std=2 / math.sqrt(self.d_inp))
        nn.init.normal_(self.W_F1)
        nn.init.normal_(self.W_F2, std=2 / math.sqrt(self.d_inp))
        nn.init.normal_(self.W_G1, std=1 / math.sqrt(self.d_out))
        nn.init.normal_(self.W_G2)
        nn.init.normal_(self.W_S, std=1 / math.sqrt(self.d_inp))
        for bias in (self.B_A, self.B_F2, self.B_G2, self.B_S):
            nn.init.zeros_(bias)
        reset_betas(self, self.d_inp)

    def extra_repr(self) -> str:
        names = "n_inp n_out d_inp d_out n_iters normalize implementation"
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())

    def weights(self) -> Weights:
        """Return the parameters as the ops take them."""
        named = self._parameters  # faster than getattr, but a parametrization removes the parameter
        weights = Weights._make([named[n] if n in named else getattr(self, n, None) for n in Weights._fields])
        return local_weights(self.group, weights) if self.group else weights

    def forward(
        self,
        x_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        x_inp, cu_seqlens, _ = unpack_nested(x_inp, cu_seqlens)
        return self._route(x_inp, input_mask, pair_mask, cu_seqlens=cu_seqlens)[0]

    def route(
        self,
        x_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        outputs: Sequence[int] | None = None,
        phi_out: Tensor | None = None,
    ) -> Routed:
        """Return x_out and the credit phi [..., i, j] of every input for every output.

        Args:
            x_inp: [..., i, d], or a jagged ``torch.nested`` tensor [b, i, d]; then phi is nested too.
            cu_seqlens: [b + 1] int32 offsets of the samples in a packed x_inp [total, d].
            outputs: return only these columns of phi, [..., i, len(outputs)].
            phi_out: a tensor, such as a memory map, that receives phi while it is computed. Then x_out has
                no graph.

        phi has a gradient only with ``implementation="reference"``.
        """
        x_inp, cu_seqlens, nested = unpack_nested(x_inp, cu_seqlens)
        columns = self._check_outputs(outputs)
        x_out, phi = self._route(
            x_inp,
            input_mask,
            pair_mask,
            cu_seqlens=cu_seqlens,
            need_phi=True,
            outputs=columns,
            phi_out=phi_out,
        )
        if phi_out is None:
            phi = phi.to(x_inp.dtype)  # [..., i, j]
        return Routed(x_out, torch.nested.nested_tensor_from_jagged(phi, cu_seqlens) if nested else phi)

    def _route(self, x_inp, input_mask, pair_mask, **options):
        """Return x_out [..., j, h] and phi [..., i, j] (None unless need_phi)."""
        x_out, phi = self._state(x_inp, input_mask, pair_mask, normalized=self.normalize, **options)
        return x_out.to(x_inp.dtype), phi

    def _state(self, x_inp, input_mask, pair_mask, *, cu_seqlens=None, normalized=False, **phi_options):
        """Return x_out [..., j, h], normalised or not, and phi [..., i, j] (None unless need_phi)."""
        cu_seqlens, masks = self._check(x_inp, input_mask, pair_mask, cu_seqlens, **phi_options)
        how: dict[str, Any] = {
            "implementation": self.implementation,
            "tuning": self.tuning,
            "cu_seqlens": cu_seqlens,
            "group": self.group,
        }
        if isinstance(self.n_iters, Converge):
            x_out, phi = not_compiled(self._converge)(self.n_iters, x_inp, masks, how, phi_options)
            return normalize(x_out) if normalized else x_out, phi
        input_mask, pair_mask = masks  # [..., i], [..., i, j]
        return ops.route(
            x_inp, self.weights(), self.n_iters, input_mask, pair_mask, self.prior, **how, **phi_options,
            normalized=normalized,
        )  # fmt: skip

    def _converge(self, n_iters: Converge, x_inp: Tensor, masks, how: dict[str, Any], phi_options):
        """Do the same as ``_state`` at the fixed point: the state that one more iteration does not change."""
        step, pull = ops.steps(x_inp, self.weights(), *masks, self.prior, **how)
        with torch.no_grad():
            x_out, _ = step(None)  # [..., j, h]
        x_out, self.convergence = fixed_point(lambda x: step(x)[0], x_out, n_iters, pull)
        return step(x_out, **phi_options)

    def state(
        self, x_inp: Tensor, input_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> Tensor:
        """Return x_out [..., j, h] before normalisation: another iteration would start from this state."""
        return self._state(x_inp, input_mask, pair_mask)[0]

    def update(
        self,
        x_inp: Tensor,
        x_out: Tensor | None,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> Tensor:
        """Return U(x_out | x_inp) of section 3.3: the state [..., j, h] after one iteration from x_out.

        This method runs the reference implementation.

        Args:
            x_out: [..., j, h] a state, not normalised, or None for the flat prior.
        """
        self._check_not_sharded("update")
        check_vectors("x_inp", x_inp, n=self.n_inp, d=self.d_inp, like=self.W_F2)
        masks = check_masks(x_inp, input_mask, pair_mask, self.n_out)
        if x_out is not None:
            check_vectors("x_out", x_out, n=self.n_out, d=self.d_out, like=None, letters="n_out, d_out")
        return route_reference(x_inp, self.weights(), 1, *masks, self.prior, x_init=x_out).x_out

    def _check(
        self, x_inp, input_mask, pair_mask, cu_seqlens, *, need_phi=False, outputs=None, phi_out=None
    ) -> tuple[Any, tuple[Tensor | None, Tensor | None]]:
        """Check and return cu_seqlens and both masks. If inputs are sharded, all ranks raise or none."""
        given = x_inp, input_mask, pair_mask, cu_seqlens, outputs, phi_out
        if not self.group:
            return self._check_alone(*given)
        with together(self.group, self.check_ranks) as alike:
            cu_seqlens, masks = self._check_alone(*given)
            if self.check_ranks:
                needs_grad = any(t.requires_grad for t in (x_inp, *self.parameters()))
                alike |= {
                    "the batch": list(x_inp.shape[:-2]) if cu_seqlens is None else [len(cu_seqlens) - 1],
                    "d_inp, n_out, d_out": [self.d_inp, self.n_out, self.d_out],
                    "dtype": x_inp.dtype,
                    "n_iters": self.n_iters,
                    "whether there is a gradient": needs_grad and torch.is_grad_enabled(),
                }
        return cu_seqlens, masks

    def _check_alone(
        self, x_inp, input_mask, pair_mask, cu_seqlens, outputs, phi_out
    ) -> tuple[Any, tuple[Tensor | None, Tensor | None]]:
        """Do the same as ``_check`` on this rank alone."""
        n_inp = None if self.n_inp is None else local_rows(self.W_A).shape[0]
        may_be_empty = cu_seqlens is not None or bool(self.group)
        check_vectors("x_inp", x_inp, n=n_inp, d=self.d_inp, like=self.W_F2, may_be_empty=may_be_empty)
        masks = check_masks(x_inp, input_mask, pair_mask, self.n_out)
        if cu_seqlens is not None:
            cu_seqlens = self._check_packed(x_inp, cu_seqlens, *masks)
        if phi_out is not None:
            check_phi_out(phi_out, [*x_inp.shape[:-1], self.n_out if outputs is None else len(outputs)])
        return cu_seqlens, masks

    def _check_not_sharded(self, verb: str) -> None:
        if self.group:
            raise ValueError(f"{verb} needs all inputs, but the inputs of this layer are sharded over ranks")

    def _check_outputs(self, outputs: Sequence[int] | None) -> list[int] | None:
        """Return the requested columns as a list of ints, or None for all columns."""
        if outputs is None:
            return None
        expected = f"outputs must be a sequence of ints from 0 to n_out - 1 = {self.n_out - 1}"
        try:
            columns = [operator.index(j) for j in outputs]
        except TypeError as error:
            raise TypeError(f"{expected}, got {outputs!r}") from error
        if not columns or not all(0 <= j < self.n_out for j in columns):
            raise ValueError(f"{expected}, got {columns}")
        return columns

    def _check_packed(self, x_inp: Tensor, cu_seqlens: object, input_mask, pair_mask) -> Tensor:
        """Return cu_seqlens if it fits x_inp [total, d] and the layer, else raise."""
        expected = f"an int32 or int64 tensor [b + 1] that rises from 0 to total={x_inp.shape[0]}"
        if not isinstance(cu_seqlens, Tensor):
            raise TypeError(f"cu_seqlens must be {expected}, got {type(cu_seqlens).__name__}")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cu_seqlens must be {expected}, got dtype {cu_seqlens.dtype}")
        if cu_seqlens.device != x_inp.device:
            raise ValueError(
                f"cu_seqlens must be on the device of x_inp, {x_inp.device}, got {cu_seqlens.device}"
            )
        masked = input_mask is not None or pair_mask is not None
        if self.n_inp is not None or x_inp.dim() != 2 or masked:
            raise ValueError(
                "cu_seqlens needs a layer with n_inp=None, x_inp [total, d_inp] and no masks, "
                f"got n_inp={self.n_inp}, x_inp {list(x_inp.shape)}, {'masks' if masked else 'no masks'}"
            )
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(f"cu_seqlens must be {expected}, got {list(cu_seqlens.shape)}")
        if cu_seqlens.is_cuda and ops.checks_offsets(self.implementation, x_inp):
            return cu_seqlens  # the kernel checks the offsets, so the CPU need not wait for the GPU
        steps = cu_seqlens.diff()
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != len(x_inp) or (steps < 0).any():
            raise ValueError(f"cu_seqlens must be {expected}, got {cu_seqlens.tolist()}")
        return cu_seqlens

    def plan(
        self,
        x_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> ops.Plan:
        """Return how ``forward`` would route x_inp: which path it takes, and why. Print the plan to read it.

        This method computes nothing, so x_inp may be on the meta device. A layer with a ``Converge`` or with
        ``implementation="reference"`` has no plan.
        """
        x_inp, cu_seqlens, _ = unpack_nested(x_inp, cu_seqlens)
        if isinstance(self.n_iters, Converge):
            raise ValueError("a layer whose n_iters is a Converge has no plan: it runs iterations one by one")
        cu_seqlens, masks = self._check(x_inp, input_mask, pair_mask, cu_seqlens)
        return ops.plan_route(
            x_inp, self.weights(), self.n_iters, *masks, self.prior, implementation=self.implementation,
            tuning=self.tuning, cu_seqlens=cu_seqlens, group=self.group, normalized=self.normalize,
        )  # fmt: skip

    def trace(
        self, x_inp: Tensor, input_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> list[Iteration]:
        """Return every quantity of every iteration, computed by the reference. No x_out is normalised."""
        self._check_not_sharded("trace")
        check_vectors("x_inp", x_inp, n=self.n_inp, d=self.d_inp, like=self.W_F2)
        masks = check_masks(x_inp, input_mask, pair_mask, self.n_out)
        iterations: list[Iteration] = []

        def run(n_iters: int, x_init: Tensor | None = None) -> Tensor:
            return route_reference(
                x_inp, self.weights(), n_iters, *masks, self.prior, iterations, x_init
            ).x_out  # [..., j, h]

        if isinstance(self.n_iters, Converge):
            x_out, self.convergence = fixed_point(lambda x: run(1, x), run(1), self.n_iters)
            run(1, x_out)
        else:
            run(self.n_iters)
        return iterations


def check_phi_out(phi_out: object, shape: list[int]) -> None:
    """Raise unless phi can be written to phi_out."""
    expected = f"a floating-point tensor [..., n_inp, n_out], here {shape}, without graph and not on meta"
    if not isinstance(phi_out, Tensor):
        raise TypeError(f"phi_out must be {expected}, got {type(phi_out).__name__}")
    if list(phi_out.shape) != shape:
        raise ValueError(f"phi_out must be {expected}, got {list(phi_out.shape)}")
    if not phi_out.is_floating_point() or phi_out.requires_grad or phi_out.is_meta:
        came = f"{phi_out.dtype} on {phi_out.device}, requires_grad={phi_out.requires_grad}"
        raise ValueError(f"phi_out must be {expected}, got {came}")


def unpack_nested(x_inp: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None, bool]:
    """Return x_inp, cu_seqlens and whether x_inp is nested. A nested x_inp [b, i, d] is packed."""
    if not isinstance(x_inp, Tensor) or not x_inp.is_nested:
        return x_inp, cu_seqlens, False
    if x_inp.layout != torch.jagged or x_inp.dim() != 3:
        raise ValueError(
            f"a nested x_inp must be jagged, [b, n_inp, d_inp], got {x_inp.layout}, {x_inp.dim()}-d"
        )
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None for a nested x_inp, which has its own offsets")
    nested: Any = x_inp  # Any, because type checkers do not know the methods of jagged tensors
    # A jagged tensor with lengths has unused rows between its samples.
    if nested.lengths() is not None:
        raise ValueError("a nested x_inp must have no holes: call its contiguous() first")
    return nested.values(), nested.offsets(), True
