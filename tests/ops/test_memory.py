"""What a layer stores for its backward pass: nothing of size i x j or i x d of its own."""

import itertools

import pytest
import torch

import vecroute as vr
from vecroute.ops import problem

N_INP, N_OUT, D_INP, D_OUT = 1000, 6, 8, 3


def largest_stored(implementation: str, n_inp: int | None, keep_bytes: int) -> int:
    """Elements of the largest tensor stored that is neither x_inp nor a parameter."""
    layer = vr.VectorRouting(
        n_inp=n_inp, n_out=N_OUT, d_inp=D_INP, d_out=D_OUT, implementation=implementation
    )
    layer.tuning = layer.tuning._replace(keep_bytes=keep_bytes)
    x_inp = torch.randn(N_INP, D_INP, requires_grad=True)  # [i, d]
    given = {tensor.data_ptr() for tensor in (x_inp, *layer.parameters())}
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        x_out = layer(x_inp)
    x_out.sum().backward()
    return max(tensor.numel() for tensor in stored if tensor.data_ptr() not in given)


@pytest.mark.parametrize("n_inp", [None, N_INP], ids=["variable", "fixed"])
@pytest.mark.parametrize("implementation", ["auto", "chunked"])
def test_nothing_of_size_i_times_anything(implementation, n_inp):
    assert largest_stored(implementation, n_inp, keep_bytes=0) == N_INP  # f(a_inp)


@pytest.mark.parametrize("keep_bytes", [2 * N_INP * N_OUT * 4 - 1, 2 * N_INP * N_OUT * 4])
def test_pairs_are_kept_within_the_budget(keep_bytes):
    stored = largest_stored("auto", None, keep_bytes)
    assert stored == (2 * N_INP * N_OUT if keep_bytes >= 2 * N_INP * N_OUT * 4 else N_INP)


@pytest.mark.parametrize("keep_bytes", [N_INP * N_OUT * 4 - 1, N_INP * N_OUT * 4])
def test_dot_products_of_a_fixed_length_are_kept_within_the_budget(keep_bytes):
    stored = largest_stored("chunked", N_INP, keep_bytes)
    assert stored == (N_INP * N_OUT if keep_bytes >= N_INP * N_OUT * 4 else N_INP)


@pytest.mark.parametrize("n_inp", [None, N_INP], ids=["variable", "fixed"])
def test_the_reference_stores_pairs(n_inp):
    """So the tests above can fail."""
    assert largest_stored("reference", n_inp, keep_bytes=0) >= N_INP * N_OUT


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # there is one cycle
@pytest.mark.parametrize(("n_parts", "most"), [(1, 13), (4, 9)])
def test_few_matrices_of_each_sample_live_at_once(n_parts, most, monkeypatch):
    """Of many small samples, what is [b, j, d] takes the most memory; in parts, what is kept alone."""
    monkeypatch.setattr(problem, "PART_BYTES", 2**20 // n_parts)
    layer = vr.VectorRouting(n_inp=None, n_out=64, d_inp=64, d_out=64, implementation="chunked")
    layer.tuning = layer.tuning._replace(rows=8)  # two samples at a time
    x_inp = torch.randn(64, 4, 64, requires_grad=True)  # [b, i, d]
    grad = torch.randn(64, 64, 64)  # [b, j, h]
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as prof:
        layer(x_inp).backward(grad)
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(itertools.accumulate(event.nbytes() for event in events))
    assert peak <= most * grad.nbytes, peak / grad.nbytes


@pytest.mark.parametrize("fixed", [True, False])
def test_gradients_keep_nothing_but_themselves(fixed):
    """A gradient that is a view would keep what it is a view of as long as there is the gradient."""
    sizes = {"n_inp": 6 if fixed else None, "n_out": 5, "d_inp": 8, "d_out": 3}
    layer = vr.VectorRouting(**sizes, implementation="chunked")
    layer(torch.randn(6, 8, requires_grad=True)).backward(torch.randn(5, 3))
    matrices = {name: p.grad for name, p in layer.named_parameters() if p.dim() == 2 and p.grad is not None}
    kept = {name: grad.untyped_storage().nbytes() / grad.nbytes for name, grad in matrices.items()}
    assert len(kept) >= 8
    assert kept == dict.fromkeys(kept, 1)
