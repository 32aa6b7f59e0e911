"""Frozen vision Transformers: they map images to the hidden states of every patch at every depth."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vecroute.encoders.finding import find
from vecroute.encoders.identity import identify, sha256_json, states_key
from vecroute.encoders.loading import commit, default_dtype, load_image_processor, load_model, pick_device
from vecroute.encoders.text import Batch, check_depths
from vecroute.io.images import MAX_PIXELS, Picture, check_images

Box = tuple[float, float, float, float]  # left, top, right, bottom


class Patches(NamedTuple):
    """The origin of each routed position of an image, in pixels of the original image."""

    boxes: list[Box]  # inside the image; zeros for special tokens
    special: list[bool]  # True if the encoder added the position
    names: list[str]  # such as "row 2, column 5"
    grid: tuple[int, int]  # rows and columns of patches


class Seen(NamedTuple):
    """An image ready for the encoder, which reads the file only when it needs it."""

    picture: Picture
    n_pos: int  # number of routed positions


class VisionEncoder:
    """A frozen Hugging Face vision Transformer that returns all its hidden states.

    The image processor of the encoder resizes, crops and scales images. Special tokens, such as [CLS], are
    the positions whose embeddings do not depend on the image. All other positions are patches, row by row.

    Args:
        model: "vit-cifar10", a name on the Hugging Face hub, a folder, or a loaded model (frozen in place).
            Only the image part of a model of texts and images is used.
        processor: a loaded image processor, None for the processor of the model.
        depths: the hidden states to return: 0 for the embeddings, negative from the end, None for all.
        special_tokens: True to route the special tokens too, as in the paper.
        revision: branch, tag or commit on the hub.
        device: None for the GPU if there is one, or for the device of a loaded model.
        dtype: None for bfloat16 on GPUs (float16 on those without it) and float32 on the CPU.

    Raises:
        ValueError: the encoder is missing or incomplete, its positions are not patches, or its image
            processor produces images of different sizes.
    """

    model: Any
    filled = 1024  # positions per batch where batches have a fixed shape; all images have the same length
    max_length, stride = None, 0  # only encoders of texts have these options; an image is one chunk

    def __init__(
        self,
        model: Any,
        *,
        processor: Any = None,
        depths: Sequence[int] | None = None,
        special_tokens: bool = True,
        revision: str | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.name, given = str(model), processor
        if isinstance(model, nn.Module):
            self.name = str(getattr(model, "name_or_path", "") or type(model).__name__)
            folder = None if processor else find(self.name, revision)
            self.model = model
            device, dtype = device or self.model.device, dtype or self.model.dtype
        else:
            folder = find(self.name, revision)
            self.model = load_model(self.name, folder)
        if folder is not None and processor is None:
            processor = load_image_processor(self.name, folder)
        self.processor = processor
        self.revision = commit(self.model, folder, revision)
        config, self.model = self.model.config, getattr(self.model, "vision_model", self.model)
        objects = given is not None or isinstance(model, nn.Module)
        prepared = sha256_json(json.loads(processor.to_json_string()))
        self.identity = identify(self.model, config, None if objects else folder, prepared)
        self.weights_sha256 = self.identity.weights
        self.device = pick_device(device)
        self.model = self.model.to(device=self.device).eval().requires_grad_(False)
        self.special_tokens = special_tokens
        self.image_size = self._check_processor()  # height, width
        self.grid, self.n_special, states = self._check_patches()
        self.dtype = dtype or default_dtype(self.device)
        self.model = self.model.to(dtype=self.dtype)
        self.depths = check_depths(depths, len(states))
        self.depth, self.d_emb = len(self.depths), states[0].shape[-1]
        self.n_pos = self.grid[0] * self.grid[1] + self.n_special * special_tokens

    def __repr__(self) -> str:
        return f"VisionEncoder({self.name!r}, grid={self.grid}, depth={self.depth}, d_emb={self.d_emb})"

    def __deepcopy__(self, memo) -> "VisionEncoder":
        return self  # frozen, so it can be shared

    @property
    def key(self) -> str:
        """A key that changes with all that affects hidden states: encoder, options, dtype, versions."""
        return states_key(self.identity, self.depths, self.special_tokens, self.dtype, self.device.type)

    def tokenize(self, images: Sequence[Any]) -> list[Seen]:
        """Prepare images for ``batches``: paths, PIL images, arrays, tensors or pictures."""
        return [Seen(picture, self.n_pos) for picture in check_images(images)] if len(images) else []

    def batches(self, images: Sequence[Seen], batch_positions: int | None = None) -> Iterator[Batch]:
        """Encode images in batches. Every image comes exactly once.

        Args:
            images: the result of ``tokenize``.
            batch_positions: greatest number of positions per batch.
        """
        limit = batch_positions or (65_536 if self.device.type == "cuda" else 4_096)
        size = max(1, limit // self.n_pos)
        for start in range(0, len(images), size):
            which = list(range(start, min(start + size, len(images))))
            hidden = self._run(self.pixels([images[k].picture for k in which]))  # [b, n_pos, depth, d_emb]
            yield Batch(which, hidden, torch.ones(hidden.shape[:2], dtype=torch.bool, device=self.device))

    def encode(self, images: Sequence[Any]) -> list[Tensor]:
        """Return the hidden states [n_pos, depth, d_emb] of each image."""
        return [hidden for batch in self.batches(self.tokenize(images)) for hidden in batch.hidden]

    def patches(self, size: tuple[int, int], name: str = "image") -> Patches:
        """Return the origin of each routed position in an image of the given size.

        Args:
            size: width and height of the upright image.
            name: name of the image in messages.
        """
        rows, columns = self.grid
        special = [True] * (self.n_special * self.special_tokens)
        height, width = self.patch_size
        resized = self._resized(size, name)
        boxes = [
            self._to_original(size, resized, (c * width, r * height, (c + 1) * width, (r + 1) * height))
            for r in range(rows)
            for c in range(columns)
        ]
        names = [f"row {r + 1}, column {c + 1}" for r in range(rows) for c in range(columns)]
        return Patches(
            [(0.0, 0.0, 0.0, 0.0) for _ in special] + boxes,
            special + [False] * len(boxes),
            self._special_names()[: len(special)] + names,
            self.grid,
        )

    def pixels(self, pictures: Sequence[Picture]) -> Tensor:
        """Return the input of the model from the image processor, [b, channels, height, width]."""
        images = []
        for picture in pictures:
            images.append(picture.open())
            self._resized(images[-1].size, picture.name)
        return self.processor(images, return_tensors="pt")["pixel_values"]

    def _special_names(self) -> list[str]:
        second = "[DIST]" if self.model.config.model_type == "deit" else "[REG]"
        return (["[CLS]"] + [second] * self.n_special)[: self.n_special]

    def _to_original(self, size: tuple[int, int], resized: tuple[int, int], box: Box) -> Box:
        """Convert a box from pixels of the model's input to pixels of the image, clipped at its edges."""
        found = []
        for k, place in enumerate(box):
            axis = k % 2  # 0 along the width, 1 along the height
            # The processor crops the middle, or centres the image if it is smaller.
            shift = (resized[axis] - self.image_size[1 - axis]) // 2
            scaled = (place + shift) * size[axis] / resized[axis]
            found.append(min(max(scaled, 0.0), float(size[axis])))
        return found[0], found[1], found[2], found[3]

    def _resized(self, size: tuple[int, int], name: str) -> tuple[int, int]:
        """Return width and height of an image after the processor resizes it, before it crops."""
        config = self.processor.to_dict()
        if not config.get("do_resize"):
            return size
        wanted, (width, height) = config["size"], size
        if wanted.get("shortest_edge"):
            short, edge = min(size), wanted["shortest_edge"]
            found = tuple(edge if side == short else int(edge * side / short) for side in size)
            width, height = found[0], found[1]
        else:
            width, height = wanted["width"], wanted["height"]
        if width * height > MAX_PIXELS:
            raise ValueError(
                f"{name} has {size[0]} x {size[1]} pixels, which its encoder resizes to {width} x {height}: "
                f"the limit is {MAX_PIXELS:,} pixels"
            )
        return width, height

    def _check_processor(self) -> tuple[int, int]:
        """Return the height and width of the images that the processor produces.

        Raises:
            ValueError: the size depends on the image, or the processor does more than resize and crop.
        """
        config = self.processor.to_dict()
        expected = "must resize and crop the middle, so that all images have one size"
        mistake = f"the image processor of {self.name} {expected}; "
        wanted = {name for name, value in (config.get("size") or {}).items() if value}
        if config.get("do_resize") and wanted not in ({"shortest_edge"}, {"height", "width"}):
            raise ValueError(f"{mistake}it resizes to {config.get('size')}")
        if config.get("do_pad"):
            raise ValueError(f"{mistake}it pads")
        first, second = (
            list(self.pixels([Picture.of(torch.zeros(3, *size))]).shape[-2:]) for size in ((40, 60), (60, 60))
        )
        if first != second:
            raise ValueError(f"{mistake}images of different shapes become {first} and {second}")
        crop = (config.get("crop_size") if config.get("do_center_crop") else config.get("size")) or {}
        if [crop.get("height"), crop.get("width")] != first:
            raise ValueError(f"{mistake}it makes images {first} in an unknown way")
        return first[0], first[1]

    def _check_patches(self) -> tuple[tuple[int, int], int, Sequence[Tensor]]:
        """Return the grid of patches, the number of special tokens, and hidden states of an example.

        Raises:
            ValueError: the positions are not special tokens followed by patches, row by row.
        """
        height, width = self.image_size
        size = getattr(self.model.config, "patch_size", None)
        if size is None:
            raise ValueError(f"encoder {self.name} must be a vision Transformer, which has a patch_size")
        self.patch_size = (size, size) if isinstance(size, int) else tuple(size)
        grid = height // self.patch_size[0], width // self.patch_size[1]
        channels = getattr(self.model.config, "num_channels", 3)
        images = torch.zeros(4, channels, height, width)  # [4, channels, height, width]
        images[1] = 1.0
        images[2, :, : self.patch_size[0], : self.patch_size[1]] = 1.0  # the first patch differs
        last = (grid[0] - 1) * self.patch_size[0], (grid[1] - 1) * self.patch_size[1]
        images[3, :, last[0] : last[0] + self.patch_size[0], last[1] : last[1] + self.patch_size[1]] = 1.0
        try:
            states = self._states(images)
        except (ValueError, RuntimeError) as error:
            message = str(error).strip().split("\n")[0]
            raise ValueError(
                f"encoder {self.name} does not take what its image processor makes: {message}"
            ) from error
        n_patches, n = grid[0] * grid[1], states[0].shape[1]
        one_shape = len({state.shape for state in states}) == 1 and states[0].dim() == 3
        differs = (states[0] != states[0][:1]).any(-1).tolist() if one_shape else []  # [4, n]
        n_special = n - n_patches
        special = [False] * n_special
        first, final = ([k == place for k in range(n_patches)] for place in (0, n_patches - 1))
        expected = [special + [True] * n_patches, special + first, special + final]
        if not one_shape or n_special < 0 or differs[1:] != expected:
            raise ValueError(f"encoder {self.name} must give a hidden state for each patch, at every depth")
        return grid, n_special, states

    def _run(self, pixels: Tensor) -> Tensor:
        """Return the hidden states [b, n_pos, depth, d_emb] of images [b, channels, height, width]."""
        states = self._states(pixels)
        first = 0 if self.special_tokens else self.n_special
        return torch.stack([states[depth][:, first:] for depth in self.depths], 2)

    @torch.inference_mode()
    def _states(self, pixels: Tensor) -> Sequence[Tensor]:
        """Return the hidden states [b, n, d_emb] of every depth, from images [b, channels, height, width]."""
        pixels = pixels.to(self.device, self.model.dtype)
        return self.model(pixel_values=pixels, output_hidden_states=True).hidden_states
