"""RoutingHead: route hidden states to class scores, with credit for each hidden state."""

from typing import Any

from torch import Tensor, nn

from vecroute.compose.members import Each, Members
from vecroute.compose.modules import NetworkHead, PerVector, Sequential, checked_group_of, vector_routings
from vecroute.heads.inputs import GatedMLP, ResidualMLP, check_hidden_states, mlp_width
from vecroute.layers import Routed, VectorRouting
from vecroute.ops.checks import check_bool, check_size
from vecroute.ops.group import announced


class RoutingHead(NetworkHead):
    """Route the hidden states of a Transformer, at every position and depth, to class scores.

    The head flattens positions and depths to one sequence, i = position * depth + level, and normalises each
    vector. One routing maps the sequence to n_hid vectors, another maps these to the scores. An MLP changes
    each vector separately before and after the first routing. Only routings mix vectors, so credit and
    contributions reach every hidden state: see ``route``, and ``contributions`` with ``head.network``.

    With several members, the head has k sets of weights, trained side by side. Scores, credit and
    contributions are the means over the members.

    Args:
        d_emb: size of the hidden states.
        depth: number of hidden states at each position.
        n_cls: number of classes.
        n_hid, d_hid: number and size of the hidden vectors. d_hid=None means d_emb.
        d_mlp: width of the MLPs, 0 for no MLPs. None means two thirds of d_emb, or one third with several
            members, rounded down to a multiple of 8 if d_emb is at least 24.
        gated: True to use ``GatedMLP``, False to use ``ResidualMLP``.
        n_routings: number of routings, at least 2. Additional ones map n_hid hidden vectors to n_hid others.
        n_iters, implementation: passed to every routing.
        n_members: number k of members.

    Attributes:
        options: every option above except d_emb, depth and n_cls, with None replaced by the number it means.

    Shapes:
        hidden_states [..., n_pos, depth, d_emb], input_mask [..., n_pos] or [..., n_pos, depth]
        -> scores [..., n_cls]. True (or 1) in the mask means *use*.

    Raises:
        ValueError, TypeError: an argument has the wrong shape, type, dtype or device.
    """

    def __init__(
        self,
        *,
        d_emb: int,
        depth: int,
        n_cls: int,
        n_hid: int = 4,
        d_hid: int | None = None,
        d_mlp: int | None = None,
        gated: bool = True,
        n_routings: int = 2,
        n_iters: int = 2,
        implementation: str = "auto",
        n_members: int = 1,
    ):
        super().__init__()
        check_size("d_emb", d_emb)
        check_size("n_members", n_members)
        d_hid = d_emb if d_hid is None else d_hid
        d_mlp = mlp_width(d_emb, 2 if n_members == 1 else 1) if d_mlp is None else d_mlp
        sizes = {"depth": depth, "n_cls": n_cls, "n_hid": n_hid, "d_hid": d_hid, "n_routings": n_routings}
        for name, value in sizes.items():
            check_size(name, value)
        if d_mlp != 0:  # 0 means no MLPs
            check_size("d_mlp", d_mlp)
        check_bool("gated", gated)
        if n_routings < 2:
            raise ValueError(f"n_routings must be at least 2, got {n_routings}")
        self.d_emb, self.depth, self.n_cls, self.n_members = d_emb, depth, n_cls, n_members
        each: dict[str, Any] = {"n_iters": n_iters, "implementation": implementation}
        self.options = {"n_hid": n_hid, "d_hid": d_hid, "d_mlp": d_mlp, "gated": gated}
        self.options |= {"n_routings": n_routings, "n_members": n_members, **each}

        def routing(n_inp: int | None, n_out: int, d_inp: int, d_out: int) -> nn.Module:
            sizes: dict[str, Any] = {"n_inp": n_inp, "n_out": n_out, "d_inp": d_inp, "d_out": d_out}
            layers = [VectorRouting(**sizes, **each) for _ in range(n_members)]
            return layers[0] if n_members == 1 else Each(*layers)

        def mlp(d: int) -> list[nn.Module]:
            return [(GatedMLP if gated else ResidualMLP)(d, d_mlp, n_members)] if d_mlp else []

        normalize, first = nn.LayerNorm(d_emb, elementwise_affine=False), mlp(d_emb)
        rest = (
            routing(None, n_hid, d_emb, d_hid),
            *map(PerVector, mlp(d_hid)),
            *(routing(n_hid, n_hid, d_hid, d_hid) for _ in range(n_routings - 2)),
            routing(n_hid, n_cls, d_hid, 1),
        )
        if n_members == 1:
            self.network = Sequential(PerVector(nn.Sequential(normalize, *first)), *rest)
        else:
            self.network = Sequential(PerVector(normalize), Members(*map(PerVector, first), *rest))

    @classmethod
    def wide(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "RoutingHead":
        """Build a head with MLPs twice as wide. It scores no better on texts (docs/results.md)."""
        check_size("d_emb", d_emb)
        options = {"d_mlp": mlp_width(d_emb, 4)} | options
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, **options)

    @classmethod
    def paper(cls, *, d_emb: int, depth: int, n_cls: int, **options: Any) -> "RoutingHead":
        """Build the paper's head: three routings, 64 hidden vectors, no MLPs."""
        options = {"n_hid": 64, "d_mlp": 0, "n_routings": 3} | options
        return cls(d_emb=d_emb, depth=depth, n_cls=n_cls, **options)

    def flatten(
        self, hidden_states: Tensor, input_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of the network: x_inp [..., i, d], and its mask [..., i] or None."""
        sizes = {"depth": self.depth, "d_emb": self.d_emb}
        layer = next(vector_routings(self.network))
        with announced(checked_group_of(self.network)):
            input_mask = check_hidden_states(
                hidden_states, input_mask, **sizes, like=layer.W_F2, may_be_empty=layer.group != ""
            )  # [..., n_pos, depth]
        x_inp = hidden_states.flatten(-3, -2)  # [..., i, d]
        return x_inp, None if input_mask is None else input_mask.flatten(-2)  # [..., i]

    def forward(self, hidden_states: Tensor, input_mask: Tensor | None = None) -> Tensor:
        return self.network(*self.flatten(hidden_states, input_mask))[..., 0]  # [..., n_cls]

    def side_by_side(self) -> Sequential:
        """Return the members as one network, x_inp [k, ..., i, d] -> [k, ..., n_cls, 1], without their mean.

        The returned network shares the parameters of ``network``. Training gives each member its own inputs.
        """
        network: Any = self.network
        return network if self.n_members == 1 else Sequential(network[0], *network[1])

    def member_scores(self, hidden_states: Tensor, input_mask: Tensor | None = None) -> Tensor:
        """Return the scores of every member, [k, ..., n_cls]. Their mean over k is ``forward``."""
        x_inp, input_mask = self.flatten(hidden_states, input_mask)  # [..., i, d], [..., i]
        x_inp = x_inp.expand(self.n_members, *x_inp.shape)  # [k, ..., i, d]
        return self.side_by_side()(x_inp, input_mask)[..., 0]  # [k, ..., n_cls]

    def route(self, hidden_states: Tensor, input_mask: Tensor | None = None) -> Routed:
        """Return the scores and the credit [..., i, n_cls] of every hidden state for every class."""
        x_out, credit = self.network.route(*self.flatten(hidden_states, input_mask))
        return Routed(x_out[..., 0], credit)
