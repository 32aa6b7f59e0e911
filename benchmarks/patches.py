"""Are the explanations of images faithful? ``python benchmarks/patches.py --data DATA --weights HEADS``.

The benchmark explains the predicted class of test images, with the routing head whose weights
``accuracy.py --tasks cifar10 --save HEADS`` wrote. Each method ranks the patches by their contribution to the
class. In this order patches are painted over with the mean colour of their image (deletion), or placed on an
image of that colour (insertion), and the image is encoded again. A row for every image is appended to
patches_images.csv. ``--summarize`` computes means with intervals, patches.csv, and a figure.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import corpora
import numpy as np
import torch
from torch import Tensor, nn

from vecroute.compose.contribution import completeness_error
from vecroute.encoders import VisionEncoder
from vecroute.explain.attribution import (
    Attribution,
    Method,
    Reader,
    by_phi,
    by_states,
    by_votes,
    margins,
)
from vecroute.explain.faithfulness import summarize
from vecroute.explain.rivals import rollout
from vecroute.heads import make_head
from vecroute.storage import require

GROUP = 100  # number of images that are explained before their rows are written
ALONE = 10  # number of images of each group that are also explained one by one
BATCH = {"cuda": 1000, "cpu": 50}  # batch size of the encoder
HEAD, WEIGHTS = "routing", "cifar10.npz"  # the head, and the file of its weights
# Columns to average. make_summary adds the lead of contributions to the margin over each method.
MEASURES = (
    "deletion",
    "insertion",
    "completeness_error",
    "difference_alone",
    "seconds",
    "seconds_in_batch",
)
OURS = "states"


class View(NamedTuple):
    """Images in the form that the encoder takes."""

    pixels: Tensor  # [b, 3, height, width]
    mask: Tensor  # [b, n_pos] True: every position is used


class Viewer(Reader):
    """A frozen vision encoder and a head as one function of pixels. (``Reader`` is one of token ids.)"""

    def __init__(self, encoder: VisionEncoder, head: nn.Module):
        self.encoder: Any = encoder
        self.head, self.device = head.eval(), encoder.device

    def view(self, pixels: Tensor) -> View:
        return View(pixels, pixels.new_ones(len(pixels), self.encoder.n_pos, dtype=torch.bool))

    def hidden(self, view: View) -> Tensor:
        """Return the hidden states [b, n_pos, depth, d_emb]."""
        return corpora.image_states(self.encoder, view.pixels)

    def patches(self, values: Tensor) -> Tensor:
        """Select the values of patches, [b, n_patches], from the values of positions [b, n_pos]."""
        return values[:, self.encoder.n_special :]

    def sums(self, values: Tensor) -> Tensor:
        """Sum values [b, 3, height, width] over each patch, [b, n_pos], with 0 for special tokens."""
        (rows, columns), (height, width) = self.encoder.grid, self.encoder.patch_size
        across = values.unflatten(-1, (columns, width))  # [b, 3, rows height, columns, width]
        tiles = across.unflatten(-3, (rows, height))  # [b, 3, rows, height, columns, width]
        found = tiles.sum((1, 3, 5)).flatten(1)  # [b, n_patches]
        return nn.functional.pad(found, (self.encoder.n_special, 0))  # [b, n_pos]

    def painted(self, pixels: Tensor, keep: Tensor) -> Tensor:
        """Paint images [b, 3, height, width] in their mean colour, except patches to keep, [b, n_patches]."""
        shown = keep.unflatten(-1, self.encoder.grid)  # [b, rows, columns]
        for dim, size in zip((1, 2), self.encoder.patch_size, strict=True):
            shown = shown.repeat_interleave(size, dim)  # [b, height, width] in the end
        return torch.where(shown[:, None], pixels, pixels.mean((2, 3), keepdim=True))  # [b, 3, height, width]


def by_integrated_gradients(*, margin: bool, n_steps: int) -> Method:
    """Return integrated gradients of the pixels, by captum, with the mean colour as baseline."""

    def method(viewer: Viewer, view: View, target: Tensor, other: Tensor) -> Attribution:
        captum = require("captum.attr", "eval")

        def outputs(pixels: Tensor, target: Tensor, other: Tensor) -> Tensor:
            view = viewer.view(pixels)
            scores = viewer.head(viewer.hidden(view), view.mask)  # [b, n_cls]
            return margins(scores, target, other if margin else None)  # [b]

        blank = view.pixels.mean((2, 3), keepdim=True).expand_as(view.pixels)  # [b, 3, height, width]
        found = captum.IntegratedGradients(outputs).attribute(
            view.pixels,
            baselines=blank,
            additional_forward_args=(target, other),
            n_steps=n_steps,
            internal_batch_size=max(len(target), BATCH[viewer.device.type]),
        )  # [b, 3, height, width]
        values = viewer.sums(found.detach()).float()  # [b, n_pos]
        with torch.no_grad():
            base, output = (outputs(pixels, target, other) for pixels in (blank, view.pixels))  # [b] each
        return Attribution(values, completeness_error(values, base, output))

    return method


def by_rollout(of: str) -> Method:
    """Return attention rollout from the first position, [CLS], or its mean over all positions."""

    def method(viewer: Viewer, view: View, target: Tensor, other: Tensor) -> Attribution:
        rolled = rollout(viewer.encoder.model, view.pixels)  # [b, n_pos, n_pos]
        return Attribution(rolled[:, 0] if of == "[CLS]" else rolled.mean(1))

    return method


def by_chance(viewer: Viewer, view: View, target: Tensor, other: Tensor) -> Attribution:
    """Return random numbers that depend on the image only."""
    seeds = (1000 * view.pixels.double().abs().sum((1, 2, 3))).long().tolist()
    drawn = [torch.rand(view.mask.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return Attribution(torch.stack(drawn).to(view.mask.device))  # [b, n_pos]


def methods(n_steps: int = 50) -> dict[str, Method]:
    return {
        OURS: by_states(margin=True),
        "states, class": by_states(margin=False),
        "states, bias in votes": by_votes(margin=True),
        "phi": by_phi,
        "integrated gradients, margin": by_integrated_gradients(margin=True, n_steps=n_steps),
        "integrated gradients, class": by_integrated_gradients(margin=False, n_steps=n_steps),
        "attention rollout, [CLS]": by_rollout("[CLS]"),
        "attention rollout, mean": by_rollout("mean"),
        "random": by_chance,
    }


@torch.no_grad()
def areas(viewer: Viewer, pixels: Tensor, said: Tensor, target: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the areas under the deletion and the insertion curve of the class probability, [b] each.

    Args:
        pixels: [b, 3, height, width].
        said: [b, n_patches] contribution of each patch to the class.
        target: [b] the class.
        step: number of patches that are deleted or inserted at a time.
    """
    n = said.shape[-1]
    rank = said.argsort(dim=-1, descending=True, stable=True).argsort(-1)  # [b, n_patches]
    counts = torch.tensor([*range(0, n, step), n], device=said.device)  # [k]
    first = rank < counts[:, None, None]  # [k, b, n_patches]
    keep = torch.stack([~first, first])  # [2, k, b, n_patches]
    times = 2 * len(counts)
    images = viewer.painted(pixels.repeat(times, 1, 1, 1), keep.flatten(0, 2))  # [2 k b, 3, height, width]
    parts = [viewer.scores(viewer.view(part)) for part in images.split(BATCH[viewer.device.type])]
    p = torch.cat(parts).softmax(-1).gather(-1, target.repeat(times)[:, None])  # [2 k b, 1]
    deletion, insertion = torch.trapezoid(p.view(keep.shape[:3]), counts[:, None] / n, dim=1)  # [b] each
    return deletion, insertion


def timed(viewer: Viewer, method: Method, *given: Any) -> tuple[Attribution, float]:
    """Run a method. Return its attribution and the seconds it took."""
    started = time.perf_counter()
    found = method(viewer, *given)
    if viewer.device.type == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - started


def measure(viewer: Viewer, pixels: Tensor, tried: dict[str, Method], step: int) -> list[dict[str, Any]]:
    """Return a row for each image [b, 3, height, width] and method."""
    scores = viewer.scores(viewer.view(pixels))  # [b, n_cls]
    target, other = scores.topk(2).indices.unbind(-1)  # [b] each
    rows = []
    for name, method in tried.items():
        found, seconds = timed(viewer, method, viewer.view(pixels), target, other)
        values, error = found  # [b, n_pos], [b] or None
        said = viewer.patches(values)  # [b, n_patches]
        with common.product_precision("tf32"):
            deletion, insertion = areas(viewer, pixels, said, target, step)  # [b] each
        for k in range(len(pixels)):
            row = {"image": k, "predicted": int(target[k]), "method": name}
            row |= {"deletion": float(deletion[k]), "insertion": float(insertion[k])}
            row["completeness_error"] = None if error is None else float(error[k])
            row |= {"difference_alone": None, "seconds": None, "seconds_in_batch": seconds / len(pixels)}
            if k < ALONE:
                own = viewer.view(pixels[k : k + 1]), target[k : k + 1], other[k : k + 1]
                alone, row["seconds"] = timed(viewer, method, *own)
                apart = (alone.values[0] - values[k]).abs().max() / values[k].abs().max()
                row["difference_alone"] = float(apart)
            rows.append(row)
    return rows


def load(options: Any) -> tuple[Viewer, Tensor, Tensor, Tensor]:
    """Return the encoder with its head, and indices, pixels and labels of random test images."""
    encoder = VisionEncoder(options.encoder, device=options.device, dtype=torch.float32)
    stacked = dict(np.load(options.weights / WEIGHTS))
    own = json.loads(str(stacked.pop("options", "{}")))  # of the head that accuracy.py chose
    sizes = {"d_emb": encoder.d_emb, "depth": encoder.depth, "n_cls": corpora.TASKS["cifar10"]}
    head = make_head(HEAD, seed=0, **sizes, **(own | {"implementation": options.implementation}))
    head.load_state_dict({name: torch.tensor(stacked[name][0]).float() for name in stacked})
    pixels, labels = corpora.images("test", options.data)
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: options.images]
    viewer = Viewer(encoder, head.to(encoder.device))
    return viewer, drawn, corpora.pixel_values(encoder, pixels[drawn]), labels[drawn]


def make_summary(results: Path) -> None:
    """Write patches.csv and patches.png from the rows of the images."""
    import pandas

    rows = pandas.read_csv(results / "patches_images.csv")
    summary = []
    for (head, device), own in rows.groupby(["head", "device"], sort=False):
        ours = own[own.method == OURS].set_index("image")
        ahead = {
            "deletion_ahead": own.deletion - own.image.map(ours.deletion),
            "insertion_ahead": own.image.map(ours.insertion) - own.insertion,
        }
        told = summarize(own.assign(**ahead).to_dict("records"), measures=(*MEASURES, *ahead))
        for row in told:
            row["images"] = row.pop("texts")
            summary.append({"head": head, **row, "device": device})
    path = results / "patches.csv"
    path.unlink(missing_ok=True)
    common.append(path, summary)
    plot(pandas.DataFrame(summary), results)


def plot(summary: Any, results: Path) -> None:
    import matplotlib.pyplot as plt
    from faithfulness import bars

    cases = list(dict.fromkeys(zip(summary["head"], summary.device, strict=True)))
    figure, axes = plt.subplots(len(cases), 2, figsize=(10, 3.4 * len(cases)), squeeze=False)
    for line, (head, device) in zip(axes, cases, strict=True):
        case = summary[(summary["head"] == head) & (summary.device == device)]
        for axis, name, better in zip(line, ("deletion", "insertion"), ("less", "more"), strict=True):
            bars(axis, case[case.measure == name].iloc[::-1])
            axis.set_xlabel(f"{name} of patches, {better} is better")
            axis.tick_params(axis="y", labelleft=axis is line[0])
    figure.tight_layout()
    figure.savefig(results / "patches.png", dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10")
    parser.add_argument("--weights", type=Path, help="folder with the weights of the heads")
    parser.add_argument("--implementation", default="auto", help="implementation of the routings")
    parser.add_argument("--encoder", default="vit-cifar10")
    parser.add_argument("--images", type=int, default=500, help="number of images")
    parser.add_argument("--step", type=int, default=2, help="patches deleted or inserted at a time")
    parser.add_argument("--methods", nargs="+", choices=methods(), default=list(methods()))
    parser.add_argument("--summarize", action="store_true", help="measure nothing, summarise existing rows")
    options = parser.parse_args(arguments)
    if options.summarize:
        return make_summary(options.results)
    tried = methods()
    if options.short:
        options.images, options.step, tried = min(options.images, 2), 16, methods(n_steps=4)
    tried = {name: tried[name] for name in options.methods}
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # matrix products use IEEE float32 by default
    about = common.about(options.device)
    viewer, drawn, pixels, labels = load(options)
    measure(viewer, pixels[:GROUP], tried, 64)  # one-time setup
    for start in range(0, len(pixels), GROUP):
        rows = measure(viewer, pixels[start : start + GROUP], tried, options.step)
        places = [start + row.pop("image") for row in rows]
        known = [{"head": HEAD, "image": int(drawn[k]), "label": int(labels[k])} for k in places]
        rows = [first | row | about for first, row in zip(known, rows, strict=True)]
        common.append(options.results / "patches_images.csv", rows)
        print(f"{min(start + GROUP, len(pixels))} of {len(pixels)} images", flush=True)


if __name__ == "__main__":
    main()
