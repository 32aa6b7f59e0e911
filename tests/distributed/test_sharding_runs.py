"""Sharded runs: bytes sent, combination with data parallelism, checkpoints, and ranks that fail."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import vecroute as vr
from tests.distributed.test_sharding import Case, greatest, make, make_network, own_part, rows_of, whole
from tests.helpers.ranks import MESHES, Ranks, mesh_of
from vecroute.distributed import gather, own_rows, shard_inputs, stream, stream_credit

# Bytes sent


def bytes_sent(case: Case) -> list[tuple[str, int]]:
    """Return the bytes of each all-reduce message of a rank in one step."""
    layer, x_inp, _ = make(case)
    layer = shard_inputs(layer, mesh_of(2))
    sent, all_reduce = [], dist.all_reduce

    def counting(message: Tensor, *args, **kwargs):
        sent.append(message.nbytes)
        return all_reduce(message, *args, **kwargs)

    dist.all_reduce = counting
    try:
        x_out = layer(x_inp[..., rows_of(case, mesh_of(2)), :])
        forward = sum(sent)
        x_out.sum().backward()
    finally:
        dist.all_reduce = all_reduce
    return [forward, sum(sent) - forward]


def model(case: Case) -> list[int]:
    """Return the bytes that docs/scaling.md predicts for a step, forward and backward."""
    b, j, d, size = int(np.prod(case.batch)), case.n_out, case.d_inp, case.dtype.itemsize
    forward = 24 + 8 * b + case.n_iters * size * b * j * (d + 1)
    shared = 0 if case.fixed else size * (d + 1 + 2 * j + 2 * j * (d + 1))
    return [forward, (case.n_iters - 1) * size * b * j * d + shared]


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_bytes_do_not_depend_on_n_inp(ranks, fixed, n_iters):
    for n in (2, 500):
        case = Case((n, n), fixed, (3,), n_iters=n_iters, dtype=torch.float32)
        for sent in ranks(2, bytes_sent, case):
            assert sent == model(case)


# Combination with data parallelism


def two_dimensions(kind: str, fixed: bool) -> dict[str, np.ndarray]:
    """Return the gradients of a layer on a 2 x 2 mesh: samples over one dimension, inputs over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    case = Case((6, 5), fixed, batch=(4,))
    layer, x_inp, _ = make(case)
    layer = shard_inputs(layer, mesh["sp"])
    samples = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    if kind == "ddp":
        module = DistributedDataParallel(layer, device_mesh=mesh["dp"])
    else:
        module = fully_shard(layer, mesh=mesh["dp"])
    # Take the parameters before the call, as an optimizer would: DDP replaces DTensors by local parts then.
    parameters = dict(layer.named_parameters())
    module(x_inp[samples, rows_of(case, mesh["sp"])]).sin().mean().backward()
    return {name: whole(parameter.grad).numpy() for name, parameter in parameters.items()}


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_beside_data_parallelism(ranks, kind, fixed):
    layer, x_inp, _ = make(Case((6, 5), fixed, batch=(4,)))
    layer(x_inp).sin().mean().backward()
    with_i = ("W_A", "B_A", "W_S", "B_S", "beta_use", "beta_ign") if fixed and kind == "ddp" else ()
    results = ranks(4, two_dimensions, kind, fixed)
    for rank, found in enumerate(results):
        for name, parameter in layer.named_parameters():
            expected = parameter.grad.numpy()
            if name in with_i:  # DDP holds the local part of a DTensor
                expected = expected[:6] if rank % 2 == 0 else expected[6:]
            assert greatest(found[name].reshape(expected.shape) - expected) < 1e-12, name


# Checkpoints


def run(
    network: nn.Module, x_inp: Tensor, mask: Tensor, steps: int, folder: str = "", group=None, die: int = -1
):
    """Train from the last checkpoint in the folder, and save every step. A rank may die in a given step."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    done = 0
    if folder and Path(folder, ".metadata").exists():
        state = state_of(network, optimizer, done)
        dcp.load(state, checkpoint_id=folder, process_group=group)
        set_state_dict(
            network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        done = int(state["done"])
    for step in range(done, steps):
        optimizer.zero_grad()
        x_out = network(x_inp, mask)
        if step == die:
            x_out.register_hook(lambda _: os._exit(1))
        x_out.sin().sum().backward()
        optimizer.step()
        if folder:
            dcp.save(state_of(network, optimizer, step + 1), checkpoint_id=folder, process_group=group)
    return {name: whole(p).detach().numpy() for name, p in network.named_parameters()}


def state_of(network: nn.Module, optimizer: torch.optim.Optimizer, done: int) -> dict:
    for group in optimizer.param_groups:  # the optimizer creates its state only in the first step
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    model, optim = get_state_dict(network, optimizer)
    return {"model": model, "optimizer": optim, "done": torch.tensor(done)}


def run_sharded(name: str, n: int, steps: int, folder: str, dying_rank: int = -1):
    network, x_inp, mask = own_part(name, tuple(len(range(9)[k::n]) for k in range(n)))
    mesh = mesh_of(n)
    die = steps - 1 if mesh.get_local_rank() == dying_rank else -1
    return run(network, x_inp, mask, steps, folder, mesh.get_group(), die)


@pytest.mark.parametrize("name", ["head", "fixed"])
def test_checkpoints_load_on_another_number_of_ranks(ranks, name, tmp_path):
    truth = run(*make_network(name), 6)
    for n, steps in ((3, 2), (2, 4), (4, 6)):
        results = ranks(n, run_sharded, name, n, steps, str(tmp_path / "checkpoint"))
    for found in results:
        for key, expected in truth.items():
            assert greatest(found[key] - expected) < 1e-10, key


def test_a_rank_that_dies_ends_the_others_and_the_run_goes_on_with_fewer(ranks, tmp_path):
    folder = str(tmp_path / "checkpoint")
    mortal = Ranks(3)
    try:
        mortal(3, run_sharded, "fixed", 3, 2, folder)
        first, second, third = mortal.outcomes(3, run_sharded, "fixed", 3, 4, folder, 1)
    finally:
        mortal.close()
    assert second[1][0] == "EOFError"
    for fine, told in (first, third):
        assert not fine
        assert told[0] == "RuntimeError"
        assert "a rank ended, or did not answer within the time-out of the group" in told[1]
        assert "start again from the last checkpoint" in told[1]
    truth = run(*make_network("fixed"), 5)
    for found in ranks(2, run_sharded, "fixed", 2, 5, folder):
        assert all(greatest(found[key] - truth[key]) < 1e-10 for key in truth)


# Out of core on several ranks


def stream_sharded(folder: str, n: int, broken: int = -1):
    mesh = mesh_of(n)
    network, x_inp, _ = make_network("branches")
    network = vr.Sequential(network[0], network[1].branches[0])
    path = Path(folder, f"{mesh.get_local_rank()}.npy")
    np.save(path, x_inp[0, own_rows(9, mesh)].numpy())
    if mesh.get_local_rank() == broken:
        os.truncate(path, path.stat().st_size - 8)
    shard_inputs(network, mesh)
    stream(network, path, rows=2).sin().sum().backward()
    stream_credit(network, path, Path(folder, f"credit-{mesh.get_local_rank()}.npy"), [1], rows=2)
    return {name: p.grad.numpy() for name, p in network.named_parameters()}


def test_each_rank_streams_its_own_vectors(ranks, tmp_path):
    network, x_inp, _ = make_network("branches")
    network = vr.Sequential(network[0], network[1].branches[0])
    x_out, credit = network.route(x_inp[0])
    x_out.sin().sum().backward()
    for found in ranks(4, stream_sharded, str(tmp_path), 4):
        for name, parameter in network.named_parameters():
            assert greatest(found[name] - parameter.grad.numpy()) < 1e-12, name
    credits = [np.load(tmp_path / f"credit-{rank}.npy") for rank in range(4)]
    assert greatest(np.concatenate(credits)[:, 0] - credit.column(1).detach().numpy()) < 1e-6


def test_a_damaged_file_on_one_rank(ranks, tmp_path):
    messages = ranks.messages(3, stream_sharded, str(tmp_path), 3, 1)
    assert all("1.npy is cut short" in message for message in messages)
    assert "another rank failed: rank 1" in messages[0]


def stream_with(change: str, folder: str) -> None:
    """Stream with a wrong argument on rank 1 only. The network does not fix d_inp."""
    mesh = mesh_of(3)
    network = vr.Sequential(
        vr.PerVector(nn.LayerNorm(4)), vr.VectorRouting(n_inp=None, n_out=2, d_inp=4, d_out=2)
    )
    shard_inputs(network, mesh)
    x_inp, path, outputs = torch.ones(5, 4), Path(folder, f"{mesh.get_local_rank()}.npy"), [0, 1]
    if mesh.get_local_rank() == 1:
        x_inp = {"d_inp": x_inp[:, :3], "dtype": x_inp.half()}.get(change, x_inp)
        path = path.parent / "none" / path.name if change == "folder" else path
        outputs = [2] if change == "outputs" else outputs
    stream_credit(network, [x_inp], path, outputs)


STREAMS_REFUSED = {
    "d_inp": "d_inp must be the same on every rank, got 4 on rank 0, 3 on rank 1, 4 on rank 2",
    "dtype": "dtype of x_inp must be the same on every rank, got torch.float32 on rank 0, torch.float16 on",
    "folder": "No such file or directory",
    "outputs": "outputs must be ints from 0 to n_out - 1 = 1, got [2]",
}


@pytest.mark.parametrize("change", STREAMS_REFUSED)
def test_what_is_wrong_with_the_stream_of_one_rank(ranks, change, tmp_path):
    messages = ranks.messages(3, stream_with, change, str(tmp_path))
    assert all(STREAMS_REFUSED[change] in message for message in messages), messages
    assert list(tmp_path.iterdir()) == []


# Errors that every rank raises


def call_with(change: str) -> None:
    """Call a layer with a wrong argument on rank 1 only."""
    mesh = mesh_of(3)
    wrong = mesh.get_local_rank() == 1
    fixed = change == "rows of a fixed length"
    layer, x_inp, _ = make(Case((9,), fixed))
    if change == "parameters":
        layer = layer.float() if wrong else layer
    layer = shard_inputs(layer, mesh)
    x_inp = x_inp[own_rows(9, mesh)]  # [3, d]
    options = {}
    if wrong:
        x_inp = {
            "d_inp": x_inp[:, :3],
            "dtype": x_inp.float(),
            "batch": x_inp[None],
            "no tensor": None,
            "gradient": x_inp,
        }.get(change, x_inp)
        if fixed:
            x_inp = x_inp[:2]
        if change == "mask":
            options["input_mask"] = torch.ones(7, dtype=torch.bool)
        if change == "phi_out":
            options["phi_out"] = torch.empty(3, 99)
    with torch.set_grad_enabled(not (wrong and change == "gradient")):
        layer.route(x_inp, **options)


REFUSED = {
    "d_inp": "x_inp must be [..., n_inp, d_inp=5], got [3, 3]",
    "dtype": "x_inp must have the dtype of the layer, torch.float64, got torch.float32",
    "batch": "the batch must be the same on every rank, got [] on rank 0, [1] on rank 1, [] on rank 2",
    "no tensor": "x_inp must be a floating-point tensor",
    "gradient": "whether there is a gradient must be the same on every rank",
    "rows of a fixed length": "x_inp must be [..., n_inp=3, d_inp=5], got [2, 5]",
    "mask": "input_mask must be [..., n_inp=3]",
    "phi_out": "phi_out must be a floating-point tensor",
    "parameters": "parameter W_A must be the same on every rank",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_wrong_on_one_rank_is_told_on_all(ranks, change):
    messages = ranks.messages(3, call_with, change)
    assert all(REFUSED[change] in message for message in messages), messages
    if change not in ("batch", "gradient", "parameters"):
        assert "another rank failed: rank 1" in messages[0]


def network_with(change: str) -> None:
    network, x_inp, mask = own_part("head" if change == "d_emb" else "branches", (3, 3, 3))
    if mesh_of(3).get_local_rank() == 1:
        x_inp, mask = {"d_emb": (x_inp[..., :4], mask), "mask": (x_inp, mask[:, :1])}[change]
    network(x_inp, mask)


@pytest.mark.parametrize(
    ("change", "message"), [("d_emb", "hidden_states must be"), ("mask", "input_mask must be")]
)
def test_what_is_wrong_before_the_routing(ranks, change, message):
    messages = ranks.messages(3, network_with, change)
    assert all(message in each for each in messages), messages


def refused(kind: str) -> None:
    layer, mesh = vr.VectorRouting(n_inp=None, n_out=2, d_inp=3, d_out=2), MESHES.get(2)
    if kind == "two dimensions":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    elif kind == "too large":
        mesh = init_device_mesh("cpu", (5,))
    elif kind == "no mesh":
        mesh = 2
    elif kind == "residual":
        layer = vr.Residual(vr.VectorRouting(n_inp=4, n_out=4, d_inp=3, d_out=3))
    elif kind == "per vector":
        layer = vr.Concat(vr.PerVector(nn.Tanh()), layer)
    elif kind == "twice":
        shard_inputs(layer, mesh)
    elif kind == "reference":
        layer.implementation = "reference"
    elif kind == "trace":
        shard_inputs(layer, mesh).trace(torch.ones(2, 3))
    elif kind == "update":
        shard_inputs(layer, mesh).update(torch.ones(2, 3), None)
    elif kind == "gather":
        gather([1], mesh)
    shard_inputs(layer, mesh)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "two dimensions",
            "ValueError: mesh must have one dimension, such as mesh['dp'], got 2 of sizes [2, 2]",
        ),
        ("too large", "RuntimeError: Mesh should not be bigger than default world size 4, but found 5 ranks"),
        ("no mesh", "TypeError: mesh must be a DeviceMesh or a process group, got int"),
        ("residual", "TypeError: inputs cannot be sharded: module is a Residual"),
        ("per vector", "ValueError: inputs cannot be sharded: module.0 joins vectors before they are routed"),
        ("twice", "ValueError: the inputs of module are already sharded"),
        ("reference", "ValueError: inputs cannot be sharded: module has implementation='reference'"),
        ("trace", "ValueError: trace needs all inputs"),
        ("update", "ValueError: update needs all inputs"),
        ("gather", "TypeError: value must be a Credit, Contributions or a tensor, got list"),
    ],
)
def test_what_cannot_be_sharded(ranks, kind, message):
    n = 4 if kind in ("two dimensions", "too large") else 2
    assert all(message in each for each in ranks.messages(n, refused, kind))


def outside() -> None:
    shard_inputs(
        vr.VectorRouting(n_inp=None, n_out=2, d_inp=3, d_out=2),
        torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1]),
    )


def test_a_rank_outside_of_the_mesh(ranks):
    results = ranks.outcomes(4, outside)
    assert [fine for fine, _ in results] == [True, True, False, False]
    assert "mesh must contain this rank, 3, got the ranks [0, 1]" in results[3][1][1]


def all_start_from_the_first() -> list[np.ndarray]:
    torch.manual_seed(dist.get_rank())
    layer = shard_inputs(vr.VectorRouting(n_inp=4, n_out=2, d_inp=3, d_out=2), mesh_of(3).get_group())
    return [whole(p).detach().numpy() for p in layer.parameters()]


def test_all_ranks_start_from_the_parameters_of_the_first(ranks):
    torch.manual_seed(0)
    truth = vr.VectorRouting(n_inp=4, n_out=2, d_inp=3, d_out=2)
    for found in ranks(3, all_start_from_the_first):
        assert all(
            np.array_equal(a, b.detach().numpy()) for a, b in zip(found, truth.parameters(), strict=True)
        )
