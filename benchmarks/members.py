"""Do members pay on little data? ``python benchmarks/members.py --data DATA``, on a CPU.

Heads with one and with several members learn from the same few texts, by the recipe of ``RoutingClassifier``,
and predict dev texts. Beside them stands logistic regression on the means of all layers. A row has accuracy,
calibration error, and how well the explanations of two seeds agree (rank correlation over the tokens, mean
over texts and pairs of seeds). ``--time`` measures forward + backward and ``predict_proba`` instead. Rows
are appended to members.csv and members_time.csv.
"""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import common
import corpora
import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import vecroute as vr
from vecroute.classifier.fitting import features_of, recipe_for
from vecroute.classifier.parts import new_head
from vecroute.heads.pooling import masked_mean
from vecroute.training import Task, make_accelerator, train
from vecroute.training.evaluation import calibration_error

HEADS: dict[str, dict[str, Any] | None] = {
    "1 member": {"n_members": 1},
    "3 members": {"n_members": 3},
    "logistic regression": None,
}
EXPLAINED = 60  # dev texts whose explanations are compared
BATCH = 32


def load(task: str, n: int, draw: int, n_dev: int, data: Path) -> tuple[list[str], list[int], int]:
    """Return n training texts of a draw, then dev texts, their labels, and n."""
    texts, labels = corpora.load(task, "train", data, whole=True)
    dev_texts, dev_labels = corpora.load(task, "dev", data)
    order = list(range(len(texts)))
    random.Random(f"{task} {draw}").shuffle(order)
    dev_order = list(range(len(dev_texts)))
    random.Random(0).shuffle(dev_order)
    chosen, judged = order[:n], dev_order[:n_dev]
    every = [texts[k] for k in chosen] + [dev_texts[k] for k in judged]
    return every, [labels[k] for k in chosen] + [dev_labels[k] for k in judged], n


class Data:
    """The hidden states of texts, the first n to learn from and the others to predict."""

    def __init__(self, texts: list[str], labels: list[int], n: int, cache: Path | bool):
        self.classifier = vr.RoutingClassifier("minilm", cache=cache, device="cpu")
        self.features = features_of(self.classifier, texts, make_accelerator("cpu"))
        self.labels, self.n, self.n_cls = torch.tensor(labels), n, max(labels) + 1
        self.dev = list(range(n, len(texts)))

    def batches(self, which: list[int]):
        for start in range(0, len(which), BATCH):
            some = which[start : start + BATCH]
            yield some, *self.features.batch(some, torch.device("cpu"))

    def fit(self, options: dict[str, Any], seed: int, **changes: Any) -> torch.nn.Module:
        """Return a head trained on the first n texts, as ``RoutingClassifier.fit`` without validation."""
        self.classifier.set_params(head_options=options, random_state=seed, **changes)
        recipe = recipe_for(self.classifier, self.n)
        head = new_head(self.classifier, self.features.encoder, self.n_cls)
        targets = torch.nn.functional.one_hot(self.labels, self.n_cls).float()
        train(head, Task(self.features, targets, list(range(self.n)), []), recipe)
        return head.eval()

    @torch.no_grad()
    def probabilities(self, head: torch.nn.Module) -> np.ndarray:
        found = [head(x.float(), mask).softmax(-1) for _, x, mask in self.batches(self.dev)]
        return torch.cat(found).numpy()  # [n_dev, n_cls]

    def explained(self, head: Any) -> list[Tensor]:
        """Return what each token adds to the margin of the last class over the first, for some dev texts."""
        found = []
        for _, x, mask in self.batches(self.dev[:EXPLAINED]):
            values = vr.contributions(head, x.float(), self.n_cls - 1, 0, input_mask=mask).values  # [b, i]
            by_token = values.unflatten(-1, (-1, head.depth)).sum(-1)  # [b, n_pos]
            found += [row[keep][1:-1] for row, keep in zip(by_token, mask, strict=True)]
        return found

    def means(self) -> np.ndarray:
        """Return the means of all layers of every text, [n, depth d_emb]."""
        found = []
        for _, x, mask in self.batches(list(range(len(self.features)))):
            keep = mask[..., None].expand(x.shape[:-1])  # [b, n_pos, depth]
            found.append(masked_mean(x.float(), keep).flatten(1))
        return torch.cat(found).numpy()

    def logistic(self, C: float = 0.01) -> np.ndarray:
        """Return the probabilities of logistic regression on the means."""
        x = self.means()
        model = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=1000))
        return model.fit(x[: self.n], self.labels[: self.n]).predict_proba(x[self.n :])


def judge(data: Data, p: np.ndarray) -> dict[str, float]:
    right = p.argmax(-1) == data.labels[data.n :].numpy()  # [n_dev]
    found = {"accuracy": right.mean(), "confidence": p.max(-1).mean()}
    return {k: float(v) for k, v in found.items()} | {"ece": calibration_error(p.max(-1), right)}


def agreement(explained: list[list[Tensor]]) -> float | None:
    """Return the mean rank correlation between the explanations of every two seeds."""
    if len(explained) < 2:
        return None
    pairs = itertools.combinations(explained, 2)
    found = [spearmanr(a, b).statistic for one, other in pairs for a, b in zip(one, other, strict=True)]
    return float(np.nanmean(found))


def compare(task: str, n: int, draw: int, options: Any, about: dict[str, Any]) -> None:
    """Train every head with every seed on one draw of texts, and append a row for each."""
    data = Data(*load(task, n, draw, options.dev, options.data), options.cache or True)
    for name, head_options in HEADS.items():
        rows, explained = [], []
        for seed in range(options.seeds) if head_options else [0]:
            started = time.perf_counter()
            if head_options is None:
                p = data.logistic()
            else:
                head = data.fit(head_options, seed)
                p = data.probabilities(head)
                explained.append(data.explained(head))
            row = {"task": task, "texts": n, "draw": draw, "head": name, "seed": seed, **judge(data, p)}
            rows.append(row | {"seconds": time.perf_counter() - started})
        for row in rows:
            row["agreement"] = agreement(explained)
        common.append(options.results / "members.csv", [row | about for row in rows])
        means = {k: np.mean([row[k] for row in rows]) for k in ("accuracy", "confidence", "ece")}
        told = " ".join(f"{k} {v:.3f}" for k, v in means.items())
        print(f"{task} {n} draw {draw} {name}: {told} agreement {rows[0]['agreement']}", flush=True)


def measure_time(options: Any, about: dict[str, Any]) -> None:
    """Append the time of forward + backward and of ``predict_proba`` for one and for three members."""
    texts, labels = corpora.load("sst2", "dev", options.data)
    classifiers = {}
    for name, head_options in list(HEADS.items())[:2]:
        plain = {"calibrate": False, "estimate": False, "max_epochs": 1, "cache": False}
        classifier = vr.RoutingClassifier("minilm", head_options=head_options, **plain)
        classifiers[name] = classifier.fit(texts[:64], labels[:64])
    rows = []
    for b, i in ((32, 35), (32, 175), (8, 700)):
        x = torch.randn(b, i, 384)
        runs = {name: both(c.head_, x) for name, c in classifiers.items()}
        rows.append((f"forward + backward, {b} x {i} vectors", common.time_ms(runs, "cpu", options.seconds)))
    some = texts[:64]
    runs = {name: lambda c=c: c.predict_proba(some) for name, c in classifiers.items()}
    rows.append((f"predict_proba, {len(some)} sentences", common.time_ms(runs, "cpu", options.seconds)))
    for what, times in rows:
        one, three = (times[name] for name in classifiers)
        print(f"{what}: {one:.1f} ms with one member, {three:.1f} with three, ratio {three / one:.2f}")
        row = {"what": what, "one_ms": one, "three_ms": three, "ratio": three / one}
        common.append(options.results / "members_time.csv", [row | about])


def both(head: Any, x: Tensor):
    """Return a step of training without the optimizer: each member has its own inputs."""
    network, x = head.side_by_side(), x.expand(head.n_members, *x.shape).clone()

    def run() -> None:
        head.zero_grad()
        network(x).square().sum().backward()

    return run


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the texts")
    parser.add_argument("--cache", type=Path, help="folder of hidden states")
    parser.add_argument("--tasks", nargs="+", default=["sst2"], choices=["sst2", "sst5", "imdb"])
    parser.add_argument("--texts", nargs="+", type=int, default=[300, 1000, 3000])
    parser.add_argument("--draws", nargs="+", type=int, default=[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dev", type=int, default=872, help="number of dev texts")
    parser.add_argument("--time", action="store_true", help="measure times instead")
    options = parser.parse_args(arguments)
    about = common.about("cpu")
    if options.time:
        return measure_time(options, about)
    for task, n, draw in itertools.product(options.tasks, options.texts, options.draws):
        compare(task, n, draw, options, about)


if __name__ == "__main__":
    main()
