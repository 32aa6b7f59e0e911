"""Products over packed sequences against a loop over the samples in float64."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from vecroute.ops import segments
from vecroute.ops.common import cdiv, compute_dtype

LENGTHS = {
    "first, middle and last empty": [0, 70, 3, 0, 0, 33, 1, 0],
    "one sample": [150],
    "all rows in one sample": [0, 0, 130, 0],
    "samples of one row": [1] * 40,
    "whole blocks": [32, 64, 0, 32],
    "all empty": [0, 0, 0],
}
SIZES = [(1, 17), (5, 8), (4, 100), (16, 40), (129, 17), (70, 200)]  # q, d
DIGITS = {"tf32": 1e-6, "tf32x3": 1e-6, "bf16": 2e-2, "ieee": 1e-13}  # the interpreter rounds nothing to tf32


@pytest.fixture(autouse=True)
def device():
    """A GPU where there is one; elsewhere Triton's interpreter runs the kernels."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield device


def offsets(lengths: list[int], dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def poisoned(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_close(name: str, got: torch.Tensor, truth: torch.Tensor, precision: str):
    """By the error of the whole; tf32 has a few digits less on a GPU."""
    digits = 1e-3 if precision == "tf32" and got.is_cuda else DIGITS[precision]
    error = (got.double() - truth).norm()
    assert error <= digits * truth.norm(), f"{name}: {error / truth.norm():.1e}, {[*got.shape]}, {precision}"


class Case:
    """Operands and what the products must be; M and the outputs have strides of their own."""

    def __init__(self, lengths, q, d, dtype=torch.float32, precision="tf32", block=None, part=None):
        self.precision, self.of_sums = precision, compute_dtype(dtype)
        n, b = sum(lengths), len(lengths)
        self.shape = n, b, q, d
        self.of = segments.segments(offsets(lengths), n, self.of_sums, block, part)
        self.x = torch.randn(n, d + 4).to(dtype)[:, :d]
        self.pairs = torch.randn(n, q + 3, dtype=self.of_sums)[:, :q]
        self.M = torch.randn(b, q + 1, d + 4, dtype=self.of_sums)[:, 1:, :d]
        x, pairs, M = (a.double() for a in (self.x, self.pairs, self.M))
        bounds = list(pairwise(offsets(lengths).tolist()))
        self.rows_times = torch.cat([x[a:e] @ m.mT for (a, e), m in zip(bounds, M, strict=True)])
        self.times_rows = torch.cat([pairs[a:e] @ m for (a, e), m in zip(bounds, M, strict=True)])
        self.sums = torch.stack([pairs[a:e].mT @ x[a:e] for a, e in bounds])
        self.totals = torch.stack([pairs[a:e].sum(0) for a, e in bounds])

    def check(self):
        n, b, q, d = self.shape
        out = poisoned(n, q + 3, dtype=self.of_sums)
        segments.rows_times(self.x, self.M, out[:, :q], self.of, self.precision)
        assert_close("rows_times", out[:, :q], self.rows_times, self.precision)
        assert out[:, q:].isnan().all()
        out = poisoned(n, d + 3, dtype=self.of_sums)
        segments.times_rows(self.pairs, self.M, out[:, :d], self.of, self.precision)
        assert_close("times_rows", out[:, :d], self.times_rows, self.precision)
        segments.times_rows(self.pairs, self.M, out[:, :d], self.of, self.precision, fresh=False)
        assert_close("times_rows added", out[:, :d], 2 * self.times_rows, self.precision)
        assert out[:, d:].isnan().all()
        out, totals = poisoned(b, q + 1, d, dtype=self.of_sums), poisoned(b, q + 2, dtype=self.of_sums)
        segments.sums(self.pairs, self.x, out[:, :q], totals[:, :q], self.of, self.precision)
        assert_close("sums", out[:, :q], self.sums, self.precision)
        assert_close("totals", totals[:, :q], self.totals, "tf32x3")
        assert out[:, q:].isnan().all()
        assert totals[:, q:].isnan().all()


@pytest.mark.parametrize("sizes", [(16, 32), (64, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_tables(lengths, dtype, sizes, nan_filled_memory):
    n, b = sum(lengths), len(lengths)
    of = segments.segments(offsets(lengths, dtype), n, torch.float64, *sizes)
    assert of.sample.tolist() == [s for s, length in enumerate(lengths) for _ in range(length)]
    assert of.sqrt_n_inp.tolist() == [max(1, length) ** 0.5 for length in lengths]
    starts = offsets(lengths).tolist()
    for table, rows in zip((of.tiles, of.parts), sizes, strict=True):
        assert table.shape == (cdiv(n, rows) + b, 3)
        expected = [
            (s, first, min(first + rows, end))
            for s, (start, end) in enumerate(pairwise(starts))
            for first in range(start, end, rows)
        ]
        assert [tuple(row) for row in table.tolist() if row[1] < row[2]] == expected
        assert all(row[1:] == [0, 0] for row in table.tolist() if row[1] >= row[2])


def test_tables_of_many_samples(nan_filled_memory):
    lengths = (torch.arange(30_000) % 7 % 3).tolist()
    n = sum(lengths)
    of = segments.segments(offsets(lengths), n)
    assert torch.equal(
        of.sample.long(), torch.arange(30_000).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    )
    used = of.tiles[of.tiles[:, 1] < of.tiles[:, 2]]
    assert torch.equal(used[1:, 1], used[:-1, 2])
    assert (used[0, 1], used[-1, 2]) == (0, n)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_products_of_all_lengths(lengths, nan_filled_memory):
    Case(lengths, 5, 40, block=16, part=32).check()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("part", [16, None], ids=["parts", "whole samples"])
def test_products_of_all_sizes(size, part, nan_filled_memory):
    Case([0, 70, 3, 0, 33, 1, 0], *size, part=part).check()


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_of_all_dtypes(dtype, precision, nan_filled_memory):
    Case([40, 0, 90, 2], 70, 136, dtype, precision, part=32).check()


def test_products_in_float64(nan_filled_memory):
    Case([40, 0, 90, 2], 66, 37, torch.float64, "ieee", part=32).check()


def test_aligned_operands(nan_filled_memory):
    """All sizes are multiples of what is loaded at once, and nothing is strided."""
    case = Case([40, 0, 90, 2], 64, 128, part=32)
    case.x, case.pairs, case.M = case.x.contiguous(), case.pairs.contiguous(), case.M.contiguous()
    case.check()


def test_sums_are_the_same_every_time():
    case = Case([300, 0, 20], 5, 40, part=16)
    results = []
    for _ in range(2):
        out, totals = poisoned(3, 5, 40), poisoned(3, 5)
        segments.sums(case.pairs, case.x, out, totals, case.of, "tf32")
        results.append((out, totals))
    assert all(map(torch.equal, *results))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU stops at the first wrong offset")
@pytest.mark.parametrize(
    "wrong", [[0, 90, 20, 50], [-7, 20, 60, 99], [0, 2**40, -(2**40), 50], [50, 50, 0, 0]]
)
def test_wrong_offsets_stay_inside(wrong, nan_filled_memory):
    """Elsewhere nothing is asserted, but no kernel reads or writes outside."""
    n, q, d = 50, 5, 20
    of = segments.segments(torch.tensor(wrong), n, block=16, part=16)
    assert of.sample.min() >= 0
    assert of.sample.max() < 3
    for table in (of.tiles, of.parts):
        assert ((table[:, 0] >= 0) & (table[:, 0] < 3)).all()
        assert ((table[:, 1] >= 0) & (table[:, 1] <= table[:, 2]) & (table[:, 2] <= n)).all()
        assert (table[:, 2] - table[:, 1] <= 16).all()
    # Neighbours of what is written must stay NaN.
    out, totals = poisoned(5, q, d), poisoned(5, q)
    segments.sums(torch.randn(n, q), torch.randn(n, d), out[1:4], totals[1:4], of, "tf32")
    rows = poisoned(n + 2, q)
    segments.rows_times(torch.randn(n, d), torch.randn(3, q, d), rows[1:-1], of, "tf32")
    for each in (out, totals, rows):
        assert each[0].isnan().all()
        assert each[-1].isnan().all()


def test_blocks():
    """No block of columns is emptier than it must be."""
    assert [segments.columns(q, "tf32") for q in (1, 5, 64, 100, 128, 129, 192, 256)] == [
        16, 16, 64, 128, 128, 64, 64, 128,
    ]  # fmt: skip
    assert segments.in_units("VEC", a=24, b=8) == {"VEC": 8, "a": 3, "b": 1}
    assert segments.in_units("VEC", True, a=24, b=8) == {"VEC": 1, "a": 24, "b": 8}


SCRIPT = """
import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vecroute.ops import segments

NAMES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16"}
NAMES |= {torch.int32: "*i32", torch.int64: "*i64"}


class Compiled:
    '''A kernel that is compiled instead of launched, specialised as a launch would.'''

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        values, kinds, constants, hints = dict(zip(self.kernel.arg_names, args)), {}, {}, {}
        values |= {name: options.pop(name) for name in self.kernel.arg_names if name in options}
        for i, parameter in enumerate(self.kernel.params):
            value, special = values[parameter.name], not parameter.do_not_specialize
            if isinstance(value, torch.Tensor):
                kinds[parameter.name] = NAMES[value.dtype]
            elif parameter.is_constexpr or value == 1 and special:
                kinds[parameter.name], constants[i,] = "constexpr", value
            else:
                kinds[parameter.name] = "i32"
            if isinstance(value, torch.Tensor) or (i,) not in constants and special and value % 16 == 0:
                hints[i,] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self.kernel, signature=kinds, constexprs=constants, attrs=hints)
        options["debug"] = bool(self.kernel.debug)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx, name = compiled.asm["ptx"], self.kernel.__name__
        found = re.findall("wgmma.mma_async|mma.sync|__assertfail|cp.async.cg.shared.global", ptx)
        print(name, *sorted(set(found)))


for name in dir(segments):
    if name.endswith("_kernel"):
        setattr(segments, name, Compiled(getattr(segments, name)))


def products(n, q, d, dtype=torch.float32, precision="tf32"):
    float64 = torch.float64 if dtype == torch.float64 else torch.float32
    of = segments.segments(torch.empty(17, dtype=torch.int32), n, float64)
    x, M, pairs = (torch.empty(s, dtype=float64) for s in ((n, d), (16, q, d), (n, q)))
    segments.rows_times(x.to(dtype), M, pairs, of, precision)
    segments.times_rows(pairs, M, x, of, precision)
    segments.sums(pairs, x.to(dtype), M, M[:, :, 0].contiguous(), of, precision)
"""


def compiled(call: str) -> dict[str, set[str]]:
    """The instructions of interest by kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT + call]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.split()[0]: set(line.split()[1:]) for line in done.stdout.splitlines()}


PRODUCTS = ["rows_times_kernel", "times_rows_kernel", "sums_kernel"]


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "bf16"])
def test_large_products_use_wgmma(precision):
    dtype = "bfloat16" if precision == "bf16" else "float32"
    found = compiled(f"products(20_000, 128, 1024, torch.{dtype}, '{precision}')")
    assert len(found) == 5
    assert "__assertfail" in found["segment_kernel"]
    for kernel in PRODUCTS:
        assert "wgmma.mma_async" in found[kernel], kernel
    assert "cp.async.cg.shared.global" in found["rows_times_kernel"]  # 16 bytes at once


def test_few_columns_are_summed_from_aligned_rows():
    """wgmma would need 64 columns; x is most of what is read."""
    found = compiled("products(20_000, 5, 1000)")
    assert found["sums_kernel"] >= {"mma.sync", "cp.async.cg.shared.global"}
    assert found["rows_times_kernel"] >= {"wgmma.mma_async", "cp.async.cg.shared.global"}


@pytest.mark.parametrize("call", ["130, 1, 8", "5000, 129, 17", "5000, 8, 17, torch.float64, 'ieee'"])
def test_odd_sizes_compile(call):
    """Also where a size in units is 1, which the compiler takes for a constant."""
    assert len(compiled(f"products({call})")) == 5
