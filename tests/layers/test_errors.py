"""Errors for wrong arguments: each names the argument, the expected value, and the given value."""

import re

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vecroute as vr
from tests.helpers.samples import KINDS, make
from vecroute.ops.checks import check_mask

SIZES = {"n_out": 3, "d_inp": 4, "d_out": 2}


def vector(n_inp: int | None = None, **options) -> vr.VectorRouting:
    return vr.VectorRouting(n_inp=n_inp, **(SIZES | options))


def general(n_inp: int | None = None, **options) -> vr.GeneralRouting:
    networks = {
        "A": nn.Linear(4, 1),
        "F": vr.networks.EfficientVotes(**SIZES),
        "G": nn.Linear(2, 4),
        "S": vr.networks.DotProduct(),
    }
    return vr.GeneralRouting(n_inp=n_inp, **(networks | {"n_out": 3, "d_inp": 4} | options))


def matrix(n_inp: int | None = None, **options) -> vr.MatrixRouting:
    return vr.MatrixRouting(n_inp=n_inp, **({"d_cov": 5} | SIZES | options))


def x_inp(*batch: int, n_inp: int = 5) -> Tensor:
    return torch.randn(*batch, n_inp, 4)


def raises(kind: type[Exception], message: str):
    """Expect an error with exactly this message."""
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


VECTORS = pytest.mark.parametrize("make_layer", [vector, general], ids=["vector", "general"])
VERBS = pytest.mark.parametrize("verb", ["__call__", "route", "trace"])

# Wrong x_inp for a layer of five inputs of size 4, and the given value in the message.
WRONG_FIXED = {
    "no dimension": (torch.randn(()), "[]"),
    "wrong rank": (torch.randn(4), "[4]"),
    "wrong d_inp": (torch.randn(5, 3), "[5, 3]"),
    "too long": (torch.randn(2, 6, 4), "[2, 6, 4]"),
    "length 1": (torch.randn(2, 1, 4), "[2, 1, 4]"),
    "empty": (torch.randn(0, 4), "[0, 4]"),
}
# Wrong x_inp for a layer of any number of inputs of size 4, the error, and the message.
EXPECTED = "[..., n_inp, d_inp=4]"
TENSOR, DTYPE = f"a floating-point tensor {EXPECTED}, got", "have the dtype of the layer, torch.float32, got"
WRONG_VARIABLE = {
    "wrong rank": (torch.randn(4), ValueError, f"be {EXPECTED}, got [4]"),
    "wrong d_inp": (torch.randn(2, 5, 1), ValueError, f"be {EXPECTED}, got [2, 5, 1]"),
    "empty": (torch.randn(2, 0, 4), ValueError, f"be {EXPECTED} with at least one vector, got [2, 0, 4]"),
    "integers": (torch.ones(5, 4).long(), TypeError, f"be {TENSOR} dtype torch.int64"),
    "booleans": (torch.ones(5, 4).bool(), TypeError, f"be {TENSOR} dtype torch.bool"),
    "complex": (torch.ones(5, 4).cfloat(), TypeError, f"be {TENSOR} dtype torch.complex64"),
    "list": ([[1.0] * 4], TypeError, f"be {TENSOR} list"),
    "array": (np.ones((5, 4)), TypeError, f"be {TENSOR} ndarray"),
    "None": (None, TypeError, f"be {TENSOR} NoneType"),
    "float64": (torch.randn(5, 4).double(), TypeError, f"{DTYPE} torch.float64"),
    "float16": (torch.randn(5, 4).half(), TypeError, f"{DTYPE} torch.float16"),
    "device": (torch.randn(5, 4).to("meta"), ValueError, "be on the device of the layer, cpu, got meta"),
}


@VERBS
@VECTORS
@pytest.mark.parametrize(("x", "came"), WRONG_FIXED.values(), ids=WRONG_FIXED)
def test_wrong_inputs_of_a_fixed_length(make_layer, verb, x, came):
    with raises(ValueError, f"x_inp must be [..., n_inp=5, d_inp=4], got {came}"):
        getattr(make_layer(5), verb)(x)


@VERBS
@VECTORS
@pytest.mark.parametrize(("x", "kind", "message"), WRONG_VARIABLE.values(), ids=WRONG_VARIABLE)
def test_wrong_inputs_of_any_length(make_layer, verb, x, kind, message):
    with raises(kind, f"x_inp must {message}"):
        getattr(make_layer(), verb)(x)


def test_the_message_of_the_design():
    layer = vr.VectorRouting(n_inp=64, n_out=2, d_inp=8, d_out=2)
    with raises(ValueError, "x_inp must be [..., n_inp=64, d_inp=8], got [2, 63, 8]"):
        layer(torch.randn(2, 63, 8))


def test_wrong_inputs_with_a_place_for_phi():
    with raises(TypeError, f"x_inp must be {TENSOR} list"):
        vector().route([[1.0] * 4], phi_out=torch.zeros(1, 3))


def test_mixed_dtypes_are_what_autocast_is_for():
    layer = vector()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x_inp().bfloat16()).dtype == torch.bfloat16


def test_networks_of_another_dtype():
    with raises(TypeError, "x_inp must have the dtype of the layer, torch.float32, got torch.float64"):
        general(beta_use=1, beta_ign=0)(x_inp().double())


def test_general_routing_without_parameters_takes_any_dtype():
    layer = general(
        A=lambda x: x[..., 0],
        F=lambda x: x[..., None, :].expand(*x.shape[:-1], 3, 4),
        G=nn.Identity(),
        beta_use=1,
        beta_ign=0,
    )
    assert layer(x_inp().double()).dtype == torch.float64
    assert layer(x_inp()).dtype == torch.float32


# Wrong masks for x_inp [2, 5, 4]: the name, the value, and the given value in the message.
WRONG_MASKS = {
    "too short": ("input_mask", torch.ones(4).bool(), "[4]"),
    "length 1": ("input_mask", torch.ones(2, 1).bool(), "[2, 1]"),
    "no dimension": ("input_mask", torch.tensor(True), "[]"),
    "another batch": ("input_mask", torch.ones(3, 5).bool(), "[3, 5]"),
    "more batch dimensions": ("input_mask", torch.ones(1, 2, 5).bool(), "[1, 2, 5]"),
    "floats": ("input_mask", torch.ones(5), "dtype torch.float32"),
    "list": ("input_mask", [True] * 5, "list"),
    "device": ("input_mask", torch.ones(5).bool().to("meta"), "meta"),
    "pairs without j": ("pair_mask", torch.ones(2, 5).bool(), "[2, 5]"),
    "pairs transposed": ("pair_mask", torch.ones(2, 3, 5).bool(), "[2, 3, 5]"),
    "pairs of one output": ("pair_mask", torch.ones(5, 1).bool(), "[5, 1]"),
    "pairs of floats": ("pair_mask", torch.ones(5, 3), "dtype torch.float32"),
    "pairs of an array": ("pair_mask", np.ones((5, 3)), "ndarray"),
    "pairs on another device": ("pair_mask", torch.ones(5, 3).bool().to("meta"), "meta"),
}


@pytest.mark.parametrize("make_layer", [vector, general, matrix], ids=["vector", "general", "matrix"])
@pytest.mark.parametrize(("name", "mask", "came"), WRONG_MASKS.values(), ids=WRONG_MASKS)
def test_wrong_masks(make_layer, name, mask, came):
    inputs = (x_inp(2)[..., 0], torch.randn(2, 5, 5, 4)) if make_layer is matrix else (x_inp(2),)
    letters = {"input_mask": "[..., n_inp=5]", "pair_mask": "[..., n_inp=5, n_out=3]"}[name]
    if came == "meta":
        kind, expected = ValueError, "on the device of the inputs, cpu"
    elif came.startswith("["):
        kind = ValueError
        expected = f"{letters}, its leading dimensions broadcastable to those of the inputs, [2]"
    else:
        kind, expected = TypeError, f"a bool or 0/1 integer tensor {letters}"
    with raises(kind, f"{name} must be {expected}, got {came}"):
        make_layer()(*inputs, **{name: mask})


WRONG_SIZES = {
    "zero": (0, ValueError, "0"),
    "negative": (-1, ValueError, "-1"),
    "float": (4.0, TypeError, "4.0 (float)"),
    "bool": (True, TypeError, "True (bool)"),
    "text": ("4", TypeError, "'4' (str)"),
}


def test_a_mask_of_the_whole_batch_is_returned_as_it_is():
    x_inp, sizes = torch.zeros(2, 5, 3), {"n_inp": 5}
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert check_mask("input_mask", mask, x_inp, sizes=sizes) is mask
    assert check_mask("input_mask", mask.int(), x_inp, sizes=sizes).dtype == torch.bool
    assert check_mask("input_mask", mask[:1], x_inp, sizes=sizes) is not None
    with pytest.raises(ValueError, match="must be on the device of the inputs, cpu, got meta"):
        check_mask("input_mask", mask.to("meta"), x_inp, sizes=sizes)


@pytest.mark.parametrize(("value", "kind", "came"), WRONG_SIZES.values(), ids=WRONG_SIZES)
@pytest.mark.parametrize(
    ("make_layer", "names"),
    [
        (vector, ("n_inp", "n_out", "d_inp", "d_out", "n_iters")),
        (general, ("n_inp", "n_out", "d_inp", "n_iters")),
        (matrix, ("n_inp", "n_out", "d_cov", "d_inp", "d_out", "n_iters")),
    ],
    ids=["vector", "general", "matrix"],
)
def test_wrong_sizes(make_layer, names, value, kind, came):
    for name in names:
        expected = "a positive int or None (any length)" if name == "n_inp" else "a positive int"
        with raises(kind, f"{name} must be {expected}, got {came}"):
            make_layer(**{name: value})


def test_only_n_inp_may_be_none():
    with raises(TypeError, "n_out must be a positive int, got None (NoneType)"):
        vector(n_out=None)


def test_constructors_take_keywords_only():
    with pytest.raises(TypeError, match="positional"):
        vr.VectorRouting(5, 3, 4, 2)


@pytest.mark.parametrize("value", ["fast", None, 3])
def test_unknown_choices(value):
    with pytest.raises(
        ValueError, match=rf"^implementation must be one of 'auto', 'reference'.*, got {value!r}$"
    ):
        vector(implementation=value)
    with raises(ValueError, f"compete_over must be one of 'outputs', 'inputs', got {value!r}"):
        general(compete_over=value)
    with raises(ValueError, f"p_model must be one of 'gaussian', 'skm', got {value!r}"):
        matrix(p_model=value)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_options_that_are_true_or_false(value):
    came = f"got {value!r} ({type(value).__name__})"
    with raises(TypeError, f"normalize must be a bool, {came}"):
        vector(normalize=value)
    with raises(TypeError, f"single_beta must be a bool, {came}"):
        matrix(single_beta=value)


@pytest.mark.parametrize("name", ["A", "F", "G", "S"])
def test_networks_must_be_callable(name):
    with raises(TypeError, f"{name} must be a module or function, got NoneType"):
        general(**{name: None})


@pytest.mark.parametrize("name", ["beta_use", "beta_ign"])
@pytest.mark.parametrize("value", ["1", True, torch.ones(())], ids=["text", "bool", "tensor"])
def test_betas_are_learned_numbers_or_functions(name, value):
    came = type(value).__name__
    with raises(TypeError, f"{name} must be None (learned), a number or a function, got {came}"):
        general(**{name: value})


A_INP, MU_INP = "[..., n_inp=5] with at least one input", "[..., n_inp=5, d_cov=5, d_inp=4] for a_inp"
WRONG_MATRICES = {
    "too short": ((4,), (4, 5, 4), f"a_inp must be {A_INP}, got [4]"),
    "length 1": ((1,), (1, 5, 4), f"a_inp must be {A_INP}, got [1]"),
    "empty": ((0,), (0, 5, 4), f"a_inp must be {A_INP}, got [0]"),
    "no dimension": ((), (5, 5, 4), f"a_inp must be {A_INP}, got []"),
    "transposed": ((5,), (5, 4, 5), f"mu_inp must be {MU_INP} [5], got [5, 4, 5]"),
    "vectors": ((2, 5), (2, 5, 4), f"mu_inp must be {MU_INP} [2, 5], got [2, 5, 4]"),
    "other batch": ((2, 5), (3, 5, 5, 4), f"mu_inp must be {MU_INP} [2, 5], got [3, 5, 5, 4]"),
}


@pytest.mark.parametrize(("a_shape", "mu_shape", "message"), WRONG_MATRICES.values(), ids=WRONG_MATRICES)
def test_wrong_matrices(a_shape, mu_shape, message):
    with raises(ValueError, message):
        matrix(5)(torch.randn(a_shape), torch.randn(mu_shape))


def test_wrong_types_of_matrices():
    a_inp, mu_inp, letters = torch.randn(5), torch.randn(5, 5, 4), "[..., n_inp=5, d_cov=5, d_inp=4]"
    for a, mu, kind, message in (
        ([1.0], mu_inp, TypeError, "a_inp must be a floating-point tensor [..., n_inp=5], got list"),
        (
            a_inp,
            mu_inp.long(),
            TypeError,
            f"mu_inp must be a floating-point tensor {letters}, got dtype torch.int64",
        ),
        (
            a_inp.double(),
            mu_inp,
            TypeError,
            "a_inp must have the dtype of the layer, torch.float32, got torch.float64",
        ),
        (a_inp, mu_inp.to("meta"), ValueError, "mu_inp must be on the device of the layer, cpu, got meta"),
    ):
        with raises(kind, message):
            matrix(5)(a, mu)


def test_weights_that_do_not_fit():
    layer = vector(5)
    state_dict = layer.state_dict()
    with raises(TypeError, "layer must be a routing layer, got Linear"):
        vr.load_reference_state_dict(nn.Linear(2, 2), state_dict)
    missing = {name: value for name, value in state_dict.items() if name != "W_S"}
    with raises(ValueError, "state_dict does not fit VectorRouting: W_S expected (5, 3) got None"):
        vr.load_reference_state_dict(layer, missing)
    with raises(
        ValueError,
        "state_dict does not fit VectorRouting: W_A expected (5, 4) got (6, 4), Z expected None got (1,)",
    ):
        vr.load_reference_state_dict(layer, state_dict | {"W_A": torch.zeros(6, 4), "Z": torch.zeros(1)})


class TestWhatThePublicImplementationGetsWrong:
    """Cases in which the public implementation fails, or silently returns a wrong result."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_an_input_masked_for_every_output(self, kind):
        """The public implementation returns NaN for the whole sample."""
        pair_mask = torch.ones(6, 5).bool()
        pair_mask[2] = False
        assert make(kind)(torch.randn(6, 7), pair_mask=pair_mask).isfinite().all()

    @pytest.mark.parametrize("kind", KINDS)
    def test_padding_a_batch(self, kind):
        """The public implementation scales by the padded length."""
        layer, x = make(kind), torch.randn(6, 7)
        padded = torch.cat((x, torch.zeros(4, 7)))[None]
        torch.testing.assert_close(layer(padded, torch.arange(10) < 6)[0], layer(x), rtol=1e-5, atol=1e-6)

    def test_the_general_form_with_variable_length(self):
        """The public implementation raises a NameError in its constructor."""
        assert general(n_inp=None)(x_inp(n_inp=9)).shape == (3, 2)

    @pytest.mark.parametrize("make_layer", [vector, general], ids=["vector", "general"])
    def test_details_of_one_iteration(self, make_layer):
        """The public implementation raises an UnboundLocalError."""
        layer = make_layer(n_iters=1)
        assert len(layer.trace(x_inp())) == 1
        assert layer.route(x_inp()).phi.shape == (5, 3)

    @pytest.mark.parametrize("make_layer", [vector, general, matrix], ids=["vector", "general", "matrix"])
    def test_no_iteration(self, make_layer):
        """The public implementation raises an UnboundLocalError that does not name n_iters."""
        with raises(ValueError, "n_iters must be a positive int, got 0"):
            make_layer(n_iters=0)

    @VECTORS
    def test_an_empty_sequence(self, make_layer):
        """The public implementation raises a ZeroDivisionError."""
        with raises(ValueError, f"x_inp must be {EXPECTED} with at least one vector, got [0, 4]"):
            make_layer()(x_inp(n_inp=0))

    @VECTORS
    def test_a_sequence_of_length_1_given_to_a_layer_of_5(self, make_layer):
        """The public implementation silently broadcasts the vector."""
        with raises(ValueError, "x_inp must be [..., n_inp=5, d_inp=4], got [1, 4]"):
            make_layer(5)(x_inp(n_inp=1))
