"""The server of a classifier of images: answers that add up, damaged images refused, the policy of texts."""

import base64
import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from tests.helpers.pages import Parser
from tests.helpers.served import check_sums, photo, tiny_image_classifier
from tests.io.test_images import png_of_size
from vecroute import serve
from vecroute.explain.image import ImageExplanation
from vecroute.io.images import Picture
from vecroute.serve import schemas
from vecroute.serve.answers import Answers, Explain, Predict
from vecroute.serve.app import HEADERS


def file_of(image: Image.Image, kind: str = "png", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


IMAGE = photo("red", 100)
DATA = file_of(IMAGE)
PNG = {"Content-Type": "image/png"}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return tiny_image_classifier(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def client(classifier):
    with TestClient(serve.create_app(classifier, name="<tiny>")) as client:
        yield client


def explained(client, data=DATA, **asked):
    response = client.post("/explain", content=data, headers=PNG, params=asked)
    assert response.status_code == 200, response.text
    return schemas.ImageExplained.model_validate(response.json(), strict=True).model_dump()


def test_predictions_are_those_of_the_classifier(client, classifier):
    answer = client.post("/predict", content=DATA, headers=PNG).json()
    assert list(answer["probabilities"]) == ["blue", "green", "red"]
    assert np.allclose(
        list(answer["probabilities"].values()), classifier.predict_proba([IMAGE])[0], atol=1e-6
    )
    assert answer["label"] == classifier.predict([IMAGE])[0]


@pytest.mark.parametrize("unit", ImageExplanation.units)
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_explanations_add_up(client, unit, depth):
    asked = {} if depth is None else {"depth": depth}
    answer = explained(client, unit=unit, output="green", **asked)
    answer["shown"]["by_depth"] = [[value] for value in answer["shown"]["values"]]  # only texts have it
    check_sums(answer)
    assert (answer["unit"], answer["depth"], answer["output"]) == (unit, depth, "green")
    assert (answer["size"], answer["grid"], len(answer["patches"])) == ([40, 30], [4, 4], 16)


def test_explanations_are_those_of_the_classifier(client, classifier):
    why = classifier.explain(IMAGE)
    answer = explained(client, unit="patch")
    assert answer["output"] == why.output_names[int(why.scores.argmax())] == answer["label"]
    assert [part["piece"] for part in answer["parts"]] == why.pieces
    assert np.allclose([part["value"] for part in answer["parts"]], why.totals(), atol=1e-5)
    assert np.allclose([part["box"] for part in answer["parts"]], why.boxes)
    assert [patch["part"] for patch in answer["patches"]] == list(range(1, 17))
    states = classifier.explain(IMAGE, of="states")
    maps = explained(client, unit="patch", of="states")["maps"]
    for level, found in zip(range(3), maps, strict=True):
        assert np.allclose(found, states.grid(level=level), atol=1e-5)
    regions = explained(client, unit="region")
    sums = np.zeros(len(regions["parts"]))
    for patch, part in zip(regions["patches"], answer["parts"][1:], strict=True):
        sums[patch["part"]] += part["value"]
    expected = [0.0 if part["special"] else part["value"] for part in regions["parts"]]
    assert np.allclose(sums, expected, atol=1e-5)


def test_margins_between_classes(client, classifier):
    scores = dict(zip(*(classifier.classes_, classifier.decision_function([IMAGE])[0]), strict=True))
    answer = explained(client, output="green", against="blue")
    assert answer["score"] == pytest.approx(scores["green"] - scores["blue"], abs=1e-4)
    first, second, _ = sorted(scores, key=lambda name: -scores[name])
    answer = explained(client, margin="true")
    assert (answer["output"], answer["against"]) == (first, second)


def test_a_copy_of_the_image_comes_upright_if_asked_for(client):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    wide = Image.new("RGB", (60, 30), "red")
    wide.paste("blue", (30, 0, 60, 30))
    data = file_of(wide, exif=exif)
    answer = explained(client, data, thumbnail="true")
    kind, _, content = answer["image"].partition(";base64,")
    copy = Image.open(io.BytesIO(base64.b64decode(content)))
    assert kind == "data:image/png"
    assert copy.size == tuple(answer["size"]) == (30, 60)
    assert copy.getpixel((15, 5)) == (255, 0, 0)
    assert explained(client, data)["image"] is None


@pytest.mark.parametrize(
    "data",
    [
        file_of(IMAGE, "jpeg"),
        file_of(IMAGE.convert("CMYK"), "jpeg"),
        file_of(IMAGE.convert("RGBA")),
        file_of(IMAGE.convert("P"), "gif"),
        file_of(IMAGE, "webp"),
        file_of(Image.fromarray(np.full((5, 7), 40_000, np.uint16))),
        file_of(Image.new("1", (1, 1))),
    ],
    ids=["jpeg", "cmyk", "alpha", "gif", "webp", "16 bits", "one pixel"],
)
def test_images_of_other_kinds_are_answered(client, data):
    assert client.post("/predict", content=data, headers=PNG).status_code == 200


DAMAGED = {
    "empty": b"",
    "text": b"/etc/passwd",
    "html": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "truncated png": file_of(photo("red", 1, (200, 200)))[:5000],
    "truncated jpeg": file_of(photo("red", 1, (200, 200)), "jpeg")[:700],
    "header alone": DATA[:33],
    "bomb": png_of_size(100_000, 100_000),
    "many pixels": png_of_size(9_000, 9_000),
    "no pixels": png_of_size(0, 5),
    "postscript": file_of(IMAGE, "eps"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("path", ["/predict", "/explain", "/page"])
def test_what_is_no_image_is_refused(client, name, path):
    response = client.post(path, content=DAMAGED[name], headers=PNG)
    assert response.status_code == 422
    told = {"empty": "image is empty: it has 0 bytes", "postscript": "image is not an image that can be read"}
    assert response.json()["detail"].startswith(told.get(name, "image "))
    assert "content-security-policy" in response.headers


FILES = [DATA, *(file_of(IMAGE, kind) for kind in ("jpeg", "gif", "webp", "tiff", "bmp", "ppm"))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(FILES),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=5),
    st.integers(1, 10_000),
)
def test_damaged_images_are_answered_or_refused(client, data, changes, length):
    damaged = bytearray(data)
    for place, byte in changes:
        damaged[place % len(damaged)] = byte
    response = client.post("/predict", content=bytes(damaged[:length]), headers=PNG)
    assert response.status_code in (200, 422), response.text


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "multipart/form-data; boundary=x", ""])
def test_only_images_are_taken(client, kind):
    response = client.post("/explain", content=DATA, headers={"Content-Type": kind})
    assert response.status_code == 415
    assert "must be an image" in response.json()["detail"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"unit": "word"}, "unit: Input should be 'patch', 'region' or 'depth'"),
        ({"output": "ugly"}, 'output must be one of ["blue", "green", "red"]'),
        ({"depth": 9}, "depth must be one of [0, 1, 2]"),
        ({"path": "/etc/passwd"}, "path: Extra inputs are not permitted"),
    ],
)
def test_mistakes_are_told_in_a_line(client, asked, told):
    response = client.post("/explain", content=DATA, headers=PNG, params=asked)
    assert response.status_code == 422
    assert told in response.json()["detail"]


def test_large_images_are_refused(classifier):
    limits = serve.Limits(max_image_bytes=len(DATA))
    with TestClient(serve.create_app(classifier, limits=limits)) as client:
        assert client.post("/predict", content=DATA, headers=PNG).status_code == 200
        for content in (DATA + b"x", iter([DATA, b"x"])):
            response = client.post("/predict", content=content, headers=PNG)
            assert response.status_code == 413
            assert response.json() == {"detail": f"the request must have at most {len(DATA)} bytes"}


def test_pixels_cost_so_that_few_large_images_are_decoded_together():
    small, large = (Picture.of(np.zeros((side, side, 3), np.uint8)) for side in (32, 4000))
    assert Predict(small).cost == 1000
    assert Predict(large).cost == 25_000
    assert Explain(large).cost == 200_000
    assert Predict(Picture.of(file_of(Image.new("L", (4000, 4000))))).cost == 25_000


def test_an_image_looked_at_again_is_explained_once(classifier, monkeypatch):
    calls = []
    real = type(classifier).explain
    monkeypatch.setattr(type(classifier), "explain", lambda *a, **k: (calls.append(a[1]), real(*a, **k))[1])
    answers, pictures = Answers(classifier), [Picture.of(DATA), Picture.of(DATA)]
    answers.answer([Explain(pictures[0], unit="patch"), Explain(pictures[1], unit="region")])
    assert len(calls) == 1


def test_saved_pages_need_nothing_but_themselves(client):
    response = client.post("/page", content=DATA, headers=PNG, params={"unit": "region"})
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    parsed = Parser(response.text)
    assert not {element.name for element in parsed.every} & {"script", "link", "iframe"}
    (image,) = parsed.root.all("image")
    assert image.attributes["href"].startswith("data:image/png;base64,")


def test_the_page_has_the_policy_of_texts(client):
    response = client.get("/")
    assert response.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    parsed = Parser(response.text)
    assert [script.attributes["src"] for script in parsed.root.all("script")] == ["/image.js"]
    for path in ("/image.js", "/ask.js", "/view.js", "/page.css", "/style.css"):
        assert client.get(path).status_code == 200
    names = {name for element in parsed.every for name in element.attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]


def test_the_description_of_the_api_and_the_model(client):
    api = client.get("/openapi.json").json()
    assert set(api["paths"]) == {"/predict", "/explain", "/page", "/health", "/model"}
    for path in ("/predict", "/explain", "/page"):
        asked = api["paths"][path]["post"]
        assert list(asked["requestBody"]["content"]) == ["image/*"]
        assert set(asked["responses"]) >= {"200", "413", "415", "422", "503", "504"}
    about = client.get("/model").json()
    assert (about["name"], about["classes"]) == ("<tiny>", ["blue", "green", "red"])
    assert (about["units"], about["max_image_bytes"]) == (["patch", "region", "depth"], 10_000_000)
