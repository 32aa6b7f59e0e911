"""A small vision Transformer, the decoder for its training, and the export to Hugging Face's ViTModel."""

import json
import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


class Sizes(NamedTuple):
    """Sizes of the encoder."""

    d: int = 192  # size of a hidden state
    layers: int = 12
    heads: int = 3
    patch: int = 4
    side: int = 32  # side of an image in pixels

    @property
    def n_patches(self) -> int:
        return (self.side // self.patch) ** 2


class Block(nn.Module):
    """A Transformer block: attention and an MLP four times as wide, each with LayerNorm and a residual."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d, EPS), nn.LayerNorm(d, EPS)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.wide, self.narrow = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, n, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [b, heads, n, d / heads] each
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.out(attended)  # [b, n, d]
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))  # [b, n, d]


class ViT(nn.Module):
    """A vision Transformer with a [CLS] vector, patches and learned position embeddings."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        d = sizes.d
        self.sizes = sizes
        self.patches = nn.Conv2d(3, d, sizes.patch, sizes.patch)
        self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 1 + sizes.n_patches, d) * 0.02)
        self.blocks = nn.ModuleList(Block(d, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(d, EPS)
        self.apply(initialise)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> list[Tensor]:
        """Return the hidden states [b, 1 + n, d] at every depth, the embeddings first.

        Args:
            images: [b, 3, side, side].
            keep: [b, n] indices of the patches to use, None for all.
        """
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions[:, 1:]  # [b, n_patches, d]
        if keep is not None:
            x = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))  # [b, n, d]
        cls = (self.cls + self.positions[:, :1]).expand(len(x), -1, -1)  # [b, 1, d]
        states = [torch.cat([cls.to(x.dtype), x], 1)]  # [b, 1 + n, d]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states


class Decoder(nn.Module):
    """Predict the teacher's hidden states of unseen patches from the patches that the student received."""

    def __init__(self, sizes: Sizes, layers: int = 2):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, sizes.n_patches, sizes.d) * 0.02)
        self.hidden = nn.Parameter(torch.randn(1, 1, sizes.d) * 0.02)
        self.inp, self.out = nn.Linear(sizes.d, sizes.d), nn.Linear(sizes.d, sizes.d)
        self.blocks = nn.Sequential(*(Block(sizes.d, sizes.heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(sizes.d, EPS)
        self.apply(initialise)

    def forward(self, seen: Tensor, keep: Tensor) -> Tensor:
        """Return predictions [b, n_patches, d] from seen patches [b, n, d] at the places keep [b, n]."""
        n_patches = self.positions.shape[1]
        x = self.hidden.to(seen.dtype).expand(len(seen), n_patches, -1)  # [b, n_patches, d]
        x = x.scatter(1, keep[..., None].expand(-1, -1, seen.shape[-1]), self.inp(seen).to(x.dtype))
        return self.out(self.norm(self.blocks(x + self.positions)))  # [b, n_patches, d]


def mlp(*sizes: int) -> nn.Sequential:
    """Return linear layers with batch normalisation and ReLU. The last normalisation has no parameters."""
    parts: list[nn.Module] = []
    for k, (a, b) in enumerate(pairwise(sizes)):
        last = k == len(sizes) - 2
        parts += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b, affine=not last)]
        parts += [] if last else [nn.ReLU()]
    return nn.Sequential(*parts)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        bound = math.sqrt(6 / (module.weight[0].numel() + module.out_channels))
        nn.init.uniform_(module.weight, -bound, bound)
        nn.init.zeros_(module.bias)


def hugging_face_weights(encoder: ViT) -> dict[str, Tensor]:
    """Return the weights under the names of ViTModel, in half precision."""
    found: dict[str, Tensor] = {
        "embeddings.cls_token": encoder.cls,
        "embeddings.position_embeddings": encoder.positions,
    }
    pairs: list[tuple[str, Any]] = [
        ("embeddings.patch_embeddings.projection", encoder.patches),
        ("layernorm", encoder.norm),
    ]
    for k, block in enumerate(encoder.blocks):
        name = f"encoder.layer.{k}"
        pairs += [
            (f"{name}.layernorm_before", block.norm_1),
            (f"{name}.attention.output.dense", block.out),
            (f"{name}.layernorm_after", block.norm_2),
            (f"{name}.intermediate.dense", block.wide),
            (f"{name}.output.dense", block.narrow),
        ]
        for part, weight, bias in zip(
            ("query", "key", "value"), block.qkv.weight.chunk(3), block.qkv.bias.chunk(3), strict=True
        ):
            found[f"{name}.attention.attention.{part}.weight"] = weight
            found[f"{name}.attention.attention.{part}.bias"] = bias
    for name, module in pairs:
        found[f"{name}.weight"], found[f"{name}.bias"] = module.weight, module.bias
    return {name: tensor.detach().half().cpu().contiguous().clone() for name, tensor in found.items()}


def export(encoder: ViT, folder: Path, card: str) -> None:
    """Write the encoder in the format of Hugging Face."""
    from safetensors.torch import save

    sizes = encoder.sizes
    config = {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": sizes.d,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": 4 * sizes.d,
        "image_size": sizes.side,
        "patch_size": sizes.patch,
        "num_channels": 3,
        "qkv_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": EPS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "dtype": "float16",
    }
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": sizes.side, "width": sizes.side},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", json.dumps(config, indent=2).encode() + b"\n")
    write(folder / "preprocessor_config.json", json.dumps(processor, indent=2).encode() + b"\n")
    write(folder / "model.safetensors", save(hugging_face_weights(encoder), {"format": "pt"}))
    write(folder / "README.md", card.encode())


def write(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, then rename it. An interrupted call leaves no partial file."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(data)
    os.replace(temporary, path)
