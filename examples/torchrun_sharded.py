"""Divide one sequence among several processes.

    torchrun --nproc-per-node 4 examples/torchrun_sharded.py --folder run

Each process creates, holds and routes its own part of the vectors. All processes train one layer, and save
it with the state of the optimizer after every step. If you stop the run, or a process is killed, start it
again with any number of processes: it resumes where it stopped.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as nnf
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vecroute as vr

D_INP = 32


def own_vectors(n_inp: int, mesh: DeviceMesh) -> Tensor:
    """Return the vectors of this process, [i, D_INP]. Vector i does not depend on the number of processes."""
    rows = vr.distributed.own_rows(n_inp, mesh)
    x = [torch.randn(D_INP, generator=torch.Generator().manual_seed(i)) for i in range(rows.start, rows.stop)]
    return torch.stack([torch.zeros(D_INP), *x])[1:].to(mesh.device_type)  # [i, d]


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint. A checkpoint without .metadata was interrupted."""
    whole = [file.parent for file in folder.glob("*/.metadata")]
    return max(whole, key=lambda path: int(path.name), default=None)


def state_of(layer: vr.VectorRouting, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the content of a checkpoint."""
    model, optim = get_state_dict(layer, optimizer)
    return {"model": model, "optimizer": optim}


def train(mesh: DeviceMesh, folder: Path, n_inp: int, steps: int) -> float:
    """Train up to this number of steps, from the last checkpoint if there is one. Return the last loss."""
    torch.manual_seed(0)
    layer = vr.VectorRouting(n_inp=n_inp, n_out=4, d_inp=D_INP, d_out=D_INP, device=mesh.device_type)
    layer = vr.distributed.shard_inputs(layer, mesh)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x_inp, target = own_vectors(n_inp, mesh), torch.eye(4, D_INP, device=mesh.device_type)
    is_first, group = mesh.get_local_rank() == 0, mesh.get_group()
    last = last_checkpoint(folder)
    if last is not None:
        state = state_of(layer, optimizer)
        dcp.load(state, checkpoint_id=last, process_group=group)
        model, optim = state["model"], state["optimizer"]
        set_state_dict(layer, optimizer, model_state_dict=model, optim_state_dict=optim)
    loss = torch.tensor(torch.nan)
    for step in range(int(last.name) + 1 if last else 1, steps + 1):
        optimizer.zero_grad()
        loss = nnf.mse_loss(layer(x_inp), nnf.layer_norm(target, target.shape[-1:]))
        loss.backward()
        optimizer.step()
        dcp.save(state_of(layer, optimizer), checkpoint_id=folder / str(step), process_group=group)
        if is_first:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
            if last is not None:
                shutil.rmtree(last)
        last = folder / str(step)
    # Each process has the credit of its own vectors. Gathered, the credit is [n_inp, 4].
    phi = vr.distributed.gather(layer.route(x_inp).phi, mesh)
    if is_first:
        print(f"most credit for the first output: vectors {phi[:, 0].topk(3).indices.tolist()} of {len(phi)}")
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--n-inp", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group()  # gloo on CPUs, NCCL on GPUs
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    train(init_device_mesh(kind, (dist.get_world_size(),)), options.folder, options.n_inp, options.steps)
    dist.barrier()
    dist.destroy_process_group()
    # If a gloo thread releases its last tensors after Python has ended, the process aborts. Wait for it.
    time.sleep(0.5)
