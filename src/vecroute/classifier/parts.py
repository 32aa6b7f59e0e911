"""The parts of a classifier, made from its parameters: encoder, cache of hidden states and head."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]

from vecroute.encoders.cache import FeatureCache, default_folder
from vecroute.encoders.either import load_encoder
from vecroute.encoders.identity import difference
from vecroute.heads import make_head

if TYPE_CHECKING:
    from vecroute.classifier.estimator import RoutingClassifier

logger = logging.getLogger(__name__)

# Members of the default head. Three heads of half the width train in twice the time of one head, and the mean
# of their scores is more accurate and better calibrated (docs/experiments.md, seventh round).
N_MEMBERS = 3
# Members of the heads that only judge it: two are nearly as sure and as accurate as three, in less time.
N_JUDGING = 2


def encoder_for(classifier: "RoutingClassifier", device: torch.device) -> Any:
    """Load the encoder. Classifiers with the same encoder and options share it."""
    depths = None if classifier.depths is None else tuple(as_python(classifier.depths))
    names = ("revision", "max_length", "stride", "special_tokens")
    options = {name: as_python(getattr(classifier, name)) for name in names}
    return load_encoder(classifier.encoder, device, depths=depths, **options)


def cache_for(classifier: "RoutingClassifier", encoder: Any) -> FeatureCache | None:
    """Return the cache of hidden states, None if cache=False or if its folder cannot be used."""
    if classifier.cache is False or classifier.cache is None:
        return None
    folder = default_folder() if classifier.cache is True else Path(classifier.cache)
    try:
        return FeatureCache(folder, encoder.key, classifier.cache_bytes)
    except OSError as error:
        logger.warning("no cache of hidden states: %s", error)
        return None


def new_head(
    classifier: "RoutingClassifier", encoder: Any, n_cls: int, most_members: int | None = None
) -> torch.nn.Module:
    """Make an untrained head for the hidden states of an encoder, with ``most_members`` members or fewer."""
    sizes = {"d_emb": encoder.d_emb, "depth": encoder.depth, "n_cls": n_cls}
    members = {"n_members": N_MEMBERS} if classifier.head == "routing" else {}
    options = members | as_python(classifier.head_options or {})
    if most_members is not None and "n_members" in options:
        options["n_members"] = min(options["n_members"], most_members)
    return make_head(classifier.head, seed=as_python(classifier.random_state), **sizes, **options)


def as_python(parameter: Any) -> Any:
    """Replace NumPy numbers by Python numbers, which JSON has. A grid search often passes NumPy numbers."""
    if isinstance(parameter, np.generic | np.ndarray):
        return parameter.tolist()
    if isinstance(parameter, dict):
        return {as_python(key): as_python(value) for key, value in parameter.items()}
    if isinstance(parameter, list | tuple):
        return [as_python(value) for value in parameter]
    return parameter


def ready(classifier: "RoutingClassifier") -> tuple[Any, Any]:
    """Return the encoder and the head of a fitted classifier. Load the encoder again if necessary.

    Raises:
        ValueError: the encoder is not the one that was used in training.
    """
    check_is_fitted(classifier)
    if not hasattr(classifier, "encoder_"):
        classifier.encoder_ = encoder_for(classifier, next(classifier.head_.parameters()).device)
    encoder = classifier.encoder_
    found, expected = encoder.identity, classifier.identity_
    if found != expected and (differs := difference(expected, found)):
        raise ValueError(
            f"encoder {encoder.name!r} is not the one this classifier was fitted with: {differs}"
        )
    return encoder, classifier.head_
