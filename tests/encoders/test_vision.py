"""Frozen vision encoders: all hidden states of all patches, places of patches, no effect of the batch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.helpers.tiny_vision import KINDS, save_tiny_vision
from vecroute.encoders import VisionEncoder, finding
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.features import Features
from vecroute.io.images import Picture, check_images


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {kind: save_tiny_vision(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def vit(folders):
    return folders["vit"]


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth random colours."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


PHOTOS = [
    photo(40, 30, 0),
    photo(16, 16, 1),
    photo(90, 200, 2),
    photo(1, 1, 3),
    photo(3, 7, 4),
    photo(64, 3, 5),
]


def change(folder: str, to: Path, **fields) -> str:
    """Return a copy of a saved model with another image processor."""
    to.mkdir()
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    path = to / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(to)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_what_transformers_gives(folders, kind):
    encoder = VisionEncoder(folders[kind])
    model = transformers.AutoModel.from_pretrained(folders[kind]).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folders[kind], backend="pil")
    for image, hidden in zip(PHOTOS, encoder.encode(PHOTOS), strict=True):
        with torch.no_grad():
            given = processor(image, return_tensors="pt")
            states = model(**given, output_hidden_states=True).hidden_states
        by_hand = torch.stack(states, 2)[0]  # [n_pos, depth, d_emb]
        assert hidden.shape == (16 + KINDS[kind][3], 3, 16) == (encoder.n_pos, encoder.depth, encoder.d_emb)
        torch.testing.assert_close(hidden, by_hand, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_gives_the_same_alone_in_a_batch_and_in_any_order(folders, kind):
    encoder = VisionEncoder(folders[kind])
    together, backwards = encoder.encode(PHOTOS), encoder.encode(PHOTOS[::-1])[::-1]
    seen = encoder.tokenize(PHOTOS)
    small = list(encoder.batches(seen, batch_positions=50))
    assert max(len(batch.which) for batch in small) == 50 // encoder.n_pos
    assert [k for batch in small for k in batch.which] == list(range(len(PHOTOS)))
    for k, image in enumerate(PHOTOS):
        (alone,) = encoder.encode([image])
        torch.testing.assert_close(together[k], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backwards[k], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_known_and_can_be_left_out(folders, kind):
    n_special = KINDS[kind][3]
    with_special = VisionEncoder(folders[kind])
    without = VisionEncoder(folders[kind], special_tokens=False)
    patches = with_special.patches((40, 30))
    assert patches.special == [True] * n_special + [False] * 16
    assert without.patches((40, 30)).special == [False] * 16
    names = {"deit": ["[CLS]", "[DIST]"], "registers": ["[CLS]", "[REG]", "[REG]", "[REG]"], "siglip": []}
    assert patches.names[:n_special] == names.get(kind, ["[CLS]"])
    assert patches.names[n_special:][:2] == ["row 1, column 1", "row 1, column 2"]
    torch.testing.assert_close(without.encode(PHOTOS)[2], with_special.encode(PHOTOS)[2][n_special:])
    assert (with_special.key == without.key) is False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(160, 120), (120, 160), (161, 87), (48, 48), (96, 1000)])
def test_boxes_are_where_patches_see_the_image(folders, kind, size):
    """A bright spot in the middle of a box changes what the model sees most in the patch of that box."""
    encoder = VisionEncoder(folders[kind])
    patches = encoder.patches(size)
    content = [box for box, special in zip(patches.boxes, patches.special, strict=True) if not special]
    assert patches.grid == (4, 4)
    dark = np.zeros((size[1], size[0], 3), np.uint8)
    ground = encoder.pixels([Picture.of(dark)])[0]  # [3, 16, 16]
    for k in (0, 3, 5, 10, 12, 15):
        left, top, right, bottom = content[k]
        spot = dark.copy()
        x, y, w, h = (left + right) / 2, (top + bottom) / 2, (right - left) / 4, (bottom - top) / 4
        spot[round(y - h) : round(y + h) + 1, round(x - w) : round(x + w) + 1] = 255
        difference = (encoder.pixels([Picture.of(spot)])[0] - ground).abs().sum(0)  # [16, 16]
        by_patch = difference.reshape(4, 4, 4, 4).sum((1, 3)).flatten()  # [16]
        assert by_patch.argmax() == k
        assert by_patch[k] > 0.6 * by_patch.sum()


def test_boxes_of_resized_and_cropped_images(folders):
    # The whole image, stretched.
    whole = VisionEncoder(folders["vit"], special_tokens=False).patches((80, 40)).boxes
    assert whole[0] == (0, 0, 20, 10)
    assert whole[-1] == (60, 30, 80, 40)
    # 80 x 40 becomes 40 x 20, and the middle 16 x 16 are used: from 12 to 28, and from 2 to 18.
    middle = VisionEncoder(folders["dinov2"], special_tokens=False).patches((80, 40)).boxes
    assert middle[0] == (24, 4, 32, 12)
    assert middle[-1] == (48, 28, 56, 36)


def test_boxes_of_images_that_are_padded(folders, tmp_path):
    # 8 x 8 pixels are put in the middle of 16 x 16, so that the patches of the border see nothing of them.
    encoder = VisionEncoder(
        change(folders["dinov2"], tmp_path / "small", size={"shortest_edge": 8}), special_tokens=False
    )
    boxes = np.array(encoder.patches((80, 80)).boxes)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    assert areas.reshape(4, 4).tolist() == [[0] * 4, [0, 1600, 1600, 0], [0, 1600, 1600, 0], [0] * 4]
    assert boxes[5].tolist() == [0, 0, 40, 40]


def test_depths_can_be_chosen(vit):
    whole, some = VisionEncoder(vit), VisionEncoder(vit, depths=[-1, 0])
    assert some.depths == [2, 0]
    torch.testing.assert_close(some.encode(PHOTOS)[0], whole.encode(PHOTOS)[0][:, [2, 0]])
    assert some.key != whole.key
    with pytest.raises(ValueError, match="depths must be numbers from -3 to 2"):
        VisionEncoder(vit, depths=[3])


def test_it_is_frozen_and_keeps_no_graph(vit):
    encoder = VisionEncoder(vit)
    assert not encoder.model.training
    assert not any(parameter.requires_grad for parameter in encoder.model.parameters())
    assert not encoder.encode(PHOTOS)[0].requires_grad


def test_a_loaded_model_and_processor_give_the_same(vit):
    model = transformers.AutoModel.from_pretrained(vit).train()
    processor = transformers.AutoImageProcessor.from_pretrained(vit, backend="pil")
    encoder = VisionEncoder(model, processor=processor)
    assert not model.training
    torch.testing.assert_close(encoder.encode(PHOTOS)[0], VisionEncoder(vit).encode(PHOTOS)[0])
    model.config.patch_size = 8  # a position sees patches of another size
    with pytest.raises(ValueError, match="must give a hidden state for each patch"):
        VisionEncoder(model, processor=processor)


def test_of_a_model_of_texts_and_images_the_part_for_images_is_used(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    config = transformers.SiglipConfig(
        text_config={**sizes, "vocab_size": 9}, vision_config={**sizes, "image_size": 16, "patch_size": 4}
    )
    transformers.SiglipModel(config).save_pretrained(tmp_path)
    transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    encoder = VisionEncoder(str(tmp_path))
    assert encoder.encode(PHOTOS)[0].shape == (16, 3, 16)


def test_the_key_changes_with_weights_and_processor(vit, tmp_path):
    same, other = VisionEncoder(vit), VisionEncoder(save_tiny_vision(tmp_path / "other", seed=1))
    changed = VisionEncoder(change(vit, tmp_path / "changed", image_mean=[0.4, 0.5, 0.5]))
    assert same.key == VisionEncoder(vit).key
    assert len({same.key, other.key, changed.key}) == 3
    assert same.weights_sha256 == changed.weights_sha256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": {"shortest_edge": 16}}, "images of different shapes become"),
        ({"size": {"height": 20, "width": 20}}, "does not take what its image processor makes"),
        ({"size": {"shortest_edge": 16, "longest_edge": 20}}, "it resizes to"),
        ({"size": {"longest_edge": 20}}, "it resizes to"),
        ({"do_pad": True}, "it pads"),
        ({"do_resize": False}, "images of different shapes become"),
    ],
)
def test_image_processors_that_do_not_fit_are_refused(vit, tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        VisionEncoder(change(vit, tmp_path / "changed", **fields))


def test_other_encoders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="could not be loaded"):
        VisionEncoder(str(tmp_path / "nowhere"))
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=2
    )
    transformers.SwinModel(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must give a hidden state for each patch, at every depth"):
        VisionEncoder(str(tmp_path))


def test_missing_weights_are_refused(vit, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = change(vit, tmp_path / "cut")
    weights = load_file(f"{folder}/model.safetensors")
    for name in [name for name in weights if "layernorm" in name and "layer.1." in name]:
        del weights[name]
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 4 of its weights"):
        VisionEncoder(folder)


def test_images_too_long_to_be_resized_are_refused_before(folders, monkeypatch):
    monkeypatch.setattr("vecroute.encoders.vision.MAX_PIXELS", 10_000_000)
    encoder = VisionEncoder(folders["dinov2"])
    long = Image.new("RGB", (30_000, 1))
    with pytest.raises(ValueError, match=r"image 0 of X has 30000 x 1 pixels, which .* to 600000 x 20"):
        encoder.encode([long])


def test_no_images(vit):
    encoder = VisionEncoder(vit)
    assert encoder.tokenize([]) == []
    assert encoder.encode([]) == []


def test_hidden_states_are_cached_by_what_an_image_holds(vit, tmp_path, monkeypatch):
    encoder = VisionEncoder(vit)
    files = [tmp_path / f"{k}.png" for k in range(3)]
    for file, image in zip(files, PHOTOS, strict=False):
        image.save(file)
    files[2].write_bytes(files[0].read_bytes())  # the same image again
    pictures = check_images([*files, *PHOTOS])
    cache = FeatureCache(tmp_path / "cache", encoder.key)
    features = Features(encoder, pictures, cache)
    assert features.lengths == [17] * 9
    assert features.prepare() == 0
    assert len(list((tmp_path / "cache").glob("*/*.safetensors"))) == 1
    expected = encoder.encode(pictures)
    monkeypatch.setattr(encoder, "_run", None)  # nothing is computed again
    again = Features(encoder, pictures, FeatureCache(tmp_path / "cache", encoder.key))
    hidden, mask = again.batch(range(9))
    assert mask.all()
    torch.testing.assert_close(hidden.float(), torch.stack(expected), rtol=1e-3, atol=1e-2)
    assert len({cache.get(picture.key).data_ptr() for picture in pictures[:3]}) == 2


def test_the_encoder_of_the_package_is_found_and_checked(monkeypatch, tmp_path):
    folder = finding.VIT_FOLDER
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
    card = (folder / "README.md").read_text()
    assert all(
        said in card for said in ("CIFAR-10, without their labels", "vecroute project trained", "date")
    )
    encoder = VisionEncoder("vit-cifar10")
    assert (encoder.name, encoder.grid, encoder.depth, encoder.d_emb) == ("vit-cifar10", (8, 8), 13, 192)
    assert encoder.encode([photo(50, 40)])[0].shape == (65, 13, 192)
    monkeypatch.setattr(finding, "VIT_SHA256", "0" * 64)
    with pytest.raises(
        ValueError, match=r"'vit-cifar10'.*has sha256 c179.*expected 0000.*reinstall vecroute"
    ):
        VisionEncoder("vit-cifar10")
    monkeypatch.setattr(finding, "VIT_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"'vit-cifar10'.* is missing; reinstall vecroute"):
        VisionEncoder("vit-cifar10")
