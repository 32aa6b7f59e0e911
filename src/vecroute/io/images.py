"""Read images from files, bytes, PIL images, arrays or folders, check them, and make them upright RGB."""

import hashlib
import io
import logging
import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vecroute.storage import require

logger = logging.getLogger(__name__)

MAX_PIXELS = 64_000_000  # per image; below the size that Pillow treats as an attack
MAX_SIDE = 32_768  # pixels of width or height; decoders need much memory for very long rows
SUFFIXES = {
    ".jpg",
    ".jpeg",
    ".png",
    ".gif",
    ".bmp",
    ".webp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".avif",
}
# Only these formats are decoded, whatever the file is called. For some others, Pillow runs external programs.
# A JPEG 2000 file of 1 MB with small tiles takes minutes to decode.
FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF")
# Pillow reads a header part by part in Python: 10 MB of empty parts take a minute.
READS, BYTES_PER_READ = 10_000, 1024  # a decoder may call read READS times, plus once per 1024 bytes
READ_AGAIN = 8  # all reads together may return the bytes of the file this many times
NUMBERS = 50_000  # in a tag of a TIFF file, such as places of tiles; Pillow spends microseconds on each
MAX_SCANNED = 1_000_000_000  # pixels times scans of a JPEG file; decoding takes about 3 s
N_NAMED = 5  # a message names at most this many files
BYTES_OF_TIFF = (1, 2, 6, 7)  # types of tags that stay bytes, such as texts and colour profiles
ORIENTATION = 0x0112  # tag of EXIF
# What makes an image upright, by the value of this tag: members of ``PIL.Image.Transpose``.
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@dataclass(frozen=True)
class Picture:
    """An image: a file that is decoded when needed, or pixels. Two are equal if their contents are equal."""

    key: str  # sha256 of the file or the pixels
    name: str = field(compare=False)  # used in messages
    source: Any = field(compare=False, repr=False)  # Path or bytes of a file, or a PIL image in RGB

    @classmethod
    def of(cls, source: Any, name: str = "image") -> "Picture":
        """Make a picture from a path, bytes, PIL image, array or tensor.

        Args:
            source: a path; the bytes of a file; a PIL image; an array [height, width], [height, width, 1, 3
                or 4]; a tensor [height, width] or [1, 3 or 4, height, width]. Numbers are uint8, uint16,
                bool, or floats from 0 to 1.
            name: used in messages if the source is not a file.

        Raises:
            TypeError: the source has another type.
            ValueError: the file is missing, empty or not an image.
        """
        if isinstance(source, Picture):
            return source
        if isinstance(source, str | Path | bytes):
            file, name = (source, name) if isinstance(source, bytes) else (Path(source), str(source))
            data = file if isinstance(file, bytes) else file_bytes(file)
            if not data:
                raise ValueError(f"{name} is empty: it has 0 bytes")
            with opened(file, name):
                pass
            return cls(hashlib.sha256(b"file" + data).hexdigest(), name, file)
        if isinstance(source, require("PIL.Image", "images").Image):
            image = decoded(source, name)
        elif isinstance(source, np.ndarray | Tensor):
            image = from_array(source, name)
        else:
            raise TypeError(f"{name} must be a path, a PIL image or an array, got {type(source).__name__}")
        digest = hashlib.sha256(f"pixels {image.size}".encode() + image.tobytes())
        return cls(digest.hexdigest(), name, image)

    @cached_property
    def n_pixels(self) -> int:
        """Number of pixels, read from the header of the file."""
        if not isinstance(self.source, Path | bytes):
            return self.source.width * self.source.height
        with opened(self.source, self.name) as image:
            return image.width * image.height

    def open(self) -> Any:
        """Decode the image: a PIL image in RGB, upright.

        Raises:
            ValueError: the file is damaged.
        """
        if not isinstance(self.source, Path | bytes):
            return self.source
        with opened(self.source, self.name) as image:
            check_scans(image, self.name)
            return decoded(image, self.name)


class Folder(NamedTuple):
    """The result of ``read_folder``: the paths, the label of each, and the files that were left out."""

    paths: list[Path]
    labels: list[str]
    skipped: list[Path]


def check_images(X: Any, name: str = "X", first: int = 0) -> list[Picture]:
    """Turn several images into a list of pictures. Errors name the argument and the row, counted from first.

    Raises:
        TypeError: X is a single image, or a row is not an image.
        ValueError: X is empty, or an image is missing or cannot be read.
    """
    if is_image(X):
        raise TypeError(f"{name} must be a list of images, got one: put it in a list")
    if not isinstance(X, Iterable) or isinstance(X, dict | set):
        raise TypeError(f"{name} must be a list of images, got {type(X).__name__}")
    pictures = [Picture.of(row, f"image {k} of {name}") for k, row in enumerate(X, first)]
    if not pictures:
        raise ValueError(f"{name} must be a list of images, got none")
    return pictures


def is_image(X: Any) -> bool:
    """Return whether X is a single image and not a list of images."""
    one_array = isinstance(X, np.ndarray | Tensor) and X.ndim in (2, 3)
    return one_array or isinstance(X, str | bytes | Path | Picture | require("PIL.Image", "images").Image)


def image_files(folder: str | os.PathLike) -> list[Path]:
    """List the images in a folder and its subfolders, in order. A warning names the other files.

    Raises:
        ValueError: the folder has no images.
    """
    files = list(files_in(Path(folder)))
    found = [path for path in files if called_image(path)]
    skipped = [path for path in files if not called_image(path)]
    if skipped:
        logger.warning("%d files of %s are left out: %s", len(skipped), folder, listed(skipped))
    if not found:
        raise ValueError(f"{folder} has no images")
    return found


def read_folder(folder: str | os.PathLike) -> Folder:
    """Read a folder that has one subfolder of images for each class, in order.

    Files whose names do not end like an image, such as notes.txt, and images outside of the subfolders are
    left out. A warning names them.

    Raises:
        ValueError: the folder does not exist, fewer than two classes have images, or a file named like an
            image cannot be read as one.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder of images")
    paths, labels, skipped, broken = [], [], [], []
    for path in files_in(root):
        inside = path.relative_to(root).parts
        if len(inside) < 2 or not called_image(path):
            skipped.append(path)
            continue
        try:
            with opened(path, str(path)):
                paths.append(path)
                labels.append(inside[0])
        except ValueError as error:
            broken.append(str(error))
    if broken:
        more = f" (and {len(broken) - 1} more like it)" if len(broken) > 1 else ""
        raise ValueError(f"{broken[0]}{more}: remove it from {root} or replace it")
    if skipped:
        logger.warning("%d files of %s are left out: %s", len(skipped), root, listed(skipped))
    classes = sorted(set(labels))
    if len(classes) < 2:
        found = f"images only in {classes[0]}" if classes else "no images in them"
        raise ValueError(f"{root} must have a folder of images for each of two classes or more, got {found}")
    return Folder(paths, labels, skipped)


def files_in(root: Path) -> Iterator[Path]:
    """Yield every file below a folder, sorted by name."""
    for place, folders, files in os.walk(root):
        folders.sort()
        yield from (Path(place) / file for file in sorted(files))


def called_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def listed(paths: Sequence[Path]) -> str:
    """Name the first files, and say how many more there are."""
    rest = len(paths) - N_NAMED
    return ", ".join(map(str, paths[:N_NAMED])) + (f" and {rest} more" if rest > 0 else "")


def file_bytes(path: Path) -> bytes:
    check_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def check_file(path: Path) -> None:
    """Raise an error for a pipe or a device, which may have no end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} cannot be read: it is no file")


class Parts(io.BufferedReader):
    """A file that limits the number of reads, because decoders spend time on each."""

    def __init__(self, file: Path | bytes):
        super().__init__(io.BytesIO(file) if isinstance(file, bytes) else io.FileIO(file))
        size = len(file) if isinstance(file, bytes) else file.stat().st_size
        self.reads, self.bytes = READS + size // BYTES_PER_READ, READ_AGAIN * size + READS
        self.too_many = False

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.reads, self.bytes = self.reads - 1, self.bytes - len(found)
        if self.reads < 0 or self.bytes < 0:
            self.too_many = True
            raise OSError("it has too many parts")
        return found


@contextmanager
def opened(file: Path | bytes, name: str) -> Iterator[Any]:
    """Open an image from a path or from bytes: read its header, check its size.

    Raises:
        ValueError: the file is not an image, or has no pixels or too many.
    """
    pil = require("PIL.Image", "images")
    if isinstance(file, Path):
        check_file(file)
    try:
        data = Parts(file)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    with data:
        try:
            pil.init()
            known = [kind for kind in FORMATS if kind in pil.OPEN]  # Pillow may be built without some
            check_tags(data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one warning per damaged part; check_size checks the size
                image = pil.open(data, formats=known)
        except pil.DecompressionBombError as error:
            raise ValueError(f"{name} has too many pixels, the limit is {MAX_PIXELS:,}") from error
        except Exception as error:  # a damaged file can make a decoder raise any error
            if data.too_many:
                raise ValueError(f"{name} has a header of too many parts") from error
            raise ValueError(f"{name} is not an image that can be read, or it is damaged") from error
        check_size(image.size, name)
        if any(tile[0] == "ppm_plain" for tile in image.tile):  # Pillow decodes these in Python, slowly
            raise ValueError(f"{name} stores its pixels as decimal numbers, which is not supported")
        yield image


def check_tags(data: Parts) -> None:
    """Refuse a TIFF file if one of its tags has very many numbers. Pillow reads the first list of tags."""
    order, big = {b"II": "<", b"MM": ">"}.get(data.peek(4)[:2], ""), b"+" in data.peek(4)[2:4]
    if not order:
        return
    first, n_tags, tag = ("8xQ", "Q", "HHQ8x") if big else ("4xI", "H", "HHI4x")

    def numbers(form: str) -> tuple[int, ...]:
        return struct.unpack(order + form, data.read(struct.calcsize(order + form)))

    data.seek(*numbers(first))
    for _ in range(*numbers(n_tags)):
        _, kind, n = numbers(tag)
        if kind not in BYTES_OF_TIFF and n > NUMBERS:
            data.too_many = True
            raise OSError(f"a tag has {n} numbers")
    data.seek(0)


def check_scans(image: Any, name: str) -> None:
    """Refuse a progressive JPEG file with too many scans, because each scan visits all pixels.

    A scan begins with the bytes FF DA. Coded pixels never contain them.
    """
    if image.format not in ("JPEG", "MPO"):
        return
    place = image.fp.seek(0, io.SEEK_CUR)
    image.fp.seek(0)
    n_scans = image.fp.read().count(b"\xff\xda")
    image.fp.seek(place)
    if n_scans * image.width * image.height > MAX_SCANNED:
        raise ValueError(f"{name} has {n_scans:,} scans of {image.width} x {image.height} pixels, too many")


def check_size(size: tuple[int, int], name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"{name} must have pixels, got {width} x {height}")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{name} has {width} x {height} pixels, the limit is {MAX_PIXELS:,}")
    if max(size) > MAX_SIDE:
        raise ValueError(f"{name} has {width} x {height} pixels, a side longer than {MAX_SIDE:,}")


def decoded(image: Any, name: str) -> Any:
    """Decode the first frame to RGB, rotate it as its EXIF data say, and put transparent pixels on white.

    Raises:
        ValueError: the pixels are damaged, or the range of their values is unknown.
    """
    check_size(image.size, name)
    try:
        if getattr(image, "is_animated", False):  # counting the frames reads the whole file
            logger.warning("%s has several frames: the first is used", name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one warning per damaged tag
            image.load()
            upright = turned(image)
    except Exception as error:  # any error, as in ``opened``
        raise ValueError(f"{name} is damaged or truncated: {error}") from error
    if upright.mode.startswith("I") or upright.mode == "F":
        values = np.asarray(upright)  # [height, width]
        # Pillow stores the 16-bit values of a PGM file as 32-bit integers.
        widened = image.format == "PPM" and upright.mode == "I"
        return from_array(values.astype(np.uint16) if widened else values, name)
    if upright.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in upright.info:
        colours = upright.convert("RGBA")
        white = require("PIL.Image", "images").new("RGB", colours.size, "white")
        white.paste(colours, mask=colours)
        return white
    return upright.convert("RGB")


def turned(image: Any) -> Any:
    """Turn an image as its EXIF data say. Pillow's own function writes them again, which may take seconds."""
    turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    pil = require("PIL.Image", "images")
    return image if turn is None else image.transpose(pil.Transpose[turn])


def from_array(values: Any, name: str) -> Any:
    """Make a PIL image in RGB from an array or tensor; see ``Picture.of``.

    Raises:
        TypeError, ValueError: the shape is wrong, or the range of the values is unknown.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values  # NumPy has no bfloat16
        values = values.permute(1, 2, 0) if values.dim() == 3 else values  # [height, width, 1, 3 or 4]
    array = np.asarray(values)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        expected = "[height, width] or [height, width, 1, 3 or 4]"
        raise ValueError(f"{name} must be an array {expected}, got {list(array.shape)}")
    check_size(array.shape[1::-1], name)
    array = as_bytes(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array, name)
    return decoded(require("PIL.Image", "images").fromarray(array), name)


def as_bytes(array: np.ndarray, name: str) -> np.ndarray:
    """Convert an array to uint8, so that the full range of its type becomes 0 to 255."""
    expected = "uint8, uint16, bool, or floats from 0 to 1"
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        return array * np.uint8(255)
    if array.dtype.newbyteorder("=") == np.uint16:  # TIFF files may have either byte order
        return np.round(array / 257).astype(np.uint8)
    if not np.issubdtype(array.dtype, np.number):
        raise TypeError(f"{name} must be {expected}, got {array.dtype}")
    low, high = array.min(), array.max()
    if np.issubdtype(array.dtype, np.floating) and low >= 0 and high <= 1:
        return np.round(array * 255).astype(np.uint8)
    raise ValueError(f"{name} must be {expected}, got {array.dtype} from {low} to {high}")
