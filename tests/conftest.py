"""Settings and fixtures that all tests share."""

import os
from functools import partial

import pytest
import torch
from hypothesis import settings

# cuBLAS needs this for deterministic algorithms, and reads it only once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Without a GPU, Triton kernels run in Triton's interpreter. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# No test may use the network.
os.environ["HF_HUB_OFFLINE"] = "1"

# Several processes run tests at the same time, so each uses one thread.
torch.set_num_threads(1)

# Derandomized, so that a failure repeats. Slow tests set a larger number of examples.
settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def seed():
    """Seed the generator, so that a test does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def precision():
    """Restore the matmul precision, which benchmarks and scripts change, after each module."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv
    before, each = torch.get_float32_matmul_precision(), [backend.fp32_precision for backend in backends]
    yield
    torch.set_float32_matmul_precision(before)
    for backend, own in zip(backends, each, strict=True):
        backend.fp32_precision = own


@pytest.fixture
def device():
    """Create tensors on the GPU if there is one, else on the CPU, where Triton interprets the kernels."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield device


@pytest.fixture
def tf32():
    """Let products of float32 matrices on a GPU use tf32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture
def limits(monkeypatch):
    """Set thresholds of plans for one test, as in ``limits(TILE=32)``; no plan outlives the change."""
    from vecroute.ops.plan import limits, make_plan

    def change(**values) -> None:
        for name, value in values.items():
            monkeypatch.setattr(limits, name, value)
        make_plan.cache_clear()

    yield change
    make_plan.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch):
    """Nothing is there that compiles CUDA C++; the first plan for a Hopper GPU warns."""
    from vecroute.ops.plan import make_plan
    from vecroute.ops.plan.case import device_of

    def fail():
        raise OSError("no compiler")

    monkeypatch.setattr("torch.cuda._utils._get_gpu_rtc_library", fail)
    for function in (device_of, make_plan):
        function.cache_clear()
    yield
    for function in (device_of, make_plan):
        function.cache_clear()


@pytest.fixture
def nan_filled_memory():
    """Fill the memory of ``torch.empty`` with NaN, so that reading unwritten memory fails a test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(scope="session")
def ranks():
    """Four gloo processes, shared by all tests."""
    from tests.helpers.ranks import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a ``vecroute`` command in this process."""
    from tests.helpers.typed import run_typed

    return partial(run_typed, monkeypatch, capfd)
