"""Texts and images for the benchmarks of accuracy, faithfulness and patches, and their hidden states.

The data are not part of this repository. ``--data`` names a folder with

- ``sst/train.txt dev.txt test.txt``: the Stanford Sentiment Treebank, one tree in brackets per line;
- ``imdb/train.csv.gz test.csv.gz``: the IMDB reviews, with columns text and label;
- CIFAR-10, in any subfolder, in a format that scripts/cifar10.py reads.
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

TASKS = {"sst2": 2, "sst5": 5, "imdb": 2, "cifar10": 10}  # number of classes of each task
IMAGES = ("cifar10",)  # the tasks with images
IMDB_DEV, CIFAR_DEV = 2500, 5000  # sizes of the dev sets that are split off the training sets
MOST = {("imdb", "train"): 20_000, ("imdb", "test"): 10_000}  # texts of a split in the race of heads
FIRST = ("imdb",)  # in these tasks the race takes only the first chunk of each text: 512 tokens
ESCAPED = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "``": '"', "''": '"'}

Labelled = tuple[list[str], list[int]]


def load(task: str, split: str, data: Path, *, whole: bool = False) -> Labelled:
    """Return the texts and labels of a split (train, dev or test) of a task."""
    if task == "imdb":
        return imdb(data / "imdb", split)
    return sst(data / "sst", split, fine=task == "sst5", whole=whole)


def sst(folder: Path, split: str, *, fine: bool, whole: bool = False) -> Labelled:
    """Return sentences; for training each distinct phrase once, unless only whole sentences are asked for.

    Two classes leave out neutral texts.
    """
    trees = (folder / f"{split}.txt").read_text().splitlines()
    whole = whole or split != "train"
    nodes = [node for tree in trees for node in (phrases(tree)[-1:] if whole else phrases(tree))]
    if not whole:
        nodes = list(dict(nodes).items())
    nodes = [(text, label) for text, label in nodes if fine or label != 2]
    return [text for text, _ in nodes], [label if fine else int(label > 2) for _, label in nodes]


def phrases(tree: str) -> list[tuple[str, int]]:
    """Return the text and label of every node of a tree in brackets, the whole sentence last."""
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
    """Return reviews. The dev set is a fixed random part of the training set."""
    csv.field_size_limit(10**7)
    with gzip.open(folder / ("test.csv.gz" if split == "test" else "train.csv.gz"), "rt") as file:
        rows = [(row["text"].replace("<br />", " "), row["label"]) for row in csv.DictReader(file)]
    if split != "test":
        random.Random(0).shuffle(rows)
        rows = rows[:IMDB_DEV] if split == "dev" else rows[IMDB_DEV:]
    return [text for text, _ in rows], [int(label == "pos") for _, label in rows]


class Chunks(NamedTuple):
    """Texts as token ids. A long text has several chunks."""

    ids: Tensor  # [total] token ids of all chunks, concatenated
    lengths: Tensor  # [n_chunks]
    text: Tensor  # [n_chunks] index of the text of each chunk


def tokenize(encoder: TextEncoder, texts: Sequence[str]) -> Chunks:
    """Split texts into chunks of token ids, including special tokens."""
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
    """The hidden states of texts or images, concatenated."""

    hidden: Tensor  # [total, depth, d_emb], float16
    start: Tensor  # [n] first position of each sample
    length: Tensor  # [n] number of positions of each sample
    label: Tensor  # [n]
    special: int = 0  # number of positions before the patches of an image

    def __len__(self) -> int:
        return len(self.start)


@torch.inference_mode()
def encode(encoder: TextEncoder, chunks: Chunks, labels: Sequence[int], batch_positions: int) -> Packed:
    """Return all hidden states of all texts, on the device of the encoder."""
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
    """Return token ids and labels of a split, from a file in the folder if it exists, else from the texts."""
    file = None if folder is None else folder / f"{task}-{split}.npz"
    if file is not None and file.exists():
        arrays = np.load(file)
        chunks = Chunks(*(torch.from_numpy(arrays[name].astype(np.int32)) for name in Chunks._fields))
        return chunks, arrays["label"].tolist()
    texts, labels = part(task, split, data)
    chunks = tokenize(encoder, texts)
    if task in FIRST:
        chunks = first_chunks(chunks)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kinds = {"ids": np.uint32, "lengths": np.uint16, "text": np.uint32}
        arrays = {name: getattr(chunks, name).numpy().astype(kind) for name, kind in kinds.items()}
        np.savez_compressed(file, **arrays, label=np.array(labels, dtype=np.uint8))
    return chunks, labels


def labels(task: str, split: str, data: Path | None, folder: Path | None) -> list[int]:
    """Return the labels that ``tokens`` returns."""
    file = None if folder is None else folder / f"{task}-{split}.npz"
    if file is not None and file.exists():
        return np.load(file)["label"].tolist()
    return part(task, split, data)[1]


def part(task: str, split: str, data: Path | None) -> Labelled:
    """Return the texts and labels of a split in the race of heads: a fixed random part if there are many."""
    if data is None:
        raise SystemExit("--data must name the folder with the texts")
    texts, found = load(task, split, data)
    most = MOST.get((task, split), len(texts))
    chosen = range(len(texts))
    if most < len(texts):
        chosen = random.Random(0).sample(chosen, most)
    return [texts[k] for k in chosen], [found[k] for k in chosen]


def first_chunks(chunks: Chunks) -> Chunks:
    """Return the first chunk of each text."""
    first = torch.ones(len(chunks.text), dtype=torch.bool)  # [n_chunks]
    first[1:] = chunks.text[1:] != chunks.text[:-1]
    ids = chunks.ids[first.repeat_interleave(chunks.lengths.long())]  # [total]
    return Chunks(ids, chunks.lengths[first], chunks.text[first])


def some(chunks: Chunks, labels: list[int], n: int) -> tuple[Chunks, list[int]]:
    """Return n texts, evenly spaced over all texts."""
    step = max(len(labels) // n, 1)
    kept = (chunks.text % step == 0) & (chunks.text < n * step)  # [n_chunks]
    ids = chunks.ids[kept.repeat_interleave(chunks.lengths.long())]  # [total]
    return Chunks(ids, chunks.lengths[kept], chunks.text[kept] // step), labels[::step][:n]


def images(split: str, data: Path, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the images of CIFAR-10, uint8 [n, 3, 32, 32], and their labels [n].

    The dev set is a fixed random part of the training set. If ``most`` is given, only the first images of
    the test file, or of each of the five training files, are used.
    """
    pixels, labels = cifar10.read(data, train=split != "test")
    if labels is None:
        raise SystemExit(f"--data: {data} has no labels of CIFAR-10")
    if split == "test":
        return pixels[:most], labels[:most]
    if most is not None:
        pixels, labels = (t.unflatten(0, (5, -1))[:, :most].flatten(0, 1) for t in (pixels, labels))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # [n]
    n_dev = min(CIFAR_DEV, len(labels) // 10)
    chosen = order[:n_dev] if split == "dev" else order[n_dev:]
    return pixels[chosen], labels[chosen]


def pixel_values(encoder: VisionEncoder, pixels: Tensor) -> Tensor:
    """Apply the image processor to images uint8 [b, 3, height, width] that need no resizing."""
    if tuple(pixels.shape[-2:]) != encoder.image_size:
        raise SystemExit(f"the encoder must take images {list(pixels.shape[-2:])}, not {encoder.image_size}")
    about = encoder.processor.to_dict()
    mean, std = (
        torch.tensor(about[name], device=encoder.device)[:, None, None]
        for name in ("image_mean", "image_std")
    )  # [3, 1, 1] each
    return (pixels.to(encoder.device).float() * about["rescale_factor"] - mean) / std  # [b, 3, height, width]


def image_states(encoder: VisionEncoder, values: Tensor) -> Tensor:
    """Return hidden states [b, n_pos, depth, d_emb] of pixel values [b, 3, ...]. Keeps the graph."""
    states = encoder.model(pixel_values=values.to(encoder.dtype), output_hidden_states=True).hidden_states
    return torch.stack([states[k] for k in encoder.depths], 2)  # [b, n_pos, depth, d_emb]


@torch.no_grad()
def encode_images(encoder: VisionEncoder, pixels: Tensor, labels: Tensor, batch_size: int) -> Packed:
    """Return all hidden states of all images, on the device of the encoder."""
    n, n_pos = len(pixels), encoder.n_pos
    shape = (n, n_pos, encoder.depth, encoder.d_emb)
    hidden = torch.empty(shape, dtype=torch.float16, device=encoder.device)  # [n, n_pos, depth, d_emb]
    for part, into in zip(pixels.split(batch_size), hidden.split(batch_size), strict=True):
        into.copy_(image_states(encoder, pixel_values(encoder, part)))
    start = torch.arange(n, device=encoder.device) * n_pos  # [n]
    length = torch.full_like(start, n_pos)  # [n]
    return Packed(hidden.flatten(0, 1), start, length, labels.to(encoder.device), encoder.n_special)
