"""The benchmark of eager calls writes whole rows and counts Python calls. No time is tested."""

import sys
from argparse import Namespace

import pytest
import torch

from tests.benchmarks.test_benchmarks import OTHER_LAYER, empty, options, read
from tests.helpers.paths import ROOT
from vecroute.ops.checks import check_size

sys.path.insert(0, str(ROOT / "benchmarks"))

import calls
import common
import eager
from floor import Case

GPU_ONLY = {"captured_ms", "kernels", "copies"}
SOMETIMES = {"speedup", "graphs", "calls", "jumps", "triton"}


def key(row: dict[str, str]) -> tuple[str, str]:
    return row["kind"], row["implementation"]


def test_rows_of_layers(tmp_path):
    eager.main(options(tmp_path, "--cases", "text", "fixed", "packed64"))
    rows = read(tmp_path / "eager.csv")
    assert list(rows[0]) == [*eager.COLUMNS, *common.about("cpu")]
    assert empty(rows) <= GPU_ONLY | SOMETIMES
    text = [row for row in rows if row["case"] == "text"]
    assert [key(row) for row in text] == [(kind, "chunked") for kind in ("plain", "masked", "packed")]
    assert [row["variable"] for row in rows] == ["True"] * 3 + ["False"] + ["True"] * 4
    assert all(float(row["whole_ms"]) > 0 and row["host_ms"] == row["whole_ms"] for row in rows)


def test_every_case_has_rows(tmp_path):
    short = options(tmp_path, "--modes", "fp32", "bf16")
    eager.main([*short, "--cases", *(name for name in eager.CASES if name != "heads")])
    rows = read(tmp_path / "eager.csv")
    assert {(row["case"], row["mode"]) for row in rows} == {
        (name, mode) for name in eager.CASES if name != "heads" for mode in ("fp32", "bf16")
    }
    assert {row["kind"] for row in rows if row["case"] == "lengths"} == {
        "repeated",
        "first sweep",
        "second sweep",
    }


def test_rows_against_another_layer(tmp_path):
    other = tmp_path / "other.py"
    other.write_text(OTHER_LAYER)
    eager.main(options(tmp_path, "--against", str(other), "--cases", "head4", "lengths"))
    rows = read(tmp_path / "eager.csv")
    assert [key(row) for row in rows if row["case"] == "head4"] == [
        ("plain", "official"),
        ("plain", "chunked"),
        ("masked", "chunked"),
        ("packed", "chunked"),
    ]
    assert all(
        row["speedup"] == "1" for row in rows if row["implementation"] == "official" and row["speedup"]
    )
    assert {row["kind"] for row in rows if not row["speedup"]} == {"first sweep"}  # no whole time


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # compilers emit many warnings
def test_rows_of_heads(tmp_path):
    eager.main(options(tmp_path, "--cases", "heads"))
    rows = read(tmp_path / "eager.csv")
    expected = [("masked", name) for name in ("routing", "probe, MLPs", "probe")] + [("compiled", "routing")]
    assert [key(row) for row in rows] == 2 * expected
    assert all(row["graphs"] == "1" for row in rows if row["kind"] == "compiled")


def test_trace_has_a_row_and_a_line(tmp_path, capsys):
    eager.main(options(tmp_path, "--trace"))
    (row,) = read(tmp_path / "eager.csv")
    assert int(row["calls"]) > int(row["jumps"]) > 0
    assert f"{row['calls']} calls into vecroute, {row['jumps']} of them" in capsys.readouterr().out
    assert sys.getprofile() is None


def test_runs_alternate_in_rounds():
    seen: list[str] = []
    runs = [lambda name=name: seen.append(name) for name in "ab"]
    rows = calls.figures(runs, "cpu", seconds=0, least=20)
    assert [set(row) for row in rows] == [{"host_ms", "host_mean_ms", "whole_ms"}] * 2
    assert "".join(seen[-6 * 20 :]) == 3 * (20 * "a" + 20 * "b")


def test_an_official_layer_that_does_not_fit_has_no_row(tmp_path, capsys):
    other = tmp_path / "other.py"
    raises = "raise __import__('torch').OutOfMemoryError('too much')"
    other.write_text(OTHER_LAYER.replace("return self", f"{raises}\n        return self"))
    eager.main(options(tmp_path, "--against", str(other), "--cases", "fixed"))
    (row,) = read(tmp_path / "eager.csv")
    assert (key(row), row["speedup"]) == (("plain", "chunked"), "")
    assert "the official layer fails: too much" in capsys.readouterr().out


class Checks(torch.autograd.Function):
    """A model that calls one function of vecroute in forward and one in backward. These call no others."""

    @staticmethod
    def forward(ctx, x_inp):
        check_size("n", 3)
        return x_inp * 2

    @staticmethod
    def backward(ctx, grad):
        check_size("n", 3)
        return grad * 2


class Checking(torch.nn.Module):
    def forward(self, x_inp):
        return Checks.apply(x_inp)


def test_trace_counts_forward_and_backward():
    x_inp = torch.ones(2, requires_grad=True)
    trace = calls.traced(calls.Call(Checking(), x_inp, {}, "fp32", "cpu"))
    assert (trace.calls, trace.jumps) == (2, 0)  # the caller is not in vecroute


def test_masked_and_packed_calls_have_the_same_samples():
    case = Case(batch=3, n_inp=20, n_out=4, d_inp=8, d_out=8, variable=True)
    given = Namespace(against=None, device="cpu")
    torch.manual_seed(0)
    masked = eager.layer_call(case, "chunked", "fp32", given, "masked")
    packed = eager.layer_call(case, "chunked", "fp32", given, "packed")
    packed.model.load_state_dict(masked.model.state_dict())
    torch.testing.assert_close(packed.forward(), masked.forward())
    assert 2 * 3 <= len(packed.x_inp) < 60


def test_rows_measured_before_an_error_are_kept(tmp_path, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(eager, "lengths", broken)
    with pytest.raises(RuntimeError, match="broken"):
        eager.main(options(tmp_path, "--cases", "fixed", "lengths"))
    assert [row["case"] for row in read(tmp_path / "eager.csv")] == ["fixed"]
