"""Compute scores and vectors of any number of texts or images, as many at a time as fit in memory."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vecroute.classifier.parts import ready
from vecroute.classifier.streams import progress_over, windows_of
from vecroute.classifier.vectors import vectors
from vecroute.encoders.ahead import ahead
from vecroute.encoders.text import Batch
from vecroute.encoders.vision import VisionEncoder

if TYPE_CHECKING:
    from vecroute.classifier.estimator import RoutingClassifier

# Characters of text tokenized at a time, by a thread that is one window ahead. An image counts as 4,000.
WINDOW_CHARACTERS = 500_000


def scores_of(classifier: "RoutingClassifier", X: Any) -> Tensor:
    """Return the scores [n, n_cls] of texts in double precision, on the CPU."""
    _, head = ready(classifier)
    return outputs(classifier, head, X).double()  # [n, n_cls]


def vectors_of(classifier: "RoutingClassifier", X: Any) -> Tensor:
    """Return the vector of each text, [n, k]; see ``vectors``."""
    _, head = ready(classifier)
    return outputs(classifier, partial(vectors, head), X)  # [n, k]


def scores_of_batches(head: nn.Module, batches: Iterable[Batch]) -> Tensor:
    """Do the same as ``scores_of`` from batches of their hidden states."""
    return through(head, batches, device_of(head)).double()  # [n, n_cls]


def outputs(classifier: "RoutingClassifier", part: Callable[..., Tensor], X: Any) -> Tensor:
    """Return the output [n, k] of a part of the head for all texts."""
    encoder, head = ready(classifier)
    device, found = device_of(head), []
    with progress_over(X, "classifying", classifier.verbose) as step:
        windows = windows_of(X, isinstance(encoder, VisionEncoder), WINDOW_CHARACTERS)
        for tokenized in ahead(encoder.tokenize, windows):
            batches = encoder.batches(tokenized)
            found.append(through(part, batches, device, step))  # [b, k]
    return torch.cat(found)  # [n, k]


@torch.inference_mode()
def through(
    part: Callable[..., Tensor],
    batches: Iterable[Batch],
    device: torch.device,
    step: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the output [n, k] of a part of the head for n texts, in order, on the CPU.

    Args:
        part: hidden states [b, n_pos, depth, d_emb] and mask [b, n_pos] -> [b, k].
        batches: the hidden states of the n texts.
        device: the device of the head.
        step: called with the number of texts of each batch.

    Raises:
        ValueError: an output is NaN or infinite, so some weights are finite but far too large.
    """
    parts: list[Tensor] = []
    order: list[int] = []
    for batch in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = part(batch.hidden.to(device, torch.float32), batch.mask.to(device)).float()  # [b, k]
        parts.append(found)
        order += batch.which
        if step:
            step(len(batch.which))
    rows = torch.cat(parts).cpu()[torch.tensor(order).argsort()]  # [n, k], the only wait for the device
    if not rows.isfinite().all():
        raise ValueError("scores are NaN or infinite: the weights of the head or of the encoder are damaged")
    return rows


def device_of(head: nn.Module) -> torch.device:
    return next(head.parameters()).device
