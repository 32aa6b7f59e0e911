"""Do explanations find the words that decide? ``python benchmarks/planted.py --data DATA``.

Words are planted in sentences of SST-2 at random places, and a head learns a task that these words alone
decide, so the truth is known. In ``word`` one of two words decides between two classes. In ``topics`` two of
the twelve words of a topic decide among four classes, beside one word of another topic that speaks for that
one. Rows of planted.csv say in how many test texts each method gave the planted words the most credit.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import common
import corpora
import torch

import vecroute as vr
from vecroute.encoders import TextEncoder
from vecroute.explain.attribution import Reader
from vecroute.explain.rivals import METHODS

WORDS = ("violin", "harbor")  # each is one token of MiniLM, and no sentence of SST has it
TOPICS = {
    "weather": "rain snow storm cloud wind thunder fog ice sunshine flood breeze heat",
    "kitchen": "bread cheese butter soup onion pepper salt sugar rice cake knife oven",
    "garden": "rose tulip tree grass leaf root seed soil bush lawn fence bee",
    "traffic": "train truck bus bicycle tram highway bridge tunnel engine wheel ticket station",
}
GROUP = 32  # number of texts that are explained at once


class Planted(NamedTuple):
    """A text and the words that decide its class."""

    text: str
    label: str
    words: list[str]


def plant(sentence: str, words: list[str], rng: random.Random) -> str:
    """Return the sentence with each word at a random place."""
    parts = sentence.split()
    for word in words:
        parts.insert(rng.randint(0, len(parts)), word)
    return " ".join(parts)


def make(task: str, sentences: list[str], seed: int) -> list[Planted]:
    """Return one text for each sentence, with a random class."""
    rng, made = random.Random(seed), []
    words = {topic: each.split() for topic, each in TOPICS.items()}
    known = {*WORDS, *(word for each in words.values() for word in each)}
    for sentence in sentences:
        if known & set(sentence.lower().split()):
            continue
        if task == "word":
            label = rng.choice(WORDS)
            made.append(Planted(plant(sentence, [label], rng), label, [label]))
        else:
            label, other = rng.sample(list(words), 2)
            own = rng.sample(words[label], 2)
            made.append(Planted(plant(sentence, [*own, rng.choice(words[other])], rng), label, own))
    return made


def found(reader: Reader, texts: list[Planted], classes: list[str], method: str) -> list[dict[str, Any]]:
    """Return the share of planted words among the first tokens, for each correctly classified text."""
    rows = []
    for start in range(0, len(texts), GROUP):
        group = texts[start : start + GROUP]
        tokens = reader.tokens([planted.text for planted in group])
        layout = reader.layout(tokens)
        target, other = reader.scores(layout).topk(2).indices.unbind(-1)  # [b] each
        values = METHODS[method](reader, layout, target, other).values  # [b, n_pos]
        for k, planted in enumerate(group):
            if classes[int(target[k])] != planted.label:
                continue
            ids = {reader.tokens([word])[0][0] for word in planted.words}
            order = values[k][layout.content[k]].argsort(descending=True)  # [n]
            first = [tokens[k][i] in ids for i in order[: len(ids)].tolist()]
            rows.append({"all_first": all(first), "share": sum(first) / len(first)})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--tasks", nargs="+", choices=("word", "topics"), default=["word", "topics"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--fit-texts", type=int, default=1000, help="texts that a head learns from")
    parser.add_argument("--texts", type=int, default=500, help="test texts")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["words", "states"])
    options = parser.parse_args(arguments)
    about = common.about(options.device)
    n_fit, n_test = (40, 8) if options.short else (options.fit_texts, options.texts)
    for task in options.tasks:
        for seed in options.seeds[:1] if options.short else options.seeds:
            train = make(task, sentences("train", options.data, seed)[:n_fit], seed)
            test = make(task, sentences("test", options.data, seed)[:n_test], seed + 1000)
            classifier = vr.RoutingClassifier(
                encoder=options.encoder,
                random_state=seed,
                device=options.device,
                cache=False,
                verbose=False,
                calibrate=False,
                estimate=False,
            )
            classifier.fit([planted.text for planted in train], [planted.label for planted in train])
            encoder = TextEncoder(options.encoder, device=options.device, dtype=torch.float32)
            reader = Reader(encoder, classifier.head_)
            classes = classifier.classes_.tolist()
            for method in options.methods:
                told = found(reader, test, classes, method)
                row = {
                    "task": task,
                    "seed": seed,
                    "method": method,
                    "fit_texts": len(train),
                    "texts": len(test),
                    "accuracy": len(told) / len(test),
                    "all_first": sum(row["all_first"] for row in told) / max(len(told), 1),
                    "share": sum(row["share"] for row in told) / max(len(told), 1),
                }
                common.append(options.results / "planted.csv", [row | about])
                print(
                    f"{task}, seed {seed}, {method}: planted words first in {row['all_first']:.1%}",
                    flush=True,
                )


def sentences(split: str, data: Path, seed: int) -> list[str]:
    """Return the whole sentences of SST in a random order."""
    lines = (data / "sst" / f"{split}.txt").read_text().splitlines()
    found = [corpora.phrases(line)[-1][0] for line in lines]
    random.Random(seed).shuffle(found)
    return found


if __name__ == "__main__":
    main()
