"""Heads: the hidden states of every position at every depth in, class scores out."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from vecroute.compose import PerVector, Sequential
from vecroute.layers import Routed, VectorRouting
from vecroute.ops.checks import check_choice, check_float_tensor, check_mask, check_size


class ResidualMLP(nn.Module):
    """x + W_2 gelu(W_1 x + b_1) + b_2 for each vector, the identity at first: [..., d] -> [..., d]."""

    def __init__(self, d: int, d_mlp: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(d, d_mlp), nn.Linear(d_mlp, d)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(nnf.gelu(self.inner(x)))  # [..., d]


class RoutingHead(nn.Module):
    """Route the hidden states of a Transformer, at every position and depth, to class scores.

    Positions and depths are flattened to one sequence, i = position * depth + level. Each vector of it is
    normalised, all are routed to n_hid vectors, and these to the scores. An MLP changes each vector by itself
    before and after the first routing. Vectors stay apart between routings, so that credit and contributions
    reach every hidden state: see ``route``, and ``contributions`` of ``head.network``.

    Args:
        d_emb: size of the hidden states.
        depth: number of hidden states at each position.
        n_cls: number of classes.
        n_hid, d_hid: number and size of the hidden vectors, d_hid=None for d_emb.
        d_mlp: width of the MLPs, None for a quarter of d_emb, 0 for no MLPs.
        n_routings: 2, or more for routings from the hidden vectors to as many others.
        n_iters, implementation: of every routing.

    Shapes:
        hidden_states [..., n_pos, depth, d_emb], input_mask [..., n_pos] or [..., n_pos, depth]
        -> scores [..., n_cls]. True (or 1) in the mask means *use*.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type, dtype or device.
    """

    def __init__(
        self,
        *,
        d_emb: int,
        depth: int,
        n_cls: int,
        n_hid: int = 8,
        d_hid: int | None = None,
        d_mlp: int | None = None,
        n_routings: int = 2,
        n_iters: int = 2,
        implementation: str = "auto",
    ):
        super().__init__()
        d_hid = d_emb if d_hid is None else d_hid
        d_mlp = max(d_emb // 4, 1) if d_mlp is None else d_mlp
        for name, value in (("depth", depth), ("n_cls", n_cls), ("d_mlp", d_mlp or 1)):
            check_size(name, value)
        if n_routings < 2:
            raise ValueError(f"n_routings must be at least 2, got {n_routings}")
        self.d_emb, self.depth, self.n_cls = d_emb, depth, n_cls
        options: dict[str, Any] = {"n_iters": n_iters, "implementation": implementation}

        def routing(n_inp: int | None, n_out: int, d_inp: int, d_out: int) -> nn.Module:
            return VectorRouting(n_inp=n_inp, n_out=n_out, d_inp=d_inp, d_out=d_out, **options)

        def mlp(d: int) -> list[nn.Module]:
            return [ResidualMLP(d, d_mlp)] if d_mlp else []

        normalize = nn.LayerNorm(d_emb, elementwise_affine=False)
        self.network = Sequential(
            PerVector(nn.Sequential(normalize, *mlp(d_emb))),
            routing(None, n_hid, d_emb, d_hid),
            *map(PerVector, mlp(d_hid)),
            *(routing(n_hid, n_hid, d_hid, d_hid) for _ in range(n_routings - 2)),
            routing(n_hid, n_cls, d_hid, 1),
        )

    @classmethod
    def paper(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "RoutingHead":
        """The paper's head: three routings by way of 64 hidden vectors, and no MLPs."""
        options = {"n_hid": 64, "d_mlp": 0, "n_routings": 3} | options
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, **options)

    def flatten(
        self, hidden_states: Tensor, input_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the network takes: x_inp [..., i, d], i = position * depth + level, and its mask [..., i]."""
        expected = f"[..., n_pos, depth={self.depth}, d_emb={self.d_emb}]"
        check_float_tensor("hidden_states", hidden_states, expected, next(self.parameters()))
        shape = list(hidden_states.shape)
        if len(shape) < 3 or shape[-2:] != [self.depth, self.d_emb]:
            raise ValueError(f"hidden_states must be {expected}, got {shape}")
        if isinstance(input_mask, Tensor):
            if input_mask.shape == hidden_states.shape[:-2]:
                input_mask = input_mask[..., None].expand(hidden_states.shape[:-1])  # [..., n_pos, depth]
            if input_mask.shape != hidden_states.shape[:-1]:
                raise ValueError(
                    f"input_mask must be [..., n_pos] or [..., n_pos, depth] for hidden_states {shape}, "
                    f"got {list(input_mask.shape)}"
                )
            input_mask = input_mask.flatten(-2)  # [..., i]
        x_inp = hidden_states.flatten(-3, -2)  # [..., i, d]
        return x_inp, check_mask("input_mask", input_mask, x_inp, sizes={"n_inp": x_inp.shape[-2]})

    def forward(self, hidden_states: Tensor, input_mask: Tensor | None = None) -> Tensor:
        x_inp, input_mask = self.flatten(hidden_states, input_mask)  # [..., i, d], [..., i]
        if self.training and input_mask is not None:
            x_inp, input_mask = compact(x_inp, input_mask)  # [..., k, d], [..., k]
        return self.network(x_inp, input_mask)[..., 0]  # [..., n_cls]

    def route(self, hidden_states: Tensor, input_mask: Tensor | None = None) -> Routed:
        """Like ``forward``, and the credit of every hidden state for every class, [..., i, n_cls]."""
        x_out, credit = self.network.route(*self.flatten(hidden_states, input_mask))
        return Routed(x_out[..., 0], credit)


HEADS: dict[str, Callable[..., nn.Module]] = {"routing": RoutingHead, "paper": RoutingHead.paper}


def make_head(name: str, *, seed: int, **options: Any) -> nn.Module:
    """A head by name, with the initial weights of the seed.

    Raises:
        ValueError: no head has that name.
    """
    check_choice("head", name, tuple(HEADS))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return HEADS[name](**options)


def compact(x_inp: Tensor, input_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Leave out unused inputs, as far as the sample with most used ones allows: same result, less work.

    Args:
        x_inp: [..., i, d], input_mask: [..., i].

    Returns:
        [..., k, d] and [..., k], the used inputs first.
    """
    *batch, n_inp, d = x_inp.shape
    used = input_mask.reshape(-1, n_inp)  # [b, i]
    n_used = used.sum(-1)  # [b]
    k = max(int(n_used.max()), 1)
    order = used.byte().argsort(dim=-1, descending=True, stable=True)[:, :k]  # [b, k]
    rows = order + torch.arange(len(used), device=used.device)[:, None] * n_inp  # [b, k]
    mask = torch.arange(k, device=used.device) < n_used[:, None]  # [b, k]
    return x_inp.reshape(-1, d)[rows].reshape(*batch, k, d), mask.reshape(*batch, k)
