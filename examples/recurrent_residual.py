"""Recurrent residual routing: the same routing over and over, each time added to what is there.

    x <- x + routing(x)

The parameters are those of one layer, however often it is applied, and the credit of the whole is exact: the
product of I + phi over the applications.

Here the vectors stand in a chain, and by their pair_mask each takes from itself and its neighbours alone.
What the first one knows, a colour, reaches the last one after as many applications as there are links, not
before. (That is why each routing has one iteration. In a second one outputs compete, and who wins tells
them something of their neighbours' neighbours. Credit, which counts data alone, is 0 before that in any
case.)

Run: python examples/recurrent_residual.py
"""

import torch
from torch import Tensor, nn

import vecroute as vr

N_COLOURS = 4


class Chain(nn.Module):
    """Colours [b] -> scores [b, 4] at the last of n vectors, of which the first alone is shown the colour."""

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
        """The credit of every vector at the start for every vector at the end, [b, n, n]."""
        x = self.vectors(colours)  # [b, n, d]
        credit = torch.eye(x.shape[1]).expand(len(x), -1, -1)  # [b, n, n]
        for _ in range(n_times):
            x, phi = self.step.route(x, pair_mask=self.neighbours)  # [b, n, d], a Credit [b, n, n]
            credit = credit @ phi.dense()  # [b, n, n]
        return credit


def main(n: int = 4, d: int = 16, n_steps: int = 150) -> dict[str, float]:
    """Train with as many applications as there are links, then print accuracy and credit for other numbers.

    Returns them too, by how many applications more there were than links.
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
            credit = chain.credit(colours, n_times)[:, 0, -1].abs().mean().item()  # of the first for the last
            print(f"{n_times} applications over {links} links: right in {right:.0%}, credit {credit:.3g}")
            results |= {f"right {n_times - links:+d}": right, f"credit {n_times - links:+d}": credit}
    return results


if __name__ == "__main__":
    main()
