"""The benchmarks run and write complete rows, and the floor equals a count by hand. No time is tested."""

import argparse
import csv
import math
import sys
from pathlib import Path

import pytest
import torch

import vecroute as vr
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import attention
import classifier
import common
import credit
import heads
import plots
import scaling
import throughput
from floor import Case, elements, floor_ms, flops, memory, parameters

FIXED = Case(n_inp=10, n_out=3, d_inp=4, d_out=5)  # n m d = 120, m d h = 60
VARIABLE = Case(n_inp=10, n_out=3, d_inp=4, d_out=5, variable=True)

# A layer with the signature of the official one.
OTHER_LAYER = """
from torch import nn

class EfficientVectorRouting(nn.Module):
    def __init__(self, n_inp, n_out, d_inp, d_out, n_iters=2):
        super().__init__()
        self.n_inp, self.shape = n_inp, (n_out, d_out)
        self.linear = nn.Linear(d_inp, n_out * d_out)

    def forward(self, x_inp):
        if self.n_inp not in (-1, x_inp.shape[-2]):
            raise ValueError(f"n_inp {self.n_inp}, x_inp {x_inp.shape}")
        return self.linear(x_inp).mean(-2).unflatten(-1, self.shape)
"""


# The floor


@pytest.mark.parametrize(
    ("case", "kept", "expected"),
    [
        (FIXED, False, (6 * 120 + 6 * 60, 14 * 120 + 12 * 60)),
        (FIXED, True, (6 * 120 + 6 * 60, 12 * 120 + 12 * 60)),
        (VARIABLE, False, (12 * 120 + 6 * 60, 32 * 120 + 12 * 60)),
        (VARIABLE, True, (10 * 120 + 6 * 60, 20 * 120 + 12 * 60)),
        (Case(10, 3, 4, 5, n_iters=1), False, (2 * 120 + 2 * 60, 4 * 120 + 4 * 60)),
        (Case(10, 3, 4, 5, n_iters=3), False, (10 * 120 + 10 * 60, 24 * 120 + 20 * 60)),
        (Case(10, 3, 4, 5, n_iters=1, variable=True), True, (4 * 120 + 2 * 60, 10 * 120 + 4 * 60)),
        (Case(10, 3, 4, 5, batch=2), False, (12 * 120 + 12 * 60, 28 * 120 + 24 * 60)),
    ],
)
def test_flops_by_hand(case, kept, expected):
    assert flops(case, kept=kept) == expected


def test_bytes_by_hand():
    # Fixed: W_A, B_A 50; betas, W_S, B_S 120; F and G 91; x 40; x_out 15.
    read = 2 * 40 + 50 + 91 + (2 + 1) * 60 + 15
    assert elements(FIXED) == (read, read + 40 + 50 + 120 + 91)
    # Variable: W_A, B_A 5; F, G, the maps to the betas, W_S and B_S 91 + 30 + 6.
    read = 2 * 40 + 5 + 127 + 15
    assert elements(VARIABLE) == (read, read + 40 + 5 + 127)
    # A batch has the same parameters as a sample.
    assert elements(Case(10, 3, 4, 5, batch=2))[0] == elements(FIXED)[0] + 2 * 40 + 15
    assert memory(FIXED) == (40 + 261, 2 * (40 + 261))
    assert memory(VARIABLE) == (40 + 132, 2 * (40 + 132))


@pytest.mark.parametrize("case", [FIXED, VARIABLE])
def test_parameters_are_those_of_the_layer(case):
    n_inp = None if case.variable else case.n_inp
    layer = vr.VectorRouting(n_inp=n_inp, n_out=case.n_out, d_inp=case.d_inp, d_out=case.d_out)
    assert parameters(case) == common.count(layer)


def test_floor_is_the_slower_of_arithmetic_and_memory():
    million = Case(n_inp=1_000_000)
    slow_products = floor_ms(million, flops_per_s=51e12, bytes_per_s=4.27e12)
    assert slow_products == pytest.approx((12.06, 40.19), abs=0.01)
    slow_memory = floor_ms(million, flops_per_s=403e12, bytes_per_s=4.27e12)
    assert slow_memory == pytest.approx((3.44, 9.18), abs=0.01)
    halved = floor_ms(million, flops_per_s=403e13, bytes_per_s=4.27e12, element_size=2)
    assert halved == pytest.approx((slow_memory[0] / 2, slow_memory[1] / 2))


# The runs


@pytest.fixture
def tiny(monkeypatch):
    """Replace the sizes by tiny ones."""
    monkeypatch.setattr(scaling, "SHORT_AXES", dict.fromkeys(scaling.AXES, (2, 3, 5)))
    monkeypatch.setattr(heads, "shortened", lambda case: case)
    monkeypatch.setitem(heads.CPU_SHAPES, "fixed", [FIXED])
    monkeypatch.setitem(heads.GPU_SHAPES, "text-head", [VARIABLE, Case(3, 2, 5, 1)])
    monkeypatch.setattr(common, "N_MATMUL", {"cpu": 16})
    monkeypatch.setattr(common, "N_COPY", {"cpu": 16})


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def empty(rows: list[dict[str, str]]) -> set[str]:
    """Return the columns that are empty in a row."""
    return {name for row in rows for name, value in row.items() if value == ""}


def options(results: Path, *more: str) -> list[str]:
    return ["--device", "cpu", "--short", "--seconds", "0.001", "--results", str(results), *more]


def test_rows_and_figures(tiny, tmp_path):
    scaling.main(options(tmp_path, "--cases", "axes"))
    attention.main(options(tmp_path, "--d", "16", "--lengths", "2", "4", "8"))
    heads.main(options(tmp_path, "--cases", "fixed"))
    for name in ("scaling", "attention", "heads"):
        rows = read(tmp_path / f"{name}.csv")
        unknown = {"note", "triton", *(column for column in rows[0] if "speedup" in column)}
        assert empty(rows) <= unknown, name
        assert all(float(row["both_mb"]) > 0 and float(row["both_ms"]) > 0 for row in rows), name
    rows = read(tmp_path / "scaling.csv")
    assert {row["implementation"] for row in rows} == {"reference", "chunked"}
    assert [row["n_out"] for row in rows if row["case"] == "n_out"] == ["2", "2", "3", "3", "5", "5"]
    fits = read(tmp_path / "scaling_fits.csv")
    assert len(fits) == len(scaling.AXES) * len(scaling.QUANTITIES) * 2
    assert all(float(fit["r2"]) > 1 - 1e-6 for fit in fits if fit["quantity"] == "parameters")
    assert {row["model"] for row in read(tmp_path / "attention.csv")} == {"encoder", "chunked"}
    assert len(read(tmp_path / "attention_crossovers.csv")) == len(attention.QUANTITIES)
    plots.main(["--results", str(tmp_path)])
    for name in ("scaling.png", "attention.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp"))


def test_rows_against_another_layer(tiny, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(OTHER_LAYER)
    against = options(tmp_path, "--against", str(other), "--implementations", "chunked")
    scaling.main([*against, "--cases", "axes", "--axes", "n_inp"])
    heads.main([*against, "--cases", "fixed", "text-head"])
    for name in ("scaling", "heads"):
        rows = read(tmp_path / f"{name}.csv")
        assert empty(rows) <= {"note", "triton"}
        assert {row["implementation"] for row in rows} == {"official", "chunked"}
        assert all(row["both_speedup"] == "1" for row in rows if row["implementation"] == "official")


@pytest.mark.slow
def test_classifier_rows(tmp_path):
    classifier.main(options(tmp_path))
    rows = read(tmp_path / "classifier.csv")
    assert empty(rows) <= {"triton"}
    assert [row["unit"] for row in rows] == [*"sss", "x", "texts/s", "texts/s", "x", "s", "s", "x"]
    assert all(float(row["value"]) > 0 for row in rows)


def test_throughput_rows(monkeypatch, tmp_path):
    """Rows of a part are written even if the part fails later."""

    def fails(*_):
        yield "first", 1.0, "s"
        raise RuntimeError("no memory")

    monkeypatch.setattr(throughput, "encoder_of", lambda *_, **__: argparse.Namespace(dtype=torch.float32))
    monkeypatch.setattr(throughput, "epochs", fails)
    monkeypatch.setattr(throughput, "killing", lambda *_: iter([("kills", 2.0, "runs")]))
    with pytest.raises(SystemExit, match="failed: epochs"):
        throughput.main(options(tmp_path, "--data", str(tmp_path), "--parts", "epochs", "kills"))
    rows = read(tmp_path / "throughput.csv")
    assert [(row["what"], row["value"]) for row in rows] == [("first", "1"), ("kills", "2")]
    assert empty(rows) <= {"triton"}


def test_credit_rows(monkeypatch, tmp_path):
    for name in ("cost", "words", "images"):
        monkeypatch.setitem(credit.PARTS, name, lambda *_: [("cost", 1.0, "x forward")])
    credit.main(options(tmp_path))
    assert empty(read(tmp_path / "credit.csv")) <= {"triton"}


def test_the_largest_credit_matrix_is_computed_whole():
    rows = {what: (value, unit) for what, value, unit in credit.images("cpu", 1, n_inp=20, n_cls=5)}
    case = "20 x 5 end-to-end credit of unit variance"
    assert rows[f"{case}: one matrix"] == (20 * 5 * 4 / common.MB, "MB")
    assert rows[f"{case}: time"][0] > 0


def test_the_longest_sequence_of_the_paper_is_a_case():
    options = argparse.Namespace(device="cpu", modes=None, short=False, cases=["longest"], axes=[])
    ((name, case, modes),) = scaling.cases(options)
    assert (name, case.shape, case.n_out, case.variable, modes) == (
        "longest",
        (89_600, 1024),
        64,
        True,
        ["fp32"],
    )


def test_what_does_not_fit_into_memory_is_noted(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "available_mb", lambda device: 0.0)
    scaling.main(options(tmp_path, "--axes", "d_out", "--cases", "axes"))
    rows = read(tmp_path / "scaling.csv")
    assert {row["note"] for row in rows} == {"not enough memory"}
    assert {*scaling.QUANTITIES} <= empty(rows)
    assert not (tmp_path / "scaling_fits.csv").exists()


def test_a_file_to_compare_with_must_exist(tmp_path):
    with pytest.raises(SystemExit, match=r"--against: there is no file .*none.py"):
        scaling.main(options(tmp_path, "--against", str(tmp_path / "none.py")))


# Measurements


def test_runs_take_turns():
    order: list[str] = []
    times = common.time_ms({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, "cpu", 0.0)
    assert order == ["a", "b"] * 5  # two warm-up rounds, three that count
    assert times.keys() == {"a", "b"}


def test_peak_sees_memory_that_is_freed():
    with common.Peak("cpu") as peak:
        torch.ones(16 * common.MB)  # 64 MB
    assert 60 < peak.mb < 72  # the system counts whole batches of pages


def test_passes_make_gradients_anew():
    layer = vr.VectorRouting(n_inp=4, n_out=3, d_inp=2, d_out=2)
    x_inp = common.random_input((4, 2), "fp32", "cpu")
    both = common.passes(layer, x_inp, "fp32", "cpu")["both"]
    both()
    first = x_inp.grad
    both()
    assert x_inp.grad is not first
    torch.testing.assert_close(x_inp.grad, first)


@pytest.mark.parametrize(("mode", "expected"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "tf32")])
def test_precision_of_products_is_set_and_set_back(mode, expected):
    before = torch.backends.cuda.matmul.fp32_precision
    with common.product_precision(mode):
        assert torch.backends.cuda.matmul.fp32_precision == expected
    assert torch.backends.cuda.matmul.fp32_precision == before


# Rows


def test_fit_of_a_line():
    line = [{"implementation": "chunked", "mode": "fp32", "n_inp": n} for n in (1, 2, 4)]
    for row in line:
        row |= dict.fromkeys(scaling.QUANTITIES, 7.0) | {"both_ms": 3.0 + 2.0 * row["n_inp"]}
    line[0]["forward_ms"] = 0.0
    fits = {row["quantity"]: row for row in scaling.fit(line, "n_inp")}
    assert (fits["both_ms"]["slope"], fits["both_ms"]["intercept"]) == pytest.approx((2.0, 3.0))
    assert float(fits["both_ms"]["r2"]) == pytest.approx(1)
    assert (fits["parameters"]["slope"], fits["parameters"]["r2"]) == (0.0, "1.000000")
    # Points (1, 0), (2, 7), (4, 7): R^2 = 7^2 * (4 / 3)^2 / (14 / 3 * 98 / 3).
    assert float(fits["forward_ms"]["r2"]) == pytest.approx(4 / 7, abs=1e-6)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((0.5, 2.0, 4.0), ("at", 200.0, 100)),  # halfway between 100 and 400, in powers
        ((0.5, 0.5, 0.5), ("above", 1600.0, 100)),
        ((2.0, 0.5, 2.0), ("at", 800.0, 400)),
        ((0.5, 2.0, 0.5), ("above", 1600.0, 1600)),  # in between it needs more
        ((2.0, 3.0, 4.0), ("never", None, None)),
    ],
)
def test_crossover(ratios, expected):
    logs = [(n, math.log(ratio)) for n, ratio in zip((100, 400, 1600), ratios, strict=True)]
    found = attention.crossover(logs)
    assert (found["relation"], found["from_N"]) == (expected[0], expected[2])
    assert found["N"] == (None if expected[1] is None else pytest.approx(expected[1]))


def test_of_rows_measured_twice_the_later_is_drawn():
    rows = [{"N": "4", "ms": "1"}, {"N": "2", "ms": "3"}, {"N": "4", "ms": "2"}, {"N": "8", "ms": ""}]
    assert plots.points(rows, "N", "ms") == ([2.0, 4.0], [3.0, 2.0])


def test_a_figure_without_rows_is_told(tiny, tmp_path, capsys):
    scaling.main(options(tmp_path, "--cases", "axes", "--axes", "n_out", "--implementations", "chunked"))
    attention.main(options(tmp_path, "--d", "16", "--lengths", "2", "4"))
    capsys.readouterr()
    plots.main(["--results", str(tmp_path), "--device", "another device"])
    assert capsys.readouterr().out.splitlines() == [
        "no scaling.png: scaling.csv has no rows for this device",
        "no attention.png: attention.csv has no rows for this device",
    ]
    assert not list(tmp_path.glob("*.png"))
