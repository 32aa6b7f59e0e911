"""A page about a classifier of images on a data set: how good it is, where it goes wrong and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vecroute.explain.html import STYLE, environment
from vecroute.explain.image_html import data_uri, labels, outline, size_on_page, tiles
from vecroute.explain.report import N_DEPTHS, N_WRONG, depth_shares, measured, sample_case, spread, summary
from vecroute.io.images import check_images
from vecroute.storage import require

if TYPE_CHECKING:
    from vecroute.explain.image import ImageExplanation

N_EXAMPLES = 12  # labels with an example
WIDTH = 208  # of an image on the page


def image_report(
    classifier: Any, images: Sequence[Any], labels: Sequence[Any], probabilities: np.ndarray, title: str
) -> str:
    """Return the page, which needs nothing but itself.

    Args:
        classifier: a fitted ``RoutingClassifier`` of images, for one label per image.
        images, labels: what to measure it on.
        probabilities: [n, n_cls] that it predicts for the images.
        title: of the page.
    """
    pictures, truth = check_images(images, "images"), [str(label) for label in labels]
    found = measured(classifier, truth, probabilities)
    known = dict(zip(found.names, classifier.classes_.tolist(), strict=True))
    first = {label: k for k, label in reversed(list(enumerate(truth)))}
    every = [name for name in found.names if name in first]
    examples, wrong = [first[name] for name in every[:N_EXAMPLES]], found.wrong[:N_WRONG]
    why = {}
    for k in sorted({*wrong, *examples}):
        # The predicted class, and the right one, or the next likely where it is right.
        likely = [found.names[j] for j in np.argsort(-probabilities[k], kind="stable")]
        other = truth[k] if truth[k] in likely[1:] else likely[1]
        why[k] = classifier.explain(pictures[k], classes=[known[likely[0]], known[other]])

    def case(k: int, name: str) -> dict[str, Any]:
        predicted = found.names[found.best[k]]
        drawn = case_of(why[k], truth[k], predicted, found.confidence[k], f"{name}{k}")
        return drawn | {"known": truth[k] in known}

    some = [found.explained[k] for k in spread(len(found.explained), N_DEPTHS)]
    states = [
        classifier.explain(pictures[k], classes=[known[found.names[found.best[k]]]], of="states")
        for k in some
    ]
    filled = {
        "title": title,
        "summary": summary(found, title, "images"),
        "samples": "images",
        "n_labels": len(every),
        "examples": [case(k, "e") for k in examples],
        "wrong": [case(k, "w") for k in wrong],
        "n_depths": len(some),
        "depths": depth_shares(states),
    }
    return environment().get_template("image_report.html").render(found.filled | filled | STYLE)


def case_of(
    why: "ImageExplanation", truth: str, predicted: str, confidence: float, name: str
) -> dict[str, Any]:
    """Return an image and why: what decided for the predicted class, by region and by patch."""
    other = next(other for other in why.output_names if other != predicted)
    margin = why.margin(predicted, other)
    rows, grid = margin.aggregate("region"), margin.grid()  # [rows, columns]
    return sample_case(rows, truth, predicted, other, confidence) | {
        "id": name,
        "image": data_uri(smaller(why.image)),
        "size": why.size,
        "shown": size_on_page(why.size, WIDTH),
        "outline": outline(rows),
        "labels": labels(rows),
        "tiles": tiles(margin, grid, float(abs(grid).max())),
    }


def smaller(image: np.ndarray) -> np.ndarray:
    """Return a copy of an image [height, width, 3] that is no larger than it is shown on a fine screen."""
    copy = require("PIL.Image", "images").fromarray(image)
    copy.thumbnail((2 * WIDTH, 2 * WIDTH))
    return np.asarray(copy)
