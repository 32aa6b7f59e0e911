"""Compare with the packages that people would use instead: ``python benchmarks/side_by_side.py``.

few-shot    SetFit (package setfit, its defaults) and ``RoutingClassifier`` on the same few sentences and the
            same MiniLM: test accuracy, seconds to fit, sentences per second of prediction
throughput  an attentive probe in plain PyTorch and Transformers, written as a user would, and
            ``RoutingClassifier``: sentences per second of prediction, and of training with a frozen encoder
explain     one explanation of a sentence by words and by hidden states, by captum (integrated gradients and
            LIME) and by SHAP, on one fitted classifier: seconds

The sentences are those of the demo. setfit is not one of this project's extras: install it into a folder of
its own (``pip install --no-deps --target FOLDER setfit evaluate``) and put the folder on PYTHONPATH. Rows are
appended to side_by_side.csv.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.nn.functional as nnf
from pandas import DataFrame
from torch import Tensor, nn

import vecroute as vr
from vecroute.demo import sentence_polarity
from vecroute.encoders.finding import find
from vecroute.explain.attribution import Reader
from vecroute.explain.rivals import METHODS

Row = tuple[str, str, float, str]  # what, by which package, value, unit

EXPLAINERS = {
    "words": "vecroute, words",
    "states": "vecroute, hidden states",
    "integrated gradients, margin": "captum, integrated gradients, 50 steps",
    "LIME, 500 samples": "captum, LIME, 500 samples",
    "SHAP, 50 evaluations": "shap, 50 evaluations",
    "SHAP, 500 evaluations": "shap, 500 evaluations",
}


def timed(device: str, run: Callable[..., Any], *arguments: object) -> tuple[Any, float]:
    """Return the result of a call, and its seconds."""
    start = time.perf_counter()
    result = run(*arguments)
    if common.is_cuda(device):
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def accuracy(predicted: list[str], labels: list[str]) -> float:
    return 100 * sum(map(str.__eq__, predicted, labels)) / len(labels)


# Few sentences


def few_shot(sentences: DataFrame, device: str, shots: list[int], n_test: int, seeds: int) -> list[Row]:
    """Fit on a few sentences of each class, new ones for each seed, and predict the same test sentences."""
    test = sentences.iloc[-n_test:]
    found = []
    for n in shots:
        for name, fitted in (("setfit", by_setfit), ("vecroute", by_vecroute)):
            runs = []
            for seed in range(seeds):
                drawn = sentences.iloc[:-n_test].groupby("label").sample(n, random_state=seed)
                predict, fitting = fitted(drawn, device, seed)
                predicted, predicting = timed(device, predict, test["text"].tolist())
                runs.append((accuracy(predicted, test["label"].tolist()), fitting, n_test / predicting))
            values = [statistics.mean(column) for column in zip(*runs, strict=True)]
            case = f"{n} sentences of each class, mean of {seeds} seeds"
            units = (("test accuracy", "%"), ("fit", "s"), ("predict", "texts/s"))
            for (what, unit), value in zip(units, values, strict=True):
                found.append((f"{case}: {what}", name, value, unit))
    return found


def by_setfit(drawn: DataFrame, device: str, seed: int) -> tuple[Callable[[list[str]], list[str]], float]:
    """Fit SetFit with its default arguments. Return its prediction and the seconds of fitting."""
    try:
        from datasets import Dataset
        from setfit import SetFitModel, Trainer, TrainingArguments
    except ImportError as error:
        raise SystemExit(f"few-shot needs setfit (see --help): {error}") from None
    names = sorted(set(drawn["label"]))
    data = {"text": drawn["text"].tolist(), "label": [names.index(label) for label in drawn["label"]]}
    model = SetFitModel.from_pretrained(str(find("minilm", None)), device=device)
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "save_strategy": "no", "show_progress_bar": False}
        arguments = TrainingArguments(output_dir=folder, seed=seed, **quiet)
        trainer = Trainer(model=model, args=arguments, train_dataset=Dataset.from_dict(data))
        _, fitting = timed(device, trainer.train)
    return lambda texts: [names[int(k)] for k in model.predict(texts)], fitting


def by_vecroute(drawn: DataFrame, device: str, seed: int) -> tuple[Callable[[list[str]], list[str]], float]:
    """Fit ``RoutingClassifier`` with its default arguments, and a cache that is empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"device": device, "random_state": seed, "verbose": False}
        classifier = vr.RoutingClassifier("minilm", cache=folder, **options)
        _, fitting = timed(device, classifier.fit, drawn["text"].tolist(), drawn["label"].tolist())
    classifier.set_params(cache=False)
    return lambda texts: classifier.predict(texts).tolist(), fitting


# A probe in plain PyTorch


class PlainProbe(nn.Module):
    """One learned query attends to the last hidden states of a frozen Transformer."""

    def __init__(self, device: str):
        super().__init__()
        from transformers import AutoModel, AutoTokenizer

        folder = str(find("minilm", None))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder).eval().requires_grad_(False)
        d = self.model.config.hidden_size
        self.query = nn.Parameter(torch.randn(1, 1, d))  # [1, 1, d]
        self.attend = nn.MultiheadAttention(d, 8, batch_first=True)
        self.classify = nn.Linear(d, 2)
        self.to(device)

    def forward(self, texts: list[str]) -> Tensor:
        batch = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(
            self.query.device
        )
        with torch.no_grad():
            hidden = self.model(**batch).last_hidden_state  # [b, n_pos, d]
        padding = batch["attention_mask"] == 0  # [b, n_pos]
        query = self.query.expand(len(hidden), -1, -1)  # [b, 1, d]
        pooled, _ = self.attend(query, hidden, hidden, key_padding_mask=padding)  # [b, 1, d]
        return self.classify(pooled[:, 0])  # [b, 2]

    def batches(self, texts: list[str], size: int = 32) -> list[list[str]]:
        ordered = sorted(texts, key=len)
        return [ordered[k : k + size] for k in range(0, len(texts), size)]

    @torch.inference_mode()
    def predict(self, texts: list[str]) -> None:
        for part in self.batches(texts):
            self(part).argmax(-1).tolist()

    def epoch(self, texts: list[str]) -> None:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])
        for part in self.batches(texts):
            loss = nnf.cross_entropy(
                self(part), torch.zeros(len(part), dtype=torch.long).to(self.query.device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def throughput(sentences: DataFrame, device: str, n: int, rounds: int) -> list[Row]:
    """Return sentences per second, the best of some rounds, which alternate."""
    texts, labels = sentences["text"].tolist()[:n], sentences["label"].tolist()[:n]
    probe = PlainProbe(device)
    options = {"max_epochs": 1, "cache": False, "device": device, "verbose": False, "validation_fraction": 0}
    options |= {"calibrate": False, "estimate": False}  # the probe has neither
    classifier = vr.RoutingClassifier("minilm", **options).fit(texts[:64], labels[:64])
    runs = {
        ("predict", "plain PyTorch probe"): lambda: probe.predict(texts),
        ("predict", "vecroute"): lambda: classifier.predict_proba(texts),
        ("an epoch with the encoder", "plain PyTorch probe"): lambda: probe.epoch(texts),
        ("an epoch with the encoder", "vecroute"): lambda: classifier.fit(texts, labels),
    }
    best = dict.fromkeys(runs, 0.0)
    for _ in range(rounds):
        for name, run in runs.items():
            best[name] = max(best[name], n / timed(device, run)[1])
    return [(f"{n} sentences: {what}", by, value, "texts/s") for (what, by), value in best.items()]


# Explanations


def explain(sentences: DataFrame, device: str, n: int) -> list[Row]:
    """Return the seconds of one explanation, the median over n sentences, after a warm-up on the first."""
    texts, labels = sentences["text"].tolist(), sentences["label"].tolist()
    classifier = vr.RoutingClassifier("minilm", cache=False, device=device, max_epochs=1, verbose=False)
    classifier.fit(texts[-200:], labels[-200:])
    reader = Reader(classifier.encoder_, classifier.head_)
    found = []
    for method, name in EXPLAINERS.items():
        times = []
        for text in [texts[0], *texts[:n]]:
            layout = reader.layout(reader.tokens([text]))
            target, other = reader.scores(layout).topk(2).indices.unbind(-1)  # [1] each
            times.append(timed(device, METHODS[method], reader, layout, target, other)[1])
        found.append((f"an explanation, median of {n} sentences", name, statistics.median(times[1:]), "s"))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parts = ("few-shot", "throughput", "explain")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--shots", nargs="+", type=int, default=[8, 64], help="sentences of each class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--texts", type=int, help="sentences to predict, 2048; at most 500 for few-shot and 20 to explain"
    )
    options = parser.parse_args(arguments)
    sentences = sentence_polarity().sample(frac=1, random_state=0)
    n = options.texts or (64 if options.short else 2048)
    shots, seeds = ([2], 1) if options.short else (options.shots, options.seeds)
    about = common.about(options.device)
    for part in options.parts:
        if part == "few-shot":
            rows = few_shot(sentences, options.device, shots, min(n, 500), seeds)
        elif part == "throughput":
            rows = throughput(sentences, options.device, n, 1 if options.short else 3)
        else:
            rows = explain(sentences, options.device, min(n, 2 if options.short else 20))
        for what, by, value, unit in rows:
            print(f"{what:62} {by:40} {value:10.4g} {unit}", flush=True)
        columns = ("what", "by", "value", "unit")
        common.append(
            options.results / "side_by_side.csv",
            [dict(zip(columns, row, strict=True)) | about for row in rows],
        )


if __name__ == "__main__":
    main()
