"""Push a classifier to the Hugging Face hub, and load one by its name."""

import logging
import re
import tempfile
from pathlib import Path
from typing import Any

from vecroute.classifier.card import model_card
from vecroute.classifier.saving import read_config, save_classifier
from vecroute.encoders.finding import first_line, hub_error
from vecroute.storage import require

logger = logging.getLogger(__name__)

FILES = ("config.json", "model.safetensors", "README.md")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def push(
    classifier: Any, name: str, *, private: bool | None, revision: str | None, message: str, about: dict
) -> str:
    """Upload the folder of a classifier; see ``RoutingClassifier.push_to_hub``."""
    check_name(name)
    client = require("huggingface_hub", "hf").HfApi()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        save_classifier(classifier, place, False, about, elsewhere=True)
        (place / "README.md").write_text(model_card(read_config(place), name))
        encoder = classifier.encoder_.name
        if Path(encoder).expanduser().exists():
            logger.warning(
                "encoder %s is a folder on this machine: to load %s elsewhere, pass encoder=...",
                encoder,
                name,
            )
        try:
            client.create_repo(name, private=private, exist_ok=True)
            if revision is not None:
                client.create_branch(name, branch=revision, exist_ok=True)
            done = client.upload_folder(
                repo_id=name,
                folder_path=place,
                revision=revision,
                commit_message=message,
                allow_patterns=list(FILES),
            )
        except Exception as error:  # the network and the hub raise errors of different types
            raise OSError(f"{name} could not be uploaded to the hub: {first_line(error)}") from error
    return str(getattr(done, "commit_url", done))


def find(folder: str | Path, revision: str | None) -> Path:
    """Return the folder of a classifier: the given folder, or a local copy of this name on the hub.

    Raises:
        ValueError: there is neither such a folder nor such a name on the hub.
    """
    place, name = Path(folder), str(folder)
    # If a local folder has the owner's name, the user means a folder. A typing error is then reported at
    # once, without asking the hub.
    if place.exists() or place.parent.exists() or not NAME.fullmatch(name):
        if revision is not None and place.exists():
            raise ValueError(f"revision needs a name on the hub, got the folder {folder}")
        return place  # the caller reads the folder, and reports what is wrong with it
    hub = require("huggingface_hub", "hf")
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # the network, the hub and files raise errors of different types
        raise ValueError(
            f"{name} is not a folder, and could not be loaded from the hub: {hub_error(error)}"
        ) from error


def check_name(name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"name must be 'owner/name' on the hub, got {name!r}")
