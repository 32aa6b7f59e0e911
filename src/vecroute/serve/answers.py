"""Compute the answers: predictions and explanations of texts or images in JSON types, and pages to keep."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vecroute.explain import Explanation
from vecroute.explain.html import direction, page
from vecroute.explain.image import ImageExplanation
from vecroute.explain.image_html import data_uri
from vecroute.explain.image_html import page as image_page
from vecroute.explain.shown import Shown, account, pieces, round_to_sum, shown, visible
from vecroute.explain.told import Question, asked, chance, meaning
from vecroute.io.images import Picture

N_LINES = 20  # parts that get their own line in the account of a score
N_KEPT = 16  # stored explanations, for later requests that change only the unit or the depth
N_EXAMPLES = 3
EXAMPLES = (  # shown on the page if the model has no examples of its own
    "The weather was better than we had hoped, and the train was on time.",
    "I waited for an hour, nobody came, and the coffee was cold.",
    "The report has two parts: a short summary and a long list of numbers.",
)
N_SAVED = 3  # classes on a saved page: the most likely ones
WEIGHT = 8  # cost of an explanation, in predictions
IMAGE = 1_000  # cost of a small image, in characters of text
PIXELS = 640  # pixels of a large image that cost one character; this limits the pixels decoded at a time

Sample = str | Picture


def work(sample: Sample) -> int:
    """Return the cost of classifying a sample, in characters of text."""
    return len(sample) if isinstance(sample, str) else max(IMAGE, sample.n_pixels // PIXELS)


class Predict(NamedTuple):
    text: Sample

    @property
    def texts(self) -> list[Sample]:
        return [self.text]

    @property
    def cost(self) -> int:
        return work(self.text)


class Explain(NamedTuple):
    text: Sample
    output: str | None = None  # the class, None for the predicted one
    against: str | None = None  # a class to subtract
    margin: bool = False  # whether to subtract the likeliest other class, if none is given
    unit: str = "word"
    depth: int | None = None  # None for the sum of all
    of: str = "words"  # or "states"
    thumbnail: bool = False  # whether to send a small copy of an image

    @property
    def texts(self) -> list[Sample]:
        return [self.text]

    @property
    def cost(self) -> int:
        return WEIGHT * work(self.text)


class Save(NamedTuple):
    texts: Sequence[Sample]
    unit: str = "word"

    @property
    def cost(self) -> int:
        return WEIGHT * sum(map(work, self.texts))


class Answers:
    """Answer jobs with a fitted ``RoutingClassifier`` of texts or images. Only one thread may use it."""

    def __init__(self, classifier: Any, model: str | None = None):
        self.classifier, self.model = classifier, model
        self.examples = list(getattr(classifier, "examples_", None) or EXAMPLES)[:N_EXAMPLES]
        self.labels = {str(label): label for label in classifier.classes_.tolist()}
        self.names = list(self.labels)
        self.kept: OrderedDict[tuple, Explanation] = OrderedDict()

    def answer(self, jobs: Sequence[Predict | Explain | Save]) -> list[Any]:
        """Return the answers to some jobs. Their texts or images go through the encoder together."""
        texts = list(dict.fromkeys(text for job in jobs for text in job.texts))
        found = dict(zip(texts, self.classifier.predict_proba(texts).tolist(), strict=True))  # [n_cls] each
        return [self._answer(job, [found[text] for text in job.texts]) for job in jobs]

    def _answer(self, job: Predict | Explain | Save, shares: list[list[float]]) -> Any:
        if isinstance(job, Save):
            return self._page(job, shares)
        answer = self._prediction(shares[0])
        return answer if isinstance(job, Predict) else answer | self._explanation(job, shares[0])

    def _prediction(self, shares: list[float]) -> dict[str, Any]:
        label: str | list[str] = self.names[int(np.argmax(shares))]
        if self.classifier.multi_label:
            label = [name for name, share in zip(self.names, shares, strict=True) if share > 0.5]
        return {"label": label, "probabilities": dict(zip(self.names, shares, strict=True))}

    def _explanation(self, job: Explain, shares: list[float]) -> dict[str, Any]:
        likely = [self.names[j] for j in np.argsort(-np.array(shares), kind="stable")]
        output = job.output or likely[0]
        others = [name for name in likely if name != output]
        against = job.against or (others[0] if job.margin and others else None)
        against = None if against == output else against
        names = [output] if against is None else [output, against]
        by_depth = job.of == "states" or job.depth is not None or job.unit == "depth"
        both, question = self._explain(job.text, names, job.of, by_depth), Question(output, against)
        why = asked(both, question)
        told = {"title": question.title, "meaning": meaning(why, job.unit), "chance": chance(both, question)}
        answer = {"output": output, "against": against, "of": why.of, "told": told}
        if isinstance(why, ImageExplanation):
            return answer | described_image(why, job.unit, job.depth, job.thumbnail)
        return answer | described(why, job.unit, job.depth)

    def _page(self, job: Save, shares: list[list[float]]) -> str:
        """Return one page about all texts, or one image, with the classes that are likely for any of them."""
        likely = np.argsort(-np.max(shares, 0), kind="stable")[:N_SAVED]
        names = [self.names[j] for j in likely]
        explained = [self._explain(text, names, "words", False) for text in job.texts]
        states = [self._explain(text, names, "states", True) for text in job.texts]
        if isinstance(explained[0], ImageExplanation):
            return image_page(explained[0], job.unit, states=states[0])
        return page(explained, job.unit, states=states)

    def _explain(self, text: Sample, names: Sequence[Any], of: str, by_depth: bool) -> Any:
        """Explain words, by depth or not, or hidden states, which are always explained by depth."""
        key = (getattr(text, "key", text), of, by_depth, *names)
        if key not in self.kept:
            labels = [self.labels[name] for name in names]
            options = {"by_depth": by_depth} if of == "words" else {}
            why = self.classifier.explain(text, classes=labels, of=of, **options)
            self.kept[key] = why._replace(about=why.about | ({"model": self.model} if self.model else {}))
            while len(self.kept) > N_KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key]


def described(why: Explanation, unit: str, depth: int | None) -> dict[str, Any]:
    """Turn an explanation of one output into JSON types: exact numbers, and rounded ones that add up."""
    rows, numbers, answer = accounted(why, unit, depth)
    totals = rows.totals().tolist()
    answer["parts"] = [
        {"piece": rows.label(i), "start": start, "end": end, "special": special, "value": totals[i]}
        for i, ((start, end), special) in enumerate(
            zip(rows.offsets.tolist(), rows.special.tolist(), strict=True)
        )
    ]
    answer["shown"] |= {
        "by_depth": split(rows, numbers),
        "segments": [
            {"text": visible(text), "parts": members, "runs": direction(text)}
            for text, members in pieces(rows)
        ],
    }
    return answer


def described_image(why: ImageExplanation, unit: str, depth: int | None, thumbnail: bool) -> dict[str, Any]:
    """Do the same for an image: parts have boxes in pixels, and each patch names the part it belongs to."""
    rows, _, answer = accounted(why, unit, depth)
    parts = zip(rows.pieces, rows.boxes.tolist(), rows.special.tolist(), rows.totals().tolist(), strict=True)
    cells = zip(why.tiles.reshape(-1, 4).tolist(), rows.cells.ravel().tolist(), strict=True)
    maps = [why.grid(level=level).tolist() for level in range(len(why.depths))]
    return answer | {
        "size": why.size,
        "grid": list(why.cells.shape),
        "parts": [dict(zip(("piece", "box", "special", "value"), part, strict=True)) for part in parts],
        "patches": [{"box": box, "part": part if part >= 0 else None} for box, part in cells],
        "maps": maps,
        "image": data_uri(why.image) if thumbnail else None,
    }


def accounted(why: Any, unit: str, depth: int | None) -> tuple[Any, Shown, dict[str, Any]]:
    """Return the rows of an explanation at one depth or all, their rounded numbers, and how these add up."""
    by_depth = why.aggregate("depth")
    rows = (why if depth is None else why.at_depth(depth)).aggregate(unit)
    numbers = shown(rows)
    answer = {
        "score": float(rows.scores[0]),
        "base": float(rows.base_values[0]),
        "unit": rows.unit,
        "depth": depth,
        "shown": {
            **numbers._asdict(),
            "depths": shown(by_depth, decimals=numbers.decimals)._asdict() | {"names": by_depth.pieces},
            "lines": [line._asdict() for line in account(rows, numbers, N_LINES)],
        },
    }
    return rows, numbers, answer


def split(rows: Explanation, numbers: Shown) -> list[list[int]]:
    """Split the shown number of each row by depth, so that the parts add up to it."""
    exact = rows.values[..., 0].astype(np.float64) * 10.0**numbers.decimals  # [n, depth]
    return [round_to_sum(row, total) for row, total in zip(exact.tolist(), numbers.values, strict=True)]
