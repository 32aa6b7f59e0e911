"""The texts and images of the benchmarks of accuracy, faithfulness and patches, and their hidden states.

They are not part of this repository. ``--data`` names a folder with

- ``sst/train.txt dev.txt test.txt``: the Stanford Sentiment Treebank, a tree in brackets on each line;
- ``imdb/train.csv.gz test.csv.gz``: the IMDB reviews, columns text and label;
- CIFAR-10, anywhere below it, as scripts/cifar10.py reads it.
"""

import csv
import gzip
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vecroute.encoders import TextEncoder, VisionEncoder
from vecroute.encoders.text import length_batches

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import cifar10

TASKS = {"sst2": 2, "sst5": 5, "imdb": 2, "cifar10": 10}  # and their numbers of classes
IMAGES = ("cifar10",)  # the tasks on images
IMDB_DEV, CIFAR_DEV = 2500, 5000  # of the training set, that are kept out of it, to choose on
ESCAPED = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "``": '"', "''": '"'}

Labelled = tuple[list[str], list[int]]


def load(task: str, split: str, data: Path) -> Labelled:
    """The texts of a split (train, dev or test) of a task, and their labels."""
    return imdb(data / "imdb", split) if task == "imdb" else sst(data / "sst", split, fine=task == "sst5")


def sst(folder: Path, split: str, *, fine: bool) -> Labelled:
    """Sentences; to train on, each distinct phrase once. With two classes, what is neutral is left out."""
    trees = (folder / f"{split}.txt").read_text().splitlines()
    nodes = [node for tree in trees for node in (phrases(tree) if split == "train" else phrases(tree)[-1:])]
    if split == "train":
        nodes = list(dict(nodes).items())
    nodes = [(text, label) for text, label in nodes if fine or label != 2]
    return [text for text, _ in nodes], [label if fine else int(label > 2) for _, label in nodes]


def phrases(tree: str) -> list[tuple[str, int]]:
    """The text and label of every node of a tree in brackets, the whole sentence last."""
    found, open_nodes = [], []
    for label, word, close in re.findall(r"\((\d) ?|([^\s()]+)|(\))", tree):
        if label:
            open_nodes.append((int(label), []))
        elif word:
            open_nodes[-1][1].append(ESCAPED.get(word, word.replace("\\/", "/").replace("\\*", "*")))
        elif close:
            label, words = open_nodes.pop()
            found.append((" ".join(words), label))
            if open_nodes:
                open_nodes[-1][1].extend(words)
    return found


def imdb(folder: Path, split: str) -> Labelled:
    """Reviews; those to choose on are drawn from the training set once and for all."""
    csv.field_size_limit(10**7)
    with gzip.open(folder / ("test.csv.gz" if split == "test" else "train.csv.gz"), "rt") as file:
        rows = [(row["text"].replace("<br />", " "), row["label"]) for row in csv.DictReader(file)]
    if split != "test":
        random.Random(0).shuffle(rows)
        rows = rows[:IMDB_DEV] if split == "dev" else rows[IMDB_DEV:]
    return [text for text, _ in rows], [int(label == "pos") for _, label in rows]


class Chunks(NamedTuple):
    """Texts as token ids, long ones in several chunks."""

    ids: Tensor  # [total] of all chunks, one after the other
    lengths: Tensor  # [n_chunks]
    text: Tensor  # [n_chunks] which text a chunk is of


def tokenize(encoder: TextEncoder, texts: Sequence[str]) -> Chunks:
    """Every text as chunks of token ids, special tokens included."""
    encoded = encoder.tokenizer(
        list(texts),
        truncation=True,
        max_length=encoder.max_length,
        return_overflowing_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    rows = encoded["input_ids"]
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int32)  # [total]
    text = torch.as_tensor(encoded["overflow_to_sample_mapping"], dtype=torch.int32)  # [n_chunks]
    return Chunks(ids, torch.tensor([len(row) for row in rows], dtype=torch.int32), text)


class Packed(NamedTuple):
    """The hidden states of texts or images, one after the other."""

    hidden: Tensor  # [total, depth, d_emb], float16
    start: Tensor  # [n] first position of each text
    length: Tensor  # [n] its number of positions
    label: Tensor  # [n]
    special: int = 0  # how many positions come before the patches of an image

    def __len__(self) -> int:
        return len(self.start)


@torch.inference_mode()
def encode(encoder: TextEncoder, chunks: Chunks, labels: Sequence[int], batch_positions: int) -> Packed:
    """All hidden states of all texts, on the device of the encoder."""
    device, lengths = encoder.device, chunks.lengths.tolist()
    ends = chunks.lengths.long().cumsum(0)  # [n_chunks]
    starts = (ends - chunks.lengths).tolist()
    shape = (len(chunks.ids), encoder.depth, encoder.d_emb)
    hidden = torch.empty(shape, dtype=torch.float16, device=device)  # [total, depth, d_emb]
    ids = chunks.ids.long().to(device)  # [total]
    for group in length_batches(lengths, batch_positions):
        first = torch.tensor([starts[k] for k in group], device=device)[:, None]  # [b, 1]
        length = torch.tensor([lengths[k] for k in group], device=device)[:, None]  # [b, 1]
        column = torch.arange(int(length.max()), device=device)  # [n]
        mask = column < length  # [b, n]
        rows = (first + column).clamp(max=len(ids) - 1)  # [b, n]
        states = encoder.model(
            input_ids=ids[rows], attention_mask=mask.long(), output_hidden_states=True
        ).hidden_states  # [b, n, d_emb] each
        used = torch.stack([states[k][mask] for k in encoder.depths], 1)  # [n_used, depth, d_emb]
        hidden[rows[mask]] = used.half()
    n = len(labels)
    length = torch.zeros(n, dtype=torch.long).index_add_(0, chunks.text.long(), chunks.lengths.long())  # [n]
    start = length.cumsum(0) - length  # [n]
    return Packed(hidden, start.to(device), length.to(device), torch.tensor(labels, device=device))


def tokens(
    encoder: TextEncoder, task: str, split: str, data: Path | None, folder: Path | None
) -> tuple[Chunks, list[int]]:
    """Token ids and labels of a split, from a file in the folder if it is there, else from the texts."""
    file = None if folder is None else folder / f"{task}-{split}.npz"
    if file is not None and file.exists():
        arrays = np.load(file)
        chunks = Chunks(*(torch.from_numpy(arrays[name].astype(np.int32)) for name in Chunks._fields))
        return chunks, arrays["label"].tolist()
    if data is None:
        raise SystemExit("--data must name the folder of the texts")
    texts, labels = load(task, split, data)
    chunks = tokenize(encoder, texts)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kinds = {"ids": np.uint32, "lengths": np.uint16, "text": np.uint32}
        arrays = {name: getattr(chunks, name).numpy().astype(kind) for name, kind in kinds.items()}
        np.savez_compressed(file, **arrays, label=np.array(labels, dtype=np.uint8))
    return chunks, labels


def some(chunks: Chunks, labels: list[int], n: int) -> tuple[Chunks, list[int]]:
    """n texts alone, from all over."""
    step = max(len(labels) // n, 1)
    kept = (chunks.text % step == 0) & (chunks.text < n * step)  # [n_chunks]
    ids = chunks.ids[kept.repeat_interleave(chunks.lengths.long())]  # [total]
    return Chunks(ids, chunks.lengths[kept], chunks.text[kept] // step), labels[::step][:n]


def images(split: str, data: Path) -> tuple[Tensor, Tensor]:
    """The images of CIFAR-10, uint8 [n, 3, 32, 32], and their labels [n].

    Those to choose on are drawn from the training set once and for all.
    """
    pixels, labels = cifar10.read(data, train=split != "test")
    if labels is None:
        raise SystemExit(f"{data} has no labels of CIFAR-10")
    if split == "test":
        return pixels, labels
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # [n]
    n_dev = min(CIFAR_DEV, len(labels) // 10)
    chosen = order[:n_dev] if split == "dev" else order[n_dev:]
    return pixels[chosen], labels[chosen]


def pixel_values(encoder: VisionEncoder, pixels: Tensor) -> Tensor:
    """What the image processor makes of images uint8 [b, 3, height, width] that need no resizing."""
    if tuple(pixels.shape[-2:]) != encoder.image_size:
        raise SystemExit(f"the encoder must take images {list(pixels.shape[-2:])}, not {encoder.image_size}")
    about = encoder.processor.to_dict()
    mean, std = (
        torch.tensor(about[name], device=encoder.device)[:, None, None]
        for name in ("image_mean", "image_std")
    )  # [3, 1, 1] each
    return (pixels.to(encoder.device).float() * about["rescale_factor"] - mean) / std  # [b, 3, height, width]


def image_states(encoder: VisionEncoder, values: Tensor) -> Tensor:
    """Hidden states [b, n_pos, depth, d_emb] of pixel values [b, 3, ...], with a graph if these have one."""
    states = encoder.model(pixel_values=values.to(encoder.dtype), output_hidden_states=True).hidden_states
    return torch.stack([states[k] for k in encoder.depths], 2)  # [b, n_pos, depth, d_emb]


@torch.no_grad()
def encode_images(encoder: VisionEncoder, pixels: Tensor, labels: Tensor, batch_size: int) -> Packed:
    """All hidden states of all images, on the device of the encoder."""
    n, n_pos = len(pixels), encoder.n_pos
    shape = (n, n_pos, encoder.depth, encoder.d_emb)
    hidden = torch.empty(shape, dtype=torch.float16, device=encoder.device)  # [n, n_pos, depth, d_emb]
    for part, into in zip(pixels.split(batch_size), hidden.split(batch_size), strict=True):
        into.copy_(image_states(encoder, pixel_values(encoder, part)))
    start = torch.arange(n, device=encoder.device) * n_pos  # [n]
    length = torch.full_like(start, n_pos)  # [n]
    return Packed(hidden.flatten(0, 1), start, length, labels.to(encoder.device), encoder.n_special)
