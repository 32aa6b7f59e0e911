"""A causal sequence-to-sequence layer from ``pair_mask``: output j uses inputs 0, ..., j and no later one.

The mask makes the layer causal if the softmax is over the inputs (``compete_over="inputs"``). In the paper,
outputs compete for each input instead. Then an early output loses data to later outputs that predict better,
so the later inputs influence it: from the second iteration on such a layer is not causal, although no later
data reach the output.

In this example a network learns to name, at each position, the symbol that came three positions before.

Run: python examples/causal.py
"""

import torch
from torch import Tensor, nn

import vecroute as vr

N_SYMBOLS, DELAY = 6, 3


class CausalRouting(nn.Module):
    """x_inp [..., n, d] -> x_out [..., n, d], where x_out_j depends only on x_inp_i with i <= j.

    With ``vr.Converge`` this holds only up to its tol, because all outputs of a sample stop together.
    """

    def __init__(self, *, n: int, d: int, n_iters: int = 2):
        super().__init__()
        self.register_buffer("pair_mask", torch.ones(n, n, dtype=torch.bool).triu())  # [i, j]: i <= j
        # A and F must not scale by 1 / sqrt(n_inp), because n_inp counts later inputs too.
        self.routing = vr.GeneralRouting(
            A=nn.Linear(d, 1),
            F=nn.Sequential(nn.Linear(d, d), nn.Unflatten(-1, (1, d)), _Expand(n)),
            G=nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d)),
            S=vr.networks.ScaledDotProduct(),
            n_inp=n,
            n_out=n,
            d_inp=d,
            n_iters=n_iters,
            compete_over="inputs",
            beta_use=1,
            beta_ign=0,
        )

    def forward(self, x_inp: Tensor) -> Tensor:
        # Each output starts as the input at its own position.
        return self.routing(x_inp, pair_mask=self.pair_mask, x_init=x_inp)  # [..., n, d]


class _Expand(nn.Module):
    """Give all outputs the same votes: [..., i, 1, d] -> [..., i, j, d]."""

    def __init__(self, n_out: int):
        super().__init__()
        self.n_out = n_out

    def forward(self, V: Tensor) -> Tensor:
        return V.expand(*V.shape[:-2], self.n_out, -1)  # [..., i, j, d]


class Recall(nn.Module):
    """Symbols [..., n] -> scores [..., n, 6] for the symbol that came DELAY positions before."""

    def __init__(self, *, n: int, d: int):
        super().__init__()
        self.symbols, self.positions = nn.Embedding(N_SYMBOLS, d), nn.Parameter(torch.randn(n, d))
        self.routing, self.scores = CausalRouting(n=n, d=d), nn.Linear(d, N_SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        x_inp = self.symbols(symbols) + self.positions  # [..., n, d]
        return self.scores(x_inp + self.routing(x_inp))  # [..., n, 6]


def main(n: int = 12, d: int = 32, n_steps: int = 400) -> dict[str, float]:
    """Train, then print and return the accuracy and the influence of later inputs on earlier outputs."""
    torch.manual_seed(0)
    model = Recall(n=n, d=d)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(n_steps):
        symbols = torch.randint(N_SYMBOLS, (64, n))  # [b, n]
        scores = model(symbols)[:, DELAY:]  # [b, n - 3, 6]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), symbols[:, :-DELAY].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    symbols = torch.randint(N_SYMBOLS, (500, n))  # [b, n]
    with torch.no_grad():
        scores = model(symbols)  # [b, n, 6]
        right = (scores[:, DELAY:].argmax(-1) == symbols[:, :-DELAY]).float().mean().item()
        half = n // 2
        changed = symbols.clone()
        changed[:, half:] = torch.randint(N_SYMBOLS, (500, n - half))
        leaked = (model(changed) - scores)[:, :half].abs().max().item()
    print(
        f"accuracy {right:.1%} (chance: {1 / N_SYMBOLS:.1%}); "
        f"other later symbols change earlier outputs by {leaked}"
    )
    return {"right": right, "leaked": leaked}


if __name__ == "__main__":
    main()
