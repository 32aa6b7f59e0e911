"""How busy is the device? ``python benchmarks/throughput.py --data DATA [--encoder FOLDER] [--parts ...]``.

- epochs: one epoch of training from cached hidden states, over 2,048 and 67,000 phrases, one member;
- fit: ``fit`` on 67,000 phrases, 3 epochs, hidden states cached, and how busy the GPU is meanwhile;
- states: the first pass over 20,000 texts, with its cache, and ``predict_proba``, next to the bare encoder
  with its own best batches;
- explain: explanations of words per second, of one margin, depths summed;
- large: states and an epoch with an encoder of 12 x 768 with random weights;
- kills: runs killed at random and resumed must end with the weights of a run that was never disturbed.

DATA is the folder that corpora.py describes; only its ``sst`` is read. An encoder's folder without weights
gets random ones, which have the same speed. Rows are appended to throughput.csv after each part.
"""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import corpora
import torch
import transformers
from torch import Tensor

import vecroute as vr
from vecroute.demo import sentence_polarity
from vecroute.encoders import TextEncoder
from vecroute.encoders.cache import GIB, FeatureCache
from vecroute.encoders.features import Features
from vecroute.encoders.finding import find
from vecroute.encoders.loading import default_dtype
from vecroute.explain.rows import chunk_step, rows_of
from vecroute.explain.text import split_texts
from vecroute.heads import make_head
from vecroute.training import Recipe, Task, make_accelerator, train
from vecroute.training.states import on_device

Row = tuple[str, float, str]
PARTS = ("epochs", "states", "explain", "large", "fit", "kills")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BATCH_POSITIONS = tuple(2**k for k in range(12, 19))  # sizes among which the bare encoder's best is searched
LARGE = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
AT_ONCE, STEPS_KILLED = 4, 1280  # runs that are killed and resumed side by side, and their steps
WORDS = 12  # words of a phrase that counts as a sentence


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def cache_of(encoder: TextEncoder) -> Iterator[FeatureCache]:
    with tempfile.TemporaryDirectory() as folder:
        yield FeatureCache(folder, encoder.key, 40 * GIB)


def encoder_of(name: str, device: str, dtype: torch.dtype | None, **sizes: int) -> TextEncoder:
    """Return an encoder. With other sizes, or if its folder has no weights, the weights are random."""
    if not sizes and not (Path(name).is_dir() and not list(Path(name).glob("*.safetensors"))):
        return TextEncoder(name, device=device, dtype=dtype)
    folder = name if Path(name).is_dir() else str(find(name, None))
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in sizes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    model.pooler = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    dtype = dtype or default_dtype(torch.device(device))
    return TextEncoder(model, tokenizer=tokenizer, device=device, dtype=dtype)


# Texts


def sentences(data: Path, n: int) -> list[str]:
    """Return n distinct texts: sentences, and if these are not enough, long phrases of sentences."""
    whole = corpora.sst(data / "sst", "train", fine=True, whole=True)[0]
    phrases = corpora.sst(data / "sst", "train", fine=True)[0]
    long = [phrase for phrase in phrases if phrase.count(" ") >= WORDS]
    texts = list(dict.fromkeys([*whole, *sentence_polarity()["text"].tolist()]))
    random.Random(0).shuffle(texts)
    texts = list(dict.fromkeys([*texts, *long]))
    return texts[:n]


def labelled_phrases(data: Path, n: int) -> tuple[list[str], list[int]]:
    """Return n distinct phrases of sentences, or fewer if there are not as many, and their two labels."""
    texts, labels = corpora.sst(data / "sst", "train", fine=False)
    order = random.Random(0).sample(range(len(texts)), min(n, len(texts)))
    return [texts[k] for k in order], [labels[k] for k in order]


# Parts


def epochs(encoder: TextEncoder, data: Path, sizes: tuple[int, ...], device: str) -> Iterator[Row]:
    """Measure epochs of training from cached hidden states, with a tenth more samples for validation."""
    for n in sizes:
        texts, labels = labelled_phrases(data, n + n // 10)
        n = min(n, len(texts) * 10 // 11)
        targets = torch.nn.functional.one_hot(torch.tensor(labels)).float()  # [n, 2]
        with cache_of(encoder) as cache:
            features = Features(encoder, texts, cache)
            features.prepare()
            yield from epochs_of(features, targets, n, device, f"{n} phrases")


def epochs_of(features: Features, targets: Tensor, n: int, device: str, case: str) -> Iterator[Row]:
    held: list[Any] = []
    filling = seconds(lambda: held.append(on_device(features, torch.device(device))))
    task = Task(held[0], targets, list(range(n)), list(range(n, len(features.texts))))

    def run(max_epochs: int, n_members: int = 1) -> float:
        sizes = {"d_emb": features.encoder.d_emb, "depth": features.encoder.depth, "n_members": n_members}
        head, recipe = make_head("routing", seed=0, n_cls=2, **sizes), Recipe(max_epochs=max_epochs)
        return seconds(lambda: train(head, task, recipe, accelerator=make_accelerator(device)))

    run(1)  # compiles kernels
    one, three = run(1), run(3)
    yield f"{case}: hidden states from the cache to the device, once", filling, "s"
    yield f"{case}: first epoch, with captures and validation", one, "s"
    yield f"{case}: later epoch, with validation", (three - one) / 2, "s"
    steps = -(-n // Recipe.batch_size)
    yield f"{case}: one step of a later epoch", 1000 * (three - one) / 2 / steps, "ms"
    if n < 10_000:
        run(1, 3)
        one, three = run(1, 3), run(3, 3)
        yield f"{case}: later epoch of three members, with validation", (three - one) / 2, "s"


def states(encoder: TextEncoder, texts: list[str], device: str, case: str) -> Iterator[Row]:
    """Measure the bare encoder, the first pass with its cache, and ``predict_proba``."""
    given = {"truncation": True, "max_length": encoder.max_length}
    tokenizing = min(seconds(lambda: encoder.tokenizer(texts, **given)) for _ in range(2))
    ids = encoder.tokenizer(texts, **given)["input_ids"]
    times = {}
    for size in BATCH_POSITIONS:
        bare(encoder, ids, size)
        times[size] = min(seconds(lambda size=size: bare(encoder, ids, size)) for _ in range(2))
    best = min(times, key=times.__getitem__)
    rates = {"bare encoder, tokens given": len(texts) / times[best]}
    rates["bare encoder, tokenizing first"] = len(texts) / (times[best] + tokenizing)
    yield f"{case}: positions per batch of the bare encoder at its best", best, "positions"
    yield f"{case}: tokenizing", len(texts) / tokenizing, "texts/s"
    first_pass(encoder, texts)  # as for the others, the first run is a warm-up
    rates["first pass with cache"] = len(texts) / min(first_pass(encoder, texts) for _ in range(2))
    classifier = vr.RoutingClassifier(encoder, max_epochs=1, cache=False, device=device, verbose=False)
    classifier.fit(texts[:64], ["a", "b"] * 32)
    classifier.predict_proba(texts)
    rates["predict_proba"] = len(texts) / min(seconds(lambda: classifier.predict_proba(texts)) for _ in "ab")
    for name, rate in rates.items():
        yield f"{case}: {name}", rate, "texts/s"
    for name in ("first pass with cache", "predict_proba"):
        for other in ("bare encoder, tokens given", "bare encoder, tokenizing first"):
            yield f"{case}: {name} / {other}", rates[name] / rates[other], "x"


def first_pass(encoder: TextEncoder, texts: list[str]) -> float:
    """Return the seconds to compute hidden states and write them into an empty cache."""
    with cache_of(encoder) as cache:
        return seconds(lambda: Features(encoder, texts, cache).prepare())


@torch.inference_mode()
def bare(encoder: TextEncoder, ids: list[list[int]], size: int) -> None:
    """Run the encoder's model on all texts, sorted by length, in batches of at most ``size`` positions."""
    order = sorted(range(len(ids)), key=lambda k: -len(ids[k]))
    start = 0
    while start < len(order):
        n = max(1, size // len(ids[order[start]]))
        some = [torch.tensor(ids[k]) for k in order[start : start + n]]
        lengths = torch.tensor([len(row) for row in some])[:, None]  # [b, 1]
        padded = torch.nn.utils.rnn.pad_sequence(some, batch_first=True).to(encoder.device)  # [b, n]
        mask = (torch.arange(padded.shape[1]) < lengths).long().to(encoder.device)  # [b, n]
        encoder.model(input_ids=padded, attention_mask=mask)
        start += n


def explaining(encoder: TextEncoder, texts: list[str], device: str) -> Iterator[Row]:
    """Measure explanations of words: the engine on one margin, and the classifier's ``explain_iter``."""
    classifier = vr.RoutingClassifier(encoder, max_epochs=1, cache=False, estimate=False, device=device)
    classifier.set_params(head_options={"n_members": 1}, verbose=False).fit(texts[:64], ["a", "b"] * 32)
    dtype = str(encoder.dtype).removeprefix("torch.")

    def margins(size: int, n: int = len(texts)) -> None:
        for start in range(0, n, size):
            some = encoder.tokenize(texts[start : start + size])
            rows = [rows_of(text, chunk_step(encoder)) for text in some]
            split_texts(encoder, classifier.head_, some, [[0, 1]] * len(some), rows, margin=True)

    few = min(len(texts), 256)
    ways: dict[str, Callable[[], object]] = {
        "one margin, one by one": lambda: margins(1, few),
        "one margin, batch 32": lambda: margins(32),
        "one margin, batches of 512": lambda: margins(512),
        "explain_iter of one class": lambda: list(classifier.explain_iter(texts, classes=["a"])),
        "explain_iter of both classes": lambda: list(classifier.explain_iter(texts)),
    }
    for name, run in ways.items():
        for _ in range(3):  # captures graphs, each for the third batch of its shape
            run()
        n = few if "one by one" in name else len(texts)
        yield f"words of {n} sentences, {dtype}: {name}", n / seconds(run), "texts/s"


def fitting(encoder: TextEncoder, data: Path, n: int, device: str) -> Iterator[Row]:
    """Measure ``fit`` with the default recipe, 3 epochs, when all hidden states are in the cache."""
    texts, labels = labelled_phrases(data, n)
    with tempfile.TemporaryDirectory() as folder:
        options = {"cache": folder, "cache_bytes": 40 * GIB, "device": device, "verbose": False}
        cache = FeatureCache(folder, encoder.key, 40 * GIB)
        yield f"{len(texts)} phrases: first pass", seconds(Features(encoder, texts, cache).prepare), "s"
        for n_members in (1, 3):
            members = {"n_members": n_members}
            classifier = vr.RoutingClassifier(encoder, max_epochs=3, head_options=members, **options)
            with busy(device) as shares:
                took = seconds(lambda classifier=classifier: classifier.fit(texts, labels))
            case = f"fit of {len(texts)} phrases, 3 epochs, members {n_members}"
            yield f"{case}: time", took, "s"
            if shares:
                yield f"{case}: share of time in which the GPU works", sum(shares) / len(shares), "%"


@contextmanager
def busy(device: str) -> Iterator[list[float]]:
    """Collect how busy the GPU is, in percent, five times per second. The list stays empty on a CPU."""
    shares: list[float] = []
    if not common.is_cuda(device) or not shutil.which("nvidia-smi"):
        yield shares
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=lambda: shares.extend(map(float, process.stdout or ())))
        reader.start()
        try:
            yield shares
        finally:
            process.terminate()
            reader.join()


# Runs that are killed


class Held:
    """Made-up hidden states of texts of 3 to 60 positions."""

    def __init__(self, n: int, depth: int, d_emb: int):
        generator = torch.Generator().manual_seed(0)
        self.position_bytes = 4 * depth * d_emb
        self.lengths = [3 + 7 * k % 58 for k in range(n)]
        self.states = [torch.randn(m, depth, d_emb, generator=generator).half() for m in self.lengths]

    def batch(self, which: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence([self.states[k] for k in which], batch_first=True)
        lengths = torch.tensor([self.lengths[k] for k in which])[:, None]  # [b, 1]
        return padded.to(device), (torch.arange(padded.shape[1]) < lengths).to(device)


def learn(folder: str, device: str, steps: int) -> None:
    """Train a head with checkpoints, and save its weights. This process may be killed at any moment."""
    torch.set_num_threads(1)
    n, depth, d_emb = (512, 7, 384) if common.is_cuda(device) else (64, 2, 16)
    targets = torch.nn.functional.one_hot(torch.arange(n) % 2).float()  # [n, 2]
    task = Task(Held(n, depth, d_emb), targets, list(range(n)), [])
    head = make_head("routing", seed=0, d_emb=d_emb, depth=depth, n_cls=2)
    recipe = Recipe(max_epochs=max(1, steps * Recipe.batch_size // n))
    place = Path(folder)
    (place / "started").touch()
    options: dict[str, Any] = {"checkpoint": place / "checkpoint", "checkpoint_seconds": 0.1}
    train(head, task, recipe, accelerator=make_accelerator(device), **options)
    torch.save({name: p.detach().cpu() for name, p in head.named_parameters()}, place / "part")
    os.replace(place / "part", place / "weights")


def run_once(place: Path, device: str, steps: int, kill_after: float | None = None) -> float:
    """Run ``learn`` in a new process, killed after some seconds. Return the seconds it ran, -1 if killed."""
    context = multiprocessing.get_context("forkserver")  # forked from a process that never used the GPU
    context.set_forkserver_preload(["vecroute.training", "vecroute.heads", "common"])
    (place / "started").unlink(missing_ok=True)
    process = context.Process(target=learn, args=(str(place), device, steps))
    process.start()
    while not (place / "started").exists() and process.is_alive():
        time.sleep(0.01)
    start = time.perf_counter()
    process.join(kill_after)
    if process.is_alive() and process.pid:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        return -1.0
    if process.exitcode:
        raise RuntimeError(f"training ended with {process.exitcode}")
    return time.perf_counter() - start


def killing(device: str, n: int, steps: int) -> Iterator[Row]:
    """Kill runs at random moments, resume them, and compare their weights with an undisturbed run."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder) / "undisturbed"
        undisturbed.mkdir()
        longest = run_once(undisturbed, device, steps)
        expected = torch.load(undisturbed / "weights")

        def one(k: int) -> tuple[bool, bool]:
            place = Path(folder) / str(k)
            place.mkdir()
            killed = run_once(place, device, steps, random.Random(k).uniform(0, longest)) < 0
            if killed:
                run_once(place, device, steps)
            found = torch.load(place / "weights")
            return killed, all(torch.equal(tensor, expected[name]) for name, tensor in found.items())

        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = [same for killed, same in pool.map(one, range(n)) if killed]
        yield f"runs of {steps} steps killed at random moments and resumed", len(results), "runs"
        yield "runs killed and resumed: with the weights of an undisturbed run", sum(results), "runs"


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst/")
    parser.add_argument("--encoder", default="minilm", help="name of an encoder, or its folder")
    parser.add_argument("--dtype", choices=DTYPES, help="of the encoder; by default the library's")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args(arguments)
    short, device, data = options.short, options.device, options.data
    dtype = DTYPES.get(options.dtype)
    encoder = encoder_of(options.encoder, device, dtype)
    n_epochs = (64,) if short else (2048, 67_000)
    n_states, n_explained, n_large = (96, 64, 96) if short else (20_000, 2048, 8192)

    def of_a_large_encoder() -> Iterator[Row]:
        sizes = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 96} if short else LARGE
        other = encoder_of(options.encoder, device, dtype, **sizes)
        yield from states(other, sentences(data, n_large), device, f"12 x 768, {n_large} texts")
        for what, value, unit in epochs(other, data, n_epochs[:1], device):
            yield f"12 x 768, {what}", value, unit

    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "epochs": lambda: epochs(encoder, data, n_epochs, device),
        "states": lambda: states(encoder, sentences(data, n_states), device, f"{n_states} texts"),
        "explain": lambda: explaining(encoder, sentences(data, n_explained), device),
        "large": of_a_large_encoder,
        "fit": lambda: fitting(encoder, data, n_epochs[-1], device),
        "kills": lambda: killing(device, options.kills, 64 if short else STEPS_KILLED),
    }
    kind = {"encoder": Path(options.encoder).name, "dtype": str(encoder.dtype).removeprefix("torch.")}
    about, failed = kind | common.about(device), []
    for name in options.parts:
        rows, start = [], time.perf_counter()
        try:
            for what, value, unit in parts[name]():
                print(f"{what:90} {value:10.4g} {unit}", flush=True)
                rows.append({"what": what, "value": float(value), "unit": unit} | about)
        except Exception:  # the other parts are measured all the same
            traceback.print_exc()
            failed.append(name)
        if rows:
            common.append(options.results / "throughput.csv", rows)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
