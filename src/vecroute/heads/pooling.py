"""Baseline heads, which pool the hidden states to one vector and classify it. They have no credit.

A pool maps hidden states [..., n_pos, depth, d] and their mask [..., n_pos, depth] to [..., d_pool].
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.compose.masks import used
from vecroute.compose.modules import Head
from vecroute.heads.inputs import GatedMLP, ResidualMLP, check_hidden_states
from vecroute.ops.checks import check_size


class PoolingHead(Head):
    """Normalise each hidden state, apply an optional MLP to it, pool all of them, and classify the result.

        scores = W MLP(pool(MLP(N(hidden states)))) + b

    Args:
        d_emb: size of the hidden states.
        depth: number of hidden states at each position.
        n_cls: number of classes.
        pool: one of the pools in ``vecroute.heads``, or a module with an attribute ``d_pool``, its output
            size.
        d_inp_mlp: width of the MLP for each hidden state, 0 for no MLP.
        d_mlp: width of the MLP after the pool, 0 for no MLP.
        gated: True to use ``GatedMLP``, False to use ``ResidualMLP``, as in ``RoutingHead``.

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
            if value != 0:  # 0 means no MLP
                check_size(name, value)
        self.d_emb, self.depth, self.n_cls = d_emb, depth, n_cls
        d_pool = int(pool.d_pool)  # type: ignore[arg-type]
        self.normalize = nn.LayerNorm(d_emb, elementwise_affine=False)
        mlp = GatedMLP if gated else ResidualMLP
        self.inputs = mlp(d_emb, d_inp_mlp) if d_inp_mlp else nn.Identity()
        self.pool = pool
        self.classify = nn.Sequential(
            *([mlp(d_pool, d_mlp), nn.LayerNorm(d_pool)] if d_mlp else []), nn.Linear(d_pool, n_cls)
        )

    def flatten(
        self, hidden_states: Tensor, input_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of ``network``: x_inp [..., i, d], i = position * depth + level, and a mask."""
        sizes: dict[str, Any] = {"depth": self.depth, "d_emb": self.d_emb, "like": self.classify[-1].weight}
        mask = check_hidden_states(hidden_states, input_mask, **sizes)  # [..., n_pos, depth]
        x_inp = hidden_states.flatten(-3, -2)  # [..., i, d]
        return x_inp, None if mask is None else mask.flatten(-2)  # [..., i]

    def network(self, x_inp: Tensor, input_mask: Tensor | None = None) -> Tensor:
        """Return the scores [..., n_cls] for the vectors [..., i, d] that ``flatten`` returned."""
        x = x_inp.unflatten(-2, (-1, self.depth))  # [..., n_pos, depth, d]
        if input_mask is None:
            mask = torch.ones_like(x[..., 0], dtype=torch.bool)  # [..., n_pos, depth]
        else:
            mask = input_mask.unflatten(-1, (-1, self.depth))  # [..., n_pos, depth]
        x = self.inputs(self.normalize(used(x, mask)))  # [..., n_pos, depth, d]
        return self.classify(self.pool(used(x, mask), mask))  # [..., n_cls]

    def forward(self, hidden_states: Tensor, input_mask: Tensor | None = None) -> Tensor:
        return self.network(*self.flatten(hidden_states, input_mask))  # [..., n_cls]

    @classmethod
    def mean_last(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """Use the mean over positions of the last hidden state."""
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=MeanPool(d_emb, 1), **options)

    @classmethod
    def mean_all(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """Use the mean over positions at every depth, concatenated."""
        check_size("depth", depth)
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=MeanPool(d_emb, depth), **options)

    @classmethod
    def scalar_mix(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """Use the mean over positions of a learned weighted mean over depths."""
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=ScalarMix(d_emb, depth), **options)

    @classmethod
    def first_position(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """Use the last hidden state of the first position."""
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
        """Use an attentive probe: learned queries attend to every hidden state, and an MLP follows."""
        pool = AttentivePool(d_emb, n_queries, n_heads)
        d_mlp = pool.d_pool if d_mlp is None else d_mlp
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=pool, d_mlp=d_mlp, **options)

    @classmethod
    def probe_4(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "PoolingHead":
        """Use an attentive probe with four queries."""
        options = {"n_queries": 4, "d_mlp": d_emb} | options
        return cls.probe(d_emb=d_emb, depth=depth, n_cls=n_cls, **options)

    @classmethod
    def efficient(
        cls, *, d_emb: int, depth: int, n_cls: int, n_queries: int | None = None, **options: Any
    ) -> "PoolingHead":
        """Use Efficient Probing: many queries without keys, each with its own part of the values."""
        pool = EfficientPool(d_emb, n_queries)
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=pool, **options)

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
        """Use pooling by multihead attention, as in the Set Transformer."""
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
        """Use pooling by a modern Hopfield network."""
        pool = HopfieldPool(d_emb, n_states, n_heads, n_updates)
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, pool=pool, **options)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x [..., n_pos, depth, d] over the used positions at each depth, [..., depth, d]."""
    n = mask.sum(-2).clamp(min=1)[..., None].to(x.dtype)  # [..., depth, 1]
    return used(x, mask).sum(-3) / n  # [..., depth, d]


class MeanPool(nn.Module):
    """The means over positions at the last ``n_levels`` depths, concatenated: [..., n_levels d]."""

    def __init__(self, d: int, n_levels: int):
        super().__init__()
        check_size("d_emb", d)
        check_size("n_levels", n_levels)
        self.n_levels, self.d_pool = n_levels, d * n_levels

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        last = slice(-self.n_levels, None)
        return masked_mean(x[..., last, :], mask[..., last]).flatten(-2)  # [..., n_levels d]


class ScalarMix(nn.Module):
    """Compute gamma sum_l softmax(w)_l mean_l, where mean_l is the mean over positions at depth l."""

    def __init__(self, d: int, depth: int):
        super().__init__()
        check_size("depth", depth)
        self.weights, self.gamma = nn.Parameter(torch.zeros(depth)), nn.Parameter(torch.ones(1))
        self.d_pool = d

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.gamma * (self.weights.softmax(-1) @ masked_mean(x, mask))  # [..., d]


class FirstPosition(nn.Module):
    """The last hidden state of the first position, which is [CLS] in BERT and similar models."""

    def __init__(self, d: int):
        super().__init__()
        self.d_pool = d

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x[..., 0, -1, :]  # [..., d]


class Attention(nn.Module):
    """Multihead attention of learned queries to vectors: x [..., i, d], mask [..., i] -> [..., q, d].

        out_q = W_O [sum_i softmax_i(beta query_qn . W_K_n x_i) W_V_n x_i]_n + b

    There are few queries, so it is cheaper not to compute keys and values for every vector. Instead W_K
    multiplies the queries, and W_V multiplies the weighted means of the vectors.
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
        """Return the weighted means [..., q, n, d] of x for queries [..., q, n, k] in the key space."""
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
    """The normalised results of attention for each learned query, concatenated: [..., n_queries d]."""

    def __init__(self, d: int, n_queries: int = 1, n_heads: int | None = None):
        super().__init__()
        self.attention, self.d_pool = Attention(d, n_queries, n_heads), n_queries * d
        self.normalize = nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = self.attention(x.flatten(-3, -2), mask.flatten(-2))  # [..., q, d]
        return self.normalize(found).flatten(-2)  # [..., q d]


class EfficientPool(nn.Module):
    """Efficient Probing: concatenate out_q = W_V_q sum_i softmax_i(beta query_q . x_i) x_i to [..., d].

    W_V_q are d / n_queries rows of one matrix [d, d], so all results together have size d. There are no keys
    and no output matrix: the pool has n_queries d + d d parameters, less than half of ``AttentivePool``.
    """

    def __init__(self, d: int, n_queries: int | None = None):
        super().__init__()
        check_size("d_emb", d)
        n_queries = n_queries or next(n for n in (32, 24, 16, 12, 8, 6, 4, 3, 2, 1) if d % n == 0)
        check_size("n_queries", n_queries)
        if d % n_queries:
            raise ValueError(f"n_queries must divide d_emb={d}, got {n_queries}")
        self.d_pool, self.beta = d, 1 / math.sqrt(d)
        self.queries = nn.Parameter(torch.randn(n_queries, d))  # [q, d]
        self.W_V = nn.Parameter(torch.randn(d, d) / math.sqrt(d))  # [d, d]
        self.normalize = nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, mask = x.flatten(-3, -2), mask.flatten(-2)  # [..., i, d], [..., i]
        scores = self.beta * (self.queries @ x.mT)  # [..., q, i]
        scores = scores.masked_fill(~mask[..., None, :], torch.finfo(scores.dtype).min)  # [..., q, i]
        means = scores.softmax(-1).to(x.dtype) @ x  # [..., q, d]
        W_V = self.W_V.unflatten(0, (len(self.queries), -1))  # [q, k, d]
        return self.normalize(torch.einsum("...qd,qkd->...qk", means, W_V).flatten(-2))  # [..., d]


class SetPool(nn.Module):
    """PMA of the Set Transformer: compute H = N(S + attention(S, rFF(x))), then N(H + rFF(H)).

    The n_seeds vectors S are learned. The pool returns [..., n_seeds d].
    """

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
    """Modern Hopfield pooling: repeat xi <- sum_i softmax_i(beta xi . k_i) k_i, n_updates times.

    The stored patterns are k_i = W_K x_i. The states xi start from learned values. The pool returns the
    values weighted by the last softmax, normalised: [..., n_states d].
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
