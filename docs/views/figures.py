"""The figures of docs/views.md, one for each of the paper's viewpoints.

Run: python docs/views/figures.py [folder]
"""

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from torch import nn

import vecroute as vr

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "examples"))
import associative_memory  # noqa: E402
import blocks  # noqa: E402

COLOURS = ["tab:blue", "tab:orange", "tab:green", "tab:red"]


def geometry(folder: Path) -> None:
    """Draw each output as a combination of its own votes, with phi as coefficients."""
    torch.manual_seed(125)
    layer = vr.VectorRouting(n_inp=3, n_out=3, d_inp=8, d_out=2, normalize=False)
    x_inp = torch.randn(3, 8)
    with torch.no_grad():
        x_out, phi = layer.route(x_inp)
        V = ((x_inp[:, None] * layer.W_F1) @ layer.W_F2) / 3**0.5 + layer.B_F2  # [i, j, h]
    fig, axes = plt.subplots(1, 3, figsize=(9, 3.4), layout="constrained")
    for j, ax in enumerate(axes):
        path = torch.cat((torch.zeros(1, 2), (phi[:, j, None] * V[:, j]).cumsum(0)))  # [i + 1, h]
        half = 1.2 * path.abs().max().item()
        for i in range(3):
            # The vote is a direction. phi is the length and the sign of the step along it.
            ax.axline((0, 0), V[i, j].tolist(), color=COLOURS[i], alpha=0.3, linewidth=1, linestyle=":")
            arrow(ax, path[i], path[i + 1], COLOURS[i], 2)
        arrow(ax, path[0], x_out[j], "black", 2.5)
        ax.plot(0, 0, "o", color="black", markersize=4)
        ax.set(xlim=(-half, half), ylim=(-half, half), aspect="equal", xticks=[], yticks=[])
        ax.set_title(f"output {j + 1}", fontsize=10)
    handles = [
        plt.Line2D([], [], color=COLOURS[i], linewidth=2, label=f"$\\phi_{{{i + 1}j}} V_{{{i + 1}j}}$")
        for i in range(3)
    ]
    handles.append(plt.Line2D([], [], color="black", linewidth=2.5, label="$x^{out}_j$"))
    fig.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    fig.savefig(folder / "geometry.png", dpi=150)


def arrow(ax, start: torch.Tensor, end: torch.Tensor, colour: str, width: float) -> None:
    """Draw an arrow from start to end."""
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end.tolist(), start.tolist(), arrowprops=style)


def credit(folder: Path) -> None:
    """Draw three latent variables that converge to groups of points, and the credit of each point."""
    torch.manual_seed(0)
    centres = torch.tensor([[-1.0, -0.7], [1.1, -0.4], [0.0, 1.1]])
    points = (centres[:, None] + 0.35 * torch.randn(3, 6, 2)).flatten(0, 1)  # [18, 2]
    layer = vr.GeneralRouting(
        A=vr.networks.ConstantActivation(),
        F=lambda x: x[:, None].expand(-1, 3, -1),
        G=nn.Identity(),
        S=vr.networks.NegativeSquaredDistance(),
        n_inp=None,
        n_out=3,
        d_inp=2,
        n_iters=12,
        beta_use=3 / 18,
        beta_ign=0,
    )
    start = torch.tensor([[-0.5, 0.2], [0.4, -0.3], [0.2, 0.4]])  # [j, h]
    trace = layer.trace(points, x_init=start)
    paths = torch.stack([start, *(iteration.x_out for iteration in trace)])  # [t, j, h]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(1.1, 1))
    shares = trace[-1].R @ torch.tensor([matplotlib.colors.to_rgb(c) for c in COLOURS[:3]])  # [i, 3]
    left.scatter(*points.mT, c=shares.clamp(0, 1).numpy(), s=30, edgecolor="white", linewidth=0.5, zorder=2)
    for j in range(3):
        left.plot(*paths[:, j].mT, color=COLOURS[j], linewidth=1.5)
        left.plot(
            *paths[-1, j], color=COLOURS[j], marker="*", markersize=16, markeredgecolor="black", zorder=3
        )
    left.set(aspect="equal", xticks=[], yticks=[])
    left.set_title("inputs, and three outputs on their way", fontsize=10)
    image = right.imshow(trace[-1].phi.mT.numpy(), cmap="Blues", aspect="auto", vmin=0)
    right.set(
        xlabel="input i",
        xticks=range(0, 18, 2),
        yticks=range(3),
        yticklabels=[f"output {j + 1}" for j in range(3)],
    )
    right.set_title("credit $\\phi_{ij}$", fontsize=10)
    fig.colorbar(image, ax=right, shrink=0.8)
    fig.savefig(folder / "credit.png", dpi=150)


def memory(folder: Path) -> None:
    """Draw letters that are recovered from incomplete copies, and the residuals of the search."""
    patterns = associative_memory.letters()  # [6, 30]
    generator = torch.Generator().manual_seed(3)
    queries = associative_memory.corrupted(patterns, 0.5, generator)
    rows = [("stored", patterns), ("half is lost", queries)]
    rows += [
        (f"{n} update{'s' if n > 1 else ''}", associative_memory.hopfield(patterns, queries, 0.17, n))
        for n in (1, 2)
    ]
    rows.append(("settled", associative_memory.hopfield(patterns, queries, 0.17, vr.Converge(1e-6, 500))))
    fig = plt.figure(figsize=(9, 3.9), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=(1.25, 1))
    axes = left.subplots(len(rows), len(patterns))
    for row, (name, images) in zip(axes, rows, strict=True):
        for ax, image in zip(row, images, strict=True):
            ax.imshow(image.view(associative_memory.N_ROWS, -1).numpy(), cmap="gray_r", vmin=-1, vmax=1)
            ax.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    ax = right.subplots()
    residuals_of_solvers(ax)
    fig.savefig(folder / "memory.png", dpi=150)


def residuals_of_solvers(ax) -> None:
    """Return the residuals of a layer that converges slowly, with plain iteration and with Anderson."""
    torch.manual_seed(1)
    x_inp = torch.randn(20, 12, 8, dtype=torch.float64)
    torch.manual_seed(0)
    layer = vr.VectorRouting(n_inp=None, n_out=4, d_inp=8, d_out=8, dtype=torch.float64)
    with torch.no_grad():
        layer.W_S.fill_(3)
        layer.n_iters = vr.Converge(1e-8, 500, "anderson")
        layer(x_inp)
        fast = layer.convergence
        plain = vr.stability.probe(layer, x_inp, n_steps=70).residuals  # [b, t]
    slow = (plain > 1e-8).sum(-1)  # [b] steps
    sample = int(slow.where(slow < 70, 0).argmax())
    steps = int(fast.steps[sample])
    ax.semilogy(range(1, 71), plain[sample], label="plain iteration", color="tab:blue")
    ax.semilogy(range(1, steps + 1), fast.residuals[sample, :steps], label="Anderson", color="tab:orange")
    ax.axhline(1e-8, color="0.5", linewidth=1, linestyle="--")
    ax.text(70, 1.3e-8, "tol", ha="right", va="bottom", color="0.4", fontsize=9)
    ax.set(xlabel="step", ylim=(3e-10, 1))
    ax.set_title("residual of a layer that is slow to settle", fontsize=10)
    ax.legend(frameon=False, fontsize=9)


def society(folder: Path) -> None:
    """Draw the K-lines of a network of blocks."""
    blocks.main(path=str(folder / "society.png"))


def main(folder: Path = HERE) -> None:
    matplotlib.use("Agg")
    for draw in (geometry, credit, memory, society):
        draw(folder)
        plt.close("all")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
