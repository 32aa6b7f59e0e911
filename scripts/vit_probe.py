"""Evaluate frozen features with nearest neighbours and linear probes. Only this step uses labels."""

import torch
from cifar10 import Images, normalize
from torch import Tensor, nn
from torch.nn import functional as F
from vit_model import ViT


@torch.inference_mode()
def features(encoder: ViT, pixels: Tensor, batch: int = 2048) -> dict[str, Tensor]:
    """Return pooled hidden states of images uint8 [n, 3, 32, 32], each [n, features]."""
    found: dict[str, list[Tensor]] = {
        "mean patch, last layer": [],
        "[CLS], last layer": [],
        "mean patch, all": [],
    }
    device = next(encoder.parameters()).device
    for part in pixels.split(batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = encoder(normalize(part.to(device).float() / 255))
        means = [
            F.layer_norm(state[:, 1:].float(), state.shape[-1:]).mean(1) for state in states
        ]  # [b, d] each
        found["mean patch, last layer"].append(means[-1])
        found["[CLS], last layer"].append(F.layer_norm(states[-1][:, 0].float(), states[-1].shape[-1:]))
        found["mean patch, all"].append(torch.cat(means, -1))
    return {name: torch.cat(parts) for name, parts in found.items()}


def neighbours(train: Tensor, labels: Tensor, test: Tensor, k: int = 20) -> Tensor:
    """Classify each test vector by its k nearest neighbours, weighted by similarity, [n]."""
    train, test = F.normalize(train, dim=-1), F.normalize(test, dim=-1)
    n_cls, found = int(labels.max()) + 1, []
    for part in test.split(1000):
        near = (part @ train.T).topk(min(k, len(train)))  # [b, k]
        votes = (
            F.one_hot(labels[near.indices], n_cls) * (near.values / 0.07).exp()[..., None]
        )  # [b, k, n_cls]
        found.append(votes.sum(1).argmax(-1))
    return torch.cat(found)


def linear(train: Tensor, labels: Tensor, test: Tensor, steps: int = 3000, batch: int = 1024) -> Tensor:
    """Classify each test vector by a linear probe on standardised features, [n]."""
    mean, std = train.mean(0), train.std(0) + 1e-6
    train, test = (train - mean) / std, (test - mean) / std
    torch.manual_seed(0)
    probe = nn.Linear(train.shape[-1], int(labels.max()) + 1).to(train.device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=5e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(train), (min(batch, len(train)),), device=train.device)
        optimizer.zero_grad()
        F.cross_entropy(probe(train[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return probe(test).argmax(-1)


def check(encoder: ViT, train: Images, test: Images, steps: int = 3000) -> dict[str, float]:
    """Return the accuracy of each probe on the test images."""
    if train.labels is None or test.labels is None:
        return {}
    device = next(encoder.parameters()).device
    encoder = encoder.eval()
    labels, truth = train.labels.to(device), test.labels.to(device)
    known, asked = features(encoder, train.pixels), features(encoder, test.pixels)
    with torch.inference_mode(False):
        found = {
            f"20 nearest neighbours, {name}": neighbours(known[name], labels, asked[name]) for name in known
        }
        for name in known:
            found[f"linear probe, {name}"] = linear(known[name].clone(), labels, asked[name].clone(), steps)
    return {name: round((guess == truth).float().mean().item(), 4) for name, guess in found.items()}
