"""The families of heads in the race of accuracy.py: their shapes, recipes and lengths of training."""

import math
from itertools import product
from typing import Any

from stacked import Recipe, Training

WIDTHS = (0, 256, 512)  # widths of MLPs, for every head that can have MLPs; 0 means no MLP
# Shares of the inputs that training drops, the usual and the greater one. Reviews and
# images have hundreds of inputs, so that enough of them stay.
DROPS = {"sst2": (0.3, 0.6), "sst5": (0.3, 0.6), "imdb": (0.6, 0.8), "cifar10": (0.6, 0.8)}
USUAL, GREATER = 0, 1  # indices of DROPS
Shape = tuple[dict[str, Any], int]  # options of a head, and the index of the share of inputs to drop


def with_widths(*names: str) -> list[Shape]:
    """Return the four shapes of a head whose MLPs have these names."""
    shapes = [(dict.fromkeys(names, width) | {"gated": True}, USUAL) for width in WIDTHS]
    return [*shapes, (shapes[1][0], GREATER)]


BOTH = ("d_inp_mlp", "d_mlp")  # MLPs for each vector and after the pool
PAPER = list(product(({"n_hid": 64}, {"n_hid": 16}), (USUAL, GREATER)))
# The slow heads come first, so that no process waits for them at the end.
FAMILIES: dict[str, tuple[str, list[Shape]]] = {
    "paper": ("paper", PAPER),
    "routing": ("routing", with_widths("d_mlp")),
    "Hopfield": ("hopfield", with_widths(*BOTH)),
    "PMA": ("pma", with_widths(*BOTH)),
    "probe, 4 queries": ("probe_4", with_widths(*BOTH)),
    "probe": ("probe", with_widths(*BOTH)),
    "efficient probing": ("efficient", with_widths(*BOTH)),
    "mean of all": ("mean_all", with_widths(*BOTH)),
    "logistic regression": ("mean_all", [({}, USUAL)]),
}
LINEAR = "logistic regression"  # on means, so that nothing is dropped
ROUTINGS = ("routing", "paper")  # heads with an implementation to choose
BY_DEPTH = ("mean of all",)  # heads that treat each depth differently
STEP = math.sqrt(10)  # ratio of neighbours in the grid of learning rates
LRS = (1e-3 / STEP, 1e-3, 1e-3 * STEP)
LOWEST, HIGHEST = 1e-5, 0.1  # how far the grid may grow
REGULAR = ((0.05, 0.0), (0.5, 0.1))  # weight decay and label smoothing
# Logistic regression has one shape, and its configurations differ in weight decay. It trains longer.
LINEAR_DECAYS, LINEAR_EPOCHS = (0.0, 0.05, 0.5, 5.0), 4


def recipes_of(label: str, shape: int) -> list[Recipe]:
    """Return the recipes to search in a shape of a family. Each family has twelve configurations in all."""
    if label == LINEAR:
        found = [(lr * STEP, decay, 0.0) for lr, decay in product(LRS, LINEAR_DECAYS)]
    else:
        found = [(lr, *REGULAR[(k + shape) % len(REGULAR)]) for k, lr in enumerate(LRS)]
    first = shape * len(found)
    return [
        Recipe(lr=lr, weight_decay=decay, label_smoothing=smoothing, seed=first + k)
        for k, (lr, decay, smoothing) in enumerate(found)
    ]


# The search trains for fewer epochs than the other steps.
SEARCH = {
    "sst2": Training(epochs=1, batch_size=256),
    "sst5": Training(epochs=0.5, batch_size=256),
    "imdb": Training(epochs=0.5, batch_size=128),
    "cifar10": Training(epochs=2, batch_size=256),
}
FULL = {
    "sst2": Training(epochs=3, batch_size=256),
    "sst5": Training(epochs=2, batch_size=256),
    "imdb": Training(epochs=4, batch_size=128),
    "cifar10": Training(epochs=6, batch_size=256),
}
# Number of seeds of the best configuration that one job trains. Steps on reviews are so long that a GPU gains
# nothing from several heads at once, and short jobs lose less if a run stops.
TOGETHER = {"sst2": 5, "sst5": 5, "imdb": 1, "cifar10": 5}
