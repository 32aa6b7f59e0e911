"""A small Society of Mind (section 3.4 of the paper): blocks of agents, connected by K-lines.

Two blocks perceive: one sees, one hears. Two more blocks read the perceiving agents, and decide whether the
thing seen and the thing heard are of the same kind. A scene has five things to see and five to hear. One of
each carries the signal, at a random position, and the others are noise. The K-lines are the credit phi of
each block. They show which agent used which input.

Run: python examples/blocks.py [k_lines.png]
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import vecroute as vr

N_THINGS, D = 5, 8


def scenes(n: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return things seen and things heard, [n, 5, 8] each, whether they agree [n], and the places [n, 2]."""
    places = torch.randint(N_THINGS, (n, 2))
    kinds = torch.randint(2, (n, 2))
    senses = []
    for sense in range(2):
        things = torch.randn(n, N_THINGS, D) / 3  # [n, i, d]
        counts = nn.functional.one_hot(places[:, sense], N_THINGS)[..., None]  # [n, i, 1]
        # The first feature marks the thing that carries the signal, the second is its kind.
        signal = torch.stack((torch.full((n,), 3.0), 3.0 * (2 * kinds[:, sense] - 1)), -1)  # [n, 2]
        things[..., :2] = things[..., :2] * (1 - counts) + counts * signal[:, None]
        senses.append(things)
    return (senses[0], senses[1]), (kinds[:, 0] == kinds[:, 1]).long(), places


def society() -> vr.Sequential:
    """Build the network: sight and hearing side by side, then two blocks that decide."""

    def block(n_inp: int | None, n_out: int, d_out: int) -> vr.VectorRouting:
        return vr.VectorRouting(n_inp=n_inp, n_out=n_out, d_inp=D, d_out=d_out)

    return vr.Sequential(vr.Concat(block(None, 2, D), block(None, 2, D)), block(4, 4, D), block(4, 2, 1))


def learn(network: vr.Sequential, n_steps: int) -> None:
    """Train the network to decide whether sight and hearing agree."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(n_steps):
        x_inp, agree, _ = scenes(128)
        loss = nn.functional.cross_entropy(network(x_inp)[..., 0], agree)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def k_lines(network: vr.Sequential, x_inp: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the credit phi [..., i, j] of each layer of blocks, in order."""
    credits, x = [], x_inp
    for blocks in network:
        x, phi = blocks.route(x)
        credits.append(phi.dense() if isinstance(phi, vr.Credit) else phi)  # [..., i, j]
    return credits


def draw(credits: list[Tensor], names: list[list[str]], ax) -> None:
    """Draw the K-lines of one scene: wide lines for much credit, blue for positive, red for negative."""
    places = [
        [(column, ((len(layer) - 1) / 2 - row) / len(layer)) for row in range(len(layer))]
        for column, layer in enumerate(names)
    ]
    for column, phi in enumerate(credits):
        greatest = phi.abs().max()
        for i, start in enumerate(places[column]):
            for j, end in enumerate(places[column + 1]):
                strength = (phi[i, j] / greatest).item()
                colour = "tab:blue" if strength > 0 else "tab:red"
                line = {"linewidth": 5 * abs(strength), "alpha": min(1, 0.1 + abs(strength))}
                ax.plot(*zip(start, end, strict=True), color=colour, solid_capstyle="round", zorder=1, **line)
    for layer, row in zip(names, places, strict=True):
        for name, (x, y) in zip(layer, row, strict=True):
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "0.4"}
            ax.text(x, y, name, ha="center", va="center", fontsize=8, bbox=box, zorder=2)
    ax.set_axis_off()


def main(n_steps: int = 400, path: str | None = None) -> dict[str, float]:
    """Train the network, print its accuracy and where its credit goes, and draw the K-lines of one scene."""
    torch.manual_seed(0)
    network = society()
    learn(network, n_steps)
    x_inp, agree, places = scenes(1000)
    with torch.no_grad():
        accuracy = (network(x_inp)[..., 0].argmax(-1) == agree).float().mean().item()
        credits = k_lines(network, x_inp)
    perceived = credits[0].abs().sum(-1).unflatten(-1, (2, N_THINGS))  # [n, 2, i] for each sense
    looked = (perceived.argmax(-1) == places).float().mean().item()
    print(f"accuracy on new scenes: {accuracy:.1%}; the signal has the most credit in {looked:.1%} of them")
    if path is not None:
        from matplotlib import pyplot as plt

        names = [[f"{sense} {i}" for sense in ("seen", "heard") for i in range(N_THINGS)],
                 ["sight 1", "sight 2", "hearing 1", "hearing 2"],
                 [f"agent {j + 1}" for j in range(4)], ["differ", "agree"]]  # fmt: skip
        fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
        draw([phi[0] for phi in credits], names, ax)
        signal = f"signal: seen {places[0, 0]}, heard {places[0, 1]}"
        ax.set_title(f"K-lines of one scene ({signal})", fontsize=10)
        fig.savefig(path, dpi=150)
        plt.close(fig)
        print(f"wrote {Path(path)}")
    return {"accuracy": accuracy, "looked": looked}


if __name__ == "__main__":
    main(path=sys.argv[1] if len(sys.argv) > 1 else None)
