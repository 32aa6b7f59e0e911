"""Baseline heads: pool the hidden states to one vector, and classify that. They have no credit.

Every pool takes hidden states [..., n_pos, depth, d] and their mask [..., n_pos, depth] to [..., d_pool].
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.compose.masks import used
from vecroute.heads.inputs import GatedMLP, ResidualMLP, check_hidden_states
from vecroute.ops.checks import check_size


class PoolingHead(nn.Module):
    """Normalise each hidden state, maybe change it by an MLP, pool all of them, and classify the result.

    scores = W MLP(pool(MLP(N(hidden states)))) + b

    Args:
        d_emb: size of the hidden states.
        depth: number of hidden states at each position.
        n_cls: number of classes.
        pool: see ``vecroute.heads``; with ``d_pool``, the size of what it gives.
        d_inp_mlp: width of the MLP of each hidden state, as ``RoutingHead`` has one; 0 for none.
        d_mlp: width of the MLP after the pool, 0 for none.
        gated: whether the MLP of each hidden state is a gated one.

    Shapes:
        hidden_states [..., n_pos, depth, d_emb], input_mask [..., n_pos] or [..., n_pos, depth]
        -> scores [..., n_cls]. True (or 1) in the mask means *use*.
    """

    def __init__(
        self,
        *,
        d_emb: int,
        depth: int,
        n_cls: int,
        pool: nn.Module,
        d_inp_mlp: int = 0,
        d_mlp: int = 0,
        gated: bool = False,
    ):
        super().__init__()
        for name, value in (("d_emb", d_emb), ("depth", depth), ("n_cls", n_cls)):
            check_size(name, value)
        for name, value in (("d_inp_mlp", d_inp_mlp), ("d_mlp", d_mlp)):
            if value != 0:  # no MLP
                check_size(name, value)
        self.d_emb, self.depth, self.n_cls = d_emb, depth, n_cls
        d_pool = int(pool.d_pool)  # type: ignore[arg-type]
        self.normalize = nn.LayerNorm(d_emb, elementwise_affine=False)
        mlp = GatedMLP if gated else ResidualMLP
        self.inputs = mlp(d_emb, d_inp_mlp) if d_inp_mlp else nn.Identity()
        self.pool = pool
        self.classify = nn.Sequential(
            *([ResidualMLP(d_pool, d_mlp), nn.LayerNorm(d_pool)] if d_mlp else []), nn.Linear(d_pool, n_cls)
        )

    def forward(self, hidden_states: Tensor, input_mask: Tensor | None = None) -> Tensor:
        sizes: dict[str, Any] = {"depth": self.depth, "d_emb": self.d_emb, "like": self.classify[-1].weight}
        mask = check_hidden_states(hidden_states, input_mask, **sizes)  # [..., n_pos, depth]
        if mask is None:
            mask = torch.ones_like(hidden_states[..., 0], dtype=torch.bool)  # [..., n_pos, depth]
        x = self.inputs(self.normalize(used(hidden_states, mask)))  # [..., n_pos, depth, d]
        return self.classify(self.pool(used(x, mask), mask))  # [..., n_cls]

    @classmethod
    def mean_last(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """The mean over the positions of the last hidden state."""
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=MeanPool(d_emb, 1), **options)

    @classmethod
    def mean_all(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """The means over the positions at every depth, side by side."""
        check_size("depth", depth)
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=MeanPool(d_emb, depth), **options)

    @classmethod
    def scalar_mix(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """The mean over the positions of a learned weighted mean over the depths."""
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=ScalarMix(d_emb, depth), **options)

    @classmethod
    def first_position(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """The last hidden state of the first position."""
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=FirstPosition(d_emb), **options)

    @classmethod
    def probe(
        cls,
        *,
        d_emb: int,
        depth: int,
        n_cls: int,
        n_queries: int = 1,
        n_heads: int | None = None,
        d_mlp: int | None = None,
        **options: Any,
    ) -> "PoolingHead":
        """An attentive probe: learned queries attend to every hidden state, and an MLP follows."""
        pool = AttentivePool(d_emb, n_queries, n_heads)
        d_mlp = pool.d_pool if d_mlp is None else d_mlp
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=pool, d_mlp=d_mlp, **options)

    @classmethod
    def probe_4(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """An attentive probe with four queries."""
        options = {"n_queries": 4, "d_mlp": d_emb} | options
        return cls.probe(d_emb=d_emb, depth=depth, n_cls=n_cls, **options)

    @classmethod
    def pma(
        cls,
        *,
        d_emb: int,
        depth: int,
        n_cls: int,
        n_seeds: int = 1,
        n_heads: int | None = None,
        **options: Any,
    ) -> "PoolingHead":
        """Pooling by multihead attention, as in the Set Transformer."""
        pool = SetPool(d_emb, n_seeds, n_heads)
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=pool, **options)

    @classmethod
    def hopfield(
        cls,
        *,
        d_emb: int,
        depth: int,
        n_cls: int,
        n_states: int = 1,
        n_heads: int | None = None,
        n_updates: int = 3,
        **options: Any,
    ) -> "PoolingHead":
        """Pooling by a modern Hopfield network."""
        pool = HopfieldPool(d_emb, n_states, n_heads, n_updates)
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=pool, **options)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of x [..., n_pos, depth, d] over the used positions at each depth, [..., depth, d]."""
    n = mask.sum(-2).clamp(min=1)[..., None].to(x.dtype)  # [..., depth, 1]
    return used(x, mask).sum(-3) / n  # [..., depth, d]


class MeanPool(nn.Module):
    """The means over the positions at the last ``n_levels`` depths, side by side."""

    def __init__(self, d: int, n_levels: int):
        super().__init__()
        check_size("d_emb", d)
        check_size("n_levels", n_levels)
        self.n_levels, self.d_pool = n_levels, d * n_levels

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        last = slice(-self.n_levels, None)
        return masked_mean(x[..., last, :], mask[..., last]).flatten(-2)  # [..., n_levels d]


class ScalarMix(nn.Module):
    """gamma sum_l softmax(w)_l mean_l, where mean_l is over the positions at depth l."""

    def __init__(self, d: int, depth: int):
        super().__init__()
        check_size("depth", depth)
        self.weights, self.gamma = nn.Parameter(torch.zeros(depth)), nn.Parameter(torch.ones(1))
        self.d_pool = d

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.gamma * (self.weights.softmax(-1) @ masked_mean(x, mask))  # [..., d]


class FirstPosition(nn.Module):
    """The last hidden state of the first position, [CLS] in BERT and its kin."""

    def __init__(self, d: int):
        super().__init__()
        self.d_pool = d

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x[..., 0, -1, :]  # [..., d]


class Attention(nn.Module):
    """Learned queries attend to vectors by several heads: x [..., i, d], mask [..., i] -> [..., q, d].

    out_q = W_O [sum_i softmax_i(beta query_qn . W_K_n x_i) W_V_n x_i]_n + b

    Queries are few, so keys and values of the vectors are never made: queries go through W_K, and the
    weighted means of the vectors through W_V.
    """

    def __init__(self, d: int, n_queries: int, n_heads: int | None):
        super().__init__()
        check_size("d_emb", d)
        n_heads = n_heads or next(n for n in (8, 6, 4, 3, 2, 1) if d % n == 0)
        for name, value in (("n_queries", n_queries), ("n_heads", n_heads)):
            check_size(name, value)
        if d % n_heads:
            raise ValueError(f"n_heads must divide d_emb={d}, got {n_heads}")
        self.n_heads, self.beta = n_heads, 1 / math.sqrt(d // n_heads)
        self.queries = nn.Parameter(torch.randn(n_queries, d))  # [q, d]
        self.W_K, self.W_V = (nn.Parameter(torch.randn(d, d) / math.sqrt(d)) for _ in range(2))
        self.outer = nn.Linear(d, d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        queries = self.queries.unflatten(-1, (self.n_heads, -1))  # [q, n, k]
        return self.values(self.attend(queries, x, mask))  # [..., q, d]

    def attend(self, queries: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        """The weighted means [..., q, n, d] of the vectors, for queries [..., q, n, k] among the keys."""
        W_K = self.W_K.unflatten(0, (self.n_heads, -1))  # [n, k, d]
        through = torch.einsum("...qnk,nkd->...qnd", queries, W_K)  # [..., q, n, d]
        scores = self.beta * (through.flatten(-3, -2) @ x.mT)  # [..., q n, i]
        scores = scores.masked_fill(~mask[..., None, :], torch.finfo(scores.dtype).min)  # [..., q n, i]
        weights = scores.softmax(-1)  # [..., q n, i]
        return (weights.to(x.dtype) @ x).unflatten(-2, queries.shape[-3:-1])  # [..., q, n, d]

    def values(self, means: Tensor) -> Tensor:
        W_V = self.W_V.unflatten(0, (self.n_heads, -1))  # [n, k, d]
        return self.outer(torch.einsum("...qnd,nkd->...qnk", means, W_V).flatten(-2))  # [..., q, d]


class AttentivePool(nn.Module):
    """What learned queries attend to, side by side and normalised, [..., n_queries d]."""

    def __init__(self, d: int, n_queries: int = 1, n_heads: int | None = None):
        super().__init__()
        self.attention, self.d_pool = Attention(d, n_queries, n_heads), n_queries * d
        self.normalize = nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.attention(x.flatten(-3, -2), mask.flatten(-2))  # [..., q, d]
        return self.normalize(found).flatten(-2)  # [..., q d]


class SetPool(nn.Module):
    """PMA of the Set Transformer: H = N(S + attention(S, rFF(x))), then N(H + rFF(H)), [..., n_seeds d]."""

    def __init__(self, d: int, n_seeds: int = 1, n_heads: int | None = None):
        super().__init__()
        self.attention, self.d_pool = Attention(d, n_seeds, n_heads), n_seeds * d
        self.inner = nn.Sequential(nn.Linear(d, d), nn.ReLU())
        self.outer = nn.Sequential(nn.Linear(d, d), nn.ReLU())
        self.normalize_1, self.normalize_2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.attention(self.inner(x.flatten(-3, -2)), mask.flatten(-2))  # [..., q, d]
        hidden = self.normalize_1(self.attention.queries + found)  # [..., q, d]
        return self.normalize_2(hidden + self.outer(hidden)).flatten(-2)  # [..., q d]


class HopfieldPool(nn.Module):
    """Modern Hopfield pooling: n_updates times xi <- sum_i softmax_i(beta xi . k_i) k_i.

    k_i = W_K x_i are the stored patterns, xi the states, learned at first. What is given are the values at
    the last weights, normalised, [..., n_states d].
    """

    def __init__(self, d: int, n_states: int = 1, n_heads: int | None = None, n_updates: int = 3):
        super().__init__()
        check_size("n_updates", n_updates)
        self.attention, self.d_pool = Attention(d, n_states, n_heads), n_states * d
        self.n_updates = n_updates
        self.normalize = nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attention, x, mask = self.attention, x.flatten(-3, -2), mask.flatten(-2)  # [..., i, d], [..., i]
        W_K = attention.W_K.unflatten(0, (attention.n_heads, -1))  # [n, k, d]
        states = attention.queries.unflatten(-1, (attention.n_heads, -1))  # [q, n, k]
        for _ in range(self.n_updates):
            means = attention.attend(states, x, mask)  # [..., q, n, d]
            states = torch.einsum("...qnd,nkd->...qnk", means, W_K)  # [..., q, n, k]
        return self.normalize(attention.values(means)).flatten(-2)  # [..., q d]
