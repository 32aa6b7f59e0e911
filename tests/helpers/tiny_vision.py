"""Tiny vision Transformers with random weights, saved in the format of Hugging Face."""

from pathlib import Path
from typing import Any

import transformers

from tests.helpers.tiny_models import save_random

SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "image_size": 16,
}
SQUARE = {"size": {"height": 16, "width": 16}}
CROPPED = {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}

# The configuration, the name of the image processor, its options, and the number of special tokens.
KINDS: dict[str, tuple[Any, str, dict, int]] = {
    "vit": (transformers.ViTConfig(intermediate_size=32, **SIZES), "ViT", SQUARE, 1),
    "beit": (
        transformers.BeitConfig(intermediate_size=32, use_relative_position_bias=True, **SIZES),
        "Beit",
        SQUARE,
        1,
    ),
    "deit": (
        transformers.DeiTConfig(intermediate_size=32, **SIZES),
        "DeiT",
        {"size": {"height": 20, "width": 20}, "crop_size": {"height": 16, "width": 16}},
        2,
    ),
    "dinov2": (transformers.Dinov2Config(mlp_ratio=2, **SIZES), "Bit", CROPPED, 1),
    "registers": (
        transformers.Dinov2WithRegistersConfig(mlp_ratio=2, num_register_tokens=3, **SIZES),
        "Bit",
        CROPPED,
        4,
    ),
    "siglip": (transformers.SiglipVisionConfig(intermediate_size=32, **SIZES), "Siglip", SQUARE, 0),
    "clip": (transformers.CLIPVisionConfig(intermediate_size=32, **SIZES), "CLIP", CROPPED, 1),
}


def save_tiny_vision(folder: Path, kind: str = "vit", seed: int = 0, **processor_options) -> str:
    """Build a tiny model of the kind, save it with its image processor, and return the folder."""
    config, processor, options, _ = KINDS[kind]
    save_random(folder, config, seed)
    processor_class = getattr(transformers, f"{processor}ImageProcessorPil")
    processor_class(**{**options, **processor_options}).save_pretrained(folder)
    return str(folder)
