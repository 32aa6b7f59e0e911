"""Explanations of images: they add up, regions sum patches, one of many classes is cheap, pages are whole."""

import base64
import io

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import vecroute as vr
from tests.helpers.explanations import HOSTILE
from tests.helpers.pages import Parser, numbers_of
from tests.helpers.tiny_vision import save_tiny_vision
from vecroute.encoders import VisionEncoder
from vecroute.explain.hidden import explain_hidden
from vecroute.explain.image import ImageExplanation, explain_image
from vecroute.explain.image_html import fragment, page, size_on_page
from vecroute.io.images import Picture


def explain(rows=3, columns=4, *, names=("cat", "dog", "ship"), depth=2, n_special=1, seed=0, **changes):
    """Return an explanation of an image of 80 x 60 pixels, made of random numbers that add up."""
    rng = np.random.default_rng(seed)
    n = rows * columns + n_special
    values = rng.standard_normal((n, depth, len(names))).astype(np.float32)
    base = rng.standard_normal(len(names)).astype(np.float32)
    y, x = np.mgrid[:rows, :columns]
    fields = {
        "values": values,
        "phi": rng.standard_normal(values.shape),
        "base_values": base,
        "scores": values.sum((0, 1), dtype=np.float64) + base,
        "output_names": names,
        "text": "a.png",
        "pieces": ["[CLS]"] * n_special
        + [f"row {r}, column {c}" for r in range(rows) for c in range(columns)],
        "special": [True] * n_special + [False] * (rows * columns),
        "image": rng.integers(0, 255, (30, 40, 3), dtype=np.uint8),
        "size": (80, 60),
        "tiles": np.stack([x, y, x + 1, y + 1], -1) * np.tile([80 / columns, 60 / rows], 2),
        "cells": np.arange(n_special, n).reshape(rows, columns),
    }
    return ImageExplanation(**{**fields, **changes})


def sums(explanation):
    return explanation.values.sum((0, 1), dtype=np.float64) + explanation.base_values


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return VisionEncoder(save_tiny_vision(tmp_path_factory.mktemp("dinov2"), "dinov2"))


@pytest.fixture
def head():
    head = vr.RoutingHead(d_emb=16, depth=3, n_cls=4, n_hid=5).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return head


@pytest.fixture(scope="module")
def picture():
    small = np.random.default_rng(3).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Picture.of(Image.fromarray(small).resize((80, 60), Image.Resampling.BICUBIC), "some photo")


class TestOfAnImage:
    def test_scores_are_the_sum_of_base_and_contributions(self, encoder, head, picture):
        found = explain_image(encoder, head, picture, [0, 1, 2, 3], list("abcd"))
        (hidden,) = encoder.encode([picture])
        with torch.no_grad():
            scores = head(hidden.clone())
        np.testing.assert_allclose(found.scores, scores.numpy(), rtol=1e-4, atol=1e-5)
        assert found.completeness_error < 1e-5
        assert found.values.shape == (17, 3, 4)
        assert found.special.tolist() == [True] + [False] * 16
        assert found.size == [80, 60]
        # 80 x 60 becomes 26 x 20, and only the middle is used.
        assert found.tiles[0, 0].tolist() == pytest.approx([5 * 80 / 26, 6, 9 * 80 / 26, 18], rel=1e-5)
        np.testing.assert_array_equal(found.boxes[1:].reshape(4, 4, 4), found.tiles)
        np.testing.assert_array_equal(found.image, np.asarray(picture.open()))

    def test_some_classes_are_explained_as_among_all(self, encoder, head, picture):
        every = explain_image(encoder, head, picture, [0, 1, 2, 3], list("abcd"))
        some = explain_image(encoder, head, picture, [2, 0], ["c", "a"])
        np.testing.assert_allclose(some["a"].values, every["a"].values, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(some["c"].phi, every["c"].phi, rtol=1e-5, atol=1e-6)

    def test_large_images_are_kept_small(self, encoder, head):
        large = Picture.of(np.zeros((300, 1200, 3), np.uint8))
        found = explain_image(encoder, head, large, [0], ["a"])
        assert found.image.shape == (128, 512, 3)
        assert found.size == [1200, 300]

    def test_without_special_tokens(self, encoder, head, picture):
        plain = VisionEncoder(encoder.name, special_tokens=False)
        found = explain_image(plain, head, picture, [1], ["b"])
        assert found.values.shape == (16, 3, 1)
        assert found.cells.min() == 0


class Largest(TorchDispatchMode):
    """Record the size in bytes of the largest tensor that is created."""

    n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                # A view creates no memory.
                self.n_bytes = max(self.n_bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("head", [vr.RoutingHead, vr.RoutingHead.paper], ids=["routing", "paper"])
def test_one_class_of_a_thousand_takes_no_matrix_of_all(head):
    n_pos, depth, n_cls, d_emb = 197, 25, 1000, 16
    made = head(d_emb=d_emb, depth=depth, n_cls=n_cls, implementation="chunked").eval()
    hidden = torch.randn(n_pos, depth, d_emb)  # [n_pos, depth, d_emb]
    with Largest() as one:
        values, phi, base, scores = explain_hidden(made, hidden, [7])
    assert values.shape == phi.shape == (n_pos, depth, 1)
    torch.testing.assert_close(values.sum() + base[0], scores[0], rtol=1e-4, atol=1e-4)
    assert one.n_bytes < n_pos * depth * n_cls * hidden.element_size() / 4
    with torch.no_grad():
        every = made.route(hidden).phi.dense()  # [i, n_cls]
    torch.testing.assert_close(phi.flatten(), every[:, 7] / every.double().std(correction=0).float())
    with Largest() as dense, torch.no_grad():
        made.route(hidden).phi.dense()
    assert dense.n_bytes >= n_pos * depth * n_cls * hidden.element_size()  # so the check above can fail


class TestRegions:
    def test_sums_stay_the_same(self):
        found = explain()
        for unit in ("patch", "region", "depth"):
            part = found.aggregate(unit)
            np.testing.assert_allclose(sums(part), found.scores, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(sums(part.skip_special_tokens()), found.scores, rtol=1e-5, atol=1e-5)
        assert len(found.aggregate("depth")) == 2
        assert len(found.aggregate("region", regions=4)) == 5
        assert len(found.aggregate("region", regions=4, skip_special_tokens=True)) == 4

    def test_a_mask_of_the_grid(self):
        found = explain()
        mask = np.array([[0, 0, 5, 5], [0, 0, 5, 5], [0, 5, 5, 5]])
        part = found.aggregate("region", regions=mask, names=["left", "right"])
        assert part.pieces == ["[CLS]", "left", "right"]
        assert part.special.tolist() == [True, False, False]
        values, phi = (array[1:].reshape(3, 4, 2, 3) for array in (found.values, found.phi))
        np.testing.assert_allclose(part.values[1], values[mask == 0].sum(0), rtol=1e-5)
        np.testing.assert_allclose(part.phi[2], phi[mask == 5].sum(0), rtol=1e-5)
        np.testing.assert_array_equal(part.cells, np.where(mask == 0, 1, 2))
        assert part.boxes.tolist() == [[0, 0, 0, 0], [0, 0, 40, 60], [20, 0, 80, 60]]
        assert found.aggregate("region", regions=mask).pieces == ["[CLS]", "region 0", "region 5"]
        assert part.aggregate("region") is part

    def test_a_mask_of_pixels_counts_each_patch_to_what_covers_most_of_it(self):
        mask = np.zeros((60, 80), bool)
        mask[:, 49:] = True  # more than half of the third column of patches
        np.testing.assert_array_equal(explain().aggregate("region", regions=mask).cells, [[1, 1, 2, 2]] * 3)
        mask[:, 49:51] = False  # less than half
        np.testing.assert_array_equal(explain().aggregate("region", regions=mask).cells, [[1, 1, 1, 2]] * 3)

    def test_superpixels_follow_colours_and_are_connected(self):
        image = np.zeros((30, 40, 3), np.uint8)
        image[:, :10], image[20:, 10:] = (250, 20, 20), (20, 20, 250)
        found = explain(image=image)
        np.testing.assert_array_equal(found.superpixels(3), [[0, 1, 1, 1], [0, 1, 1, 1], [0, 2, 2, 2]])
        # Two spots of one colour that do not touch are two regions.
        image = np.zeros((30, 40, 3), np.uint8)
        image[:10, :10], image[20:, 30:] = 255, 255
        assert len(np.unique(explain(image=image).superpixels(3)[[0, 2], [0, 3]])) == 2
        assert len(np.unique(explain().superpixels(99))) == 12

    @pytest.mark.parametrize(
        ("regions", "message"),
        [
            (
                np.zeros((60, 81), int),
                r"\[height, width\] = \[60, 80\] or \[rows, columns\] = \[3, 4\], got int64",
            ),
            (np.zeros((3, 4)), "regions must be integers.*float64"),
            (0, "regions must be a positive int, got 0"),
            (2.7, r"regions must be a positive int, got 2.7 \(float\)"),
        ],
    )
    def test_other_regions_are_refused(self, regions, message):
        with pytest.raises((TypeError, ValueError), match=message):
            explain().aggregate("region", regions=regions)

    def test_other_units_and_names_are_refused(self):
        with pytest.raises(ValueError, match="unit must be one of"):
            explain().aggregate("word")
        with pytest.raises(ValueError, match="names must be 2, one for each region with patches, got 1"):
            explain().aggregate("region", regions=np.array([[0, 0, 1, 1]] * 3), names=["a"])
        with pytest.raises(ValueError, match="this is one of regions"):
            explain().aggregate("region").aggregate("patch")


def test_grids():
    found = explain()
    np.testing.assert_allclose(found.grid("dog"), found.totals("dog")[1:].reshape(3, 4))
    np.testing.assert_allclose(found.grid("dog", level=1), found.values[1:, 1, 1].reshape(3, 4))
    np.testing.assert_allclose(found.grid("cat", "phi", 0), found.phi[1:, 0, 0].reshape(3, 4))
    np.testing.assert_allclose(found.skip_special_tokens().grid("dog"), found.grid("dog"))
    assert (found.aggregate("depth").grid("dog") == 0).all()
    # Every patch shows the sum of its region.
    halves = found.aggregate("region", regions=np.array([[0, 0, 1, 1]] * 3)).grid("dog")
    np.testing.assert_allclose(halves[:, :2], found.grid("dog")[:, :2].sum())


def test_what_an_explanation_does_it_does_for_images():
    found = explain()
    assert isinstance(found, vr.Explanation)
    margin = found.margin("cat", "dog")
    assert isinstance(margin, ImageExplanation)
    np.testing.assert_allclose(margin.grid(), found.grid("cat") - found.grid("dog"), rtol=1e-5, atol=1e-6)
    assert found["dog"].output_names == ["dog"]
    assert found.at_depth(1).values.shape == (13, 1, 3)
    assert found.sum_depth().grid("dog") == pytest.approx(found.grid("dog"))
    table = found.to_dataframe()
    assert table["patch"].unique().tolist()[:2] == ["[CLS]", "row 0, column 0"]
    assert table[table.output == "dog"].contribution.sum() + found.base_values[1] == pytest.approx(
        found.scores[1]
    )
    assert repr(found).startswith("ImageExplanation(13 patches, depth=2, scores: cat=")


@pytest.mark.parametrize("unit", ["patch", "region", "depth"])
def test_saved_and_loaded_it_is_the_same(tmp_path, unit):
    found = explain().aggregate(unit)
    found.save(tmp_path / "why")
    again = ImageExplanation.load(tmp_path / "why")
    assert type(again) is ImageExplanation
    for name, field in vars(found).items():
        np.testing.assert_array_equal(getattr(again, name), field)
    with pytest.raises(ValueError, match="holds explanation of an image"):
        vr.Explanation.load(tmp_path / "why")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": np.zeros((4, 4), np.uint8)}, r"image must be \[height, width, 3\], got \[4, 4\]"),
        ({"cells": np.zeros((2, 4), int)}, r"got \[3, 4, 4\] and \[2, 4\]"),
        ({"cells": np.full((3, 4), 13)}, "cells must be rows of the explanation, from 0 to 12, or -1"),
        ({"cells": np.full((3, 4), -2)}, "cells must be rows"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        explain(**changes)


class TestPlots:
    @pytest.mark.parametrize("kind", ["overlay", "map", "compare", "bars"])
    @pytest.mark.parametrize("of", ["values", "phi"])
    def test_every_kind_is_drawn(self, tmp_path, kind, of):
        found = explain()
        fig, _ = found.plot(kind, of=of)
        assert fig.axes
        plt.close(fig)
        found.to_png(tmp_path / "a.png", kind, of=of)
        drawn = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
        assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 50

    def test_the_overlay_is_strongest_where_most_is_added(self):
        values = np.zeros((13, 2, 3), np.float32)
        values[7, :, 1], values[2, 0, 1] = 3.0, -3.0
        found = explain(values=values, base_values=np.zeros(3), scores=values.sum((0, 1)))
        fig, ax = found.plot("overlay", output="dog")
        boxes = {patch.get_bbox().bounds: patch for patch in ax.patches}
        plt.close(fig)
        assert set(boxes) == {(40.0, 20.0, 20.0, 20.0), (20.0, 0.0, 20.0, 20.0)}
        up, down = boxes[40.0, 20.0, 20.0, 20.0], boxes[20.0, 0.0, 20.0, 20.0]
        assert up.get_facecolor()[2] > up.get_facecolor()[0]  # blue
        assert down.get_facecolor()[0] > down.get_facecolor()[2]  # orange
        assert up.get_alpha() is None
        assert up.get_facecolor()[3] == pytest.approx(2 * down.get_facecolor()[3])
        assert down.get_hatch()
        assert not up.get_hatch()

    def test_the_map_has_every_patch_at_every_depth_once(self):
        found = explain()
        fig, ax = found.plot("map", output="dog", of="phi")
        sheet = ax.images[0].get_array().compressed()
        titles = {text.get_text() for text in ax.texts}
        plt.close(fig)
        np.testing.assert_allclose(np.sort(sheet), np.sort(abs(found.phi[1:, :, 1]).ravel()), rtol=1e-6)
        assert titles == {"embeddings", "layer 1"}

    def test_two_classes_are_compared_on_one_scale(self):
        found = explain()
        fig, axes = found.plot("compare", output="cat", other="ship")
        shown = [ax.get_title() for ax in axes]
        strongest = max(patch.get_facecolor()[3] for ax in axes for patch in ax.patches)
        plt.close(fig)
        assert [title.split(":")[0] for title in shown] == ["cat", "ship"]
        assert strongest == pytest.approx(0.75)
        with pytest.raises(ValueError, match="compare needs two classes, this explains 'cat' alone"):
            found["cat"].plot("compare")
        with pytest.raises(ValueError, match="kind must be one of"):
            found.plot("bar")


class TestPages:
    def test_a_page_has_the_image_once_and_needs_nothing_else(self, tmp_path):
        found = explain()
        found.to_html(tmp_path / "why.html", outputs=["dog", "cat"])
        html = (tmp_path / "why.html").read_text()
        parsed = Parser(html)
        (image,) = parsed.root.all("image")
        start = "data:image/png;base64,"
        assert image.attributes["href"].startswith(start)
        stored = Image.open(io.BytesIO(base64.b64decode(image.attributes["href"].removeprefix(start))))
        np.testing.assert_array_equal(np.asarray(stored), found.image)
        addresses = [
            value for e in parsed.every for name, value in e.attributes.items() if name in ("href", "src")
        ]
        assert all(address.startswith(("data:", "#v0-")) for address in addresses)
        assert not list(parsed.root.all("script"))
        assert "default-src 'none'" in html

    @pytest.mark.parametrize("unit", ["patch", "region", "depth"])
    def test_tables_add_up(self, unit):
        parsed = Parser(page(explain(rows=5, columns=6), unit))
        tables = list(parsed.root.all("table"))
        assert len(tables) == 4 * (1 if unit == "depth" else 2)
        for table in tables:
            *parts, score = numbers_of(table)
            assert sum(parts) == score

    def test_a_page_does_not_tell_the_folders_of_its_maker(self):
        html = page(explain(text="/home/someone/secret/cat.png"))
        assert "cat.png" in html
        assert "secret" not in html

    def test_the_colours_are_explained_beside_the_map(self):
        found = explain()
        figure = next(Parser(page(found, outputs=["dog"])).root.all("figure"))
        (scale,) = figure.all("span", **{"class": "scale"})
        strongest = abs(found.grid("dog")).max()
        assert [float(span.text) for span in scale.all("span") if span.text.strip()] == pytest.approx(
            [-strongest, 0, strongest], rel=0.01
        )
        named = {label.text for label in figure.all("text")}
        assert named == {piece.removeprefix("region ") for piece in found.aggregate("region").pieces[1:]}

    def test_tiles_are_where_patches_are(self):
        found = explain()
        parsed = Parser(page(found, outputs=["dog"]))
        rects = [e for e in parsed.root.all("rect") if e.attributes["class"][0] in "pn"]
        grid = found.grid("dog")
        by_place = {(float(r.attributes["x"]), float(r.attributes["y"])): r for r in rects}
        for (y, x), value in np.ndenumerate(grid):
            if abs(value) < abs(grid).max() / 18:
                continue
            rect = by_place[20.0 * x, 20.0 * y]
            assert (
                rect.attributes["class"]
                == f"{'p' if value > 0 else 'n'}{round(9 * abs(value) / abs(grid).max())}"
            )
            assert float(rect.text) == pytest.approx(value, rel=0.01)
            assert (rect.attributes["width"], rect.attributes["height"]) == ("20.0", "20.0")

    def test_two_classes_side_by_side_have_one_scale(self):
        found = explain()
        parsed = Parser(page(found, outputs=["dog", "ship"]))
        (section,) = parsed.root.all("section", **{"aria-label": "Two classes side by side"})
        largest = max(abs(found.grid(name)).max() for name in ("dog", "ship"))
        for figure, name in zip(section.all("figure"), ("dog", "ship"), strict=True):
            levels = sorted(int(rect.attributes["class"][1:]) for rect in figure.all("rect"))
            expected = np.round(9 * abs(found.grid(name)) / largest).ravel()
            assert levels == sorted(expected[expected > 0].astype(int))

    @pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
    def test_names_are_text(self, text):
        plain = Parser(page(explain()))
        names = (f"{text}1", f"{text}2", f"{text}3")
        parsed = Parser(page(explain(text=text, names=names, pieces=[text] * 13), "patch"))
        count = [sum(e.name == "script" for e in p.every) for p in (plain, parsed)]
        assert count == [0, 0]
        assert not any(name.startswith("on") for e in parsed.every for name in e.attributes)

    def test_images_of_any_shape_have_a_place_on_the_page(self):
        assert size_on_page((80, 60), 400) == (400, 300)
        assert size_on_page((300, 600), 400) == (400, 800)
        assert size_on_page((1, 3000), 400) == (1, 800)
        assert size_on_page((3000, 1), 400) == (400, 1)
        parsed = Parser(page(explain(size=(1, 3000))))
        heights = [int(e.attributes["height"]) for e in parsed.root.all("svg", **{"class": "overlay"})]
        assert 0 < max(heights) < 1000

    def test_many_fragments_can_share_a_notebook(self):
        ids = [
            e.attributes["id"]
            for html in (fragment(explain()), fragment(explain()))
            for e in Parser(html).every
            if "id" in e.attributes
        ]
        assert len(ids) == len(set(ids)) > 0

    def test_regions_are_outlined_and_named_on_the_image(self):
        mask = np.array([[0, 0, 1, 1]] * 3)
        parsed = Parser(page(explain().aggregate("region", regions=mask, names=["left", "right"])))
        outlines = {e.attributes["d"] for e in parsed.root.all("path", **{"class": "outline"})}
        assert outlines == {"M40 0V20M40 20V40M40 40V60"}
        named = {(e.text, float(e.attributes["x"])) for e in parsed.root.all("text")}
        assert {name for name, _ in named} == {"left", "right"}
        assert all((x < 40) is (name == "left") for name, x in named)
        assert not list(Parser(page(explain(), "patch")).root.all("path", **{"class": "outline"}))

    def test_maps_have_a_square_for_each_patch(self):
        found = explain(depth=3)
        parsed = Parser(page(found, outputs=["dog"]))
        maps = list(parsed.root.all("svg", **{"class": "map"}))
        assert [(e.attributes["width"], e.attributes["height"]) for e in maps] == [("32", "24")] * 3
        grids = [found.grid("dog", level=level) for level in range(3)]
        largest = max(abs(grid).max() for grid in grids)
        for drawn, grid in zip(maps, grids, strict=True):
            paths = [e for e in drawn.all("path") if e.attributes["class"] != "dash"]
            assert (
                sum(e.attributes["d"].count("M") for e in paths)
                == (np.round(9 * abs(grid) / largest) > 0).sum()
            )
