"""Export a classifier as an ONNX graph, and check the graph against the classifier."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from vecroute.classifier.parts import ready
from vecroute.encoders.finding import first_line
from vecroute.encoders.vision import VisionEncoder
from vecroute.ops.checks import check_choice
from vecroute.storage import require, temporary_place

PARTS = ("all", "head")
TOLERANCE = 1e-4  # greatest difference of probabilities between PyTorch and onnxruntime
SIZES = ((2, 11), (1, 3), (3, 7))  # (batch size, length) of each check; the export uses the first
OUTPUTS = ("scores", "probabilities")


class Scores(nn.Module):
    """Turn hidden states into scores and probabilities.

    Args:
        head: hidden states [b, n_pos, depth, d_emb] and mask [b, n_pos] -> scores [b, n_cls].
        temperature: divides the scores before they become probabilities.
        multi_label: True for a sigmoid of each score, False for a softmax over all scores.
    """

    def __init__(self, head: nn.Module, temperature: float, multi_label: bool):
        super().__init__()
        self.head, self.temperature, self.multi_label = head, temperature, multi_label

    def forward(self, hidden_states: Tensor, input_mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(hidden_states, input_mask)  # [b, n_cls]
        scaled = scores / self.temperature  # [b, n_cls]
        return scores, scaled.sigmoid() if self.multi_label else scaled.softmax(-1)  # [b, n_cls] each


class OfTexts(nn.Module):
    """Turn token ids into scores and probabilities: the encoder, then the head."""

    def __init__(self, encoder: Any, rest: Scores):
        super().__init__()
        self.model, self.depths, self.rest = encoder.model, encoder.depths, rest

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, special_tokens_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        states = self.model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True
        ).hidden_states  # [b, n, d_emb] each
        hidden = torch.stack([states[depth] for depth in self.depths], 2)  # [b, n, depth, d_emb]
        used = attention_mask.bool()  # [b, n]
        if special_tokens_mask is not None:
            used = used & ~special_tokens_mask.bool()  # [b, n]
        return self.rest(hidden, used)


class OfImages(nn.Module):
    """Turn pixels into scores and probabilities: the encoder, then the head."""

    def __init__(self, encoder: Any, rest: Scores):
        super().__init__()
        self.model, self.depths, self.rest = encoder.model, encoder.depths, rest
        self.first = 0 if encoder.special_tokens else encoder.n_special

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        states = self.model(pixel_values=pixel_values, output_hidden_states=True).hidden_states
        hidden = torch.stack([states[depth] for depth in self.depths], 2)[
            :, self.first :
        ]  # [b, n_pos, depth, d]
        return self.rest(hidden, torch.ones_like(hidden[:, :, 0, 0], dtype=torch.bool))


def export(classifier: Any, path: Path, part: str) -> None:
    """See ``RoutingClassifier.to_onnx``."""
    check_choice("part", part, PARTS)
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"path must be a file in a folder that exists, got {path}")
    encoder, head = ready(classifier)
    device = next(head.parameters()).device
    rest = Scores(head, float(getattr(classifier, "temperature_", 1.0)), classifier.multi_label)
    if part == "head":
        module: nn.Module = rest
    else:
        module = (OfImages if isinstance(encoder, VisionEncoder) else OfTexts)(encoder, rest)
    dtypes = {parameter.dtype for parameter in module.parameters()}
    if dtypes != {torch.float32}:
        raise ValueError(
            f"to_onnx needs float32 weights, got {dtypes}: load the classifier with device='cpu'"
        )
    examples = [inputs_of(encoder, part, *size, device) for size in SIZES]
    temporary = temporary_place(path).with_suffix(".onnx")
    try:
        write(module.eval(), examples[0], dimensions(encoder, part, examples[0]), temporary, encoder.name)
        check(module, examples, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def inputs_of(encoder: Any, part: str, b: int, n: int, device: torch.device) -> dict[str, Tensor]:
    """Return random inputs of the graph for b samples of n, n - 1, ... positions."""
    generator = torch.Generator().manual_seed(n)
    if part == "all" and isinstance(encoder, VisionEncoder):
        pixels = encoder.pixels([blank(encoder)])  # [1, channels, height, width]
        return {"pixel_values": torch.randn(b, *pixels.shape[1:], generator=generator).to(device)}
    used = torch.arange(n) < (n - torch.arange(b))[:, None]  # [b, n]
    if part == "head":
        hidden = torch.randn(b, n, encoder.depth, encoder.d_emb, generator=generator)
        return {"hidden_states": hidden.to(device), "input_mask": used.to(device)}
    ids = torch.randint(len(encoder.tokenizer), (b, n), generator=generator)  # [b, n]
    given = {"input_ids": ids, "attention_mask": used.long()}
    if not encoder.special_tokens:
        given["special_tokens_mask"] = (torch.arange(n) == 0).long().expand(b, n).contiguous()  # [b, n]
    return {name: value.to(device) for name, value in given.items()}


def blank(encoder: Any) -> Any:
    """Return a blank image, to find the size of the encoder's input."""
    from vecroute.io.images import Picture

    return Picture.of(np.zeros((8, 8, 3), np.uint8))


def dimensions(encoder: Any, part: str, example: dict[str, Tensor]) -> dict[str, dict[int, Any]]:
    """Return the dimensions of each input that may vary: the batch, and the length of texts."""
    limit = encoder.max_length if part == "all" and not isinstance(encoder, VisionEncoder) else None
    batch, length = Dim("batch", min=1), Dim("length", min=1, max=limit)
    if "pixel_values" in example:
        return {"pixel_values": {0: batch}}
    return {name: {0: batch, 1: length} for name in example}


def write(
    module: nn.Module, example: dict[str, Tensor], dynamic: dict[str, dict[int, Any]], path: Path, name: str
) -> None:
    """Export the module to a file.

    Raises:
        ValueError: the module has an operation that ONNX does not have.
    """
    quiet = logging.getLogger("torch.onnx"), logging.getLogger("onnxscript")
    levels = [logger.level for logger in quiet]
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter warns about its own code
            for logger in quiet:
                logger.setLevel(logging.ERROR)
            program: Any = torch.onnx.export(
                module,
                args=(),
                kwargs=example,
                dynamic_shapes=dynamic,
                output_names=list(OUTPUTS),
                dynamo=True,
                verbose=False,
            )
            program.save(path, external_data=False)
    except Exception as error:  # each stage of the exporter raises errors of its own type
        raise ValueError(f"{name} cannot be exported as ONNX: {first_line(error)}") from error
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


def check(module: nn.Module, examples: list[dict[str, Tensor]], path: Path) -> None:
    """Raise an error if the graph gives other probabilities than the module."""
    session = require("onnxruntime", "onnx").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for example in examples:
        with torch.no_grad():
            expected = module(**example)[1].cpu().numpy()  # [b, n_cls]
        given = {name: value.cpu().numpy() for name, value in example.items()}
        found = session.run(["probabilities"], given)[0]  # [b, n_cls]
        error = float(np.abs(found - expected).max()) if found.shape == expected.shape else float("inf")
        if not error <= TOLERANCE:
            raise ValueError(f"the exported graph gives other probabilities: they differ by {error:.2g}")
