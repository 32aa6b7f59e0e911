"""The tolerance rule and the fixtures detect errors."""

import copy

import pytest
import torch

import vecroute as vr
from tests.helpers.tolerance import assert_as_good, assert_layer_as_good, outcome

TRUTH = torch.linspace(-2, 2, 101, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_passes(dtype):
    rounded = TRUTH.to(dtype)
    assert_as_good("x_out", rounded, rounded, TRUTH)
    assert_as_good("x_out", rounded * (1 + torch.finfo(dtype).eps), rounded, TRUTH)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_error_three_times_that_of_the_reference_fails(dtype):
    noise = 100 * torch.finfo(dtype).eps * torch.randn_like(TRUTH)
    reference = (TRUTH + noise).to(dtype)
    assert_as_good("x_out", (TRUTH + 1.8 * noise).to(dtype), reference, TRUTH)
    with pytest.raises(AssertionError, match="x_out: max error"):
        assert_as_good("x_out", (TRUTH + 3 * noise).to(dtype), reference, TRUTH)


def test_many_small_errors_fail_by_the_rms():
    reference = TRUTH.clone()
    reference[0] += 1e-3
    with pytest.raises(AssertionError, match="allowed rms error"):
        assert_as_good("x_out", TRUTH + 1.5e-3, reference, TRUTH)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.1])
def test_one_wrong_element_fails(wrong):
    got = TRUTH.clone()
    got[50] = wrong
    with pytest.raises(AssertionError, match="allowed greatest error"):
        assert_as_good("x_out", got, TRUTH, TRUTH)


def test_message():
    got, truth = torch.tensor([[1.0, 2.5]]), torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    message = (
        r"^grad W_A: max error 5.000e-01, RMS error 3.536e-01; allowed greatest error .*e-06; "
        r"truth up to 2.000e\+00, shape \[1, 2\], dtype torch.float32$"
    )
    with pytest.raises(AssertionError, match=message):
        assert_as_good("grad W_A", got, truth.float(), truth)


def test_wrong_shapes_and_dtypes_fail():
    with pytest.raises(AssertionError, match=r"phi: shape \[1\], the truth has \[2\]"):
        assert_as_good("phi", torch.zeros(1), torch.zeros(2), torch.zeros(2).double())
    with pytest.raises(AssertionError, match=r"phi: torch.float32, the reference has torch.float16"):
        assert_as_good("phi", torch.zeros(2), torch.zeros(2).half(), torch.zeros(2).double())
    with pytest.raises(AssertionError, match=r"the truth is torch.float32, not float64"):
        assert_as_good("phi", torch.zeros(2), torch.zeros(2), torch.zeros(2))


def test_the_outcome_of_a_layer_names_everything():
    layer = vr.VectorRouting(n_inp=None, n_out=3, d_inp=4, d_out=5, n_iters=1)
    values = outcome(layer, torch.randn(6, 4))
    assert set(values) == {"x_out", "phi", "grad x_inp"} | {f"grad {n}" for n, _ in layer.named_parameters()}
    assert values["grad W_G1"].eq(0).all()  # not used in the first iteration
    assert values["grad W_A"].ne(0).all()


class Slightly(vr.VectorRouting):
    """A layer that is wrong by a thousandth in one gradient."""

    def route(self, *args, **kwargs):
        routed = super().route(*args, **kwargs)
        if self.implementation != "reference":
            self.B_A.register_hook(lambda grad: 1.001 * grad)
        return routed


def test_a_layer_wrong_in_one_gradient_fails():
    layer = Slightly(n_inp=7, n_out=3, d_inp=4, d_out=5)
    x_inp = torch.randn(2, 7, 4)
    with pytest.raises(AssertionError, match="grad B_A: max error"):
        assert_layer_as_good(layer, x_inp)
    right = copy.deepcopy(layer)
    right.implementation = "reference"
    assert_layer_as_good(right, x_inp)


def test_unwritten_memory_is_nan(nan_filled_memory):
    x = torch.randn(1000)
    for unwritten in (torch.empty(1000), torch.empty_like(x), x.new_empty(1000)):
        assert unwritten.isnan().all()
