"""The families of heads in the race of accuracy.py: their shapes, recipes and lengths of training."""

import math
from typing import Any

from stacked import Recipe, Training

ROUTING = {"implementation": "reference"}  # stacked.py uses vmap, which only the reference supports
WIDTHS = (0, 128, 256, 512)  # widths of MLPs, for every head that can have MLPs; 0 means no MLP
DROP = 0.3  # share of the inputs that training drops
Shape = tuple[dict[str, Any], float]  # options of a head, and the share of inputs to drop


def with_widths(**options: str) -> list[Shape]:
    """Return the five shapes of a head whose MLPs have these names."""
    shapes = [(dict.fromkeys(options.values(), width) | {"gated": True}, DROP) for width in WIDTHS]
    return [*shapes, (shapes[2][0], 2 * DROP)]


BOTH = {"inputs": "d_inp_mlp", "pooled": "d_mlp"}  # MLPs for each vector and after the pool
FAMILIES: dict[str, tuple[str, list[Shape]]] = {
    "routing": ("routing", [(ROUTING | shape, drop) for shape, drop in with_widths(both="d_mlp")]),
    "paper": ("paper", [(ROUTING, drop) for drop in (0.0, 0.15, 0.3, 0.45, 0.6)]),
    "probe": ("probe", with_widths(**BOTH)),
    "probe, 4 queries": ("probe_4", with_widths(**BOTH)),
    "efficient probing": ("efficient", with_widths(**BOTH)),
    "PMA": ("pma", with_widths(**BOTH)),
    "Hopfield": ("hopfield", with_widths(**BOTH)),
    "mean of all": ("mean_all", with_widths(**BOTH)),
    "logistic regression": ("mean_all", [({}, 0.0)]),  # on means, so that nothing is dropped
}
LINEAR = "logistic regression"
BY_DEPTH = ("mean of all",)  # heads that treat each depth differently
LRS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
STEP = math.sqrt(10)  # factor by which the grid of learning rates grows
GROWTH = 2  # how often the grid may grow on each side
REGULAR = ((0.05, 0.0), (0.5, 0.1))  # weight decay and label smoothing
RECIPES = [
    Recipe(lr=lr, weight_decay=decay, label_smoothing=smoothing) for lr in LRS for decay, smoothing in REGULAR
]
# Logistic regression has one shape, and its fifty configurations differ in weight decay. It trains longer.
LINEAR_RECIPES = [
    Recipe(lr=lr, weight_decay=decay, label_smoothing=smoothing)
    for lr in LRS
    for decay in (0.0, 0.05, 0.5, 2.0, 5.0)
    for smoothing in (0.0, 0.1)
]
LINEAR_EPOCHS = 4
# The search trains for fewer epochs than the other steps.
SEARCH = {
    "sst2": Training(epochs=2, batch_size=256),
    "sst5": Training(epochs=1, batch_size=256),
    "imdb": Training(epochs=1, batch_size=128),
    "cifar10": Training(epochs=2, batch_size=256),
}
FULL = {
    "sst2": Training(epochs=4, batch_size=256),
    "sst5": Training(epochs=3, batch_size=256),
    "imdb": Training(epochs=8, batch_size=128),
    "cifar10": Training(epochs=8, batch_size=256),
}
