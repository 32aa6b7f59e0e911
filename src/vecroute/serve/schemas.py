"""The requests and responses of the API, as its OpenAPI description shows them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

N_FIELDS = 20  # more than any request has
# pydantic itself refuses half of a surrogate pair, which is not a character.
Text = Annotated[str, Field(min_length=1, pattern=r"\S", description="Plain text, not empty.")]
Unit = Literal["token", "word", "sentence", "chunk", "depth"]
Of = Literal["words", "states"]
ImageUnit = Literal["patch", "region", "depth"]
Box = Annotated[
    list[float], Field(min_length=4, max_length=4, description="Left, top, right, bottom in pixels.")
]


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def few_fields(cls, given: Any) -> Any:
        """Refuse many fields with one error. An error for each of 100,000 fields takes seconds."""
        if isinstance(given, dict) and len(given) > N_FIELDS:
            raise ValueError(f"at most {N_FIELDS} fields, got {len(given)}")
        return given


class PredictRequest(Asked):
    text: Text


class Choice(Asked):
    """The part of a request that says which score of a text or an image to explain."""

    output: str | None = Field(None, description="The class to explain; the predicted one if left out.")
    against: str | None = Field(
        None, description="A class whose score is subtracted, to explain what decides between the two."
    )
    margin: bool = Field(
        False, description="Subtract the score of the likeliest other class, if `against` is left out."
    )
    of: Of = Field(
        "words",
        description='"words": what each part added through the whole model; "states": what the hidden states '
        "at its position added, which have read the other positions too.",
    )
    depth: int | None = Field(
        None,
        description="Explain only what went through this hidden state, 0 for the embeddings; null for all.",
    )


class ExplainRequest(Choice):
    text: Text
    unit: Unit = Field("word", description="The unit that contributions are summed over.")


class SaveRequest(Asked):
    texts: list[Text] = Field(min_length=1, max_length=2)
    unit: Unit = "word"


class ImageQuery(Asked):
    unit: ImageUnit = Field("region", description="The unit that contributions are summed over.")


class ImageExplainQuery(Choice, ImageQuery):
    thumbnail: bool = Field(False, description="Send a small copy of the image, upright and in RGB.")


class Prediction(BaseModel):
    label: str | list[str] = Field(
        description="The most likely class; with several labels per text, all that are more likely than not."
    )
    probabilities: dict[str, float]


class Part(BaseModel):
    piece: str = Field(description="The characters of the part, or its name if it has none.")
    start: int = Field(description="First character in the text (a Unicode code point), from 0.")
    end: int = Field(description="One past the last character; equal to start if the part has none.")
    special: bool = Field(description="True if the tokenizer added it, such as [CLS].")
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
    """Rounded numbers to show, as integers in units of the last decimal.

    score = base + sum of values + rest holds exactly.
    """

    depths: DepthSums = Field(description="The same score by depth.")
    lines: list[Line] = Field(
        description="The parts that count most, then one line for all others; they add up to the score."
    )


class Shown(Account):
    """The numbers of an ``Account``, the same by depth, and the text that they explain."""

    by_depth: list[list[int]] = Field(
        description="For each part, its value split by depth; the split values add up to it."
    )
    segments: list[Segment] = Field(
        description="The whole text in order, with control characters written as escapes."
    )


class Chance(BaseModel):
    """The probability that belongs to a score, and its formula; empty if there is none."""

    what: str = ""
    percent: str = ""
    formula: str = ""
    temperature: str = ""


class Told(BaseModel):
    """The sentences with which the page introduces the numbers."""

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
    piece: str = Field(description="Name of the part, such as row 2, column 5.")
    box: Box = Field(description="The box around all patches of the part; zeros if it has none.")
    special: bool = Field(description="True if the encoder added it, such as [CLS].")
    value: float = Field(description="What it adds to the score.")


class Patch(BaseModel):
    box: Box
    part: int | None = Field(description="Index of the part that it belongs to.")


class ImageExplained(Decided):
    unit: ImageUnit
    size: list[int] = Field(description="Width and height of the image, upright.")
    grid: list[int] = Field(description="Rows and columns of patches.")
    parts: list[ImagePart]
    patches: list[Patch] = Field(description="Every patch, row by row.")
    maps: list[list[list[float]]] = Field(
        description="What each patch adds at each depth: [depth][row][column]."
    )
    shown: Account
    image: str | None = Field(description="The small copy as a data: address, if it was asked for.")


class Health(BaseModel):
    status: Literal["ok"]
    version: str
    waiting: int = Field(description="Requests in the queue.")
    capacity: int = Field(description="How many requests may wait in the queue.")


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
