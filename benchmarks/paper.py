"""Train the paper's head as its authors did: ``python benchmarks/paper.py --task imdb --data DATA``.

The paper states the head: three routings of two iterations on all hidden states of a frozen RoBERTa-large or
BEiT-large, 64 hidden vectors, long texts in chunks. It does not state how to train it. This is from the
authors' training code (the repository glassroom/heinsen_routing_2022_paper): RAdam, one cycle of the learning
rate up to 1e-3 with 30 % of rise, mixup of neighbours in a batch, a learnt scale and bias by depth after
layer normalisation, every position of every sample, RandAugment, and the numbers of ``PRESETS``.

Differences from the authors' code: padding is masked here and routed there; autocast is bfloat16 here and
float16 there; partners for mixup are drawn at random here; images are resized by the encoder's own processor.

DATA has the texts that corpora.py describes, CIFAR-10, or TASK/train and TASK/test (ImageNet-1K: val) with a
folder of images for each class. A row is appended to paper.csv. With --save, the run resumes after an
interruption, and ``--task sst2 --start SAVED/sst5.pt`` continues from the head of SST-5 as the authors did.
"""

import argparse
import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import corpora
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

import vecroute as vr
from vecroute.encoders import TextEncoder, VisionEncoder
from vecroute.io.images import Picture, read_folder
from vecroute.training.sampling import mix, seeded

ROBERTA, BEIT = "roberta-large", "microsoft/beit-large-patch16-224"
LR, RISE = 1e-3, 0.3
MIXUP = {ROBERTA: 0.65, BEIT: 0.2}  # both parameters of the beta distribution


class Preset(NamedTuple):
    """The settings of the authors' scripts for a task."""

    n_cls: int
    encoder: str
    batch: int
    epochs: int
    steps: int | None  # steps of an epoch, None to use every training sample once
    theirs: float  # test accuracy in %, from Table 1 of the paper
    test: str = "test"  # the split that the paper reports
    start: bool = False  # True to train only the last routing of a head trained on another task


PRESETS = {
    "imdb": Preset(2, ROBERTA, 5, 10, 10_000, 96.2),
    "sst5": Preset(5, ROBERTA, 50, 10, 2000, 59.8),
    "sst2": Preset(2, ROBERTA, 50, 3, 2000, 96.0, start=True),
    "imagenet-1k": Preset(1000, BEIT, 50, 10, None, 86.7, test="val"),
    "cifar100": Preset(100, BEIT, 50, 10, 2000, 93.8),
    "cifar10": Preset(10, BEIT, 50, 10, 2000, 99.2),
}


class Samples(NamedTuple):
    """The samples of a split, as the encoder takes them, and their classes."""

    inputs: Sequence[Any]
    labels: Tensor  # [n]


class PaperHead(nn.Module):
    """Normalise hidden states, scale and shift them by depth, and route them three times to class scores."""

    def __init__(self, *, d_emb: int, depth: int, n_cls: int, n_hid: int = 64):
        super().__init__()
        self.W = nn.Parameter(torch.ones(depth, d_emb))  # [depth, d_emb]
        self.B = nn.Parameter(torch.zeros(depth, d_emb))  # [depth, d_emb]
        sizes = [(None, n_hid, d_emb), (n_hid, n_hid, d_emb), (n_hid, n_cls, 1)]
        self.network = vr.Sequential(
            *(vr.VectorRouting(n_inp=i, n_out=j, d_inp=d_emb, d_out=h) for i, j, h in sizes)
        )

    def forward(self, hidden: Tensor, keep: Tensor) -> Tensor:
        x = nnf.layer_norm(hidden, hidden.shape[-1:]) * self.W + self.B  # [b, n_pos, depth, d_emb]
        return self.network(x.flatten(1, 2), input_mask=keep.flatten(1))[..., 0]  # [b, n_cls]


# Data


def load(task: str, split: str, data: Path) -> Samples:
    """Return the samples of a split. The authors train on all of a training set and keep no dev set."""
    if task in ("sst2", "sst5"):
        texts, labels = corpora.load(task, split, data)
        return Samples([tidy(text) for text in texts], torch.tensor(labels))
    parts = ["train", "dev"] if split == "train" else [split]
    if task == "imdb":
        found = [pair for part in parts for pair in zip(*corpora.load(task, part, data), strict=True)]
        return Samples([text for text, _ in found], torch.tensor([label for _, label in found]))
    if task == "cifar10" and not (data / task).is_dir():
        pixels, classes = zip(*(corpora.images(part, data) for part in parts), strict=True)
        return Samples(torch.cat(pixels), torch.cat(classes))
    folder = read_folder(data / task / split)
    names = sorted(set(folder.labels))
    return Samples(folder.paths, torch.tensor([names.index(label) for label in folder.labels]))


def tidy(text: str) -> str:
    """Join commas, full stops and apostrophes to the word before them, as in written English."""
    return re.sub(r" (?=[,.']\S*( |$))", "", text)


def augmentation(size: tuple[int, int], crop: bool) -> Callable[[Any], Any]:
    """Return the authors' augmentation of training images: RandAugment; for ImageNet-1K, of a random crop."""
    try:
        from torchvision import transforms
    except ImportError:
        raise SystemExit("images are augmented with torchvision: install it, or say --no-augment") from None
    wider = [round(side / 0.9) for side in size]
    bicubic = transforms.InterpolationMode.BICUBIC
    first = [transforms.Resize(wider, bicubic), transforms.RandomCrop(size)] if crop else []
    return transforms.Compose([*first, transforms.RandAugment()])


def drawn(n: int, start: int, size: int, seed: int) -> list[int]:
    """Return draws ``start`` to ``start + size`` of n samples, all of them before any comes again."""
    return [order(n, seed, k // n)[k % n] for k in range(start, start + size)]


@functools.lru_cache(maxsize=2)
def order(n: int, seed: int, cycle: int) -> list[int]:
    return torch.randperm(n, generator=seeded("order", seed, cycle)).tolist()


def padded(states: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return hidden states [b, n_pos, depth, d_emb] of samples, and which to use [b, n_pos, depth]."""
    hidden = nn.utils.rnn.pad_sequence(states, batch_first=True).float()  # [b, n_pos, depth, d_emb]
    lengths = torch.tensor([len(state) for state in states], device=device)[:, None]  # [b, 1]
    used = torch.arange(hidden.shape[1], device=device) < lengths  # [b, n_pos]
    return hidden, used[..., None].expand(hidden.shape[:3])


# Training


def train(
    head: PaperHead, encoder: Any, samples: Samples, plan: argparse.Namespace, file: Path | None
) -> None:
    """Train a head for ``plan.total`` steps, from the file of an interrupted run if it exists."""
    learnt = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.RAdam(learnt, lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LR, total_steps=plan.total, pct_start=RISE
    )
    parts = {"head": head, "optimizer": optimizer, "schedule": schedule}
    done = resume(parts, file) if file else 0
    device = encoder.device
    for step in range(done, plan.total):
        which = drawn(len(samples.labels), step * plan.batch, plan.batch, plan.seed)
        inputs = [samples.inputs[k] for k in which]
        if plan.augment:
            inputs = [plan.augment(Picture.of(each).open()) for each in inputs]
        targets = nnf.one_hot(samples.labels[which], plan.n_cls).float().to(device)  # [b, n_cls]
        hidden, keep = padded(encoder.encode(inputs), device)
        mixed = mix(hidden, keep, targets[None], plan.mixup, seeded("mixup", plan.seed, step))
        hidden, keep, targets = mixed[0], mixed[1], mixed[2][0]
        with common.autocast("bf16" if device.type == "cuda" else "fp32", device.type):
            loss = nnf.cross_entropy(head(hidden, keep).float(), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % plan.steps == 0:
            print(f"step {step + 1} of {plan.total}: loss {loss.item():.4f}", flush=True)
            if file:
                save(parts, step + 1, file)


def save(parts: dict[str, Any], done: int, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"done": done}, temporary)
    os.replace(temporary, file)


def resume(parts: dict[str, Any], file: Path) -> int:
    """Return the number of steps that an earlier run has done, after loading its state."""
    if not file.exists():
        return 0
    state = torch.load(file, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["done"]


def start_from(head: PaperHead, file: Path) -> None:
    """Load all but the last routing of a head trained on another task, and freeze the loaded parameters."""
    last = f"network.{len(head.network) - 1}."
    weights = torch.load(file, map_location="cpu", weights_only=True)["head"]
    head.load_state_dict({k: v for k, v in weights.items() if not k.startswith(last)}, strict=False)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name.startswith(last))


@torch.inference_mode()
def evaluate(head: PaperHead, encoder: Any, samples: Samples, batch: int) -> dict[str, float]:
    """Return the accuracy and the top-5 accuracy, in %."""
    right = torch.zeros(2)  # right in the first place, and among the first five
    for start in range(0, len(samples.labels), batch):
        part = slice(start, start + batch)
        scores = head(*padded(encoder.encode(samples.inputs[part]), encoder.device))  # [b, n_cls]
        best = scores.topk(min(5, scores.shape[-1])).indices.cpu()  # [b, 5]
        hit = best == samples.labels[part, None]  # [b, 5]
        right += torch.stack([hit[:, 0].sum(), hit.sum()])
    accuracy, top_5 = (100 * right / len(samples.labels)).tolist()
    return {"accuracy": accuracy, "top5": top_5}


def planned(options: argparse.Namespace, n_train: int, encoder: Any) -> argparse.Namespace:
    """Return the settings of a run: the preset, with the changes of the options."""
    preset = PRESETS[options.task]
    batch = options.batch_size or preset.batch
    steps = options.steps or preset.steps or max(n_train // batch, 1)
    augment = None
    if preset.encoder == BEIT and not options.no_augment:
        augment = augmentation(encoder.image_size, crop=options.task == "imagenet-1k")
    total = steps * (options.epochs or preset.epochs)
    return argparse.Namespace(
        batch=batch, steps=steps, total=total, mixup=MIXUP[preset.encoder], n_cls=preset.n_cls,
        seed=options.seed, augment=augment,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--task", choices=PRESETS, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with the texts or images")
    parser.add_argument("--encoder", help=f"default: {ROBERTA} for texts, {BEIT} for images")
    parser.add_argument("--start", type=Path, help="file of a head of another task, for sst2")
    parser.add_argument("--save", type=Path, help="folder for the state of the run, TASK.pt")
    parser.add_argument("--epochs", type=int, help="default: the authors' number, as for the next two")
    parser.add_argument("--steps", type=int, help="steps of an epoch")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-augment", action="store_true", help="leave out RandAugment (torchvision)")
    options = parser.parse_args(arguments)
    preset = PRESETS[options.task]
    if options.short:
        options.epochs, options.steps = options.epochs or 1, options.steps or 3
        options.batch_size = options.batch_size or 4
    if preset.start and not options.start:
        print("the authors start from the head of SST-5 (--start sst5.pt): this run trains all of the head")
    torch.manual_seed(options.seed)
    kind = TextEncoder if preset.encoder == ROBERTA else VisionEncoder
    encoder = kind(options.encoder or preset.encoder, device=options.device)
    samples = load(options.task, "train", options.data)
    head = PaperHead(d_emb=encoder.d_emb, depth=encoder.depth, n_cls=preset.n_cls).to(encoder.device)
    if options.start:
        start_from(head, options.start)
    plan, started = planned(options, len(samples.labels), encoder), time.perf_counter()
    train(head, encoder, samples, plan, options.save and options.save / f"{options.task}.pt")
    seconds = time.perf_counter() - started
    test = load(options.task, preset.test, options.data)
    found = evaluate(head.eval(), encoder, test, plan.batch)
    print(f"{options.task}: {found['accuracy']:.2f} %, the paper has {preset.theirs} %")
    row = {
        "task": options.task, "encoder": Path(encoder.name).name, "steps": plan.total, "batch": plan.batch,
        "mixup": plan.mixup, "augmented": bool(plan.augment), "start": options.start and options.start.stem,
        "seed": options.seed, "train": len(samples.labels), "test": len(test.labels),
        "parameters": common.count(head), **found, "theirs": preset.theirs, "seconds": seconds,
    }  # fmt: skip
    common.append(options.results / "paper.csv", [row | common.about(options.device)])


if __name__ == "__main__":
    main()
