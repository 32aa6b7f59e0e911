"""Out of core: what is streamed from files is what is routed in memory, and damaged files are told."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vecroute as vr
from vecroute.distributed import files, open_vectors, stream, stream_credit
from vecroute.distributed.files import FileVectors, Segment, aligned
from vecroute.distributed.prefetch import prefetched

N_INP, D_INP = 37, 6
CPU = torch.device("cpu")


def vectors(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(N_INP, D_INP, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        dtype
    )


def as_npy(folder: Path, x: Tensor):
    np.save(folder / "x.npy", x.numpy())
    return folder / "x.npy"


def as_memmap(folder: Path, x: Tensor):
    """The later rows of a larger file, so that offsets count."""
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
    network = NETWORKS[name]().double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return network


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


# Reading


def test_reading_goes_on_while_a_chunk_is_used():
    """The second chunk is asked for before the first is done with; without a thread this would not end."""
    asked = threading.Event()

    def chunks():
        yield torch.zeros(1, 2)
        asked.set()
        yield torch.ones(1, 2)

    seen = []
    for chunk in prefetched(open_vectors(chunks, n_inp=2), 10, CPU):
        assert asked.wait(10)
        seen.append(chunk.sum().item())
    assert seen == [0, 2]


def test_buffers_are_not_filled_while_they_are_used(tmp_path):
    x = vectors()
    source = open_vectors(as_npy(tmp_path, x))
    parts = [chunk.clone() for chunk in prefetched(source, 4, CPU)]
    assert torch.equal(torch.cat(parts), x)


def test_a_reader_that_is_left_alone_ends(tmp_path):
    before = threading.active_count()
    chunks = prefetched(open_vectors(as_npy(tmp_path, vectors())), 1, CPU)
    next(chunks)
    chunks.close()
    assert threading.active_count() == before


# Past the system's cache


@pytest.fixture
def flags(monkeypatch) -> list[int]:
    """With which flags files are opened."""
    seen, os_open = [], os.open

    def counting(path, flags, *more, **options):
        seen.append(flags)
        return os_open(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", counting)
    return seen


@pytest.mark.parametrize("memory", [N_INP * D_INP * 16 - 1, N_INP * D_INP * 16])
@pytest.mark.parametrize("source", ["npy", "memmap", "raw", "safetensors"])
def test_vectors_of_more_than_half_the_memory_are_read_directly(source, memory, flags, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "memory_bytes", lambda: memory)
    x = vectors()
    opened = open_vectors(SOURCES[source](tmp_path, x))
    flags.clear()
    assert torch.equal(torch.cat([chunk.clone() for chunk in opened.chunks(5)]), x)
    assert flags
    assert all(bool(flag & os.O_DIRECT) == (memory < N_INP * D_INP * 16) for flag in flags)


def test_numbers_that_do_not_lie_at_their_multiples_are_not_read_directly(flags, tmp_path):
    x = vectors()
    (tmp_path / "x.raw").write_bytes(b"xyz" + x.numpy().tobytes())
    odd = FileVectors([Segment(tmp_path / "x.raw", 3, N_INP)], D_INP, torch.float64)
    odd.direct = True
    flags.clear()
    assert torch.equal(torch.cat([chunk.clone() for chunk in odd.chunks(5)]), x)
    assert not any(flag & os.O_DIRECT for flag in flags)


def test_a_file_system_that_cannot_read_directly(tmp_path, monkeypatch):
    x, os_open = vectors(), os.open

    def refusing(path, flags, *more, **options):
        if flags & os.O_DIRECT:
            raise OSError("Invalid argument")
        return os_open(path, flags, *more, **options)

    opened = open_vectors(as_npy(tmp_path, x))
    opened.direct = True
    monkeypatch.setattr(os, "open", refusing)
    assert torch.equal(torch.cat([chunk.clone() for chunk in opened.chunks(5)]), x)


@pytest.mark.parametrize("direct", [False, True])
def test_bytes_of_any_size_and_place(direct, tmp_path):
    """Up to the end of the file, and no further."""
    data = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)
    path = tmp_path / "x.raw"
    data.tofile(path)
    for begin, size in ((0, 1), (1, 4095), (5000, 4096), (3, 4097), (100, 50_000), (4096, 65_904)):
        buffer = aligned(size + 2 * files.BLOCK, False).fill_(7)
        found = files.read(path, files.stamp(path), begin, size, buffer, direct)
        assert np.array_equal(found.numpy(), data[begin : begin + size]), (begin, size)
    with pytest.raises(ValueError, match="has become shorter while it was read: it ends at byte 70000"):
        files.read(path, files.stamp(path), 60_000, 10_001, aligned(20_000, False), direct)


# Damaged and wrong input


def cut(path: Path, n: int) -> Path:
    os.truncate(path, path.stat().st_size - n)
    return path


def overwritten(path: Path, data: bytes) -> Path:
    with open(path, "r+b") as file:
        file.write(data)
    return path


def mixed(folder: Path, other: Tensor) -> list[Path]:
    """Two shards, the second of them other."""
    save_file({"x": vectors()}, folder / "a.safetensors")
    save_file({"x": other}, folder / "b.safetensors")
    return [folder / "a.safetensors", folder / "b.safetensors"]


def parquet_of(folder: Path, lists: list) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"vector": lists, "number": [1.0] * len(lists)}), folder / "x.parquet")
    return folder / "x.parquet"


WRONG = {
    "missing": (lambda f: f / "none.npy", "there is no file"),
    "cut npy": (lambda f: cut(as_npy(f, vectors()), 5), "is cut short"),
    "no npy": (lambda f: overwritten(as_npy(f, vectors()), b"nonsense"), "no .npy file, or damaged"),
    "integers": (lambda f: as_npy(f, torch.ones(3, D_INP, dtype=torch.int64)), "float16, float32 or float64"),
    "columns": (lambda f: as_npy(f, vectors().T), "fortran_order"),
    "three axes": (lambda f: as_npy(f, torch.ones(2, 3, D_INP)), r"holds \[2, 3, 6\]"),
    "cut safetensors": (lambda f: cut(mixed(f, vectors())[0], 5), "is cut short"),
    "no safetensors": (lambda f: overwritten(mixed(f, vectors())[0], b"\xff" * 20), "or damaged"),
    "shards of other size": (lambda f: mixed(f, vectors()[:, :2].clone()), r"holds \[37, 2\]"),
    "shards of other dtype": (lambda f: mixed(f, vectors().float()), "holds .* of torch.float32"),
    "safetensors of integers": (
        lambda f: mixed(f, torch.ones(3, D_INP, dtype=torch.int32))[1],
        "tensor 'x' must be one of F64, F32, F16, BF16, is I32",
    ),
    "cut parquet": (lambda f: cut(as_parquet(f, vectors())[0], 20), "cannot be read"),
    "lists of many lengths": (
        lambda f: parquet_of(f, [[1.0] * 6, [1.0] * 5, [1.0] * 7]),
        "lists of one length",
    ),
    "d_inp": (lambda f: as_npy(f, torch.ones(3, 5)), r"d_inp=6\], got d_inp=5"),
    "raw": (lambda f: as_raw(f, vectors()).segments[0].path, "or d_inp and dtype be given"),
    "chunks of other size": (lambda f: [vectors(), vectors()[:, :3]], "chunks must all be"),
    "no vectors": (lambda f: as_npy(f, torch.ones(0, D_INP)), "at least one vector"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, tmp_path):
    source, message = WRONG[case]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        stream(make("layer"), source(tmp_path))


def test_an_iterator_can_be_read_only_once():
    with pytest.raises(TypeError, match="iterated again and again, got list_iterator"):
        stream(make("layer"), iter([vectors()]))


def test_an_iterable_that_gives_less_the_second_time():
    left = [3, 3, 2]
    source = open_vectors(lambda: iter([vectors()] * left.pop(0)))
    with pytest.raises(ValueError, match="n_inp=111 vectors in every pass, gave 74"):
        stream(make("layer"), source)


@pytest.mark.parametrize("when", ["between passes", "within a pass"])
def test_a_file_that_shrinks(when, tmp_path):
    path = as_npy(tmp_path, vectors())
    chunks = open_vectors(path).chunks(4)
    if when == "within a pass":
        next(chunks)
    cut(path, N_INP * D_INP * 4)
    with pytest.raises(ValueError, match=r"x\.npy has changed since it was opened"):
        list(chunks)


def test_a_file_that_shrinks_within_a_read(tmp_path, monkeypatch):
    """After the file was looked at; the reads before it came to an end."""
    path = as_npy(tmp_path, vectors())
    source, before = open_vectors(path), files.stamp(path)
    monkeypatch.setattr(files, "stamp", lambda _: before)
    cut(path, N_INP * D_INP * 4)
    with pytest.raises(ValueError, match="has become shorter while it was read"):
        stream(make("layer"), source, rows=4)


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
    with pytest.raises(ValueError, match=r"outputs must be some of 0, \.\.\., n_out - 1 = 3"):
        stream_credit(make("layer"), vectors(), tmp_path / "credit.npy", outputs)
