"""The model of a sharded step predicts the bytes that processes send, and agrees with a count by hand."""

import csv
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.ranks import mesh_of

sys.path.insert(0, str(ROOT / "benchmarks"))
import sharded_model
from floor import Case
from sharded_model import Network, all_reduce_s, messages, simulate

import vecroute as vr

CASES = {
    "variable": Case(12, 3, 5, 4, variable=True),
    "fixed": Case(12, 3, 5, 4),
    "one iteration": Case(12, 3, 5, 4, n_iters=1, variable=True),
    "three iterations, batch": Case(12, 2, 7, 3, n_iters=3, variable=True, batch=4),
}


def bytes_of_a_step(n_ranks: int, case: Case) -> int:
    layer, x_inp = sharded_model.layer_and_input(case, case.n_inp // n_ranks)
    return sharded_model.counted(vr.distributed.shard_inputs(layer, mesh_of(n_ranks)), x_inp)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_predicted_bytes_are_the_bytes_sent(ranks, name, n_ranks):
    predicted = sum(map(sum, messages(CASES[name])))
    assert ranks(n_ranks, bytes_of_a_step, n_ranks, CASES[name]) == [predicted] * n_ranks


def test_a_step_by_hand():
    case, network = Case(100, 3, 5, 4, variable=True), Network(latency=1.0, bandwidth=100.0)
    assert messages(case) == ([24, 8, 72, 72], [60, 4 * (6 + 6 + 36)])
    # Two ranks: each of the six messages takes two hops, and passes all of its bytes once.
    found = simulate(case, 2, network, (10.0, 20.0))
    assert found["bytes"] == 24 + 8 + 72 + 72 + 60 + 192
    assert found["travelling_s"] == pytest.approx(6 * 2 + found["bytes"] / 100)
    assert found["step_s"] == pytest.approx(30 + found["travelling_s"])
    assert found["waiting_s"] == pytest.approx(0)
    assert simulate(case, 1, network, (10.0, 20.0))["step_s"] == pytest.approx(30)
    # With a fixed length, the backward of the first iteration has work, but no message after it.
    assert simulate(Case(100, 3, 5, 4), 1, network, (10.0, 20.0))["step_s"] == pytest.approx(30)


def test_the_faster_of_ring_and_tree():
    network = Network(latency=1.0, bandwidth=100.0)
    assert all_reduce_s(1000, 1, network) == 0
    assert all_reduce_s(800, 4, network) == pytest.approx(min(6 * (1 + 2), 4 + 16))
    assert all_reduce_s(0, 1024, network) == pytest.approx(20)


def test_ranks_wait_for_the_slowest():
    case, network = Case(100, 3, 5, 4, variable=True), Network(latency=0.0, bandwidth=1e9)
    even, uneven = (simulate(case, 64, network, (1.0, 2.0), jitter=jitter) for jitter in (0.0, 0.1))
    assert 1.1 < uneven["step_s"] / even["step_s"] < 1.4  # the slowest of 64 is 2.4 deviations late


@pytest.mark.slow
def test_rows_of_the_check(tmp_path):
    sharded_model.main(["--check", "--short", "--processes", "1", "2", "--results", str(tmp_path)])
    with (tmp_path / "sharded_model.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["ranks"] for row in rows] == ["1", "2"]
    assert all(row["bytes_counted"] == row["bytes_predicted"] for row in rows)
    assert all(float(row["measured_ms"]) > 0 for row in rows)


def test_a_prediction_is_printed(tmp_path, capsys):
    sharded_model.main(["--n-inp", "1e6", "--ranks", "1", "8", "--results", str(tmp_path)])
    one, eight = capsys.readouterr().out.splitlines()
    assert one.startswith("     1 ranks: step ")
    assert "messages 2.05 MB in" in eight
