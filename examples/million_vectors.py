"""Route a million vectors from a file, without loading them all: ``python examples/million_vectors.py``.

One vector in a hundred carries a signal, the others are noise. The example trains a layer from the file to
output the signal. Then it writes the credit of every vector to another file, and shows that the vectors with
the signal have most of it.
"""

import argparse
import resource
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

import vecroute as vr

D_INP, EVERY = 64, 100


def make_file(path: Path, n_inp: int) -> Tensor:
    """Write float16 vectors [n_inp, D_INP] to a .npy file, and return the signal [D_INP]."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(D_INP, generator=generator)  # [d]
    file = np.lib.format.open_memmap(path, "w+", np.float16, (n_inp, D_INP))
    for start in range(0, n_inp, 2**16):
        rows = min(2**16, n_inp - start)
        x = torch.randn(rows, D_INP, generator=generator)  # [i, d]
        x[torch.arange(start, start + rows) % EVERY == 0] += 2 * signal  # [i, d]
        file[start : start + rows] = x.half().numpy()
    file.flush()
    return signal


def run(folder: Path, n_inp: int, steps: int) -> dict[str, float]:
    """Train from the file, write the credit, and compare the credit of signal vectors and noise vectors."""
    path, credit_path = folder / "vectors.npy", folder / "credit.npy"
    signal = make_file(path, n_inp)  # [d]
    torch.manual_seed(1)
    layer = vr.VectorRouting(n_inp=None, n_out=2, d_inp=D_INP, d_out=D_INP)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x_out = vr.distributed.stream(layer, path)  # [2, D_INP]
        loss = nnf.mse_loss(x_out[0], nnf.layer_norm(signal, signal.shape))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {loss.item():.4f}")
    vr.distributed.stream_credit(layer, path, credit_path, outputs=[0])
    credit = np.abs(np.load(credit_path, mmap_mode="r")[:, 0])
    with_signal, noise = credit[::EVERY].mean(), np.delete(credit, np.s_[::EVERY]).mean()
    print(f"mean |credit| of vectors with the signal {with_signal:.4f}, of the others {noise:.4f}")
    return {"first": losses[0], "last": losses[-1], "signal": float(with_signal), "noise": float(noise)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n-inp", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), options.n_inp, options.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak of resident memory {peak:.0f} MB (most of it is PyTorch itself)")
