"""How good and how sure are classifiers of few texts? ``python benchmarks/little_data.py --data DATA``.

Each row is one draw: a classifier fitted on n random texts of a corpus, and tested on held-out texts.

- Accuracy, beside a logistic regression on the means of all layers, whose C is chosen by cross-validation.
- Mean confidence and expected calibration error, with the temperature of the classifier and with T = 1.
- The estimate of ``fit`` with its interval, which should hold the accuracy on the held-out texts.
- Seconds of CPU time of ``fit``, and for the first draw also of ``fit`` without temperature and estimate.

Rows are appended to little_data.csv; draws that are there already are not measured again. corpora.py says
what is in DATA. Reviews are cut after 200 words. "words" are sentences without one word, which is the label.
Chance alone gives a calibration error, which falls with the number of held-out texts: about 0.02 with 2,000
texts and 0.014 with 5,000. So each corpus holds out as many as it can spare, and at least 2,000.

Several processes can divide the draws: give each a folder of its own as ``--results``, and all the same
folder as ``--claims``, after one call with ``--draws 0`` has computed the hidden states of held-out texts.
``benchmarks/merge.py`` joins their rows.
"""

import csv
import gzip
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import corpora
import numpy as np
from rows import read
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import vecroute as vr
from vecroute.classifier.compare import batches
from vecroute.classifier.predicting import scores_of_batches
from vecroute.demo.sentences import sentence_polarity
from vecroute.encoders import TextEncoder
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.features import Features
from vecroute.training.calibration import probabilities
from vecroute.training.evaluation import calibration_error

CACHE_BYTES = 60 * 1024**3
N_HELD_OUT = {"sentences": 5000, "reviews": 2000, "grades": 5000, "words": 2000, "topics": 2000}
FEWEST = 8  # texts for each class; smaller sizes are left out
N_REVIEWS, REVIEW_WORDS = 10_000, 200  # training reviews to draw from, and words of each review
REMOVED = [
    "film",
    "movie",
    "story",
    "comedy",
    "performances",
    "funny",
    "characters",
    "director",
    "drama",
    "love",
    "life",
    "time",
]
TOPICS = {
    "cooking": "oven onion recipe simmer butter dough",
    "gardening": "soil seeds hedge roses compost prune",
    "sailing": "harbour mast anchor tide rudder sails",
    "chess": "bishop checkmate opening pawn endgame castling",
    "astronomy": "telescope comet orbit nebula galaxy eclipse",
    "banking": "loan mortgage deposit interest overdraft account",
    "football": "goalkeeper penalty midfield striker corner referee",
    "medicine": "dose fever surgeon diagnosis ward antibiotic",
    "law": "verdict appeal witness judge contract lawsuit",
    "music": "violin chord melody orchestra rhythm soprano",
    "painting": "canvas brush portrait pigment fresco sketch",
    "farming": "tractor harvest barley cattle plough barn",
    "aviation": "runway cockpit altitude turbulence wing takeoff",
    "weather": "drizzle thunder forecast frost humidity breeze",
    "school": "homework teacher classroom exam pupil lesson",
    "software": "compiler bug function server variable release",
    "railways": "platform locomotive signal carriage timetable track",
    "fashion": "dress fabric collar tailor sleeve runway",
    "mining": "shaft ore tunnel drill quarry coal",
    "voting": "ballot candidate parliament campaign poll senate",
}
FRAMES = (
    "Yesterday we spoke about the {} for a while, and then about the {}.",
    "She forgot the {} again, but nobody minded because of the {}.",
    "There is nothing wrong with a {} if the {} is good.",
    "He asked twice whether the {} or the {} came first.",
    "Most people I know never think of the {}, let alone the {}.",
)

Labelled = tuple[list[str], list[Any]]


def sentences(data: Path) -> tuple[Labelled, Labelled]:
    """Return the whole sentences of all splits of SST-2."""
    return halves(whole_sentences("sst2", data), N_HELD_OUT["sentences"])


def grades(data: Path) -> tuple[Labelled, Labelled]:
    """Return the whole sentences of all splits of SST-5."""
    return halves(whole_sentences("sst5", data), N_HELD_OUT["grades"])


def whole_sentences(task: str, data: Path) -> list[tuple[str, int]]:
    """Return each distinct sentence and its label."""
    splits = [corpora.load(task, split, data, whole=True) for split in ("train", "dev", "test")]
    return list(dict(pair for split in splits for pair in zip(*split, strict=True)).items())


def reviews(data: Path) -> tuple[Labelled, Labelled]:
    """Return IMDB, with the first words of each review."""
    found = []
    for split, n in (("train", N_REVIEWS), ("test", N_HELD_OUT["reviews"])):
        with gzip.open(data / "imdb" / f"{split}.csv.gz", "rt", newline="") as file:
            rows = list(csv.DictReader(file))
        random.Random(0).shuffle(rows)
        texts = [" ".join(row["text"].split()[:REVIEW_WORDS]) for row in rows[:n]]
        found.append((texts, [row["label"] for row in rows[:n]]))
    return found[0], found[1]


def words(data: Path) -> tuple[Labelled, Labelled]:
    """Return sentences of reviews with exactly one of some words. The word is removed, and is the label."""
    rows = []
    for text in sentence_polarity()["text"]:
        parts = text.split()
        there = [k for k, part in enumerate(parts) if part.lower() in REMOVED]
        if len(there) == 1 and len(parts) > 5:
            rows.append((" ".join(parts[: there[0]] + parts[there[0] + 1 :]), parts[there[0]].lower()))
    return halves(rows, N_HELD_OUT["words"])


def topics(data: Path) -> tuple[Labelled, Labelled]:
    """Return made-up sentences with two words of one of twenty topics."""
    rows = []
    for label, named in TOPICS.items():
        pairs = [(a, b) for a in named.split() for b in named.split() if a != b]
        rows += [(frame.format(a, b), label) for a, b in pairs for frame in FRAMES]
    return halves(rows, N_HELD_OUT["topics"])


def halves(rows: list[tuple[str, Any]], n_held_out: int) -> tuple[Labelled, Labelled]:
    """Divide shuffled rows into those to draw from and those held out."""
    random.Random(0).shuffle(rows)
    texts, labels = [text for text, _ in rows], [label for _, label in rows]
    return (texts[n_held_out:], labels[n_held_out:]), (texts[:n_held_out], labels[:n_held_out])


CORPORA = {"sentences": sentences, "reviews": reviews, "grades": grades, "words": words, "topics": topics}


class Corpus:
    """The texts of a corpus and their hidden states."""

    def __init__(self, name: str, data: Path, encoder: TextEncoder, cache: Path):
        (texts, labels), (tested, truth) = CORPORA[name](data)
        self.name, self.encoder, self.cache = name, encoder, cache
        self.texts, self.labels = np.array(texts, dtype=object), np.array(labels).astype(str)
        self.n_cls = len(np.unique(self.labels))
        self.held_out = self.features(tested)
        self.truth = np.array(truth).astype(str)
        self.means = means(self.held_out)  # [n, depth d_emb]

    def features(self, texts: Sequence[str]) -> Features:
        found = Features(self.encoder, texts, FeatureCache(self.cache, self.encoder.key, CACHE_BYTES))
        found.prepare()
        return found

    def drawn(self, n: int, draw: int) -> np.ndarray:
        """Return n random texts, drawn again until there are three or more of each class."""
        rng = np.random.default_rng([draw, n])
        while True:
            chosen = rng.choice(len(self.texts), n, replace=False)  # [n]
            found, counts = np.unique(self.labels[chosen], return_counts=True)
            if len(found) == self.n_cls and counts.min() >= 3:
                return chosen

    def measure(self, n: int, draw: int, time_alone: bool) -> dict[str, object]:
        chosen = self.drawn(n, draw)
        texts, labels = self.texts[chosen].tolist(), self.labels[chosen]
        features = self.features(texts)
        options = {"cache": self.cache, "cache_bytes": CACHE_BYTES, "random_state": draw, "verbose": False}
        classifier = vr.RoutingClassifier(self.encoder, **options)
        seconds = fit_seconds(classifier, texts, labels)
        plain = vr.RoutingClassifier(self.encoder, **options, calibrate=False, estimate=False)
        alone = fit_seconds(plain, texts, labels) if time_alone else None
        scores = scores_of_batches(classifier.head_, batches(self.held_out))  # [n, n_cls]
        right = classifier.classes_[scores.argmax(1).numpy()] == self.truth  # [n]
        T, estimate = classifier.temperature_, classifier.estimate_
        sure, plain_sure = (probabilities(scores, t).amax(1).numpy() for t in (T, 1.0))  # [n] each
        return {
            "corpus": self.name,
            "classes": len(classifier.classes_),
            "n": n,
            "draw": draw,
            "held_out": len(right),
            "accuracy": float(right.mean()),
            "logistic": logistic(means(features), labels, self.means, self.truth),
            "temperature": T,
            "confidence": float(sure.mean()),
            "calibration_error": calibration_error(sure, right),
            "confidence_at_1": float(plain_sure.mean()),
            "calibration_error_at_1": calibration_error(plain_sure, right),
            "method": estimate.method,
            "estimate": estimate.accuracy,
            "low": estimate.low,
            "high": estimate.high,
            "fit_s": seconds,
            "head_s": alone,
        }


def claimed(folder: Path | None, name: str) -> bool:
    """Return whether this process is the first to ask for a name."""
    if folder is None:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def fit_seconds(classifier: vr.RoutingClassifier, texts: list[str], labels: np.ndarray) -> float:
    started = time.process_time()
    classifier.fit(texts, labels)
    return time.process_time() - started


def means(features: Features) -> np.ndarray:
    """Return the mean over positions at each depth, [n, depth d_emb]."""
    found = np.empty((len(features), features.encoder.depth * features.encoder.d_emb))
    for batch in batches(features):
        mask = batch.mask[..., None, None]  # [b, n_pos, 1, 1]
        sums = (batch.hidden.float() * mask).sum(1) / mask.sum(1)  # [b, depth, d_emb]
        found[batch.which] = sums.flatten(1).numpy()
    return found


def logistic(x: np.ndarray, y: np.ndarray, tested: np.ndarray, truth: np.ndarray) -> float:
    """Return the accuracy of a logistic regression on standardised means."""
    folds = min(3, np.unique(y, return_counts=True)[1].min())
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    search = GridSearchCV(pipeline, {"logisticregression__C": [1e-4, 1e-3, 1e-2, 1e-1, 1.0]}, cv=folds)
    return float((search.fit(x, y).predict(tested) == truth).mean())


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--encoder", default="minilm", help="name of an encoder, or a folder with its weights"
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for the hidden states")
    parser.add_argument("--corpora", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--sizes", nargs="+", type=int, default=[16, 60, 300, 1000])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first-draw", type=int, default=0, help="number of the first draw")
    parser.add_argument("--claims", type=Path, help="folder in which processes claim draws")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no draw after this time")
    options = parser.parse_args(arguments)
    until = time.monotonic() + 60 * options.minutes
    encoder = TextEncoder(options.encoder, device=options.device)
    path = options.results / "little_data.csv"
    for name in options.corpora:
        corpus = Corpus(name, options.data, encoder, options.cache)
        for n in [n for n in options.sizes if FEWEST * corpus.n_cls <= n <= len(corpus.texts)]:
            for draw in range(options.first_draw, options.first_draw + options.draws):
                key = {"corpus": name, "n": str(n), "draw": str(draw)}
                if path.exists() and any(key.items() <= row.items() for row in read(path)):
                    continue
                if time.monotonic() > until:
                    return
                if not claimed(options.claims, f"{name}-{n}-{draw}"):
                    continue
                row = corpus.measure(n, draw, time_alone=draw == options.first_draw)
                common.append(path, [row | common.about(options.device)])
                print(" ".join(f"{key} {common.written(value)}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
