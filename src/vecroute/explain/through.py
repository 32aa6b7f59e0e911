"""Follow the gradients of hidden states back through a frozen Transformer to the words or patches it read.

With attention weights, scales and gates held fixed, every hidden state is affine in the embeddings of the
words, or of the patches of an image. Let a score be affine in the hidden states. Then a word adds its
embedding times a gradient to the score, and the score at zero embeddings is the base.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vecroute.compose.gates import Gates, check_affine_marks, split_of


class HeldEncoder:
    """A Transformer run once on a batch, with its gates held.

    Args:
        call: runs the model on the batch and returns its hidden states, [b, n, d] each.
        source: the weight that produces the embeddings: the table of words, or the convolution of patches.
        name: name of the model in errors.

    Attributes:
        states: the hidden states, [b, n, d] each. Their gradients belong to affine maps of the embeddings.

    Raises:
        ValueError: the model has an operation that is not affine and that no rule holds fixed.
    """

    def __init__(self, call: Callable[[], Sequence[Tensor]], source: Tensor, name: str):
        self.call, self.name, self.gates = call, name, Gates(source)
        with torch.inference_mode(False), torch.enable_grad(), split_of(name):
            self.states = list(self.gates.run_from_source(call))
            check_affine_marks(self.states)

    def at_zero(self) -> list[Tensor]:
        """Return the hidden states [b, n, d] of the affine map at zero embeddings."""
        with torch.no_grad(), split_of(self.name):
            return list(self.gates.run_from_source(self.call, torch.zeros_like(self.gates.x)))

    def pull(self, states: Sequence[Tensor], gradients: Sequence[Tensor], keep: bool) -> Tensor:
        """Return what each word or patch adds to the score through some states, [b, n].

        Args:
            states: some of the hidden states, or parts of them.
            gradients: the gradient of the score for each of them.
            keep: True if the graph is needed again.
        """
        x = self.gates.x
        given = [g.to(s.dtype) for s, g in zip(states, gradients, strict=True)]
        with torch.inference_mode(False):
            (gradient,) = torch.autograd.grad(
                states, x, given, retain_graph=keep, allow_unused=True, materialize_grads=True
            )
        products = gradient.to(_wide(x.dtype)) * x.detach()
        if products.dim() == 4:  # [b, d, rows, columns]
            return products.sum(1).flatten(1)  # [b, n]
        return products.sum(-1)  # [b, n]


def word_table(model: Any, name: str) -> Tensor:
    """Return the table of word embeddings of a model of texts."""
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ValueError(f"{name} must have a table of word embeddings, got {type(table).__name__}")
    return table.weight


def patch_filter(model: nn.Module, name: str) -> Tensor:
    """Return the weight of the convolution that computes the patch embeddings of an image model."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and tuple(module.kernel_size) == tuple(module.stride):
            return module.weight
    raise ValueError(f"{name} must compute its patches by a convolution, got none")


def positions_at_once(model: Any, device: torch.device) -> int:
    """Return the number of positions per batch that fit into memory with the gates of all layers."""
    config: Any = model.config
    d: Any = getattr(config, "hidden_size", None) or getattr(config, "dim", 768)
    inner: Any = getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", None) or 4 * d
    layers: Any = getattr(config, "num_hidden_layers", None) or getattr(config, "n_layers", 12)
    numbers = layers * (2 * inner + 12 * d)  # numbers held for one position
    budget, most = (2**32, 65_536) if device.type == "cuda" else (2**28, 4_096)
    return max(512, min(most, budget // numbers))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
