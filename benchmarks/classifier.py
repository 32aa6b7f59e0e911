"""Measure the speed of a text classifier: ``python benchmarks/classifier.py [--device cuda]``.

1. One epoch of training the demo's head: from cached hidden states, and with the encoder in every step.
2. Texts per second: the encoder alone (all hidden states), and ``predict_proba``.
3. Explanations of words: one by one, and in batches.

All use the sentences of the demo, by default with the encoder "minilm". Rows are appended to classifier.csv.
"""

import tempfile
import time
from collections.abc import Callable

import common
import torch

import vecroute as vr
from vecroute.demo import sentence_polarity
from vecroute.encoders import TextEncoder
from vecroute.encoders.cache import FeatureCache
from vecroute.encoders.features import Features
from vecroute.heads import make_head
from vecroute.training import Recipe, Task, make_accelerator, train

Row = tuple[str, float, str]
PARTS = ("epoch", "throughput", "explain")


def seconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if common.is_cuda(device):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def epoch(encoder: TextEncoder, texts: list[str], targets: torch.Tensor, device: str) -> list[Row]:
    """Measure one epoch each way: the best of four runs, which alternate, after a warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        cached = Features(encoder, texts, FeatureCache(folder, encoder.key))
        filling = seconds(cached.prepare, device)

        def run(features: Features, n: int) -> float:
            head = make_head("routing", seed=0, d_emb=encoder.d_emb, depth=encoder.depth, n_cls=2)
            task = Task(features, targets, list(range(n)), [])
            recipe, accelerator = Recipe(max_epochs=1), make_accelerator(device)
            return seconds(lambda: train(head, task, recipe, accelerator=accelerator), device)

        ways = {"from the cache": cached, "with the encoder": Features(encoder, texts)}
        for features in ways.values():
            run(features, min(len(texts), 64))
        times = dict.fromkeys(ways, float("inf"))
        for _ in range(4):
            for name, features in ways.items():
                times[name] = min(times[name], run(features, len(texts)))
    case, ratio = f"epoch of {len(texts)} sentences", times["with the encoder"] / times["from the cache"]
    return [
        (f"{case}: hidden states, once", filling, "s"),
        *((f"{case}: {name}", value, "s") for name, value in times.items()),
        (f"{case}: with the encoder / from the cache", ratio, "x"),
    ]


def throughput(
    encoder: TextEncoder, texts: list[str], labels: list[str], device: str, rounds: int
) -> list[Row]:
    """Measure texts per second: the best of some rounds, which alternate."""
    classifier = vr.RoutingClassifier(encoder, max_epochs=1, cache=False, device=device)
    classifier.fit(texts[:64], labels[:64])

    def bare() -> None:
        for _ in encoder.batches(encoder.tokenize(texts)):
            pass

    best = {"encoder alone": 0.0, "predict_proba": 0.0}
    for _ in range(rounds):
        for name, run in (
            ("encoder alone", bare),
            ("predict_proba", lambda: classifier.predict_proba(texts)),
        ):
            best[name] = max(best[name], len(texts) / seconds(run, device))
    case = f"{len(texts)} sentences"
    return [
        *((f"{case}: {name}", value, "texts/s") for name, value in best.items()),
        (f"{case}: predict_proba / encoder alone", best["predict_proba"] / best["encoder alone"], "x"),
    ]


def explaining(encoder: TextEncoder, texts: list[str], labels: list[str], device: str) -> list[Row]:
    """Measure explanations of words: the best of two rounds, which alternate."""
    classifier = vr.RoutingClassifier(encoder, max_epochs=1, cache=False, estimate=False, device=device)
    classifier.fit(texts[:64], labels[:64])
    some = texts[:16] if len(texts) <= 64 else texts[:256]
    ways = {
        "one by one": lambda: [classifier.explain(text) for text in some],
        "in batches": lambda: list(classifier.explain_iter(some)),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(2):
        for name, run in ways.items():
            best[name] = min(best[name], seconds(run, device))
    case = f"words of {len(some)} sentences explained"
    return [
        *((f"{case}: {name}", value, "s") for name, value in best.items()),
        (f"{case}: one by one / in batches", best["one by one"] / best["in batches"], "x"),
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--encoder", default="minilm", help="name of an encoder, or a folder with its weights"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    table = sentence_polarity().sample(frac=1, random_state=0)
    n = 64 if options.short else 2048
    texts, labels = table["text"].tolist()[:n], table["label"].tolist()[:n]
    targets = torch.tensor([[label == "negative", label == "positive"] for label in labels]).float()
    encoder = TextEncoder(options.encoder, device=options.device)
    rows = []
    if "epoch" in options.parts:
        rows += epoch(encoder, texts, targets, options.device)
    if "throughput" in options.parts:
        rows += throughput(encoder, texts, labels, options.device, rounds=2 if options.short else 3)
    if "explain" in options.parts:
        rows += explaining(encoder, texts, labels, options.device)
    for what, value, unit in rows:
        print(f"{what:70} {value:10.4g} {unit}")
    about = common.about(options.device)
    common.append(
        options.results / "classifier.csv",
        [{"what": what, "value": value, "unit": unit} | about for what, value, unit in rows],
    )


if __name__ == "__main__":
    main()
