"""Out-of-core routing: streaming from files gives the same results as routing in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.samples import with_noise
from vecroute.distributed import open_vectors, stream, stream_credit

N_INP, D_INP = 37, 6


def vectors(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N_INP, D_INP, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        dtype
    )


def as_npy(folder: Path, x: Tensor):
    np.save(folder / "x.npy", x.numpy())
    return folder / "x.npy"


def as_memmap(folder: Path, x: Tensor):
    """Return x as the last rows of a larger file, to test offsets."""
    more = np.concatenate([np.zeros((1000, D_INP)), x.numpy()])
    more.tofile(folder / "x.bin")
    whole = np.memmap(folder / "x.bin", np.float64, "r", shape=more.shape)
    return whole[1000:]


def as_raw(folder: Path, x: Tensor):
    x.numpy().tofile(folder / "x.raw")
    return open_vectors(folder / "x.raw", d_inp=D_INP, dtype=x.dtype)


def as_safetensors(folder: Path, x: Tensor):
    for k, part in enumerate(x.split(15)):
        save_file({"hidden": part.clone(), "other": torch.zeros(3)}, folder / f"{k}.safetensors")
    return open_vectors(sorted(folder.glob("*.safetensors")), name="hidden")


def as_parquet(folder: Path, x: Tensor):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for k, part in enumerate(x.split(20)):
        lists = pa.FixedSizeListArray.from_arrays(pa.array(part.flatten().numpy()), D_INP)
        table = pa.table({"label": list(range(len(part))), "vector": lists})
        pq.write_table(table, folder / f"{k}.parquet", row_group_size=7)
    return sorted(folder.glob("*.parquet"))


def as_iterable(folder: Path, x: Tensor):
    return list(x.split(11))


def as_function(folder: Path, x: Tensor):
    return lambda: iter(x.numpy()[k : k + 10] for k in range(0, N_INP, 10))


SOURCES = {f.__name__.removeprefix("as_"): f for f in (
    as_npy, as_memmap, as_raw, as_safetensors, as_parquet, as_iterable, as_function
)}  # fmt: skip

NETWORKS = {
    "one iteration": lambda: vr.VectorRouting(n_inp=None, n_out=4, d_inp=D_INP, d_out=5, n_iters=1),
    "layer": lambda: vr.VectorRouting(n_inp=None, n_out=4, d_inp=D_INP, d_out=5, n_iters=3),
    "head": lambda: vr.RoutingHead(d_emb=D_INP, depth=1, n_cls=3, n_hid=4, d_hid=8).network,
    "frozen": lambda: vr.Sequential(
        vr.PerVector(nn.Linear(D_INP, 4).requires_grad_(False)),
        vr.VectorRouting(n_inp=None, n_out=4, d_inp=4, d_out=5, normalize=False),
    ),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(2)
    return with_noise(NETWORKS[name]().double())


def outcome(network: nn.Module, x_out: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    x_out.sin().mul(torch.arange(x_out.numel()).view(x_out.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in network.named_parameters() if p.requires_grad}
    return {"x_out": x_out.detach()} | grads


def assert_same(found: dict[str, Tensor], truth: dict[str, Tensor], limit: float = 1e-12) -> None:
    assert found.keys() == truth.keys()
    for name, expected in truth.items():
        assert (found[name] - expected).abs().max() <= limit * max(1, expected.abs().max()), name


@pytest.mark.parametrize("source", SOURCES)
def test_every_source(source, tmp_path):
    network, x = make("layer"), vectors()
    truth = outcome(network, network(x))
    assert_same(outcome(network, stream(network, SOURCES[source](tmp_path, x), rows=8)), truth)


@pytest.mark.parametrize("rows", [1, 8, 100, None])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_and_chunk(name, rows, tmp_path):
    network, x = make(name), vectors()
    truth = outcome(network, network(x))
    assert_same(outcome(network, stream(network, as_npy(tmp_path, x), rows=rows)), truth)


def test_half_precision_on_disk_is_computed_in_the_dtype_of_the_layer(tmp_path):
    network, x = make("layer").float(), vectors(torch.float16)
    truth = outcome(network, network(x.float()))
    assert_same(outcome(network, stream(network, as_npy(tmp_path, x), rows=9)), truth, 1e-5)


@pytest.mark.parametrize("name", ["layer", "head"])
def test_autocast_is_as_in_memory(name, tmp_path):
    network, x = make(name).float(), vectors(torch.float32)
    path = as_npy(tmp_path, x)
    with torch.autocast("cpu", torch.bfloat16):
        truth, found = network(x), stream(network, path, rows=9)
    assert (found - truth).abs().max() < 0.02 * truth.abs().max()
    assert not torch.equal(found, stream(network, path, rows=9))
    assert outcome(network, found).keys() == {"x_out", *(key for key, _ in network.named_parameters())}


@pytest.mark.parametrize("name", ["layer", "head"])
def test_credit_goes_to_a_file(name, tmp_path):
    network, x = make(name), vectors()
    x_out, phi = network.route(x)
    phi = phi if isinstance(phi, Tensor) else phi.dense()
    found = stream_credit(network, as_npy(tmp_path, x), tmp_path / "credit.npy", [2, 0], rows=10)
    credit = np.load(tmp_path / "credit.npy", mmap_mode="r")
    assert credit.shape == (N_INP, 2)
    assert np.abs(credit - phi[:, [2, 0]].detach().numpy()).max() < 1e-6
    assert (found - x_out).abs().max() < 1e-12


def test_credit_is_whole_or_not_there(tmp_path):
    def broken():
        yield vectors()[:10]
        raise OSError("the disk is gone")

    source = open_vectors(broken, n_inp=20)
    with pytest.raises(OSError, match="the disk is gone"):
        stream_credit(make("one iteration"), source, tmp_path / "credit.npy", [0])
    assert list(tmp_path.iterdir()) == []


def test_training_from_a_file_is_training_in_memory(tmp_path):
    x = vectors()
    path = as_npy(tmp_path, x)
    trained = []
    for forward in (lambda network: network(x), lambda network: stream(network, path, rows=16)):
        network = make("head")
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            forward(network).square().sum().backward()
            optimizer.step()
        trained.append(dict(network.named_parameters()))
    assert_same(trained[1], trained[0], 1e-10)


# Errors


@pytest.mark.parametrize(
    "network",
    [
        vr.VectorRouting(n_inp=3, n_out=2, d_inp=D_INP, d_out=2),
        vr.VectorRouting(n_inp=None, n_out=2, d_inp=D_INP, d_out=2, implementation="reference"),
        nn.Linear(D_INP, 2),
        vr.Sequential(vr.PerVector(nn.Linear(D_INP, 2))),
    ],
    ids=["fixed", "reference", "no routing", "no routing in it"],
)
def test_networks_that_cannot_be_streamed(network):
    with pytest.raises(TypeError, match="network must be a VectorRouting with n_inp=None"):
        stream(network, vectors())


@pytest.mark.parametrize("outputs", [[], [4], [-1]])
def test_outputs_that_are_not_there(outputs, tmp_path):
    with pytest.raises(ValueError, match=r"outputs must be ints from 0 to n_out - 1 = 3"):
        stream_credit(make("layer"), vectors(), tmp_path / "credit.npy", outputs)
