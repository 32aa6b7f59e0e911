"""Explain the predictions of a classifier: check the arguments and make explanations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vecroute.classifier.labels import check_texts
from vecroute.encoders.vision import VisionEncoder
from vecroute.explain.explanation import Explanation, where_from
from vecroute.explain.image import N_EXPLAINED, ImageExplanation, explain_image_states, explain_patches
from vecroute.explain.samples import check_samples
from vecroute.explain.text import explain_states, explain_words
from vecroute.io.images import Picture, check_images, is_image
from vecroute.ops.checks import check_choice
from vecroute.training.calibration import probabilities

if TYPE_CHECKING:
    from vecroute.classifier.estimator import RoutingClassifier


def explain(
    classifier: "RoutingClassifier",
    X: Any,
    classes: Sequence[Any] | None,
    *,
    of: str,
    samples: int,
    by_depth: bool,
) -> Any:
    """See ``RoutingClassifier.explain``."""
    encoder, head = classifier._ready()
    images = isinstance(encoder, VisionEncoder)
    check_choice("of", of, ("words", "states"))
    check_samples(samples, of, images, by_depth)
    single = is_image(X) if images else isinstance(X, str)
    rows = [Picture.of(X) if images else X] if single else X
    texts: Any = (check_images if images else check_texts)(rows)
    outputs = which_outputs(classifier, texts, classes, images)
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
    found = [
        kind(
            **fields,
            **common,
            output_names=[names[j] for j in chosen],
            probabilities=probabilities(scores, T, multi_label)[list(chosen)],
        )
        for chosen, (fields, scores) in zip(outputs, explained, strict=True)
    ]
    return found[0] if single else found


def which_outputs(
    classifier: Any, texts: Any, classes: Sequence[Any] | None, images: bool
) -> list[list[int]]:
    """Return the indices of the classes to explain, for each sample."""
    known = classifier.classes_.tolist()
    if classes is None and images and len(known) > N_EXPLAINED:
        return classifier._scores(texts).topk(N_EXPLAINED).indices.tolist()
    asked = known if classes is None else list(classes)
    for label in asked:
        if label not in known:
            raise ValueError(f"classes must be some of {known}, got {label!r}")
    if not asked:
        raise ValueError(f"classes must be at least one of {known}, got none")
    return [[known.index(label) for label in asked]] * len(texts)
