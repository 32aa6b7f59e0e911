"""Load pretrained Transformers from their folders, and never run code from a folder."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import dynamic_module_utils

from vecroute.encoders.finding import VIT, find, first_line, quiet

# Without trust_remote_code=False, transformers asks on standard input whether to run code, and would take
# piped data as the answer.
SAFE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
LOADING = threading.RLock()


@contextmanager
def unasked() -> Iterator[None]:
    """Load quietly, and raise an error where transformers would ask whether to run code.

    Some models build parts of themselves from nested configurations, and do not pass trust_remote_code on.
    The setting belongs to the process, so one thread loads at a time.
    """
    with LOADING, quiet():
        seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # seconds to wait for an answer
        try:
            yield
        finally:
            dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


def load_model(name: str, folder: Path) -> Any:
    """Load a Transformer without its pooler.

    Raises:
        ValueError: transformers cannot read the folder, or weights are missing, NaN or infinite.
    """
    try:
        with unasked():
            config = load_config(folder)
            model, info = transformers.AutoModel.from_pretrained(
                folder, config=config, use_safetensors=True, output_loading_info=True, **SAFE
            )
    except Exception as error:  # a damaged folder can make transformers raise any error
        raise ValueError(f"encoder {name!r} could not be loaded: {first_line(error)}") from error
    # No hidden state depends on the pooler, and a checkpoint without a pooler would get a random one here.
    if hasattr(model, "pooler"):
        model.pooler = None
    if hasattr(model, "use_head"):
        model.head, model.use_head = None, False
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(("pooler.", "head.")))
    if missing:
        raise ValueError(f"encoder {name!r} lacks {len(missing)} of its weights, the first {missing[0]}")
    for key, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"encoder {name!r} has weights that are NaN or infinite: {key}")
    return model.get_encoder() if model.config.is_encoder_decoder else model


def load_config(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, **SAFE)
    # A configuration may name kernels on the hub. Kernels are code too, so drop the names.
    config._attn_implementation = config._experts_implementation = None
    return config


def load_tokenizer(name: str, folder: Path) -> Any:
    try:
        with unasked():
            return transformers.AutoTokenizer.from_pretrained(folder, **SAFE)
    except Exception as error:
        raise ValueError(f"tokenizer of {name!r} could not be loaded: {first_line(error)}") from error


def load_image_processor(name: str, folder: Path) -> Any:
    """Load the image processor of a vision encoder: the variant that uses PIL, equal on all machines."""
    try:
        with unasked():
            return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **SAFE)
    except Exception as error:
        raise ValueError(f"image processor of {name!r} could not be loaded: {first_line(error)}") from error


def takes_images(model: Any, revision: str | None) -> bool:
    """Return whether an encoder (name, folder or loaded model) takes images.

    Raises:
        ValueError: the name or folder does not exist, or is damaged.
    """
    if model in ("minilm", VIT):
        return model == VIT
    config = getattr(model, "config", None)
    if isinstance(model, str):
        folder = find(model, revision)
        try:
            with unasked():
                config = load_config(folder)
        except Exception as error:
            raise ValueError(f"encoder {model!r} could not be loaded: {first_line(error)}") from error
    return hasattr(config, "patch_size") or hasattr(config, "vision_config")


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the given device, or for None the GPU if there is one.

    Raises:
        ValueError: no device has this name, or this machine does not have the device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda, cuda:0, ..., got {device!r}") from None
    if found.type == "meta":
        raise ValueError("device must be cpu, cuda, cuda:0, ..., got 'meta', which computes nothing")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!s}, but there is no GPU that torch can use")
    try:
        torch.zeros(1, device=found).item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:  # such as a missing GPU
        raise ValueError(f"device {device!s} cannot be used here: {first_line(error)}") from error
    return found


def default_dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def commit(model: Any, folder: Path | None, given: str | None) -> str | None:
    """Return the commit on the hub that a model was fetched from, else the given revision."""
    if folder is not None and folder.parent.name == "snapshots":
        return folder.name
    return getattr(model.config, "_commit_hash", None) or given
