"""Explanation: what each token of a text adds to each class score, at each depth."""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vecroute.explain import adapters
from vecroute.explain.aggregate import by_depth, by_part
from vecroute.explain.arrays import as_array, as_floats, check_offsets
from vecroute.explain.shown import plural
from vecroute.ops.checks import check_choice, check_size
from vecroute.storage import load_tensors, save_tensors, write_file

ARRAYS = (
    "values",
    "phi",
    "base_values",
    "scores",
    "probabilities",
    "not_explained",
    "offsets",
    "special",
    "chunk",
)
UNITS = ("token", "word", "sentence", "chunk", "depth")


class Part(NamedTuple):
    """One part of a text and what it adds to a score."""

    piece: str
    start: int  # first character in the text
    end: int  # one past the last character; equal to start if the part has no characters
    value: float


class Explanation:
    """What each token of one text adds to each class score at each depth, and the credit phi.

        scores = base_values + not_explained + sum over tokens and depths of values

    Arrays are NumPy float32, and sums are computed in float64. Rows are tokens. After ``aggregate``, they are
    words, sentences, chunks or depths. Each text has its own explanation.

    Args:
        values: [n, depth, n_cls] contributions of every token, as an array or tensor.
        phi: [n, depth, n_cls] credit of every token, None if it is unknown.
        base_values: [n_cls] the scores without any contribution.
        scores: [n_cls] the scores that the network computed.
        output_names: the names of the n_cls classes.
        text: the text as it was given.
        offsets: [n, 2] first character of each token in the text, and one past the last. The two are equal if
            a token has no characters.
        pieces: the string of each token, None for its characters in the text.
        special: [n] True at tokens that the tokenizer added, None if there are none.
        chunk: [n] the chunk of the text in which each token was encoded, None for one chunk.
        depths: numbers of the hidden states, 0 for the embeddings, or names; None for 0, ..., depth - 1.
        unit: what a row is, such as "token".
        of: "words" if the values belong to the tokens that the encoder read, "states" if they belong to the
            hidden states at each position, which have read the other tokens too.
        not_explained: [n_cls] the scores minus base and values, None for zeros.
        temperature: T; the probabilities of all classes are softmax(scores / T).
        multi_label: True if a text may have several classes. Probabilities are then sigmoid(scores / T).
        probabilities: [n_cls], NaN where one is unknown. None computes them from the scores, which must then
            cover all classes.
        about: further information about the origin, in JSON types, such as "model" and "date".

    Raises:
        ValueError: shapes do not agree, offsets are outside the text, numbers are not finite, or the
            temperature is not positive.
    """

    units: tuple[str, ...] = UNITS
    arrays: tuple[str, ...] = ARRAYS  # fields that are saved as tensors
    kind = "explanation"  # written to files, so that load() refuses other files

    def __init__(
        self,
        *,
        values: Any,
        phi: Any = None,
        base_values: Any,
        scores: Any,
        output_names: Sequence[Any],
        text: str,
        offsets: Any,
        pieces: Sequence[str] | None = None,
        special: Any = None,
        chunk: Any = None,
        depths: Sequence[int | str] | None = None,
        unit: str = "token",
        of: str = "states",
        not_explained: Any = None,
        temperature: float = 1.0,
        multi_label: bool = False,
        probabilities: Any = None,
        about: Mapping[str, Any] | None = None,
    ):
        check_choice("unit", unit, self.units)
        check_choice("of", of, ("words", "states"))
        if not 0 < temperature < np.inf:
            raise ValueError(f"temperature must be a positive number, got {temperature!r}")
        if not isinstance(text, str):
            raise TypeError(f"text must be a string, got {type(text).__name__}")
        self.text, self.unit, self.of = text, unit, of
        self.temperature, self.multi_label = float(temperature), bool(multi_label)
        self.about = dict(about or {})
        self.output_names = [str(name) for name in output_names]
        n_cls = len(self.output_names)
        if not 0 < n_cls == len(set(self.output_names)):
            raise ValueError(f"output_names must be different names, at least one, got {self.output_names}")
        self.values = as_floats("values", values, (None, None, n_cls), "n depth n_cls")  # [n, depth, n_cls]
        n, depth, _ = self.values.shape
        self.phi = None  # or [n, depth, n_cls]
        if phi is not None:
            self.phi = as_floats("phi", phi, self.values.shape, "n depth n_cls")
        self.base_values = as_floats("base_values", base_values, (n_cls,), "n_cls")  # [n_cls]
        self.scores = as_floats("scores", scores, (n_cls,), "n_cls")  # [n_cls]
        missing = np.zeros(n_cls) if not_explained is None else not_explained
        self.not_explained = as_floats("not_explained", missing, (n_cls,), "n_cls")  # [n_cls]
        if probabilities is None:
            probabilities = probabilities_of(self.scores, self.temperature, self.multi_label)
        self.probabilities = as_array(probabilities, np.float32)  # [n_cls]
        self.offsets = check_offsets(offsets, n, text)  # [n, 2]
        self.special = as_array([False] * n if special is None else special, np.bool_)  # [n]
        self.chunk = as_array([0] * n if chunk is None else chunk, np.int32)  # [n]
        if pieces is None:
            pieces = [text[start:end] for start, end in self.offsets]
        self.pieces = [str(piece) for piece in pieces]
        levels = range(depth) if depths is None else depths
        self.depths = [level if isinstance(level, str) else int(level) for level in levels]
        counts = {"special": n, "chunk": n, "pieces": n, "depths": depth, "probabilities": n_cls}
        for name, count in counts.items():
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} must have {count} elements, got {len(getattr(self, name))}")

    def __repr__(self) -> str:
        n, depth, _ = self.values.shape
        scores = ", ".join(f"{k}={v:.3g}" for k, v in zip(self.output_names, self.scores, strict=True))
        return f"{type(self).__name__}({n} {plural(self.unit, n)}, depth={depth}, scores: {scores})"

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, name: Any) -> Self:
        """Return the explanation of one class, or of a list of them, by name."""
        names = name if isinstance(name, list) else [name]
        chosen = [self.index(n) for n in names]
        return self._of_outputs(np.eye(len(self.output_names))[chosen], names, self.probabilities[chosen])

    def margin(self, name: Any = None, other: Any = None) -> Self:
        """Return the explanation of the margin: the score of one class minus the score of another.

        Its probability is sigmoid(margin / T), the probability of the first class against the other.

        Args:
            name: a class, None for the one with the highest score.
            other: the class to subtract, None for the highest score of the others.

        Raises:
            ValueError: both are the same class, or only one class is explained.
        """
        j = self.index(name)
        ranked = [k for k in np.argsort(-self.scores, kind="stable") if k != j]
        if not ranked:
            raise ValueError(f"margin needs two classes, this explains {self.output_names[j]!r} alone")
        k = ranked[0] if other is None else self.index(other)
        if j == k:
            names = f"{self.output_names[j]!r} and {self.output_names[k]!r}"
            raise ValueError(f"margin needs two different classes, got {names}")
        weights = np.eye(len(self.output_names))[j] - np.eye(len(self.output_names))[k]  # [n_cls]
        of_two = probabilities_of(weights[None] @ self.scores, self.temperature, True)  # [1]
        pair = [self.output_names[j], self.output_names[k]]
        margin = self._of_outputs(weights[None], [" - ".join(pair)], of_two)
        return margin._replace(about=self.about | {"margin": pair})

    def aggregate(self, unit: str, *, skip_special_tokens: bool = False) -> "Explanation":
        """Sum contributions over the tokens of each word, sentence or chunk, or over all tokens of a depth.

        Words and sentences are found in the text itself. Special tokens belong to none of them and keep their
        own rows. "depth" gives one row for each depth. Scores, base and the total stay the same.

        Args:
            unit: "token", "word", "sentence", "chunk" or "depth".
            skip_special_tokens: True to move special tokens into the base first; see ``skip_special_tokens``.
        """
        check_choice("unit", unit, self.units)
        if skip_special_tokens:
            return self.skip_special_tokens().aggregate(unit)
        if unit == self.unit:
            return self
        if self.unit != "token" and unit != "depth":
            raise ValueError(f"aggregate needs the explanation of tokens, this is one of {self.unit}s")
        return self._replace(**(by_depth(self) if unit == "depth" else by_part(self, unit)))

    def sum_depth(self) -> Self:
        """Sum contributions and credit over depth, [n, 1, n_cls]."""
        sums = {name: array.sum(1, keepdims=True, dtype=np.float64) for name, array in self.by_row.items()}
        return self._replace(**sums, depths=["all depths"])

    def at_depth(self, level: int | str) -> Self:
        """Return the contributions of one depth, [n, 1, n_cls]. The other depths are added to the base.

        Args:
            level: the number or the name of the hidden state, as in ``depths`` or ``depth_names``.
        """
        known: list[int | str] = [*self.depths, *self.depth_names]
        if level not in known:
            raise ValueError(f"level must be one of {known}, got {level!r}")
        d = known.index(level) % len(self.depths)
        others = self.values.sum((0, 1), dtype=np.float64) - self.values[:, d].sum(0, dtype=np.float64)
        chosen = {name: array[:, [d]] for name, array in self.by_row.items()}  # [n, 1, n_cls]
        return self._replace(**chosen, base_values=self.base_values + others, depths=[self.depths[d]])

    def skip_special_tokens(self) -> Self:
        """Return the explanation without special tokens. Their contributions are added to the base."""
        keep = ~self.special  # [n]
        skipped = self.values[self.special].sum((0, 1), dtype=np.float64)  # [n_cls]
        arrays = {"offsets": self.offsets, "special": self.special, "chunk": self.chunk, **self.by_row}
        rows = {name: array[keep] for name, array in arrays.items()}
        pieces = [piece for piece, kept in zip(self.pieces, keep, strict=True) if kept]
        return self._replace(**rows, pieces=pieces, base_values=self.base_values + skipped)

    def top(self, k: int = 10, output: Any = None) -> list[Part]:
        """Return the k rows with the largest contributions to a class, positive or negative, largest first.

        Args:
            k: number of rows; all if there are fewer.
            output: the name of the class, None for the one with the highest score.
        """
        check_size("k", k)
        values = self.totals(output)  # [n]
        order = np.argsort(-abs(values), kind="stable")[:k]
        spans = self.offsets.tolist()
        return [Part(self.label(i), spans[i][0], spans[i][1], float(values[i])) for i in order]

    def totals(self, output: Any = None) -> np.ndarray:
        """Return what each row adds to the score of a class, summed over depth: float64 [n]."""
        return self.values[..., self.index(output)].sum(1, dtype=np.float64)  # [n]

    def label(self, i: int) -> str:
        """Return the characters of row i in the text, or its name if it has none."""
        start, end = self.offsets[i]
        return self.text[start:end] if self.unit == "token" and start < end else self.pieces[i]

    def index(self, output: Any = None) -> int:
        """Return the number of a class, None for the one with the highest score."""
        if output is None:
            return int(self.scores.argmax())
        if str(output) not in self.output_names:
            known = ", ".join(map(repr, self.output_names))
            raise ValueError(f"output must be one of {known}, got {output!r}")
        return self.output_names.index(str(output))

    @property
    def by_row(self) -> dict[str, np.ndarray]:
        """The arrays [n, depth, n_cls] by name: contributions, and credit if it is known."""
        return {"values": self.values} if self.phi is None else {"values": self.values, "phi": self.phi}

    @property
    def depth_names(self) -> list[str]:
        """A name for each depth."""
        names = {0: "embeddings"}
        return [d if isinstance(d, str) else names.get(d, f"layer {d}") for d in self.depths]

    @property
    def completeness_error(self) -> np.float64:
        """The largest |sum values + base + not explained - score| / (sum |values| + |base|) of any class."""
        values, base = self.values.astype(np.float64), self.base_values.astype(np.float64)
        error = abs(values.sum((0, 1)) + base + self.not_explained - self.scores)  # [n_cls]
        scale = abs(values).sum((0, 1)) + abs(base)  # [n_cls]
        return np.max(np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0))

    def to_dataframe(self):
        """Return a pandas data frame with the contribution and phi of each row, depth and class."""
        return adapters.to_dataframe(self)

    def to_shap(self):
        """Return a ``shap.Explanation`` of the text, summed over depth, for ``shap.plots.text``."""
        return adapters.to_shap(self)

    def to_captum(self, output: Any = None) -> tuple[Tensor, Tensor]:
        """Return attributions [1, n, depth] and convergence delta [1] of a class, in the form of captum."""
        return adapters.to_captum(self, self.index(output))

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file, completely or not at all. ``Explanation.load`` reads it."""
        fields = {name: field for name, field in vars(self).items() if field is not None}
        tensors = {name: torch.from_numpy(fields.pop(name)) for name in self.arrays if name in fields}
        save_tensors(path, tensors, {"kind": self.kind, **fields})

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read a file that ``save`` wrote."""
        tensors, about = load_tensors(path, cls.kind)
        del about["kind"]
        if "probabilities" not in tensors:  # an old file, which may lack some classes
            tensors["probabilities"] = torch.full_like(tensors["scores"], torch.nan)  # [n_cls]
        return cls(**{**tensors, **about})

    def to_html(
        self,
        path: str | os.PathLike | None = None,
        *,
        unit: str = "word",
        outputs: Sequence[Any] | None = None,
        states: "Explanation | None" = None,
    ) -> str | None:
        """Write a self-contained web page, completely or not at all.

        Args:
            path: the file. An existing file is replaced. None returns the page as a string.
            unit: the unit to show: "token", "word", "sentence", "chunk" or "depth".
            outputs: the classes to explain. None explains the margin of the highest score over the next one,
                and the three classes with the highest scores.
            states: the explanation of the same text with of="states", for a second view by depth.
        """
        from vecroute.explain.html import page

        return written(path, page(self, unit, outputs, states))

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from vecroute.explain.html import fragment

        return fragment(self)

    def plot(self, kind: str = "map", *, output: Any = None, of: str = "values", k: int = 20, ax: Any = None):
        """Draw with matplotlib, and return (fig, ax).

        Args:
            kind: "map" of rows and depths as in the paper, without special tokens; or "bars" that add up to
                the score.
            output: the class, None for the one with the highest score.
            of: "values" for contributions or "phi" for credit, in the map.
            k: number of bars. One more bar shows the sum of the other rows.
            ax: the axes to draw on, None for a new figure.
        """
        from vecroute.explain.plots import plot

        return plot(self, kind, output=output, of=of, k=k, ax=ax)

    def to_png(self, path: str | os.PathLike, kind: str = "map", **options: Any) -> None:
        """Write the figure of ``plot`` to a PNG file, completely or not at all."""
        from vecroute.explain.plots import png

        write_file(path, png(self, kind, **options))

    def to_rich(self, *, output: Any = None, k: int = 10, unit: str = "word"):
        """Return an object that rich prints to a terminal: the text, and the account of a score.

        Args:
            output: the class. None explains the decision: the highest score minus the next one.
            k: number of lines. One more line shows the sum of the other rows.
            unit: the unit to show, as in ``to_html``.
        """
        from vecroute.explain.terminal import renderable

        return renderable(self, output, k, unit)

    def __rich__(self):
        return self.to_rich()

    def _replace(self, **changes: Any) -> Self:
        return type(self)(**{**vars(self), **changes})

    def _of_outputs(self, weights: np.ndarray, names: Sequence[Any], probabilities: np.ndarray) -> Self:
        """Combine the outputs linearly, weights [n_new, n_cls], with the new probabilities [n_new]."""
        outputs = {name: getattr(self, name) for name in ("base_values", "scores", "not_explained")}
        arrays = {**outputs, **self.by_row}
        mixed = {name: array.astype(np.float64) @ weights.T for name, array in arrays.items()}
        return self._replace(**mixed, output_names=names, probabilities=probabilities)


def probabilities_of(scores: np.ndarray, temperature: float, multi_label: bool) -> np.ndarray:
    """Return softmax(scores / T), or sigmoid(scores / T) if multi_label=True: float64 [n_cls].

    Softmax of a single score says nothing about its probability, so the result is NaN then.
    """
    logits = scores.astype(np.float64) / temperature  # [n_cls]
    if multi_label:
        return np.exp(-np.logaddexp(0, -logits))  # [n_cls]
    if len(logits) == 1:
        return np.array([np.nan])
    powers = np.exp(logits - logits.max())  # [n_cls]
    return powers / powers.sum()


def written(path: str | os.PathLike | None, page: str) -> str | None:
    """Write a page to a file and return None, or return the page if there is no path."""
    if path is None:
        return page
    write_file(path, page.encode())
    return None


def where_from(model: str) -> dict[str, Any]:
    """Return the entries of ``about`` for an explanation made now: the model and the date."""
    return {"model": model, "date": datetime.now(UTC).date().isoformat()}
