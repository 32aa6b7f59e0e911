"""ImageExplanation: what each patch of an image adds to each class score, at each depth."""

import os
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from vecroute.encoders.vision import VisionEncoder
from vecroute.explain.aggregate import by_depth, sums
from vecroute.explain.arrays import as_array
from vecroute.explain.explanation import ARRAYS, Explanation, written
from vecroute.explain.hidden import explain_states_of
from vecroute.explain.words import image_readings, split_words
from vecroute.io.images import Picture
from vecroute.ops.checks import check_choice, check_size
from vecroute.storage import require, write_file

LONGEST = 512  # pixels of the longer side of the copy of the image that an explanation keeps
N_REGIONS = 8
N_EXPLAINED = 10  # classes explained by default


class ImageExplanation(Explanation):
    """What each patch of one image adds to each class score at each depth, and the credit phi.

        scores = base_values + sum over patches and depths of values

    Rows are special tokens and patches, or regions or depths after ``aggregate``. ``text`` is the name of the
    image. Everything else is as in ``Explanation``.

    Args:
        image: [height, width, 3] uint8, the image itself or a smaller copy to draw on.
        size: width and height of the original image.
        tiles: [rows, columns, 4] left, top, right and bottom of each patch, in pixels of the original image.
        cells: [rows, columns] the row of the explanation that each patch belongs to, -1 for none.
        fields: the arguments of ``Explanation``; offsets may be left out.

    Raises:
        ValueError: shapes do not agree.
    """

    units = ("patch", "region", "depth")
    arrays = (*ARRAYS, "image", "tiles", "cells")
    kind = "explanation of an image"

    def __init__(self, *, image: Any, size: Sequence[int], tiles: Any, cells: Any, **fields: Any):
        fields.setdefault("offsets", np.zeros((len(fields["values"]), 2)))
        super().__init__(**{"unit": "patch", **fields})
        self.image = as_array(image, np.uint8)  # [height, width, 3]
        self.size = [int(side) for side in size]
        self.tiles = as_array(tiles, np.float32)  # [rows, columns, 4]
        self.cells = as_array(cells, np.int32)  # [rows, columns]
        if self.image.ndim != 3 or self.image.shape[2] != 3:
            raise ValueError(f"image must be [height, width, 3], got {list(self.image.shape)}")
        if self.cells.ndim != 2 or self.tiles.shape != (*self.cells.shape, 4):
            shapes = f"{list(self.tiles.shape)} and {list(self.cells.shape)}"
            raise ValueError(f"tiles must be [rows, columns, 4] and cells [rows, columns], got {shapes}")
        if self.cells.size and not -1 <= self.cells.min() <= self.cells.max() < len(self):
            raise ValueError(f"cells must be rows of the explanation, from 0 to {len(self) - 1}, or -1")

    @property
    def boxes(self) -> np.ndarray:
        """The box [n, 4] around the patches of each row, in pixels; zeros for a row without patches."""
        found = np.zeros((len(self), 4), np.float32)  # [n, 4]
        for row in np.unique(self.cells[self.cells >= 0]):
            own = self.tiles[self.cells == row]  # [n_patches, 4]
            found[row] = [*own[:, :2].min(0), *own[:, 2:].max(0)]
        return found

    def aggregate(
        self,
        unit: str,
        *,
        skip_special_tokens: bool = False,
        regions: Any = N_REGIONS,
        names: Sequence[str] | None = None,
    ) -> Self:
        """Sum contributions over the patches of each region, or over all patches of a depth.

        A whole patch belongs to the region that covers most of it, so the total stays the same. Special
        tokens belong to no region and keep their own rows. "depth" gives one row for each depth.

        Args:
            unit: "patch", "region" or "depth".
            skip_special_tokens: True to move special tokens into the base first; see ``skip_special_tokens``.
            regions: an integer mask that gives the region of each pixel [height, width] of the original image
                or of each patch [rows, columns]; or a number of superpixels, which are connected patches of
                similar colours.
            names: names of the regions, in the order of the integers in the mask.
        """
        check_choice("unit", unit, self.units)
        if skip_special_tokens:
            return self.skip_special_tokens().aggregate(unit, regions=regions, names=names)
        if unit == self.unit:
            return self
        if unit == "depth":
            return self._without_cells()._replace(**by_depth(self))
        if self.unit != "patch":
            raise ValueError(f"aggregate needs the explanation of patches, this is one of {self.unit}s")
        mask = np.asarray(regions)
        if mask.ndim == 0:
            return self._by_region(self.superpixels(regions), names)
        return self._by_region(region_of_tiles(mask, self.tiles, self.size), names)

    def superpixels(self, n: int = N_REGIONS) -> np.ndarray:
        """Return the region [rows, columns] of each patch: n connected regions of similar colours."""
        check_size("regions", n)
        rows, columns = self.cells.shape
        if n >= rows * columns:
            return np.arange(rows * columns).reshape(rows, columns)
        graph = require("sklearn.feature_extraction.image", "sklearn").grid_to_graph(rows, columns)
        cluster = require("sklearn.cluster", "sklearn").AgglomerativeClustering(n, connectivity=graph)
        found = cluster.fit_predict(self.colours().reshape(rows * columns, 3))  # [rows * columns]
        # Number the regions in the order of their first patches.
        order = np.unique(found, return_index=True)[1].argsort().argsort()  # [n]
        return order[found].reshape(rows, columns)

    def colours(self) -> np.ndarray:
        """Return the mean colour of each patch, [rows, columns, 3]."""
        height, width = self.image.shape[:2]
        scale = np.array([width, height, width, height]) / np.array(self.size * 2)  # [4]
        found = np.zeros((*self.cells.shape, 3))  # [rows, columns, 3]
        for place in np.ndindex(self.cells.shape):
            left, top, right, bottom = np.round(self.tiles[place] * scale).astype(int)
            left, top = min(left, width - 1), min(top, height - 1)
            found[place] = self.image[top : max(bottom, top + 1), left : max(right, left + 1)].mean((0, 1))
        return found

    def skip_special_tokens(self) -> Self:
        """Return the explanation without special tokens. Their contributions are added to the base."""
        kept = np.cumsum(~self.special) - 1  # [n]
        cells = np.where(self.cells < 0, -1, kept[self.cells])  # [rows, columns]
        return super(ImageExplanation, self._without_cells()).skip_special_tokens()._replace(cells=cells)

    def grid(self, output: Any = None, of: str = "values", level: int | None = None) -> np.ndarray:
        """Return what the row of each patch adds to the score of a class, or its credit, [rows, columns].

        Args:
            output: the class, None for the one with the highest score.
            of: "values" for contributions, "phi" for credit.
            level: index of one depth, None for the sum over depths.
        """
        check_choice("of", of, ("values", "phi"))
        from vecroute.explain.plots import chosen

        array = chosen(self, of)[..., self.index(output)]  # [n, depth]
        rows = array.sum(1, dtype=np.float64) if level is None else array[:, level]  # [n]
        return np.where(self.cells < 0, 0.0, rows[self.cells])  # [rows, columns]

    def to_html(
        self,
        path: str | os.PathLike | None = None,
        *,
        unit: str = "region",
        outputs: Sequence[Any] | None = None,
        states: Any = None,
    ) -> str | None:
        """Write a self-contained web page, completely or not at all.

        Args:
            path: the file. An existing file is replaced. None returns the page as a string.
            unit: the unit to list: "patch", "region" or "depth".
            outputs: the classes to explain. None explains the margin of the highest score over the next one,
                and the three classes with the highest scores.
            states: the explanation of the same image with of="states", for a second view by depth.
        """
        from vecroute.explain.image_html import page

        return written(path, page(self, unit, outputs, states))

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from vecroute.explain.image_html import fragment

        return fragment(self)

    def plot(
        self,
        kind: str = "overlay",
        *,
        output: Any = None,
        other: Any = None,
        of: str = "values",
        k: int = 20,
        ax: Any = None,
    ):
        """Draw with matplotlib, and return (fig, ax).

        Args:
            kind: "overlay" on the image, summed over depths; "map" of patches at each depth as in the paper,
                without special tokens; "compare" for two classes side by side, with a pair of axes; or "bars"
                that add up to the score.
            output: the class, None for the one with the highest score.
            other: the class to compare with, None for the highest score of the others.
            of: "values" for contributions, "phi" for absolute credit as in the paper.
            k: number of bars. One more bar shows the sum of the other rows.
            ax: the axes to draw on, None for a new figure.
        """
        from vecroute.explain.image_plots import plot

        return plot(self, kind, output=output, other=other, of=of, k=k, ax=ax)

    def to_png(self, path: str | os.PathLike, kind: str = "overlay", **options: Any) -> None:
        """Write the figure of ``plot`` to a PNG file, completely or not at all."""
        from vecroute.explain.image_plots import png

        write_file(path, png(self, kind, **options))

    def to_rich(self, *, output: Any = None, k: int = 10, unit: str = "region"):
        """Return an object that rich prints to a terminal: the account of a score."""
        from vecroute.explain.terminal import renderable

        return renderable(self.aggregate(unit) if self.unit == "patch" else self, output, k)

    def _without_cells(self) -> Self:
        """Return a copy in which no patch belongs to a row, so that rows can be changed."""
        return self._replace(cells=np.full_like(self.cells, -1))

    def _by_region(self, region: np.ndarray, names: Sequence[str] | None) -> Self:
        """Sum by region [rows, columns]. Special tokens come first."""
        numbers, group = np.unique(region, return_inverse=True)  # [n_regions], region of each patch
        if names is not None and len(names) != len(numbers):
            raise ValueError(
                f"names must be {len(numbers)}, one for each region with patches, got {len(names)}"
            )
        called = [f"region {number}" for number in numbers] if names is None else list(names)
        group = group.reshape(self.cells.shape)  # [rows, columns]
        lone = np.setdiff1d(np.arange(len(self)), self.cells)  # rows without patches: special tokens
        row_of = np.empty(len(self), np.int64)  # [n]
        row_of[lone] = np.arange(len(lone))
        row_of[self.cells] = group + len(lone)
        n_rows = len(lone) + len(numbers)
        return self._replace(
            **sums(self, row_of, n_rows),
            pieces=[self.pieces[row] for row in lone] + called,
            offsets=np.zeros((n_rows, 2)),
            special=[*self.special[lone], *(False for _ in numbers)],
            chunk=None,
            cells=group + len(lone),
            unit="region",
        )


def region_of_tiles(mask: np.ndarray, tiles: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return the region that covers most of each patch, [rows, columns].

    Raises:
        ValueError: the mask has another shape, or does not hold integers.
    """
    shapes = [[size[1], size[0]], list(tiles.shape[:2])]
    if list(mask.shape) not in shapes or (
        not np.issubdtype(mask.dtype, np.integer) and mask.dtype != np.bool_
    ):
        expected = f"integers, [height, width] = {shapes[0]} or [rows, columns] = {shapes[1]}"
        raise ValueError(f"regions must be {expected}, got {mask.dtype} {list(mask.shape)}")
    if list(mask.shape) == shapes[1]:
        return mask.astype(np.int64)
    found = np.zeros(tiles.shape[:2], np.int64)  # [rows, columns]
    for place in np.ndindex(found.shape):
        left, top, right, bottom = np.round(tiles[place]).astype(int)
        left, top = min(left, size[0] - 1), min(top, size[1] - 1)
        numbers, counts = np.unique(
            mask[top : max(bottom, top + 1), left : max(right, left + 1)], return_counts=True
        )
        found[place] = numbers[counts.argmax()]
    return found


def explain_image(
    encoder: VisionEncoder,
    head: nn.Module,
    picture: Picture,
    outputs: Sequence[int],
    names: Sequence[str],
    *,
    of: str = "states",
) -> ImageExplanation:
    """Explain some outputs of a head on a frozen encoder for one image.

    The cost is one backward pass per output. It does not grow with the number of other classes.

    Args:
        encoder: a ``VisionEncoder``.
        head: a head on its hidden states.
        picture: the image.
        outputs: indices of the classes to explain.
        names: names of these classes.
        of: "words" explains patches through the encoder, "states" explains hidden states.
    """
    check_choice("of", of, ("words", "states"))
    explained = (explain_patches if of == "words" else explain_image_states)(
        encoder, head, [picture], [list(outputs)]
    )
    ((fields, scores),) = explained
    return ImageExplanation(**fields, output_names=names, probabilities=scores.softmax(-1)[list(outputs)])


def explain_patches(
    encoder: VisionEncoder,
    head: nn.Module,
    pictures: Sequence[Picture],
    outputs: Sequence[Sequence[int]],
    *,
    by_depth: bool = False,
) -> list[tuple[dict[str, Any], Tensor]]:
    """Return what each patch adds to some outputs of a head, through the encoder: fields, and all scores.

    Special tokens are weights of the encoder and not part of the image, so they add nothing.

    Args:
        encoder, head: a frozen encoder, and a head on its hidden states.
        outputs: for each image, the indices of the classes to explain, the same number for all images.
        by_depth: True to split values by the depth of the hidden states they go through.
    """
    found: list[Any] = [None] * len(pictures)
    for which, reading in image_readings(encoder, pictures):
        chosen = torch.tensor([list(outputs[k]) for k in which])  # [b, k]
        split = split_words(reading, head, chosen, by_depth=by_depth)
        n_special = encoder.n_special * encoder.special_tokens
        values = nnf.pad(split.values[0], (0, 0, 0, 0, n_special, 0))  # [b, n, depth or 1, k]
        for b, k in enumerate(which):
            fields = {
                "of": "words",
                "values": values[b],
                "base_values": split.base[b],
                "scores": split.scores[b],
                "depths": encoder.depths if by_depth else ["all depths"],
                **places_of(encoder, pictures[k]),
            }
            found[k] = fields, split.all_scores[b]
    return found


def explain_image_states(
    encoder: VisionEncoder, head: nn.Module, pictures: Sequence[Picture], outputs: Sequence[Sequence[int]]
) -> list[tuple[dict[str, Any], Tensor]]:
    """Return what the hidden state of each patch and depth adds to some outputs: fields, and all scores."""
    found: list[Any] = [None] * len(pictures)
    for batch in encoder.batches(encoder.tokenize(pictures)):
        chosen = torch.tensor([list(outputs[k]) for k in batch.which])  # [b, k]
        explained = explain_states_of(head, batch.hidden, batch.mask, chosen)
        for k, (fields, scores) in zip(batch.which, explained, strict=True):
            places = places_of(encoder, pictures[k])
            found[k] = {"of": "states", **fields, **places, "depths": encoder.depths}, scores
    return found


def places_of(encoder: VisionEncoder, picture: Picture) -> dict[str, Any]:
    """Return the fields of an explanation that describe its rows, and the image."""
    image = picture.open()
    patches = encoder.patches(image.size, picture.name)
    n_special = sum(patches.special)
    tiles = np.array(patches.boxes[n_special:]).reshape(*patches.grid, 4)  # [rows, columns, 4]
    small = image.copy()
    small.thumbnail((LONGEST, LONGEST))
    return {
        "text": picture.name,
        "pieces": patches.names,
        "special": patches.special,
        "image": np.asarray(small),
        "size": image.size,
        "tiles": tiles,
        "cells": np.arange(n_special, encoder.n_pos).reshape(patches.grid),
    }
