"""Write a report about an image classifier on a data set: its measures, its mistakes, and their reasons."""

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

N_EXAMPLES = 12  # at most this many labels get an example
WIDTH = 208  # width of an image on the page, in pixels


def image_report(
    classifier: Any, images: Sequence[Any], labels: Sequence[Any], probabilities: np.ndarray, title: str
) -> str:
    """Return the report as a self-contained page.

    Args:
        classifier: a fitted ``RoutingClassifier`` of images, for one label per image.
        images, labels: the samples to measure it on.
        probabilities: [n, n_cls] its predictions for the images.
        title: title of the page.
    """
    pictures, truth = check_images(images, "images"), [str(label) for label in labels]
    found = measured(classifier, truth, probabilities)
    known = dict(zip(found.names, classifier.classes_.tolist(), strict=True))
    first = {label: k for k, label in reversed(list(enumerate(truth)))}
    every = [name for name in found.names if name in first]
    examples, wrong = [first[name] for name in every[:N_EXAMPLES]], found.wrong[:N_WRONG]
    why = {}
    for k in sorted({*wrong, *examples}):
        # Compare the predicted class with the right one, or with the runner-up if the prediction is right.
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
    """Return the values for an image: what decided for the predicted class, by region and by patch."""
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
    """Scale an image [height, width, 3] down to the size at which a high-resolution screen shows it."""
    copy = require("PIL.Image", "images").fromarray(image)
    copy.thumbnail((2 * WIDTH, 2 * WIDTH))
    return np.asarray(copy)
