"""Explain the predictions of a classifier: check the arguments and make explanations."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vecroute.classifier.parts import ready
from vecroute.classifier.predicting import scores_of
from vecroute.classifier.streams import progress_over, windows_of
from vecroute.encoders.vision import VisionEncoder
from vecroute.explain.classes import class_numbers
from vecroute.explain.explanation import Explanation, where_from
from vecroute.explain.image import N_EXPLAINED, ImageExplanation, explain_image_states, explain_patches
from vecroute.explain.samples import check_samples
from vecroute.explain.text import explain_states, explain_words
from vecroute.io.images import Picture, is_image
from vecroute.ops.checks import check_choice
from vecroute.training.calibration import probabilities

WINDOW_CHARACTERS = 100_000  # characters explained at a time: about a thousand sentences, or 25 images

if TYPE_CHECKING:
    from vecroute.classifier.estimator import RoutingClassifier


def explain(classifier: "RoutingClassifier", X: Any, classes: Sequence[Any] | None, **options: Any) -> Any:
    """See ``RoutingClassifier.explain``."""
    encoder, _ = ready(classifier)
    images = isinstance(encoder, VisionEncoder)
    single = is_image(X) if images else isinstance(X, str)
    rows = [Picture.of(X) if images else X] if single else X
    found = explain_iter(classifier, rows, classes, **options)
    return next(found) if single else list(found)


def explain_iter(
    classifier: "RoutingClassifier",
    X: Any,
    classes: Sequence[Any] | None,
    *,
    of: str,
    samples: int,
    by_depth: bool,
) -> Iterator[Any]:
    """See ``RoutingClassifier.explain_iter``. Options are checked at once, texts as they are read."""
    encoder, _ = ready(classifier)
    images = isinstance(encoder, VisionEncoder)
    check_choice("of", of, ("words", "states"))
    check_samples(samples, of, images, by_depth)
    numbers = class_numbers(classes, classifier.classes_.tolist())

    def explanations() -> Iterator[Any]:
        with progress_over(X, "explaining", classifier.verbose) as step:
            for some in windows_of(X, images, WINDOW_CHARACTERS // max(samples, 1)):
                outputs = which_outputs(classifier, some, numbers, images)
                yield from explain_some(classifier, some, outputs, of, samples, by_depth)
                step(len(some))

    return explanations()


def explain_some(
    classifier: "RoutingClassifier",
    texts: list[Any],
    outputs: list[list[int]],
    of: str,
    samples: int,
    by_depth: bool,
) -> list[Any]:
    """Explain some texts or images in batches of similar length."""
    encoder, head = ready(classifier)
    images = isinstance(encoder, VisionEncoder)
    if images:
        by_patch = {"by_depth": by_depth}
        explained = (
            explain_patches(encoder, head, texts, outputs, **by_patch)
            if of == "words"
            else explain_image_states(encoder, head, texts, outputs)
        )
    elif of == "states":
        explained = explain_states(encoder, head, texts, outputs)
    else:
        explained = explain_words(encoder, head, texts, outputs, by_depth=by_depth, samples=samples)
    kind: Any = ImageExplanation if images else Explanation
    names = [str(label) for label in classifier.classes_.tolist()]
    T, multi_label = classifier.temperature_, classifier.multi_label
    common: dict[str, Any] = {
        "temperature": T,
        "multi_label": multi_label,
        "about": where_from(encoder.name),
    }
    return [
        kind(
            **fields,
            **common,
            output_names=[names[j] for j in chosen],
            probabilities=probabilities(scores, T, multi_label)[list(chosen)],
        )
        for chosen, (fields, scores) in zip(outputs, explained, strict=True)
    ]


def which_outputs(
    classifier: Any, texts: list[Any], asked: list[int] | None, images: bool
) -> list[list[int]]:
    """Return the indices of the classes to explain for each sample: the given ones, all or the likeliest."""
    n_cls = len(classifier.classes_)
    if asked is None and images and n_cls > N_EXPLAINED:
        return scores_of(classifier, texts).topk(N_EXPLAINED).indices.tolist()
    return [list(range(n_cls)) if asked is None else asked] * len(texts)
