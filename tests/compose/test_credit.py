"""Credit: lazy products, columns, top, groups, unit variance, samples, tables and files."""

import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import vecroute as vr
from tests.helpers.random_networks import D, mlp, networks, routing
from vecroute.compose import factors
from vecroute.compose.factors import Block, Blocks, Diagonal, Matrix, Product, multiply


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sample_credit() -> vr.Credit:
    """Build a credit [3, 9, 4] with every kind of factor and with a mask."""
    network = vr.Sequential(
        vr.PerVector(mlp()),
        vr.Concat(routing(None, 3), routing(None, 2)),
        vr.Residual(routing(5, 5)),
        routing(5, 4),
    )
    mask = torch.arange(9) < torch.tensor([[9], [5], [7]])  # [b, i]
    return network.route(randn(3, 9, D), input_mask=mask).phi.detach()


def used(credit: vr.Credit) -> Tensor:
    return torch.ones(credit.shape[:-1], dtype=torch.bool) if credit.input_mask is None else credit.input_mask


def test_phi_of_a_layer_becomes_a_credit():
    phi = routing(None, 4).route(randn(6, D)).phi
    credit = vr.Credit(phi)
    assert credit.shape == (6, 4)
    assert torch.equal(credit.dense(), phi)
    assert repr(credit) == "Credit([6, 4])"
    with pytest.raises(ValueError, match=r"phi must be \[..., n_inp, n_out\], got \[6\]"):
        vr.Credit(phi[:, 0])
    with pytest.raises(TypeError, match=r"phi must be a floating-point tensor .*n_out\], got list"):
        vr.Credit([[1.0]])


def test_column_and_top():
    credit = sample_credit()
    dense = credit.dense()  # [b, i, j]
    for j in (0, 3, -1):
        close(credit.column(j), dense[..., j])
    top = credit.top(5, 2)
    for b in range(3):
        column = dense[b, :, 2]  # [i]
        best = sorted((i for i in range(9) if used(credit)[b, i]), key=lambda i: -column[i])[:5]
        assert top.indices[b].tolist() == best
        close(top.values[b], column[best])


def test_top_leaves_unused_inputs_for_last():
    # Used inputs have negative credit here, so the 0 of an unused input would be the largest.
    phi = -torch.rand(4, 1)  # [i, j]
    phi[1] = 0
    credit = vr.Credit(phi, torch.tensor([True, False, True, True]))
    assert credit.top(4, 0).indices[-1] == 1
    assert credit.top(4, 0).values[-1] == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.column(4), ValueError, r"j must be one of 0, ..., n_out - 1 = 3, got 4"),
        (lambda c: c.column(1.0), TypeError, r"j must be an int, got 1.0 \(float\)"),
        (lambda c: c.column(None), TypeError, r"j must be an int, got None \(NoneType\)"),
        (lambda c: c.column(True), TypeError, r"j must be an int, got True \(bool\)"),
        (lambda c: c.top(2, 1.0), TypeError, r"j must be an int, got 1.0 \(float\)"),
        (lambda c: c.top(10, 0), ValueError, "k must be at most n_inp=9, got 10"),
        (lambda c: c.top(0, 0), ValueError, "k must be a positive int, got 0"),
        (lambda c: c[0, 0], IndexError, r"credit \[3, 9, 4\] has 1 batch dimensions, got \[\(0, 0\)\]"),
        (lambda c: c[..., 0], IndexError, r"credit \[3, 9, 4\] has 1 batch dimensions"),
        (lambda c: c[3], IndexError, "out of bounds|out of range"),
        (lambda c: c.sum_groups(torch.zeros(8).long()), ValueError, r"index must be .*n_inp=9\], got \[8\]"),
        (
            lambda c: c.sum_groups(torch.zeros(2, 9).long()),
            ValueError,
            r"index must be .*\[3\], got \[2, 9\]",
        ),
        (lambda c: c.sum_groups(torch.zeros(2, 3, 9).long()), ValueError, r"got \[2, 3, 9\]"),
        (lambda c: vr.Credit(c.dense(), torch.ones(9)), TypeError, "input_mask must be a bool"),
        (lambda c: vr.Credit(c.dense(), torch.ones(8).bool()), ValueError, r"input_mask must be .*n_inp=9"),
        (lambda c: c.sum_groups([True] * 9), TypeError, "index must be an integer tensor .*bool"),
        (lambda c: c.sum_groups(torch.zeros(9)), TypeError, "index must be an integer tensor .*float32"),
        (lambda c: c.sum_groups(torch.arange(9), n=5), ValueError, "index must be less than n=5, got 8"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(sample_credit())


@given(data=st.data(), seed=st.integers(0, 2**31))
def test_groups_sum(data, seed):
    torch.manual_seed(seed)
    n_inp, n_out, n = (data.draw(st.integers(1, 4)) for _ in range(3))
    network = vr.Sequential(data.draw(networks(n_inp, n_out)))
    mask = torch.rand(2, n_inp) < 0.7 if data.draw(st.booleans()) else None  # [b, i]
    credit = network.route(randn(2, n_inp, D), input_mask=mask).phi
    shape = (2, n_inp) if data.draw(st.booleans()) else (n_inp,)
    index = torch.randint(-1, n, shape)  # [i] or [b, i]
    groups = credit.sum_groups(index, n)
    one_hot = (index[..., None, :] == torch.arange(n)[:, None]).double()  # [..., n, i]
    close(groups.dense(), one_hot @ credit.dense())
    close(groups.column(n_out - 1), (one_hot @ credit.dense())[..., -1])
    if mask is not None:
        assert torch.equal(groups.input_mask, ((one_hot * mask[:, None]).sum(-1) > 0))


@given(data=st.data(), seed=st.integers(0, 2**31))
def test_permuting_and_splitting_inputs_permutes_and_splits_credit(data, seed):
    torch.manual_seed(seed)
    network = vr.Sequential(vr.PerVector(mlp()), routing(None, 4), data.draw(networks(4, 3)))
    x_inp = randn(6, D)  # [i, d]
    credit = network.route(x_inp).phi
    order = torch.tensor(data.draw(st.permutations(range(6))))  # [i]
    close(network.route(x_inp[order]).phi.dense(), credit.dense()[order])
    # Repeat the inputs, and use each input in one of the two copies only. Unused copies have no credit.
    twice = torch.cat([x_inp, x_inp])  # [2 i, d]
    half = torch.rand(6) < 0.5  # [i]
    split = network.route(twice, input_mask=torch.cat([half, ~half])).phi
    close(split.sum_groups(torch.arange(6).repeat(2)).dense(), credit.dense())


def test_unit_variance_is_per_sample_over_used_inputs():
    credit = sample_credit()
    scaled = credit.unit_variance().dense()  # [b, i, j]
    for b in range(3):
        of_used = credit.dense()[b][used(credit)[b]]  # [used i, j]
        close(scaled[b], credit.dense()[b] / of_used.std(correction=0))
    close(credit[1:2].unit_variance().dense()[0], scaled[1])
    close(
        credit.unit_variance().sum_groups(torch.tensor([0] * 4 + [1] * 5)).dense()[:, 0], scaled[:, :4].sum(1)
    )


def test_unit_variance_in_blocks_of_columns(monkeypatch):
    credit = sample_credit()
    whole = credit.unit_variance().dense()  # [b, i, j]
    monkeypatch.setattr("vecroute.compose.credit.BUDGET", 1)
    close(credit.unit_variance().dense(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shift", "size"), [(0.0, 1.0), (1e3, 1.0), (0.0, 1e-18), (0.0, 1e18)])
def test_unit_variance_of_a_narrow_product_writes_out_no_pairs(dtype, shift, size, monkeypatch):
    a, b = (size * (randn(3, 40, 4) + shift)).to(dtype), (size * randn(3, 4, 30)).to(dtype)
    mask = torch.arange(40) < torch.tensor([[40], [1], [23]])  # [b, i]
    credit = vr.Credit(Product([Matrix(a * mask[..., None]), Matrix(b)]), mask)
    with monkeypatch.context() as patched:
        patched.setattr(vr.Credit, "_columns", None)
        scaled = credit.unit_variance()
    for k in range(3):
        phi = credit.dense()[k][mask[k]].double()  # [i, j]
        expected = phi / phi.std(correction=0)  # [i, j]
        torch.testing.assert_close(scaled.dense()[k][mask[k]].double(), expected, rtol=1e-4, atol=1e-4)
    constant = vr.Credit(Product([Matrix(torch.ones(9, 1)), Matrix(torch.ones(1, 9))]))
    assert torch.equal(constant.unit_variance().dense(), torch.ones(9, 9))


def test_unit_variance_where_there_is_nothing():
    network = vr.Sequential(routing(None, 4), routing(4, 2))
    mask = torch.tensor([[False] * 3, [True] * 3])  # [b, i]
    scaled = network.route(randn(2, 3, D), input_mask=mask).phi.unit_variance().dense()
    assert (scaled[0] == 0).all()
    close(scaled[1].std(correction=0), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float64, 1e200),
        (torch.float32, 1e25),
        (torch.float32, 1e-25),
        (torch.float32, 1.0),
        (torch.float16, 1e3),
        (torch.float16, 1.0),
        (torch.float16, 1e-4),
        (torch.bfloat16, 1e25),
    ],
)
def test_unit_variance_of_any_size(dtype, size, grouped):
    noise = randn(40_000, 2)  # [i, j]
    phi = (noise * size).to(dtype)  # [i, j]
    factor = Product([Matrix(phi), Matrix(torch.eye(2, dtype=dtype))]) if grouped else phi
    got = vr.Credit(factor).unit_variance().dense()  # [i, j]
    assert got.dtype == dtype
    expected = phi.double() / (phi.double() / size).std(correction=0) / size  # [i, j]
    torch.testing.assert_close(
        got, expected.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, -3e-4, 1234.5])
def test_constant_credit_is_left_as_it_is(dtype, value):
    phi = torch.full((2, 40_000, 2), value, dtype=dtype)  # [b, i, j]
    phi[0, ::2] *= 1 + torch.finfo(dtype).eps  # rounding does not count as variance
    phi.requires_grad_()
    got = vr.Credit(phi).unit_variance().dense()  # [b, i, j]
    assert torch.equal(got, phi)
    got.sum().backward()
    assert phi.grad is not None
    assert torch.equal(phi.grad, torch.ones_like(phi))


def test_samples():
    credit = sample_credit()
    dense, mask = credit.dense(), credit.input_mask
    for index in (1, slice(1, 3), [2, 0], torch.tensor([True, False, True]), (slice(None, None, 2),)):
        close(credit[index].dense(), dense[index])
        assert torch.equal(credit[index].input_mask, mask[index])
    assert credit[2].shape == (9, 4)


def test_a_sample_does_not_depend_on_the_batch():
    network = vr.Sequential(
        vr.PerVector(mlp()), routing(None, 5), vr.Residual(routing(5, 5)), routing(5, 2)
    ).float()
    x_inp = torch.randn(4, 20, D)  # [b, i, d]
    mask = torch.arange(20) < torch.tensor([[20], [7], [13], [1]])  # [b, i]
    credit = network.route(x_inp, input_mask=mask).phi.unit_variance()
    for b in range(4):
        alone = network.route(x_inp[b], input_mask=mask[b]).phi.unit_variance()
        torch.testing.assert_close(credit[b].dense(), alone.dense(), rtol=1e-5, atol=1e-6)
        short = network.route(x_inp[b, : int(mask[b].sum())]).phi.unit_variance()
        torch.testing.assert_close(credit[b].dense()[mask[b]], short.dense(), rtol=1e-5, atol=1e-6)


def chain_cost(sizes: list[int]) -> int:
    """Return the fewest multiplications for a chain of matrices, by trying every order."""
    if len(sizes) < 3:
        return 0
    return min(
        chain_cost(sizes[: k + 1]) + chain_cost(sizes[k:]) + sizes[0] * sizes[k] * sizes[-1]
        for k in range(1, len(sizes) - 1)
    )


@given(sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_products_take_the_cheapest_order(sizes):
    matrices = [randn(a, b) for a, b in pairwise(sizes)]
    costs = []
    times = factors._times

    def counted(a, b):
        costs.append(a.shape[-2] * a.shape[-1] * b.shape[-1])
        return times(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factors, "_times", counted)
        product = multiply([Matrix(m) for m in matrices])
    close(product, torch.linalg.multi_dot(matrices) if len(matrices) > 1 else matrices[0])
    assert sum(costs) == chain_cost(sizes)


def test_nothing_is_ever_as_large_as_inputs_times_inputs():
    """With a bottleneck of 3 between 500 inputs and 500 outputs, no tensor is much larger than a factor."""
    n = 500
    wide, narrow = randn(n, 3), randn(3, n)  # [i, j], [j, i]
    largest = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest.append(out.numel())
            return out

    credit = vr.Credit(Product([Matrix(wide), Matrix(narrow), Matrix(wide), Matrix(narrow)]))
    with Watch():
        column = credit.column(7)
        groups = credit.sum_groups(torch.arange(n) % 2).dense()
        credit.top(3, 1)
    assert max(largest) <= 3 * (n + 1) * 3
    close(column, (wide @ narrow @ wide @ narrow)[:, 7])
    close(groups[0], (wide @ narrow @ wide @ narrow)[::2].sum(0))


def test_residuals_write_no_identity(monkeypatch):
    network = vr.Sequential(routing(None, 6), vr.Residual(routing(6, 6)), routing(6, 2))
    credit = network.route(randn(8, D)).phi
    expected = credit.dense()
    monkeypatch.setattr(Diagonal, "dense", None)
    close(credit.dense(), expected)


def test_factors_multiply_from_both_sides():
    diagonal = randn(2, 4)  # [b, i]
    blocks = Blocks([Block(Matrix(randn(2, 3, 2)), 0, 0), Block(Diagonal(diagonal), 3, 1)], 7, 5)
    product = Product([blocks, Matrix(randn(5, 6))])
    for factor in (Matrix(randn(2, 7, 5)), Diagonal(diagonal), blocks, product):
        n_inp, n_out = factor.shape[-2:]
        u, v = randn(3, n_inp), randn(n_out, 3)  # [k, i], [j, k]
        close(factor.left(u), u @ factor.dense())
        close(factor.right(v), factor.dense() @ v)
        assert tuple(factor.dense().shape) == factor.shape


def test_gradients_flow_through_credit():
    network = vr.Sequential(
        routing(None, 4, implementation="reference"), vr.Residual(routing(4, 4, implementation="reference"))
    )
    x_inp = randn(5, D).requires_grad_()
    network.route(x_inp).phi.column(0).sum().backward()
    assert x_inp.grad.abs().sum() > 0
    assert not network.route(x_inp).phi.detach().dense().requires_grad


def test_tables():
    credit = sample_credit()
    array = credit.to_numpy()
    assert array.shape == (3, 9, 4)
    assert (array == credit.dense().numpy()).all()
    frame = credit.to_pandas()
    assert frame.shape == (27, 4)
    assert frame.index.names == ["batch_0", "i"]
    assert frame.columns.name == "j"
    assert frame.loc[(1, 3), 2] == array[1, 3, 2]
    assert vr.Credit(torch.randn(2, 3).bfloat16()).to_numpy().dtype == "float32"


@given(data=st.data(), seed=st.integers(0, 2**31))
def test_files(data, seed, tmp_path_factory):
    torch.manual_seed(seed)
    network = vr.Sequential(data.draw(networks(4, 3)))
    mask = torch.rand(2, 4) < 0.7 if data.draw(st.booleans()) else None  # [b, i]
    credit = network.route(randn(2, 4, D), input_mask=mask).phi
    path = tmp_path_factory.mktemp("credit") / "credit.safetensors"
    credit.unit_variance().save(path)
    loaded = vr.Credit.load(path)
    assert torch.equal(loaded.dense(), credit.unit_variance().dense())
    assert (loaded.input_mask is None) == (mask is None)
    assert mask is None or torch.equal(loaded.input_mask, mask)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "credit"
    path.write_text("before")

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            sample_credit().save(path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "something"
    path.write_text("this is no safetensors file")
    with pytest.raises(ValueError, match="is no safetensors file"):
        vr.Credit.load(path)
    vr.contributions(routing(None, 2), randn(3, D)).save(path)
    with pytest.raises(ValueError, match=r"path must be a file of credit, .* holds contributions"):
        vr.Credit.load(path)


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("pandas", lambda credit, path: credit.to_pandas()),
        ("numpy", lambda credit, path: credit.to_numpy()),
        ("safetensors.torch", lambda credit, path: credit.save(path)),
        ("safetensors", lambda credit, path: vr.Credit.load(path)),
    ],
)
def test_a_missing_package_names_its_extra(package, call, monkeypatch, tmp_path):
    credit = sample_credit()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=rf"this needs {package.split('.')[0]}: pip install 'vecroute\[data\]'"
    ):
        call(credit, tmp_path / "credit")
