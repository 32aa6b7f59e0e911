"""Every kind of image file reads the same, and the error names a file that cannot be read."""

import io
import logging
import os
import shutil
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from vecroute.io.images import MAX_PIXELS, Picture, check_images, read_folder

# The left half is red, the right half blue, and the top row green, to show the orientation.
COLOURS = np.zeros((6, 10, 3), np.uint8)
COLOURS[:, :5, 0], COLOURS[:, 5:, 2] = 255, 255
COLOURS[0] = (0, 255, 0)


def pixels(source) -> np.ndarray:
    return np.asarray(Picture.of(source).open())


def saved(path, image, **options):
    image.save(path, **options)
    return path


@pytest.fixture
def rgb():
    return Image.fromarray(COLOURS)


@pytest.mark.parametrize(
    "as_source", [str, lambda path: path, Image.open, lambda path: np.asarray(Image.open(path))]
)
def test_paths_images_and_arrays_read_the_same(tmp_path, rgb, as_source):
    path = saved(tmp_path / "a.png", rgb)
    np.testing.assert_array_equal(pixels(as_source(path)), COLOURS)


@pytest.mark.parametrize(
    "source",
    [
        torch.from_numpy(COLOURS).permute(2, 0, 1),
        torch.from_numpy(COLOURS).permute(2, 0, 1) / 255,
        COLOURS / 255,
        (torch.from_numpy(COLOURS).permute(2, 0, 1) / 255).bfloat16(),
        COLOURS.astype(np.uint16) * 257,
        (COLOURS.astype(np.uint16) * 257).astype(">u2"),
        COLOURS > 0,
        np.concatenate([COLOURS, np.full((6, 10, 1), 255, np.uint8)], 2),
    ],
    ids=["tensor", "float tensor", "floats", "bfloat16", "uint16", "big-endian", "bool", "alpha"],
)
def test_arrays_of_every_type(source):
    np.testing.assert_array_equal(pixels(source), COLOURS)


def test_grey_arrays():
    grey = np.arange(60, dtype=np.uint8).reshape(6, 10)
    for source in (grey, grey[..., None], torch.from_numpy(grey), torch.from_numpy(grey)[None]):
        np.testing.assert_array_equal(pixels(source), np.repeat(grey[..., None], 3, 2))


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "YCbCr", "HSV", "LAB", "RGBA", "LA", "RGBX"])
def test_every_mode_becomes_rgb(tmp_path, rgb, mode):
    changed = rgb.convert("RGB").convert("L").convert("LA") if mode == "LA" else None
    if mode == "LAB":
        changed = Image.new("LAB", (10, 6), (255, 128, 128))
    found = pixels(changed or rgb.convert(mode))
    assert found.shape == (6, 10, 3)
    assert found.dtype == np.uint8
    if mode in ("P", "CMYK", "RGBA", "RGBX", "HSV"):
        np.testing.assert_allclose(found, COLOURS, atol=2)


def test_cmyk_jpeg(tmp_path):
    colour = Image.new("RGB", (16, 16), (200, 30, 60))
    found = pixels(saved(tmp_path / "a.jpg", colour.convert("CMYK"), quality=95))
    np.testing.assert_allclose(found, np.broadcast_to((200, 30, 60), (16, 16, 3)), atol=6)


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path):
    grey = np.linspace(0, 65535, 60).round().astype(np.uint16).reshape(6, 10)
    expected = np.repeat(np.round(grey / 257).astype(np.uint8)[..., None], 3, 2)
    for name in ("a.png", "a.tif"):
        np.testing.assert_array_equal(pixels(saved(tmp_path / name, Image.fromarray(grey))), expected)
    pgm = tmp_path / "a.pgm"
    pgm.write_bytes(b"P5 10 6 65535\n" + grey.astype(">u2").tobytes())
    np.testing.assert_array_equal(pixels(pgm), expected)
    other_order = Image.frombytes("I;16B", (10, 6), grey.astype(">u2").tobytes())
    np.testing.assert_array_equal(pixels(other_order), expected)


def test_transparency_is_over_white(tmp_path):
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 127))
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0] * 256)
    assert (pixels(saved(tmp_path / "a.png", clear)) == 255).all()
    np.testing.assert_allclose(pixels(half)[0, 0], (255, 128, 128), atol=1)
    assert (pixels(saved(tmp_path / "b.png", palette, transparency=0)) == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_image_upright(tmp_path, rgb, orientation):
    # Store the picture as a turned camera does: apply the inverse of the viewer's rotation.
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = rgb.transpose(turns[orientation]) if orientation > 1 else rgb
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(pixels(saved(tmp_path / "a.png", stored, exif=exif)), COLOURS)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_of_animations_the_first_frame_is_used_with_a_warning(tmp_path, rgb, caplog, suffix):
    second = Image.new("RGB", rgb.size, "white")
    options = {"lossless": True} if suffix == "webp" else {}
    path = saved(tmp_path / f"a.{suffix}", rgb, save_all=True, append_images=[second], **options)
    np.testing.assert_allclose(pixels(path), COLOURS, atol=2)
    assert f"{path} has several frames: the first is used" in caplog.text


def encoded(kind: str, n: int | None = None) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, kind)
    return buffer.getvalue()[:n]


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "tiff", "webp"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_truncated_files_are_named(tmp_path, kind, share):
    whole = encoded(kind)
    path = tmp_path / f"cut.{kind}"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match="damaged") as caught:
        Picture.of(path).open()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_corrupt_files_never_crash(tmp_path, kind):
    whole, rng = encoded(kind), np.random.default_rng(1)
    path = tmp_path / f"bad.{kind}"
    refused = []
    for _ in range(40):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 200):
            data[place] = rng.integers(256)
        path.write_bytes(data)
        try:
            assert Picture.of(path).open().mode == "RGB"
        except ValueError as error:
            refused.append(str(error))
    assert refused
    assert all(str(path) in message for message in refused)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: it has 0 bytes"),
        (b"hello", "is not an image"),
        (b"GIF89a", "is not an image"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_images(tmp_path, data, message):
    path = tmp_path / "x.png"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        check_images([path])
    assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        check_images([tmp_path])  # a folder


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_pipes_and_devices_are_not_read(tmp_path, kind):
    """A pipe may never have a writer, and a device may have no end."""
    path = tmp_path / "a" / "x.png"
    path.parent.mkdir()
    path.symlink_to("/dev/null") if kind == "device" else os.mkfifo(path)
    with pytest.raises(ValueError, match=r"x\.png cannot be read: it is no file"):
        Picture.of(path)
    with pytest.raises(ValueError, match=r"x\.png cannot be read: it is no file"):
        read_folder(tmp_path)


def png_of_size(width: int, height: int) -> bytes:
    """Return a small PNG file that says it is large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(("width", "height"), [(8001, 8000), (10_000, 10_000), (60_000, 60_000)])
def test_decompression_bombs_are_refused_by_their_header(tmp_path, width, height):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_of_size(width, height))
    with pytest.raises(ValueError, match=f"the limit is {MAX_PIXELS:,}") as caught:
        Picture.of(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (np.zeros((0, 5, 3), np.uint8), ValueError, "^image 0 of X must have pixels, got 5 x 0"),
        (Image.new("RGB", (0, 3)), ValueError, "^image 0 of X must have pixels, got 0 x 3"),
        (np.zeros((3, 8, 8), np.uint8), ValueError, r"\[height, width\] or .*, got \[3, 8, 8\]"),
        (np.zeros((2, 8, 8, 3), np.uint8), ValueError, r"got \[2, 8, 8, 3\]"),
        (np.zeros(8, np.uint8), ValueError, r"got \[8\]"),
        (np.full((4, 4), 300, np.int64), ValueError, "got int64 from 300 to 300"),
        (np.full((4, 4), 1.5), ValueError, "floats from 0 to 1, got float64 from 1.5 to 1.5"),
        (np.full((4, 4), np.nan), ValueError, "got float64 from nan to nan"),
        (np.full((4, 4), "a"), TypeError, "image 0 of X must be uint8, .* got <U1"),
        (3, TypeError, "image 0 of X must be a path, a PIL image or an array, got int"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_what_is_no_image_is_refused(source, error, message):
    with pytest.raises(error, match=message):
        check_images([source])


@pytest.mark.parametrize(
    ("several", "error", "message"),
    [
        ("a.png", TypeError, "X must be a list of images, got one: put it in a list"),
        (COLOURS, TypeError, "got one"),
        (Image.fromarray(COLOURS), TypeError, "got one"),
        (7, TypeError, "X must be a list of images, got int"),
        ([], ValueError, "X must be a list of images, got none"),
    ],
)
def test_several_images_are_asked_for(several, error, message):
    with pytest.raises(error, match=message):
        check_images(several)


def test_a_batch_of_arrays_is_several_images():
    assert len(check_images(np.zeros((2, 8, 8, 3), np.uint8))) == 2


def test_pictures_are_equal_if_they_hold_the_same(tmp_path, rgb):
    a, b = saved(tmp_path / "a.png", rgb), tmp_path / "b.png"
    shutil.copy(a, b)
    other = saved(tmp_path / "c.png", rgb.rotate(180))
    same = Picture.of(a), Picture.of(b)
    assert same[0] == same[1]
    assert len({*same, Picture.of(other)}) == 2
    assert Picture.of(COLOURS) == Picture.of(rgb) != Picture.of(COLOURS[:, ::-1])
    # The same bytes in another shape are another image.
    assert Picture.of(np.zeros((4, 9), np.uint8)) != Picture.of(np.zeros((9, 4), np.uint8))


@pytest.fixture
def photos(tmp_path, rgb):
    for label, suffix in (("cat", "png"), ("dog", "JPG"), ("dog/puppies", "gif")):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for k in range(2):
            rgb.rotate(90 * k).save(tmp_path / "photos" / label / f"{k}.{suffix}")
    return tmp_path / "photos"


def test_a_folder_of_classes(photos, caplog):
    found = read_folder(photos)
    assert [str(path.relative_to(photos)) for path in found.paths] == [
        "cat/0.png",
        "cat/1.png",
        "dog/0.JPG",
        "dog/1.JPG",
        "dog/puppies/0.gif",
        "dog/puppies/1.gif",
    ]
    assert found.labels == ["cat"] * 2 + ["dog"] * 4
    assert found.skipped == []
    assert caplog.text == ""


def test_other_files_of_a_folder_are_named_and_left_out(photos, rgb, caplog):
    (photos / "cat" / "notes.txt").write_text("x")
    (photos / "cat" / "._0.png").write_bytes(b"x")
    rgb.save(photos / "outside.png")
    with caplog.at_level(logging.WARNING):
        found = read_folder(photos)
    assert len(found.paths) == 6
    assert {path.name for path in found.skipped} == {"notes.txt", "._0.png", "outside.png"}
    assert "3 files of" in caplog.text
    assert all(str(path) in caplog.text for path in found.skipped)


def test_files_called_images_that_are_none_are_refused(photos):
    (photos / "cat" / "bad.png").write_text("x")
    with pytest.raises(ValueError, match=r"bad.png is not an image that can be read, .*: remove it from"):
        read_folder(photos)
    (photos / "cat" / "empty.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="1 more like it"):
        read_folder(photos)


def test_two_classes_or_more_are_needed(photos):
    shutil.rmtree(photos / "dog")
    with pytest.raises(ValueError, match="two classes or more, got images only in cat"):
        read_folder(photos)
    shutil.rmtree(photos / "cat")
    with pytest.raises(ValueError, match="got no images in them"):
        read_folder(photos)
    with pytest.raises(ValueError, match="is not a folder of images"):
        read_folder(photos / "elsewhere")


def chunk_of_png(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def between(kind: str, place: int, parts: bytes) -> bytes:
    """Return a small image with some bytes put into it."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, kind)
    data = buffer.getvalue()
    place = data.index(b",") if kind == "gif" else place  # the first byte of a frame
    return data[:place] + parts + data[place:]


TAGS = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
TAGS += [(273, 4, 1, 8), (277, 3, 1, 1), (278, 4, 1, 8), (279, 4, 1, 64)]


def small_tiff(*more) -> bytes:
    """Return a TIFF file of 32 bit with some more entries in its directory."""
    entries = [*TAGS, *more]
    listed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + listed + bytes(4)


def tiff_of(n: int, *more) -> bytes:
    """Return a TIFF file of 64 bit with n empty entries in its directory, and some more."""
    entries = [*TAGS, *more, *[(60000, 1, 1, 0)] * n]
    listed = b"".join(struct.pack("<HHQQ", *entry) for entry in entries)
    return b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, len(entries)) + listed + bytes(8)


N_PARTS = 20_000
MANY_PARTS = {
    "png-private-chunks": lambda: between("png", 33, chunk_of_png(b"prVt") * N_PARTS),
    "png-texts": lambda: between("png", 33, chunk_of_png(b"tEXt", b"a\0b") * N_PARTS),
    "png-empty-pixels": lambda: between("png", 33, chunk_of_png(b"IDAT") * N_PARTS),
    "png-chunks-at-the-end": lambda: between("png", -12, chunk_of_png(b"tEXt", b"a\0b") * N_PARTS),
    "gif-comments": lambda: between("gif", 0, b"\x21\xfe\x01a\x00" * N_PARTS),
    "gif-one-long-comment": lambda: between("gif", 0, b"\x21\xfe" + b"\x01a" * N_PARTS + b"\0"),
    "gif-padding": lambda: between("gif", 0, b"\0" * N_PARTS),
    "jpeg-segments": lambda: between("jpeg", 2, b"\xff\xe5\x00\x02" * N_PARTS),
    "jpeg-comments": lambda: between("jpeg", 2, b"\xff\xfe\x00\x02" * N_PARTS),
    "jpeg-padding": lambda: between("jpeg", 2, b"\xff" * N_PARTS),
    "ppm-comment": lambda: between("ppm", 3, b"#" + b"a" * N_PARTS + b"\n"),
    "ppm-comments": lambda: between("ppm", 3, b"#\n" * N_PARTS),
    "tiff-tags": lambda: tiff_of(N_PARTS),
}


@pytest.mark.parametrize("case", MANY_PARTS)
def test_files_of_many_parts_are_refused(case):
    with pytest.raises(ValueError, match="too many parts"):
        Picture.of(MANY_PARTS[case]()).open()


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize(
    ("tag", "kind"), [(273, 4), (324, 4), (282, 5)], ids=["strips", "tiles", "rationals"]
)
def test_tags_of_very_many_numbers_are_refused_before_they_are_read(tag, kind, big):
    """Pillow reads each number in Python: 10 MB of places of tiles took half a minute and a gigabyte."""
    data = tiff_of(0, (tag, kind, 100_000, 8)) if big else small_tiff((tag, kind, 100_000, 8))
    with pytest.raises(ValueError, match="header of too many parts"):
        Picture.of(data + bytes(800_000))


def test_tags_of_many_bytes_are_read():
    assert Picture.of(small_tiff((34675, 7, 100_000, 8)) + bytes(100_000)).open().size == (8, 8)


def exif_of(*tags) -> bytes:
    listed = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + listed + bytes(4)


def test_long_exif_data_are_not_written_again():
    tags = exif_of((0x0112, 3, 1, 6), (0x011A, 5, 500_000, 38)) + struct.pack("<I", 1) * 1_000_000
    picture = Picture.of(between("png", 33, chunk_of_png(b"eXIf", tags)))
    started = time.process_time()
    assert picture.open().size == (8, 8)
    assert time.process_time() - started < 0.5


def test_damaged_tags_do_not_fill_the_log():
    """There would be one line in the log for each tag."""
    tags = exif_of(*[(tag, 5, 3, 2**31) for tag in range(1000)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert Picture.of(between("png", 33, chunk_of_png(b"eXIf", tags))).open().size == (8, 8)
    assert told == []


def test_photos_of_many_parts_are_read():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (600, 800, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    noise.save(buffer, "png")
    data = buffer.getvalue()  # the parts of 8 KB or more that Pillow writes are cut into parts of 1 KB
    chunks, place = [], 8
    while place < len(data):
        size, kind = int.from_bytes(data[place : place + 4]), data[place + 4 : place + 8]
        content = data[place + 8 : place + 8 + size]
        cut = range(0, max(size, 1), 1024)
        chunks += [chunk_of_png(kind, content[k : k + 1024] if kind == b"IDAT" else content) for k in cut]
        place += 12 + size
    assert len(chunks) > 1000
    assert np.array_equal(np.asarray(Picture.of(data[:8] + b"".join(chunks)).open()), np.asarray(noise))


def test_jpeg_files_of_many_scans_are_refused():
    buffer = io.BytesIO()
    Image.new("L", (4000, 4000)).save(buffer, "jpeg", progressive=True)
    data = buffer.getvalue()
    assert Picture.of(data).open().size == (4000, 4000)
    last = data.rindex(b"\xff\xda")
    bomb = data[:-2] + data[last:-2] * 60 + data[-2:]
    with pytest.raises(ValueError, match=r"6\d scans of 4000 x 4000 pixels, too many"):
        Picture.of(bomb).open()


def test_formats_that_are_slow_to_decode_are_refused():
    with pytest.raises(ValueError, match="decimal numbers"):
        Picture.of(b"P3\n2 2\n255\n" + b"1 " * 12)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG2000")
    with pytest.raises(ValueError, match="not an image that can be read"):
        Picture.of(buffer.getvalue())


def test_frames_of_an_animation_are_not_counted(monkeypatch):
    from PIL.GifImagePlugin import GifImageFile

    buffer = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (k, 0, 0)) for k in range(50)]
    frames[0].save(buffer, "gif", save_all=True, append_images=frames[1:])
    seen = []
    seek = GifImageFile._seek
    monkeypatch.setattr(
        GifImageFile, "_seek", lambda self, k, *rest: (seen.append(k), seek(self, k, *rest))[1]
    )
    Picture.of(buffer.getvalue()).open()
    assert max(seen) <= 1
