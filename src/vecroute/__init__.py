"""Route sequences of vectors and know the credit of every input for every output."""

from vecroute import networks
from vecroute.compose import (
    Concat,
    Contributions,
    Credit,
    PerVector,
    Residual,
    Sequential,
    Sum,
    contributions,
)
from vecroute.heads import RoutingHead
from vecroute.layers import (
    Converge,
    GeneralRouting,
    MatrixRouting,
    Routed,
    VectorRouting,
    load_reference_state_dict,
    stability,
)

__version__ = "0.1.0"

__all__ = [
    "Concat",
    "Contributions",
    "Converge",
    "Credit",
    "Explanation",
    "GeneralRouting",
    "MatrixRouting",
    "PerVector",
    "Residual",
    "Routed",
    "RoutingClassifier",
    "RoutingHead",
    "Sequential",
    "Sum",
    "VectorRouting",
    "contributions",
    "distributed",
    "encoders",
    "explain_model",
    "load_reference_state_dict",
    "networks",
    "stability",
]

# Names that need optional packages: the module that defines each, and the extra to install. They load on
# first use, so that ``import vecroute`` needs torch alone.
_LAZY = {
    "Explanation": ("vecroute.explain", "data"),
    "explain_model": ("vecroute.explain.model", "hf,sklearn,data"),
    "RoutingClassifier": ("vecroute.classifier", "hf,sklearn,data"),
    "distributed": ("vecroute", "data"),
    "encoders": ("vecroute", "hf"),
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module 'vecroute' has no attribute {name!r}")
    from importlib import import_module

    module, extra = _LAZY[name]
    try:
        if module == __name__:
            return import_module(f"{module}.{name}")
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}: pip install 'vecroute[{extra}]'") from error
