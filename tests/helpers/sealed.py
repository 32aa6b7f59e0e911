"""Change the folder of a classifier and seal it again, as an attacker would."""

import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file, save

from vecroute.classifier.saving import config_sha256


def reseal(folder: Path, change_config=None, change_weights=None) -> Path:
    """Apply changes to the configuration and the weights in place, and make both checksums right again."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    if change_config:
        change_config(config)
    if change_weights:
        change_weights(weights)
    data = save(weights, {"config_sha256": config_sha256(config)})
    config["model_sha256"] = hashlib.sha256(data).hexdigest()
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
