"""What every test shares: a seed, hypothesis profiles, and memory that shows when nobody wrote to it."""

import os
from functools import partial

import pytest
import torch
from hypothesis import settings

# cuBLAS needs it for deterministic algorithms, and reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Without a GPU, Triton kernels run in Triton's interpreter; it looks when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# No test needs a network, and none waits for one.
os.environ["HF_HUB_OFFLINE"] = "1"

# Several tests run at a time, on small tensors.
torch.set_num_threads(1)

# Derandomized: a failure repeats. Slow tests ask for more examples themselves.
settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def seed():
    """The same random numbers in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def precision():
    """A benchmark or script sets the precision of its process; the tests of the next module do not see it."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv
    before, each = torch.get_float32_matmul_precision(), [backend.fp32_precision for backend in backends]
    yield
    torch.set_float32_matmul_precision(before)
    for backend, own in zip(backends, each, strict=True):
        backend.fp32_precision = own


@pytest.fixture
def device():
    """Everything is on a GPU where there is one; elsewhere Triton's interpreter runs the kernels."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield device


@pytest.fixture
def tf32():
    """Products of float32 matrices on a GPU are tf32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture
def no_compiler(monkeypatch):
    """Nothing is there that compiles CUDA C++."""
    from vecroute.ops.paths.long import by_rows, clusters

    def fail(*args, **kwargs):
        raise OSError("no compiler")

    cached = clusters.kernel, clusters.has_kernels, by_rows.kernel, by_rows.has_kernel
    monkeypatch.setattr(torch.cuda, "_compile_kernel", fail)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def nan_filled_memory():
    """What ``torch.empty`` and its kin hand out is full of NaN, so that memory nobody wrote to shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(scope="session")
def ranks():
    """Four gloo processes, for all tests that need some."""
    from tests.helpers.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a command in this process, as if it had been typed."""
    from tests.helpers.typed import run_typed

    return partial(run_typed, monkeypatch, capfd)
