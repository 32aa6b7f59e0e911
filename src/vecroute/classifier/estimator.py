"""RoutingClassifier: a scikit-learn estimator on the hidden states of a frozen Transformer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import (  # type: ignore[import-untyped]
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]
from torch import nn

from vecroute.classifier.columns import is_dataset, is_splits, labels_of
from vecroute.classifier.estimate import Estimate
from vecroute.classifier.fitting import fit_classifier
from vecroute.classifier.predicting import scores_of, vectors_of
from vecroute.classifier.vectors import n_vector
from vecroute.encoders.identity import Identity
from vecroute.training import remove_finished
from vecroute.training.calibration import probabilities


class RoutingClassifier(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, BaseEstimator):
    """Classify texts or images by routing all hidden states of a frozen Transformer to class scores.

    With a vision Transformer as encoder, everything below applies to images instead of texts. An image is a
    path, a PIL image or an array; see ``vecroute.io.images``.

    Args:
        encoder: "minilm" for texts, "vit-cifar10" for images, a name on the Hugging Face hub, a folder, a
            loaded model, a ``TextEncoder`` or a ``VisionEncoder``.
        revision: revision of the encoder on the hub.
        depths, max_length, stride, special_tokens: see ``vecroute.encoders.TextEncoder``.
        head: "routing", "wide" or "paper", or a baseline without credit; see ``vecroute.heads``.
        head_options: options of the head, see ``vecroute.RoutingHead``. The head "routing" has three members,
            unless the options say otherwise.
        max_epochs, batch_size, lr, mixup, patience, mixed_precision, shard_inputs: see
            ``vecroute.training.Recipe``.
        weight_decay: see ``Recipe``. None means 0.5, and more if there are n < 4000 texts: 2000 / n, at
            most 8, and less in proportion if lr is above 1e-3.
        label_smoothing: see ``Recipe``. None means 20 / n for n texts, at most 0.1.
        drop_inputs, drop_features: see ``Recipe``. None means 0.8 and 0.3 if the head weights each hidden
            state, and 0 if it takes means or one position ("mean_last", "mean_all", "scalar_mix", "cls").
        validation_fraction: share of the texts for validation, 0 for no validation. None means a tenth if
            there are 2000 texts or more, else 0.
        class_weight: None, "balanced", or a dict by label.
        multi_label: True if a text may have any number of labels. Then y is a collection of labels for each
            text, or a table of zeros and ones, and ``predict`` returns such a table.
        calibrate: True to fit a temperature T, so that probabilities agree with the accuracy. They are
            softmax(scores / T), or sigmoid(scores / T) if multi_label=True. False means T = 1.
        estimate: True to estimate the accuracy on new texts, as ``estimate_``. T and the estimate come from
            the validation texts. Without validation, ``fit`` trains three more heads, each on two thirds of
            the texts, and tests each on the rest. This takes about twice the time of training the head.
        keep_examples: True to store three of the texts with the classifier, as ``examples_``.
        cache: where to store hidden states: True for the user's cache folder, a folder, or False for nowhere.
        cache_bytes: size limit of that folder.
        checkpoint: a file from which ``fit`` resumes where it stopped, None for no checkpoint. The file stays
            until ``save_pretrained`` has written the classifier.
        device: the device, None for the GPU if there is one.
        random_state: an int, the seed of all random numbers.
        verbose: True to show progress, None to show it on terminals only.

    Attributes:
        classes_: the labels, in the order of the columns of ``predict_proba``.
        head_: the trained head.
        encoder_: the ``TextEncoder`` or ``VisionEncoder``.
        history_: loss and validation of each epoch.
        validation_accuracy_: validation accuracy of the final weights, None without validation.
        temperature_: T, 1 if calibrate=False.
        estimate_: the expected accuracy on new texts, an ``Estimate``, None if estimate=False.
        examples_: up to three training texts, none unless keep_examples=True.
    """

    classes_: np.ndarray  # [n_cls]
    head_: nn.Module
    encoder_: Any
    identity_: Identity  # of the encoder, to recognise it when it is loaded again
    history_: list[dict[str, Any]]
    n_texts_: dict[str, int]
    validation_accuracy_: float | None
    temperature_: float
    estimate_: Estimate | None
    examples_: list[str]

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
        label_smoothing: float | None = None,
        patience: int = 5,
        mixed_precision: str = "auto",
        shard_inputs: bool = False,
        validation_fraction: float | None = None,
        class_weight: Any = None,
        multi_label: bool = False,
        calibrate: bool = True,
        estimate: bool = True,
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
        self.calibrate = calibrate
        self.estimate = estimate
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
        # Drop the encoder, which can be loaded again, unless it was given as an object.
        state = dict(super().__getstate__())
        if isinstance(self.encoder, str | Path):
            state.pop("encoder_", None)
        return state

    def fit(self, X: Any, y: Any = None, *, validation: Any = None) -> "RoutingClassifier":
        """Learn from texts and their labels.

        Args:
            X: texts as a list, pandas Series or numpy array; a data frame or ``datasets.Dataset`` with a
                column of texts and one of labels; or a ``datasets.DatasetDict`` with splits "train" and
                "validation".
            y: a label for each text, or None if X contains labels.
            validation: texts and labels, or a dataset, for validation instead of a part of X.

        Raises:
            ValueError, TypeError: texts or labels are missing or empty, there is only one class, or
                validation has a label that y does not have.
        """
        fit_classifier(self, X, y, validation)
        return self

    def predict(self, X: Any) -> Any:
        """Return the label of each text, or a table of zeros and ones [n, n_cls] if multi_label=True.

        X may be a data frame or a dataset, as in ``fit``, or a stream: a generator, or a streamed dataset.
        Only about a million characters of a stream are in memory at a time. For a ``DatasetDict``, return a
        dict of labels by split.
        """
        if is_splits(X):
            return {split: self.predict(part) for split, part in X.items()}
        scores = scores_of(self, X)  # [n, n_cls]
        if self.multi_label:
            return (scores > 0).long().numpy()
        return self.classes_[scores.argmax(-1).numpy()]

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class for each text, [n, n_cls], in the order of ``classes_``."""
        if is_splits(X):
            return {split: self.predict_proba(part) for split, part in X.items()}
        return probabilities(scores_of(self, X), self.temperature_, self.multi_label).numpy()  # [n, n_cls]

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy. y may be None if X is a dataset with labels."""
        return super().score(X, labels_of(X) if y is None and is_dataset(X) else y, sample_weight)

    def evaluate(self, X: Any, y: Any = None) -> dict[str, Any]:
        """Return accuracy, macro F1, calibration error, a row for each class and the confusion matrix.

        Args:
            X: as in ``predict``.
            y: a label for each text, or None if X is a data frame or dataset with labels.

        Raises:
            ValueError: multi_label=True, or the numbers of labels and of texts differ.
        """
        from vecroute.training.evaluation import evaluate

        if self.multi_label:
            raise ValueError(
                "evaluate measures one label for each text, got a classifier with multi_label=True"
            )
        if y is None and not is_dataset(X):
            raise TypeError("y must be a label for each text, got None")
        labels = list(labels_of(X) if y is None else y)
        probabilities = self.predict_proba(X)  # [n, n_cls]
        if len(labels) != len(probabilities):
            n = len(probabilities)
            raise ValueError(f"y must be one label for each of the {n} texts in X, got {len(labels)}")
        return evaluate(labels, list(self.classes_), probabilities)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the scores of each text, [n, n_cls]. With two classes, return their difference, [n]."""
        scores = scores_of(self, X).numpy()  # [n, n_cls]
        two = len(self.classes_) == 2 and not self.multi_label
        return scores[:, 1] - scores[:, 0] if two else scores

    def transform(self, X: Any) -> np.ndarray:
        """Return a float32 vector for each text, [n, k]: the concatenated hidden vectors of the head.

        With n_hid hidden vectors of size d_hid, k = n_hid d_hid. A pooling head gives its pooled vector
        instead. With this method, a classifier can be a step of a scikit-learn pipeline.
        """
        return vectors_of(self, X).numpy()  # [n, k]

    @property
    def _n_features_out(self) -> int:
        """Return the size k of the vectors of ``transform``; ``get_feature_names_out`` makes k names."""
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
        """Return the contribution of each word of a text, or patch of an image, to the score of each class.

        Args:
            X: one text, or several as in ``predict``.
            classes: the labels to explain, None for all (for images, the ten with the highest scores).
            of: "words" explains the words that the encoder read, through the frozen encoder. "states"
                explains the hidden states of each token and depth, which the head read, with the credit phi
                if the head routes. A hidden state also depends on the other words.
            samples: 0 explains the text itself. An even number takes means over this many random sub-texts,
                which is slower and more faithful. The sum of the contributions then differs from the score
                by ``not_explained``.
            by_depth: True to split the value of each word by the depth of the hidden states it goes through.

        Returns:
            An ``Explanation``, or a list of them for several texts.

        Raises:
            ValueError: the encoder or the head has an operation that cannot be held fixed, samples are given
                for states or images, or an argument is wrong.
        """
        from vecroute.classifier.explaining import explain

        check_is_fitted(self)
        return explain(self, X, classes, of=of, samples=samples, by_depth=by_depth)

    def explain_iter(
        self,
        X: Any,
        classes: Sequence[Any] | None = None,
        *,
        of: str = "words",
        samples: int = 0,
        by_depth: bool = False,
    ) -> Iterator[Any]:
        """Yield the explanation of each text in order, as ``explain`` makes it, in batches of similar length.

        Only some texts and their explanations are in memory at a time, so X may be an endless generator.
        The arguments are the same as in ``explain``, but X has several texts.
        """
        from vecroute.classifier.explaining import explain_iter

        check_is_fitted(self)
        return explain_iter(self, X, classes, of=of, samples=samples, by_depth=by_depth)

    def save_pretrained(
        self, folder: str | Path, *, overwrite: bool = False, about: dict | None = None
    ) -> None:
        """Write the classifier to a folder, which ``from_pretrained`` reads. A failed call changes nothing.

        Args:
            folder: receives ``config.json``, ``model.safetensors`` and a model card, ``README.md``. The
                encoder is not stored, only its name or folder. If the encoder is inside the folder, it stays
                there and its relative path is stored, so that you can move both together.
            overwrite: True to replace the classifier in the folder.
            about: further information to store, of JSON types.

        Raises:
            ValueError: the folder exists; or, with ``overwrite``, it is a file, a link or a folder with other
                files, not the folder of a classifier.
        """
        from vecroute.classifier.saving import save_classifier

        check_is_fitted(self)
        save_classifier(self, Path(folder), overwrite, about or {})
        if self.checkpoint is not None:  # the classifier is saved, so the checkpoint is not needed
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
        """Load a classifier that ``save_pretrained`` or ``push_to_hub`` wrote.

        Args:
            folder: the folder, or the name of the classifier on the Hugging Face hub, such as "owner/name".
            revision: a branch, tag or commit on the hub.
            encoder: the name or folder of the encoder, None if it has not moved since the fit.
            device, verbose: as in the constructor.

        Raises:
            ValueError: a file is missing or damaged, weights are NaN or infinite, or the encoder is missing
                or is not the one that was used in training.
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
        """Upload the classifier and its model card to the Hugging Face hub, with your login.

        Args:
            name: "owner/name". The repository is created if it does not exist.
            private: True to hide it from others, None for the default of the hub.
            revision: the branch to upload to, None for the main branch.
            message: message of the commit.
            about: further information to store, as in ``save_pretrained``.

        Returns:
            The address of the commit.

        Raises:
            ValueError: the name is not "owner/name".
            OSError: the hub cannot be reached or refuses.
        """
        from vecroute.classifier.hub import push

        check_is_fitted(self)
        about = {**getattr(self, "about_", {}), **(about or {})}
        return push(self, name, private=private, revision=revision, message=message, about=about)

    def to_onnx(self, path: str | Path, *, part: str = "all") -> None:
        """Write the classifier as an ONNX graph, after checking it against PyTorch in onnxruntime.

        Batch and length may vary. Outputs are ``scores`` and ``probabilities`` [b, n_cls], in the order of
        ``classes_``. The tokenizer stays outside.

        Args:
            path: the file. It is written completely or not at all.
            part: "all" for encoder and head, or "head". Inputs of "all" are ``input_ids`` and
                ``attention_mask`` [b, n], int64, n at most max_length, as the tokenizer returns them; with
                special_tokens=False also ``special_tokens_mask`` [b, n]; for images ``pixel_values``
                [b, channels, height, width]. Inputs of "head" are ``hidden_states``
                [b, n_pos, depth, d_emb] and ``input_mask`` [b, n_pos], bool.

        Raises:
            ValueError: the encoder or the head has an operation that ONNX does not have, or the probabilities
                of the graph differ from PyTorch. No file is written then.
            ImportError: the extra ``onnx`` is not installed.
        """
        from vecroute.classifier.onnx import export

        check_is_fitted(self)
        export(self, Path(path), part)
