"""Recurrent residual routing: apply the same routing repeatedly, and add its result each time.

    x <- x + routing(x)

There is one layer of parameters, however often it is applied. The credit of all applications is exact: it is
the product of I + phi over the applications.

In this example the vectors form a chain. The pair_mask lets each vector use only itself and its neighbours.
The first vector knows a colour. The last vector learns it after as many applications as there are links in
the chain, not earlier. For this each routing must have one iteration: in a second iteration outputs compete,
and the competition carries information about the neighbours of neighbours. Credit counts data alone, so it
is 0 for too few applications in any case.

Run: python examples/recurrent_residual.py
"""

import torch
from torch import Tensor, nn

import vecroute as vr

N_COLOURS = 4


class Chain(nn.Module):
    """Colours [b] -> scores [b, 4] from the last of n vectors. Only the first vector receives the colour."""

    def __init__(self, *, n: int, d: int):
        super().__init__()
        self.colours, self.others = nn.Embedding(N_COLOURS, d), nn.Parameter(torch.randn(n - 1, d))
        routing = vr.VectorRouting(n_inp=n, n_out=n, d_inp=d, d_out=d, n_iters=1)
        self.step = vr.Residual(vr.Sequential(vr.PerVector(nn.LayerNorm(d)), routing))
        self.scores = nn.Linear(d, N_COLOURS)
        position = torch.arange(n)
        neighbours = (position[:, None] - position).abs() <= 1  # [i, j]
        self.register_buffer("neighbours", neighbours)

    def vectors(self, colours: Tensor) -> Tensor:
        first = self.colours(colours)[:, None]  # [b, 1, d]
        return torch.cat((first, self.others.expand(len(colours), -1, -1)), 1)  # [b, n, d]

    def forward(self, colours: Tensor, n_times: int) -> Tensor:
        x = self.vectors(colours)  # [b, n, d]
        for _ in range(n_times):
            x = self.step(x, pair_mask=self.neighbours)  # [b, n, d]
        return self.scores(x[:, -1])  # [b, 4]

    def credit(self, colours: Tensor, n_times: int) -> Tensor:
        """Return the credit of every initial vector for every final vector, [b, n, n]."""
        x = self.vectors(colours)  # [b, n, d]
        credit = torch.eye(x.shape[1]).expand(len(x), -1, -1)  # [b, n, n]
        for _ in range(n_times):
            x, phi = self.step.route(x, pair_mask=self.neighbours)  # [b, n, d], a Credit [b, n, n]
            credit = credit @ phi.dense()  # [b, n, n]
        return credit


def main(n: int = 4, d: int = 16, n_steps: int = 150) -> dict[str, float]:
    """Train with as many applications as links, then print accuracy and credit for one less and one more.

    The keys of the result contain the number of applications minus the number of links.
    """
    torch.manual_seed(0)
    chain, links = Chain(n=n, d=d), n - 1
    optimizer = torch.optim.Adam(chain.parameters(), lr=0.01)
    for _ in range(n_steps):
        colours = torch.randint(N_COLOURS, (64,))  # [b]
        loss = nn.functional.cross_entropy(chain(colours, links), colours)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(chain.parameters(), 1.0)
        optimizer.step()
    results = {}
    colours = torch.arange(N_COLOURS)  # [4]
    with torch.no_grad():
        for n_times in (links - 1, links, links + 1):
            right = (chain(colours, n_times).argmax(-1) == colours).float().mean().item()
            # The credit of the first vector for the last.
            credit = chain.credit(colours, n_times)[:, 0, -1].abs().mean().item()
            print(f"{n_times} applications, {links} links: accuracy {right:.0%}, credit {credit:.3g}")
            results |= {f"right {n_times - links:+d}": right, f"credit {n_times - links:+d}": credit}
    return results


if __name__ == "__main__":
    main()
