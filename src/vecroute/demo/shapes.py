"""The demo on images: shapes drawn on photos, so that we know where a map should point."""

import io
import json
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from rich.console import Console
from sklearn.datasets import load_sample_images  # type: ignore[import-untyped]

from vecroute.classifier import RoutingClassifier
from vecroute.demo.fitting import Samples, fitted, next_steps, show_results
from vecroute.explain.image_plots import sheet
from vecroute.explain.image_report import image_report
from vecroute.io.images import check_images, read_folder
from vecroute.storage import write_file

SHAPES = ("circle", "cross", "square", "star", "triangle")
N_TRAIN, N_TEST, N_POINTED = 2000, 500, 100
SIDE, FINE = 96, 3  # width of an image in pixels; it is drawn FINE times larger, then scaled down
ENCODER, EPOCHS, SEED = "vit-cifar10", 15, 0
STRENGTHS = (0.01, 0.1, 1.0, 10.0)  # values of C for logistic regression


class Drawing(NamedTuple):
    """An image of a shape."""

    image: Image.Image
    label: str
    mask: np.ndarray  # [SIDE, SIDE] share of each pixel that the shape covers


def drawing(number: int) -> Drawing:
    """Draw a shape of random colour, size, place and rotation on part of a photo. The number is the seed."""
    rng = np.random.default_rng([SEED, number])
    label = SHAPES[number % len(SHAPES)]
    photo = photos()[rng.integers(2)]
    side = int(rng.integers(SIDE, 3 * SIDE))
    left, top = (int(rng.integers(0, length - side)) for length in photo.size)
    ground = photo.crop((left, top, left + side, top + side)).resize((SIDE, SIDE))
    radius = rng.uniform(0.22, 0.4) * SIDE
    centre = rng.uniform(radius, SIDE - radius, 2)
    points = outline(label, rng.uniform(0, 2 * math.pi)) * radius + centre  # [n, 2]
    mask = Image.new("L", (SIDE * FINE, SIDE * FINE))
    ImageDraw.Draw(mask).polygon([(x * FINE, y * FINE) for x, y in points.tolist()], fill=255)
    mask = mask.resize((SIDE, SIDE), Image.Resampling.BOX)
    ground.paste(tuple(int(c) for c in rng.integers(0, 256, 3)), mask=mask)
    return Drawing(ground, label, np.asarray(mask) / 255)


@cache
def photos() -> list[Image.Image]:
    """Return the two photos that come with scikit-learn; NOTICE.md beside this package's data cites them."""
    return [Image.fromarray(photo) for photo in load_sample_images().images]


def outline(label: str, turn: float) -> np.ndarray:
    """Return the corners [n, 2] of a shape of radius 1, turned by an angle."""
    n, radii = {
        "circle": (60, [1.0]),
        "cross": (12, [1.0, 1.0, 0.45]),
        "square": (4, [1.0]),
        "star": (10, [1.0, 0.4]),
        "triangle": (3, [1.0]),
    }[label]
    angles = np.arange(n) * 2 * math.pi / n  # [n]
    if label == "cross":  # the ends of its bars are narrow
        angles = (np.arange(4)[:, None] * math.pi / 2 + np.array([-0.31, 0.31, math.pi / 4])).ravel()  # [n]
    radius = np.resize(radii, n)[:, None]  # [n, 1]
    return radius * np.stack([np.cos(angles + turn), np.sin(angles + turn)], 1)


def write_images(folder: Path) -> None:
    """Draw the missing images: a training and a test folder, each with one subfolder per shape."""
    for number in range(N_TRAIN + N_TEST):
        part = "train" if number < N_TRAIN else "test"
        path = folder / part / SHAPES[number % len(SHAPES)] / f"{number:04d}.png"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        drawing(number).image.save(buffer, "png")
        write_file(path, buffer.getvalue())


def run(out: Path) -> None:
    """Draw images, fit a classifier, measure it, and show where its maps point.

    Args:
        out: folder for ``images/``, ``model/``, ``results.json``, ``report.html``, ``maps.png`` and a page
            for each image in ``maps.png``. Files of an earlier run are used again.
    """
    console = Console()
    write_images(out / "images")
    train, test = (read(out / "images" / part) for part in ("train", "test"))
    shapes = f"{len(SHAPES)} kinds of shapes, drawn on photos"
    console.print(f"{len(train.items)} images of {shapes}, to learn from, {len(test.items)} held out.")
    new = RoutingClassifier(ENCODER, max_epochs=EPOCHS, drop_inputs=0.5)
    classifier, results = fitted(out, new, train, test, strengths=STRENGTHS)
    show_results(console, results, "images")
    if "pointing" not in results:
        results["pointing"] = pointing(classifier, test)
        write_file(out / "results.json", json.dumps(results, indent=2).encode())
    console.print(told(results["pointing"]), highlight=False)
    firsts = [test.labels.index(shape) for shape in SHAPES]
    explanations = classifier.explain([test.items[k] for k in firsts], by_depth=True)
    for shape, why in zip(SHAPES, explanations, strict=True):
        why.to_html(out / f"why-{shape}.html")
    predicted = [why.output_names[why.index(None)] for why in explanations]
    titles = [f"{shape},\npredicted {name}" for shape, name in zip(SHAPES, predicted, strict=True)]
    write_file(out / "maps.png", sheet([why.margin() for why in explanations], titles))
    if not (out / "report.html").exists():
        found = classifier.predict_proba(test.items)
        page = image_report(classifier, *test, found, "shapes, held out")
        write_file(out / "report.html", page.encode())
    console.print(
        f"\nThe model is in {out / 'model'}, a report in {out / 'report.html'}, maps of the first held-out "
        f"image of each shape in {out / 'maps.png'}, pages of these beside it."
    )
    one = ["explain", out / "model", test.items[0].name, "--html", out / "why.html"]
    report_page = ["evaluate", out / "model", out / "images" / "test", "--html", out / "evaluation.html"]
    commands: dict[str, Any] = {
        "Explain an image:": one,
        "See where it errs on the held-out images:": report_page,
        "Drop images into a page, in a browser:": ["serve", out / "model"],
    }
    next_steps(console, commands)


def read(folder: Path) -> Samples:
    found = read_folder(folder)
    return Samples(check_images(found.paths), found.labels)


def pointing(classifier: RoutingClassifier, test: Samples) -> dict[str, Any]:
    """Measure the share of positive contributions that lies on the shape, and the share of patches it covers.

    It takes the first test images, the same number of each shape.
    """
    order = sorted(range(len(test.items)), key=lambda k: Path(test.items[k].name).name)[:N_POINTED]
    on_shape, covered = [], []
    for k in order:
        why = classifier.explain(test.items[k]).margin()
        mask = drawing(int(Path(test.items[k].name).stem)).mask  # [SIDE, SIDE]
        rows, columns = why.cells.shape
        share = mask.reshape(rows, SIDE // rows, columns, SIDE // columns).mean((1, 3))  # [rows, columns]
        strength = np.maximum(why.grid(), 0)  # [rows, columns]
        touched = share > 0
        on_shape.append(float(strength[touched].sum() / (strength.sum() or 1)))
        covered.append(float(touched.mean()))
    return {"n": len(order), "on_shape": float(np.mean(on_shape)), "covered": float(np.mean(covered))}


def told(pointing: dict[str, Any]) -> str:
    return (
        f"\n{pointing['on_shape']:.0%} of the contributions to the predicted shape are on patches that it "
        f"touches, {pointing['covered']:.0%} of all patches (mean of {pointing['n']} held-out images)."
    )
