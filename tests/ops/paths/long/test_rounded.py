"""Products of float32 rows in bfloat16, without a rounded copy of the rows, only on Hopper GPUs."""

import pytest
import torch

import vecroute as vr
from tests.helpers.constants import named_constants
from tests.helpers.samples import with_chunks, with_noise
from tests.helpers.tolerance import assert_as_good, outcome, twin
from vecroute.ops.paths import long
from vecroute.ops.paths.long import arrange, rounded
from vecroute.ops.plan.hopper import rounded_bytes

GPU = pytest.mark.gpu
SIZES = [  # n_inp, d_inp, n_out, n_iters
    (1000, 1024, 100, 2),
    (129, 512, 64, 2),  # one row more than a block has
    (41, 128, 20, 2),
    (500, 1024, 40, 3),
    (700, 512, 128, 2),
]


@pytest.fixture
def calls(monkeypatch, tf32, limits):
    """Use the kernel for layers of any length, on a GPU. The list has an entry for each pass."""
    if not torch.cuda.is_available():
        pytest.fail("needs a GPU")
    calls, multiplier = [], rounded.multiplier
    limits(HALVES_ROWS=1)
    monkeypatch.setattr(long, "multiplier", lambda *a: (calls.append(1), multiplier(*a))[1])
    with torch.device("cuda"):
        yield calls


def make(n_inp: int, d_inp: int, n_out: int, n_iters: int) -> vr.VectorRouting:
    sizes = {"n_inp": n_inp, "n_out": n_out, "d_inp": d_inp, "d_out": 64, "n_iters": n_iters}
    return with_chunks(with_noise(vr.VectorRouting(**sizes, implementation="fused")))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("n_out", [100, 64, 4])
def test_shared_memory_is_as_large_as_the_kernel_divides(n_out, parts, device):
    constants = named_constants("rounded.cu", {"N_OUT": n_out, "PARTS": parts})
    assert rounded_bytes(n_out, parts) == constants["BARRIERS"] + 2 * constants["STAGES"] * 8
    assert arrange.by_features(torch.zeros(parts * n_out, 64), n_out).numel() * 2 == constants["STAGE"]
    assert constants["GROUP"] % 1024 == constants["OF_GROUP"] % 1024 == 0  # places that the tensor cores read
    for name in ("GROUPS", "ROWS", "FEATURES", "STAGES"):
        assert constants[name] == getattr(rounded, name)


@GPU
@pytest.mark.parametrize(
    ("n_out", "parts", "d"), [(100, 1, 1024), (100, 2, 1024), (128, 2, 256), (4, 1, 128)]
)
@pytest.mark.parametrize("n", [1, 130, 40000])
def test_products_are_those_of_rounded_numbers(n, n_out, parts, d, calls):
    x, M = torch.randn(1, n, d + 4)[..., :d], torch.randn(1, parts * n_out, d)
    out = torch.full((1, n + 1, parts * n_out), 7.0, dtype=torch.bfloat16)
    rounded.multiplier(M, n_out, out[:, :n])(x)
    expected = x.bfloat16().double() @ M.bfloat16().double().mT  # [1, n, q]
    torch.testing.assert_close(out[:, :n].double(), expected, rtol=2**-8, atol=1e-3)
    assert out[:, n].eq(7).all()


@GPU
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [0, 64])
def test_gradients_are_as_good_as_autocast(sizes, rows, calls, nan_filled_memory):
    layer, x_inp = make(*sizes), torch.randn(*sizes[:2])
    with_chunks(layer, rows)
    truth = outcome(twin(layer, torch.float64), x_inp.double())
    with torch.autocast("cuda", torch.bfloat16):
        got, reference = outcome(layer, x_inp), outcome(twin(layer, torch.float32), x_inp)
    for name in truth:
        assert_as_good(name, got[name], reference[name], truth[name])
    assert calls


@GPU
def test_other_precisions_go_another_way(calls):
    layer, x_inp = make(300, 256, 20, 2), torch.randn(300, 256)
    layer(x_inp).sum().backward()
    with torch.autocast("cuda", torch.float16):
        layer(x_inp).sum().backward()
    with torch.autocast("cuda", torch.bfloat16):
        layer(x_inp, input_mask=torch.rand(300) > 0.5).sum().backward()
    assert not calls
