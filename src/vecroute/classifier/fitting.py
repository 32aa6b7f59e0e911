"""Fit a classifier: check samples, compute their hidden states, train the head and judge it."""

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import Tensor

from vecroute.classifier.columns import samples_and_labels
from vecroute.classifier.estimate import make_estimate
from vecroute.classifier.labels import (
    Labels,
    check_label_sets,
    check_labels,
    check_texts,
    class_weights,
    examples,
    joined,
    split,
)
from vecroute.classifier.parts import N_JUDGING, as_python, cache_for, encoder_for, new_head
from vecroute.encoders.either import is_of_images
from vecroute.encoders.entries import text_key
from vecroute.encoders.features import Features
from vecroute.encoders.vision import VisionEncoder
from vecroute.heads import CHOOSING
from vecroute.io.images import check_images
from vecroute.training import Recipe, Task, make_accelerator, train
from vecroute.training.calibration import fit_temperature
from vecroute.training.folds import FOLD_TEMPERATURE, N_FOLDS, make_folds, out_of_fold
from vecroute.training.progress import is_shown, progress_bar
from vecroute.training.recipe import label_smoothing_for, weight_decay_for
from vecroute.training.states import on_device

if TYPE_CHECKING:
    from vecroute.classifier.estimator import RoutingClassifier


class Samples(NamedTuple):
    """All samples of ``fit``, and the indices of the samples for training and for validation."""

    texts: list[Any]  # strings, or ``Picture`` objects
    labels: Labels
    train: list[int]
    valid: list[int]


def fit_classifier(classifier: "RoutingClassifier", X: Any, y: Any, validation: Any) -> None:
    """See ``RoutingClassifier.fit``."""
    images = is_of_images(classifier.encoder, classifier.revision)
    samples = check_samples(classifier, *samples_and_labels(X, y, validation, images), images)
    recipe = recipe_for(classifier, len(samples.texts))
    accelerator = make_accelerator(classifier.device)
    features = features_of(classifier, samples.texts, accelerator)
    encoder, classes = features.encoder, samples.labels.classes
    head = new_head(classifier, encoder, len(classes))
    task = make_task(classifier, features, samples)
    if accelerator.num_processes == 1:  # once for all heads that are trained here
        task = task._replace(features=on_device(features, accelerator.device))
    checkpoint = None if classifier.checkpoint is None else Path(classifier.checkpoint)
    options: dict[str, Any] = {"accelerator": accelerator, "show": is_shown(classifier.verbose)}
    trained = train(head, task, recipe, checkpoint=checkpoint, score=task.valid, **options)
    classifier.classes_ = classes
    classifier.encoder_, classifier.head_, classifier.history_ = encoder, head.eval(), trained.history
    classifier.validation_accuracy_ = trained.history[trained.kept].get("valid_accuracy")
    classifier.identity_ = encoder.identity
    classifier.n_texts_ = {"train": len(task.train), "validation": len(task.valid)}
    judge(classifier, task, recipe, trained.scores, samples.texts, **options)
    classifier.examples_ = examples(samples.texts, samples.labels) if classifier.keep_examples else []


def check_samples(
    classifier: "RoutingClassifier", X: Any, y: Any, validation: tuple[Any, Any] | None, images: bool
) -> Samples:
    """Check texts or images and their labels, and split them into samples for training and for validation.

    Raises:
        TypeError, ValueError: see ``check_texts``, ``check_images`` and ``check_labels``.
    """
    check: Any = check_images if images else check_texts
    check_y = check_label_sets if classifier.multi_label else check_labels
    texts = check(X)
    n = len(texts)
    if validation is None:
        labels = check_y(y, n)
        options = (classifier.validation_fraction, classifier.random_state, classifier.multi_label)
        return Samples(texts, labels, *split(labels, *options))
    texts += check(validation[0], "validation")
    labels = check_y(joined(y, validation[1], n, len(texts) - n), len(texts), n_train=n)
    return Samples(texts, labels, list(range(n)), list(range(n, len(texts))))


def recipe_for(classifier: "RoutingClassifier", n: int) -> Recipe:
    """Return the recipe for n samples."""
    names = [field.name for field in fields(Recipe) if field.name != "seed"]
    given = {name: as_python(getattr(classifier, name)) for name in names}
    for name in ("drop_inputs", "drop_features"):
        if given[name] is None:
            given[name] = getattr(Recipe, name) if classifier.head in CHOOSING else 0.0
    by_n = [name for name in ("weight_decay", "label_smoothing") if given[name] is None]
    given |= {name: getattr(Recipe, name) for name in by_n}
    seed = as_python(classifier.random_state)
    expected = f"random_state must be an int, at least 0, got {seed!r}"
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{expected} ({type(seed).__name__})")
    if seed < 0:
        raise ValueError(expected)
    recipe = Recipe(seed=seed, **given)  # checks lr
    chosen: dict[str, Any] = {
        "weight_decay": weight_decay_for(n, recipe.lr),
        "label_smoothing": label_smoothing_for(n),
    }
    return replace(recipe, **{name: chosen[name] for name in by_n})


def features_of(classifier: "RoutingClassifier", texts: list[Any], accelerator: Accelerator) -> Features:
    """Return the hidden states of texts. Each process computes a share of those not in the cache."""
    encoder = encoder_for(classifier, accelerator.device)
    features = Features(encoder, texts, cache_for(classifier, encoder))
    show = is_shown(classifier.verbose) and accelerator.is_main_process
    with progress_bar(show, "hidden states", len(set(texts))) as bar:
        features.prepare((accelerator.process_index, accelerator.num_processes), bar)
    accelerator.wait_for_everyone()
    if features.cache is not None:
        features.cache.refresh()
    return features


def make_task(classifier: "RoutingClassifier", features: Features, samples: Samples) -> Task:
    """Return the task of the head. Its key changes with the encoder and with any sample."""
    texts, labels, train_on, validate_on = samples
    multi_label = classifier.multi_label
    weights = class_weights(classifier.class_weight, labels, multi_label)  # [n_cls]
    keys = [features.encoder.key, *(text if isinstance(text, str) else text.key for text in texts)]
    key = text_key("\0".join(keys))
    return Task(features, labels.targets, train_on, validate_on, weights, multi_label, key=key)


def judge(
    classifier: "RoutingClassifier",
    task: Task,
    recipe: Recipe,
    scores: Tensor,
    texts: list[Any],
    **options: Any,
) -> None:
    """Set the temperature and the estimate, by validation or else by cross-validation.

    Args:
        classifier: its encoder and classes are set already.
        task, recipe: the task that the head has learned, and the recipe of its training.
        scores: [n_valid, n_cls] of the samples for validation.
        texts: all samples.
        options: accelerator and show, as in ``out_of_fold``.
    """
    classifier.temperature_, classifier.estimate_ = 1.0, None
    method, tested = "validation", task.valid
    if not (classifier.calibrate or classifier.estimate):
        return
    encoder, classes = classifier.encoder_, classifier.classes_.tolist()
    if not tested:
        method, tested = "cross-validation", task.train
        fold = make_folds(task.targets, texts, classifier.random_state)  # [n]
        if fold.max() < N_FOLDS - 1:  # almost all texts are equal
            return
        untrained = partial(new_head, classifier, encoder, len(classes), N_JUDGING)
        recipe = replace(recipe, max_epochs=len(classifier.history_))
        scores = out_of_fold(untrained, task, recipe, fold, **options)  # [n, n_cls]
    if classifier.calibrate:
        targets = task.targets[tested]  # [k, n_cls]
        as_sure = scores if task.valid else scores / FOLD_TEMPERATURE  # [k, n_cls] as sure as the head itself
        classifier.temperature_ = fit_temperature(as_sure, targets, len(task.train), task.multi_label)
    if classifier.estimate:
        kind = "images" if isinstance(encoder, VisionEncoder) else "texts"
        classifier.estimate_ = make_estimate(scores, task, tested, classes, method, kind)
