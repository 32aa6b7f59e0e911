"""Inputs sharded over 1 to 4 gloo processes: all results equal the results of one process."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.ranks import mesh_of
from tests.helpers.samples import with_noise
from vecroute.distributed import gather, own_rows, shard_inputs

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Case(NamedTuple):
    """A layer and its inputs. With variable length, ``sizes`` are the numbers of rows of the ranks."""

    sizes: tuple[int, ...]
    fixed: bool = False
    batch: tuple[int, ...] = ()
    n_out: int = 4
    d_inp: int = 5
    d_out: int = 3
    n_iters: int = 2
    input_mask: bool = False
    pair_mask: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def n_inp(self) -> int:
        return sum(self.sizes)


def make(case: Case) -> tuple[vr.VectorRouting, Tensor, dict[str, Tensor]]:
    """Return the layer, all inputs [..., i, d] and masks. Every rank gets the same ones."""
    torch.manual_seed(case.n_inp)
    layer = vr.VectorRouting(
        n_inp=case.n_inp if case.fixed else None,
        n_out=case.n_out,
        d_inp=case.d_inp,
        d_out=case.d_out,
        n_iters=case.n_iters,
        dtype=case.dtype,
    )
    x_inp = torch.randn(*case.batch, case.n_inp, case.d_inp, dtype=case.dtype)  # [..., i, d]
    masks = {}
    if case.input_mask:
        masks["input_mask"] = torch.rand(*case.batch, case.n_inp) > 0.3  # [..., i]
    if case.pair_mask:
        masks["pair_mask"] = torch.rand(*case.batch, case.n_inp, case.n_out) > 0.3  # [..., i, j]
    return with_noise(layer), x_inp, masks


def rows_of(case: Case, mesh) -> slice:
    if case.fixed:
        return own_rows(case.n_inp, mesh)
    start = sum(case.sizes[: mesh.get_local_rank()])
    return slice(start, start + case.sizes[mesh.get_local_rank()])


def outcome(layer: nn.Module, x_inp: Tensor, masks: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Return x_out, phi and every gradient."""
    layer.zero_grad()
    x_inp = x_inp.clone().requires_grad_()  # [..., i, d]
    routed = layer.route(x_inp, **masks)
    upstream = torch.linspace(-1, 2, routed.x_out.numel(), dtype=x_inp.dtype).sin().to(x_inp.device)
    (routed.x_out * upstream.view(routed.x_out.shape)).sum().backward()
    phi = routed.phi if isinstance(routed.phi, Tensor) else routed.phi.dense()
    found = {"x_out": routed.x_out, "phi": phi, "grad x_inp": x_inp.grad}
    found |= {f"grad {name}": p.grad for name, p in layer.named_parameters()}
    return {name: local(t).detach().cpu().numpy() for name, t in found.items()}


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def sharded_outcome(case: Case, device: str = "cpu") -> dict[str, np.ndarray]:
    mesh = mesh_of(len(case.sizes))
    layer, x_inp, masks = make(case)
    rows = rows_of(case, mesh)
    axis = {"input_mask": -1, "pair_mask": -2}
    own = {name: mask.narrow(axis[name], rows.start, rows.stop - rows.start) for name, mask in masks.items()}
    own = {name: mask.to(device) for name, mask in own.items()}
    return outcome(shard_inputs(layer.to(device), mesh), x_inp[..., rows, :].to(device), own)


def joined(name: str, parts: list[np.ndarray], case: Case) -> list[np.ndarray]:
    """Return the values to compare with one process: concatenated rows, or the whole value of each rank."""
    if name in ("phi", "grad x_inp"):
        return [np.concatenate(parts, -2)]
    with_i = name.removeprefix("grad ") in ("W_A", "B_A", "W_S", "B_S", "beta_use", "beta_ign")
    return [np.concatenate(parts)] if case.fixed and with_i else parts


def assert_as_one_process(case: Case, found: list[dict[str, np.ndarray]]) -> None:
    """Compare with one process: to 1e-12 in float64, in float32 to 1e-6 plus 4 times its rounding error."""
    layer, x_inp, masks = make(case)
    truth = outcome(layer, x_inp, masks)
    exact = truth if case.dtype == torch.float64 else outcome(layer.double(), x_inp.double(), masks)
    assert found[0].keys() == truth.keys()
    for name, expected in truth.items():
        for got in joined(name, [part[name] for part in found], case):
            assert got.shape == expected.shape, f"{name}: {got.shape}, not {expected.shape}"
            allowed = TOLERANCE[case.dtype] * max(1, greatest(expected)) + 4 * greatest(
                exact[name] - expected
            )
            error = greatest(got - exact[name])
            assert error <= allowed, f"{name}: off by {error:.2e}, allowed {allowed:.2e}, in {case}"


def greatest(x: np.ndarray) -> float:
    return np.abs(x).max(initial=0.0)


cases = st.builds(
    Case,
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple).filter(sum),
    fixed=st.booleans(),
    batch=st.sampled_from([(), (1,), (2, 3)]),
    n_out=st.integers(1, 5),
    d_inp=st.integers(1, 6),
    d_out=st.integers(1, 4),
    n_iters=st.integers(1, 3),
    input_mask=st.booleans(),
    pair_mask=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)


@given(case=cases)
@settings(max_examples=50)
def test_any_shards_give_what_one_process_gives(ranks, case):
    assert_as_one_process(case, ranks(len(case.sizes), sharded_outcome, case))


STRICT = Case((40, 0, 23), batch=(2,), n_out=6, d_inp=16, d_out=16, input_mask=True, dtype=torch.float32)


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "variable"])
def test_float32_within_1e_6(ranks, fixed):
    """Float32 results agree to 1e-6 if vectors are long enough that normalising does not magnify errors."""
    case = STRICT._replace(fixed=fixed)
    truth = outcome(*make(case))
    found = ranks(len(case.sizes), sharded_outcome, case)
    for name, expected in truth.items():
        for got in joined(name, [part[name] for part in found], case):
            assert greatest(got - expected) <= 1e-6 * max(1, greatest(expected)), name


def test_packed_samples_are_sharded_one_by_one(ranks):
    truth = packed_outcome([[4, 0, 3], [2, 0, 5]], None)
    parts = ranks(2, packed_outcome, [[4, 0, 3], [2, 0, 5]], 2)
    for name, expected in truth.items():
        for part in parts:
            assert greatest(part[name] - expected) < 1e-12, name


def packed_outcome(lengths: list[list[int]], n: int | None) -> dict[str, np.ndarray]:
    """Return gradients and x_out. Rank r holds lengths[r][b] rows of sample b; None means one process."""
    torch.manual_seed(3)
    layer = with_noise(vr.VectorRouting(n_inp=None, n_out=3, d_inp=4, d_out=3, dtype=torch.float64))
    samples = [torch.randn(k, 4, dtype=torch.float64) for k in map(sum, zip(*lengths, strict=True))]
    if n is not None:
        mesh = mesh_of(n)
        rank = mesh.get_local_rank()
        layer = shard_inputs(layer, mesh)
        before = [sum(part[b] for part in lengths[:rank]) for b in range(len(samples))]
        samples = [x[k : k + own] for x, k, own in zip(samples, before, lengths[rank], strict=True)]
    sizes = torch.tensor([0, *map(len, samples)], dtype=torch.int32)
    x_out = layer(torch.cat(samples), cu_seqlens=sizes.cumsum(0).int())
    x_out.square().mul(torch.arange(3)).sum().backward()
    return {"x_out": x_out.detach().numpy()} | {k: p.grad.numpy() for k, p in layer.named_parameters()}


# Networks and heads

NETWORKS = {
    "head": lambda: vr.RoutingHead(d_emb=6, depth=2, n_cls=3, n_hid=4, d_hid=8),
    "members": lambda: vr.RoutingHead(d_emb=6, depth=2, n_cls=3, n_hid=4, d_hid=8, n_members=3),
    "paper": lambda: vr.RoutingHead.paper(d_emb=6, depth=2, n_cls=3, n_hid=4),
    "branches": lambda: vr.Sequential(
        vr.PerVector(nn.Linear(6, 6)),
        vr.Sum(
            vr.VectorRouting(n_inp=None, n_out=4, d_inp=6, d_out=5),
            vr.Sequential(vr.PerVector(nn.Tanh()), vr.VectorRouting(n_inp=None, n_out=4, d_inp=6, d_out=5)),
        ),
        vr.Residual(vr.VectorRouting(n_inp=4, n_out=4, d_inp=5, d_out=5)),
    ),
    "fixed": lambda: vr.Sequential(
        vr.PerVector(nn.LayerNorm(6)), vr.VectorRouting(n_inp=9, n_out=4, d_inp=6, d_out=8)
    ),
}


def make_network(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network, its inputs (hidden states for a head) and their mask."""
    torch.manual_seed(1)
    network = with_noise(NETWORKS[name]()).double()
    shape = (2, 9, 2, 6) if isinstance(network, vr.RoutingHead) else (2, 9, 6)
    mask = torch.rand(2, 9) > 0.3  # [2, n_pos]
    return network, torch.randn(shape, dtype=torch.float64), mask


def own_part(name: str, sizes: tuple[int, ...]) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a sharded network, the rank's own inputs and their mask."""
    mesh = mesh_of(len(sizes))
    network, x_inp, mask = make_network(name)
    rows = rows_of(Case(sizes, fixed=name == "fixed"), mesh)
    return shard_inputs(network, mesh), x_inp[:, rows], mask[:, rows]


def train(network: nn.Module, x_inp: Tensor, mask: Tensor, steps: int) -> dict[str, np.ndarray]:
    """Return the parameters after some steps of AdamW, and the gradients of the first step."""
    optimizer, first = torch.optim.AdamW(network.parameters(), lr=1e-2), {}
    for _ in range(steps):
        optimizer.zero_grad()
        network(x_inp, mask).sin().sum().backward()
        first = first or {f"grad {k}": p.grad.clone() for k, p in network.named_parameters()}
        optimizer.step()
    found = first | dict(network.named_parameters())
    return {name: whole(t).detach().numpy() for name, t in found.items()}


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train_sharded(name: str, sizes: tuple[int, ...], steps: int) -> dict[str, np.ndarray]:
    return train(*own_part(name, sizes), steps)


@pytest.mark.parametrize("sizes", [(0, 9), (3, 1, 0, 5)], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_after_20_steps(ranks, name, sizes):
    truth = train(*make_network(name), steps=20)
    for found in ranks(len(sizes), train_sharded, name, sizes, 20):
        assert found.keys() == truth.keys()
        for key, expected in truth.items():
            limit = 1e-12 if key.startswith("grad") else 1e-9
            assert greatest(found[key] - expected) <= limit * max(1, greatest(expected)), key


def explain(network: nn.Module, x_inp: Tensor, mask: Tensor) -> dict[str, Tensor]:
    if isinstance(network, vr.RoutingHead):
        x_inp, mask = network.flatten(x_inp, mask)
        network = network.network
    credit = network.route(x_inp, mask).phi
    parts = vr.contributions(network, x_inp, input_mask=mask)
    return {"credit": credit, "unit": credit.unit_variance(), "contributions": parts}


def explain_sharded(name: str, sizes: tuple[int, ...]) -> dict[str, dict[str, np.ndarray]]:
    """Return the explanations of the rank's own inputs, and the gathered ones."""
    found = explain(*own_part(name, sizes))
    mesh = mesh_of(len(sizes))
    return {"own": arrays(found), "all": arrays({key: gather(value, mesh) for key, value in found.items()})}


def arrays(found) -> dict[str, np.ndarray]:
    flat = {key: found[key].dense() for key in ("credit", "unit")} | found["contributions"]._asdict()
    return {key: value.detach().numpy() for key, value in flat.items()}


@pytest.mark.parametrize("sizes", [(4, 5), (3, 1, 0, 5)], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_credit_and_contributions_stay_with_their_inputs(ranks, name, sizes):
    truth = arrays(explain(*make_network(name)))
    parts = ranks(len(sizes), explain_sharded, name, sizes)
    for key, axis in (("credit", -2), ("unit", -2), ("values", -1)):
        joined_up = np.concatenate([part["own"][key] for part in parts], axis)
        assert joined_up.shape == truth[key].shape
        assert greatest(joined_up - truth[key]) < 1e-10, key
    for part in parts:
        assert all(
            greatest(part["all"][key] - truth[key]) < 1e-10 for key in truth if key != "completeness_error"
        )
        assert greatest(part["own"]["completeness_error"]) < 1e-12


def converged(n: int | None) -> dict[str, np.ndarray]:
    """Return x_out and gradients of a layer that iterates until convergence."""
    torch.manual_seed(4)
    layer = vr.VectorRouting(
        n_inp=None,
        n_out=3,
        d_inp=4,
        d_out=6,
        n_iters=vr.Converge(tol=1e-13, max_iters=200),
        dtype=torch.float64,
    )
    x_inp = torch.randn(12, 4, dtype=torch.float64)
    if n is not None:
        layer, x_inp = shard_inputs(layer, mesh_of(n)), x_inp[own_rows(12, mesh_of(n))]
    x_out = layer(x_inp)
    x_out.sin().sum().backward()
    return {"x_out": x_out.detach().numpy()} | {k: p.grad.numpy() for k, p in layer.named_parameters()}


def test_ranks_converge_together(ranks):
    truth = converged(None)
    for found in ranks(3, converged, 3):
        for name, expected in truth.items():
            assert greatest(found[name] - expected) < 1e-9 * max(1, greatest(expected)), name
