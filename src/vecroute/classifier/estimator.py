"""RoutingClassifier: a scikit-learn estimator on the hidden states of a frozen Transformer."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from sklearn.base import (  # type: ignore[import-untyped]
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import Tensor

from vecroute.classifier.columns import is_dataset, is_splits, labels_of, samples_and_labels, samples_of
from vecroute.classifier.labels import (
    check_label_sets,
    check_labels,
    check_texts,
    class_weights,
    examples,
    split,
)
from vecroute.classifier.vectors import n_vector, vectors
from vecroute.encoders.cache import FeatureCache, Features, default_folder, windows
from vecroute.encoders.either import is_of_images, load_encoder
from vecroute.encoders.entries import text_key
from vecroute.encoders.identity import difference
from vecroute.encoders.text import Batch
from vecroute.encoders.vision import VisionEncoder
from vecroute.heads import CHOOSING, make_head
from vecroute.io.images import check_images
from vecroute.training import Recipe, Task, make_accelerator, remove_finished, train
from vecroute.training.progress import progress_bar
from vecroute.training.recipe import FEW, WEIGHT_DECAY_OF_FEW

logger = logging.getLogger(__name__)

WINDOW_CHARACTERS = 1_000_000  # of texts that are tokenized at a time
WINDOW_IMAGES = 256


class RoutingClassifier(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, BaseEstimator):
    """Classify texts or images by routing all hidden states of a frozen Transformer to class scores.

    Where the encoder is a vision Transformer, everything said of texts holds for images: paths, PIL images or
    arrays, see ``vecroute.io.images``.

    Args:
        encoder: "minilm" for texts, "vit-cifar10" for images, a name on the Hugging Face hub, a folder, a
            loaded model, a ``TextEncoder`` or a ``VisionEncoder``.
        revision: of the encoder on the hub.
        depths, max_length, stride, special_tokens: see ``vecroute.encoders.TextEncoder``.
        head: "routing", "wide" or "paper", or a baseline without credit; see ``vecroute.heads``.
        head_options: for the head, see ``vecroute.RoutingHead``.
        max_epochs, batch_size, lr, mixup, label_smoothing, patience, mixed_precision, shard_inputs: see
            ``vecroute.training.Recipe``.
        weight_decay: see there; None for 0.5, or 2 where there are fewer than 1000 texts.
        drop_inputs, drop_features: see there; None for 0.8 and 0.3 where the head chooses among the hidden
            states, and for 0 where it takes means or one position ("mean_last", "mean_all", "scalar_mix",
            "cls") and has nothing to choose.
        validation_fraction: of the texts, on which training is validated; 0 for none. None for a tenth where
            there are 1000 texts or more; fewer are all needed to learn from.
        class_weight: None, "balanced", or a dict by label.
        multi_label: whether a text may have any number of labels: y is then a collection of labels for each
            text, or a table of zeros and ones, and ``predict`` gives such a table.
        keep_examples: whether to store three of the texts with the classifier, as ``examples_``.
        cache: where to keep hidden states: True for the user's cache folder, a folder, or False for nowhere.
        cache_bytes: limit for that folder.
        checkpoint: a file from which ``fit`` resumes where it stopped; None for none. It stays until
            ``save_pretrained`` has written the classifier.
        device: None for the GPU if there is one.
        random_state: the seed of everything random, an int.
        verbose: whether to show progress, None for on terminals only.

    Attributes:
        classes_: the labels, in the order of the columns of ``predict_proba``.
        head_: the trained head.
        encoder_: the ``TextEncoder`` or ``VisionEncoder``.
        history_: loss and validation of each epoch.
        validation_accuracy_: of the weights that were kept, None without validation.
        examples_: up to three texts that it learned from, none unless keep_examples=True.
    """

    def __init__(
        self,
        encoder: Any = "minilm",
        *,
        revision: str | None = None,
        depths: Sequence[int] | None = None,
        max_length: int | None = None,
        stride: int = 0,
        special_tokens: bool = True,
        head: str = "routing",
        head_options: dict[str, Any] | None = None,
        max_epochs: int | None = None,
        batch_size: int = 32,
        lr: float = 1e-3,
        weight_decay: float | None = None,
        drop_inputs: float | None = None,
        drop_features: float | None = None,
        mixup: float = 0.0,
        label_smoothing: float = 0.1,
        patience: int = 5,
        mixed_precision: str = "auto",
        shard_inputs: bool = False,
        validation_fraction: float | None = None,
        class_weight: Any = None,
        multi_label: bool = False,
        keep_examples: bool = False,
        cache: bool | str | Path = True,
        cache_bytes: int = 20 * 1024**3,
        checkpoint: str | Path | None = None,
        device: str | None = None,
        random_state: int = 0,
        verbose: bool | None = None,
    ):
        self.encoder = encoder
        self.revision = revision
        self.depths = depths
        self.max_length = max_length
        self.stride = stride
        self.special_tokens = special_tokens
        self.head = head
        self.head_options = head_options
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.drop_inputs = drop_inputs
        self.drop_features = drop_features
        self.mixup = mixup
        self.label_smoothing = label_smoothing
        self.patience = patience
        self.mixed_precision = mixed_precision
        self.shard_inputs = shard_inputs
        self.validation_fraction = validation_fraction
        self.class_weight = class_weight
        self.multi_label = multi_label
        self.keep_examples = keep_examples
        self.cache = cache
        self.cache_bytes = cache_bytes
        self.checkpoint = checkpoint
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        tags.classifier_tags.multi_label = self.multi_label
        return tags

    def __getstate__(self):
        # The encoder can be loaded again, unless it came as an object.
        state = dict(super().__getstate__())
        if isinstance(self.encoder, str | Path):
            state.pop("encoder_", None)
        return state

    def fit(self, X: Any, y: Any = None, *, validation: Any = None) -> "RoutingClassifier":
        """Learn from texts and their labels.

        Args:
            X: texts: a list, a pandas Series, a numpy array; or a ``datasets.Dataset`` with a column of texts
                and one of labels; or a ``datasets.DatasetDict``, whose splits "train" and "validation" are
                learned from and validated on.
            y: a label for each; None where X has labels.
            validation: texts and labels, or a dataset, to validate on instead of a part of X.

        Raises:
            ValueError, TypeError: texts or labels that are missing, empty, of one class only, ...
        """
        X, y, validation = samples_and_labels(X, y, validation, self._of_images())
        texts, task_labels, train_on, validate_on = self._samples(X, y, validation)
        recipe = self._recipe(len(texts))
        accelerator = make_accelerator(self.device)
        features = self._features(texts, accelerator)
        encoder = features.encoder
        head = self._new_head(encoder, len(task_labels.classes))
        task = Task(
            features,
            task_labels.targets,
            train_on,
            validate_on,
            class_weights(self.class_weight, task_labels, self.multi_label),
            self.multi_label,
            key=text_key("\0".join([encoder.key, *(t if isinstance(t, str) else t.key for t in texts)])),
        )
        checkpoint = None if self.checkpoint is None else Path(self.checkpoint)
        trained = train(head, task, recipe, checkpoint=checkpoint, accelerator=accelerator, show=self._show)
        self.classes_ = task_labels.classes
        self.encoder_, self.head_, self.history_ = encoder, head.eval(), trained.history
        self.validation_accuracy_ = trained.history[trained.kept].get("valid_accuracy")
        self.identity_ = encoder.identity
        self.n_texts_ = {"train": len(train_on), "validation": len(validate_on)}
        self.examples_ = examples(texts, task_labels) if self.keep_examples else []
        return self

    def predict(self, X: Any) -> Any:
        """The label of each text; a table of zeros and ones [n, n_cls] where multi_label=True.

        X may be a dataset, as in ``fit``; the labels of a ``DatasetDict`` come by its splits.
        """
        if is_splits(X):
            return {split: self.predict(part) for split, part in X.items()}
        scores = self._scores(X)  # [n, n_cls]
        if self.multi_label:
            return (scores > 0).long().numpy()
        return self.classes_[scores.argmax(-1).numpy()]

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class for each text, [n, n_cls], in the order of ``classes_``."""
        if is_splits(X):
            return {split: self.predict_proba(part) for split, part in X.items()}
        scores = self._scores(X)  # [n, n_cls]
        return (scores.sigmoid() if self.multi_label else scores.softmax(-1)).numpy()

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The share of texts whose label is predicted; y may be None where X is a dataset with labels."""
        return super().score(X, labels_of(X) if y is None and is_dataset(X) else y, sample_weight)

    def decision_function(self, X: Any) -> np.ndarray:
        """The score of each class for each text, [n, n_cls]; with two classes their difference, [n]."""
        scores = self._scores(X).numpy()  # [n, n_cls]
        two = len(self.classes_) == 2 and not self.multi_label
        return scores[:, 1] - scores[:, 0] if two else scores

    def transform(self, X: Any) -> np.ndarray:
        """A vector for each text, [n, k], float32: the hidden vectors of the routing head side by side.

        With n_hid hidden vectors of size d_hid, k = n_hid d_hid; for a pooling head it is the pooled vector.
        So a classifier can stand in a pipeline of scikit-learn before anything else.
        """
        check_is_fitted(self)
        head = partial(vectors, self.head_)
        found = [self._through(head, *some) for some in self._windows(X)]  # [b, k] each
        return torch.cat(found).numpy()  # [n, k]

    @property
    def _n_features_out(self) -> int:
        """k of ``transform``, from which ``get_feature_names_out`` makes names."""
        check_is_fitted(self)
        return n_vector(self.head_)

    def explain(
        self,
        X: Any,
        classes: Sequence[Any] | None = None,
        *,
        of: str = "words",
        samples: int = 0,
        by_depth: bool = False,
    ) -> Any:
        """What each word of a text, or each patch of an image, adds to the score of each class.

        Args:
            X: one text or several.
            classes: the labels to explain, None for all; of images for the ten with the highest scores.
            of: "words" for what each word that the encoder read adds, through the frozen encoder; "states"
                for what each hidden state, of each token at each depth, adds at the head, with the credit phi
                where the head routes. A hidden state has read the other words too.
            samples: 0 for the text as it is; an even number for means over so many random sub-texts, which is
                slower and more faithful. What their sum misses is ``not_explained``.
            by_depth: True to split the value of each word by the depth of the hidden states it goes through.

        Returns:
            An ``Explanation``, or a list of them for several texts.

        Raises:
            ValueError: the encoder or the head has an operation that no rule holds fixed, samples of states
                or images, or a wrong argument.
        """
        from vecroute.classifier.explaining import explain

        check_is_fitted(self)
        return explain(self, X, classes, of=of, samples=samples, by_depth=by_depth)

    def save_pretrained(
        self, folder: str | Path, *, overwrite: bool = False, about: dict | None = None
    ) -> None:
        """Write the classifier to a folder, whole or not at all; ``from_pretrained`` reads it.

        Args:
            folder: gets ``config.json``, ``model.safetensors`` and a model card, ``README.md``. The encoder
                is referred to by its name or folder, not stored. An encoder that lies inside the folder stays
                there and is referred to by its relative path, so that both can be moved together.
            overwrite: replace the classifier that is in the folder.
            about: more to remember, of JSON types.

        Raises:
            ValueError: the folder exists; or, with ``overwrite``, it is not the folder of a classifier, but a
                file, a link or a folder with other files.
        """
        from vecroute.classifier.saving import save_classifier

        check_is_fitted(self)
        save_classifier(self, Path(folder), overwrite, about or {})
        if self.checkpoint is not None:  # what was trained is safe now
            remove_finished(Path(self.checkpoint))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        revision: str | None = None,
        encoder: Any = None,
        device: str | None = None,
        verbose: bool | None = None,
    ) -> "RoutingClassifier":
        """Read what ``save_pretrained`` or ``push_to_hub`` wrote.

        Args:
            folder: the folder, or the name of the classifier on the Hugging Face hub, such as "owner/name".
            revision: a branch, tag or commit on the hub.
            encoder: where the encoder is now, None for where it was.
            device, verbose: as in the constructor.

        Raises:
            ValueError: a file that is missing or damaged, weights that are NaN or infinite, an encoder that
                is not there, or not the one of the training.
        """
        from vecroute.classifier.hub import find
        from vecroute.classifier.saving import load_classifier

        return load_classifier(cls, find(folder, revision), encoder, device, verbose)

    def push_to_hub(
        self,
        name: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        message: str = "Upload a classifier",
        about: dict | None = None,
    ) -> str:
        """Upload the classifier and its model card to the Hugging Face hub, as you are logged in there.

        Args:
            name: "owner/name"; it is made if it is not there.
            private: whether others may not see it, None for what is usual there.
            revision: the branch to upload to, None for the main one.
            message: of the commit.
            about: more to remember, as in ``save_pretrained``.

        Returns:
            The address of the commit.
        """
        from vecroute.classifier.hub import push

        check_is_fitted(self)
        about = {**getattr(self, "about_", {}), **(about or {})}
        return push(self, name, private=private, revision=revision, message=message, about=about)

    def _samples(self, X: Any, y: Any, validation: tuple[Any, Any] | None):
        """Checked texts and labels, and which samples to train and to validate on."""
        check_samples: Any = check_images if self._of_images() else check_texts
        texts = check_samples(X)
        check = check_label_sets if self.multi_label else check_labels
        if validation is None:
            labels = check(y, len(texts))
            return (
                texts,
                labels,
                *split(labels, self.validation_fraction, self.random_state, self.multi_label),
            )
        more = check_samples(validation[0], "validation")
        labels = check([*y, *validation[1]], len(texts) + len(more))
        n, n_more = len(texts), len(more)
        return texts + more, labels, list(range(n)), list(range(n, n + n_more))

    @property
    def _show(self) -> bool:
        return sys.stderr.isatty() if self.verbose is None else self.verbose

    def _features(self, texts: list[Any], accelerator: Accelerator) -> Features:
        """The hidden states of texts, each process having computed its share of what the cache lacked."""
        encoder = self._load_encoder(accelerator.device)
        features = Features(encoder, texts, self._open_cache(encoder))
        show = self._show and accelerator.is_main_process
        with progress_bar(show, "hidden states", len(set(texts))) as bar:
            features.prepare((accelerator.process_index, accelerator.num_processes), bar)
        accelerator.wait_for_everyone()
        if features.cache is not None:
            features.cache.refresh()
        return features

    def _recipe(self, n: int) -> Recipe:
        """How to train on n samples."""
        given = {field.name: getattr(self, field.name) for field in fields(Recipe) if field.name != "seed"}
        for name in ("drop_inputs", "drop_features"):
            if given[name] is None:
                given[name] = getattr(Recipe, name) if self.head in CHOOSING else 0.0
        if given["weight_decay"] is None:
            given["weight_decay"] = WEIGHT_DECAY_OF_FEW if n < FEW else Recipe.weight_decay
        return Recipe(seed=self.random_state, **given)

    def _of_images(self) -> bool:
        return is_of_images(self.encoder, self.revision)

    def _new_head(self, encoder: Any, n_cls: int) -> torch.nn.Module:
        sizes = {"d_emb": encoder.d_emb, "depth": encoder.depth, "n_cls": n_cls}
        return make_head(self.head, seed=self.random_state, **sizes, **(self.head_options or {}))

    def _load_encoder(self, device: torch.device) -> Any:
        depths = None if self.depths is None else tuple(self.depths)
        names = ("revision", "max_length", "stride", "special_tokens")
        options = {name: getattr(self, name) for name in names}
        return load_encoder(self.encoder, device, depths=depths, **options)

    def _open_cache(self, encoder: Any) -> FeatureCache | None:
        if self.cache is False or self.cache is None:
            return None
        folder = default_folder() if self.cache is True else Path(self.cache)
        try:
            return FeatureCache(folder, encoder.key, self.cache_bytes)
        except OSError as error:
            logger.warning("no cache of hidden states: %s", error)
            return None

    def _ready(self) -> tuple[Any, Any]:
        """The encoder, loaded again if need be, and the head."""
        check_is_fitted(self)
        if not hasattr(self, "encoder_"):
            self.encoder_ = self._load_encoder(next(self.head_.parameters()).device)
        found = self.encoder_.identity
        if found != self.identity_ and (differs := difference(self.identity_, found)):
            raise ValueError(
                f"encoder {self.encoder_.name!r} is not the one this classifier was fitted with: {differs}"
            )
        return self.encoder_, self.head_

    def _scores(self, X: Any) -> Tensor:
        """The scores [n, n_cls] of texts in double precision, on the CPU."""
        return torch.cat([self._scores_of(*some) for some in self._windows(X)])  # [n, n_cls]

    def _scores_of(self, batches: Iterable[Batch], n: int) -> Tensor:
        """The scores [n, n_cls] of n texts whose hidden states come in batches."""
        return self._through(self.head_, batches, n).double()

    def _windows(self, X: Any) -> Iterator[tuple[Iterable[Batch], int]]:
        """Batches of hidden states of some texts after the other, and how many, so that tokens fit memory."""
        encoder, _ = self._ready()
        images = isinstance(encoder, VisionEncoder)
        samples: Any = (check_images if images else check_texts)(samples_of(X, images))
        sizes = [len(s) if isinstance(s, str) else WINDOW_CHARACTERS // WINDOW_IMAGES for s in samples]
        for group in windows(sizes, WINDOW_CHARACTERS):
            yield encoder.batches(encoder.tokenize([samples[k] for k in group])), len(group)

    @torch.inference_mode()
    def _through(self, head: Callable[..., Tensor], batches: Iterable[Batch], n: int) -> Tensor:
        """What a part of the head makes of the hidden states of n texts, [n, k], on the CPU."""
        device = next(self.head_.parameters()).device
        rows: Any = None
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                found = head(batch.hidden.to(device, torch.float32), batch.mask.to(device)).float()  # [b, k]
            rows = found.new_empty(n, found.shape[1]) if rows is None else rows  # [n, k]
            rows[batch.which] = found
        return rows.cpu()
