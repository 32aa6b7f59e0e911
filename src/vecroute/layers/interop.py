"""Loading weights of the public ``heinsen_routing`` package."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vecroute.layers.general import GeneralRouting
from vecroute.layers.matrix import MatrixRouting
from vecroute.layers.vector import VectorRouting


def load_reference_state_dict(layer: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load the weights of a module of the public ``heinsen_routing`` package into one of our layers.

    The public constant buffers (``CONST_...``) are ignored. ``compute_beta_use.weight`` [j, d] becomes
    ``W_use`` [d, j], and so on. The layer also adopts the flat prior of the public code, which is 1 / n_out
    rounded to float32. The difference is visible only in float64, and ``state_dict`` does not contain it.

    Raises:
        TypeError: layer is not a routing layer, or state_dict is not a dict of tensors.
        ValueError: a parameter is missing, unknown or has another shape.
    """
    if not isinstance(layer, VectorRouting | GeneralRouting | MatrixRouting):
        raise TypeError(f"layer must be a routing layer, got {type(layer).__name__}")
    if not isinstance(state_dict, Mapping) or not all(isinstance(v, Tensor) for v in state_dict.values()):
        raise TypeError(f"state_dict must be a dict of tensors by name, got {type(state_dict).__name__}")
    ours = {}
    for name, value in state_dict.items():
        kind, _, what = name.removeprefix("compute_beta_").partition(".")  # use.weight, ign.bias
        if name.startswith("compute_beta_") and what in ("weight", "bias"):
            ours[f"W_{kind}" if what == "weight" else f"B_{kind}"] = value.mT if what == "weight" else value
        elif not name.startswith("CONST_"):
            ours[name] = value
    if isinstance(layer, MatrixRouting) and layer.single_beta and "beta_use" in ours:
        ours.setdefault("beta_ign", ours["beta_use"])
    expected = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    came = {name: tuple(value.shape) for name, value in ours.items()}
    if came != expected:
        wrong = sorted(name for name in {*came, *expected} if came.get(name) != expected.get(name))
        details = ", ".join(f"{n} expected {expected.get(n)} got {came.get(n)}" for n in wrong)
        raise ValueError(f"state_dict does not fit {type(layer).__name__}: {details}")
    layer.load_state_dict(ours)
    if isinstance(layer, VectorRouting):
        # The public code stores its flat prior in float32. The rounding is visible in float64.
        layer.prior = torch.tensor(1 / layer.n_out, dtype=torch.float32).item()
