"""Route sequences of vectors and know the credit of every input for every output."""

from vecroute import networks
from vecroute.compose import Concat, PerVector, Residual, Sequential, Sum
from vecroute.contribution import Contributions, contributions
from vecroute.credit import Credit
from vecroute.heads import RoutingHead
from vecroute.layers import (
    GeneralRouting,
    MatrixRouting,
    Routed,
    VectorRouting,
    load_reference_state_dict,
)

__version__ = "0.1.0"

__all__ = [
    "Concat",
    "Contributions",
    "Credit",
    "GeneralRouting",
    "MatrixRouting",
    "PerVector",
    "Residual",
    "Routed",
    "RoutingHead",
    "Sequential",
    "Sum",
    "VectorRouting",
    "contributions",
    "load_reference_state_dict",
    "networks",
]
