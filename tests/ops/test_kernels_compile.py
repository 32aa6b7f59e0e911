"""The kernels compile for a GPU. Triton's interpreter, in other tests, accepts more than the compiler."""

import ctypes
import os
import subprocess
import sys
from importlib.metadata import files

import pytest

from tests.helpers.batch_kernels import CALLS, launches
from tests.helpers.paths import ROOT
from vecroute.ops.paths.batch import backward_kernels, forward_kernels, products, segments, sum_kernels
from vecroute.ops.paths.long import clusters

SCRIPT = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vecroute.ops.backends.fused import activations as fused_activations
from vecroute.ops.paths.long import halves
from vecroute.ops.backends.fused import matrix as fused_matrix
from vecroute.ops.backends.fused import norm as fused_norm
from vecroute.ops.backends.fused import pair_kernels as fused_pairs
from vecroute.ops.backends.fused import product as fused_product
from vecroute.ops.paths import wide
from vecroute.ops.backends.fused import steps as fused_steps
from vecroute.ops.backends.fused import sums as fused_sums

POINTERS = "x f a b out phi pairs results dot use c_sum c_ign sqrt_n_inp scaled W_A B_A W_S B_S grad_x"
POINTERS += " top tops M_tops parts sum_0 sum_1 sum_2 sum_3 y s u g W_F1 B_F2 W_G2 B_G2 x_out"
POINTERS += " beta_use beta_ign sums values W_use W_ign B_use B_ign bias"
POINTERS = POINTERS.split()


def is_pointer(name):
    return name in POINTERS or name.startswith("grad_") and not name.endswith(("_0", "_b", "_i", "_x_d",
                                                                               "_start"))


def kind(name, constants, descriptors):
    if name in descriptors:
        return descriptors[name]
    return "constexpr" if name in constants else "*fp32" if is_pointer(name) else "i32"


def compile(kernel, num_warps, descriptors={}, **constants):
    names = kernel.arg_names
    kinds = [kind(name, constants, descriptors) for name in names]
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=dict(zip(names, kinds)), constexprs=values)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert kernel.__name__ in compiled.asm["ptx"]
    print(kernel.__name__)


blocks = {"BLOCK_I": 8, "BLOCK_J": 128, "TILES": 2, "VEC": 4}
fixed = {"FIRST": False, "FIXED": True, "MASKED": True, "TRANSPOSED": True, **blocks}
variable = {"FIRST": True, "FIXED": False, "MASKED": False, "TRANSPOSED": False, **blocks}
fixed |= {"C_OF_ALL": True, "BOTH": False, "PRIOR": 0.0}
variable |= {"C_OF_ALL": False, "BOTH": True, "PRIOR": 0.01}
compile(fused_pairs.coefficients_kernel, 4, ACTIVATE=False, **fixed)
compile(fused_pairs.coefficients_kernel, 4, ACTIVATE=True, **variable)
whole = {"RESULTS_OF_ALL": True, "GRADS_OF_ALL": True}
one_tile = fixed | whole | {"TILES": 1}
compile(fused_pairs.coefficients_backward_kernel, 8, ADDS_UP=False, HALVED=True, **one_tile)
of_halves = {"pairs": "*bf16", "results": "*fp16"}
compile(fused_pairs.coefficients_backward_kernel, 8, of_halves, ADDS_UP=False, HALVED=True, **one_tile)
compile(fused_pairs.coefficients_backward_kernel, 8, ADDS_UP=True, HALVED=False, **variable, **whole)
tiles = {"BLOCK_Q": 32, "BLOCK_D": 32}
compile(fused_matrix.shared_rows_kernel, 4, PRIOR=0.01, FLAT=True, WITH_SUM=True, T=tl.float32, **tiles)
for first in (True, False):
    of_rows = {"PRIOR": 0.01, "FLAT": first, "WITH_SUM": True, "FIRST": first, "BLOCK_B": 32, "T": tl.float32}
    compile(fused_matrix.shared_rows_backward_kernel, 4, {"grad": "*fp32"}, **of_rows, **tiles)
compile(fused_matrix.stacked_kernel, 4, {"own": "*bf16", "shared": "*fp32", "out": "*bf16"}, **tiles)
by_row = {"BLOCK_R": 1, "BLOCK_D": 1024, "T": tl.float32}
compile(fused_matrix.scores_matrix_backward_kernel, 4, {"grad": "*fp32", "g": "*bf16"}, **by_row)
compile(fused_sums.sum_rows_kernel, 8, BLOCK_I=1024, BLOCK_J=8, VEC=4, T=tl.float32)
compile(fused_pairs.sum_samples_kernel, 4, BLOCK_B=32, BLOCK_N=32, T=tl.float32)
pairs = dict.fromkeys(("pairs", "dot", "phi", "waiting"), "*bf16")
for first in (True, False):
    rows = {"FIRST": first, "STAGES": 2, "BLOCK_J": 1024, "VEC": 4}
    compile(wide.rows_kernel, 4, pairs, **rows)
    compile(wide.rows_backward_kernel, 4, pairs, ADD=first, WAITS=True, **rows)
compile(fused_activations.activations_kernel, 4, BLOCK_I=4, BLOCK_D=128, T=tl.float32)
sizes = {"BLOCK_I": 4, "BLOCK_D": 128, "T": tl.float32}
compile(fused_activations.activations_backward_kernel, 4, GRAD_X=True, **sizes)
sizes = {"BLOCK_I": 64, "BLOCK_N": 64, "BLOCK_K": 32}
compile(fused_product.rows_kernel, 4, ADD=False, ACTIVATIONS=True, VEC=4, **sizes)
descriptors = dict.fromkeys(("waiting", "phi", "M"), "tensordesc<fp16[64, 32]>")
descriptors |= dict.fromkeys(("x", "W_A", "grad_x", "grad_W_A"), "tensordesc<fp32[64, 64]>")
compile(halves.input_gradient_kernel, 4, descriptors, WAITING=2, **sizes)
rounded = dict.fromkeys(("u", "out", "grad_y", "grad_g", "grad_u", "rounded", "g"), "*bf16")
compile(fused_steps.outputs_kernel, 4, rounded, BLOCK_R=1, BLOCK_D=1024, T=tl.float32)
compile(fused_steps.scores_matrix_kernel, 4, rounded, FIXED=False, BLOCK_R=1, BLOCK_D=1024, T=tl.float32)
vectors = {"v": "*bf16", "grad_v": "*bf16"}
compile(fused_norm.normalize_kernel, 4, vectors, BLOCK_R=2, BLOCK_D=1024)
compile(fused_norm.normalize_backward_kernel, 4, vectors, BLOCK_R=2, BLOCK_D=1024)
steps = {"BLOCK_B": 8, "BLOCK_N": 128, "T": tl.float32}
of_one = {"ONE": True, "ROUNDS": True, "BLOCK_R": 8, "BLOCK_D": 128}
compile(fused_steps.outputs_backward_kernel, 4, rounded, **of_one, **steps)
compile(fused_steps.predictions_backward_kernel, 4, rounded, OF_B=True, **steps)
"""


SHARED_BYTES = 227 * 1024  # greatest shared memory of a program on a Hopper GPU


def printed(*arguments: str) -> list[str]:
    """Return the lines that Python prints in a process where Triton compiles kernels, not interprets them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_every_kernel_compiles():
    assert len(printed("-c", SCRIPT)) == 26


@pytest.mark.parametrize("name", CALLS)
def test_kernels_of_the_batch_path_compile(name):
    """The kernels compile, and need no more shared memory than a GPU has."""
    for line in printed("-m", "tests.helpers.batch_kernels", name):
        kernel, shared_bytes = line.split()
        assert int(shared_bytes) <= SHARED_BYTES, f"{kernel} has {shared_bytes} bytes of shared memory"


def test_other_lengths_compile_nothing():
    """One exception: a sum takes 1, 2, 4 or 8 parts at a time."""
    assert set(printed("-m", "tests.helpers.batch_kernels", "lengths")) <= {"reduce_kernel"}


def test_every_kernel_of_the_batch_path_is_in_one_of_these_calls():
    names = {
        name
        for module in (backward_kernels, forward_kernels, products, segments, sum_kernels)
        for name in vars(module)
        if name.endswith("_kernel")
    }
    assert names
    assert names <= {launch.kernel.__name__ for case in CALLS.values() for launch in launches(case)}


def log_of_compilation(source: str) -> str:
    """Compile CUDA C++, which must not fail, and return the log, which shows the registers of a kernel."""
    (path,) = (file.locate() for file in files("nvidia-cuda-nvrtc") if file.name.startswith("libnvrtc.so"))
    nvrtc, program = ctypes.CDLL(str(path)), ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None) == 0
    options = [b"--gpu-architecture=sm_90a", b"--ptxas-options=-v", b"-default-device"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.value.decode()
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, text
    assert "warning" not in text and "serialized" not in text, text  # noqa: PT018
    return text


@pytest.mark.parametrize(("c", "n_out"), [(2, 100), (4, 100), (4, 32), (8, 64)])
@pytest.mark.parametrize("first", [True, False])
def test_the_kernel_of_clusters_compiles(c, n_out, first):
    """It compiles without a warning, and everything fits the registers, except in clusters of two."""
    log = log_of_compilation(clusters.source(c, n_out, first))
    assert c == 2 or "0 bytes spill stores, 0 bytes spill loads" in log, log
