"""The cost of a chunk: memory of the GPU, and work of the host."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vecroute as vr
from tests.helpers.problems import problem_of
from tests.helpers.samples import with_noise
from tests.helpers.tolerance import assert_layer_as_good
from vecroute.ops import Tuning, loop, passes
from vecroute.ops.backends.chunked import steps as chunked_steps
from vecroute.ops.backends.fused import matrix as fused_matrix
from vecroute.ops.backends.fused import pairs as fused
from vecroute.ops.chunks import Chunk, Room, alike
from vecroute.ops.plan import make_plan
from vecroute.ops.problem import Problem

pytestmark = pytest.mark.usefixtures("tf32")  # otherwise products would use our own kernels


@pytest.fixture
def launches(monkeypatch):
    """Count the launches of each kernel. The kernels are replaced and do nothing."""
    launches = Counter()

    class Kernel:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **arguments):
            launches[self.name] += 1

    for step in ("coefficients", "activations"):
        for name in (f"{step}_kernel", f"{step}_backward_kernel"):
            monkeypatch.setattr(fused, name, Kernel(name))
    monkeypatch.setattr(fused, "sum_samples_kernel", Kernel("sum_samples_kernel"))
    for name in [name for name in vars(fused_matrix) if name.endswith("_kernel")]:
        monkeypatch.setattr(fused_matrix, name, Kernel(name))
    monkeypatch.setattr(Problem, "steps", chunked_steps)  # the steps launch no kernels
    return launches


@pytest.fixture
def rooms(monkeypatch):
    """A list of the buffers of every pass."""
    rooms = []

    class Seen(Room):
        def __init__(self):
            super().__init__()
            rooms.append(self)

    monkeypatch.setattr(passes, "Room", Seen)
    return rooms


def make(n_inp: int, n_out: int, d: int, dtype: torch.dtype = torch.float32, device="cpu", rows: int = 0):
    """Return the problem of a layer of variable length with n_inp inputs."""
    layer = vr.VectorRouting(n_inp=None, n_out=n_out, d_inp=d, d_out=d, dtype=dtype, device="cpu")
    layer = with_noise(layer).to(device).requires_grad_(False)
    x_inp = torch.empty(n_inp, d, dtype=dtype, device=device)
    return problem_of(layer, x_inp, tuning=Tuning(rows, keep_bytes=0))


@pytest.mark.parametrize(
    ("n_inp", "dtype", "n_chunks"), [(10**6, torch.float32, 37), (10**7, torch.bfloat16, 89)], ids=str
)
def test_a_forward_needs_two_percent(n_inp, dtype, n_chunks, launches, rooms):
    """A forward pass needs x_inp, a chunk and f(a_inp). About 10 MB are left for libraries."""
    p = make(n_inp, 100, 1024, dtype, "meta")
    _, saved = loop.forward(p)
    f_a_inp = p.plan.saved.tensor(saved, "f_a_inp")  # [1, i]
    of_a_pass = [sum(t.nbytes for t in room.values()) for room in rooms]
    if dtype != torch.float32:
        of_a_pass = [n + rooms[1]["phi"].nbytes // 2 for n in of_a_pass]  # phi is rounded for the product
    assert len(rooms) == 2
    assert max(of_a_pass) + f_a_inp.nbytes + 10e6 < 0.02 * p.x_inp.nbytes
    assert launches["coefficients_kernel"] <= n_chunks  # at most one launch per chunk


def test_alike():
    """A group has consecutive chunks of the same samples, with the same number of rows."""
    rows = [slice(0, 7), slice(7, 14), slice(14, 18)]
    first, second = ([Chunk(slice(b, b + 1), slice(b, b + 1), r) for r in rows] for b in range(2))
    assert list(alike(first + second)) == [first[:2], first[2:], second[:2], second[2:]]
    assert [chunk.shape for chunk in first] == [(1, 7), (1, 7), (1, 4)]


class Calls(TorchDispatchMode):
    """Count the calls of PyTorch functions."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **(kwargs or {}))


def calls(rows: int) -> tuple[int, int]:
    """Return the calls of a forward and of a backward pass over 640 inputs in chunks of some size."""
    p = make(640, 4, 64, rows=rows)
    with Calls() as forward:
        x_out, saved = loop.forward(p)
    with Calls() as backward:
        loop.backward(p, x_out, saved, need_grad_x=True)
    return forward.n, backward.n


def test_what_the_host_does_for_a_chunk(launches):
    """A GPU works on a chunk for a tenth of a millisecond, and each call takes the host microseconds."""
    (forward, backward), (forward_20, backward_20) = calls(64), calls(32)
    assert forward_20 - forward <= 2 * 10 * 6  # x, its rows, two products and a sum, for each of two passes
    assert backward_20 - backward <= 2 * 10 * 12  # and rows of waiting pairs, or copies of them
    of_passes = {"shared_rows_kernel": 10, "stacked_kernel": 2, "shared_rows_backward_kernel": 2}
    assert launches == {"coefficients_kernel": 60, "coefficients_backward_kernel": 60} | of_passes


def test_parts_of_samples_use_the_same_memory(launches, rooms):
    """Gradients of parameters with an i have a part per sample of a chunk, as large as all other buffers."""
    layer = with_noise(vr.VectorRouting(n_inp=6, n_out=3, d_inp=8, d_out=2)).requires_grad_(False)
    p = problem_of(layer, torch.randn(8, 6, 8), tuning=Tuning(12))
    x_out, saved = loop.forward(p)
    rooms.clear()
    loop.backward(p, x_out, saved, need_grad_x=True)
    assert launches["coefficients_backward_kernel"] == 2 * 4
    assert [room["parts"].numel() for room in rooms] == [4 * 12 * 3, 2 * 12 * 3]


PARTS = [  # samples, samples of each part, greatest number of samples of a part, n_inp, d_inp
    (7, [4, 3], 4, 11, 8),
    (4, [4], 4, 11, 8),
    (1, [1], 4, 11, 8),
    (5, [2, 2, 1], 2, 11, 32),  # pairs wait in grad_x
    (2, [1, 1], 1, 11, 32),
    (2, [1, 1], 1, 1, 32),
]


@pytest.mark.parametrize("masked", [None, "inputs", "pairs"])
@pytest.mark.parametrize(("n_samples", "sizes", "most", "n_inp", "d_inp"), PARTS, ids=str)
def test_a_batch_goes_backward_in_parts(
    n_samples, sizes, most, n_inp, d_inp, masked, monkeypatch, limits, nan_filled_memory
):
    """With variable length on a CPU, the backward pass has parts of about equal size."""
    limits(PART_BYTES=most * 3 * d_inp * 4)
    seen, backward_of_part = [], loop.backward_of_part
    monkeypatch.setattr(
        loop, "backward_of_part", lambda p, *args: (seen.append(len(p.x_inp)), backward_of_part(p, *args))
    )
    layer = with_noise(vr.VectorRouting(n_inp=None, n_out=3, d_inp=d_inp, d_out=5, n_iters=3))
    masks = {
        None: {},
        "inputs": {"input_mask": torch.arange(n_inp) < torch.arange(1, 1 + n_samples)[:, None]},
        "pairs": {"pair_mask": torch.arange(3 * n_inp).view(n_inp, 3) % 7 < 6},
    }
    assert_layer_as_good(layer, torch.randn(n_samples, n_inp, d_inp), **masks[masked])
    assert seen == sizes


def test_others_go_backward_whole(limits):
    """This holds for a fixed length (samples share gradients), on a GPU, and for packed samples."""
    limits(PART_BYTES=1)
    layer = vr.VectorRouting(n_inp=None, n_out=3, d_inp=8, d_out=2)
    case = problem_of(layer, torch.randn(5, 6, 8), "chunked").plan.case
    packed = {"shape": (30, 8), "packed": (5, torch.int32)}
    for changes in ({"variable": False}, {"implementation": "fused"}, {"group": True}, packed):
        assert list(make_plan(case._replace(**changes)).parts()) == [slice(None)]
    assert len(list(make_plan(case).parts())) == 5
