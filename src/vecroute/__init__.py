"""Route sequences of vectors and know the credit of every input for every output."""

from vecroute import networks
from vecroute.layers import (
    GeneralRouting,
    MatrixRouting,
    Routed,
    VectorRouting,
    load_reference_state_dict,
)

__version__ = "0.1.0"

__all__ = [
    "GeneralRouting",
    "MatrixRouting",
    "Routed",
    "VectorRouting",
    "load_reference_state_dict",
    "networks",
]
