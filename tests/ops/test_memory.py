"""The memory that a layer stores for its backward pass: no additional tensor of size i x j or i x d."""

import itertools

import pytest
import torch

import vecroute as vr

N_INP, N_OUT, D_INP, D_OUT = 1024, 6, 8, 3  # arrays of N_INP numbers fill whole blocks of 256 bytes


def stored_bytes(implementation: str, n_inp: int, *, fixed: bool, keep_bytes: int) -> int:
    """Return the size of all memory stored that is neither x_inp nor a parameter."""
    sizes = {"n_inp": n_inp if fixed else None, "n_out": N_OUT, "d_inp": D_INP, "d_out": D_OUT}
    layer = vr.VectorRouting(**sizes, implementation=implementation)
    layer.tuning = layer.tuning._replace(keep_bytes=keep_bytes)
    x_inp = torch.randn(n_inp, D_INP, requires_grad=True)  # [i, d]
    given = {tensor.data_ptr() for tensor in (x_inp, *layer.parameters())}
    stored = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        x_out = layer(x_inp)
    x_out.sum().backward()
    return sum({t.data_ptr(): t.nbytes for t in stored if t.data_ptr() not in given}.values())


def stored_per_input(implementation: str, *, fixed: bool, kept: int = 0, missing: int = 0) -> float:
    """Return the number of float32 numbers that the layer stores for each additional input.

    Args:
        kept, missing: the budget has room for ``kept`` numbers of each input, but for ``missing`` bytes.
    """
    short, long = (
        stored_bytes(implementation, n, fixed=fixed, keep_bytes=max(0, 4 * kept * n - missing))
        for n in (N_INP, 2 * N_INP)
    )
    return (long - short) / (4 * N_INP)


@pytest.mark.parametrize("fixed", [False, True], ids=["variable", "fixed"])
@pytest.mark.parametrize("implementation", ["auto", "chunked"])
def test_nothing_of_size_i_times_anything(implementation, fixed):
    assert stored_per_input(implementation, fixed=fixed) == 1  # f(a_inp)


@pytest.mark.parametrize("missing", [1, 0], ids=["does not fit", "fits"])
def test_pairs_are_kept_within_the_budget(missing):
    stored = stored_per_input("auto", fixed=False, kept=2 * N_OUT, missing=missing)
    assert stored == 1 + (0 if missing else 2 * N_OUT)


@pytest.mark.parametrize("missing", [1, 0], ids=["does not fit", "fits"])
def test_dot_products_of_a_fixed_length_are_kept_within_the_budget(missing):
    stored = stored_per_input("chunked", fixed=True, kept=N_OUT, missing=missing)
    assert stored == 1 + (0 if missing else N_OUT)


@pytest.mark.parametrize("fixed", [False, True], ids=["variable", "fixed"])
def test_the_reference_stores_pairs(fixed):
    """This shows that the tests above can fail."""
    assert stored_per_input("reference", fixed=fixed) >= N_OUT


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # the profiler runs one cycle
@pytest.mark.parametrize(("n_parts", "most"), [(1, 13), (4, 9)])
def test_few_matrices_of_each_sample_live_at_once(n_parts, most, limits):
    """With many small samples, tensors [b, j, d] take the most memory. In parts, only stored ones remain."""
    limits(PART_BYTES=2**20 // n_parts)
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
    """A gradient that is a view would keep its whole base tensor in memory."""
    sizes = {"n_inp": 6 if fixed else None, "n_out": 5, "d_inp": 8, "d_out": 3}
    layer = vr.VectorRouting(**sizes, implementation="chunked")
    layer(torch.randn(6, 8, requires_grad=True)).backward(torch.randn(5, 3))
    matrices = {name: p.grad for name, p in layer.named_parameters() if p.dim() == 2 and p.grad is not None}
    kept = {name: grad.untyped_storage().nbytes() / grad.nbytes for name, grad in matrices.items()}
    assert len(kept) >= 8
    assert kept == dict.fromkeys(kept, 1)
