"""Attention, modern Hopfield networks and the competition of slot attention, each as a ``GeneralRouting``.

Section 3.3 of the paper names what has to be given up for that: (a) no net cost to ignore data, beta_ign=0;
(b) unit net benefit to use it, beta_use=1; (c) no gates, A = infinity; (d) one sequence of votes for all
outputs, and attention over that sequence in place of routing; (e) G and S as those models have them.

Run: python examples/special_cases.py
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import vecroute as vr


def one_sequence_of_votes(values: Callable[[Tensor], Tensor], n_out: int) -> Callable[[Tensor], Tensor]:
    """An F that proposes to every output the same: values [..., i, d] -> V [..., i, j, d], the d of (d)."""
    return lambda x_inp: values(x_inp)[..., None, :].expand(*x_inp.shape[:-1], n_out, -1)


def simplified(n_out: int, d_inp: int, **networks) -> vr.GeneralRouting:
    """A routing with the simplifications (a), (b) and (c)."""
    A = vr.networks.ConstantActivation()
    return vr.GeneralRouting(A=A, n_inp=None, n_out=n_out, d_inp=d_inp, beta_use=1, beta_ign=0, **networks)


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention: the queries are x_init, keys and values side by side are x_inp.

    Args:
        query: [..., j, d]; key and value: [..., i, d]. Heads are one of the batch dimensions.
        attn_mask: [..., j, i] True where a query may look.
    """
    n_out, d = query.shape[-2:]
    layer = simplified(
        n_out,
        2 * d,
        F=one_sequence_of_votes(lambda x_inp: x_inp[..., d:], n_out),
        G=lambda x_out: nnf.pad(x_out, (0, d)),  # a query predicts the key; of the value it says nothing
        S=lambda x_inp, x_hat: x_inp @ x_hat.mT / math.sqrt(d),
        compete_over="inputs",
        n_iters=1,
    )
    x_inp = torch.cat((key, value), -1)  # [..., i, 2 d]
    return layer(x_inp, pair_mask=None if attn_mask is None else attn_mask.mT, x_init=query)  # [..., j, d]


def hopfield(patterns: Tensor, query: Tensor, beta: float, n_iters: int | vr.Converge) -> Tensor:
    """A modern Hopfield network: xi <- sum_i softmax_i(beta x_i xi) x_i, so many times or until it settles.

    Args:
        patterns: [..., i, d] what is stored.
        query: [..., j, d] the states to start from.
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
    """The competition of slot attention: R is its softmax over slots, before its weighted mean and its GRU.

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
        # k q = (W x) q = x (W^T q): a slot predicts the input W^T q.
        return self.to_queries(self.norm_slots(slots)) @ self.to_keys.weight  # [..., j, d_inp]

    def _scores(self, x_inp: Tensor, x_hat: Tensor) -> Tensor:
        return (
            self.norm_inputs(x_inp) @ x_hat.mT / math.sqrt(self.norm_slots.normalized_shape[0])
        )  # [..., i, j]

    def forward(self, x_inp: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """R [..., i, j], which sums to 1 over the slots, and the votes so weighted, [..., j, d_slot]."""
        (iteration,) = self.routing.trace(x_inp, x_init=slots)
        return iteration.R, iteration.x_out


def main() -> None:
    torch.manual_seed(0)
    batch, heads, d = 2, 4, 8
    query, key, value = (torch.randn(batch, heads, n, d, dtype=torch.float64) for n in (5, 7, 7))
    error = attention(query, key, value) - nnf.scaled_dot_product_attention(query, key, value)
    print(f"attention of {heads} heads: the same to {error.abs().max():.0e}")

    patterns, beta = torch.randn(20, 16, dtype=torch.float64), 2.0
    state = noisy = patterns[:3] + 0.5 * torch.randn(3, 16, dtype=torch.float64)
    for _ in range(3):
        state = (beta * state @ patterns.mT).softmax(-1) @ patterns
    error = hopfield(patterns, noisy, beta, n_iters=3) - state
    print(f"three Hopfield updates: the same to {error.abs().max():.0e}")

    slots = torch.randn(3, 6)
    R, _ = SlotCompetition(n_slots=3, d_inp=16, d_slot=6)(torch.randn(20, 16), slots)
    print(f"slots: each input goes to {R.shape[-1]} of them, in shares that sum to {R.sum(-1).mean():.3f}")


if __name__ == "__main__":
    main()
