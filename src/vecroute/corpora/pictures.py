"""Find folders of images, and write a table of predictions for each, whole or not at all."""

from collections.abc import Sequence
from pathlib import Path

from vecroute.corpora.answers import Answering
from vecroute.corpora.shards import ROWS, opened, whole
from vecroute.io.images import image_files
from vecroute.io.predictions import new_writer
from vecroute.io.tables import LINE


def find_images(root: Path, name: str) -> dict[Path, list[Path]]:
    """Return a table of this name for each folder with images: the folder, then its images in order.

    The folder is among the sources, since its time changes when an image is removed.

    Raises:
        ValueError: root is no folder, or it has no images.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is no folder of images")
    found: dict[Path, list[Path]] = {}
    for path in image_files(root):
        found.setdefault(path.parent.relative_to(root) / name, [path.parent]).append(path)
    return found


def copy_images(
    images: Sequence[Path], target: Path, classes: Sequence[str], answer: Answering, raw: bool
) -> int:
    """Write the predictions of images as CSV or JSON lines, by the name of target; return their number.

    Raises:
        ValueError, OSError: an image is damaged; the message names it, and nothing is written.
    """
    with whole(target) as temporary, opened(temporary, packed=False) as file:
        writer = new_writer(target.suffix[1:], file, classes, [{LINE: ""}], raw=raw)
        for start in range(0, len(images), ROWS):
            paths = [str(path) for path in images[start : start + ROWS]]
            for path, found in zip(paths, answer(paths), strict=True):
                writer.write({LINE: path}, found, path)
    return len(images)
