"""Outputs as query states of an associative memory (section 3.3 of the paper).

The example stores six letters and recovers them from incomplete copies in three ways:

1. a routing that iterates until its queries stop changing;
2. the update rule of a modern Hopfield network, which is the same computation;
3. a routing with learned memories as votes (F returns a parameter W_mem and ignores the inputs).

Run: python examples/associative_memory.py
"""

import torch
from special_cases import hopfield
from torch import Tensor, nn

import vecroute as vr

LETTERS = {
    "A": "..#.. .#.#. #...# ##### #...# #...#",
    "E": "##### #.... ####. #.... #.... #####",
    "K": "#...# #..#. ###.. #..#. #...# #...#",
    "O": ".###. #...# #...# #...# #...# .###.",
    "T": "##### ..#.. ..#.. ..#.. ..#.. ..#..",
    "X": "#...# .#.#. ..#.. ..#.. .#.#. #...#",
}
N_ROWS, N_COLUMNS = 6, 5


def letters() -> Tensor:
    """Return six letters of 6 x 5 pixels, [6, 30]: 1 for ink, -1 for background."""
    ink = [[1.0 if pixel == "#" else -1.0 for pixel in rows.replace(" ", "")] for rows in LETTERS.values()]
    return torch.tensor(ink)


def corrupted(patterns: Tensor, share: float, generator: torch.Generator | None = None) -> Tensor:
    """Set a random share of the pixels to 0, which is neither ink nor background."""
    return patterns * (torch.rand(patterns.shape, generator=generator) >= share)


def found(retrieved: Tensor, patterns: Tensor) -> float:
    """Return the share of results [..., n, 30] that equal their pattern in every pixel."""
    return (retrieved.sign() == patterns).all(-1).float().mean().item()


def hopfield_update(patterns: Tensor, queries: Tensor, beta: float, n_updates: int) -> Tensor:
    """Apply the update rule of a modern Hopfield network, written out."""
    for _ in range(n_updates):
        queries = (beta * queries @ patterns.mT).softmax(-1) @ patterns  # [..., n, 30]
    return queries


class LearnedMemory(nn.Module):
    """Route the rows of a letter to the rows of a letter, with learned votes that ignore the inputs."""

    def __init__(self):
        super().__init__()

        def network(d_out: int) -> nn.Module:
            return vr.networks.MLP(d_inp=N_COLUMNS, d_hid=32, d_out=d_out)

        self.routing = vr.GeneralRouting(
            A=network(1),
            F=vr.networks.LearnedMemories(n_inp=N_ROWS, n_out=N_ROWS, d_out=N_COLUMNS),
            G=network(N_COLUMNS),
            S=vr.networks.ScaledDotProduct(),
            beta_use=network(N_ROWS),
            beta_ign=network(N_ROWS),
            n_inp=N_ROWS,
            n_out=N_ROWS,
            d_inp=N_COLUMNS,
        )

    def forward(self, queries: Tensor) -> Tensor:
        rows = queries.unflatten(-1, (N_ROWS, N_COLUMNS))  # [..., 6, 5]
        return self.routing(rows).flatten(-2)  # [..., 30]


def learn(memory: LearnedMemory, patterns: Tensor, share: float, n_steps: int) -> None:
    """Teach the memory to complete the patterns."""
    optimizer = torch.optim.Adam(memory.parameters(), lr=0.01)
    for _ in range(n_steps):
        batch = patterns.repeat(16, 1)  # [b, 30]
        loss = nn.functional.mse_loss(memory(corrupted(batch, share)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(n_copies: int = 100, n_steps: int = 1000) -> dict[str, float]:
    """Print and return the share of letters that each memory recovers."""
    torch.manual_seed(0)
    patterns, share, beta = letters(), 0.3, 0.5
    memory = LearnedMemory()
    learn(memory, patterns, share, n_steps)
    queries = corrupted(patterns.expand(n_copies, -1, -1), share)  # [n, 6, 30]
    stored = patterns.expand(n_copies, -1, -1)  # [n, 6, 30]
    with torch.no_grad():
        by_routing = hopfield(stored, queries, beta, vr.Converge(1e-5, 100))
        by_hopfield = hopfield_update(stored, queries, beta, 100)
        results = {
            "corrupted": found(queries, patterns),
            "routing": found(by_routing, patterns),
            "Hopfield": found(by_hopfield, patterns),
            "learned": found(memory(queries), patterns),
            "difference": (by_routing - by_hopfield).abs().max().item(),
        }
    print(f"{share:.0%} of the pixels are lost. Letters recovered without an error:")
    print(f"routing until convergence       {results['routing']:.1%}")
    print(
        f"100 Hopfield updates            {results['Hopfield']:.1%} (difference {results['difference']:.0e})"
    )
    print(f"routing with learned memories   {results['learned']:.1%}")
    return results


if __name__ == "__main__":
    main()
