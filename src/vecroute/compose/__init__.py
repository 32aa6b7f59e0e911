"""Networks of routings (Appendix A): compositions, end-to-end credit, and exact contributions."""

from vecroute.compose.contribution import Contributions, contributions
from vecroute.compose.credit import Credit
from vecroute.compose.modules import Concat, Network, PerVector, Residual, Sequential, Sum

__all__ = [
    "Concat",
    "Contributions",
    "Credit",
    "Network",
    "PerVector",
    "Residual",
    "Sequential",
    "Sum",
    "contributions",
]
