"""Attention, modern Hopfield networks and the competition of slot attention, each as a ``GeneralRouting``.

Section 3.3 of the paper lists the simplifications: (a) no net cost to ignore data, beta_ign=0; (b) unit net
benefit to use data, beta_use=1; (c) no gates, A = infinity; (d) the same votes for all outputs, with
attention over the inputs instead of routing; (e) G and S as in these models.

Run: python examples/special_cases.py
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import vecroute as vr


def one_sequence_of_votes(values: Callable[[Tensor], Tensor], n_out: int) -> Callable[[Tensor], Tensor]:
    """Return an F that gives every output the same votes: values [..., i, d] -> V [..., i, j, d]."""
    return lambda x_inp: values(x_inp)[..., None, :].expand(*x_inp.shape[:-1], n_out, -1)


def simplified(n_out: int, d_inp: int, **networks) -> vr.GeneralRouting:
    """Build a routing with the simplifications (a), (b) and (c)."""
    A = vr.networks.ConstantActivation()
    return vr.GeneralRouting(A=A, n_inp=None, n_out=n_out, d_inp=d_inp, beta_use=1, beta_ign=0, **networks)


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Compute scaled dot-product attention. The queries are x_init, and each x_inp is a key and a value.

    Args:
        query: [..., j, d]. Heads are one of the batch dimensions.
        key, value: [..., i, d].
        attn_mask: [..., j, i] True where a query may attend.
    """
    n_out, d = query.shape[-2:]
    layer = simplified(
        n_out,
        2 * d,
        F=one_sequence_of_votes(lambda x_inp: x_inp[..., d:], n_out),
        G=lambda x_out: nnf.pad(x_out, (0, d)),  # a query predicts the key and ignores the value
        S=lambda x_inp, x_hat: x_inp @ x_hat.mT / math.sqrt(d),
        compete_over="inputs",
        n_iters=1,
    )
    x_inp = torch.cat((key, value), -1)  # [..., i, 2 d]
    return layer(x_inp, pair_mask=None if attn_mask is None else attn_mask.mT, x_init=query)  # [..., j, d]


def hopfield(patterns: Tensor, query: Tensor, beta: float, n_iters: int | vr.Converge) -> Tensor:
    """Run a modern Hopfield network: xi <- sum_i softmax_i(beta x_i xi) x_i.

    Args:
        patterns: [..., i, d] the stored patterns.
        query: [..., j, d] the initial states.
        n_iters: number of updates, or a ``Converge`` to update until the states stop changing.
    """
    n_out, d = query.shape[-2:]
    layer = simplified(
        n_out,
        d,
        F=one_sequence_of_votes(lambda x_inp: x_inp, n_out),
        G=nn.Identity(),
        S=lambda x_inp, x_hat: beta * x_inp @ x_hat.mT,
        compete_over="inputs",
        n_iters=n_iters,
    )
    return layer(patterns, x_init=query)  # [..., j, d]


class SlotCompetition(nn.Module):
    """The competition of slot attention: R is its softmax over slots. The mean and the GRU are left out.

    Args:
        n_slots: number of slots.
        d_inp, d_slot: size of inputs and of slots.
    """

    def __init__(self, *, n_slots: int, d_inp: int, d_slot: int, dtype=None):
        super().__init__()
        self.norm_inputs = nn.LayerNorm(d_inp, dtype=dtype)
        self.norm_slots = nn.LayerNorm(d_slot, dtype=dtype)
        self.to_keys = nn.Linear(d_inp, d_slot, bias=False, dtype=dtype)
        self.to_values = nn.Linear(d_inp, d_slot, bias=False, dtype=dtype)
        self.to_queries = nn.Linear(d_slot, d_slot, bias=False, dtype=dtype)
        networks = {"F": self._votes, "G": self._predictions, "S": self._scores}
        self.routing = simplified(n_slots, d_inp, **networks, n_iters=1)

    def _votes(self, x_inp: Tensor) -> Tensor:
        values = self.to_values(self.norm_inputs(x_inp))  # [..., i, d_slot]
        return values[..., None, :].expand(*x_inp.shape[:-1], self.routing.n_out, -1)  # [..., i, j, d_slot]

    def _predictions(self, slots: Tensor) -> Tensor:
        # The score of key and query is k . q = (W x) . q = x . (W^T q), so a slot predicts the input W^T q.
        return self.to_queries(self.norm_slots(slots)) @ self.to_keys.weight  # [..., j, d_inp]

    def _scores(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        return (
            self.norm_inputs(x_inp) @ x_hat.mT / math.sqrt(self.norm_slots.normalized_shape[0])
        )  # [..., i, j]

    def forward(self, x_inp: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return R [..., i, j], which sums to 1 over slots, and the weighted votes [..., j, d_slot]."""
        (iteration,) = self.routing.trace(x_inp, x_init=slots)
        return iteration.R, iteration.x_out


def main() -> None:
    torch.manual_seed(0)
    batch, heads, d = 2, 4, 8
    query, key, value = (torch.randn(batch, heads, n, d, dtype=torch.float64) for n in (5, 7, 7))
    error = attention(query, key, value) - nnf.scaled_dot_product_attention(query, key, value)
    print(f"attention with {heads} heads: greatest difference {error.abs().max():.0e}")

    patterns, beta = torch.randn(20, 16, dtype=torch.float64), 2.0
    state = noisy = patterns[:3] + 0.5 * torch.randn(3, 16, dtype=torch.float64)
    for _ in range(3):
        state = (beta * state @ patterns.mT).softmax(-1) @ patterns
    error = hopfield(patterns, noisy, beta, n_iters=3) - state
    print(f"three Hopfield updates: greatest difference {error.abs().max():.0e}")

    slots = torch.randn(3, 6)
    R, _ = SlotCompetition(n_slots=3, d_inp=16, d_slot=6)(torch.randn(20, 16), slots)
    print(f"slot competition: the shares of an input over {R.shape[-1]} slots sum to {R.sum(-1).mean():.3f}")


if __name__ == "__main__":
    main()
