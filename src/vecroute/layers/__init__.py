"""The routing layers: parameters, checks and the public verbs ``forward``, ``route`` and ``trace``."""

from vecroute.layers import stability
from vecroute.layers.common import Routed
from vecroute.layers.converge import Converge
from vecroute.layers.general import GeneralRouting
from vecroute.layers.interop import load_reference_state_dict
from vecroute.layers.matrix import MatrixRouting
from vecroute.layers.vector import VectorRouting

__all__ = [
    "Converge",
    "GeneralRouting",
    "MatrixRouting",
    "Routed",
    "VectorRouting",
    "load_reference_state_dict",
    "stability",
]
