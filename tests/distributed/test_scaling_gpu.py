"""Streaming and sharding on a GPU: pinned memory, a copy stream, gloo and NCCL. Streaming also on the CPU."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vecroute as vr
from tests.distributed.test_sharding import Case, assert_as_one_process, sharded_outcome
from tests.helpers.ranks import Ranks, mesh_of
from tests.helpers.samples import with_noise
from tests.helpers.tolerance import assert_as_good, twin, upstream
from vecroute.distributed import own_rows, shard_inputs, stream, stream_credit
from vecroute.distributed.prefetch import prefetched
from vecroute.distributed.vectors import open_vectors

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
N_INP, D_INP, ROWS = 5003, 64, 700


@pytest.fixture
def x_inp() -> Tensor:
    return torch.randn(N_INP, D_INP).half()


@pytest.fixture
def memory_map(x_inp, tmp_path) -> np.memmap:
    """Write x_inp to a float16 file, after some other rows."""
    whole = np.concatenate([np.ones((3, D_INP), np.float16), x_inp.numpy()])
    np.save(tmp_path / "x.npy", whole)
    return np.load(tmp_path / "x.npy", mmap_mode="r")[3:]


def outcome(network: nn.Module, x_out: Tensor) -> dict[str, Tensor]:
    """Return x_out and the gradients of its network, on the CPU."""
    network.zero_grad()
    x_out.backward(upstream(x_out))
    grads = {  # 0 if there is none, for parameters that only a second iteration uses
        f"grad {name}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in network.named_parameters()
    }
    return {name: t.detach().cpu() for name, t in ({"x_out": x_out} | grads).items()}


@pytest.mark.parametrize("n_iters", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_streamed_is_as_good_as_the_reference(device, n_iters, x_inp, memory_map):
    layer = vr.VectorRouting(n_inp=None, n_out=7, d_inp=D_INP, d_out=48, n_iters=n_iters)
    layer = with_noise(layer).to(device)
    found = outcome(layer, stream(layer, memory_map, rows=ROWS))
    same_dtype, exact = twin(layer.cpu(), torch.float32), twin(layer.cpu(), torch.float64)
    reference, truth = outcome(same_dtype, same_dtype(x_inp.float())), outcome(exact, exact(x_inp.double()))
    assert len(found) == len(truth) == 15
    for name, expected in truth.items():
        assert_as_good(name, found[name], reference[name], expected)


@pytest.mark.parametrize("device", DEVICES)
def test_credit_of_chosen_outputs(device, x_inp, memory_map, tmp_path):
    layer = with_noise(vr.VectorRouting(n_inp=None, n_out=7, d_inp=D_INP, d_out=48)).to(device)
    x_out = stream_credit(layer, memory_map, tmp_path / "credit.npy", [4, 0], rows=ROWS)
    credit = torch.from_numpy(np.load(tmp_path / "credit.npy"))  # [i, 2]
    truth = twin(layer.cpu(), torch.float64).route(x_inp.double())
    reference = twin(layer.cpu(), torch.float32).route(x_inp.float())
    phi = [routed.phi[:, [4, 0]].detach() for routed in (reference, truth)]  # [i, 2] each
    assert_as_good("phi", credit, *phi)
    assert_as_good("x_out", x_out.cpu(), reference.x_out.detach(), truth.x_out.detach())


NETWORKS = {
    "layer": lambda: vr.VectorRouting(n_inp=None, n_out=5, d_inp=D_INP, d_out=32),
    "head": lambda: vr.RoutingHead(d_emb=D_INP, depth=1, n_cls=3, n_hid=4, d_hid=32).network,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("rows", [ROWS, None])
@pytest.mark.parametrize("device", DEVICES)
def test_trained_from_a_file_as_in_memory(device, rows, name, x_inp, memory_map):
    """Some steps of AdamW in float64 agree: on the device from the file, and on the CPU from memory."""
    in_memory = with_noise(NETWORKS[name]()).double()
    streamed = copy.deepcopy(in_memory).to(device)
    for network, forward in (
        (in_memory, lambda network: network(x_inp.double())),
        (streamed, lambda network: stream(network, memory_map, rows=rows)),
    ):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            forward(network).sin().sum().backward()
            optimizer.step()
    for (key, found), truth in zip(streamed.named_parameters(), in_memory.parameters(), strict=True):
        assert found.device.type == device
        assert (found.cpu() - truth).abs().max() < 1e-9, key


@pytest.mark.parametrize("source", ["file", "direct", "iterable"])
@pytest.mark.parametrize("device", DEVICES)
def test_chunks_come_whole_and_in_order(device, source, x_inp, memory_map):
    """There are many more chunks than buffers, and work on a chunk continues while the next are read."""
    vectors = open_vectors(list(x_inp.split(100)) if source == "iterable" else memory_map)
    if source == "direct":
        vectors.direct = True
    weight = torch.randn(D_INP, 3000, device=device)
    chunks = []
    for chunk in prefetched(vectors, 37, torch.device(device)):
        assert chunk.device.type == device
        busy = chunk.float() @ weight  # [rows, 3000]
        chunks.append(chunk.clone() + 0 * busy.sum().half().nan_to_num())
    assert torch.equal(torch.cat(chunks).cpu(), x_inp)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_of_reading_is_raised(device, x_inp):
    def broken():
        yield x_inp[:100]
        raise OSError("the disk is gone")

    layer = vr.VectorRouting(n_inp=None, n_out=2, d_inp=D_INP, d_out=2, device=device)
    with pytest.raises(OSError, match="the disk is gone"):
        stream(layer, open_vectors(broken, n_inp=200), rows=10)


# Several ranks

CASES = {
    "fixed": Case((6, 5), True, (2,), d_inp=16, d_out=16, input_mask=True, pair_mask=True),
    "variable": Case((40, 0), False, (2,), d_inp=16, d_out=16, n_iters=3, input_mask=True),
    "float32": Case((300, 17), False, d_inp=32, d_out=32, dtype=torch.float32),
}


@pytest.fixture(scope="module")
def ranks_on_one_gpu():
    pool = Ranks(2, "gloo", "cuda")
    yield pool
    pool.close()


@GPU
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_on_one_gpu(ranks_on_one_gpu, name):
    assert_as_one_process(CASES[name], ranks_on_one_gpu(2, sharded_outcome, CASES[name], "cuda"))


def streamed_outcome(folder: str, device: str) -> dict[str, np.ndarray]:
    """Return x_out and gradients. The rank's vectors come from a file, and their credit goes to another."""
    mesh = mesh_of(2)
    torch.manual_seed(1)
    network = with_noise(NETWORKS["head"]()).double()
    x_inp = torch.randn(999, D_INP)[own_rows(999, mesh)]  # [i, d]
    path = Path(folder, f"{mesh.get_local_rank()}.npy")
    np.save(path, x_inp.half().numpy())
    network = shard_inputs(network.to(device), mesh)
    found = outcome(network, stream(network, path, rows=100))
    stream_credit(network, path, path.with_name(f"credit-{path.name}"), [1], rows=100)
    return {name: t.numpy() for name, t in found.items()}


def assert_streams_are_added_up(results: list[dict[str, np.ndarray]], folder: Path) -> None:
    torch.manual_seed(1)
    network = with_noise(NETWORKS["head"]()).double()
    x_out, credit = network.route(torch.randn(999, D_INP).half().double())
    truth = outcome(network, x_out)
    for found in results:
        for name, expected in truth.items():
            assert np.abs(found[name] - expected.numpy()).max() < 1e-9, name
    of_ranks = np.concatenate([np.load(folder / f"credit-{rank}.npy") for rank in range(2)])  # [i, 1]
    assert np.abs(of_ranks[:, 0] - credit.column(1).detach().numpy()).max() < 1e-5


def test_each_rank_streams_its_own_file(ranks, tmp_path):
    assert_streams_are_added_up(ranks(2, streamed_outcome, str(tmp_path), "cpu"), tmp_path)


@GPU
def test_each_rank_streams_its_own_file_on_one_gpu(ranks_on_one_gpu, tmp_path):
    assert_streams_are_added_up(ranks_on_one_gpu(2, streamed_outcome, str(tmp_path), "cuda"), tmp_path)


@GPU
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
def test_nccl(fixed):
    """Use one rank, since NCCL does not let two ranks share a GPU."""
    case = CASES["fixed"]._replace(sizes=(11,), fixed=fixed)
    pool = Ranks(1, "nccl", "cuda")
    try:
        assert_as_one_process(case, pool(1, sharded_outcome, case, "cuda"))
    finally:
        pool.close()
