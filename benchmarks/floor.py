"""Lower bounds of a routing: products, bytes and memory of Algorithm 2, streamed over the inputs.

In comments n, m, d, h = n_inp, n_out, d_inp, d_out and T = n_iters; a multiplication and an addition are two
FLOPs. Work that does not grow with n m d, m d h or the size of a tensor read or written is left out.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """The sizes of one routing. batch = 0 means no batch dimension."""

    n_inp: int = 100
    n_out: int = 100
    d_inp: int = 1024
    d_out: int = 1024
    n_iters: int = 2
    variable: bool = False
    batch: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (*([self.batch] if self.batch else []), self.n_inp, self.d_inp)

    @property
    def n_vectors(self) -> int:
        """Number of input vectors of all samples."""
        return max(self.batch, 1) * self.n_inp

    @property
    def columns(self) -> dict[str, object]:
        return {
            "batch": self.batch,
            "n_inp": self.n_inp,
            "n_out": self.n_out,
            "d_inp": self.d_inp,
            "d_out": self.d_out,
            "n_iters": self.n_iters,
            "length": "variable" if self.variable else "fixed",
        }


def parameters_per_pair(case: Case) -> int:
    """Count the elements of beta_use, beta_ign, W_S and B_S. With variable length, none has an index i."""
    return 0 if case.variable else 4 * case.n_inp * case.n_out


def parameters_per_input(case: Case) -> int:
    """Count the elements of W_A and B_A."""
    return (1 if case.variable else case.n_inp) * (case.d_inp + 1)


def parameters_rest(case: Case) -> int:
    """Count all other elements: F, G, and with variable length the linear maps to the betas, W_S and B_S."""
    m, d, h = case.n_out, case.d_inp, case.d_out
    return 3 * m * d + m * h + 2 * d * h + (2 * (d + 1) * m + 2 * m if case.variable else 0)


def parameters(case: Case) -> int:
    return parameters_per_pair(case) + parameters_per_input(case) + parameters_rest(case)


def flops(case: Case, *, kept: bool = False) -> tuple[int, int]:
    """Return the FLOPs of forward and of backward.

    Args:
        kept: True if the forward pass stores z and the betas, n m each, for the backward pass and later
            iterations. Otherwise each pass computes them again, and the first iteration needs only one
            combination of the two betas.
    """
    later = case.n_iters - 1
    # y = phi x in each iteration; z = x x_hat in all but the first.
    forward = 2 * case.n_iters + 2 * later
    # Each iteration: grad_phi and a term of grad_x. All but the first: also z, grad_x_hat, a term of grad_x.
    backward = 4 * case.n_iters + (4 if kept else 6) * later
    if case.variable and kept and later:
        forward += 4  # two betas, once
        backward += 8  # gradients of their weights, and their terms of grad_x
    elif case.variable:
        forward += 2 + 4 * later
        backward += 6 + 12 * later
    n_m_d = case.n_vectors * case.n_out * case.d_inp
    # F in each iteration, G in all but the first. Backward: gradients of the input and the weight of each.
    m_d_h = max(case.batch, 1) * case.n_out * case.d_inp * case.d_out
    small = 2 * case.n_iters + 2 * later
    return forward * n_m_d + small * m_d_h, backward * n_m_d + 2 * small * m_d_h


def elements(case: Case) -> tuple[int, int]:
    """Return the elements that forward and backward move to and from memory."""
    x = case.n_vectors * case.d_inp
    x_out = max(case.batch, 1) * case.n_out * case.d_out
    per_pair, once = parameters_per_pair(case), parameters_per_input(case) + parameters_rest(case)
    # Half of the parameters of pairs are betas, read in each iteration; W_S and B_S in all but the first.
    read = case.n_iters * x + once + (2 * case.n_iters - 1) * per_pair // 2
    return read + x_out, read + x_out + x + parameters(case)


def memory(case: Case) -> tuple[int, int]:
    """Return the elements that must be in memory: inputs and parameters; with backward also gradients."""
    forward = case.n_vectors * case.d_inp + parameters(case)
    return forward, 2 * forward


def floor_ms(
    case: Case, *, flops_per_s: float, bytes_per_s: float, element_size: int = 4
) -> tuple[float, float]:
    """Return the ms of forward and of forward + backward on a device that only multiplies or only copies."""
    forward, backward = (
        1000 * max(work / flops_per_s, moved * element_size / bytes_per_s)
        for work, moved in zip(flops(case), elements(case), strict=True)
    )
    return forward, forward + backward
