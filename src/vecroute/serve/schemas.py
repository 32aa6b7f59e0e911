"""What comes in and goes out, as the OpenAPI description tells it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# No half of a surrogate pair is a character; pydantic says so by itself.
Text = Annotated[str, Field(min_length=1, pattern=r"\S", description="Plain text, not empty.")]
Unit = Literal["token", "word", "sentence", "chunk", "depth"]
Of = Literal["words", "states"]
ImageUnit = Literal["patch", "region", "depth"]
Box = Annotated[
    list[float], Field(min_length=4, max_length=4, description="Left, top, right, bottom in pixels.")
]


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PredictRequest(Asked):
    text: Text


class Choice(Asked):
    """What is explained, of a text or of an image."""

    output: str | None = Field(None, description="The class to explain; the predicted one if left out.")
    against: str | None = Field(None, description="A class to subtract: what decides between the two.")
    margin: bool = Field(False, description="Subtract the likeliest other class, if no other is given.")
    of: Of = Field(
        "words",
        description='"words": what each part added through the whole model; "states": what the hidden states '
        "at its place added, which have read the rest too.",
    )
    depth: int | None = Field(
        None, description="What went through one hidden state alone, 0 for the embeddings; else all."
    )


class ExplainRequest(Choice):
    text: Text
    unit: Unit = Field("word", description="What contributions are summed over.")


class SaveRequest(Asked):
    texts: list[Text] = Field(min_length=1, max_length=2)
    unit: Unit = "word"


class ImageQuery(Asked):
    unit: ImageUnit = Field("region", description="What contributions are summed over.")


class ImageExplainQuery(Choice, ImageQuery):
    thumbnail: bool = Field(False, description="Send a small copy of the image, upright and in RGB.")


class Prediction(BaseModel):
    label: str | list[str] = Field(
        description="The most likely class; where a text may have several, all that are likelier than not."
    )
    probabilities: dict[str, float]


class Part(BaseModel):
    piece: str = Field(description="The characters, or the name of what has none.")
    start: int = Field(description="First character in the text (a Unicode code point), from 0.")
    end: int = Field(description="One past the last; equal to start where it has no characters.")
    special: bool = Field(description="Put there by the tokenizer, not by the text.")
    value: float = Field(description="What it adds to the score.")


class Line(BaseModel):
    label: str
    value: int
    rows: list[int]
    is_sum: bool


class Segment(BaseModel):
    text: str
    parts: list[int]
    runs: str


class Sums(BaseModel):
    values: list[int]
    base: int
    rest: int
    score: int
    decimals: int


class DepthSums(Sums):
    names: list[str]


class Account(Sums):
    """Numbers to show, in whole numbers of the last decimal: score = base + sum of values + rest, exactly."""

    depths: DepthSums = Field(description="The same score by depth.")
    lines: list[Line] = Field(description="The parts that count most, then all others: together the score.")


class Shown(Account):
    """The numbers of an ``Account``, those of each depth, and the text that they are of."""

    by_depth: list[list[int]] = Field(description="The value of each part by depth; these add up to it.")
    segments: list[Segment] = Field(description="The text from end to end, control characters written out.")


class Chance(BaseModel):
    """The probability that belongs to a score, and how it is computed; empty where it is not known."""

    what: str = ""
    percent: str = ""
    formula: str = ""
    temperature: str = ""


class Told(BaseModel):
    """What the page says of the numbers."""

    title: str
    meaning: str
    chance: Chance


class Decided(Prediction):
    """score = base + sum of the values of the parts."""

    of: Of
    told: Told
    output: str
    against: str | None
    score: float = Field(description="Score of the output, minus the score of the class in `against`.")
    base: float
    depth: int | None


class Explained(Decided):
    unit: Unit
    parts: list[Part]
    shown: Shown


class ImagePart(BaseModel):
    piece: str = Field(description="Its name, such as row 2, column 5.")
    box: Box = Field(description="Around all of its patches; zeros where it has none.")
    special: bool = Field(description="Put there by the encoder, not by the image.")
    value: float = Field(description="What it adds to the score.")


class Patch(BaseModel):
    box: Box
    part: int | None = Field(description="Which of the parts it belongs to.")


class ImageExplained(Decided):
    unit: ImageUnit
    size: list[int] = Field(description="Width and height of the image, upright.")
    grid: list[int] = Field(description="Rows and columns of patches.")
    parts: list[ImagePart]
    patches: list[Patch] = Field(description="Every patch, row by row.")
    maps: list[list[list[float]]] = Field(description="What patches add at each depth, by row and column.")
    shown: Account
    image: str | None = Field(description="The copy that was asked for, as a data: address.")


class Health(BaseModel):
    status: Literal["ok"]
    version: str
    waiting: int = Field(description="Requests in the queue.")
    capacity: int = Field(description="How many may wait.")


class Known(BaseModel):
    name: str
    classes: list[str]
    depths: list[str]
    depth_numbers: list[int]
    units: list[str]
    multi_label: bool


class About(Known):
    examples: list[str] = Field(description="Texts to try.")
    max_characters: int


class ImageAbout(Known):
    max_image_bytes: int


class Problem(BaseModel):
    detail: str
