"""GeneralRouting: Algorithm 1 of the paper, with any networks A, F, G and S."""

import inspect
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor, nn

from vecroute.layers.common import ANY_LENGTH, Routed, reset_betas
from vecroute.layers.converge import Converge, Convergence, check_n_iters, fixed_point, not_compiled
from vecroute.ops.checks import check_batch, check_choice, check_masks, check_size, check_vectors
from vecroute.ops.common import Iteration, compute_dtype, masked_softmax, used_pairs


class GeneralRouting(nn.Module):
    """Route with any networks A, F, G and S: Algorithm 1 of the paper.

        R_ij = softmax_j S(x_inp, G(x_out)),  D_use_ij = f(a_inp_i) R_ij,  D_ign_ij = f(a_inp_i) - D_use_ij
        x_out_jh = sum_i (beta_use_ij D_use_ij - beta_ign_ij D_ign_ij) V_ijh

    Args:
        A: x_inp [..., i, d] -> activation scores [..., i] or [..., i, 1].
        F: x_inp [..., i, d] -> votes V [..., i, j, h].
        G: x_out [..., j, h] -> predicted inputs x_hat [..., j, d].
        S: (x_inp, x_hat) -> scores [..., i, j].
        n_inp: number of input vectors, or None for any number.
        n_out: number of output vectors.
        d_inp: size of input vectors.
        n_iters: number of iterations, or a ``Converge`` to iterate until the outputs stop changing.
        compete_over: "outputs" (the paper's softmax over j) or "inputs" (over i, as in attention).
        beta_use, beta_ign: None for learned betas, a number for a constant, or a function of x_inp that
            returns [..., i, j].
        independent_votes: True if F computes the votes of each input from that input alone. Only then can
            credit pass through this layer in a network. None: the network tests F.

    The layer passes ``input_mask`` to A and F if their signature has that argument. The ready-made networks
    that scale by sqrt(n_inp) have it. Unused inputs reach the networks as zeros.

    Raises:
        ValueError, TypeError: an argument, or the result of a network, has the wrong shape or type.
    """

    def __init__(
        self,
        *,
        A: Callable[..., Tensor],
        F: Callable[..., Tensor],
        G: Callable[[Tensor], Tensor],
        S: Callable[[Tensor, Tensor], Tensor],
        n_inp: int | None,
        n_out: int,
        d_inp: int,
        n_iters: int | Converge = 2,
        compete_over: str = "outputs",
        beta_use: float | Callable[[Tensor], Tensor] | None = None,
        beta_ign: float | Callable[[Tensor], Tensor] | None = None,
        independent_votes: bool | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        check_size("n_inp", n_inp, none_means=ANY_LENGTH)
        for name, value in (("n_out", n_out), ("d_inp", d_inp)):
            check_size(name, value)
        check_n_iters(n_iters)
        check_choice("compete_over", compete_over, ("outputs", "inputs"))
        for name, network in (("A", A), ("F", F), ("G", G), ("S", S)):
            if not callable(network):
                raise TypeError(f"{name} must be a module or function, got {type(network).__name__}")
        if independent_votes is not None and not isinstance(independent_votes, bool):
            raise TypeError(
                f"independent_votes must be True, False or None (probed), got {independent_votes!r}"
            )
        self.A, self.F, self.G, self.S = A, F, G, S
        self.n_inp, self.n_out, self.d_inp = n_inp, n_out, d_inp
        self.n_iters, self.compete_over = n_iters, compete_over
        self.convergence: Convergence | None = None  # set by each call if n_iters is a Converge
        self.independent_votes, self.probed = independent_votes, set[tuple]()
        for name, beta in (("use", beta_use), ("ign", beta_ign)):
            self._set_beta(name, beta, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _set_beta(self, name: str, beta: object, like: dict) -> None:
        if beta is not None:
            if not callable(beta) and (isinstance(beta, bool) or not isinstance(beta, Real)):
                raise TypeError(
                    f"beta_{name} must be None (learned), a number or a function, got {type(beta).__name__}"
                )
            setattr(self, f"beta_{name}", beta)
        elif self.n_inp is None:
            setattr(self, f"W_{name}", nn.Parameter(torch.empty(self.d_inp, self.n_out, **like)))
            setattr(self, f"B_{name}", nn.Parameter(torch.empty(self.n_out, **like)))
        else:
            setattr(self, f"beta_{name}", nn.Parameter(torch.empty(self.n_inp, self.n_out, **like)))

    def reset_parameters(self) -> None:
        """Draw new initial values for the learned betas. The networks keep their parameters."""
        reset_betas(self, self.d_inp)

    def extra_repr(self) -> str:
        names = "n_inp n_out d_inp n_iters compete_over"
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())

    def forward(
        self,
        x_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        x_init: Tensor | None = None,
    ) -> Tensor:
        return self.route(x_inp, input_mask, pair_mask, x_init).x_out

    def route(
        self,
        x_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        x_init: Tensor | None = None,
    ) -> Routed:
        """Return x_out and the credit phi [..., i, j] of every input for every output."""
        last = self._iterate(x_inp, input_mask, pair_mask, x_init)
        return Routed(last.x_out, last.phi)

    def trace(
        self,
        x_inp: Tensor,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        x_init: Tensor | None = None,
    ) -> list[Iteration]:
        """Return every quantity of every iteration.

        Args:
            x_init: [..., j, h] outputs that the first E-step scores instead of using the flat prior.
        """
        iterations: list[Iteration] = []
        self._iterate(x_inp, input_mask, pair_mask, x_init, iterations)
        return iterations

    def state(
        self, x_inp: Tensor, input_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> Tensor:
        """Return x_out [..., j, h]: another iteration would start from this state."""
        return self(x_inp, input_mask, pair_mask)

    def update(
        self,
        x_inp: Tensor,
        x_out: Tensor | None,
        input_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
    ) -> Tensor:
        """Return U(x_out | x_inp) of section 3.3: the state [..., j, h] after one iteration from x_out.

        Args:
            x_out: [..., j, h], or None for the flat prior.
        """
        return self._step(x_inp, input_mask, pair_mask, x_out)(x_out).x_out

    def _iterate(
        self, x_inp, input_mask, pair_mask, x_init, trace: list[Iteration] | None = None
    ) -> Iteration:
        """Run all iterations, append each to the trace and return the last."""
        step = self._step(x_inp, input_mask, pair_mask, x_init, trace)
        n_iters, x_out = self.n_iters, x_init  # [..., j, h]
        if isinstance(n_iters, Converge):
            if x_init is not None:
                # Samples may share x_init, but each needs its own state.
                x_out = x_init.expand(*x_inp.shape[:-2], *x_init.shape[-2:])  # [..., j, h]
            return not_compiled(self._converge)(n_iters, step, x_out)
        for _ in range(n_iters):
            last = step(x_out)
            x_out = last.x_out  # [..., j, h]
        return last

    def _converge(self, n_iters: Converge, step: Callable[[Tensor | None], Iteration], x_out: Tensor | None):
        """Return the iteration that starts from the fixed point."""
        if x_out is None:
            with torch.no_grad():
                x_out = step(None).x_out  # [..., j, h]
        x_out, self.convergence = fixed_point(lambda x: step(x).x_out, x_out, n_iters)
        return step(x_out)

    def _step(
        self, x_inp, input_mask, pair_mask, x_init, trace: list[Iteration] | None = None
    ) -> Callable[[Tensor | None], Iteration]:
        """Return one iteration as a function of the outputs it starts from (None: the flat prior)."""
        # The inputs must have the dtype and device of the first parameter, if the layer has parameters.
        parameter = next((p for p in self.parameters() if p.is_floating_point()), None)
        check_vectors("x_inp", x_inp, n=self.n_inp, d=self.d_inp, like=parameter)
        input_mask, pair_mask = check_masks(x_inp, input_mask, pair_mask, self.n_out)
        ij = (*x_inp.shape[:-1], self.n_out)
        use = used_pairs(input_mask, pair_mask)  # [..., i, j]
        if use is not None:
            x_inp = x_inp.where(use.any(-1, keepdim=True), 0.0)  # [..., i, d]
            use = use.expand(ij)  # [..., i, j]

        a_inp = self._activations(x_inp, input_mask)  # [..., i]
        V = self._call("F", (x_inp,), (*ij, None), "[..., n_inp, n_out, d_out]", input_mask)  # [..., i, j, h]
        if use is not None:
            V = V.where(use[..., None], 0.0)  # [..., i, j, h]
        beta_use, beta_ign = self._beta("use", x_inp, ij), self._beta("ign", x_inp, ij)  # [..., i, j] each
        if x_init is not None:
            check_vectors("x_init", x_init, n=self.n_out, d=V.shape[-1], like=x_inp, letters="n_out, d_out")
            check_batch("x_init", x_init, x_inp)
        f_a_inp = torch.sigmoid(a_inp.to(compute_dtype(a_inp.dtype)))[..., None]  # [..., i, 1]
        if use is not None:
            f_a_inp = f_a_inp.where(use, 0.0)  # [..., i, j]

        def step(x_out: Tensor | None) -> Iteration:
            x_hat, S, R = self._e_step(x_inp, x_out, use, ij)
            D_use = f_a_inp * R  # [..., i, j]
            D_ign = f_a_inp - D_use  # [..., i, j]
            phi = (beta_use * D_use - beta_ign * D_ign).to(V.dtype)  # [..., i, j]
            if use is not None:
                # A function may return infinite betas for inputs that were set to zero, and 0 * inf is NaN.
                phi = phi.where(use, 0.0)  # [..., i, j]
            x_out = torch.einsum("...ij,...ijh->...jh", phi, V)  # [..., j, h]
            iteration = Iteration(a_inp, x_hat, S, R, D_use, D_ign, phi, x_out)
            if trace is not None:
                trace.append(iteration)
            return iteration

        return step

    def _e_step(self, x_inp: Tensor, x_out: Tensor | None, use: Tensor | None, ij: tuple[int, ...]):
        """Return x_hat [..., j, d], S and R [..., i, j]. Without an x_out: None, None and a flat R."""
        dim = -1 if self.compete_over == "outputs" else -2
        if x_out is None:
            S_flat = x_inp.new_zeros(ij, dtype=compute_dtype(x_inp.dtype))  # [..., i, j]
            return None, None, masked_softmax(S_flat, use, dim)
        jd = (*x_out.shape[:-2], self.n_out, self.d_inp)
        x_hat = self._call("G", (x_out,), jd, f"[..., n_out={self.n_out}, d_inp={self.d_inp}]")
        S = self._call("S", (x_inp, x_hat), ij, f"[..., n_inp, n_out={self.n_out}]")
        return x_hat, S, masked_softmax(S.to(compute_dtype(S.dtype)), use, dim)

    def _activations(self, x_inp: Tensor, input_mask: Tensor | None) -> Tensor:
        """Return the scores of A as [..., i]."""
        a_inp = call_network(self.A, (x_inp,), input_mask)
        shape = tuple(x_inp.shape[:-1])
        if not isinstance(a_inp, Tensor) or tuple(a_inp.shape) not in (shape, (*shape, 1)):
            expected = f"[..., n_inp] or [..., n_inp, 1], here {list(shape)} or {[*shape, 1]}"
            raise ValueError(f"A must return {expected}, got {_what(a_inp)}")
        return a_inp.reshape(shape)

    def _call(self, name: str, args: tuple, shape: tuple, letters: str, input_mask=None) -> Tensor:
        """Call the named network and check the shape of its result. None in shape allows any size."""
        value = call_network(getattr(self, name), args, input_mask)
        fits = isinstance(value, Tensor) and value.dim() == len(shape)
        if not fits or any(e not in (None, v) for e, v in zip(shape, value.shape, strict=True)):
            raise ValueError(f"{name} must return {letters}, here {_letters(shape)}, got {_what(value)}")
        return value

    def _beta(self, name: str, x_inp: Tensor, ij: tuple[int, ...]) -> Tensor | float:
        """Return beta_use or beta_ign: a number, or [..., i, j]."""
        if hasattr(self, f"W_{name}"):
            return x_inp @ getattr(self, f"W_{name}") + getattr(self, f"B_{name}")  # [..., i, j]
        beta = getattr(self, f"beta_{name}")
        if not callable(beta):
            return beta
        return self._call(f"beta_{name}", (x_inp,), ij, f"[..., n_inp, n_out={self.n_out}]")


def call_network(network: Callable[..., Tensor], args: tuple, input_mask: Tensor | None) -> Tensor:
    """Call a network. Pass input_mask if it is given and the network's signature has it."""
    function = network.forward if isinstance(network, nn.Module) else network
    if input_mask is not None and "input_mask" in inspect.signature(function).parameters:
        return network(*args, input_mask=input_mask)
    return network(*args)


def _what(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _letters(shape: tuple) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
